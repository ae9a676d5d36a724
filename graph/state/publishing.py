"""`graph.publish`: publishes rows and dense weights of one step in a thread, while training goes on.

Between two steps, the thread opens an image of each table and copies the dense weights. It then reads the images. For
each serving folder, a tracker lists the rows that changed since the folder's last version. So snapshots and publishes
do not affect each other.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from threading import Event
from typing import Any

import numpy as np
from torch import Tensor, nn

from ...embedding.state_dict.model_snapshots import ModelSnapshots
from ...embedding.tables.training_group import lock_between_steps
from ...engine import _core
from ...engine.errors import OptionError, ServingError
from ...engine.ops.embedding_base import EmbeddingBase
from ...engine.options.table_spec import RUN_ID_FIELD
from ...engine.row_format import ROW_KEY_DTYPE, Change, RowArray
from ...engine.threads import POLL_SECONDS, Thread
from ...serving.folder import ServingFolder
from ...serving.publish import Check, check_arguments, find_reusable, publish_sources
from ...serving.source import settle_changes
from ...serving.version import ServedEmbedding, SnapshotEntry, Version
from ...snapshots.store.selection import Selection
from ..trace.names import map_unwrapped_names

_NO_KEYS: RowArray = np.empty(0, ROW_KEY_DTYPE)
log = logging.getLogger("tierbed")


class LiveRows:
    """The rows of an open table at one step: a `RowSource`. Made between two steps, while the tables are locked."""

    catches_up = False  # new bases merge files, because the image contains only changed rows

    def __init__(self, handle: Any, consumer: str, old: ServedEmbedding | None, ending: ExitStack) -> None:
        """`old` describes the folder's last version. `ending` ends the image and the tracker's increment."""
        table, self._consumer = handle.local.table, consumer
        self._observers, self._stored = table.observers, table.describe()
        spec, description = table.spec, Selection(includes_state=False).describe(self._stored)
        self.description = description | {
            "ids": [options.ids for options in spec.tables],
            "bad_ids": [options.bad_ids for options in spec.tables],
            "zero_key": spec.zero_key,
        }
        self.label, self.row_format = f"embedding {spec.name!r}", table.row_format
        run = str(self._stored[RUN_ID_FIELD])
        self.origin = SnapshotEntry(secrets.token_hex(16), run, table.step, table.counts.num_rows)
        is_known = old is not None and self._observers.knows_changes_since(old.snapshot.id, consumer)
        self._since = old.snapshot.id if old is not None and is_known else None
        self._observers.track_during_save(consumer)
        self._save = self._observers.begin_foreground_save(f"a publish of {self.label}", self._since, consumer)
        ending.callback(self._save.end)

    def read_since(self, id: str) -> Iterator[Change] | None:
        return settle_changes(self._stored, self._save.chunks()) if id == self._since else None

    def read_all(self) -> Iterator[Change]:
        if self._since is not None:
            raise ServingError(f"another publisher has published {self.label} meanwhile: publish it again")
        return settle_changes(self._stored, ((bucket, rows, _NO_KEYS) for bucket, rows in self._save.chunks()))

    def record_publish(self) -> None:
        """From now on, track changes since these rows."""
        self._observers.record_save(self.origin.id, self._consumer)


class PublishHandle:
    """A publish that may still be running."""

    def __init__(self, label: str, publish: Callable[[Callable[[], None]], Version]) -> None:
        """`publish` calls its argument once the model may be trained again."""
        self.label = label
        self._version: Version | None = None
        self._error: BaseException | None = None
        self._can_train, self._is_error_raised = Event(), False
        self._thread = Thread(target=self._run, args=(publish,), name="tierbed-publish")
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

    def _run(self, publish: Callable[[Callable[[], None]], Version]) -> None:
        try:
            _core.use_own_pool(1)  # not a lower priority too: on a busy machine, versions would take minutes
            self._version = publish(self._can_train.set)
        except BaseException as error:
            self._error = error
            log.error("%s failed: %s", self.label, error)
        finally:
            self._can_train.set()


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
        runs in the background ends first. Rows must be in one process, on a CPU.

        Args:
            folder, encoding, keep, check, rebase: As in `tierbed.serving.publish`. `check` runs in the thread.

        Returns:
            A handle: `wait()` returns the version once readers can see it, or raises the publish's error. The next
            `publish` first waits for this one, and raises its error if `wait()` has not.

        Raises:
            OptionError: If the rows are on a GPU or spread over ranks.
            SnapshotError: If the model contains no embedding.
        """
        if self.__publish is not None:
            self.__publish.wait_for_next()
        handles = self._list_managers()
        for handle in handles:
            if handle.world.size > 1 or handle.local.table.processor.defers_errors:
                place = "spread over ranks" if handle.world.size > 1 else "on a GPU"
                raise OptionError(
                    f"the rows of embedding {handle.name!r} are {place}, and publish needs them in one process on a "
                    "CPU; save snapshots, and publish them with tierbed.serving.publish"
                )
        check_arguments(encoding, keep, check, rebase=rebase)
        target = ServingFolder(folder)

        def publish(set_can_train: Callable[[], None]) -> Version:
            with ExitStack() as ending:
                old = {} if rebase else find_reusable(target.read_latest(), encoding)
                consumer = f"publish to {target.path}"
                with lock_between_steps(handles, awaits_step=True, finishes_saves=True):
                    sources = [LiveRows(handle, consumer, old.get(handle.name), ending) for handle in handles]
                    tensors = _copy_dense_weights(self)
                set_can_train()
                version = publish_sources(
                    target.path, sources, encoding, tensors, keep, check, rebase, allow_older=True
                )
                for source in sources:
                    source.record_publish()
                return version

        self.__publish = PublishHandle(f"a publish to {str(target.path)!r}", publish)
        return self.__publish


def _copy_dense_weights(model: Any) -> dict[str, Tensor]:
    """Copy a model's parameters and buffers to the CPU, without embeddings. Names are without wrappers."""
    assert isinstance(model, nn.Module)
    tensors = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, EmbeddingBase):
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                tensors[f"{prefix}.{name}" if prefix else name] = tensor.detach().to("cpu", copy=True)
    return {plain: tensors[name] for name, plain in map_unwrapped_names(model, tensors).items()}
