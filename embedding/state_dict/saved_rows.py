"""The snapshots of an embedding, and its rows in a `state_dict()`.

Without a store folder, the state_dict holds the rows themselves, as tensors `rows.*`. With a store folder, the
state_dict's extra state only names the rows, by step and version (`RowsReference`). With `state_dict_snapshots`, making
the state_dict also saves a snapshot, and the extra state names this snapshot. A loaded reference is *pending* until the
embedding has these rows. If the embedding is open or belongs to a training group, it loads the snapshot at once.
Otherwise it loads the snapshot at its first use. If no snapshot holds the rows, every use raises SnapshotError until a
load or `keep_rows()` succeeds.
"""

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
from ...engine.checks import check_flags, validate_arguments
from ...engine.errors import (
    ClosedError,
    InputError,
    OptimizerError,
    OptionError,
    SnapshotError,
    StoreError,
    TierbedError,
)
from ...engine.ops.embedding_base import EmbeddingBase
from ...engine.table.background_save import SaveHandle
from ...snapshots.store.selection import LoadReport, Selection, Where
from ..autograd.shadow import ShadowCopy
from ..saving.rows_reference import EMPTY_VERSION, UNLOADABLE_ROWS, RowsReference, make_mismatch_text, read_reference
from ..tables.names import make_next_seed
from ..tables.row_tensors import ON_OTHER_RANK_FIELD, TENSOR_NAMES, RowTensors
from .read_only import StateTensor

log = logging.getLogger("tierbed")

EXTRA_STATE_KEY = "_extra_state"  # torch's name for extra state in a state_dict
ROWS_PREFIX = "rows."  # prefix of the rows' tensors in a state_dict
_EXCLUDE_ROWS, _KEEP_ROWS = "exclude rows", "keep rows"  # values of `_row_mode`
_NO_CONTEXT = nullcontext()  # for embeddings without a world
_EXTRA_BYTES = 1024  # enough for a snapshot's name, up to 200 bytes, and a digest
_row_mode: ContextVar[str] = ContextVar("what states do with rows", default="")


class RowLoadingMixin:
    """Mixin for modules. Its `load_state_dict` handles state_dicts that do not match the present rows."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state_dict, as torch does.

        Args:
            state_dict, assign: As in torch.
            strict: As in torch. If False and the state_dict's rows cannot be loaded, warn and keep the present rows.
        """
        with _set_row_mode(_KEEP_ROWS) if strict is False and not are_rows_excluded() else nullcontext():
            return super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]


