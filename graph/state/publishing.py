"""`graph.publish`: publishes rows and dense weights of one step in a thread, while training goes on.

Between two steps, the thread opens an image of each table and copies the dense weights. It then reads the images. For
each serving folder, a tracker lists the rows that changed since the folder's last version. So snapshots and publishes
do not affect each other.

If ranks share the rows, a thread of each rank writes the rank's rows to files in the serving folder. Once all ranks
have written theirs, a thread of rank 0 publishes them.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from ...distributed.world import World
from ...embedding.saving.background_saving import BackgroundSnapshotJob, CheckpointPart
from ...embedding.saving.table_save import TableSave
from ...embedding.state_dict.model_snapshots import ModelSnapshots, find_world
from ...embedding.tables.training_group import lock_between_steps
from ...engine.errors import OptionError, ServingError, undo_on_error
from ...engine.ops.embedding_base import EmbeddingBase
from ...serving.folder import ServingFolder
from ...serving.publish import Check, check_arguments, find_reusable, publish_sources
from ...serving.version import Version
from ...snapshots.files.format import HashShard
from ...snapshots.files.writer import NewSnapshots
from ..trace.names import map_unwrapped_names
from .live_rows import LiveRows, ShardSave
from .publish_handle import PublishHandle, RankPublishHandle


class PublishingModel(ModelSnapshots):
    """Mixin for graphs: publishes their rows and dense weights."""

    def __init__(self) -> None:
        super().__init__()
        self.__publish: PublishHandle | None = None

    def publish(
        self,
        folder: str | os.PathLike[str],
        encoding: str = "int8",
        keep: int = 3,
        check: Check = None,
        rebase: bool = False,
    ) -> PublishHandle:
        """Publish rows and dense weights as they are now, as a new version of a serving folder.

        A thread writes the version while training goes on. It reads the rows that changed since the last publish to
        this folder; the first publish of a run reads all rows. Snapshots are neither needed nor affected. A save that
        runs in the background ends first. Rows must be on a CPU. If ranks share the rows, every rank calls this and
        `wait`, and sees the same serving folder; rank 0's dense weights are published.

        Args:
            folder, encoding, keep, check, rebase: As in `tierbed.serving.publish`. `check` runs in the thread, on rank
                0 alone.

        Returns:
            A handle: `wait()` returns the version once readers can see it, or raises the publish's error. The next
            `publish` first waits for this one, and raises its error if `wait()` has not.

        Raises:
            OptionError: If the rows are on a GPU, or an argument is invalid.
            SnapshotError: If the model contains no embedding.
            GroupError: If ranks pass different arguments.
            ServingError: If ranks share the rows, and the folder is locked, unwritable or not the same on all ranks.
        """
        if self.__publish is not None:
            self.__publish.wait_for_next()
        managers, world = self._list_managers(), find_world(self._require_embeddings())
        target = ServingFolder(folder)
        label, consumer = f"a publish to {str(target.path)!r}", f"publish to {target.path}"

        def check_call() -> None:
            check_arguments(encoding, keep, check, rebase=rebase)
            if on_gpu := [manager.name for manager in managers if manager.local.table.processor.defers_errors]:
                raise OptionError(
                    f"the rows of embedding {on_gpu[0]!r} are on a GPU, and publish needs them on a CPU; save "
                    "snapshots, and publish them with tierbed.serving.publish"
                )

        shared_values = {"folder": str(target.path), "encoding": encoding, "keep": keep, "rebase": rebase}
        world.call_on_all_ranks("graph.publish", check_call, shared_values)

        def find_last_ids() -> dict[str, str]:
            """Returns by name of each embedding what the folder's last version has, if its files can be used again."""
            old = {} if rebase else find_reusable(target.read_latest(), encoding)
            return {name: embedding.snapshot.id for name, embedding in old.items()}

        def publish_rows(rows: list[LiveRows], tensors: dict[str, Tensor], is_locked: bool = False) -> Version:
            return publish_sources(target, rows, encoding, tensors, keep, check, rebase, True, is_locked)

        def publish(set_can_train: Callable[[], None]) -> Version:
            with ExitStack() as ending:
                last_ids = find_last_ids()
                with lock_between_steps(managers, awaits_step=True, finishes_saves=True):
                    known_ids = _find_known_ids(world, managers, consumer, last_ids)
                    rows = [
                        LiveRows(manager, secrets.token_hex(16), id, consumer)
                        for manager, id in zip(managers, known_ids, strict=True)
                    ]
                    for each in rows:
                        each.open_image(ending)
                    tensors = _copy_dense_weights(self)
                set_can_train()
                version = publish_rows(rows, tensors)
                for each in rows:
                    each.record_publish()
                return version

        if world.size > 1:
            handle: PublishHandle = _publish_on_ranks(
                self, world, managers, label, consumer, target, find_last_ids, publish_rows
            )
        else:
            handle = PublishHandle(label, publish)
            handle.start()
        self.__publish = handle
        return handle


