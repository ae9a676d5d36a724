"""Snapshots that nobody wrote: any bytes are read or refused, at a cost that follows their size."""

from __future__ import annotations

import contextlib
import resource
import shutil
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.embeddings import contents, make, train
from support.examples import examples
from support.forged import KINDS, MANIFEST, TYPES, change, of_rows, save_each_kind, save_parts
from support.forked import in_process
from support.stores import options
from tierbed import SnapshotError, TierbedError
from tierbed.engine.durable import MAX_SEALED
from tierbed.snapshots import Manifest, Snapshot, list_snapshots
from tierbed.snapshots.files.format import npy_header
from tierbed.snapshots.store.selection import Types

MB = 1 << 20
T = TypeVar("T")
IN_PARTS = ["full in parts", "incremental in parts"]


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> dict[Types, Path]:
    """For rows of each type a folder with a snapshot of each kind, by that name."""
    return {types: save_each_kind(tmp_path_factory.mktemp("sound"), types) for types in TYPES}


@pytest.fixture(scope="module")
def sound(sounds: dict[Types, Path]) -> Path:
    return sounds[TYPES[0]]


@pytest.fixture(scope="module")
def sound_parts(sounds: dict[Types, Path]) -> dict[Types, Path]:
    """The same tables in parts, in folders of their own."""
    return {types: save_parts(sound, sound.with_name("parts")) for types, sound in sounds.items()}


def sealed(payload: bytes) -> bytes:
    """As `seal`, of a payload that may be no msgpack."""
    return bytes(msgpack.packb([payload, zlib.crc32(payload)]))


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


@examples(2)
@given(
    kind=st.sampled_from(KINDS + IN_PARTS),
    edits=st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(max_size=6)), max_size=3),
    types=st.sampled_from(TYPES),
)
@example(kind="full", edits=[], types=TYPES[0])
@example(kind="full", edits=[], types=TYPES[1])
@example(kind="incremental in parts", edits=[], types=TYPES[0])
def test_a_manifest_that_is_changed_and_sealed_again_is_refused_or_says_as_much_as_it_reads(
    sounds: dict[Types, Path],
    sound_parts: dict[Types, Path],
    kind: str,
    edits: list[tuple[int, bytes]],
    types: Types,
) -> None:
    sound = (sound_parts if kind in IN_PARTS else sounds)[types]
    payload = bytearray(msgpack.unpackb((sound / kind.split()[0] / MANIFEST).read_bytes())[0])
    for place, new in edits:
        place %= len(payload)
        payload[place : place + len(new)] = new
    manifest = decode(sealed(bytes(payload)))
    assert manifest is not None or edits
    if manifest is not None:
        assert Manifest.decode(manifest.encode()) == manifest


def copied(sound: Path, to: Path) -> Path:
    """The snapshots of `sound`, at `to`."""
    shutil.rmtree(to, ignore_errors=True)
    return shutil.copytree(sound, to, symlinks=True)


@given(
    kind=st.sampled_from(KINDS + IN_PARTS),
    file=st.integers(0, 1 << 20),
    edits=st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(max_size=6)), max_size=3),
    size=st.none() | st.integers(0, 1 << 13),
    types=st.sampled_from(TYPES),
)
def test_a_file_of_any_content_is_read_or_refused(
    sounds: dict[Types, Path],
    sound_parts: dict[Types, Path],
    kind: str,
    file: int,
    edits: list[tuple[int, bytes]],
    size: int | None,
    types: Types,
) -> None:
    """The bytes of a file change, the manifest, where it is not that one, stays."""
    sound = (sound_parts if kind in IN_PARTS else sounds)[types]
    folder = copied(sound, sound.with_name("damaged")) / kind.split()[0]
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = files[file % len(files)]
    before = path.read_bytes()
    data = bytearray(before)
    for place, new in edits:
        place %= len(data)
        data[place : place + len(new)] = new
    after = bytes(data)[:size]
    path.unlink()  # a link of the store's own file
    path.write_bytes(after)

    def verify() -> None:
        if after == before:
            Snapshot.open(folder).verify()
            return
        with pytest.raises(SnapshotError, match=path.name):
            Snapshot.open(folder).verify()

    allocating_less_than(4 * MB, verify)


CLAIMED = 1 << 40  # rows, 44 TB of them


def claim_rows(folder: Path, kind: str) -> None:
    """It claims missing rows, in the manifest and in each header."""
    itemsize = Snapshot.open(folder).manifest.form.dtype.itemsize

    def edited(content: dict[str, Any]) -> None:
        content["rows"] = CLAIMED
        for name, file in content["files"].items():
            if name.startswith("bucket"):
                file |= {"rows": CLAIMED, "bytes": 256 + CLAIMED * itemsize}
        if kind == "full":
            content["rows"] = CLAIMED * len(content["files"])

    change(folder, edited)
    manifest = Snapshot.open(folder).manifest
    for name in manifest.files:
        if name.startswith("bucket"):
            with (folder / name).open("r+b") as file:
                file.write(npy_header(np.dtype(f"V{itemsize}"), CLAIMED))


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
def test_rows_that_are_claimed_and_not_there_are_not_allocated(sound: Path, tmp_path: Path, store: str) -> None:
    folder = copied(sound, tmp_path / "hostile")
    for kind in KINDS[:2]:
        claim_rows(folder / kind, kind)
    shutil.rmtree(folder / "checkpoint" / "rocksdb")
    in_process(load_claims, tmp_path, store, folder)


