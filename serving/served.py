"""Looks up the rows of a serving folder, and follows its publisher from version to version."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock
from typing import Any, Literal, Protocol, Self
from weakref import WeakSet, finalize, ref

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..engine import _core
from ..engine.checks import as_number, check_choice
from ..engine.errors import ClosedError, InputError, OptionError, ServingError, StoreError
from ..engine.ops.batch import (
    FeatureLookupArguments,
    LookupArguments,
    check_offsets,
    empty_rows,
    flatten_weights,
    make_illegal_id_error,
    make_lookup_arguments,
)
from ..engine.options.lookup import OUTPUT_DTYPES, Lookup, check_lookup, check_output_dtype, check_weights
from ..engine.options.table_spec import TableSpec
from ..engine.threads import Thread
from .folder import ServingFolder
from .metrics import collect
from .settings import pack_settings
from .version import Current, Version

Unknown = Literal["initial", "zeros"]
log = logging.getLogger("tierbed")


class ServedRows:
    """An embedding in one version. It never changes, and any number of threads may call it."""

    def __init__(
        self,
        spec: TableSpec,
        paths: list[tuple[str, str]],
        unknown: Unknown,
        output_dtype: torch.dtype,
        previous: ServedRows | None,
    ) -> None:
        """Open each table's base and delta, if it is not "", except what `previous` has open. Raises StoreError."""
        self.spec, self.output_dtype, self._paths, self._unknown = spec, output_dtype, paths, unknown
        self._dtype_name = OUTPUT_DTYPES[output_dtype]
        older = None if previous is None else previous.native
        self.native: _core.ServedTables = _core.ServedTables(pack_settings(spec), paths, unknown == "initial", older)

    def adapt(self, spec: TableSpec, output_dtype: torch.dtype) -> ServedRows:
        """Returns the same rows for a spec with other limits of ids. Files and counts are shared."""
        return ServedRows(spec, self._paths, self._unknown, output_dtype, self)

    def __call__(
        self,
        ids: Tensor,
        table_ids: Tensor | int | str | Sequence[Any] | None = None,
        offsets: Tensor | None = None,
        pooling: str | None = None,
        weights: Tensor | None = None,
        features: Sequence[int] | None = None,
        num_features: int | None = None,
    ) -> Tensor:
        """Look up rows by id, or pool the rows of bags, like `forward` of the trained embedding in evaluation.

        Args:
            ids: Integers of any shape, of the embedding's `key_type` or a dtype that fits into it.
            table_ids: The table of each id, or with pooling of each bag: numbers or names.
            offsets: Int64 or int32 [bags + 1]: bag b is ids[offsets[b]:offsets[b + 1]].
            pooling: "sum" or "mean" of each bag's rows; None returns all rows.
            weights: Float32 with the shape of ids, to multiply rows before pooling.
            features, num_features: As in `MultiTableEmbedding.forward`.

        Returns:
            A tensor of `output_dtype` with the shape that `forward` returns.

        Raises:
            InputError: If an argument is invalid, or an id is out of range.
        """
        spec = self.spec
        lookup = check_lookup(spec, ids, table_ids, offsets, pooling, features, num_features)
        check_weights(spec, lookup, weights)
        if not ids.is_cpu:
            raise InputError(
                f"ids of embedding {spec.name!r} are on {ids.device}; served rows are on the CPU: ids.cpu()"
            )
        return self.look_up_checked(lookup, weights)

    def look_up_checked(self, lookup: Lookup, weights: Tensor | None) -> Tensor:
        """Returns a checked lookup's result. Raises InputError for ids, table ids or offsets out of range."""
        factors = None if weights is None else flatten_weights(weights)
        shape = *lookup.shape, self.spec.dim
        try:
            return self.look_up(make_lookup_arguments(self.spec, lookup), shape, lookup.pooling == "mean", factors)
        except ValueError:
            check_offsets(self.spec, lookup)
            raise

    def look_up(
        self,
        arguments: LookupArguments | FeatureLookupArguments,
        shape: tuple[int, ...],
        is_mean: bool = False,
        weights: NDArray[np.float32] | None = None,
    ) -> Tensor:
        """Look up rows for arguments in native form, without the checks of `__call__`, which take longer.

        Args:
            arguments: As `make_lookup_arguments` returns them: (keys, tables, bags[, features, batch]).
            shape: The result's shape. Its size is the number of rows times their width.
            is_mean: True to divide each bag's sum by its number of ids.
            weights: Float32 [ids], or None.

        Raises:
            InputError: If an id is out of range.
            ValueError: If the arrays do not fit each other.
        """
        out, array = empty_rows(shape, self.spec.dim, self.output_dtype)
        illegal = self.native.look_up(arguments, array, is_mean, weights, self._dtype_name)
        if illegal is not None:
            raise make_illegal_id_error(self.spec, *illegal)
        return out


