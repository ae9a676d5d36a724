"""Live rows that ranks share, for a run of another number of ranks: whether a snapshot has them, which it can open."""

from __future__ import annotations

import logging
from pathlib import Path

from ...snapshots.store.folder import StoreFolder
from ...snapshots.store.folder_state import (
    RanksRecord,
    Shares,
    holder,
    live_of,
    live_together,
    marks_in,
    remove_other_shares,
    share_folder,
)
from ...snapshots.store.saving import base_of
from ..errors import StoreError
from .opening import Base, Found, Opening, lost, not_closed, own_decision, restored


def leave_ranks(path: Path, record: RanksRecord, shares: Shares, base: Base | None, refuses: bool) -> tuple[int, str]:
    """The level and text to log where rows of other ranks are left for those of `base`, or for none.

    Raises StoreError where this would lose rows that are whole, or where they are lost and open="error".
    """
    live = live_together(record, shares.values())
    if live is None:
        if refuses:
            raise StoreError(not_closed(path))
        return logging.WARNING, f"{not_all_closed(path, record, shares)}; {restored(base)}; {lost(base, None)}"
    name, step, _ = base or ("", 0, 0)
    if (live.writes, record.snapshot, live.step) != (record.saved, name, step):
        raise StoreError(keep(path, f"{record.ranks} ranks", live.step, base))
    return logging.INFO, f"store folder {path} has rows of {record.ranks} ranks; {restored(base)}"


def check_let_go(path: Path, ranks: int) -> None:
    """Raises StoreError while a process has a share of so many ranks open, as one that outlives its rank 0."""
    for rank in range(ranks):
        place = share_folder(path, rank, ranks)
        if place.is_dir() and (process := holder(place)) is not None:
            raise StoreError(
                f"{str(place)!r}, the share of rank {rank} of {ranks}, is in use by process {process or 'unknown'}: "
                "wait until that has closed it, or end that process"
            )


def keep(path: Path, whose: str, step: int, base: Base | None) -> str:
    """The error for live rows that no snapshot has, with the remedy."""
    last = "it has none" if base is None else f"its last, {base.name!r}, is of step {base.step}"
    return (
        f"store folder {str(path)!r} has live rows of {whose}, of step {step}, and no snapshot of them, as another "
        "number of ranks needs "
        f"({last}): open it with {whose} once more and save one. To do without these rows, `tierbed snapshot load` "
        'goes back to a snapshot, and open="fresh" starts empty'
    )


def not_all_closed(path: Path, record: RanksRecord, shares: Shares) -> str:
    """Why the live rows of ranks cannot be used, for the log."""
    unclosed = [rank for rank in range(record.ranks) if (live := shares.get(rank)) is None or live.run != record.run]
    if not unclosed:
        return f"store folder {path} was closed by its ranks at different steps"
    return f"store folder {path} was not closed by rank {', '.join(map(str, unclosed))} of its {record.ranks}"


def decide_alone(folder: StoreFolder, found: Found, fresh: bool, refuses: bool) -> Opening:
    """As `own_decision`, also where the live rows are of ranks. StoreError where these may be on other hosts."""
    record = folder.keeper.of_ranks
    if record is not None:
        check_let_go(folder.path, record.ranks)
    if record is None or found.mark is not None or fresh:
        return own_decision(folder, found, fresh, refuses)
    snapshot = base_of(folder.keeper)
    shares = live_of(marks_in(folder.path, record.ranks), record.ranks)
    if not shares:
        raise StoreError(
            f"store folder {str(folder.path)!r} has live rows of {record.ranks} ranks, and none of their shares is "
            f"here: open it where they are, with {record.ranks} ranks, and save a snapshot. To do without these rows, "
            '`tierbed snapshot load` goes back to a snapshot, and open="fresh" starts empty'
        )
    return Opening(snapshot=snapshot, said=leave_ranks(folder.path, record, shares, Base.of(snapshot), refuses))


def forget_ranks(folder: StoreFolder) -> None:
    """Let the live rows be this process's alone, and remove those of ranks. Raises StoreError."""
    folder.keeper.end_ranks()
    remove_other_shares(folder.path, 1)
