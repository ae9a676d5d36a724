"""The snapshots of an embedding, and what its `state_dict()` says of rows in place of holding them."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from ...snapshots.store.selection import LoadReport, Selection, Where
from ..errors import InputError, OptionError
from ..ops.rows_contract import Rows
from ..persist.saved_as import SavedAs
from ..table.background_save import Saving

if TYPE_CHECKING:
    from ..persist.held_contract import Held
    from ..persist.training_group import TrainingGroup

log = logging.getLogger("tierbed")

EXTRA = "_extra_state"  # torch's name for extra state in a state_dict


class SavedRows(Rows):
    """The part of the embedding modules that saves their rows."""

    _version = 2  # of the state_dict; version 1 had no extra state
    _closed: bool
    _held: Held | None
    group: TrainingGroup | None = None  # the embeddings that it is trained together with
    _awaited: SavedAs | None = None  # names rows in a loaded state_dict, to be compared once there are rows

    @property
    def is_open(self) -> bool:
        """Whether the embedding's store is open, from the first use to `close`."""
        return self._held is not None and not self._closed

    def opened(self, for_load: bool = False) -> Held:
        """The table, opened where it is not yet. for_load: whether its rows are about to be replaced."""
        raise NotImplementedError

    def join(self) -> None:
        """Note that `group` has changed."""
        if self._held is not None and self.group is not None and not self._closed:
            self._held.join(self.group)

    @contextmanager
    def told(self) -> Iterator[None]:
        """A block before the exchanges of a call of all ranks: what it raises on one rank is raised on all."""
        try:
            yield
        except Exception as error:
            if self.world is not None and self.world.untold(error) and detect_fake_mode() is None:
                self.world.meet(f"a call of embedding {self.name!r}", error)
            raise

    def save_snapshot(
        self, snapshot_name: str, kind: str = "full", background: bool = False, *, overwrite: bool = False
    ) -> Saving | None:
        """Save all rows with optimizer state in the store folder. The snapshot is durable on return.

        kind: "full"; "incremental", what changed since the snapshot that was saved or loaded last; or "checkpoint" of
        a cached_ssd store, by links to RocksDB's files (docs/snapshots.md).
        background: return at once, while a thread saves the rows as they are now. `wait()` of the result returns when
        the snapshot is durable, and raises what went wrong.
        overwrite: whether to replace a snapshot of that name, at one instant when the new one is durable. A snapshot
        that another goes over cannot be replaced. Raises SnapshotError, StoreError, OptionError.
        """
        with self.told():
            _check_flag("background", background)
            _check_flag("overwrite", overwrite)
            held = self.opened()
        if background:
            return held.save_in_background(snapshot_name, kind, overwrite)
        held.save_snapshot(snapshot_name, kind, overwrite)
        return None

    def load_snapshot(
        self,
        snapshot_name: str,
        tables: Collection[int | str] | None = None,
        where: Where | None = None,
        strict: bool = True,
        weights_only: bool = False,
        convert: bool = False,
    ) -> LoadReport:
        """Replace all rows by the rows of a snapshot, or by a selection of them. Returns what was loaded.

        tables: the table ids, or names, to take. where: a function of arrays (table_ids [n], keys [n]) that gives bool
        [n], the rows to take. weights_only: whether to leave out the optimizer's state; then the optimizer may be
        another, and begins anew.
        strict: whether all of the snapshot must fit. If not, tables that the embedding lacks or has under another name,
        and another optimizer's state, are left out, as the report's `remarks` say.
        convert: whether numbers of another dtype are converted: widening is exact, narrowing rounds to nearest even.

        The snapshot is checked first, and rows stay where this raises: SnapshotError where the snapshot is missing,
        damaged or of another table; StoreError where its tables have other names; OptimizerError where its state is
        another optimizer's; InputError for a selection that cannot be, or a number that a narrower dtype cannot hold.
        """
        with self.told():
            for argument, value in (("strict", strict), ("weights_only", weights_only), ("convert", convert)):
                if not isinstance(value, bool):
                    raise InputError(f"{argument}={value!r}: give True or False")
            held = self.opened(for_load=True)
        selection = Selection(tables, where, not weights_only, convert=convert)
        return held.load_snapshot(snapshot_name, selection, strict)

    def check_save(self, snapshot_name: str, kind: str = "full", *, overwrite: bool = False) -> None:
        """Raise what `save_snapshot` would raise now for these arguments. Call it before the training to be saved.

        SnapshotError for a name that cannot be used or is taken, or with `overwrite` cannot be replaced; OptionError.
        """
        with self.told():
            _check_flag("overwrite", overwrite)
            held = self.opened()
        held.check_save(snapshot_name, kind, overwrite)

    def prune_snapshots(self, keep_last: int, keep_every: int | None = None) -> list[str]:
        """Remove snapshots from the store folder, and return the names of those removed. OptionError, SnapshotError.

        keep_last: how many of the latest stay. keep_every: of each so many steps, the first snapshot that reached them
        stays. `last_snapshot` stays, and all that a snapshot which stays goes over.
        """
        with self.told():
            held = self.opened()
        return held.prune_snapshots(keep_last, keep_every)

    @property
    def last_snapshot(self) -> str | None:
        """The snapshot that was saved or loaded last, or None. Rows go back to it after a kill."""
        return None if self._held is None else self._held.base

    def get_extra_state(self) -> Tensor:
        """The extra state in `state_dict()`: JSON as uint8 [bytes].

        It has the `step` of the rows, the `snapshot` of that step and its `digest`. Each is None where there is none:
        for rows that were not used yet, or were not saved at that step.
        """
        named = dict.fromkeys(SavedAs._fields) if self._held is None else self._held.named()._asdict()
        # a tensor, since code that handles a state_dict may take nothing else
        return torch.frombuffer(bytearray(json.dumps(named).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Load the extra state of `load_state_dict()`. A warning says where rows differ, now or at their first use."""
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
        if prefix + EXTRA in missing:  # a state_dict of version 1
            missing.remove(prefix + EXTRA)


def _check_flag(argument: str, value: object) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{argument}={value!r}: give True or False")
