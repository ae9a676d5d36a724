"""Versions of the rows of a store, and the instants of stores that are trained together.

A *version* is (epoch, writes): a random name, drawn each time that rows are opened, and the number of updates, puts and
erasures since then. Rows that were opened or loaded completely keep the version of their source until their first
write. Equal versions are equal rows.

An *instant* is a moment when no store of a group was in a step: a number larger than all earlier ones, and the versions
of all stores at that moment, by their ids. docs/snapshots.md describes how recovery chooses one.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

Version = tuple[str, int]

EMPTY: Version = ("", 0)  # of a store without written rows
LIVE = "version"  # the field of a clean marker with the version of the live rows
GROUP, AT = "group", "at"  # fields of MARK: `GroupRecord`, `At`
_MAX_PAST = 1000


class Rows(NamedTuple):
    """The version of a store's rows, and its past: the last version of each earlier epoch, the newest first."""

    now: Version
    past: tuple[Version, ...] = ()

    def went_through(self, version: Version) -> bool:
        """Whether the rows have, or once had, this version."""
        return any(version[0] == epoch and version[1] <= writes for epoch, writes in (self.now, *self.past))

    def began(self, epochs: Iterable[str]) -> tuple[Version, ...]:
        """The past of the rows after their next write. epochs: those of which snapshots exist."""
        known = {*epochs, "", self.now[0]}
        return tuple(version for version in (self.now, *self.past) if version[0] in known)[:_MAX_PAST]

    @classmethod
    def parse(cls, value: Any) -> Rows | None:
        """From a stored value; None if it is invalid."""
        match value:
            case [now, list(past)] if (version := parse_version(now)) is not None:
                known = [parse_version(other) for other in past]
                return cls(version, tuple(other for other in known if other is not None))
        return None


def parse_version(value: Any) -> Version | None:
    match value:
        case [str(epoch), int(writes)]:
            return epoch, writes
    return None


class Instant(NamedTuple):
    """The versions of all stores of a group at one moment, by their ids; None for an unknown one."""

    number: int
    versions: dict[str, Version | None]

    def plain(self) -> dict[str, Any]:
        return self._asdict()

    @property
    def digest(self) -> str | None:
        """A hash of the versions, by which a state_dict names the instant; None if a version is unknown."""
        if None in self.versions.values():
            return None
        return hashlib.sha256(json.dumps(sorted(self.versions.items())).encode()).hexdigest()[:16]

    @classmethod
    def parse(cls, value: Any) -> Instant | None:
        """From `plain`; None if it is invalid."""
        match value:
            case {"number": int(number), "versions": dict(versions)}:
                return cls(number, {str(id): parse_version(version) for id, version in versions.items()})
        return None


class Peer(NamedTuple):
    """Another store of a group: the name of its embedding, and its folder, relative to this store and absolute."""

    name: str
    relative: str
    absolute: str

    @classmethod
    def of(cls, name: str, store: Path, other: Path) -> Peer:
        return cls(name, os.path.relpath(other, store), str(other))

    def places(self, store: Path) -> list[Path]:
        """Where the folder may be. store: the folder of the store that names it."""
        return [Path(os.path.normpath(store / self.relative)), Path(self.absolute)]


@dataclass
class GroupRecord:
    """What MARK stores about the embeddings that a store is trained together with.

    `id`: of this store, drawn when its rows were created or joined. `joined`: the version with which it joined, which
    it also has in instants that lack it. `instant`: of the last join, load or recovery before a write.
    `number`: the largest that the store knows. `cut`: the numbers of the instant of the last recovery and of the latest
    one before it: recovery undid the snapshots in between. `began`: the rows with which a run of ranks began.
    """

    id: str
    peers: dict[str, Peer]
    joined: Version = EMPTY
    instant: Instant | None = None
    number: int = 0
    cut: tuple[int, int] = (0, 0)
    began: Rows | None = None

    def plain(self) -> dict[str, Any]:
        return {**vars(self), "instant": self.instant and self.instant.plain()}

    @classmethod
    def parse(cls, value: Any) -> GroupRecord | None:
        """From `plain`; None if it is invalid."""
        match value:
            case {"id": str(id), "peers": dict(peers), "number": int(number), "cut": [int(low), int(high)], **more}:
                joined, instant = parse_version(more.get("joined")) or EMPTY, Instant.parse(more.get("instant"))
                began = Rows.parse(more.get("began"))
                return cls(id, parse_peers(peers), joined, instant, number, (low, high), began)
        return None


def parse_peers(value: Mapping[Any, Any]) -> dict[str, Peer]:
    peers = {}
    for id, peer in value.items():
        match peer:
            case [str(name), str(relative), str(absolute)]:
                peers[str(id)] = Peer(name, relative, absolute)
    return peers


class Before(NamedTuple):
    """The rows before a load of only one store, and the number of the load."""

    rows: Rows
    number: int

    @classmethod
    def parse(cls, value: Any) -> Before | None:
        """From a stored value; None if it is invalid."""
        match value:
            case [plain, int(number)] if (rows := Rows.parse(plain)) is not None:
                return cls(rows, number)
        return None


class At(NamedTuple):
    """Rows that have `version` until their first write, by a "recovery" or a "load".

    all: for a load of several stores, the instant that all of them get. before: for a load of only this store. A kill
    undoes that load until the store is written or saved, or another store records an instant with these rows. So a kill
    undoes all of the loads that a user makes one after the other, not half of them.
    """

    version: Version
    by: str
    all: Instant | None = None
    before: Before | None = None

    def plain(self) -> dict[str, Any]:
        plain = {"version": self.version, "by": self.by, "all": self.all and self.all.plain()}
        return plain if self.before is None else {**plain, "before": self.before}

    @classmethod
    def parse(cls, value: Any) -> At | None:
        """From `plain`; None if it is invalid."""
        match value:
            case {"version": version, "by": "recovery" | "load" as by, "all": all_, **more} if parse_version(version):
                before = Before.parse(more.get("before"))
                return cls(parse_version(version) or EMPTY, by, Instant.parse(all_), before)
        return None


class Saved(NamedTuple):
    """The field `instant` of a snapshot's manifest: what it records for the group that its store trains with.

    id: the id of the store. rows: the version of the saved rows, and their earlier ones. peers: the other stores, as in
    GroupRecord.
    """

    id: str
    rows: Rows
    instant: Instant
    peers: dict[str, Peer]

    def plain(self) -> dict[str, Any]:
        """As a manifest stores it. Older versions require the field `first`."""
        return {"id": self.id, "rows": self.rows, **self.instant.plain(), "peers": self.peers, "first": None}

    @classmethod
    def parse(cls, value: Any) -> Saved | None:
        """From `plain`; None if it is invalid."""
        match value:
            case {"id": str(id), "rows": plain, "peers": dict(peers)} if (rows := Rows.parse(plain)) and (
                instant := Instant.parse(value)
            ):
                return cls(id, rows, instant, parse_peers(peers))
        return None


class Versions:
    """The versions of the rows of an open store."""

    def __init__(self, opened: Rows, epochs: Iterable[str] = ()) -> None:
        """opened: of the rows at the open. epochs: those of which the store has snapshots."""
        self._initial, self._began = opened, opened.began(epochs)
        self._epoch, self.writes = secrets.token_hex(8), 0

    @property
    def rows(self) -> Rows:
        return self._initial if self.writes == 0 else Rows((self._epoch, self.writes), self._began)
