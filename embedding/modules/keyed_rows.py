"""Reads, writes and deletes an embedding's rows by their keys, and shows where a row is."""

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

from ...engine.checks import checked_arguments
from ...engine.errors import InputError, StoreError
from ...engine.ops.batch import check_legal
from ...engine.options.lookup import Lookup, check_lookup, check_row, check_values, keys_from, rows_from
from ...engine.options.table_names import with_table_name
from ...engine.row_format import EMBEDDING
from ...engine.signals import uninterrupted
from ...engine.table.table import RowsReplaced
from ...engine.table.table_report import LOCK_SECONDS, locate, metrics, note_metrics, scan_caught_up
from ..state_dict.saved_rows import SavedRows

Call = TypeVar("Call", bound=Callable[..., Any])

_NUMPY_KEYS = {torch.int32: np.int64, torch.int64: np.int64, torch.uint64: np.uint64}


def on_present_rows(call: Call) -> Call:
    """A method that starts over if another thread loaded other rows while it waited for them."""

    @wraps(call)
    def until_done(*args: Any, **kwargs: Any) -> Any:
        while True:
            with suppress(RowsReplaced):
                return call(*args, **kwargs)

    return cast(Call, until_done)


class KeyedRows(SavedRows):
    """An embedding whose rows are read and written by their keys."""

    def size(self) -> int:
        """How many rows there are: rows that an optimizer, `put` or a snapshot wrote and that were not removed since.

        Raises deferred errors of earlier steps. InputError, CapacityError.
        """
        return self.table_handle().table.size()

    @on_present_rows
    def get(self, keys: Any, table_ids: Any = None) -> Tensor:
        """Rows of keys, a tensor of key_type, an array or a list, without inserting: shape keys.shape + (dim,)."""
        return self.table_handle().table.get(self._collective_lookup(keys, table_ids))

    @checked_arguments("allow_nonfinite")
    @on_present_rows
    def put(self, keys: Any, rows: Any, table_ids: Any = None, *, allow_nonfinite: bool = False) -> None:
        """Write rows and insert new ones. Of a repeated key the last row wins. Optimizer state is unchanged.

        Args:
            keys: as in `get`.
            rows: float32, shape keys.shape + (dim,).
            table_ids: the table of each key, as in a lookup.
            allow_nonfinite: takes infinities and NaN.

        Raises:
            InputError: nothing is written.
        """
        with self.raise_on_all_ranks():
            wanted = self._lookup(keys, table_ids)
            values = rows_from(self.spec, rows, wanted.ids.shape)
            if self.spec.padding_idx is not None and (wanted.ids == self.spec.padding_idx).any():
                raise InputError(
                    f"keys of embedding {self.name!r} hold padding_idx={self.spec.padding_idx}, which is no row; leave "
                    "it out"
                )
            check_values(self.spec, wanted.ids, values, allow_nonfinite)
            check_legal(self.spec, wanted)
        self._copied = ()
        self.table_handle().table.put(wanted, values)

    @on_present_rows
    def delete(self, ids: Any, table_ids: Any = None) -> int:
        """Forget rows, optimizer state included, in every tier; ids as in `get`. Returns how many had been written.

        A deleted id is like one never seen: it has its initial row, and begins again when it is trained or put.
        Snapshots, checkpoints and exports keep the row, and a load or a recovery after a kill brings it back. RocksDB's
        files keep its bytes until `compact`. docs/lifecycle.md, "Delete", has the steps after which no file has
        the row.
        """
        self._copied = ()
        return self.table_handle().table.delete(self._collective_lookup(ids, table_ids))

    def chunks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Every written row, in chunks ordered by bucket, table and key.

        A chunk is (table_ids [n] int64, keys [n] of key_type, rows [n, dim] float32).
        """
        while True:
            table = self.table_handle().local_table
            scan = scan_caught_up(table)
            with suppress(RowsReplaced):
                first = next(scan, None)
                break
        for _, rows in () if first is None else chain([first], scan):
            keys = rows["key"].copy().view(_NUMPY_KEYS[self.spec.key_type])
            values = table.form.numbers(rows, EMBEDDING).copy()
            tables = torch.from_numpy(rows["table"].astype(np.int64))
            yield tables, torch.from_numpy(keys).to(self.spec.key_type), torch.from_numpy(values)

    def __iter__(self) -> Iterator[tuple[int, int, Tensor]]:
        """Every written row as (table id, key, row [dim]), in the order of `chunks`."""
        for tables, keys, rows in self.chunks():
            yield from zip(tables.tolist(), keys.tolist(), rows, strict=True)

    @on_present_rows
    def compact(self) -> None:
        """Merge RocksDB's files, so that none has a replaced or deleted row. StoreError for other stores."""
        table = self.table_handle().local_table
        if self.store_options.store != "cached_ssd":
            raise StoreError(f"compact: a {self.store_options.store} store has no files to merge; only cached_ssd has")
        with table.lock, uninterrupted():
            table.ready()
            note_metrics(table)
            assert table.stack is not None
            table.stack.compact()

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Numbers of the whole (`table`), of each tier from the top, of each table: docs/metrics.md explains them.

        With a world they are of the rows that this rank has, and `ranks` is what it exchanged with the others. While
        another thread loads, closes or compacts the rows they are those of the last read.
        """
        return self.metrics_within(LOCK_SECONDS)

    @on_present_rows
    def metrics_within(self, seconds: float) -> dict[str, dict[str, Any]]:
        """`metrics`, which wait that long for another thread. They wait for no open or move of an open store."""
        handle = self._handle if self._handle is not None and not self._awaited else self.table_handle()
        of_ranks = {} if self.world is None else {"ranks": asdict(handle.table.traffic)}
        return {**metrics(handle.local_table, seconds), **of_ranks}

    @on_present_rows
    def explain(self, key: int, table: int | str | None = None) -> dict[str, Any]:
        """Where one row is now, for people. Changes nothing. `table` may be left out where there is one table.

        `stored`: whether the row was written. If not, the row has its initial value, and no tier need have it. `why`:
        why it is not stored, as far as is known, or None. `updates`: how often the row was written. `last_step`: the
        last step that wrote it. `tiers`: the tiers that have the row, the top first, each with the row's place. In a
        cache they say whether the row is `dirty` (the tier below has an older row) and `pinned` (a step or a prefetch
        holds it). Raises InputError.
        """
        key, at = check_row(self.spec, key, table)
        tiers, why = locate(self.table_handle().local_table, self._lookup([key], at))
        row = {**with_table_name(at, self.spec.table_names), "key": key, "stored": why is None, "why": why}
        newest = tiers[0] if tiers else {"updates": 0, "last_step": 0}
        return {**row, "updates": newest["updates"], "last_step": newest["last_step"], "tiers": tiers}

    def _collective_lookup(self, keys: Any, table_ids: Any) -> Lookup:
        """The lookup of a collective."""
        with self.raise_on_all_ranks():
            return self._lookup(keys, table_ids)

    def _lookup(self, keys: Any, table_ids: Any) -> Lookup:
        ids = keys if isinstance(keys, Tensor) else keys_from(self.spec, keys)
        lookup = check_lookup(self.spec, ids, table_ids)
        device = self.device
        here = None if lookup.table_ids is None else lookup.table_ids.to(device)
        return Lookup(lookup.ids.to(device), here)
