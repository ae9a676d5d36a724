"""The file MARK of a store folder as a value: read once, passed along, and replaced as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ...engine.durable import unseal
from ..files.format import FOLDER_FIELDS
from ..files.versions import AT, GROUP, At, GroupRecord

LIVE_FOLDERS = ("live", "live-2")


class RanksRecord(NamedTuple):
    """The ranks that have the live rows as shards.

    `run`: the id of the run in which the rows began, empty or from a snapshot. `saved`: the number of collective writes
    since then when the recovery snapshot `snapshot` was saved or loaded; "" for none.
    """

    ranks: int
    run: str
    saved: int
    snapshot: str


class RecoveryCandidate(NamedTuple):
    """A name for the recovery snapshot, "" for none: it counts once it no longer has the id `replaced`, if given.

    of_state: whether a `state_dict()` made it.
    """

    name: str
    replaced: str | None = None
    of_state: bool = False

    def plain(self) -> Any:
        if self.of_state:
            return [self.name]
        return self.name if self.replaced is None else [self.name, self.replaced]

    @classmethod
    def parse(cls, value: Any) -> RecoveryCandidate | None:
        """From `plain`; None if it is invalid."""
        match value:
            case str(name):
                return cls(name)
            case [str(name), str(replaced)]:
                return cls(name, replaced)
            case [str(name)]:
                return cls(name, of_state=True)
        return None


@dataclass(frozen=True)
class Mark:
    """What MARK says.

    exists: whether there is such a file, undamaged. clean_marker: the description of the live rows, None if they are
    not clean or absent. live: their folder. candidates: names for the recovery snapshot, of which the first one that
    exists counts; None if it is unknown. ranks: of shards. group, at: of stores that are trained together.
    """

    exists: bool = True
    clean_marker: dict[str, Any] | None = None
    live: str = LIVE_FOLDERS[0]
    candidates: tuple[RecoveryCandidate, ...] | None = None
    ranks: RanksRecord | None = None
    group: GroupRecord | None = None
    at: At | None = None

    @property
    def load(self) -> At | None:
        """`at` of a load, which counts until rows are written; that of a recovery ends with the clean marker."""
        return self.at if self.at is not None and self.at.by == "load" else None

    def plain(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "base": None if self.candidates is None else [one.plain() for one in self.candidates],
            "place": self.live,
            "ranks": self.ranks,
            GROUP: self.group and self.group.plain(),
            AT: self.at and self.at.plain(),
        }
        return {**(self.clean_marker or {}), **{name: value for name, value in fields.items() if value is not None}}

    @classmethod
    def parse(cls, data: bytes) -> Mark:
        """From the content of the file; one that does not exist if it is damaged."""
        try:
            content = unseal(data)
        except ValueError:
            return cls(exists=False)
        if not isinstance(content, dict) or not content:
            return cls(exists=False)
        marker = {name: value for name, value in content.items() if name not in FOLDER_FIELDS}
        ranks, base, live = None, content.get("base"), content.get("place")
        match content.get("ranks"):
            case [int(count), str(run), int(saved), str(snapshot)] if 0 < count <= 1024:
                ranks = RanksRecord(count, run, saved, snapshot)
        candidates = [one for one in map(RecoveryCandidate.parse, base) if one] if isinstance(base, list) else None
        return cls(
            clean_marker=marker if "live" in marker else None,
            live=live if live in LIVE_FOLDERS else LIVE_FOLDERS[0],
            candidates=None if candidates is None else tuple(candidates),
            ranks=ranks,
            group=GroupRecord.parse(content.get(GROUP)),
            at=At.parse(content.get(AT)),
        )
