"""The list of RocksDB options that users may set. Other options are refused, because some values crash the process.

Tests set each option to both ends of its range, alone and combined (tests/store/test_rocksdb_allowed.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from .. import _core
from ..checks import as_number
from ..errors import OptionError

BLOCK_TABLE = "block_based_table_factory"
UNIVERSAL_COMPACTION = "compaction_options_universal"
AllowedValues = list[str | tuple[float, float]]  # strings, and closed ranges of numbers
KB, MB, GB, TB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_UNITS = {"": 1, "k": KB, "m": MB, "g": GB, "t": TB}
_BOOL_VALUES: AllowedValues = ["false", "true"]
# Not kBZip2Compression: decompressing a block takes milliseconds, and every row read may decompress a block.
_COMPRESSIONS = ("NoCompression", "SnappyCompression", "ZlibCompression", "LZ4Compression", "LZ4HCCompression", "ZSTD")
_COMPRESSION_VALUES: AllowedValues = [f"k{name}" for name in _COMPRESSIONS]
_BITS = (4, 8, 10, 12, 16, 20)  # filter bits per row

# {purpose: {option: its allowed values}}. "option.field" is a field of a struct option.
ALLOWED_OPTIONS: dict[str, dict[str, AllowedValues]] = {
    "memory": {
        "write_buffer_size": [(64 * KB, 512 * MB)],
        "max_write_buffer_number": [(2, 64)],
        "min_write_buffer_number_to_merge": [(1, 32)],
        "db_write_buffer_size": [(0, 0), (MB, 64 * GB)],
        "memtable_prefix_bloom_size_ratio": [(0.0, 0.05)],
        "memtable_whole_key_filtering": _BOOL_VALUES,
    },
    "compaction": {
        "compaction_style": ["kCompactionStyleLevel", "kCompactionStyleUniversal"],
        "compaction_pri": [
            "kByCompensatedSize", "kOldestLargestSeqFirst", "kOldestSmallestSeqFirst", "kMinOverlappingRatio",
        ],
        "level0_file_num_compaction_trigger": [(2, 100)],
        "level0_slowdown_writes_trigger": [(20, 1000)],
        "level0_stop_writes_trigger": [(36, 1000)],
        "max_bytes_for_level_base": [(MB, TB)],
        "max_bytes_for_level_multiplier": [(2.0, 100.0)],
        "target_file_size_base": [(MB, 64 * GB)],
        "target_file_size_multiplier": [(1, 10)],
        "compaction_readahead_size": [(0, 64 * MB)],
        "disable_auto_compactions": _BOOL_VALUES,
        f"{UNIVERSAL_COMPACTION}.size_ratio": [(0, 100)],
        f"{UNIVERSAL_COMPACTION}.min_merge_width": [(2, 16)],
        f"{UNIVERSAL_COMPACTION}.max_size_amplification_percent": [(10, 1000)],
        f"{UNIVERSAL_COMPACTION}.compression_size_percent": [(-1, 100)],
        f"{UNIVERSAL_COMPACTION}.stop_style": ["kCompactionStopStyleSimilarSize", "kCompactionStopStyleTotalSize"],
        f"{UNIVERSAL_COMPACTION}.allow_trivial_move": _BOOL_VALUES,
    },
    "compression": {
        "compression": _COMPRESSION_VALUES,
        "bottommost_compression": [*_COMPRESSION_VALUES, "kDisableCompressionOption"],
        "compression_opts.level": [(1, 19)],
        f"{BLOCK_TABLE}.enable_index_compression": _BOOL_VALUES,
    },
    "files": {
        "max_open_files": [(-1, -1), (20, MB)],
        "max_file_opening_threads": [(1, 64)],
        "use_fsync": _BOOL_VALUES,
        "allow_fallocate": _BOOL_VALUES,
        "bytes_per_sync": [(0, GB)],
        "writable_file_max_buffer_size": [(64 * KB, 64 * MB)],
        "paranoid_file_checks": _BOOL_VALUES,
        f"{BLOCK_TABLE}.format_version": [(2, 5)],
        f"{BLOCK_TABLE}.checksum": ["kCRC32c", "kxxHash", "kxxHash64", "kXXH3"],
        f"{BLOCK_TABLE}.block_align": ["false"],
    },
    "threads": {"max_background_jobs": [(1, 64)], "max_subcompactions": [(1, 16)]},
    "reads": {
        f"{BLOCK_TABLE}.block_size": [(512, 64 * KB)],
        f"{BLOCK_TABLE}.block_restart_interval": [(1, 128)],
        f"{BLOCK_TABLE}.index_block_restart_interval": [(1, 128)],
        f"{BLOCK_TABLE}.index_type": ["kBinarySearch", "kTwoLevelIndexSearch", "kBinarySearchWithFirstKey"],
        f"{BLOCK_TABLE}.data_block_index_type": ["kDataBlockBinarySearch", "kDataBlockBinaryAndHash"],
        f"{BLOCK_TABLE}.data_block_hash_table_util_ratio": [(0.1, 1.0)],
        f"{BLOCK_TABLE}.filter_policy": [f"{kind}:{n}" for kind in ("bloomfilter", "ribbonfilter") for n in _BITS],
        f"{BLOCK_TABLE}.optimize_filters_for_memory": _BOOL_VALUES,
        "optimize_filters_for_hits": _BOOL_VALUES,
        "advise_random_on_open": _BOOL_VALUES,
    },
}  # fmt: skip
_ALLOWED_VALUES = {name: allowed for options in ALLOWED_OPTIONS.values() for name, allowed in options.items()}
_STRUCTS = {name.split(".")[0] for name in _ALLOWED_VALUES if "." in name}
_READ_MODE_REMEDY = "give read_mode='buffered', 'mmap' or 'direct' instead"
_REMEDIES = {
    "allow_mmap_reads": _READ_MODE_REMEDY,
    "use_direct_reads": _READ_MODE_REMEDY,
    "use_direct_io_for_flush_and_compaction": _READ_MODE_REMEDY,
    "block_cache": "give rocksdb_cache_mb instead",
    "no_block_cache": "give rocksdb_cache_mb instead",
    "max_background_compactions": "give max_background_jobs instead",
    "max_background_flushes": "give max_background_jobs instead",
    "table_factory": f"give {BLOCK_TABLE}={{...}} instead",
}


def format_options(options: Mapping[str, Any] | str | None) -> str:
    """Return RocksDB's options string, `name=value;name={name=value}`, from a dict or a string. Raises OptionError."""
    if options is None:
        return ""
    if isinstance(options, Mapping):
        text = ";".join(f"{name}={_format_value(name, value)}" for name, value in options.items())
    elif isinstance(options, str):
        text = options.strip()
    else:
        raise OptionError(f"rocksdb_options={options!r}: give a dict of RocksDB options or RocksDB's options string")
    try:
        _check_options(text)
        _core.check_rocksdb_options(_core.parse_rocksdb_options(text))
    except ValueError as error:
        raise OptionError(f"rocksdb_options: {error}") from None
    return text


