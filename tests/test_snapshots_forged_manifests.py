"""Manifests with any value anywhere, sealed: what verifies loads, what loads can be saved and opened, and only that."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from embeddings import contents, make, options, train
from forged import KINDS, MANIFEST, change, command, copied, is_sound, save_each_kind
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tierbed.engine import SnapshotError, StoreError, TierbedError, _core
from tierbed.engine.store.contract import LAST_STEP
from tierbed.engine.store.durable import seal, unseal
from tierbed.snapshots.format import LAST_SEQUENCE

pytestmark = pytest.mark.skipif(not _core.has_rocksdb, reason="no RocksDB")

Place = tuple[str | int, ...]

ABSENT = object()
EXTREMES = [0, 1, -1, 2**31, LAST_STEP, LAST_STEP + 1, 2**32, 2**48, 2**62 - 1, 2**62, 2**64 - 1, -(2**63), 10**9]
ODD = [math.nan, math.inf, -math.inf, 1e300, b"\xff", "", "\0", "\x1b[2J", "../x", [], {}, {b"\xff": 1}, {"": [b""]}]
DEEP: Any = 0
for _ in range(200):
    DEEP = [DEEP]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_each_kind(tmp_path_factory.mktemp("sound"))


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


values = st.sampled_from([ABSENT, *EXTREMES, *ODD, DEEP]) | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
more = st.sampled_from(["extra", "live", "base", "place", "shards", "rows", "names", "\x00"])


def check(snapshots: Path, kind: str, store: str) -> None:
    """A snapshot is sound where it loads, and after it everything else works as ever; the commands end as they say."""
    path = snapshots.parents[1]
    sound = is_sound(snapshots, kind)
    for words in (["list"], ["inspect", kind, "--rows", 2], ["export", kind, path / "rows.npz"]):
        code, _ = command(words[0], snapshots.parent, *words[1:])
        assert code in ((0, 1) if words[0] == "list" else (0,) if sound else (0, 1)), words
    assert command("diff", snapshots.parent, kind, "full")[0] in ((0, 1) if sound else (0, 1, 2))
    with make(options(store, path), "adagrad", tables=1) as embedding:
        train(embedding, range(10))
        before = contents(embedding).tobytes()
        try:
            embedding.load_snapshot(kind)
        except TierbedError:
            assert not sound
            assert contents(embedding).tobytes() == before
            return
        assert sound
        kinds = KINDS if store == "ssd" else KINDS[:2]
        rows = contents(embedding).tobytes()
        for more in kinds:
            embedding.put([5], [[1.0] * embedding.dim])
            embedding.save_snapshot(f"{more} after", more)
        latest = contents(embedding).tobytes()
        killed = path.with_name("killed")
        shutil.rmtree(killed, ignore_errors=True)
        shutil.copytree(path, killed, ignore=shutil.ignore_patterns("SOCKET"))
    with make(options(store, killed), "adagrad", tables=1) as embedding:
        assert contents(embedding).tobytes() == latest
        for name in (*(f"{more} after" for more in kinds), kind):
            assert is_sound(killed / "rows" / "snapshots", name)
            embedding.load_snapshot(name)
        assert contents(embedding).tobytes() == rows


def forge(snapshots: Path, kind: str, place: int, value: Any, name: str | None) -> None:
    """Another value at a place of a manifest, or a field of the description more."""

    def edit(content: dict[str, Any]) -> None:
        every = list(places_in(content))
        put(content, every[place % len(every)] if name is None else ("description", name), value)

    if name is not None and value is ABSENT:
        value = None
    change(snapshots / kind, edit)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(KINDS),
    place=st.integers(0, 1 << 20),
    value=values,
    name=st.none() | more,
    store=st.sampled_from(["device", "ssd"]),
)
@example(kind="full", place=0, value={"a": 1}, name="extra", store="ssd")
@example(kind="full", place=0, value=["x"], name="base", store="device")
@example(kind="incremental", place=0, value={b"\xff": 1}, name="extra", store="device")
@example(kind="checkpoint", place=0, value=math.nan, name="extra", store="device")
def test_a_manifest_of_any_value_anywhere_is_sound_where_it_loads_and_can_be_saved_and_opened_after(
    sound: Path, kind: str, place: int, value: Any, name: str | None, store: str
) -> None:
    with tempfile.TemporaryDirectory(dir=sound.parent) as folder:
        snapshots = copied(sound, Path(folder) / "store")
        try:
            forge(snapshots, kind, place, value, name)
        except ValueError:  # no msgpack of this value
            return
        check(snapshots, kind, store)


FORGED: dict[str, tuple[Place, Any]] = {
    "sequence": (("sequence",), 2**62 - 1),
    "step": (("description", "step"), 2**32 - 1),
    "NaN": (("description", "hyper", 0), math.nan),
    "infinity": (("description", "initial", 0), math.inf),
    "bytes": (("description", "tables", 0), {b"\xff": 1}),
    "key type": (("description", "key_type"), "float"),
    "depth": (("description", "tables", 0), DEEP),
    "mark": (("description", "base"), ["s"]),
    "columns": (("description", "columns"), [2**40]),
    "rows": (("rows",), 10**9),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", FORGED)
def test_what_no_save_writes_is_refused_at_load_and_unsound_to_verify_and_blocks_nothing(
    sound: Path, tmp_path: Path, case: str, kind: str
) -> None:
    snapshots = copied(sound, tmp_path)
    place, value = FORGED[case]
    change(snapshots / kind, lambda content: put(content, place, value))
    assert not is_sound(snapshots, kind)
    assert command("inspect", snapshots.parent, kind)[0] in (0, 1)
    with make(options("device", tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, range(10))
        with pytest.raises(SnapshotError, match=kind):
            embedding.load_snapshot(kind)
        embedding.save_snapshot("after")
        assert is_sound(snapshots, "after")


def test_the_last_sequence_blocks_a_save_by_name_and_with_a_remedy_that_works(sound: Path, tmp_path: Path) -> None:
    snapshots = copied(sound, tmp_path)
    change(snapshots / "full", lambda content: content.update(sequence=LAST_SEQUENCE))
    with make(options("device", tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, range(10))
        with pytest.raises(SnapshotError, match=r"'full' has the last sequence.*Move '.*full' elsewhere, or remove it"):
            embedding.save_snapshot("after")
        (snapshots / "full").rename(tmp_path / "elsewhere")
        embedding.save_snapshot("after")


def test_a_run_that_reaches_the_last_step_is_told_so_and_goes_on_as_it_says(tmp_path: Path) -> None:
    for name in ("adagrad", "catch-up"):
        path = tmp_path / name
        with make(options("device", path), name, tables=1) as embedding:
            train(embedding, range(10))
            embedding.save_snapshot("s")
        last = path / "rows" / "snapshots" / "s"
        change(last, lambda content: content["description"].update(step=LAST_STEP - 1))
        with make(options("device", path), name, tables=1) as embedding:
            embedding.load_snapshot("s")
            train(embedding, range(10))
            assert embedding.metrics()["table"]["step"] == LAST_STEP
            rows = embedding.get(range(10))
            for _ in range(2):
                with pytest.raises(StoreError, match=r"'rows' is of step 4294967294, the last.*weights_only=True"):
                    train(embedding, range(10))
            assert embedding.get(range(10)).tolist() == rows.tolist()
            embedding.save_snapshot("last")
            assert is_sound(path / "rows" / "snapshots", "last")
            embedding.load_snapshot("last", weights_only=True)
            train(embedding, range(10))
            assert embedding.metrics()["table"]["step"] == 1


def test_a_manifest_is_as_it_was_where_nothing_is_forged(sound: Path, tmp_path: Path) -> None:
    for kind in KINDS:
        before = (sound / kind / MANIFEST).read_bytes()
        assert seal(unseal(before)) == before
        for store in ("device", "ssd"):
            check(copied(sound, tmp_path / f"{kind}-{store}"), kind, store)