def rewrite(folder: Path, edit: Callable[[NDArray[np.void]], NDArray[np.void]], move: bool) -> None:
    """Other rows in the first file of a full snapshot, or the file of another bucket; all checksums are right."""
    manifest = Snapshot.open(folder).manifest
    name = next(iter(manifest.files))
    rows = edit(np.load(folder / name))
    (folder / name).unlink()
    header = npy_header(rows.dtype, len(rows))
    target = "bucket-63.npy" if move and "bucket-63.npy" not in manifest.files else name
    (folder / target).write_bytes(header + rows.tobytes())

    def edited(content: dict[str, Any]) -> None:
        del content["files"][name]
        entry = {"rows": len(rows), "bytes": len(header) + rows.nbytes, "crc32": zlib.crc32(rows.tobytes())}
        content["files"][target] = entry
        content["rows"] = sum(file["rows"] for file in content["files"].values())

    change(folder, edited)


def _with(field: str, value: Any) -> Callable[[NDArray[np.void]], NDArray[np.void]]:
    def edit(rows: NDArray[np.void]) -> NDArray[np.void]:
        rows = rows.copy()
        rows[field][-1] = value
        return rows

    return edit


def _not_a_number(rows: NDArray[np.void]) -> NDArray[np.void]:
    names = rows.dtype.names or ()
    return _with("values", np.nan)(rows) if "values" in names else _with("embedding", 0x7FC0)(rows)


EDITS: dict[str, Callable[[NDArray[np.void]], NDArray[np.void]]] = {
    "as it was": lambda rows: rows,
    "backwards": lambda rows: rows[::-1].copy(),
    "a row twice": lambda rows: np.concatenate([rows, rows[-1:]]),
    "a table that there is not": _with("table", 2**32 - 1),
    "a key of another bucket": _with("key", 2**64 - 1),
    "never written": _with("updates", 0),
    "of the last step": _with("step", 2**32 - 1),
    "written without end": _with("updates", 2**32 - 1),
    "not a number": _not_a_number,
}


def load_edited(path: Path, store: str, snapshots: Path, sound: bool, types: Types) -> None:
    """It comes whole and right, or not at all; the embedding works on."""
    with make(options(store, path), "adagrad", **of_rows(types)) as embedding:
        train(embedding, range(10))
        snapshots.rename(path / "rows" / "snapshots")
        before = contents(embedding).tobytes()
        try:
            embedding.load_snapshot("full")
        except TierbedError:
            assert not sound
            assert contents(embedding).tobytes() == before
        else:
            rows = contents(embedding)
            assert len(np.unique(rows[["table", "key"]])) == len(rows) == embedding.size()
        train(embedding, range(20))
        embedding.delete(range(5))
        after = contents(embedding).tobytes()
        embedding.save_snapshot("after")
    Snapshot.open(path / "rows" / "snapshots" / "after").verify()
    with make(options(store, path, open="error"), "adagrad", **of_rows(types)) as embedding:
        assert contents(embedding).tobytes() == after


@pytest.mark.parametrize("store", ["device", "cached_host", "ssd_host"])
@pytest.mark.parametrize("move", [False, True], ids=["in place", "moved"])
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.pairs
@pytest.mark.rotated("types")
def test_rows_that_no_table_has_do_no_harm(
    sounds: dict[Types, Path], tmp_path: Path, edit: str, move: bool, store: str, types: Types
) -> None:
    folder = copied(sounds[types], tmp_path / "hostile")
    for other in KINDS[1:]:
        shutil.rmtree(folder / other)
    rewrite(folder / "full", EDITS[edit], move)
    in_process(load_edited, tmp_path, store, folder, edit == "as it was" and not move, types)


def test_what_is_no_snapshot_is_listed_as_damaged_or_not_at_all(sound: Path, tmp_path: Path) -> None:
    folder = copied(sound, tmp_path / "snapshots")
    (folder / "file").write_bytes(b"x")
    (folder / "empty").mkdir()
    (folder / ".tmp-x").mkdir()
    (folder / "huge").mkdir()
    with (folder / "huge" / MANIFEST).open("wb") as file:
        file.truncate(MAX_SEALED + 1)
    (folder / "\udc80\n").mkdir()
    listing = allocating_less_than(MB, lambda: list_snapshots(folder))
    assert [s.name for s in listing.snapshots] == KINDS
    assert set(listing.damaged) == {"empty", "huge", "\udc80\n"}
