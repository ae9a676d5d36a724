"""Reports a rank that was lost while this process can still do so: torchrun ends it a moment after the other."""

from __future__ import annotations

import os
from logging import getLogger
from threading import Lock

from ..engine.errors import GroupError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun's report finds what a rank raised


class LossReport:
    """Writes the first error of a group to the log, which is stderr by default, and to torchrun's report."""

    def __init__(self, rank: int) -> None:
        self._rank, self._writing, self._is_written = rank, Lock(), False
        if ERROR_FILE in os.environ:  # imported now, since there is no time once a rank is lost
            import torch.distributed.elastic.multiprocessing.errors  # noqa: F401

    def write(self, error: GroupError, noticed: bool = False) -> None:
        """May be called by any thread. noticed: by no call of this rank, which ends by the first such error.

        Ranks that are lost after the first are those that torchrun ends because of it.
        """
        with self._writing:
            if self._is_written and noticed:
                return
            if not self._is_written:
                getLogger("tierbed").error("GroupError on rank %d: %s", self._rank, error)
            self._is_written = True
            if ERROR_FILE in os.environ:
                _record(error)


def _record(error: GroupError) -> None:
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error  # the handler takes the traceback of the error that is handled
    except GroupError:
        try:
            get_error_handler().record_exception(error)
        except OSError as failed:
            getLogger("tierbed").warning("%s=%s: %s", ERROR_FILE, os.environ[ERROR_FILE], failed)
    finally:
        error.__traceback__ = None
