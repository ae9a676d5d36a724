"""Manifests with any value anywhere, sealed: what verifies loads, what loads can be saved and opened, and only that."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from support.embeddings import contents, make, train
from support.examples import examples
from support.forged import KINDS, TYPES, change, command, copied, is_sound, of_rows, save_each_kind
from support.stores import options
from tierbed import OptimizerError, SnapshotError, StoreError, TierbedError
from tierbed.engine import _core
from tierbed.engine.row_format import LAST_STEP
from tierbed.snapshots.files.format import LAST_SEQUENCE
from tierbed.snapshots.store.selection import Types

pytestmark = pytest.mark.skipif(not _core.has_rocksdb, reason="no RocksDB")

Place = tuple[str | int, ...]

ABSENT = object()
EXTREMES = [0, 1, -1, 2**31, LAST_STEP, LAST_STEP + 1, 2**32, 2**48, 2**62 - 1, 2**64 - 1, -(2**63), 10**9]
ODD = [math.nan, math.inf, -math.inf, 1e300, b"\xff", "", "\0", "\x1b[2J", "../x", [], {}, {b"\xff": 1}, {"": [b""]}]
DEEP: Any = 0
for _ in range(200):
    DEEP = [DEEP]


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> dict[Types, Path]:
    return {types: save_each_kind(tmp_path_factory.mktemp("sound"), types) for types in TYPES}


@pytest.fixture(scope="module")
def sound(sounds: dict[Types, Path]) -> Path:
    return sounds[TYPES[0]]


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
more = st.sampled_from(["extra", "live", "base", "place", "shards", "rows", "names", "\x00"])


def check(
    sound: Path, path: Path, kind: str, store: str, types: Types, forge: Callable[[dict[str, Any]], None]
) -> None:
    """A snapshot is sound where it loads, after which everything else works; the commands end as they say."""
    with make(options(store, path), "adagrad", **of_rows(types)) as embedding:
        train(embedding, range(10))
        before = contents(embedding).tobytes()
        snapshots = copied(sound, path)
        change(snapshots / kind, forge)
        loads = is_sound(snapshots, kind)
        assert command("list", snapshots.parent)[0] in (0, 1)
        for words in (["inspect", kind, "--rows", 2], ["export", kind, path / "rows.npz"]):
            assert command(words[0], snapshots.parent, *words[1:])[0] in ((0,) if loads else (0, 1))
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
        shutil.copytree(path / "rows", killed / "rows", ignore=shutil.ignore_patterns("SOCKET"))
    with make(options(store, killed), "adagrad", **of_rows(types)) as embedding:
        assert contents(embedding).tobytes() == latest
        for name in (*(f"{saved} after" for saved in kinds), kind):
            embedding.load_snapshot(name)
        assert contents(embedding).tobytes() == rows
    assert command("verify", killed / "rows")[1]["damaged"].keys() <= {*KINDS} - {kind}


drawn = given(
    kind=st.sampled_from(KINDS),
    place=st.integers(0, 1 << 20),
    value=values,
    name=st.none() | more,
    store=st.sampled_from(["device", "ssd"]),
    types=st.sampled_from(TYPES),
)


def check_drawn(
    sounds: dict[Types, Path], kind: str, place: int, value: Any, name: str | None, store: str, types: Types
) -> None:
    def forge(content: dict[str, Any]) -> None:
        every = list(places_in(content))
        if name is None:
            put(content, every[place % len(every)], value)
        else:
            put(content, ("description", name), None if value is ABSENT else value)

    with tempfile.TemporaryDirectory(dir=sounds[types].parent) as folder:
        check(sounds[types], Path(folder), kind, store, types, forge)


@examples(0.2)
@drawn
@example(kind="full", place=0, value={"a": 1}, name="extra", store="ssd", types=TYPES[0])
@example(kind="full", place=0, value=["x"], name="base", store="device", types=TYPES[0])
@example(kind="full", place=0, value=["float32"], name="state_dtypes", store="device", types=TYPES[2])
def test_a_manifest_of_any_value_anywhere_is_sound_where_it_loads_and_can_be_saved_and_opened_after(
    sounds: dict[Types, Path], kind: str, place: int, value: Any, name: str | None, store: str, types: Types
) -> None:
    check_drawn(sounds, kind, place, value, name, store, types)


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
@pytest.mark.rotated("kind")
def test_what_no_save_writes_is_refused_at_load_and_unsound_to_verify_and_blocks_nothing(
    sound: Path, tmp_path: Path, case: str, kind: str
) -> None:
    place, value = FORGED[case]
    with make(options("device", tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, range(10))
        snapshots = copied(sound, tmp_path)
        change(snapshots / kind, lambda content: put(content, place, value))
        assert not is_sound(snapshots, kind)
        assert command("inspect", snapshots.parent, kind)[0] == 1
        with pytest.raises(SnapshotError, match=kind):
            embedding.load_snapshot(kind)
        embedding.save_snapshot("after")
        assert is_sound(snapshots, "after")


def test_the_last_sequence_blocks_a_save_by_name_and_with_a_remedy_that_works(sound: Path, tmp_path: Path) -> None:
    with make(options("device", tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, range(10))
        snapshots = copied(sound, tmp_path)
        change(snapshots / "full", lambda content: content.update(sequence=LAST_SEQUENCE))
        with pytest.raises(
            SnapshotError, match=r"'full' has the largest sequence.*Move '.*full' elsewhere, or remove it"
        ):
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
                with pytest.raises(StoreError, match=r"'rows' is at step 4294967294, the last.*weights_only=True"):
                    train(embedding, range(10))
            assert embedding.get(range(10)).tolist() == rows.tolist()
            embedding.save_snapshot("last")
            assert is_sound(path / "rows" / "snapshots", "last")
            embedding.load_snapshot("last", weights_only=True)
            train(embedding, range(10))
            assert embedding.metrics()["table"]["step"] == 1


@pytest.mark.parametrize(("kind", "store", "types"), [*zip(KINDS, ["device", "ssd", "device"], TYPES, strict=True)])
def test_where_nothing_is_forged_everything_works(
    sounds: dict[Types, Path], tmp_path: Path, kind: str, store: str, types: Types
) -> None:
    check(sounds[types], tmp_path, kind, store, types, lambda content: None)
