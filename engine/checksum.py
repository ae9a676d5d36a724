"""The CRC-32 of records, row files and checkpoints, with zlib's polynomial."""

try:
    from isal.isal_zlib import crc32 as crc32  # several times faster than zlib's
except ImportError:  # pyproject.toml requires isal only for processors that it has wheels for
    from zlib import crc32 as crc32
