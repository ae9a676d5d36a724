"""A script that `rocksdb_files.py` runs in another process. The script starts fast: it loads only the native core."""

from __future__ import annotations

import errno
import os
import resource
import struct
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

HEADER = struct.Struct("<BI")  # field 1: a bucket, or a code such as READY; field 2: how many rows or bytes follow
READY = 253  # the code in the first header; if it is missing, this Python could not run the script
END = 254  # the code after the last row
FAILED = 255  # the code if RocksDB refused the files; field 2 is how many bytes of error text follow

_ROW_BYTES = 20  # bytes of a row without its values; the values are `width` words of 4 bytes


def main(core: str, folder: str, width: int, num_shards: int, chunk_rows: int) -> None:
    """Read all rows from RocksDB's files in `folder`, and write them to stdout, at most `chunk_rows` per header."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    spec = spec_from_file_location("_core", core)
    assert spec is not None
    assert spec.loader is not None
    native: Any = module_from_spec(spec)
    spec.loader.exec_module(native)
    rows = memoryview(bytearray(chunk_rows * (_ROW_BYTES + 4 * width)))
    _write(HEADER.pack(READY, 0))
    try:
        tier = native.RocksTier(
            folder,
            width,
            create_if_missing=False,
            read_only=True,
            num_shards=num_shards,
            block_bytes=4096,
            data_cache_bytes=0,
            index_bytes=0,
            write_buffer_bytes=1 << 20,
            read_mode="buffered",
            async_io=False,
            max_read_threads=1,
            options=[],
        )
        scan = tier.scan()
        while (chunk := scan.next(rows, chunk_rows))[1]:
            bucket, count = chunk
            _write(HEADER.pack(bucket, count))
            _write(rows[: count * (_ROW_BYTES + 4 * width)])
    except BrokenPipeError:
        os._exit(1)  # the parent process has stopped reading
    except Exception as error:
        text = (os.strerror(errno.ENOMEM) if isinstance(error, MemoryError) else str(error)).encode()
        _write(HEADER.pack(FAILED, len(text)))
        _write(memoryview(text))
    else:
        _write(HEADER.pack(END, 0))
    os._exit(0)  # a normal exit would close the databases, and take longer


def _write(data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(1, rest) :]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
