"""The file MARK of a store folder as a value: read once, passed along, and replaced as a whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.durable import unseal
from ..files.format import FOLDER_FIELDS, LIVE, OLD_CANDIDATES, OLD_GROUP, SHARE
from .recovery_rule import Record

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


@dataclass(frozen=True)
class Mark:
    """What MARK says.

    exists: whether there is such a file, undamaged. clean_marker: the description of the live rows, None if they are
    not clean or absent. live: their folder. ranks: of shards. store: the id of the store. record: of a store that is
    trained alone. link: to the file with the record of its group otherwise. A store that an earlier version wrote has
    neither, but fields that `old_stores` reads: `old`.
    """

    exists: bool = True
    clean_marker: dict[str, Any] | None = None
    live: str = LIVE_FOLDERS[0]
    ranks: RanksRecord | None = None
    store: str = ""
    record: Record | None = None
    link: Link | None = None
    old: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "place": self.live,
            "ranks": self.ranks,
            "store": self.store,
            "record": self.record and self.record.plain(),
            "link": self.link,
            **self.old,
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
            live, ranks = content.get("place"), content.get("ranks")
            return cls(
                clean_marker=marker if "live" in marker else None,
                live=live if live in LIVE_FOLDERS else LIVE_FOLDERS[0],
                ranks=None if ranks is None else RanksRecord(*ranks[:3]),
                store=str(content.get("store", "")),
                record=None if content.get("record") is None else Record.parse(content["record"]),
                link=None if content.get("link") is None else Link(*map(str, content["link"])),
                old={name: content[name] for name in (OLD_CANDIDATES, OLD_GROUP) if content.get(name) is not None},
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
