"""The handle through which an embedding uses its open rows, if ranks share the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from ...distributed.sharded_table import ShardedTable
from ...distributed.world import World, try_call
from ...engine.checksum import crc32
from ...engine.errors import SnapshotError, undo_on_error
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.options.store_options import StoreOptions
from ...engine.options.table_spec import TableSpec
from ...engine.row_format import RowFormat
from ...engine.table.table import OpenTable
from ...engine.version import __version__
from ...snapshots.files.format import HashShard
from ...snapshots.store.folder_state import remove_other_shards
from ..tables.local_table import LocalTable
from ..tables.rank_recovery import RecoveryNegotiation
from ..tables.recovery import RankShard
from ..tables.row_tensors import ON_OTHER_RANK_FIELD, RowTensors
from ..tables.shared_folder import SharedFolder
from ..tables.training_group import TrainingGroup
from .rows_reference import RowsReference
from .save_requests import RankRequestHandler
from .snapshot_manager import SnapshotManager
from .table_handle import claim_folder, find_handle, register_handle


class ShardedTableHandle:
    """The open rows of an embedding that ranks share.

    local: this rank's rows, with their own tiers and folder. table: the rows of all ranks. shared_folder: the common
    store folder; None for rows in memory. All ranks make the same calls, except calls on a rank's own rows. Errors are
    raised on every rank.
    """

    def __init__(
        self,
        world: World,
        spec: TableSpec,
        options: StoreOptions,
        optimizer: RowOptimizer | None,
        device: torch.device,
        group: TrainingGroup | None = None,
        for_load: bool = False,
        pending_references: Sequence[RowsReference] = (),
    ) -> None:
        self.world, self.pending_references = world, pending_references
        self.shared_folder: SharedFolder | None = None
        op = f"opening embedding {spec.name!r}"
        settings, error = try_call(lambda: _collect_settings(world, spec, options, optimizer))
        world.handshake(op, error, settings)

        def claim() -> str | None:
            folder = claim_folder(spec, options)
            self.shared_folder = SharedFolder(world.rank, spec.name, options)
            return folder

        folder = world.call_on_all_ranks(f"{op}: folder", claim) if options.persistent_path is not None else None
        shared_folder = self.shared_folder
        with ExitStack() as rollback:
            recovery = None
            if shared_folder is not None:
                rollback.callback(shared_folder.unlock)
                recovery = RecoveryNegotiation(world, op, shared_folder, options.open, for_load, group)
                rollback.callback(recovery.leave)
            shard = RankShard(world.rank, world.size, world.num_ranks_on_host)
            planner = None if recovery is None else recovery.decide
            local, error = try_call(lambda: LocalTable(spec, options, optimizer, device, shard, planner, group))
            if local is not None:
                rollback.callback(local.close)
            if recovery is not None:
                recovery.end(error)
            world.handshake(f"{op}: done", error)
            if recovery is not None and shared_folder is not None and not recovery.has_live_rows:
                world.call_on_all_ranks(f"{op}: begun", lambda: shared_folder.begin(world.size, recovery.member))
                # not before `begin`: if this run is killed earlier, the next run needs the old shards
                remove_other_shards(shared_folder.path, world.size)
            if recovery is not None and recovery.member is not None:
                local.persistence.set_member(recovery.member)
            rollback.pop_all()
        self.local: LocalTable = local
        register_handle(folder, self)
        store = None if shared_folder is None or shared_folder.folder is None else shared_folder.snapshot_store
        snapshots_path = None if shared_folder is None else shared_folder.snapshots_path
        hash_shard = HashShard(world.rank, world.size)
        self.snapshot_manager = SnapshotManager(local, world, snapshots_path, store, hash_shard, self.close)
        self.request_handler = RankRequestHandler(world, self, find_handle)
        capacity = options.capacity if options.eviction == "none" else None
        self.table = ShardedTable(world, local, capacity, self.snapshot_manager.try_complete, self.request_handler)
        local.serve(self.request_handler, None if shared_folder is None else shared_folder.folder)

    @property
    def name(self) -> str:
        return self.local.name

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def open_table(self) -> OpenTable:
        """The open table with this rank's rows. Raises ClosedError."""
        return self.local.table

    def rename(self, name: str) -> None:
        """Rename an embedding with rows in memory."""
        self.local.rename(name)

    def keep_rows(self) -> None:
        """Accept the present rows, even if a loaded state_dict names other rows."""

    def copy_rows(self) -> RowTensors:
        """Return a copy of all rows on rank 0, and no rows on the other ranks. Every rank makes this call."""
        op = f"state_dict() of embedding {self.name!r}"
        tensors: RowTensors = self.world.call_on_all_ranks(op, self.local.copy_rows)
        data = b"".join(rows.tobytes() for _, rows in tensors.chunks())
        dtype = RowFormat.from_description(tensors.description).dtype
        shards = [np.frombuffer(shard, dtype) for shard in self.world.exchange_bytes(op, data, num_readers=1)]
        return RowTensors.from_chunks(
            {**tensors.description, ON_OTHER_RANK_FIELD: self.world.rank > 0}, sum(map(len, shards)), shards
        )

    def load_state(self, tensors: Mapping[str, Any]) -> None:
        """Replace all rows. Every rank passes all the new rows, and keeps only its shard."""
        op = f"load_state_dict() of embedding {self.name!r}"

        def parse() -> RowTensors:
            if self.shared_folder is not None:
                raise SnapshotError(
                    f"embedding {self.name!r} has a persistent_path, so ranks cannot load a state that contains rows. "
                    "Load this state into an embedding without persistent_path, and save a snapshot"
                )
            return RowTensors.parse(tensors)

        all_rows: RowTensors = self.world.call_on_all_ranks(op, parse)
        checksum = 0
        for _, rows in all_rows.chunks():
            checksum = crc32(rows.tobytes(), checksum)
        self.world.handshake(op, shared_values={"rows": len(all_rows), "their checksum": checksum})
        shard = HashShard(self.world.rank, self.world.size)
        chunks = [shard.select_rows(rows) for _, rows in all_rows.chunks()]
        shard_tensors = RowTensors.from_chunks(all_rows.description, sum(map(len, chunks)), chunks)
        with undo_on_error(self.close):  # some ranks may have new rows while other ranks have old rows
            self.world.call_on_all_ranks(f"{op}: done", lambda: self.local.load_tensors(shard_tensors))

    def use_optimizer(self, optimizer: RowOptimizer) -> None:
        """Train the rows with `optimizer`. Every rank calls this. If one rank closes its rows, all ranks do."""
        op = f"optimizer of embedding {self.name!r}"
        # check on all ranks first, because a rank without rows accepts any optimizer
        self.world.call_on_all_ranks(op, lambda: self.local.check_optimizer(optimizer))
        with self.world.collective_block(op):
            _, error = try_call(lambda: self.local.use_optimizer(optimizer))
            if not all(self.world.handshake(f"{op}: open", payload=self.local.is_open).payloads):
                self.close()
            self.world.handshake(f"{op}: done", error)

    def forget_announced(self) -> None:
        """Forget announced batches. Other ranks forget the batches at the next step."""
        self.table.id_prefetcher.skip_all()
        self.local.forget_announced()

    def unpin_rows(self) -> None:
        """Unpin the rows that a failed step left pinned."""
        self.table.unpin_rows()

    def close(self) -> None:
        """Close this rank's rows, without waiting for other ranks."""
        self.snapshot_manager.drop_background_save()
        try:
            self.local.close()
        finally:
            if not self.local.is_open:
                self._unlock_folder()

    def close_and_log(self) -> None:
        """Close when the embedding or the process ends, without waiting for other ranks. Errors are logged."""
        self.snapshot_manager.drop_background_save()
        self.local.close_and_log()
        self._unlock_folder()

    def _unlock_folder(self) -> None:
        if self.local.member is not None:
            self.local.member.leave()
        if self.shared_folder is not None:
            self.shared_folder.unlock()


def _collect_settings(
    world: World, spec: TableSpec, options: StoreOptions, optimizer: RowOptimizer | None
) -> dict[str, Any]:
    """Return the settings that must be equal on all ranks. The keys are names for error messages."""
    state = None if optimizer is None else spec.make_row_state(optimizer)
    rule = None if state is None else [state.rule, list(state.names), list(state.initial_values)]
    return {
        "version of tierbed": __version__,
        "name": spec.name,
        "embedding_dims": list(spec.columns),
        "key_type": str(spec.key_type),
        "dtype": spec.dtype,
        "state_dtype": spec.state_dtype,
        "tables": spec.describe_tables(),
        "names of tables": list(spec.table_names),
        "seed": spec.seed,
        "padding_idx": spec.padding_idx,
        "optimizer": rule,
        "rows of the world": str(world.row_dtype),
        "grads of the world": str(world.grad_dtype),
        **{option: options[option] for option in ("open", "capacity", "eviction", "admission", "ttl_steps")},
        "persistent_path": options.persistent_path is not None,
    }