def _publish_on_ranks(
    model: PublishingModel,
    world: World,
    managers: list[Any],
    label: str,
    consumer: str,
    target: ServingFolder,
    find_last_ids: Callable[[], dict[str, str]],
    publish_rows: Callable[..., Version],
) -> RankPublishHandle:
    """Begin a publish of rows that ranks share. The folder stays locked until it ends, because it has the rows."""
    locked, ending = ExitStack(), ExitStack()

    def begin() -> tuple[str, list[str], dict[str, str]]:
        locked.enter_context(target.lock("a publish", create=True))
        parts = target.make_parts_folder([manager.name for manager in managers])
        locked.callback(shutil.rmtree, parts, ignore_errors=True)
        return parts.name, [secrets.token_hex(16) for _ in managers], find_last_ids()

    def publish(set_can_train: Callable[[], None]) -> Version:
        set_can_train()
        with locked:
            return publish_rows(rows, tensors, is_locked=True)

    def prepare() -> tuple[list[LiveRows], list[TableSave], dict[str, Tensor]]:
        if not parts.is_dir():
            remedy = "give all ranks the path of the same folder"
            raise ServingError(f"{str(target.path)!r} on rank {world.rank} is not the folder of rank 0: {remedy}")
        for manager in managers:
            manager.check_not_saving()
        rows = [LiveRows(*each, consumer) for each in zip(managers, ids, known_ids, strict=True)]
        saves: list[TableSave] = [
            ShardSave(each, target, parts / manager.name, HashShard(world.rank, world.size))
            for each, manager in zip(rows, managers, strict=True)
        ]
        return rows, saves, _copy_dense_weights(model) if world.rank == 0 else {}

    with undo_on_error(locked.close):
        parts_name, ids, last_ids = world.call_on_rank_0(f"{label}: begin", begin)
        parts = target.path / parts_name
        for manager in managers:
            manager.wait_for_save()
        with lock_between_steps(managers, finishes_saves=True):
            known_ids = _find_known_ids(world, managers, consumer, last_ids)
            rows, saves, tensors = world.call_on_all_ranks(f"{label}: rows", prepare)
            handle = RankPublishHandle(label, publish, world, rows)
            if world.rank == 0:
                ending.push(lambda kind, *_: None if kind is None and handle.try_start() else locked.close())
            part = CheckpointPart(label, lambda: None, ending, yields_to_saves=True)
            handle.job = BackgroundSnapshotJob(world, label, saves, NewSnapshots(), part)
            for manager in managers:
                manager.set_background_save(handle.job)
    return handle


def _find_known_ids(world: World, managers: list[Any], consumer: str, last_ids: Mapping[str, str]) -> list[str | None]:
    """Returns each embedding's id in `last_ids` if all ranks know what changed since, and otherwise None."""
    ids: list[str | None] = []
    for manager in managers:
        id = last_ids.get(manager.name)
        is_known = id is not None and manager.local.table.observers.knows_changes_since(id, consumer)
        op = f"a publish of embedding {manager.name!r}"
        ids.append(id if all(world.handshake(op, payload=is_known).payloads) else None)
    return ids


def _copy_dense_weights(model: Any) -> dict[str, Tensor]:
    """Copy a model's parameters and buffers to the CPU, without embeddings. Names are without wrappers."""
    assert isinstance(model, nn.Module)
    tensors = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, EmbeddingBase):
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                tensors[f"{prefix}.{name}" if prefix else name] = tensor.detach().to("cpu", copy=True)
    return {plain: tensors[name] for name, plain in map_unwrapped_names(model, tensors).items()}
