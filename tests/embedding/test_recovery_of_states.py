"""After a kill, rows are those of the last durable state_dict, or of what was saved or loaded since."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from support.together import Model, killed
from tierbed.snapshots import list_snapshots

GROUPS = [("host",), ("ssd",), ("host", "ssd")]


def played(path: Path, stores: tuple[str, ...], plan: str) -> list[str | None]:
    """A plan such as "step 2; state; load-state 0; save all; load all; overwrite all; increment i1; close".

    A state is durable on return, as a file. Returns the last snapshot of each member.
    """
    model = Model(path, stores, state_dict_snapshots=True)
    files: list[Path] = []
    for part in plan.split("; "):
        first, *given = part.split()
        if first == "step":
            model.steps(int(given[0]), *given[1:])
        elif first == "state":
            files.append(path / f"state{len(files)}.pt")
            torch.save(model.state_dict(), files[-1])
        elif first == "load-state":
            model.load_state_dict(torch.load(files[int(given[0])]))
        elif first in ("save", "overwrite", "increment"):
            kind = "incremental" if first == "increment" else "full"
            model.save_snapshot(given[0], kind, overwrite=first == "overwrite")
        elif first == "state-of":
            model.members["abc".index(given[0])].state_dict()
        elif first == "load":
            model.load_snapshot(given[0])
        elif first == "prune":
            model.prune_snapshots(1)
        else:
            model.close()
            model = Model(path, stores, state_dict_snapshots=True)
            model.counts()
    return [member.last_snapshot for member in model.members]


def at(path: Path, stores: tuple[str, ...]) -> list[int]:
    model = Model(path, stores)
    found = model.at()
    model.steps(1)
    return found


PLANS = {
    "a state": ("step 3; state; step 1", 3),
    "the last of two": ("step 1; state; step 2; state; step 1", 3),
    "after a save": ("step 1; save one; step 2; state; step 1", 3),
    "before a save": ("step 1; state; step 2; save three; step 1", 3),
    "of the same rows as a save": ("step 3; save three; state; step 1", 3),
    "before a load": ("step 2; save two; step 2; state; load two; step 1", 2),
    "after a load": ("step 2; save two; step 2; state; load two; step 1; state; step 1", 3),
    "that was loaded": ("step 2; state; step 2; state; load-state 0; step 1", 2),
    "before a close": ("step 2; state; step 2; close; step 1", 2),
    "of what was closed": ("step 2; close; state; step 1", 2),
    "and a prune": ("step 1; save one; step 1; state; prune; step 1", 2),
    "replaced": ("step 1; save one; step 1; state; step 1; overwrite one; step 1", 3),
}


@pytest.mark.parametrize(
    ("stores", "plan"),
    [
        pytest.param(stores, plan, marks=[] if number % 3 == at % 3 else pytest.mark.slow)
        for number, plan in enumerate(PLANS)
        for at, stores in enumerate(GROUPS)
    ],
)
def test_a_kill_goes_back_to_the_last_state_save_or_load(tmp_path: Path, stores: tuple[str, ...], plan: str) -> None:
    steps, expected = PLANS[plan]
    killed(played, tmp_path, stores, steps)
    for _ in range(2):  # and again, as what it went back to is the recovery snapshot
        assert killed(at, tmp_path, stores) == [expected] * len(stores)


def test_a_state_of_one_of_a_group_is_no_step_of_both(tmp_path: Path) -> None:
    two = ("host", "host")
    killed(played, tmp_path, two, "step 2; state; step 1; state-of a; step 1")
    assert killed(at, tmp_path, two) == [2, 2]


def test_a_state_is_no_parent_and_no_last_snapshot(tmp_path: Path) -> None:
    one = ("host",)
    assert killed(played, tmp_path, one, "step 1; state; step 1") == [None]
    shutil.rmtree(tmp_path / "a")
    assert killed(played, tmp_path, one, "step 1; save one; step 1; state; prune; step 1; increment two") == ["two"]
    chains = {one.name: [link.name for link in one.chain] for one in list_snapshots(tmp_path / "a/snapshots").snapshots}
    assert chains["two"] == ["one", "two"]
    assert killed(at, tmp_path, one) == [3]


def test_a_state_whose_snapshot_was_removed_is_passed_over(tmp_path: Path) -> None:
    killed(played, tmp_path, ("host",), "step 1; save one; step 1; state; step 1")
    for place in (tmp_path / "a/snapshots").glob("state_dict-*"):
        shutil.rmtree(place)
    assert killed(at, tmp_path, ("host",)) == [1]
