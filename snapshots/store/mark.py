"""The content of the file MARK, which each store folder contains, as an immutable value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.durable import unseal
from ..files.format import FOLDER_FIELDS, LIVE_VERSION, OLD_CANDIDATES, OLD_GROUP, SHARD_FIELD
from .recovery_rule import Record

LIVE_FOLDERS = ("live", "live-2")


class ShardLayout(NamedTuple):
    """How many ranks divide the live rows into shards. Only earlier versions wrote the fields `run` and `saved`."""

    num_ranks: int
    run: str = ""  # the id of the run that wrote the first rows
    saved: int = -1  # how many collective writes preceded the recovery snapshot's save or load


class Link(NamedTuple):
    """Points to a group's record file by two paths: one relative to the pointing file's folder, and one absolute."""

    relative: str
    absolute: str

    @classmethod
    def make(cls, file: Path, folder: Path) -> Link:
        return cls(os.path.relpath(file, folder), str(file))

    def list_paths(self, folder: Path) -> list[Path]:
        """Returns both paths of the record file. The relative path is resolved against `folder`."""
        return [Path(os.path.normpath(folder / self.relative)), Path(self.absolute)]


@dataclass(frozen=True)
class Mark:
    """The content of the file MARK."""

    exists: bool = True  # False if the file is missing or damaged
    clean_marker: dict[str, Any] | None = None  # describes the live rows; None if absent or not clean
    live_folder_name: str = LIVE_FOLDERS[0]
    shard_layout: ShardLayout | None = None  # set if several ranks divide the rows
    store_id: str = ""
    record: Record | None = None  # set if the store trains alone
    link: Link | None = None  # the group's record file; set if the store trains together with others
    old_fields: Mapping[str, Any] = field(default_factory=dict)  # of earlier versions, instead of record and link

    def to_plain(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "place": self.live_folder_name,
            "ranks": self.shard_layout,
            "store": self.store_id,
            "record": self.record and self.record.to_plain(),
            "link": self.link,
            **self.old_fields,
        }
        return {**(self.clean_marker or {}), **{name: value for name, value in fields.items() if value is not None}}

    @classmethod
    def parse(cls, data: bytes) -> Mark:
        """Parse the content of a file MARK. If the content is damaged, the result has `exists=False`."""
        try:
            content = unseal(data)
            if not isinstance(content, dict) or not content:
                return cls(exists=False)
            marker = {name: value for name, value in content.items() if name not in FOLDER_FIELDS}
            folder_name, ranks = content.get("place"), content.get("ranks")
            return cls(
                clean_marker=marker if "live" in marker else None,
                live_folder_name=folder_name if folder_name in LIVE_FOLDERS else LIVE_FOLDERS[0],
                shard_layout=None if ranks is None else ShardLayout(*ranks[:3]),
                store_id=str(content.get("store", "")),
                record=None if content.get("record") is None else Record.parse(content["record"]),
                link=None if content.get("link") is None else Link(*map(str, content["link"])),
                old_fields={x: content[x] for x in (OLD_CANDIDATES, OLD_GROUP) if content.get(x) is not None},
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return cls(exists=False)


def read_live_version(marker: Mapping[str, Any] | None) -> str | None:
    """Returns the version of the live rows that a clean marker describes, or None without a marker."""
    if marker is None:
        return None
    match marker.get(SHARD_FIELD), marker.get(LIVE_VERSION):
        case {"run": str(run), "writes": int(writes)}, _:
            return f"{run}:{writes}"
        case _, str(version):
            return version
        case _, [[str(epoch), int(writes)], _]:  # the form that an earlier version wrote
            return f"{epoch}:{writes}"
    return "unnamed"  # an earlier version wrote this marker
