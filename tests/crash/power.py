"""A simulated power cut: of what a killed process did to a folder, what was not synced is lost, in part or in whole.

More may be lost than a real file system loses: names of a folder that was not synced since, each folder's latest
changes first, though their files were synced; and the content of files past the size they had at their last sync.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class File:
    """The content of an inode: whether all is synced, and the size that it had at the last sync."""

    synced: bool = True
    size: int = 0


@dataclass
class Folder:
    """A folder where it is now, and what was done to its names since its last sync."""

    parent: Folder | None
    name: str
    changes: list[Change] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return Path(self.name) if self.parent is None else self.parent.path / self.name


@dataclass
class Change:
    """What was done as the `number`th: a name came to be, by a rename out of `source`, or went, kept in `aside`.

    An exchange is of the folders `moved`, at `name` since, and `other`, at `source`.
    """

    number: int
    done: str
    folder: Folder
    name: str
    aside: str = ""
    source: tuple[Folder, str] | None = None
    moved: Folder | None = None
    other: Folder | None = None

    def undo(self) -> None:
        path = self.folder.path / self.name
        if self.other is not None:
            self._undo_exchange(path, self.other)
        elif self.done == "rmdir":
            path.mkdir(exist_ok=True)
        elif self.done == "unlink":
            if not os.path.lexists(path):
                os.link(self.aside, path)
        elif not os.path.lexists(path):  # gone since, by a change that lasted
            return
        elif self.source is not None:
            folder, name = self.source
            if folder.path.is_dir():
                path.rename(folder.path / name)
                if self.moved is not None:
                    self.moved.parent, self.moved.name = folder, name
            if self.aside:
                os.link(self.aside, path)
        elif path.is_dir():
            shutil.rmtree(path)  # with names that would have lasted in it
        else:
            path.unlink()

    def _undo_exchange(self, path: Path, other: Folder) -> None:
        assert self.source is not None
        assert self.moved is not None
        place = self.source[0].path / self.source[1]
        between = place.with_name(f"{place.name}-between")
        if path.is_dir() and place.is_dir():
            place.rename(between)
            path.rename(place)
            between.rename(path)
            other.parent, other.name, self.moved.parent, self.moved.name = self.folder, self.name, *self.source


class Disk:
    """What a trace of `crash_io.cpp` did below `root`."""

    def __init__(self, root: Path, trace: str) -> None:
        self.root = Folder(None, str(root))
        self._folders = {str(root): self.root}
        self._all = [self.root]
        self.files: dict[int, File] = {}
        for number, line in enumerate(trace.splitlines()):
            if line.endswith("\t."):  # else a kill cut it off, and what was done lasts
                self._replay(number, *line.split("\t")[:-1])

    def cut(self, chance: random.Random) -> int:
        """Lose what is not synced. Returns how many changes of names and contents."""
        lost: list[Change] = []
        for folder in self._all:
            keep = chance.choice([0, 0, chance.randint(0, len(folder.changes)), len(folder.changes)])
            lost += folder.changes[keep:]
        for change in sorted(lost, key=lambda change: -change.number):
            if change.folder.path.is_dir():
                change.undo()
        return len(lost) + sum(self._lose(path, chance) for path in self.root.path.rglob("*") if path.is_file())

    def _lose(self, path: Path, chance: random.Random) -> bool:
        """Content of a file past its last sync: cut off or zeros, or there by luck."""
        file = self.files.get(path.stat().st_ino, File())
        if file.synced:
            return False
        size, way = path.stat().st_size, chance.choice(["cut", "zeros", "luck"])
        if way != "luck" and file.size < size:
            os.truncate(path, file.size)
        if way == "zeros":
            os.truncate(path, size)
        return way != "luck"

    def _replay(self, number: int, done: str, path: str, *more: str) -> None:
        place = Path(path)
        if done == "sync folder":
            self._folder(place).changes.clear()
        elif done in ("write", "create"):
            self.files.setdefault(int(more[0]), File()).synced = False
        elif done == "sync":
            self.files[int(more[0])] = File(True, int(more[1]))
        if done in ("create", "mkdir", "link", "unlink", "rmdir"):
            change = Change(number, done, self._folder(place.parent), place.name, aside=more[0] if more else "")
            change.folder.changes.append(change)
        if done == "mkdir":
            self._folder(place)
        if done in ("rename", "exchange"):
            to, source = Path(more[0]), (self._folder(place.parent), place.name)
            target = self._folder(to.parent), to.name
            if done == "rename":
                change = Change(number, done, *target, more[1], source, self._move(path, more[0]))
            else:
                change = Change(number, done, *target, "", source, self._folder(place), self._folder(to))
                for old, new in ((path, f"{path}-between"), (more[0], path), (f"{path}-between", more[0])):
                    self._move(old, new)
            change.folder.changes.append(change)

    def _folder(self, path: Path) -> Folder:
        known = self._folders.get(str(path))
        if known is None:
            known = self._folders[str(path)] = Folder(self._folder(path.parent), path.name)
            self._all.append(known)
        return known

    def _move(self, path: str, to: str) -> Folder | None:
        """The folder that a rename moved, under its new name, where what was done in it may have to be undone."""
        moved = self._folders.get(path)
        if moved is None:
            return None
        moved.parent, moved.name = self._folder(Path(to).parent), Path(to).name
        for known in [name for name in self._folders if name == path or name.startswith(f"{path}/")]:
            self._folders[to + known[len(path) :]] = self._folders.pop(known)
        return moved
