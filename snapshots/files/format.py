"""A snapshot's manifest, and the layout of its row files. docs/snapshots.md describes both."""

from __future__ import annotations

import dataclasses
import errno
import math
import re
from copy import deepcopy
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple

import numpy as np

from ...engine import _core
from ...engine.checks import is_folder_name
from ...engine.durable import choose_remedy, read_record_bytes, seal, unseal
from ...engine.errors import SnapshotError, StoreError
from ...engine.optim.kernel import LIMITS, load_kernels
from ...engine.optim.past_rates import are_past_rates_valid
from ...engine.options.table_names import TABLE_NAMES, are_table_names
from ...engine.row_format import BUCKETS, MAX_STEP, ROW_KEY_DTYPE, STATE_DTYPES, STORED_DTYPES, RowArray, RowFormat
from ...engine.store.table_counts import TABLE_ROWS

_HEADER_STEP = 256  # bytes
MAX_SHARDS = 1024

_ROW_FILE_NAME = re.compile(r"(bucket|deleted)-([0-9]{2})(?:-([0-9]{4}))?\.npy")
_MAX_COUNT = 1 << 62
_HASH_SLOTS = 1 << 16  # 16 bits of the hash choose the shard
FORMAT = 3  # the format of a manifest
MANIFEST = "manifest.msgpack"
ROCKSDB = "rocksdb"  # a RocksDB checkpoint's subfolder that contains RocksDB's files
Kind = Literal["full", "incremental", "checkpoint"]
KINDS: tuple[Kind, ...] = ("full", "incremental", "checkpoint")
_MAX_WIDTH = 1 << 20
_MAX_DIM = 1 << 16  # embedding dimension
LAST_SEQUENCE = (1 << 48) - 1
_MAX_DEPTH = 32  # how deeply lists and maps may be nested in a table's description
_MAX_FIELDS = 1000
_MAX_DESCRIPTION = 12 << 20  # maximum bytes of a table's description; manifests and MARK need space for other fields
LIVE_VERSION = "version"  # this field of the clean marker stores the live rows' version
# the fields of MARK that do not belong to the clean marker
FOLDER_FIELDS = ("format", "place", "ranks", "store", "record", "link")
SHARD_FIELD = "share"  # this field of a shard's MARK stores the shard's rank
LIVE_FILES = "live_files"  # this field of MARK identifies the files of the live rows
_TABLE_ROWS = "row_counts"  # this field of a manifest's description stores `Manifest.table_rows`, if it is known
CHANGED_KEYS = "changed"  # this field of the clean marker describes the file CHANGED
# fields of the clean marker that are not in a snapshot's description
MARKER_FIELDS = ("live", "rows", "shards", TABLE_ROWS, SHARD_FIELD, LIVE_VERSION, LIVE_FILES, CHANGED_KEYS)
_ROCKSDB_FILE = re.compile(r"shard-([0-9]{1,2})/(CURRENT|MANIFEST-[0-9]{1,20}|OPTIONS-[0-9]{1,20}|[0-9]{1,20}\.sst)")
_STATE_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}(?<!_padding)")
_MAX_NAMED = 16  # maximum number of optimizer states that are stored as named NumPy fields
_ROW_FIELDS = ("table", "table_name", "key", "embedding", "values", "updates", "step")
_ID = re.compile(r"[0-9a-f]{32}")


