"""The content of the file MARK, which each store folder contains, as an immutable value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.durable import read_record_bytes, unseal
from ...engine.errors import StoreError
from ..files.format import FOLDER_FIELDS, LIVE_VERSION, SHARD_FIELD
from .recovery_rule import Record

FORMAT = 1  # the format of MARK and of the record files GROUP-<id>
LIVE_FOLDERS = ("live", "live-2")
PARSE_ERRORS = (ValueError, TypeError, KeyError, AttributeError)  # exceptions raised for a damaged file


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
    num_ranks: int = 0  # how many ranks divide the rows into shards; 0 if a single process has all rows
    store_id: str = ""
    record: Record | None = None  # set if the store trains alone
    link: Link | None = None  # the group's record file; set if the store trains together with others

    def to_plain(self) -> dict[str, Any]:
        return {
            **(self.clean_marker or {}),
            "format": FORMAT,
            "place": self.live_folder_name,
            "ranks": self.num_ranks,
            "store": self.store_id,
            "record": self.record and self.record.to_plain(),
            "link": self.link,
        }

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Mark:
        """Parse the result of `to_plain`. Raises one of PARSE_ERRORS for invalid input."""
        marker = {name: value for name, value in content.items() if name not in FOLDER_FIELDS}
        return cls(
            clean_marker=marker if "live" in marker else None,
            live_folder_name=LIVE_FOLDERS[LIVE_FOLDERS.index(content["place"])],
            num_ranks=int(content["ranks"]),
            store_id=str(content["store"]),
            record=None if content["record"] is None else Record.parse(content["record"]),
            link=None if content["link"] is None else Link(*map(str, content["link"])),
        )


def read_store_file(path: Path) -> dict[str, Any]:
    """Returns the content of a file MARK or GROUP-<id>.

    Raises StoreError if the file has another format, ValueError if it is damaged, OSError if it cannot be read.
    """
    content = unseal(read_record_bytes(path))
    if type(content) is not dict:
        raise ValueError("it is not a map")
    if content.get("format") != FORMAT:
        raise StoreError(
            f"{str(path)!r} has format {content.get('format')}, but this version of tierbed reads format {FORMAT}. "
            "Open the store with the version that wrote the file. To use the rows here, save a snapshot with that "
            "version, and load it into a new store folder"
        )
    return content


def read_live_version(marker: Mapping[str, Any] | None) -> str | None:
    """Returns the version of the live rows that a clean marker describes, or None without a marker."""
    marker = marker or {}
    match marker.get(SHARD_FIELD), marker.get(LIVE_VERSION):
        case {"run": str(run), "writes": int(writes)}, _:
            return f"{run}:{writes}"
        case _, str(version):
            return version
    return None