def format_allowed_values(allowed: AllowedValues) -> str:
    """Return the values that an option may have, as text for messages and docs."""
    ranges = [
        _format_number(low) if low == high else f"{_format_number(low)} to {_format_number(high)}"
        for low, high in (values for values in allowed if not isinstance(values, str))
    ]
    return ", ".join([value for value in allowed if isinstance(value, str)] + ranges)


def _check_options(text: str, prefix: str = "") -> None:
    """Raise ValueError if an option or value is not allowed. For a struct's fields, `prefix` is "struct."."""
    for name, value in _core.parse_rocksdb_options(text):
        path = prefix + name
        if path in _STRUCTS and "=" in value:
            _check_options(value, f"{path}.")
        elif path not in _ALLOWED_VALUES:
            raise ValueError(f"{path}={value!r}: {_find_remedy(path)}")
        elif not _is_allowed(value, _ALLOWED_VALUES[path]):
            one_of = "one of " if len(_ALLOWED_VALUES[path]) > 1 else ""
            raise ValueError(f"{path}={value!r}: give {one_of}{format_allowed_values(_ALLOWED_VALUES[path])}")


def _is_allowed(value: str, allowed: AllowedValues) -> bool:
    if value in allowed:
        return True
    for low, high in (values for values in allowed if not isinstance(values, str)):
        pattern = r"(-?[0-9]+)([kmgt]?)" if isinstance(low, int) else r"([0-9]+(?:\.[0-9]+)?)()"
        number = re.fullmatch(pattern, value.lower())
        if number is not None and low <= float(number[1]) * _UNITS[number[2]] <= high:
            return True
    return False


def _find_remedy(path: str) -> str:
    name = path.rpartition(".")[2]
    if path in _STRUCTS:
        fields = [name.rpartition(".")[2] for name in _ALLOWED_VALUES if name.startswith(f"{path}.")]
        return f"it is a struct; give its fields as {{'{path}': {{...}}}}, from {', '.join(fields)}"
    if name in _REMEDIES:
        return _REMEDIES[name]
    paths = {name.rpartition(".")[2]: name for name in _ALLOWED_VALUES}
    matches = difflib.get_close_matches(name, paths, 1, 0.9)
    problem = "it is not among the options tried with tierbed (docs/tiers.md lists them); "
    if not matches:
        return f"{problem}leave it out"
    struct, _, field = paths[matches[0]].rpartition(".")
    return f"{problem}did you mean {field}{f' in {struct}' if struct and not path.startswith(struct) else ''}?"


def _format_number(number: float) -> str:
    for suffix, unit in reversed(_UNITS.items()):
        if suffix and number and isinstance(number, int) and number % unit == 0:
            return f"{number // unit}{suffix.upper()}"
    return str(number)


def _format_value(name: object, value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ";".join(f"{field}={_format_value(field, inner)}" for field, inner in value.items()) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = value if isinstance(value, str) else as_number(value)
    if not isinstance(name, str) or text is None:
        raise OptionError(f"rocksdb_options: {name}={value!r}: give a name and a str, int, float, bool or dict")
    if not name.isidentifier() or (isinstance(value, str) and set(value) & set(";={}")):
        raise OptionError(
            f"rocksdb_options: {name}={value!r}: give one option's name, and its value without ';', '=' and braces. If "
            "the option has fields, give a dict of the fields"
        )
    return str(text)