class SnapshotEmbedding(RowLoadingMixin, EmbeddingBase):
    """An embedding whose rows are saved and loaded by name, and with `state_dict()`."""

    table_handle: Callable[..., Any]  # opens the table at the first use
    rows = SimpleNamespace(**dict.fromkeys(TENSOR_NAMES))  # torch's get_state_dict expects an attribute for each key

    def __init__(self) -> None:
        nn.Module.__init__(self)  # not super(), because a subclass's super() may be nn.Embedding
        self._handle: Any = None  # a `TableHandle`, from the first use on
        self.is_closed = self._has_seed = False
        self._has_warned = False  # True after the first state_dict without rows
        self._open_callbacks: list[Callable[[], None]] = []
        self._load_lock = RLock()  # held while the rows that a state_dict names are loaded
        self.has_chosen_rows = False  # True if a load brought the rows, or the user called keep_rows
        self._pending_references: list[RowsReference] = []  # references from a loaded state_dict to rows not yet loaded
        # `_latest_copy` identifies the row copy in the latest state_dict, by a key prefix, a tensor and a change token.
        # `_latest_copy` and `_latest_load` start as (), not None, because graphs trace again if a None value changes.
        self._latest_copy: tuple[str, weakref.ref[Tensor], Any] | tuple[()] = ()
        # `_latest_load` holds (error list, tensors) of the latest load_state_dict call. The list identifies the call.
        self._latest_load: tuple[Any, list[weakref.ref[Tensor]]] | tuple[()] = ()

    @property
    def is_open(self) -> bool:
        """True while the store is open: from the first use to `close`."""
        return self._handle is not None and not self.is_closed

    @property
    def has_pending_rows(self) -> bool:
        """True if a loaded state_dict names rows that the embedding does not have yet."""
        return bool(self._pending_references)

    def fix_seed(self) -> None:
        """Choose the seed of an embedding without a name. Called at the first use."""
        if not self._has_seed:
            self._has_seed = True
            self.spec = replace(self.spec, seed=make_next_seed(self.world is not None))

    def call_when_open(self, call: Callable[[], None]) -> None:
        """Call `call` now if the store is open, or as soon as it opens."""
        if self.is_open:
            call()
        else:
            self._open_callbacks.append(call)

    @property
    def open_handle(self) -> Any:
        """The table's handle if it is open in this process, or None."""
        handle = self._handle
        return None if handle is None or self.is_closed or handle.local.table_if_open is None else handle

    def raise_on_all_ranks(self) -> AbstractContextManager[None]:
        """Return a context that raises one rank's error on all ranks. For code before a call's first collective."""
        return _NO_CONTEXT if self.world is None else self._raise_on_all_ranks(self.world)

    @contextmanager
    def _raise_on_all_ranks(self, world: World) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if world.must_report(error) and detect_fake_mode() is None:
                world.handshake(f"a call of embedding {self.name!r}", error)
            raise

    @validate_arguments("kind")
    def save_snapshot(
        self, snapshot_name: str, kind: str = "full", background: bool = False, *, overwrite: bool = False
    ) -> SaveHandle | None:
        """Save all rows with their optimizer state in the store folder. The snapshot is durable on return.

        Args:
            snapshot_name: The snapshot's name, used for its folder.
            kind: "full"; "incremental" for changes since the last saved or loaded snapshot; or "checkpoint" for links
                to the RocksDB files of a cached_ssd store. See docs/snapshots.md.
            background: If True, return immediately. A thread saves the rows as they are now.
            overwrite: If True, atomically replace a snapshot with that name, once the new snapshot is durable. The
                parent of another snapshot cannot be replaced.

        Returns:
            A `SaveHandle` for a save in the background: its `wait()` returns once the snapshot is durable, or raises
            the save's error. Otherwise None.

        Raises:
            SnapshotError: If the name is invalid or taken, or the embedding has no persistent_path.
            StoreError: If the rows cannot be read or written.
            OptionError: If `kind` is invalid, or does not fit the store or the other arguments.
        """
        with self.raise_on_all_ranks():
            check_flags(OptionError, background=background, overwrite=overwrite)
            manager = self.table_handle().snapshot_manager
        return manager.save(snapshot_name, kind, overwrite, background)

    def load_snapshot(
        self,
        snapshot_name: str,
        tables: Collection[int | str] | None = None,
        where: Where | None = None,
        strict: bool = True,
        weights_only: bool = False,
        convert: bool = False,
    ) -> LoadReport:
        """Replace all rows by the rows of a snapshot, or by some of the snapshot's rows.

        The snapshot is checked first. If this raises, the rows stay as they are.

        Args:
            snapshot_name: The snapshot's name.
            tables: Indices or names of the tables to load. Default: all.
            where: A function of NumPy arrays (table_ids [n], keys [n]) that returns bool [n], True for rows to load.
            strict: If True, raise unless the whole snapshot fits. If False, leave out stored tables whose names the
                embedding lacks, and optimizer state that its optimizer cannot use. `remarks` lists what is left out.
            weights_only: If True, leave out the optimizer state. The optimizer may differ, and starts with new state.
            convert: If True, convert numbers from another dtype. Widening is exact; narrowing rounds to nearest even.

        Returns:
            A `LoadReport` with the number of loaded rows, and remarks.

        Raises:
            SnapshotError: If the snapshot is missing or damaged, or does not fit the tables.
            StoreError: If the snapshot's tables have other names.
            OptimizerError: If the snapshot contains another optimizer's state.
            InputError: If the selection is invalid, or a number is too large for a narrower dtype.
        """
        with self.raise_on_all_ranks():
            check_flags(InputError, strict=strict, weights_only=weights_only, convert=convert)
            handle = self.table_handle(for_load=True)
        selection = Selection(tables, where, not weights_only, converts=convert)
        report = handle.snapshot_manager.load_snapshot(snapshot_name, selection, strict)
        self.keep_rows()
        return report

    @validate_arguments("kind")
    def check_save(self, snapshot_name: str, kind: str = "full", *, overwrite: bool = False) -> None:
        """Check the arguments of a later `save_snapshot`, for example before a long training run.

        Args:
            snapshot_name, kind, overwrite: As in `save_snapshot`.

        Raises:
            SnapshotError: If the name is invalid or taken. With `overwrite`: the existing snapshot cannot be replaced.
            OptionError: If `kind` is invalid or does not fit the store.
        """
        with self.raise_on_all_ranks():
            check_flags(OptionError, overwrite=overwrite)
            handle = self.table_handle()
        handle.snapshot_manager.check_save(snapshot_name, kind, overwrite)

    def prune_snapshots(self, keep_last: int, keep_every: int | None = None) -> list[str]:
        """Remove old snapshots from the store folder.

        Args:
            keep_last: How many snapshots to keep, counted from the latest.
            keep_every: A number of steps N. Also keep the first snapshot from step N on, from step 2N on, and so on.

        Always keeps `last_snapshot` and snapshots that recovery needs. Parents of kept snapshots stay, or are folded
        into a later parent ("Retention" in docs/snapshots.md).

        Returns:
            The names of the snapshots that were removed or folded.

        Raises:
            OptionError: If an argument is invalid.
            SnapshotError: If a snapshot cannot be read or removed, or the embedding has no persistent_path.
        """
        with self.raise_on_all_ranks():
            handle = self.table_handle()
        return handle.snapshot_manager.prune(keep_last, keep_every)

    @property
    def last_snapshot(self) -> str | None:
        """The last snapshot that was saved, loaded, or restored by recovery after a kill; None without a snapshot."""
        return None if self._handle is None else self._handle.snapshot_manager.last_snapshot_name

    def keep_rows(self) -> None:
        """Accept the present rows, although a loaded state_dict names other rows or the dense part is new."""
        self.has_chosen_rows = True
        if self._pending_references and not self.is_closed and self.store_options.persistent_path is not None:
            self.table_handle(for_load=True).keep_rows()
        self._pending_references.clear()

    def get_extra_state(self) -> Tensor:
        """Return the extra state of `state_dict()`: JSON as uint8 [1024], padded with blanks.

        The JSON fields are the rows' `step` and `version`, and a `snapshot` with its `digest`. A field that does not
        apply is None, for example in an unused embedding. With state_dict_snapshots, this call also saves the snapshot.
        """
        return make_extra_state(self._make_rows_reference())

    def _make_rows_reference(self) -> RowsReference:
        """Return the reference that a state_dict stores in place of the rows."""
        if self._pending_references:
            return self._pending_references[0]  # still correct: rows cannot be trained until they are loaded
        options = self.store_options
        retained, path = options.state_dict_snapshots, options.persistent_path
        if not are_rows_excluded() and retained and detect_fake_mode() is None:
            return self.table_handle().snapshot_manager.save_state_dict_snapshot(None if retained is True else retained)
        if not are_rows_excluded() and path is not None and not self._has_warned:
            self._has_warned = True
            log.warning(
                "embedding %r: state_dict() contains no rows, because the rows are in the store folder. To save rows "
                "too, use graph.save or save_checkpoint. Or give state_dict_snapshots=True in the store options, so "
                "that each state_dict() names a snapshot",
                self.name,
            )
        if self._handle is not None:
            return self._handle.snapshot_manager.make_rows_reference()
        if path is None or self.name_source == "path" or self.world is not None or options.snapshot_path is not None:
            return RowsReference(None)
        return read_reference(Path(path) / self.name, options.open == "fresh")

    def set_extra_state(self, state: Tensor) -> None:
        """Load the rows that a state_dict's extra state names.

        Raises SnapshotError if no snapshot has these rows. If the embedding is not open yet, its first use raises this
        error instead. Every later use raises SnapshotError until a load succeeds or `keep_rows()` is called.
        """
        if are_rows_excluded():
            return
        try:
            pending = RowsReference.parse(json.loads(bytes(state.to(torch.uint8).tolist())))
        except (AttributeError, RuntimeError, TypeError, ValueError, KeyError):
            pending = UNLOADABLE_ROWS
        self.load_or_defer_rows(pending)

    def load_or_defer_rows(self, reference: RowsReference) -> None:
        """Load the rows that a loaded state_dict names, now or at the first use. Raises SnapshotError.

        After an error, torch loads no later modules. So the group's other embeddings are also marked as failed.
        """
        if reference == RowsReference(None):  # the saved embedding was unused, so any rows match
            return
        self._pending_references[:] = [reference]
        if self._handle is None and self.group is None and _row_mode.get() != _KEEP_ROWS:
            return  # load the rows at the first use: until then, the embedding may get an optimizer
        try:
            self._load_pending_reference()
        except Exception:
            for other in () if self.group is None else self.group.embeddings:
                if other is not self:
                    other.mark_load_failed(f"embedding {self.name!r}")
            raise

    def mark_load_failed(self, stopped_at: str | None = None) -> None:
        """Called if a load failed, here or in the embedding `stopped_at`. Rows may then not fit the model."""
        reference = UNLOADABLE_ROWS if stopped_at is None else RowsReference.make_for_failed_load(stopped_at)
        self._pending_references[:] = [reference]

    def _load_pending_reference(self) -> None:
        with self._load_lock:
            if self._pending_references:  # another thread may have loaded the rows meanwhile
                self._load_reference(self._pending_references[0])

    def _load_reference(self, pending: RowsReference) -> None:
        """Load the rows that a reference names. Raises SnapshotError, StoreError, OptimizerError."""
        handle, options = self.table_handle(for_load=True), self.store_options
        manager, saves_rows = handle.snapshot_manager, options.state_dict_snapshots and self.world is None
        try:
            is_restored, problem = manager.restore(pending), ""
            if not is_restored and saves_rows and pending.version == EMPTY_VERSION:
                handle.load_state(RowTensors.make_empty(self.spec).tensors)
                is_restored = True
        except (SnapshotError, StoreError, OptimizerError) as error:  # the snapshot does not fit
            if _row_mode.get() != _KEEP_ROWS or isinstance(error, ClosedError):
                raise
            is_restored, problem = False, str(error)
        if is_restored:
            self.has_chosen_rows = True
            self._pending_references.clear()
            return
        if handle.local.persistence.unusable_reason:
            raise StoreError(handle.local.persistence.unusable_reason)
        kinds = bool(options.state_dict_snapshots), options.persistent_path is None
        problem = problem or make_mismatch_text(self.name, manager.make_rows_reference(), pending, *kinds)
        if _row_mode.get() == _KEEP_ROWS:
            self._pending_references.clear()
            log.warning("%s; its rows stay", problem)
            return
        raise SnapshotError(
            f"{problem}. The embedding raises this until a state, checkpoint or snapshot is loaded, or keep_rows() "
            "accepts its rows"
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            shadow = destination[prefix + self.parameter_name]
            if isinstance(shadow, ShadowCopy):  # in a trace, the shadow is another kind of tensor
                shadow.is_in_state_dict = True
        if self.store_options.persistent_path is None and not are_rows_excluded() and detect_fake_mode() is None:
            rows = self._copy_rows(destination, prefix)
            destination.update({f"{prefix}{ROWS_PREFIX}{name}": tensor for name, tensor in rows.items()})

    def _copy_rows(self, destination: Mapping[str, Any], prefix: str) -> Mapping[str, Tensor]:
        """Return a copy of all rows. If the embedding has two names in the state_dict, both get the same copy."""
        if self._latest_copy and self._latest_copy[0] != prefix:
            earlier = {name: destination.get(f"{self._latest_copy[0]}{ROWS_PREFIX}{name}") for name in TENSOR_NAMES}
            if self._is_latest_copy(earlier):
                return earlier  # type: ignore[return-value]
        if self._handle is None:
            self.fix_seed()
        rows = RowTensors.make_empty(self.spec) if self._handle is None else self._handle.copy_rows()
        has_rows = not rows.description.get(ON_OTHER_RANK_FIELD)
        tensors = {name: StateTensor(tensor, has_rows) for name, tensor in rows.tensors.items()}
        self._latest_copy = prefix, weakref.ref(tensors[TENSOR_NAMES[0]]), self._make_change_token()
        return tensors

    def _make_change_token(self) -> Any:
        """Return a value that changes if and only if a row changes."""
        table = None if self._handle is None else self._handle.open_table
        return table and (weakref.ref(table), table.step, table.num_updates)

    def _is_latest_copy(self, tensors: Mapping[str, Any]) -> bool:
        """True if `tensors` are the copy in the latest state_dict and no row has changed since that copy."""
        first = tensors.get(TENSOR_NAMES[0])
        if first is None or not self._latest_copy or self._latest_copy[1]() is not first:
            return False
        return bool(self._latest_copy[2] == self._make_change_token())

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *rest: list[str]
    ) -> None:
        missing_keys, _, errors = rest
        fields = [name for name in TENSOR_NAMES if f"{prefix}{ROWS_PREFIX}{name}" in state_dict]
        tensors = {name: state_dict.pop(f"{prefix}{ROWS_PREFIX}{name}") for name in fields}
        if tensors and not are_rows_excluded():
            try:
                if self._is_latest_copy(tensors):
                    log.warning(
                        "embedding %r: load_state_dict() received the rows that state_dict() has just returned, so the "
                        "rows do not change. To load a torch model's weight, call load_dense. "
                        "Or select tensors by key, not by shape: %s has shape [1, 1] in this state. "
                        "Example: own.update({k: v for k, v in old.items() if k in own})",
                        self.name,
                        prefix + self.parameter_name,
                    )
                if not self._is_loaded_already(tensors, errors):
                    self.table_handle(for_load=True).load_state(tensors)
                self._latest_load = errors, [weakref.ref(tensor) for tensor in tensors.values()]
                self.has_chosen_rows = True
                self._pending_references.clear()
            except TierbedError as error:
                problem = f"the rows of embedding {self.name!r} cannot be loaded: {error}"
                if _row_mode.get() == _KEEP_ROWS and not (
                    self._handle is not None and self._handle.local.persistence.unusable_reason
                ):
                    self._pending_references.clear()
                    log.warning("%s; its rows stay", problem)
                else:
                    self._pending_references[:] = [UNLOADABLE_ROWS]
                    errors.append(problem)
                state_dict.pop(prefix + EXTRA_STATE_KEY, None)
        elif prefix + EXTRA_STATE_KEY not in state_dict and not _row_mode.get():
            self._pending_references[:] = [UNLOADABLE_ROWS]
        shadow = state_dict.get(f"{prefix}{self.parameter_name}")
        if isinstance(shadow, Tensor) and shadow.shape == (1, 1):  # a shadow's value is unused
            needs_move = local_metadata.get("assign_to_params_buffers") and shadow.device != self.device
            new = nn.Parameter(torch.zeros(1, 1, device=shadow.device)) if needs_move else self.shadow
            state_dict[f"{prefix}{self.parameter_name}"] = new
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *rest)
        if prefix + EXTRA_STATE_KEY in missing_keys and (tensors or are_rows_excluded()):
            missing_keys.remove(prefix + EXTRA_STATE_KEY)

    @property
    def has_loaded_state_dict(self) -> bool:
        """True if a load_state_dict brought the rows."""
        return bool(self._latest_load)

    def _is_loaded_already(self, tensors: Mapping[str, Any], errors: list[str]) -> bool:
        """True if this load_state_dict call (identified by `errors`) has loaded the same rows under another name."""
        if not self._latest_load or self._latest_load[0] is not errors:
            return False
        earlier, new = [loaded() for loaded in self._latest_load[1]], list(tensors.values())
        return len(earlier) == len(new) and all(
            tensor is not None and _are_equal(tensor, other) for tensor, other in zip(earlier, new, strict=True)
        )


def _are_equal(tensor: Tensor, other: Any) -> bool:
    if tensor is other:
        return True
    if not isinstance(other, Tensor) or tensor.shape != other.shape:
        return False
    is_same_kind = (tensor.dtype, tensor.device) == (other.dtype, other.device)
    return is_same_kind and torch.equal(tensor.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def make_extra_state(rows: RowsReference) -> Tensor:
    """Return the extra state that contains the reference `rows`. Loading RowsReference(None) keeps the present rows."""
    # a tensor, because some code accepts only tensors in a state_dict; torch's DCP requires the fixed size
    content = json.dumps(rows._asdict(), ensure_ascii=False).encode().ljust(_EXTRA_BYTES)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@contextmanager
def _set_row_mode(mode: str) -> Iterator[None]:
    token = _row_mode.set(mode)
    try:
        yield
    finally:
        _row_mode.reset(token)


def exclude_rows() -> AbstractContextManager[None]:
    """Return a context where state_dicts neither hold nor name rows, for checkpoints that store rows separately."""
    return _set_row_mode(_EXCLUDE_ROWS)


def are_rows_excluded() -> bool:
    """True inside an `exclude_rows` context."""
    return _row_mode.get() == _EXCLUDE_ROWS
