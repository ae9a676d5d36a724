"""Snapshots that nobody wrote: any bytes are refused, or read, loaded and gone on from, at the cost of their size."""

from __future__ import annotations

import contextlib
import math
import resource
import shutil
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from support.embeddings import contents, make, train
from support.examples import examples
from support.forged import (
    KINDS,
    MANIFEST,
    TYPES,
    change,
    command,
    copied,
    is_sound,
    of_rows,
    save_each_kind,
    save_parts,
    write_rows,
)
from support.forked import in_process
from support.killed import copy_as_killed
from support.refusals import check_refusal
from support.stores import options
from tierbed import OptimizerError, SnapshotError, StoreError, TierbedError
from tierbed.engine.durable import MAX_SEALED_BYTES, seal, unseal
from tierbed.engine.row_format import MAX_STEP
from tierbed.snapshots import Manifest, Snapshot, list_snapshots
from tierbed.snapshots.files.format import LAST_SEQUENCE, make_npy_header
from tierbed.snapshots.store.selection import Types

MB = 1 << 20
T = TypeVar("T")
Sounds = dict[Types, Path]
IN_PARTS = ["full in parts", "incremental in parts"]


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> dict[Types, Path]:
    """For rows of each type a folder with a snapshot of each kind, by that name, and `parts` beside it."""
    found = {types: save_each_kind(tmp_path_factory.mktemp("sound"), types) for types in TYPES}
    for folder in found.values():
        save_parts(folder, folder.with_name("parts"))
    return found


def place_of(sounds: Sounds, kind: str, types: Types) -> Path:
    """The folder of a snapshot of `KINDS + IN_PARTS`."""
    folder = sounds[types].with_name("parts") if kind in IN_PARTS else sounds[types]
    return folder / kind.split()[0]


def sealed(payload: bytes) -> bytes:
    """As `seal`, of a payload that may be no msgpack."""
    return bytes(msgpack.packb([payload, zlib.crc32(payload)]))


def edited(data: bytes, edits: list[tuple[int, bytes]]) -> bytes:
    """With other bytes at some places."""
    result = bytearray(data)
    for place, new in edits:
        place %= len(result)
        result[place : place + len(new)] = new
    return bytes(result)


def allocating_less_than(limit: int, action: Callable[[], T]) -> T:
    """What `action` returns. The least of three runs counts: a thread of another test may allocate meanwhile."""
    for _ in range(3):
        tracemalloc.start()
        try:
            result = action()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if peak < limit:
            return result
    pytest.fail(f"it allocates {peak} bytes, {limit} or more")


def decode(data: bytes) -> Manifest | None:
    def decoded() -> Manifest | None:
        with contextlib.suppress(ValueError):
            return Manifest.decode(data)
        return None

    return allocating_less_than(MB + 64 * len(data), decoded)


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xdd\xff\xff\xff\xff")  # an array of 2**32 - 1
@example(b"\xdd\xff\xff\xff\xff" * 2000)
@example(b"\x92\xc6\xff\xff\xff\xff")
@example(b"\xdf\xff\xff\xff\xff")  # a map
@example(b"\xc6\xff\xff\xff\xff")  # bytes
@example(b"\xc9\xff\xff\xff\xff\x01")  # an extension type
@example(b"\x91" * 3000)  # arrays in arrays
@example(b"\x92\xc4\x01\x00\xcf\xff\xff\xff\xff\xff\xff\xff\xff")
def test_bytes_are_no_manifest_bare_or_sealed(data: bytes) -> None:
    assert decode(data) is None
    assert decode(sealed(data)) is None


@examples(0.7)
@given(
    kind=st.sampled_from(KINDS + IN_PARTS),
    file=st.integers(0, 1 << 20),
    edits=st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(max_size=6)), max_size=3),
    size=st.none() | st.integers(0, 1 << 13),
    types=st.sampled_from(TYPES),
)
def test_a_file_of_any_content_is_read_or_refused(
    sounds: Sounds, kind: str, file: int, edits: list[tuple[int, bytes]], size: int | None, types: Types
) -> None:
    """The bytes of a file change, the manifest, where it is not that one, stays."""
    place = place_of(sounds, kind, types)
    damaged = place.parent.with_name("damaged")
    shutil.rmtree(damaged, ignore_errors=True)
    folder = shutil.copytree(place.parent, damaged, symlinks=True) / place.name
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = files[file % len(files)]
    before = path.read_bytes()
    after = edited(before, edits)[:size]
    path.unlink()  # a link of the store's own file
    path.write_bytes(after)

    def verify() -> None:
        refused = pytest.raises(SnapshotError, match=path.name)
        with contextlib.nullcontext() if after == before else refused:
            Snapshot.open(folder).verify()

    allocating_less_than(4 * MB, verify)


