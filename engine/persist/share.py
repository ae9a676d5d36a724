"""The part of a table's rows that one of several ranks has, in a store folder of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ...snapshots.store.folder_state import share_folder
from ..options.options import StoreOptions


@dataclasses.dataclass(frozen=True)
class Share:
    """What rank `rank` of `ranks` has of a table's rows. on_host: how many of the ranks divide this host's memory."""

    rank: int
    ranks: int
    on_host: int = 1

    def folder(self, store: Path) -> Path:
        """The store folder of the share, in that of the table."""
        return share_folder(store, self.rank, self.ranks)

    def options(self, options: StoreOptions) -> StoreOptions:
        """The options of the share's table: an evicting one has its part of `capacity`, rounded up."""
        if options.capacity is None or options.eviction == "none":
            return options
        return dataclasses.replace(options, capacity=-(-options.capacity // self.ranks))


@dataclasses.dataclass
class Life:
    """Which rows a share has, for comparison with those of the other ranks.

    `run`: the id of the run in which these rows began, empty or from a snapshot. `writes`: how many operations of all
    ranks wrote since.
    """

    share: Share
    run: str = ""
    writes: int = 0

    def described(self) -> dict[str, Any]:
        """The field `share` of the mark of the share's live rows."""
        return {"rank": self.share.rank, "ranks": self.share.ranks, "run": self.run, "writes": self.writes}