class ServedVersion:
    """One version of all embeddings. Use it if several lookups must see one version.

    Attributes:
        version: Its number.
        step: The step of its rows and dense weights.
        created: Time of the publish, in nanoseconds since 1970 (UTC).
        tensors_path: The safetensors file with the dense weights, or None.
        tensors: The dense weights by name, as views of the mapped file, or None.
        models: The frozen models' copies for this version, by `FrozenModel.key`.
    """

    def __init__(
        self,
        folder: ServingFolder,
        record: Version,
        unknown: Unknown = "initial",
        output_dtype: torch.dtype = torch.float32,
        previous: ServedVersion | None = None,
    ) -> None:
        self.version, self.step, self.created = record.version, record.step, record.created
        self.tensors_path: Path | None = None if record.tensors is None else folder.find_file(record.tensors)
        self.embeddings: dict[str, ServedRows] = {}
        self.models: dict[int, nn.Module] = {}
        older = {} if previous is None else previous.embeddings
        try:
            for entry in record.embeddings:
                paths = [
                    (str(folder.find_file(table.base)), str(folder.find_file(table.delta)) if table.delta else "")
                    for table in entry.tables
                ]
                rows = ServedRows(entry.spec, paths, unknown, output_dtype, older.get(entry.name))
                self.embeddings[entry.name] = rows
            self.tensors = None if self.tensors_path is None else load_file(self.tensors_path)
        except (StoreError, OSError, SafetensorError) as error:
            remedy = "publish again with rebase=True, or roll back to another version"
            raise ServingError(f"version {record.version} cannot be opened: {error}; {remedy}") from error

    def __repr__(self) -> str:
        return f"<version {self.version}, step {self.step}: {', '.join(self.embeddings)}>"

    def __getitem__(self, name: str) -> ServedRows:
        rows = self.embeddings.get(name)
        if rows is None:
            raise OptionError(
                f"{name!r} is not a served embedding: give one of {', '.join(map(repr, self.embeddings))}"
            )
        return rows