CLAIMED = 1 << 40  # rows, 44 TB of them


def claim_rows(folder: Path, kind: str) -> None:
    """It claims missing rows, in the manifest and in each header."""
    itemsize = Snapshot.open(folder).manifest.row_format.dtype.itemsize
    buckets = [file.name for file in folder.glob("bucket-*")]

    def claim(content: dict[str, Any]) -> None:
        content["rows"] = CLAIMED * (len(buckets) if kind == "full" else 1)
        for name in buckets:
            content["files"][name] |= {"rows": CLAIMED, "bytes": 256 + CLAIMED * itemsize}

    change(folder, claim)
    for name in buckets:
        with (folder / name).open("r+b") as file:
            file.write(make_npy_header(np.dtype(f"V{itemsize}"), CLAIMED))


def load_claims(path: Path, store: str, snapshots: Path) -> None:
    """In 1 GiB more than there is now."""
    with make(options(store, path), "adagrad", tables=1) as embedding:
        train(embedding, range(10))
        before = contents(embedding).tobytes()
        snapshots.rename(path / "rows" / "snapshots")
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 1024 * MB, used + 1024 * MB))
        for kind in KINDS:
            with pytest.raises(SnapshotError):
                Snapshot.open(path / "rows" / "snapshots" / kind).verify()
            with pytest.raises(TierbedError):
                embedding.load_snapshot(kind)
            assert contents(embedding).tobytes() == before


@pytest.mark.parametrize("store", ["device", "ssd_host"])
def test_rows_that_are_claimed_and_not_there_are_not_allocated(sounds: Sounds, tmp_path: Path, store: str) -> None:
    folder = shutil.copytree(sounds[TYPES[0]], tmp_path / "hostile", symlinks=True)
    for kind in KINDS[:2]:
        claim_rows(folder / kind, kind)
    shutil.rmtree(folder / "checkpoint" / "rocksdb")
    in_process(load_claims, tmp_path, store, folder)


def test_what_is_no_snapshot_is_listed_as_damaged_or_not_at_all(sounds: Sounds, tmp_path: Path) -> None:
    folder = shutil.copytree(sounds[TYPES[0]], tmp_path / "snapshots", symlinks=True)
    (folder / "file").write_bytes(b"x")
    (folder / "empty").mkdir()
    (folder / ".tmp-x").mkdir()
    (folder / "huge").mkdir()
    with (folder / "huge" / MANIFEST).open("wb") as file:
        file.truncate(MAX_SEALED_BYTES + 1)
    (folder / "\udc80\n").mkdir()
    listing = allocating_less_than(MB, lambda: list_snapshots(folder))
    assert [s.name for s in listing.snapshots] == KINDS
    assert set(listing.damaged) == {"empty", "huge", "\udc80\n"}


Place = tuple[str | int, ...]

ABSENT = object()
EXTREMES = [0, 1, -1, 2**31, MAX_STEP, MAX_STEP + 1, 2**32, 2**48, 2**62 - 1, 2**64 - 1, -(2**63), 10**9]
ODD = [math.nan, math.inf, -math.inf, 1e300, b"\xff", "", "\0", "\x1b[2J", "../x", [], {}, {b"\xff": 1}, {"": [b""]}]
DEEP: Any = 0
for _ in range(200):
    DEEP = [DEEP]


