"""The snapshots of an embedding, and its rows in a `state_dict()`: the rows themselves, or the name of a snapshot."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from threading import RLock
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from ...distributed.world import World
from ...engine.checks import check_flags, checked_arguments
from ...engine.errors import (
    ClosedError,
    InputError,
    OptimizerError,
    OptionError,
    SnapshotError,
    StoreError,
    TierbedError,
)
from ...engine.ops.rows_contract import EmbeddingBase
from ...engine.table.background_save import SaveHandle
from ...snapshots.store.selection import LoadReport, Selection, Where
from ..autograd.shadow import ShadowCopy
from ..saving.rows_reference import NO_ROWS, UNKNOWN, RowsReference, of_unopened, stopped_at, unlike
from ..tables.names import next_seed
from ..tables.rows_in_tensors import FIELDS, NOT_WHOLE, RowTensors
from .read_only import StateTensor

log = logging.getLogger("tierbed")

EXTRA = "_extra_state"  # torch's name for extra state in a state_dict
ROWS = "rows."  # begins the names of rows in a state_dict
APART, STAY = "apart", "stay"
ALONE = nullcontext()  # of calls that no other rank makes
_EXTRA_BYTES = 1024  # more than a name of 200 bytes and a digest take
_mode: ContextVar[str] = ContextVar("what states do with rows", default="")


class SavedRows(EmbeddingBase):
    """An embedding whose rows are saved and loaded by name, and with `state_dict()`."""

    _version = 3  # of the state_dict; version 1 had no extra state, and 2 a shadow [1]
    table_handle: Callable[..., Any]  # opens the table at the first use
    rows = SimpleNamespace(**dict.fromkeys(FIELDS))  # get_state_dict of torch looks for what has the names in a state

    def __init__(self) -> None:
        nn.Module.__init__(self)  # not that of nn.Embedding, from which a subclass may inherit as well
        self._handle: Any = None  # a `TableHandle`, from the first use on
        self.is_closed = self._has_seed = False
        self._has_warned = False  # of its first state_dict
        self._calls_when_open: list[Callable[[], None]] = []
        self._loading = RLock()  # held while the rows of a loaded state_dict are loaded
        self.rows_are_chosen = False  # whether a load brought the rows, or the user keeps them whatever the rest is
        self._awaited: list[RowsReference] = []  # the rows of a loaded state_dict that the embedding does not have yet
        # empty, not None: graphs watch a value that is None, and would trace again
        # the copy in the latest state_dict: its prefix there, a tensor of it, and the table, step and updates it is of
        self._copied: tuple[str, weakref.ref[Tensor], Any] | tuple[()] = ()
        # by the latest load_state_dict: its list of errors, by which it is known, and the rows
        self._loaded: tuple[Any, list[weakref.ref[Tensor]]] | tuple[()] = ()

    @property
    def is_open(self) -> bool:
        """Whether the embedding's store is open, from the first use to `close`."""
        return self._handle is not None and not self.is_closed

    @property
    def is_awaiting(self) -> bool:
        """Whether the rows are to be those of a loaded state_dict, and are not yet."""
        return bool(self._awaited)

    def fix_seed(self) -> None:
        """Called at the first use: an embedding without a name has its own seed from here on."""
        if not self._has_seed:
            self._has_seed = True
            self.spec = replace(self.spec, seed=next_seed(self.world is not None))

    def when_open(self, call: Callable[[], None]) -> None:
        """Do `call` now, or when the store opens."""
        if self.is_open:
            call()
        else:
            self._calls_when_open.append(call)

    @property
    def open_handle(self) -> Any:
        """The handle of the table, if it is open in this process; else None."""
        handle = self._handle
        return None if handle is None or self.is_closed or handle.own.own_open is None else handle

    def raise_on_all_ranks(self) -> AbstractContextManager[None]:
        """A block before the first collective of a call: what it raises on one rank is raised on all."""
        return ALONE if self.world is None else self._raise_on_all_ranks(self.world)

    @contextmanager
    def _raise_on_all_ranks(self, world: World) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if world.must_report(error) and detect_fake_mode() is None:
                world.handshake(f"a call of embedding {self.name!r}", error)
            raise

    @checked_arguments("kind")
    def save_snapshot(
        self, snapshot_name: str, kind: str = "full", background: bool = False, *, overwrite: bool = False
    ) -> SaveHandle | None:
        """Save all rows with optimizer state in the store folder. The snapshot is durable on return.

        kind: "full"; "incremental", what changed since the snapshot that was saved or loaded last; or "checkpoint" of
        a cached_ssd store, by links to RocksDB's files (docs/snapshots.md).
        background: return at once, while a thread saves the rows as they are now. `wait()` of the result returns when
        the snapshot is durable, and raises what went wrong.
        overwrite: whether to replace a snapshot of that name, atomically once the new one is durable. A parent of
        another snapshot cannot be replaced. Raises SnapshotError, StoreError, OptionError.
        """
        with self.raise_on_all_ranks():
            check_flags(OptionError, background=background, overwrite=overwrite)
            snapshots = self.table_handle().snapshots
        return snapshots.save(snapshot_name, kind, overwrite, background)

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
        another, and begins without state.
        strict: whether all of the snapshot must fit. If not, tables that the embedding lacks or has under another name,
        and another optimizer's state, are left out, as the report's `remarks` say.
        convert: whether numbers of another dtype are converted: widening is exact, narrowing rounds to nearest even.

        The snapshot is checked first, and rows stay if this raises: SnapshotError if the snapshot is missing, damaged
        or of another table; StoreError if its tables have other names; OptimizerError if its state is another
        optimizer's; InputError for a selection that cannot be, or a number that a narrower dtype cannot hold.
        """
        with self.raise_on_all_ranks():
            check_flags(InputError, strict=strict, weights_only=weights_only, convert=convert)
            handle = self.table_handle(for_load=True)
        selection = Selection(tables, where, not weights_only, convert=convert)
        report = handle.snapshots.load_snapshot(snapshot_name, selection, strict)
        self.keep_rows()
        return report

    @checked_arguments("kind")
    def check_save(self, snapshot_name: str, kind: str = "full", *, overwrite: bool = False) -> None:
        """Raise what `save_snapshot` would raise now for these arguments. Call it before the training to be saved.

        SnapshotError for a name that cannot be used or is taken, or with `overwrite` cannot be replaced; OptionError.
        """
        with self.raise_on_all_ranks():
            check_flags(OptionError, overwrite=overwrite)
            handle = self.table_handle()
        handle.snapshots.check_save(snapshot_name, kind, overwrite)

    def prune_snapshots(self, keep_last: int, keep_every: int | None = None) -> list[str]:
        """Remove snapshots from the store folder, and return the names of those removed. OptionError, SnapshotError.

        keep_last: how many of the latest stay. keep_every: of each `keep_every` steps, the first snapshot
        that reached them stays. `last_snapshot` stays, and so do the parents of snapshots that stay.
        """
        with self.raise_on_all_ranks():
            handle = self.table_handle()
        return handle.snapshots.prune(keep_last, keep_every)

    @property
    def last_snapshot(self) -> str | None:
        """The snapshot that was saved or loaded last, or None. After a kill, recovery loads it."""
        return None if self._handle is None else self._handle.snapshots.last

    def keep_rows(self) -> None:
        """Keep the rows as they are, though a loaded state_dict is of others, or the dense part of none."""
        self.rows_are_chosen = True
        if self._awaited and not self.is_closed and self.store_options.persistent_path is not None:
            self.table_handle(for_load=True).keep_rows()
        self._awaited.clear()

    def get_extra_state(self) -> Tensor:
        """The extra state in `state_dict()`: JSON as uint8 [1024], padded with blanks.

        It has the `step` of the rows, a `snapshot` of them and its `digest`, and their `version`. Each is None if there
        is none: for rows that were not used yet, or that the state itself holds. With state_dict_snapshots the snapshot
        is saved now.
        """
        return extra_state_of(self._rows_reference())

    def _rows_reference(self) -> RowsReference:
        """The name of the rows for a state_dict."""
        if self._awaited:
            return self._awaited[0]  # the framework is about to load once more, or saves what cannot be trained
        options = self.store_options
        kept, place = options.state_dict_snapshots, options.persistent_path
        if not are_apart() and kept and detect_fake_mode() is None:
            return self.table_handle().snapshots.save_for_state(None if kept is True else kept)
        if not are_apart() and place is not None and not self._has_warned:
            self._has_warned = True
            log.warning(
                "embedding %r: state_dict() holds none of its rows, which are in its store folder; give "
                "state_dict_snapshots=True in the store options, so that each state names a snapshot of them, or save "
                "by graph.save or save_checkpoint",
                self.name,
            )
        if self._handle is not None:
            return self._handle.snapshots.rows_reference()
        if place is None or self.naming == "path" or self.world is not None or options.snapshot_path is not None:
            return RowsReference(None)
        return of_unopened(Path(place) / self.name, options.open == "fresh")

    def set_extra_state(self, state: Tensor) -> None:
        """Load the extra state of `load_state_dict()`: the rows that it names.

        SnapshotError if no snapshot has them, here or at the first use of an embedding that is not open yet. From then
        on every use raises it, until a load succeeds or `keep_rows()` is called.
        """
        if are_apart():
            return
        try:
            awaited = RowsReference.parse(json.loads(bytes(state.to(torch.uint8).tolist())))
        except (AttributeError, RuntimeError, TypeError, ValueError, KeyError):
            awaited = UNKNOWN
        self.await_rows(awaited)

    def await_rows(self, awaited: RowsReference) -> None:
        """Let the rows be those that a loaded state_dict names, now or at the first use. SnapshotError.

        If that raises now, torch loads no module after this one: the others of the group raise as well.
        """
        if awaited == RowsReference(None):  # of an embedding that was not used: it says nothing about its rows
            return
        self._awaited[:] = [awaited]
        if self._handle is None and self.group is None and _mode.get() != STAY:
            return  # an optimizer may be given the embedding before its first use
        try:
            self._await_rows()
        except Exception:
            for other in () if self.group is None else self.group.embeddings:
                if other is not self:
                    other.note_failed(f"embedding {self.name!r}")
            raise

    def note_failed(self, stopped: str | None = None) -> None:
        """A load failed, or stopped at `stopped`: it is not known that the rows belong to the rest of the model."""
        self._awaited[:] = [UNKNOWN if stopped is None else stopped_at(stopped)]

    def _await_rows(self) -> None:
        with self._loading:
            if self._awaited:  # else another thread has loaded them meanwhile
                self._load_awaited(self._awaited[0])

    def _load_awaited(self, awaited: RowsReference) -> None:
        handle, options = self.table_handle(for_load=True), self.store_options
        try:
            found, said = handle.snapshots.go_to(awaited), ""
            if not found and options.state_dict_snapshots and self.world is None and awaited.version == NO_ROWS:
                handle.load_state(RowTensors.none(self.spec).tensors)
                found = True
        except (SnapshotError, StoreError, OptimizerError) as error:  # the snapshot does not fit
            if _mode.get() != STAY or isinstance(error, ClosedError):
                raise
            found, said = False, str(error)
        if found:
            self.rows_are_chosen = True
            self._awaited.clear()
            return
        if handle.own.unsettled:
            raise StoreError(handle.own.unsettled)
        snapshots, in_memory = bool(options.state_dict_snapshots), options.persistent_path is None
        said = said or unlike(self.name, handle.snapshots.rows_reference(), awaited, snapshots, in_memory)
        if _mode.get() == STAY:
            self._awaited.clear()
            log.warning("%s; its rows stay", said)
            return
        raise SnapshotError(
            f"{said}. The embedding raises this until a state, checkpoint or snapshot is loaded, or keep_rows() "
            "accepts its rows"
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            shadow = destination[prefix + self.parameter_name]
            if isinstance(shadow, ShadowCopy):  # not that of a trace
                shadow.enter_state()
        if self.store_options.persistent_path is None and not are_apart() and detect_fake_mode() is None:
            rows = self._rows_for(destination, prefix)
            destination.update({f"{prefix}{ROWS}{name}": tensor for name, tensor in rows.items()})

    def _rows_for(self, destination: Mapping[str, Any], prefix: str) -> Mapping[str, Tensor]:
        """All rows, copied. If an earlier name of this embedding has them in the same state, the tensors there."""
        if self._copied and self._copied[0] != prefix:
            found = {name: destination.get(f"{self._copied[0]}{ROWS}{name}") for name in FIELDS}
            if self._has_copied(found):
                return found  # type: ignore[return-value]
        if self._handle is None:
            self.fix_seed()
        rows = RowTensors.none(self.spec) if self._handle is None else self._handle.tensors()
        is_whole = not rows.description.get(NOT_WHOLE)
        tensors = {name: StateTensor(tensor, is_whole) for name, tensor in rows.tensors.items()}
        self._copied = prefix, weakref.ref(tensors[FIELDS[0]]), self._moment()
        return tensors

    def _moment(self) -> Any:
        """Equal for two calls if no row has changed in between."""
        table = None if self._handle is None else self._handle.local_table
        return table and (weakref.ref(table), table.step, table.updates)

    def _has_copied(self, tensors: Mapping[str, Any]) -> bool:
        """True if the latest state_dict returned these tensors, and no row has changed since."""
        first = tensors.get(FIELDS[0])
        if first is None or not self._copied or self._copied[1]() is not first:
            return False
        return bool(self._copied[2] == self._moment())

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *rest: list[str]
    ) -> None:
        missing, _, errors = rest
        given = [name for name in FIELDS if f"{prefix}{ROWS}{name}" in state_dict]
        tensors = {name: state_dict.pop(f"{prefix}{ROWS}{name}") for name in given}
        if tensors and not are_apart():
            try:
                if self._has_copied(tensors):
                    log.warning(
                        "embedding %r: load_state_dict() got back what state_dict() returned, so its rows stay. A "
                        "torch model's weight has another shape than the %s [1, 1] of this state: choose it by its "
                        "key, as in own.update({k: v for k, v in old.items() if k in own}), or call load_dense",
                        self.name,
                        prefix + self.parameter_name,
                    )
                if not self._has_loaded(tensors, errors):
                    self.table_handle(for_load=True).load_state(tensors)
                self._loaded = errors, [weakref.ref(tensor) for tensor in tensors.values()]
                self.rows_are_chosen = True
                self._awaited.clear()
            except TierbedError as error:
                said = f"the rows of embedding {self.name!r} cannot be loaded: {error}"
                if _mode.get() == STAY and not (self._handle is not None and self._handle.own.unsettled):
                    self._awaited.clear()
                    log.warning("%s; its rows stay", said)
                else:
                    self._awaited[:] = [UNKNOWN]
                    errors.append(said)
                state_dict.pop(prefix + EXTRA, None)
        elif prefix + EXTRA not in state_dict and not _mode.get():
            self._awaited[:] = [UNKNOWN]
        shadow = state_dict.get(f"{prefix}{self.parameter_name}")
        if isinstance(shadow, Tensor) and shadow.numel() == 1:  # [1] before version 3; its number says nothing
            moves = local_metadata.get("assign_to_params_buffers") and shadow.device != self.device
            new = nn.Parameter(torch.zeros(1, 1, device=shadow.device)) if moves else self.shadow
            state_dict[f"{prefix}{self.parameter_name}"] = new
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *rest)
        if prefix + EXTRA in missing and (tensors or are_apart()):
            missing.remove(prefix + EXTRA)

    @property
    def was_loaded(self) -> bool:
        """Whether a load_state_dict brought the rows."""
        return bool(self._loaded)

    def _has_loaded(self, tensors: Mapping[str, Any], errors: list[str]) -> bool:
        """True if the same load_state_dict, which `errors` is of, loaded the same rows under an earlier name."""
        if not self._loaded or self._loaded[0] is not errors:
            return False
        earlier, given = [loaded() for loaded in self._loaded[1]], list(tensors.values())
        return len(earlier) == len(given) and all(
            one is not None and _same(one, other) for one, other in zip(earlier, given, strict=True)
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's. strict: False lets rows that the state is not of stay, with a warning."""
        with rows_stay(strict is False):
            return super().load_state_dict(state_dict, strict, assign)


def _same(one: Tensor, other: Any) -> bool:
    if one is other:
        return True
    alike = isinstance(other, Tensor) and (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
    return alike and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def extra_state_of(rows: RowsReference) -> Tensor:
    """What an embedding's state says of its rows; RowsReference(None) lets those stay that it has."""
    # a tensor, since code that handles a state_dict may take nothing else; of one size, since DCP loads no other
    said = json.dumps(rows._asdict(), ensure_ascii=False).encode().ljust(_EXTRA_BYTES)
    return torch.frombuffer(bytearray(said), dtype=torch.uint8)


@contextmanager
def _in_mode(mode: str) -> Iterator[None]:
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def rows_apart() -> AbstractContextManager[None]:
    """A block in which states hold and load no rows, nor names of them: a checkpoint has the rows beside the state."""
    return _in_mode(APART)


def are_apart() -> bool:
    """Whether this is in a block of `rows_apart`."""
    return _mode.get() == APART


def rows_stay(lenient: bool) -> AbstractContextManager[None]:
    """A block in which `load_state_dict` lets rows stay that the state is not of, if `lenient`."""
    return _in_mode(STAY) if lenient and not are_apart() else nullcontext()