class HashShard(NamedTuple):
    """The rows of shard `shard_index`. Hash values are divided equally among `num_shards` shards."""

    shard_index: int
    num_shards: int

    @property
    def hash_range(self) -> range:
        """The range of hash values (of 16 bits) whose rows are in this shard."""
        return range(*(-(-i * _HASH_SLOTS // self.num_shards) for i in (self.shard_index, self.shard_index + 1)))

    def overlaps(self, other: HashShard) -> bool:
        """True if a row can be in both shards."""
        return max(self.hash_range.start, other.hash_range.start) < min(self.hash_range.stop, other.hash_range.stop)

    def select_rows(self, rows: RowArray) -> RowArray:
        owners = _core.find_owners(rows["table"].copy(), rows["key"].copy(), self.num_shards)
        return rows[owners == self.shard_index]


@dataclasses.dataclass(frozen=True)
class RowFile:
    """A file of rows or deleted keys. bytes: the size with the header. crc32: the checksum without the header."""

    rows: int
    bytes: int
    crc32: int


def make_bucket_name(bucket: int, shard: int | None = None) -> str:
    """Returns the name of the file with a bucket's rows. With `shard`, the file has only the rows of this shard."""
    return f"bucket-{bucket:02d}.npy" if shard is None else f"bucket-{bucket:02d}-{shard:04d}.npy"


def make_deleted_name(bucket: int, shard: int | None = None) -> str:
    """Returns the name of the file with a bucket's deleted keys. With `shard`, it has only the keys of this shard."""
    return make_bucket_name(bucket, shard).replace("bucket", "deleted")


def is_deletion(name: str) -> bool:
    """True if a snapshot's file contains keys of deleted rows."""
    return name.startswith("deleted")


def parse_bucket(name: str) -> int:
    return int(name.split("-")[1][:2])


def parse_shard_index(name: str) -> int | None:
    """Returns the shard index in a file's name, or None if the snapshot is not sharded."""
    words = name.removesuffix(".npy").split("-")
    return int(words[2]) if len(words) > 2 else None


def decode_file(name: str, entry: Any, row_format: RowFormat, num_shards: int | None) -> RowFile:
    """Check and decode a file's entry in a manifest. `num_shards` is the snapshot's. Raises ValueError."""
    match = _ROW_FILE_NAME.fullmatch(name)
    if match is None or int(match[2]) >= BUCKETS or (num_shards is None) != (match[3] is None):
        raise ValueError(f"it names a foreign file {name!r}")
    _require(num_shards is None or int(match[3]) < num_shards, f"it names {name!r}, and it has {num_shards} parts")
    _require(type(entry) is dict and entry.keys() == {"rows", "bytes", "crc32"}, f"the entry of {name} is invalid")
    _require(all(map(_is_count, entry.values())), f"the entry of {name} has values that are not counts")
    file = RowFile(**entry)
    fits_rows = file.rows > 0 and file.bytes == count_file_bytes(find_dtype(name, row_format), file.rows)
    _require(fits_rows, f"the row count and size of {name} disagree")
    return file


def make_validator(description: dict[str, Any], bucket: int, shard: HashShard | None = None) -> _core.RowValidator:
    """Returns a check that finds rows (or keys of deleted rows) that do not belong to this bucket and shard."""
    index, num_shards = shard or (0, 1)
    is_int32, last_step = description["key_type"] == "int32", description["step"]
    return _core.RowValidator(bucket, len(description["tables"]), is_int32, last_step, index, num_shards)


def find_dtype(name: str, row_format: RowFormat) -> np.dtype[np.void]:
    """Returns the dtype of the array in a snapshot's file."""
    return ROW_KEY_DTYPE if is_deletion(name) else row_format.dtype


@cache  # a save calls this function for thousands of files
def count_header_bytes(dtype: np.dtype[np.void]) -> int:
    """Returns the header size of a row file, for any number of rows: 256 bytes if all numbers are float32."""
    return -(-(len(_format_header(dtype, _MAX_COUNT)) + 11) // _HEADER_STEP) * _HEADER_STEP


def count_file_bytes(dtype: np.dtype[np.void], num_rows: int) -> int:
    return count_header_bytes(dtype) + num_rows * dtype.itemsize


@lru_cache(maxsize=1 << 14)  # a reader first checks all files' headers, then opens the files again
def make_npy_header(dtype: np.dtype[np.void], num_rows: int) -> bytes:
    """Returns the header of a row file. All NumPy versions get the same header bytes."""
    size = count_header_bytes(dtype)
    magic = b"\x93NUMPY\x01\x00" + (size - 10).to_bytes(2, "little")
    return magic + _format_header(dtype, num_rows).ljust(size - len(magic) - 1) + b"\n"


def _format_header(dtype: np.dtype[np.void], num_rows: int) -> bytes:
    return f"{{'descr': {dtype.descr!r}, 'fortran_order': False, 'shape': ({num_rows},), }}".encode()


@dataclasses.dataclass(frozen=True)
class Parent:
    """The parent of an incremental snapshot: the snapshot in the same folder with this name and id."""

    name: str
    id: str


@dataclasses.dataclass(frozen=True)
class RocksDBFiles:
    """The files of a RocksDB checkpoint."""

    shards: int  # the number of databases
    files: dict[str, dict[str, int]]  # maps shard-N/<file> to the file's `bytes` and `crc32c`


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A snapshot's manifest: it describes the snapshot and lists the snapshot's files.

    Attributes:
        kind: "full", "incremental" or "checkpoint".
        id: 32 hex digits, unique to the snapshot.
        parent: the parent of an incremental snapshot, or None.
        description: describes the table that the rows belong to.
        rows: the number of rows in the table after a load of this snapshot.
        deleted: how many keys of deleted rows are in the snapshot's own files.
        files: the snapshot's row files, sorted by name.
        rocksdb: RocksDB's files if `kind` is "checkpoint", or None.
        created: time of the save, in nanoseconds since 1970 (UTC).
        sequence: a number that is larger than the sequence of every earlier snapshot in the folder.
        num_shards: the number of shards, each with its own files; None if one process wrote all rows.
        table_rows: the number of rows in each table after a load of this snapshot, if the writer knew them.
    """

    kind: Kind
    id: str
    parent: Parent | None
    description: dict[str, Any]
    rows: int
    deleted: int
    files: dict[str, RowFile]
    rocksdb: RocksDBFiles | None
    created: int
    sequence: int
    num_shards: int | None = None
    table_rows: list[int] | None = None

    def __repr__(self) -> str:
        rocksdb = {} if self.rocksdb is None else self.rocksdb.files
        files = f"{len(self.files) + len(rocksdb)} files of {self.total_bytes:,} bytes"
        step = self.description["step"]
        return f"<{self.kind} snapshot of {self.description['name']!r}: {self.rows:,} rows at step {step:,}, {files}>"

    @cached_property
    def row_format(self) -> RowFormat:
        """The layout of a row, including optimizer state."""
        return RowFormat.from_description(self.description)

    @property
    def num_entries(self) -> int:
        """The number of rows plus the number of deleted keys, in the snapshot's own files."""
        return self.rows if self.rocksdb is not None else sum(file.rows for file in self.files.values())

    @property
    def total_bytes(self) -> int:
        """The size of all the snapshot's files except the manifest."""
        rocksdb = [] if self.rocksdb is None else [file["bytes"] for file in self.rocksdb.files.values()]
        return sum(file.bytes for file in self.files.values()) + sum(rocksdb)

    def encode(self) -> bytes:
        """Returns the manifest file's content. Raises ValueError if `decode` would refuse this content."""
        fields = {"format": FORMAT, "parts": self.num_shards} | {name: getattr(self, name) for name in _FIELDS}
        fields["files"] = {name: vars(file) for name, file in self.files.items()}
        if self.table_rows is not None:
            fields["description"] = self.description | {_TABLE_ROWS: self.table_rows}
        fields |= {name: vars(fields[name]) for name in ("parent", "rocksdb") if fields[name] is not None}
        data = seal(fields)
        Manifest.decode(data)
        return data

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """Decode a manifest file's content. Invalid or forged content raises a ValueError that names the problem."""
        decode = Manifest._decode if len(data) < 1 << 16 else Manifest._decode.__wrapped__
        manifest: Manifest = decode(data)
        return dataclasses.replace(manifest, description=deepcopy(manifest.description), files={**manifest.files})

    @staticmethod
    @lru_cache(maxsize=256)  # a save reads each manifest of a store several times
    def _decode(data: bytes) -> Manifest:
        value = unseal(data)
        _require(type(value) is dict and _is_count(value.get("format")), "it is not a manifest")
        format = value["format"]
        problem = f"its format is {format}, but this tierbed reads {FORMAT}: use the one that wrote it"
        _require(format == FORMAT, problem)
        _require(value.keys() == {*_FIELDS, "format", "parts"}, "fields are missing or foreign")
        check_description(value["description"])
        row_format, num_shards = RowFormat.from_description(value["description"]), value["parts"]
        _require(
            num_shards is None or (_is_count(num_shards) and 0 < num_shards <= MAX_SHARDS),
            f"'parts' is {num_shards!r}, but a snapshot has 1 to {MAX_SHARDS} parts",
        )
        kind = value["kind"]
        _require(kind in KINDS, f"its kind is {kind!r} instead of one of {', '.join(KINDS)}")
        _require(_is_id(value["id"]), "'id' is not 32 hex digits")
        _check_size(value["description"])
        for field in ("rows", "deleted", "created", "sequence"):
            _require(_is_count(value[field]), f"{field!r} is not a count")
        _require(value["sequence"] <= LAST_SEQUENCE, f"its sequence is beyond {LAST_SEQUENCE}, which no save reaches")
        parent, rocksdb = _decode_parent(value["parent"]), _decode_rocksdb(value["rocksdb"])
        _require(
            (parent is not None) == (kind == "incremental"), "only an incremental snapshot has, and needs, a parent"
        )
        _require((rocksdb is not None) == (kind == "checkpoint"), "only a checkpoint has, and needs, RocksDB's files")
        files = value["files"]
        _require(type(files) is dict and all(type(name) is str for name in files), "'files' is not a map by file name")
        files = {name: decode_file(name, entry, row_format, num_shards) for name, entry in sorted(files.items())}
        rows, deleted = (sum(file.rows for name, file in files.items() if is_deletion(name) == flag) for flag in (0, 1))
        _require(deleted == value["deleted"], "'deleted' is not the sum over the files")
        _require(kind == "incremental" or deleted == 0, "only an incremental snapshot deletes rows")
        if kind == "full":
            _require(rows == value["rows"], "'rows' is not the sum over the files")
        else:
            _require(kind == "incremental" or not (files or num_shards), "a checkpoint has neither row files nor parts")
        decoded = {"parent": parent, "files": files, "rocksdb": rocksdb, "num_shards": num_shards}
        if _TABLE_ROWS in value["description"]:
            decoded["table_rows"] = counts = value["description"].pop(_TABLE_ROWS)
            _require(type(counts) is list and all(map(_is_count, counts)), f"{_TABLE_ROWS!r} is not a list of counts")
        return Manifest(**{field: value[field] for field in _FIELDS} | decoded)


_FIELDS = [field.name for field in dataclasses.fields(Manifest) if field.name not in ("num_shards", "table_rows")]


def _decode_parent(value: Any) -> Parent | None:
    if value is None:
        return None
    _require(type(value) is dict and value.keys() == {"name", "id"}, "'parent' is not a map of name and id")
    _require(is_folder_name(value["name"]) and _is_id(value["id"]), "'parent' has an invalid name or id")
    return Parent(**value)


def _decode_rocksdb(value: Any) -> RocksDBFiles | None:
    if value is None:
        return None
    _require(type(value) is dict and value.keys() == {"shards", "files"}, "'rocksdb' is not a map of shards and files")
    shards, files = value["shards"], value["files"]
    _require(_is_count(shards) and 0 < shards <= BUCKETS, f"'rocksdb' has invalid shards: {shards!r}")
    _require(type(files) is dict and all(type(name) is str for name in files), "'rocksdb' has no map of files")
    for name, entry in files.items():
        match = _ROCKSDB_FILE.fullmatch(name)
        _require(match is not None and int(match[1]) < shards, f"it names a foreign file {name!r}")
        _require(type(entry) is dict and entry.keys() == {"bytes", "crc32c"}, f"the entry of {name} is invalid")
        _require(all(map(_is_count, entry.values())), f"the entry of {name} has values that are not counts")
    return RocksDBFiles(shards, dict(sorted(files.items())))


def check_description(value: Any) -> None:
    """Raises ValueError if a field in a table's description is missing or invalid. Allows additional fields."""
    _require(type(value) is dict, "description is not a map")
    field_checks = {
        "name": lambda x: type(x) is str,
        "key_type": lambda x: x in ("int32", "int64", "uint64"),
        "dtype": lambda x: type(x) is str and x in STORED_DTYPES,
        "columns": lambda x: type(x) is list and all(_is_count(c) and c > 0 for c in x) and 0 < sum(x) <= _MAX_DIM,
        "width": lambda x: _is_count(x) and 0 < x <= _MAX_WIDTH,
        "optimizer": lambda x: x is None or type(x) is str,
        "states": lambda x: type(x) is list and all(type(s) is str for s in x),
        "state_widths": lambda x: type(x) is list and all(_is_count(w) and 0 < w <= _MAX_WIDTH for w in x),
        "initial": lambda x: type(x) is list and all(type(i) is float for i in x),
        "hyper": lambda x: type(x) is list and all(type(h) is float for h in x),
        "seed": lambda x: type(x) is int,
        "tables": lambda x: type(x) is list,
        "padding_idx": lambda x: x is None or type(x) is int,
        "step": lambda x: _is_count(x) and x <= MAX_STEP,
    }
    for field, check in field_checks.items():
        _require(field in value and check(value[field]), f"description has no valid {field!r}")
    are_valid = TABLE_NAMES not in value or are_table_names(value[TABLE_NAMES], len(value["tables"]))
    _require(are_valid, f"description has {TABLE_NAMES!r} that are not a unique name or None for each of its tables")
    _require(_is_plain(value, _MAX_DEPTH), "description holds values that JSON cannot store")
    dim, widths = sum(value["columns"]), value["state_widths"]
    for field in ("state_widths", "initial"):
        _require(len(value[field]) == len(value["states"]), f"description needs one value in {field!r} for each state")
    _require(all(w in (1, dim) for w in widths), "description has 'state_widths' that are neither 1 nor the dimension")
    _check_types(value, dim)
    width = RowFormat.from_description(value).width
    _require(width == value["width"], "description has a 'width' that does not fit its columns and states")
    _check_rule(value, dim)


def _check_types(value: dict[str, Any], dim: int) -> None:
    """Raises ValueError if the list of state dtypes is invalid. A description of float32 rows has none."""
    if STATE_DTYPES not in value:
        _require(value["dtype"] == "float32", f"description has no {STATE_DTYPES!r}, which its 'dtype' needs")
        return
    types, widths = value[STATE_DTYPES], value["state_widths"]
    valid = type(types) is list and len(types) == len(widths) and all(t in ("float32", "bfloat16") for t in types)
    _require(valid, f"description has no valid {STATE_DTYPES!r}")
    _require({value["dtype"], *types} != {"float32"}, f"description has {STATE_DTYPES!r}, but all numbers are float32")
    narrow = [width for width, type in zip(widths, types, strict=True) if type != "float32"]
    are_first = types == ["bfloat16"] * len(narrow) + ["float32"] * (len(types) - len(narrow))
    _require(
        are_first and all(w == dim for w in narrow),
        f"description has {STATE_DTYPES!r} of 2 bytes after float32, or for a state without one number per column",
    )
    names = value["states"]
    _require(len(names) <= _MAX_NAMED, f"description has 2-byte numbers and more than {_MAX_NAMED} 'states'")
    _require(
        len({*names}) == len(names) and all(_STATE_NAME.fullmatch(name) and name not in _ROW_FIELDS for name in names),
        "description has 'states' whose names cannot be field names of a row",
    )


def _check_size(description: dict[str, Any]) -> None:
    """Raises ValueError if a table's description is too large or uses a field name that the file MARK reserves."""
    reserved = description.keys() & {*MARKER_FIELDS, *FOLDER_FIELDS}
    _require(not reserved, f"description has field names that MARK uses: {', '.join(sorted(reserved))}")
    _require(len(description) <= _MAX_FIELDS, f"description has more than {_MAX_FIELDS} fields")
    size = len(seal(description))
    _require(size <= _MAX_DESCRIPTION, f"description has {size} bytes, more than {_MAX_DESCRIPTION}")


def _is_plain(value: Any, depth: int) -> bool:
    """True if JSON can store `value` unchanged. JSON cannot store bytes, NaN or infinities."""
    if isinstance(value, dict):
        return depth > 0 and all(isinstance(name, str) and _is_plain(item, depth - 1) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return isinstance(value, (NoneType, int, str)) or (isinstance(value, float) and math.isfinite(value))


def _check_rule(value: dict[str, Any], dim: int) -> None:
    """Raises ValueError if states or `hyper` do not fit the optimizer. `hyper` may be empty before any update."""
    name = value["optimizer"]
    try:
        kernel = load_kernels()[name]
    except KeyError:
        return
    states = list(zip(kernel.states, kernel.state_widths(dim), strict=True))
    stored = list(zip(value["states"], value["state_widths"], strict=True))
    _require(stored == states, f"description has 'states' and 'state_widths' {stored}, and rule {name!r} has {states}")
    types = value.get(STATE_DTYPES, [])[: len(kernel.element_states)]
    _require(len({*types}) <= 1, f"description has {STATE_DTYPES!r} {types}, but rule {name!r} needs equal ones")
    row_types = value.get(STATE_DTYPES, [])[len(kernel.element_states) :]
    _require(
        {*row_types} <= {"float32"}, f"description has {STATE_DTYPES!r} {row_types} for states with one number per row"
    )
    count, limit = len(value["hyper"]), len(kernel.all_hyperparams) + len(LIMITS)
    has_past_rates = (
        kernel.catch_up is not None and count > limit and are_past_rates_valid(value["hyper"][limit:], value["step"])
    )
    is_valid = count in (0, limit) or has_past_rates
    _require(is_valid, f"description has 'hyper' of {count} numbers, and rule {name!r} takes {limit}")


def name_hyperparams(description: dict[str, Any]) -> dict[str, Any]:
    """Returns the description with `hyper` as a dict by name. For an unknown optimizer, `hyper` does not change."""
    try:
        names = (*load_kernels()[description["optimizer"]].all_hyperparams, *LIMITS)
    except KeyError:
        return description
    hyper = dict(zip(names, description["hyper"], strict=False))  # `hyper` is empty before the first update
    return {**description, "hyper": hyper}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _is_id(value: Any) -> bool:
    return type(value) is str and _ID.fullmatch(value) is not None


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def is_compatible(older: dict[str, Any], newer: dict[str, Any]) -> bool:
    """True if rows from a table described by `older` are valid in a table described by `newer`."""
    same_keys = all(older[field] == newer[field] for field in ("key_type", "columns"))
    has_same_row_format = RowFormat.from_description(older).dtype == RowFormat.from_description(newer).dtype
    return same_keys and has_same_row_format and len(older["tables"]) <= len(newer["tables"])


def check_name(name: str) -> None:
    """Raises SnapshotError for an invalid name. Valid names: 1 to 200 printable bytes, no separator or leading dot."""
    if not is_folder_name(name):
        raise SnapshotError(
            f"snapshot name {name!r} cannot be used: give 1 to 200 printable bytes, "
            "without '/' and '\\' and without a '.' at the start"
        )


def read_snapshot_id(folder: Path) -> str:
    """Returns the id of the snapshot in a folder, or "" if the folder contains no readable snapshot.

    If this process is out of file descriptors or memory, the id remains unknown, and StoreError is raised.
    """
    try:
        return str(unseal(read_record_bytes(folder / MANIFEST))["id"])
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            return ""
        remedy = choose_remedy(error, "free memory")
        raise StoreError(f"the id of snapshot {str(folder)!r} cannot be read: {error}: {remedy}") from error
    except (ValueError, TypeError, KeyError):
        return ""
