"""`graph.publish`: publishes rows and dense weights of one step in a thread, while training goes on.

Between two steps, the thread opens an image of each table and copies the dense weights. It then reads the images. For
each serving folder, a tracker lists the rows that changed since the folder's last version. So snapshots and publishes
do not affect each other.

If ranks share the rows, a thread of each rank writes the rank's rows to files in the serving folder. Once all ranks
have written theirs, a thread of rank 0 publishes them.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

from torch import Tensor, nn

from ...distributed.world import World
from ...embedding.saving.background_saving import BackgroundSnapshotJob, CheckpointPart
from ...embedding.saving.table_save import TableSave
from ...embedding.state_dict.model_snapshots import ModelSnapshots, find_world
from ...embedding.tables.training_group import lock_between_steps
from ...engine import _core
from ...engine.errors import OptionError, undo_on_error
from ...engine.ops.embedding_base import EmbeddingBase
from ...engine.threads import POLL_SECONDS, Thread
from ...serving.folder import ServingFolder
from ...serving.publish import Check, check_arguments, find_reusable, publish_sources
from ...serving.version import Version, seal_record, unseal_record
from ...snapshots.files.format import HashShard
from ...snapshots.files.writer import NewSnapshots
from ..trace.names import map_unwrapped_names
from .live_rows import LiveRows, ShardSave

log = logging.getLogger("tierbed")


class PublishHandle:
    """A publish that may still be running. If ranks share the rows, all ranks make each call."""

    def __init__(self, label: str, publish: Callable[[Callable[[], None]], Version]) -> None:
        """`publish` runs in a thread, and calls its argument once the model may be trained again."""
        self.label, self._publish = label, publish
        self._version: Version | None = None
        self._error: BaseException | None = None
        self._can_train, self._is_error_raised = Event(), False
        self._thread = Thread(target=self._run, name="tierbed-publish")

    def start(self) -> None:
        """Start the thread. Returns once the model may be trained again."""
        self._thread.start()
        while not self._can_train.wait(POLL_SECONDS) and self._thread.is_alive():
            pass

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Version | None:
        """Wait until the publish ends, for at most `timeout` seconds.

        Returns:
            The version, or None if the publish still runs.

        Raises:
            Exception: The error of the publish. Readers then keep the last version.
        """
        self._thread.join(timeout)
        if self._error is not None:
            self._is_error_raised = True
            raise self._error
        return self._version

    def wait_for_next(self) -> None:
        """Called before the next publish: wait, and raise an error that `wait` has not raised yet."""
        if not self._is_error_raised:
            self.wait()

    def _run(self) -> None:
        try:
            _core.use_own_pool(1)  # not a lower priority too: on a busy machine, versions would take minutes
            self._version = self._publish(self._can_train.set)
        except BaseException as error:
            self._error = error
            log.error("%s failed: %s", self.label, error)
        finally:
            self._can_train.set()


class RankPublishHandle(PublishHandle):
    """A publish of rows that ranks share. Only rank 0 has a thread, from when all ranks have written their rows."""

    def __init__(self, label: str, publish: Callable[[Callable[[], None]], Version], world: World) -> None:
        super().__init__(label, publish)
        self._world = world
        self.rows: list[LiveRows] = []  # until they are published
        self.job: BackgroundSnapshotJob

    @property
    def done(self) -> bool:
        self.job.try_complete()
        return self.job.done and bool(self._world.call_on_rank_0(self.label, lambda: not self._thread.is_alive()))

    def wait(self, timeout: float | None = None) -> Version | None:
        end = None if timeout is None else monotonic() + timeout

        def wait_for_thread() -> bytes | None:
            version = super(RankPublishHandle, self).wait(None if end is None else max(end - monotonic(), 0))
            return None if version is None else seal_record(version)

        try:
            sealed = self._world.call_on_rank_0(self.label, wait_for_thread) if self.job.wait(timeout) else None
        except Exception:
            self._is_error_raised = True
            raise
        if sealed is None:
            return None
        while self.rows:
            self.rows.pop().record_publish()
        return unseal_record(Version, sealed)


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
            ServingError: If ranks share the rows, and the folder is locked or unwritable.
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

        world.call_on_all_ranks(label, check_call, {"encoding": encoding, "keep": keep, "rebase": rebase})

        def find_last_ids() -> dict[str, str]:
            """Returns by name of each embedding what the folder's last version has, if its files can be used again."""
            old = {} if rebase else find_reusable(target.read_latest(), encoding)
            return {name: embedding.snapshot.id for name, embedding in old.items()}

        def publish_rows(rows: list[LiveRows], tensors: dict[str, Tensor]) -> Version:
            return publish_sources(target, rows, encoding, tensors, keep, check, rebase, allow_older=True)

        def publish(set_can_train: Callable[[], None]) -> Version:
            with ExitStack() as ending:
                last_ids = find_last_ids()
                with lock_between_steps(managers, awaits_step=True, finishes_saves=True):
                    rows = [
                        _make_rows(world, manager, secrets.token_hex(16), consumer, last_ids) for manager in managers
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
            self.__publish = self._publish_on_ranks(label, consumer, target, find_last_ids, publish_rows)
        else:
            self.__publish = PublishHandle(label, publish)
            self.__publish.start()
        return self.__publish

    def _publish_on_ranks(
        self,
        label: str,
        consumer: str,
        target: ServingFolder,
        find_last_ids: Callable[[], dict[str, str]],
        publish_rows: Callable[[list[LiveRows], dict[str, Tensor]], Version],
    ) -> RankPublishHandle:
        """Begin a publish of rows that ranks share. The folder stays locked until it ends, because it has the rows."""
        managers, world = self._list_managers(), find_world(self._require_embeddings())
        locked, ending = ExitStack(), ExitStack()

        def begin() -> tuple[str, list[str], dict[str, str]]:
            locked.enter_context(target.lock("a publish", create=True))
            parts = target.make_parts_folder()
            locked.callback(shutil.rmtree, parts, ignore_errors=True)
            for manager in managers:
                (parts / manager.name).mkdir()
            return str(parts), [secrets.token_hex(16) for _ in managers], find_last_ids()

        def publish(set_can_train: Callable[[], None]) -> Version:
            set_can_train()
            with locked:
                return publish_rows(rows, tensors)

        handle = RankPublishHandle(label, publish, world)
        with undo_on_error(locked.close):
            parts, ids, last_ids = world.call_on_rank_0(label, begin)
            for manager in managers:
                manager.wait_for_save()
            with lock_between_steps(managers, finishes_saves=True):
                world.call_on_all_ranks(label, lambda: [manager.check_not_saving() for manager in managers])
                rows = [_make_rows(world, *pair, consumer, last_ids) for pair in zip(managers, ids, strict=True)]
                tensors = _copy_dense_weights(self) if world.rank == 0 else {}
                saves: list[TableSave] = [
                    ShardSave(each, Path(parts, manager.name), HashShard(world.rank, world.size))
                    for each, manager in zip(rows, managers, strict=True)
                ]
                if world.rank == 0:
                    ending.push(lambda kind, *_: handle.start() if kind is None else locked.close())
                part = CheckpointPart(label, lambda: None, ending)
                handle.rows = [*rows]
                handle.job = BackgroundSnapshotJob(world, label, saves, NewSnapshots(), part)
                handle.job.yields_to_saves = True
                for manager in managers:
                    manager.set_background_save(handle.job)
        return handle


def _make_rows(world: World, manager: Any, id: str, consumer: str, last_ids: dict[str, str]) -> LiveRows:
    """Make the source of an embedding's rows. It has only changes if all ranks know what changed since the last."""
    since = last_ids.get(manager.name)
    is_known = since is not None and manager.local.table.observers.knows_changes_since(since, consumer)
    is_known = all(world.handshake(f"a publish of embedding {manager.name!r}", payload=is_known).payloads)
    return LiveRows(manager, consumer, id, since if is_known else None)


def _copy_dense_weights(model: Any) -> dict[str, Tensor]:
    """Copy a model's parameters and buffers to the CPU, without embeddings. Names are without wrappers."""
    assert isinstance(model, nn.Module)
    tensors = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, EmbeddingBase):
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                tensors[f"{prefix}.{name}" if prefix else name] = tensor.detach().to("cpu", copy=True)
    return {plain: tensors[name] for name, plain in map_unwrapped_names(model, tensors).items()}
