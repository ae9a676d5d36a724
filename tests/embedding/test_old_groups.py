"""Embeddings that an earlier version trained together open with what was theirs, and get a record."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from support.golden_groups import COUNTS, HISTORIES, OF_RANKS, Together
from support.places import GOLDEN
from support.ranks import run_ranks
from tierbed import StoreError
from tierbed.snapshots.store.folder_state import FolderState
from tierbed.snapshots.store.group_file import PREFIX

GROUPS = GOLDEN / "groups-4"
SUMS = {  # of the numbers of the steps that are found
    "closed": 3.0,
    "killed after saves of all": 3.0,
    "killed after saves of each": 1.0,
    "killed after a close of one": 1.0,
}


def opened(world: Any, path: Path, count: int, **more: Any) -> list[float] | str:
    """The rows that are found, which a step then changes, or why they are refused."""
    made = Together(path, count, world, **more)
    try:
        found = made.read()
        made.step(16)
    except StoreError as error:
        return str(error)
    made.close()
    return found


def opened_as_before(path: Path, count: int, ranks: int, **more: Any) -> list[float] | str:
    if ranks == 1:
        return opened(None, path, count, **more)
    return run_ranks(ranks, opened, path, count, **more)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize(("count", "ranks"), [*((count, 1) for count in COUNTS), (OF_RANKS, OF_RANKS)])
def test_a_group_of_before(tmp_path: Path, history: str, count: int, ranks: int) -> None:
    golden = f"{count} of {ranks} ranks" if ranks > 1 else f"{count}"
    path = tmp_path / "model"
    shutil.copytree(GROUPS / f"{golden}, {history}", path)
    found = opened_as_before(path, count, ranks)
    if history not in SUMS:
        assert "they have no saved step in common" in found
        assert all(f"{name!r} has snapshot 'one-{name}'" in found for name in "abc"[:count])
        assert 'open="mixed"' in found
        assert not [one for one in path.glob(f"{PREFIX}*") if one.suffix != ".LOCK"]
        return
    assert found == [SUMS[history]] * count
    (file,) = (one for one in path.glob(f"{PREFIX}*") if one.suffix != ".LOCK")
    for name in "abc"[:count]:
        mark = FolderState(path / name).recovery_folder.mark
        assert mark.link is not None
        assert mark.link.paths(path / name)[0] == file
        assert not mark.old
    assert opened_as_before(path, count, ranks) == [SUMS[history] + 16] * count
