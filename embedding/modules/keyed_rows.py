"""Reads, writes and deletes rows by key, and shows which tiers hold a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import wraps
from itertools import chain
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from ...engine.checks import validate_arguments
from ...engine.errors import InputError, StoreError
from ...engine.ops.batch import check_legal_ids
from ...engine.options.lookup import Lookup, check_lookup, check_row, check_values, convert_keys, convert_rows
from ...engine.options.table_names import describe_table
from ...engine.row_format import EMBEDDING
from ...engine.signals import defer_signals
from ...engine.table.table import RowsReplacedError
from ...engine.table.table_report import LOCK_TIMEOUT, cache_metrics, locate_row, read_metrics, scan_with_catch_up
from ..state_dict.saved_rows import SnapshotEmbedding

Call = TypeVar("Call", bound=Callable[..., Any])

_NUMPY_KEY_TYPES = {torch.int32: np.int64, torch.int64: np.int64, torch.uint64: np.uint64}


def retry_if_replaced(call: Call) -> Call:
    """Decorate a method so that it starts over if a load in another thread replaced the rows meanwhile."""

    @wraps(call)
    def retry(*args: Any, **kwargs: Any) -> Any:
        while True:
            with suppress(RowsReplacedError):
                return call(*args, **kwargs)

    return cast(Call, retry)


class KeyedRows(SnapshotEmbedding):
    """An embedding with access to its rows by key."""

    def size(self) -> int:
        """Count the rows that training, `put` or a load has written, except rows that were removed since.

        Raises:
            InputError, CapacityError: If an earlier step failed, and its error was deferred.
        """
        return self.table_handle().table.size()

    @retry_if_replaced
    def get(self, keys: Any, table_ids: Any = None) -> Tensor:
        """Read rows without inserting new ones. An unknown key gets its initial row.

        Args:
            keys: A tensor of `key_type`, an array or a list.
            table_ids: The table of each key, as in a lookup.

        Returns:
            Rows with the shape keys.shape + (dim,).
        """
        return self.table_handle().table.get(self._make_collective_lookup(keys, table_ids))

    @validate_arguments("allow_nonfinite")
    @retry_if_replaced
    def put(self, keys: Any, rows: Any, table_ids: Any = None, *, allow_nonfinite: bool = False) -> None:
        """Write rows and insert new ones. If a key is repeated, its last row wins. Optimizer state is unchanged.

        Args:
            keys: As in `get`.
            rows: Float32 with the shape keys.shape + (dim,).
            table_ids: The table of each key, as in a lookup.
            allow_nonfinite: If True, accept infinities and NaN.

        Raises:
            InputError: If an argument is invalid; nothing is written.
        """
        with self.raise_on_all_ranks():
            lookup = self._make_lookup(keys, table_ids)
            values = convert_rows(self.spec, rows, lookup.ids.shape)
            if self.spec.padding_idx is not None and (lookup.ids == self.spec.padding_idx).any():
                raise InputError(
                    f"keys of embedding {self.name!r} contain padding_idx={self.spec.padding_idx}, which has no row; "
                    "leave it out"
                )
            check_values(self.spec, lookup.ids, values, allow_nonfinite)
            check_legal_ids(self.spec, lookup)
        self._latest_copy = ()
        self.table_handle().table.put(lookup, values)

    @retry_if_replaced
    def delete(self, ids: Any, table_ids: Any = None) -> int:
        """Delete rows with their optimizer state from every tier.

        Lookups treat a deleted id as a new id, with its initial row. Snapshots, checkpoints and exports keep the row,
        and a load or a recovery after a kill brings the row back. RocksDB's files keep the row's bytes until `compact`.
        "Delete" in docs/lifecycle.md lists the steps that remove a row from all files.

        Args:
            ids, table_ids: As in `get`.

        Returns:
            How many rows were deleted.
        """
        self._latest_copy = ()
        return self.table_handle().table.delete(self._make_collective_lookup(ids, table_ids))

    def chunks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Iterate over all written rows in chunks, ordered by bucket, table and key.

        Yields:
            Tuples of tensors: table_ids [n] int64, keys [n] of `key_type`, rows [n, dim] float32.
        """
        while True:
            table = self.table_handle().open_table
            scan = scan_with_catch_up(table)
            with suppress(RowsReplacedError):
                first = next(scan, None)
                break
        for _, rows in () if first is None else chain([first], scan):
            if not len(rows):  # a scan of RocksDB begins with an empty chunk
                continue
            keys = rows["key"].copy().view(_NUMPY_KEY_TYPES[self.spec.key_type])
            values = table.row_format.values(rows, EMBEDDING).copy()
            tables = torch.from_numpy(rows["table"].astype(np.int64))
            yield tables, torch.from_numpy(keys).to(self.spec.key_type), torch.from_numpy(values)

    def __iter__(self) -> Iterator[tuple[int, int, Tensor]]:
        """Iterate over all written rows as (table id, key, row [dim]), in the order of `chunks`."""
        for tables, keys, rows in self.chunks():
            yield from zip(tables.tolist(), keys.tolist(), rows, strict=True)

    @retry_if_replaced
    def compact(self) -> None:
        """Rewrite RocksDB's files without replaced and deleted rows.

        Raises:
            StoreError: If the store is not a cached_ssd store.
        """
        table = self.table_handle().open_table
        if self.store_options.store != "cached_ssd":
            raise StoreError(f"compact: a {self.store_options.store} store has no files to merge; only cached_ssd has")
        with table.lock, defer_signals():
            table.finish_erasures()
            cache_metrics(table)
            assert table.stack is not None
            table.stack.compact()

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Return metrics of the embedding (key `table`), of each tier (key: its name) and of each table (key `tables`).

        docs/metrics.md explains all metrics. With a world, metrics cover this rank's rows, and `ranks` counts this
        rank's traffic. While another thread loads, closes or compacts the rows, the last metrics are returned.
        """
        return self.metrics_within(LOCK_TIMEOUT)

    @retry_if_replaced
    def metrics_within(self, seconds: float) -> dict[str, dict[str, Any]]:
        """Return the same as `metrics`. Waits up to `seconds` for a lock, but never for a pending move to a device."""
        handle = self._handle if self._handle is not None and not self._pending_references else self.table_handle()
        traffic = {} if self.world is None else {"ranks": asdict(handle.table.traffic)}
        return {**read_metrics(handle.open_table, seconds), **traffic}

    @retry_if_replaced
    def explain(self, key: int, table: int | str | None = None) -> dict[str, Any]:
        """Show where a row is now, for people to read. Changes nothing.

        Args:
            key: The row's id.
            table: Index or name of the row's table. Optional if there is only one table.

        Returns:
            A dict with the row's table and key, and:

            - `stored`: True if the row was written. Otherwise the row has its initial value.
            - `why`: the reason why the row is not stored, if known; otherwise None.
            - `updates`, `last_step`: how often the row was written, and the last step that wrote it.
            - `tiers`: the tiers that hold the row, from the top, with the row's position. In a cache, `dirty` means
              that the next tier holds an older row. `pinned` means that a step or a prefetch keeps the row cached.

        Raises:
            InputError: If the key or the table is invalid.
        """
        key, number = check_row(self.spec, key, table)
        tiers, why = locate_row(self.table_handle().open_table, self._make_lookup([key], number))
        row = {**describe_table(number, self.spec.table_names), "key": key, "stored": why is None, "why": why}
        newest = tiers[0] if tiers else {"updates": 0, "last_step": 0}
        return {**row, "updates": newest["updates"], "last_step": newest["last_step"], "tiers": tiers}

    def _make_collective_lookup(self, keys: Any, table_ids: Any) -> Lookup:
        """Check a collective call's arguments, and return them as a `Lookup`. An error is raised on all ranks."""
        with self.raise_on_all_ranks():
            return self._make_lookup(keys, table_ids)

    def _make_lookup(self, keys: Any, table_ids: Any) -> Lookup:
        ids = keys if isinstance(keys, Tensor) else convert_keys(self.spec, keys)
        lookup = check_lookup(self.spec, ids, table_ids)
        device = self.device
        return Lookup(lookup.ids.to(device), None if lookup.table_ids is None else lookup.table_ids.to(device))
