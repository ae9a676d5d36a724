"""Snapshot format 1: names, the manifest, and the header of a bucket file. `docs/snapshots.md` says it in prose."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from ..engine.errors import SnapshotError
from ..engine.optim.kernel import CLIPS
from ..engine.optim.rule import rule_named
from ..engine.store.contract import BUCKETS, row_dtype
from ..engine.store.durable import is_folder_name, seal, unseal

FORMAT = 1
MANIFEST = "manifest.msgpack"
HEADER_BYTES = 256
TEMPORARY = ".tmp-"

_MAX_WIDTH = 1 << 20
_MAX_COUNT = 1 << 62
_BUCKET_FILE = re.compile(r"bucket-([0-9]{2})\.npy")


@dataclasses.dataclass(frozen=True)
class BucketFile:
    """One bucket's file: how many rows, its size in bytes with the header, the crc32 of the rows' bytes."""

    rows: int
    bytes: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a snapshot holds.

    `files` is ordered by bucket; `created` is in ns since 1970, UTC; the latest snapshot has the largest `sequence`.
    """

    description: dict[str, Any]
    rows: int
    files: dict[str, BucketFile]
    created: int
    sequence: int

    @property
    def width(self) -> int:
        """Floats in a row, optimizer state included."""
        return int(self.description["width"])

    @property
    def total_bytes(self) -> int:
        """Size of all bucket files."""
        return sum(file.bytes for file in self.files.values())

    def encode(self) -> bytes:
        """The manifest file. Raises ValueError if `decode` would refuse it."""
        data = seal({"format": FORMAT, **dataclasses.asdict(self)})
        Manifest.decode(data)
        return data

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """Read a manifest file, trusting nothing in it. Raises ValueError saying what is wrong."""
        value = unseal(data)
        _require(type(value) is dict and _is_count(value.get("format")), "it is not a manifest")
        _require(
            value["format"] == FORMAT,
            f"its format is {value['format']}, and this tierbed reads {FORMAT}: use the version that wrote it",
        )
        fields = {field.name for field in dataclasses.fields(Manifest)}
        _require(value.keys() == fields | {"format"}, "fields are missing or foreign")
        check_description(value["description"])
        for field in ("rows", "created", "sequence"):
            _require(_is_count(value[field]), f"{field} is not a count")
        files = value["files"]
        _require(type(files) is dict and all(type(name) is str for name in files), "files is not a map of names")
        itemsize = row_dtype(value["description"]["width"]).itemsize
        files = {name: _decode_file(name, entry, itemsize) for name, entry in sorted(files.items())}
        _require(sum(file.rows for file in files.values()) == value["rows"], "rows is not the sum over the files")
        return Manifest(value["description"], value["rows"], files, value["created"], value["sequence"])


def _decode_file(name: str, entry: Any, itemsize: int) -> BucketFile:
    match = _BUCKET_FILE.fullmatch(name)
    _require(match is not None and int(match[1]) < BUCKETS, f"it names a foreign file {name!r}")
    _require(type(entry) is dict and entry.keys() == {"rows", "bytes", "crc32"}, f"the entry of {name} is not one")
    _require(all(_is_count(number) for number in entry.values()), f"the entry of {name} is not made of counts")
    file = BucketFile(**entry)
    _require(file.rows > 0 and file.bytes == HEADER_BYTES + file.rows * itemsize, f"rows and bytes of {name} disagree")
    return file


def check_description(value: Any) -> None:
    """Raises ValueError naming the field of a description that is missing or not valid. More fields may be there."""
    _require(type(value) is dict, "description is not a map")
    valid = {
        "name": lambda x: type(x) is str,
        "key_type": lambda x: type(x) is str,
        "dtype": lambda x: x == "float32",
        "columns": lambda x: type(x) is list and len(x) > 0 and all(_is_count(c) and c > 0 for c in x),
        "width": lambda x: _is_count(x) and 0 < x <= _MAX_WIDTH,
        "optimizer": lambda x: x is None or type(x) is str,
        "states": lambda x: type(x) is list and all(type(s) is str for s in x),
        "state_widths": lambda x: type(x) is list and all(_is_count(w) and 0 < w <= _MAX_WIDTH for w in x),
        "initial": lambda x: type(x) is list and all(type(i) is float for i in x),
        "hyper": lambda x: type(x) is list and all(type(h) is float for h in x),
        "seed": lambda x: type(x) is int,
        "tables": lambda x: type(x) is list,
        "padding_idx": lambda x: x is None or type(x) is int,
        "step": _is_count,
    }
    for field, check in valid.items():
        _require(field in value and check(value[field]), f"description has no valid {field!r}")
    dim, widths = sum(value["columns"]), value["state_widths"]
    for field in ("state_widths", "initial"):
        _require(len(value[field]) == len(value["states"]), f"description has no {field!r} for each of its states")
    _require(all(w in (1, dim) for w in widths), "description has 'state_widths' that are neither 1 nor the columns'")
    width = dim + sum(widths)
    _require(width == value["width"], "description has a 'width' that is not that of its columns and states")
    _check_rule(value, dim)


def _check_rule(value: dict[str, Any], dim: int) -> None:
    """States and `hyper` are those of the rule, where it is known here; `hyper` is empty before its first update."""
    name = value["optimizer"]
    try:
        rule = rule_named(name)
    except KeyError:
        return
    states = list(zip(rule.states, rule.state_widths(dim), strict=True))
    found = list(zip(value["states"], value["state_widths"], strict=True))
    _require(found == states, f"description has 'states' and 'state_widths' {found}, and rule {name!r} has {states}")
    given, taken = len(value["hyper"]), len(rule.kernel.all_hypers) + len(CLIPS)
    _require(given in (0, taken), f"description has 'hyper' of {given} numbers, and rule {name!r} takes {taken}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def bucket_file(bucket: int) -> str:
    """The name of a bucket's file."""
    return f"bucket-{bucket:02d}.npy"


def bucket_of(name: str) -> int:
    """The bucket of a file that a manifest names."""
    return int(name[7:9])


def npy_header(width: int, rows: int) -> bytes:
    """The header of a bucket file, HEADER_BYTES long whatever the count, the same for every NumPy version."""
    fields = np.dtype(row_dtype(width)).descr
    text = f"{{'descr': {fields!r}, 'fortran_order': False, 'shape': ({rows},), }}"
    magic = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    return magic + text.encode().ljust(HEADER_BYTES - len(magic) - 1) + b"\n"


def check_name(name: str) -> None:
    """Raises SnapshotError unless a name is 1 to 200 printable bytes of UTF-8, without separators and a leading dot."""
    if not is_folder_name(name):
        raise SnapshotError(
            f"snapshot name {name!r} cannot be used: give 1 to 200 printable bytes, "
            "without '/' and '\\' and without a leading '.'"
        )
