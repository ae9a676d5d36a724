"""A version's description and the other records of a serving folder, as dataclasses and as JSON with a checksum."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cache, cached_property
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ..engine.checksum import crc32
from ..engine.durable import MAX_SEALED_BYTES
from ..engine.errors import ServingError
from ..engine.options.table_spec import TableSpec
from ..snapshots.files.format import check_description
from .settings import make_spec, pack_settings

FORMAT = 1
ENCODINGS = ("int8", "float32", "bfloat16", "float16")  # in messages; row files number them in another order

T = TypeVar("T")


@dataclass(frozen=True)
class ServedFile:
    """A file in `files/`. bytes: its size. crc32: the checksum of all of it."""

    name: str
    bytes: int
    crc32: int

    def __post_init__(self) -> None:
        if self.name.startswith(".") or not set("/\0").isdisjoint(self.name):
            raise ValueError(f"it names a file {self.name!r} outside of the folder 'files'")


@dataclass(frozen=True)
class RowFileEntry(ServedFile):
    """A file of rows. rows, deleted: how many rows and marks of deleted rows it has."""

    rows: int
    deleted: int


@dataclass(frozen=True)
class ServedTable:
    """A table's files. A lookup tries the delta, then the base. written: how many entries deltas of this base had."""

    base: RowFileEntry
    delta: RowFileEntry | None
    written: int = 0

    @property
    def files(self) -> list[RowFileEntry]:
        return [self.base] if self.delta is None else [self.base, self.delta]


@dataclass(frozen=True)
class SnapshotEntry:
    """The snapshot that an embedding's rows came from. run: the id of the run that created the table, or ""."""

    id: str
    run: str
    step: int
    rows: int


@dataclass(frozen=True)
class ServedEmbedding:
    """An embedding in a version. description: describes the table, in the form of snapshots.

    settings: the part of the description that the C interface needs, as hex digits.
    """

    name: str
    tables: tuple[ServedTable, ...]
    snapshot: SnapshotEntry
    description: dict[str, Any]
    settings: str = ""

    def __post_init__(self) -> None:
        check_description(self.description)
        if len(self.tables) != len(self.description["tables"]):
            raise ValueError(f"it has files of {len(self.tables)} tables, not of {len(self.description['tables'])}")
        object.__setattr__(self, "settings", pack_settings(self.spec).hex())

    @cached_property
    def spec(self) -> TableSpec:
        """What lookups need to know of the embedding."""
        return make_spec(self.description)


@dataclass(frozen=True)
class Version:
    """A published version. Its files never change.

    Attributes:
        version: its number.
        encoding: how rows are encoded: "int8", "float32", "bfloat16" or "float16".
        step: the step of all rows and tensors.
        created: time of the publish, in nanoseconds since 1970 (UTC).
        tensors: the file with dense weights, or None.
        embeddings: sorted by name.
    """

    version: int
    encoding: str
    step: int
    created: int
    tensors: ServedFile | None
    embeddings: tuple[ServedEmbedding, ...]

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            raise ValueError(f"its encoding is {self.encoding!r}, and this tierbed reads {', '.join(ENCODINGS)}")

    @property
    def files(self) -> list[ServedFile]:
        """All files of the version."""
        tensors = [] if self.tensors is None else [self.tensors]
        return [*tensors, *(file for each in self.embeddings for table in each.tables for file in table.files)]

    @property
    def rows(self) -> int:
        return sum(embedding.snapshot.rows for embedding in self.embeddings)

    def __repr__(self) -> str:
        size = sum(file.bytes for file in self.files)
        return f"<version {self.version}: {self.rows:,} rows at step {self.step:,}, {self.encoding}, {size:,} bytes>"


@dataclass(frozen=True)
class Current:
    """The version that readers take, and when it was published.

    hold: True from a rollback until `release`. created: the version's; with `version`, it tells versions of different
    publishers' folders at the same path apart.
    """

    version: int
    hold: bool = False
    created: int = 0


@dataclass(frozen=True)
class Pending:
    """Bases that the version after `version` can use.

    snapshots: the id of the snapshot whose rows they have, by embedding. bases: by embedding, an entry for each table;
    None if the table has no new base.
    """

    version: int = 0
    snapshots: dict[str, str] = field(default_factory=dict)
    bases: dict[str, tuple[RowFileEntry | None, ...]] = field(default_factory=dict)

    @property
    def files(self) -> list[RowFileEntry]:
        return [file for tables in self.bases.values() for file in tables if file is not None]


def seal_record(record: Any) -> bytes:
    """Returns a dataclass as a line with a checksum, and a line with JSON. Raises ServingError if it is too large."""
    value = {"format": FORMAT, **asdict(record)}
    line = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    data = b"%08x\n%s\n" % (crc32(line), line)
    if len(data) > MAX_SEALED_BYTES:
        problem = f"a version's description has {len(data)} bytes, and readers accept {MAX_SEALED_BYTES}"
        raise ServingError(f"{problem}: publish the model's embeddings in several folders")
    return data


def unseal_record(kind: type[T], data: bytes) -> T:
    """Returns the dataclass in a record. Raises ValueError if the record is damaged, foreign or of a later format."""
    checksum, _, line = data.partition(b"\n")
    if not line.endswith(b"\n") or checksum != b"%08x" % crc32(line[:-1]):
        raise ValueError("its checksum does not match")
    value = json.loads(line)
    if type(value) is dict and type(value.get("format")) is int and value["format"] > FORMAT:
        raise ValueError(f"its format is {value['format']}, and this tierbed reads {FORMAT}: upgrade tierbed")
    record: T = _decode(kind, value)
    return record


_find_types = cache(get_type_hints)  # which compiles the annotations anew each time


def _decode(kind: Any, value: Any) -> Any:
    """Convert JSON to a value of this type: a dataclass, a tuple, a dict, an optional value or a plain value."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else _decode(arguments[0], value)
    expected: type = dict if is_dataclass(kind) else list if origin is tuple else origin or kind
    found: type = type(value)
    if found is not expected or (expected is int and not 0 <= value < 1 << 63):
        raise ValueError(f"{value!r:.80} is no {getattr(kind, '__name__', kind)}")
    if origin is tuple:
        return tuple(_decode(arguments[0], item) for item in value)
    if origin is dict:
        return value if arguments[1] is Any else {name: _decode(arguments[1], value[name]) for name in value}
    if expected is dict:
        types = _find_types(kind)
        return kind(**{name: _decode(types[name], value[name]) for name in types if name in value})
    return value
