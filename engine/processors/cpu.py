"""The `Processor` for tables on the CPU. This processor calls the native core."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import _core
from .._core import Batch
from ..cache.cache_tier import CpuCacheTier
from ..ops.batch import Gradients, as_array, convert_gradients, empty, flatten_weights, make_batch, to_keys
from ..optim.row_state import RowState
from ..options.lookup import OUTPUT_DTYPES, Lookup
from ..options.store_options import CachedHostMemOptions, as_mb
from ..options.table_spec import TableSpec
from ..store.full_tier import CpuFullTier
from ..store.interfaces import Tier, TopTier
from ..store.table_counts import Counts
from .processor import Processor

GATHER_LIMIT = 256  # maximum number of ids for `gather_rows`, as in native/full_table.h


class CpuProcessor(Processor[Batch]):
    """The `Processor` for the CPU. A call's work is done when the call returns, so no errors are deferred."""

    def __init__(self, spec: TableSpec, state: RowState, capacity: int | None) -> None:
        self.device = torch.device("cpu")
        self.layout = spec.make_layout(state)
        self._written_counts = np.zeros(spec.num_tables, np.uint64)
        self._dropped_counts = np.zeros(spec.num_tables, np.int64)
        self._spec = spec
        self._hyperparams: Sequence[float] = ()
        self._step, self._scale = 0, 1.0

    @property
    def written_counts(self) -> Counts:
        return self._written_counts.astype(np.int64)

    @property
    def dropped_counts(self) -> Counts:
        return self._dropped_counts.copy()

    def make_full_table(self, tier: str) -> CpuFullTier:
        return CpuFullTier(self.layout, tier)

    def make_cache(self, lower_tier: Tier, options: CachedHostMemOptions) -> CpuCacheTier:
        option = f"embedding {self._spec.name!r}: cache_budget_mb"
        return CpuCacheTier(self.layout, lower_tier, options, as_mb(options.cache_budget_mb), "device", option)

    def make_table_cache(self, options: CachedHostMemOptions) -> tuple[CpuCacheTier, CpuFullTier]:
        host = CpuFullTier(self.layout, "host")
        return self.make_cache(host, options), host

    def make_batch(self, lookups: Sequence[Lookup], sibling: Batch | None = None, is_future: bool = False) -> Batch:
        _core.set_num_threads(torch.get_num_threads())
        return make_batch(self._spec, lookups) if sibling is None else sibling.make_sibling()

    def count_written(self, batch: Batch) -> Counts:
        return _core.count_written(batch, self.layout).astype(np.int64)

    def gather_rows(self, top: TopTier[Batch], lookup: Lookup, dtype: torch.dtype, is_training: bool) -> Tensor | None:
        spec, ids = self._spec, lookup.ids
        if type(top) is not CpuFullTier or ids.numel() > GATHER_LIMIT or lookup.table_ids is not None or lookup.pooling:
            return None
        if spec.num_tables > 1 or spec.padding_key is not None or spec.dtype != "float32" or dtype != torch.float32:
            return None
        out = empty((*ids.shape, spec.dim), dtype)
        rows = out.numpy().reshape(-1, spec.dim)
        return out if top.gather_rows(to_keys(ids), spec.max_ids, rows, is_training) else None

    def gather(
        self,
        batch: Batch,
        index: int,
        lookup: Lookup,
        weights: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        if self._spec.drops_illegal and index == 0:  # once per batch
            self._dropped_counts += batch.dropped_counts
        if out is None:
            shape = lookup.ids.shape if lookup.pooling is None else lookup.shape  # `ids.shape` is faster
            out = empty((*shape, self.layout.dim), dtype)
        mean, scales = lookup.pooling == "mean", None if weights is None else flatten_weights(weights)
        _core.gather(batch, self.layout, index, as_array(out), mean, scales, OUTPUT_DTYPES[dtype])
        return out

    def weights_grad(self, batch: Batch, index: int, lookup: Lookup, grad: Tensor) -> Tensor:
        # the kernel writes no gradients for features that are not looked up, so start from zeros
        allocate = torch.empty if lookup.feature_columns is None else torch.zeros
        out = allocate(lookup.ids.shape, dtype=torch.float32)
        mean, dtype = lookup.pooling == "mean", OUTPUT_DTYPES[grad.dtype]
        _core.compute_weights_grad(batch, self.layout, index, as_array(grad), flatten_weights(out), mean, dtype)
        return out

    def send_hyperparams(self, rule_name: str, hyperparams: Sequence[float], step: int, scale: float = 1.0) -> None:
        self._hyperparams, self._step, self._scale = hyperparams, step, scale

    def update(self, batch: Batch, gradients: Gradients, rule_name: str) -> None:
        arrays, dtype = convert_gradients(gradients), OUTPUT_DTYPES[gradients.dtype]
        hyperparams, step, scale = self._hyperparams, self._step, self._scale
        _core.update(batch, self.layout, *arrays, rule_name, hyperparams, step, dtype, scale, self._written_counts)

    def compute_squared_norms(self, batch: Batch, gradients: Gradients) -> Tensor:
        arrays, dtype = convert_gradients(gradients), OUTPUT_DTYPES[gradients.dtype]
        return torch.from_numpy(_core.compute_squared_norms(batch, self.layout, *arrays, dtype))

    def sum_gradients(
        self, batch: Batch, gradients: Gradients, indices: NDArray[np.int64] | None = None, out: Tensor | None = None
    ) -> Tensor:
        out = empty((batch.num_unique, self.layout.dim), torch.float32) if out is None else out
        arrays, dtype = convert_gradients(gradients), OUTPUT_DTYPES[gradients.dtype]
        _core.sum_gradients(batch, self.layout, *arrays, as_array(out), indices, dtype)
        return out

    def list_unique_rows(self, batch: Batch) -> Lookup:
        tables = torch.from_numpy(batch.tables.astype(np.int64)) if self._spec.num_tables > 1 else None
        return Lookup(torch.from_numpy(batch.keys.astype(np.int64)), tables)

    def set_lookup_rows(
        self, batch: Batch, rows: Tensor, indices: NDArray[np.int64], other_rows: tuple[Batch, int] | None = None
    ) -> None:
        _core.set_lookup_rows(batch, self.layout, as_array(rows), indices, *(other_rows or ()))

    def assign(self, batch: Batch, values: NDArray[np.float32], step: int) -> None:
        _core.assign(batch, self.layout, values, step, self._written_counts)

    def preview_catch_up(self, batch: Batch, rule_name: str) -> None:
        _core.preview_catch_up(batch, self.layout, rule_name, self._hyperparams, self._step)

    def catch_up(self, batch: Batch, rule_name: str) -> None:
        _core.catch_up(self.layout, batch.lines, rule_name, self._hyperparams, self._step)