def places_in(value: Any, at: Place = ()) -> Iterator[Place]:
    """The place of each value in a manifest, those within others included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*at, name)
        yield from places_in(inner, (*at, name))


def put(content: dict[str, Any], place: Place, value: Any) -> None:
    for name in place[:-1]:
        content = content[name]  # type: ignore[index]
    if value is ABSENT:
        del content[place[-1]]  # type: ignore[arg-type]
    else:
        content[place[-1]] = value  # type: ignore[index]


text = st.text(st.characters(codec="utf-8"))
values = st.sampled_from([ABSENT, *EXTREMES, *ODD, DEEP]) | st.integers(-(2**63), 2**64 - 1) | st.floats() | text
more = st.sampled_from(["extra", "live", "format", "place", "shards", "rows", "names", "\x00"])


def check(sound: Path, path: Path, kind: str, store: str, types: Types, forge: Callable[[Path], None]) -> None:
    """A snapshot is sound where it loads, after which everything else works; the commands end as they say."""
    with make(options(store, path), "adagrad", **of_rows(types)) as embedding:
        train(embedding, range(10))
        before = contents(embedding).tobytes()
        snapshots = copied(sound, path)
        forge(snapshots / kind)
        loads = is_sound(snapshots, kind)
        assert command("list", snapshots.parent)[0] in (0, 1)
        for word, *more in (["inspect", "--rows", 2], ["export", path / "rows.npz"]):
            assert command(word, snapshots.parent, kind, *more)[0] in ((0,) if loads else (0, 1))
        assert command("diff", snapshots.parent, kind, "full")[0] in ((0, 1) if loads else (0, 1, 2))
        try:
            embedding.load_snapshot(kind)
        except OptimizerError:  # of one that verify does not know
            assert contents(embedding).tobytes() == before
            return
        except TierbedError:
            assert not loads
            assert contents(embedding).tobytes() == before
            return
        assert loads
        rows = contents(embedding).tobytes()
        kinds = KINDS if store == "ssd" else KINDS[:2]
        for number, saved in enumerate(kinds):
            embedding.put(torch.tensor([5]), torch.full((1, embedding.dim), float(number)))
            embedding.save_snapshot(f"{saved} after", saved)
        latest = contents(embedding).tobytes()
        killed = path / "killed"
        copy_as_killed(path / "rows", killed / "rows")
    with make(options(store, killed), "adagrad", **of_rows(types)) as embedding:
        assert contents(embedding).tobytes() == latest
        for name in (*(f"{saved} after" for saved in kinds), kind):
            embedding.load_snapshot(name)
        assert contents(embedding).tobytes() == rows
    assert command("verify", killed / "rows")[1]["damaged"].keys() <= {*KINDS} - {kind}


@examples(0.05)
@given(
    kind=st.sampled_from(KINDS),
    place=st.integers(0, 1 << 20),
    value=values,
    name=st.none() | more,
    store=st.sampled_from(["device", "ssd"]),
    types=st.sampled_from(TYPES),
)
@example(kind="full", place=0, value=["float32"], name="state_dtypes", store="device", types=TYPES[2])
@example(kind="incremental", place=0, value={"a": 1}, name="extra", store="ssd", types=TYPES[1])
@example(kind="checkpoint", place=0, value=0, name="extra", store="device", types=TYPES[2])
def test_a_manifest_of_any_value_anywhere_is_sound_where_it_loads(
    sounds: Sounds, kind: str, place: int, value: Any, name: str | None, store: str, types: Types
) -> None:
    def edit(content: dict[str, Any]) -> None:
        every = list(places_in(content))
        if name is None:
            put(content, every[place % len(every)], value)
        else:
            put(content, ("description", name), None if value is ABSENT else value)

    with tempfile.TemporaryDirectory(dir=sounds[types].parent) as folder:
        check(sounds[types], Path(folder), kind, store, types, lambda forged: change(forged, edit))


@pytest.mark.parametrize(
    ("store", "types"), [("device", TYPES[0]), pytest.param("ssd", TYPES[1], marks=pytest.mark.slow)]
)
def test_rows_of_extremes_are_sound_where_they_load(sounds: Sounds, tmp_path: Path, store: str, types: Types) -> None:
    def forge(folder: Path) -> None:
        name = next(iter(Snapshot.open(folder).manifest.files))
        rows = np.load(folder / name)
        if store == "device":
            rows["step"][-1], rows["values"][-1] = 2**32 - 1, np.nan
        else:
            rows["updates"][-1], rows["embedding"][-1] = 2**32 - 1, 0x7FC0  # NaN
        write_rows(folder, name, rows)

    check(sounds[types], tmp_path, "full", store, types, forge)


@examples(3)
@given(
    kind=st.sampled_from(KINDS + IN_PARTS),
    place=st.integers(0, 1 << 20),
    value=values,
    edits=st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(max_size=6)), max_size=2),
    types=st.sampled_from(TYPES),
)
def test_a_manifest_of_any_value_or_byte_anywhere_says_as_much_as_it_reads(
    sounds: Sounds, kind: str, place: int, value: Any, edits: list[tuple[int, bytes]], types: Types
) -> None:
    content = unseal((place_of(sounds, kind, types) / MANIFEST).read_bytes())
    every = list(places_in(content))
    put(content, every[place % len(every)], value)
    manifest = decode(sealed(edited(msgpack.unpackb(seal(content))[0], edits)))
    if manifest is not None:
        assert Manifest.decode(manifest.encode()) == manifest


FORGED: list[tuple[Place, Any]] = [
    (("sequence",), 2**62 - 1),
    (("description", "step"), 2**32 - 1),
    (("description", "hyper", 0), math.nan),
    (("description", "initial", 0), math.inf),
    (("description", "tables", 0), {b"\xff": 1}),
    (("description", "key_type"), "float"),
    (("description", "tables", 0), DEEP),
    (("description", "place"), "live"),
    (("description", "columns"), [2**40]),
    (("rows",), 10**9),
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_save_writes_is_refused_and_blocks_nothing(sounds: Sounds, tmp_path: Path, kind: str) -> None:
    with make(options("device", tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, range(10))
        snapshots = copied(sounds[TYPES[0]], tmp_path)
        manifest, forged = snapshots / kind / MANIFEST, FORGED[KINDS.index(kind) :: len(KINDS)]
        whole = manifest.read_bytes()
        for number, (place, value) in enumerate(forged):
            change(snapshots / kind, lambda content: put(content, place, value))  # noqa: B023
            assert not is_sound(snapshots, kind), place
            assert command("inspect", snapshots.parent, kind)[0] == 1
            with pytest.raises(SnapshotError, match=kind):
                embedding.load_snapshot(kind)
            embedding.save_snapshot(f"after {number}")
            manifest.write_bytes(whole)
        assert all(is_sound(snapshots, f"after {number}") for number in range(len(forged)))


def test_the_last_sequence_blocks_a_save_with_a_remedy_that_works(sounds: Sounds, tmp_path: Path) -> None:
    with make(options("device", tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, range(10))
        snapshots = copied(sounds[TYPES[0]], tmp_path)
        change(snapshots / "full", lambda content: content.update(sequence=LAST_SEQUENCE))
        said = "'full' has the largest sequence", f"Move '{snapshots}/full' elsewhere"
        check_refusal((lambda: embedding.save_snapshot("after"), SnapshotError, *said))
        (snapshots / "full").rename(tmp_path / "elsewhere")
        embedding.save_snapshot("after")


def test_a_run_that_reaches_the_last_step_is_told_so_and_goes_on_as_it_says(tmp_path: Path) -> None:
    for name in ("adagrad", "catch-up"):
        path = tmp_path / name
        with make(options("device", path), name, tables=1) as embedding:
            train(embedding, range(10))
            embedding.save_snapshot("s")
        last = path / "rows" / "snapshots" / "s"
        change(last, lambda content: content["description"].update(step=MAX_STEP - 1))
        with make(options("device", path), name, tables=1) as embedding:
            embedding.load_snapshot("s")
            train(embedding, range(10))
            assert embedding.metrics()["table"]["step"] == MAX_STEP
            rows = embedding.get(range(10))
            for _ in range(2):
                with pytest.raises(StoreError, match=r"'rows' is at step 4294967294, the last.*weights_only=True"):
                    train(embedding, range(10))
            assert embedding.get(range(10)).tolist() == rows.tolist()
            embedding.save_snapshot("last")
            assert is_sound(path / "rows" / "snapshots", "last")
            embedding.load_snapshot("last", weights_only=True)
            train(embedding, range(10))
            assert embedding.metrics()["table"]["step"] == 1