class FollowedRows:
    """An embedding in the version that a `Served` has at the time of each call."""

    def __init__(self, served: Served, name: str) -> None:
        self._served, self._name = served, name

    def __call__(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Look up rows in the current version. The arguments are those of `ServedRows.__call__`."""
        return self._served.current[self._name](ids, *args, **kwargs)


class BoundModel(Protocol):
    """A model with a copy for each version. key: its number. model: the copy for the current version."""

    key: int
    model: nn.Module

    def bind(self, version: ServedVersion) -> nn.Module:
        """Returns the copy for a version. Raises ServingError if the version does not fit."""


_open_folders: WeakSet[Served] = WeakSet()
# in a forked child, no thread ends a refresh that held a lock
os.register_at_fork(after_in_child=lambda: [*map(Served._renew_after_fork, list(_open_folders))])


class Served:
    """An open serving folder. `served["items"](ids)` looks up rows in the current version. See `open_served`."""

    def __init__(self, folder: str | os.PathLike[str], unknown: Unknown, output_dtype: torch.dtype) -> None:
        self._folder, self._unknown, self._output_dtype = ServingFolder(folder), unknown, output_dtype
        self._lock = Lock()  # held by a refresh, never by lookups
        self._num_refreshes = self._num_failed = 0
        self._stop_following = Event()
        self._models: WeakSet[BoundModel] = WeakSet()
        self._current: ServedVersion | None = self._open(None)
        _open_folders.add(self)

    def __repr__(self) -> str:
        return f"<serving folder {str(self._folder.path)!r}: {self._current or 'closed'}>"

    def _renew_after_fork(self) -> None:
        self._lock, self._stop_following = Lock(), Event()

    def add_model(self, model: BoundModel) -> None:
        """Bind a model to the current version, and to each later one before calls see it. Raises ServingError."""
        with self._lock:
            self.current.models[model.key] = model.model = model.bind(self.current)
            self._models.add(model)
            finalize(model, self._drop_model, model.key)

    def _drop_model(self, key: int) -> None:
        if (current := self._current) is not None:
            current.models.pop(key, None)

    @property
    def current(self) -> ServedVersion:
        """The version that lookups take now. It remains usable after a refresh. Raises ClosedError."""
        current = self._current
        if current is None:
            raise ClosedError(f"serving folder {str(self._folder.path)!r} is closed: open it again with open_served")
        return current

    @property
    def version(self) -> int:
        """The number of the version that lookups take. Raises ClosedError."""
        return self.current.version

    def __getitem__(self, name: str) -> FollowedRows:
        self.current[name]  # raises for an unknown name
        return FollowedRows(self, name)

    def refresh(self) -> bool:
        """Take the version that CURRENT names. Lookups that have begun finish in the version that they have.

        Returns:
            True if the version changed.

        Raises:
            ServingError: If that version is damaged. Lookups stay with the version that they have.
            ClosedError: After `close`.
        """
        with self._lock:
            current = self.current
            try:
                newer = self._open(current)
                models = [] if newer is current else list(self._models)
                for model in models:
                    newer.models[model.key] = model.bind(newer)
            except Exception:
                self._num_failed += 1
                raise
            if self._current is not None and newer is not current:  # `close` does not wait for a refresh
                self._current = newer
                self._num_refreshes += 1
                for model in models:
                    model.model = newer.models[model.key]
            return newer is not current

    def follow(self, seconds: float = 1.0) -> None:
        """Refresh every so many seconds, in a thread, until `close`. A later call changes the seconds.

        A refresh that fails is counted in `metrics` and logged, unless the refresh before failed in the same way. A
        forked process has no such thread: call `follow` there too.

        Raises:
            OptionError: If `seconds` is not a positive number.
            ClosedError: After `close`.
        """
        number = as_number(seconds)
        if number is None or not 0 < number <= threading.TIMEOUT_MAX:
            raise OptionError(f"seconds={seconds!r}: give a number above 0")
        self.current  # noqa: B018  # raises after `close`
        with self._lock:
            self._stop_following.set()
            self._stop_following = stop = Event()
        args = ref(self), stop, number
        Thread(target=_follow, args=args, name="tierbed-follow", daemon=True).start()

    def metrics(self) -> dict[str, Any]:
        """Returns counts since the folder was opened, and the current version.

        `seconds_behind` is the version's age. `held` is 1 while a rollback holds readers. `embeddings` has for each
        embedding the number of `lookups` and `ids`, how many of these ids were `unknown`, found in a `delta`, or
        illegal and `dropped`, and quantiles of the lookups' times, without Python.
        """
        current = self.current
        return {
            "version": current.version,
            "step": current.step,
            "seconds_behind": max(0.0, time.time() - current.created * 1e-9),
            "held": int(self._is_held),
            "refreshes": self._num_refreshes,
            "failed_refreshes": self._num_failed,
            "embeddings": {name: rows.native.metrics for name, rows in current.embeddings.items()},
        }

    def describe(self) -> list[Any]:
        """Returns an empty list. `prometheus_client` calls this when you register a folder."""
        return []

    def collect(self) -> Iterable[Any]:
        """Returns families for `prometheus_client`, so a folder can be registered: `REGISTRY.register(served)`."""
        with suppress(ClosedError):
            return collect(self.metrics(), str(self._folder.path))
        return ()

    def close(self) -> None:
        """Close the folder. Its memory is unmapped once no lookup uses it. Later calls raise ClosedError."""
        self._stop_following.set()
        self._current = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, current: ServedVersion | None) -> ServedVersion:
        """Returns the version that CURRENT names, `current` if it is that one. Raises ServingError."""

        def open_version(newest: Current) -> ServedVersion:
            self._is_held = newest.hold
            if current and (current.version, current.created) == (newest.version, newest.created):
                return current
            record = self._folder.read_version(newest.version)
            return ServedVersion(self._folder, record, self._unknown, self._output_dtype, current)

        return self._folder.use_current(open_version)


def _follow(find_served: Callable[[], Served | None], stop: Event, seconds: float) -> None:
    """Refresh a folder until `stop` is set or the folder was collected."""
    last_error: str | None = None
    while not stop.wait(seconds) and (served := find_served()) is not None:
        try:
            served.refresh()
            last_error = None
        except ClosedError:
            return
        except Exception as error:
            if repr(error) != last_error:
                last_error = repr(error)
                log.warning("a refresh failed, and lookups stay with the version that they have: %s", last_error)
        del served


def open_served(
    folder: str | os.PathLike[str], unknown: Unknown = "initial", output_dtype: torch.dtype = torch.float32
) -> Served:
    """Open the current version of a serving folder for lookups. Processes that open it share its memory.

    Args:
        folder: The folder of `publish`.
        unknown: What an unknown id gets: "initial", the initial row that training would begin with, or "zeros".
        output_dtype: The dtype of lookup results: torch.float32, float16 or bfloat16.

    Raises:
        OptionError: If an argument is invalid.
        ServingError: If the folder has no version, or the version is damaged.

    Example:

        >>> served = tierbed.serving.open_served("serving")
        >>> rows = served["items"](torch.tensor([7, 42]))
        >>> served.refresh()
        False
    """
    check_choice("unknown", unknown, ("initial", "zeros"))
    return Served(folder, unknown, check_output_dtype(output_dtype))
