"""The snapshots of an embedding, and what its `state_dict()` says of its rows, which it does not hold."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import OptionError
from ..ops.rows import Rows
from ..persist.saves import SavedAs
from ..table.background import BackgroundSave

if TYPE_CHECKING:
    from ..persist.opened import TableHandle

log = logging.getLogger("tierbed")

EXTRA = "_extra_state"  # the name that torch gives it in a state_dict


class SavedRows(Rows):
    """Of the embedding modules: saving their rows."""

    _version = 2  # of the state_dict: 1 had no extra state
    _closed: bool
    _held: TableHandle | None
    _awaited: SavedAs | None = None  # of a state_dict, to be compared once there are rows

    @property
    def is_open(self) -> bool:
        """Whether its store is open: from the first use to `close`."""
        return self._held is not None and not self._closed

    def opened(self) -> TableHandle:
        """The table, opened where it is not yet."""
        raise NotImplementedError

    def save_snapshot(
        self, snapshot_name: str, kind: str = "full", background: bool = False, *, overwrite: bool = False
    ) -> BackgroundSave | None:
        """Save all rows with optimizer state in the store folder, durably when it returns.

        kind: "full"; "incremental", what changed since the snapshot that was saved or loaded last; or "checkpoint" of
        a cached_ssd store, by links to RocksDB's files (docs/snapshots.md). background: return at once what a thread
        saves, the rows as they are now, while training goes on; its `wait()` returns when the snapshot is durable, and
        raises what went wrong. overwrite: take the place of a snapshot of that name, at one instant when the new one is
        durable; not of one that another goes over. Raises SnapshotError, StoreError, OptionError.
        """
        _check_flag("background", background)
        _check_flag("overwrite", overwrite)
        if background:
            return self.opened().save_in_background(snapshot_name, kind, overwrite)
        self.opened().save_snapshot(snapshot_name, kind, overwrite)
        return None

    def check_save(self, snapshot_name: str, kind: str = "full", *, overwrite: bool = False) -> None:
        """Raise what `save_snapshot` of these arguments would raise now: call it before the training that it saves.

        SnapshotError for a name that cannot be used, is taken, or with `overwrite` cannot be replaced; OptionError.
        """
        _check_flag("overwrite", overwrite)
        self.opened().check_save(snapshot_name, kind, overwrite)

    def prune_snapshots(self, keep_last: int, keep_every: int | None = None) -> list[str]:
        """Remove snapshots from the store folder, and return the names of those removed. OptionError, SnapshotError.

        keep_last: so many of the latest stay. keep_every: so does, for each so many steps, the first that reached them.
        `last_snapshot` stays, and all that one of these goes over.
        """
        return self.opened().prune_snapshots(keep_last, keep_every)

    @property
    def last_snapshot(self) -> str | None:
        """The snapshot that was saved or loaded last, to which rows go back after a kill; None where there is none."""
        return None if self._held is None else self._held.base

    def get_extra_state(self) -> Tensor:
        """Of `state_dict()`: JSON with the `step` of the rows, the `snapshot` of that step and its `digest`, as uint8
        [bytes]. Each is None where there is none: rows that were not used yet, or not saved at that step."""
        named = dict.fromkeys(SavedAs._fields) if self._held is None else self._held.named()._asdict()
        # a tensor, since what handles a state_dict may take nothing else
        return torch.frombuffer(bytearray(json.dumps(named).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Of `load_state_dict()`; a warning says where the rows are others, now or when they are used first."""
        try:
            named = json.loads(bytes(state.to(torch.uint8).tolist()))
            step, snapshot, digest = named["step"], named["snapshot"], named.get("digest")
            if type(step) not in (int, type(None)) or not all(isinstance(n, str | None) for n in (snapshot, digest)):
                raise ValueError
        except (AttributeError, RuntimeError, TypeError, ValueError, KeyError):
            log.warning("%r does not say which rows it belongs to: its extra state cannot be read", self)
            return
        self._awaited = None if step is None else SavedAs(step, snapshot, digest)
        if self._held is not None:
            self._compare_awaited()

    def _compare_awaited(self) -> None:
        assert self._held is not None
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            self._held.compare(awaited)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing: list[str], *more: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, *more)
        if prefix + EXTRA in missing:  # of version 1
            missing.remove(prefix + EXTRA)


def _check_flag(argument: str, value: object) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{argument}={value!r}: give True or False")
