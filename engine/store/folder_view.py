"""What a store folder says of its live rows, read without holding it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import StoreError
from .durable import read_record, remedy_for, unseal

PLACES = ("live", "live-2")
OWN = ("base", "place")  # what the folder itself keeps in the mark


class FolderView:
    """The folder of a store, which another process may hold. `StoreFolder` says what is in it."""

    remedy = "give <persistent_path>/<embedding name>, and run as a user that can"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.snapshots = path / "snapshots"
        self._mark = path / "MARK"

    @property
    def live(self) -> Path:
        """Where the live rows are."""
        place = self._read().get("place")
        return self.path / (place if place in PLACES else PLACES[0])

    def read_mark(self) -> dict[str, Any] | None:
        """What `set_mark` stored; None where live rows are scratch or absent, or the mark is damaged. StoreError."""
        content = self._read()
        return {field: value for field, value in content.items() if field not in OWN} if "live" in content else None

    @property
    def noted_step(self) -> int | None:
        """What `note_step` was told last since the live rows carried a mark; None where that is not known."""
        try:
            return int((self.path / "STEP").read_bytes())
        except (OSError, ValueError):
            return None

    @property
    def base(self) -> str | None:
        """The snapshot that the live rows go back to: saved or loaded last. "" for none, None where it is unknown."""
        return next((name for name in self._bases() if not name or (self.snapshots / name).is_dir()), None)

    def _bases(self) -> list[str]:
        bases = self._read().get("base")
        return [name for name in bases if isinstance(name, str)] if isinstance(bases, list) else []

    @property
    def begun(self) -> bool:
        """Whether a run has ever written here: without it, a folder that has no mark is new."""
        return self._mark.exists() or self.live.exists() or self.snapshots.exists()

    @property
    def was_open(self) -> bool:
        """Whether rows were ever live here: without it, what is there are snapshots that came from elsewhere."""
        return self._mark.exists() or self.live.exists() or self.noted_step is not None

    def _read(self) -> dict[str, Any]:
        with self._errors("read the mark of"):
            try:
                content = unseal(read_record(self._mark))
            except (FileNotFoundError, ValueError):
                return {}
        return content if isinstance(content, dict) else {}

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = remedy_for(error, self.remedy)
            raise StoreError(f"cannot {action} store folder {str(self.path)!r}: {error}: {remedy}") from error
