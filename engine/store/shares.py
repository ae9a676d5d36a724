"""The folders of ranks' shares in a store folder, and what their marks say, read without holding them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .folder_state import FolderState, RanksRecord

RANKS = "ranks"  # the folder of ranks' store folders in a store folder
SHARE = "share"  # the field of a mark whose rows are one rank's


class Live(NamedTuple):
    """The live rows of a share: their run, how many operations of all ranks wrote since it began, and their step."""

    run: str
    writes: int
    step: int


Shares = Mapping[int, Live | None]  # by rank; None where the live rows carry no mark


def share_folder(store: Path, rank: int, ranks: int) -> Path:
    """The store folder of a rank's share, in the store folder `store`."""
    return store / RANKS / f"{rank}-of-{ranks}"


def live_in(mark: Mapping[str, Any] | None, rank: int, ranks: int) -> Live | None:
    """The live rows that the mark of a rank's share describes; None without a mark, or for that of another share."""
    match None if mark is None else (mark.get(SHARE), mark.get("step")):
        case ({"rank": of, "ranks": all_, "run": str(run), "writes": int(writes)}, int(step)) if (of, all_) == (
            rank,
            ranks,
        ):
            return Live(run, writes, step)
    return None


def marks_in(store: Path, ranks: int) -> dict[int, dict[str, Any] | None]:
    """The marks of shares of so many ranks that are in a store folder; other hosts may have the rest. StoreError."""
    places = {rank: share_folder(store, rank, ranks) for rank in range(ranks)}
    return {rank: FolderState(place).read_mark() for rank, place in places.items() if place.is_dir()}


def live_of(marks: Mapping[int, Mapping[str, Any] | None], ranks: int) -> Shares:
    """The live rows that the marks of shares of so many ranks describe."""
    return {rank: live_in(mark, rank, ranks) for rank, mark in marks.items()}


def live_together(record: RanksRecord, shares: Iterable[Live | None]) -> Live | None:
    """The live rows of the shares that are there; None where these are not whole, or not of one instant."""
    there = {*shares}
    live = there.pop() if len(there) == 1 else None
    return live if live is not None and live.run == record.run else None


def remove_other_shares(store: Path, ranks: int) -> None:
    """Remove the shares of other than so many ranks, which no run uses again, as far as they can be removed."""
    for place in (store / RANKS).glob("*-of-*"):
        if not place.name.endswith(f"-of-{ranks}"):
            shutil.rmtree(place, ignore_errors=True)
