"""The handles that `graph.publish` returns."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from threading import Event
from time import monotonic

from ...distributed.world import World
from ...embedding.saving.background_saving import BackgroundSnapshotJob
from ...engine import _core
from ...engine.errors import ServingError, TierbedError
from ...engine.threads import POLL_SECONDS, Thread
from ...serving.version import Version, seal_record, unseal_record
from .live_rows import LiveRows

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
        """True if the publish has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Version | None:
        """Wait until the publish ends, for at most `timeout` seconds. With several ranks, the shortest limit applies.

        Returns:
            The version, or None if the publish still runs.

        Raises:
            Exception: The error of the publish. Readers then keep the last version.
        """
        if self._thread.ident is not None:
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
            del self._publish  # it keeps a copy of the dense weights
            self._can_train.set()


class RankPublishHandle(PublishHandle):
    """A publish of rows that ranks share. Only rank 0 has a thread, from when all ranks have written their rows."""

    job: BackgroundSnapshotJob  # writes the rows

    def __init__(
        self, label: str, publish: Callable[[Callable[[], None]], Version], world: World, rows: list[LiveRows]
    ) -> None:
        super().__init__(label, publish)
        self._world, self._rows = world, rows

    def try_start(self) -> bool:
        """As `start`, on rank 0. If the thread cannot be started, all ranks raise this in `wait`."""
        try:
            self.start()
        except RuntimeError as error:
            self._error = error
        return self._error is None

    @property
    def done(self) -> bool:
        self.job.try_complete()
        is_over = self._world.call_on_rank_0(f"{self.label}: done", lambda: not self._thread.is_alive())
        return self.job.done and bool(is_over)

    def wait(self, timeout: float | None = None) -> Version | None:
        end = inf if timeout is None else monotonic() + timeout

        def wait_briefly() -> tuple[bool, bytes | None]:  # the other ranks wait in a collective, which has a time limit
            try:
                version = super(RankPublishHandle, self).wait(max(0, min(POLL_SECONDS, end - monotonic())))
            except Exception as error:
                kind = type(error) if isinstance(error, TierbedError) else ServingError
                raise kind(f"{self.label} failed: {error}") from error
            sealed = None if version is None else seal_record(version)
            return sealed is not None or monotonic() >= end, sealed

        try:
            while not self.job.wait(timeout):
                if timeout is not None:
                    return None
        except Exception:
            self._is_error_raised = self.job.done
            raise
        has_ended, sealed = False, None
        while not has_ended:
            try:
                has_ended, sealed = self._world.call_on_rank_0(f"{self.label}: wait", wait_briefly)
            except Exception as error:
                self._is_error_raised = error is self._world.shared_error
                raise
        if sealed is None:
            return None
        while self._rows:
            self._rows.pop().record_publish()
        return unseal_record(Version, sealed)

    def wait_for_next(self) -> None:
        if not all(self._world.handshake(f"{self.label}: next", payload=self._is_error_raised).payloads):
            self.wait()
