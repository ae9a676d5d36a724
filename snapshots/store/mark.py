"""The file MARK of a store folder as a value: read once, passed along, and replaced as a whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.durable import unseal
from ..files.format import FOLDER_FIELDS, LIVE, OLD_GROUP, SHARE
from .record import Place, Record

LIVE_FOLDERS = ("live", "live-2")


class RanksRecord(NamedTuple):
    """How many ranks have the live rows as shards.

    Of stores of an earlier version, `run`: the id of the run in which the rows began. `saved`: the number of collective
    writes since then when the recovery snapshot was saved or loaded.
    """

    ranks: int
    run: str = ""
    saved: int = -1


class Link(NamedTuple):
    """Where the file of a group's record is: relative to what names it, and absolute."""

    relative: str
    absolute: str

    @classmethod
    def to(cls, file: Path, folder: Path) -> Link:
        return cls(os.path.relpath(file, folder), str(file))

    def paths(self, folder: Path) -> list[Path]:
        """Where the file may be, named by something in `folder`."""
        return [Path(os.path.normpath(folder / self.relative)), Path(self.absolute)]


class RecoveryCandidate(NamedTuple):
    """A name for the recovery snapshot, "" for none: it counts once it no longer has the id `replaced`, if given.

    of_state: whether a `state_dict()` made it.
    """

    name: str
    replaced: str | None = None
    of_state: bool = False

    def plain(self) -> str | list[str]:
        if self.of_state:
            return [self.name]
        return self.name if self.replaced is None else [self.name, self.replaced]

    @classmethod
    def parse(cls, value: Any) -> RecoveryCandidate | None:
        """None if it is invalid."""
        match value:
            case str(name):
                return cls(name)
            case [str(name), str(replaced)]:
                return cls(name, replaced)
            case [str(name)]:
                return cls(name, of_state=True)
        return None


class OldGroup(NamedTuple):
    """What an earlier version noted of stores that are trained together: this one's id, and the places of others."""

    id: str
    others: dict[str, Place]

    @classmethod
    def parse(cls, value: Any) -> OldGroup | None:
        """None if it is invalid."""
        match value:
            case {"id": str(id), "peers": dict(peers)}:
                return cls(id, {str(other): Place(*map(str, place)) for other, place in peers.items()})
        return None


@dataclass(frozen=True)
class Mark:
    """What MARK says.

    exists: whether there is such a file, undamaged. clean_marker: the description of the live rows, None if they are
    not clean or absent. live: their folder. ranks: of shards. store: the id of the store. record: of a store that is
    trained alone. link: to the file with the record of its group otherwise.

    A store that an earlier version wrote has neither. candidates: names for its recovery snapshot, of which the first
    one that exists counts; None if it is unknown. group: of those that it was trained together with.
    """

    exists: bool = True
    clean_marker: dict[str, Any] | None = None
    live: str = LIVE_FOLDERS[0]
    ranks: RanksRecord | None = None
    store: str = ""
    record: Record | None = None
    link: Link | None = None
    candidates: tuple[RecoveryCandidate, ...] | None = None
    group: OldGroup | None = None

    def plain(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "place": self.live,
            "ranks": self.ranks,
            "store": self.store,
            "record": self.record and self.record.plain(),
            "link": self.link,
            "base": None if self.candidates is None else [one.plain() for one in self.candidates],
            OLD_GROUP: self.group and {"id": self.group.id, "peers": self.group.others},
        }
        return {**(self.clean_marker or {}), **{name: value for name, value in fields.items() if value is not None}}

    @classmethod
    def parse(cls, data: bytes) -> Mark:
        """From the content of the file; one that does not exist if it is damaged."""
        try:
            content = unseal(data)
            if not isinstance(content, dict) or not content:
                return cls(exists=False)
            marker = {name: value for name, value in content.items() if name not in FOLDER_FIELDS}
            live, base, ranks = content.get("place"), content.get("base"), content.get("ranks")
            candidates = [one for one in map(RecoveryCandidate.parse, base) if one] if isinstance(base, list) else None
            return cls(
                clean_marker=marker if "live" in marker else None,
                live=live if live in LIVE_FOLDERS else LIVE_FOLDERS[0],
                ranks=None if ranks is None else RanksRecord(*ranks[:3]),
                store=str(content.get("store", "")),
                record=None if content.get("record") is None else Record.parse(content["record"]),
                link=None if content.get("link") is None else Link(*map(str, content["link"])),
                candidates=None if candidates is None else tuple(candidates),
                group=OldGroup.parse(content.get(OLD_GROUP)),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls(exists=False)


def live_version(marker: Mapping[str, Any] | None) -> str | None:
    """The version of the live rows that a clean marker describes; None without one."""
    if marker is None:
        return None
    match marker.get(SHARE), marker.get(LIVE):
        case {"run": str(run), "writes": int(writes)}, _:
            return f"{run}:{writes}"
        case _, str(version):
            return version
        case _, [[str(epoch), int(writes)], _]:  # of an earlier version
            return f"{epoch}:{writes}"
    return "unnamed"  # of an earlier version
