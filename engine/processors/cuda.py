"""The `Processor` (engine/processors/processor.py) for tables on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import _core
from ..cache.cache_tier import MB, make_budget_error
from ..cache.cuda.cache import CacheSets
from ..cache.cuda.cache_tier import CudaCacheTier
from ..cache.cuda.table_cache import CudaTableCache
from ..errors import OptionError
from ..host_memory import FreeMemory
from ..ops.batch import Gradients
from ..ops.cuda import step as kernels
from ..ops.cuda.batch import CHANGED, Batch, Faults, LegalIds, LookupTensors
from ..ops.cuda.device import Device
from ..ops.cuda.layout import Layout
from ..optim.row_state import RowState
from ..options.lookup import Lookup
from ..options.store_options import CachedHostMemOptions, StoreOptions, as_mb
from ..options.table_spec import TableSpec
from ..store.cuda.full_tier import CudaFullTier
from ..store.interfaces import Tier
from ..store.table_counts import Counts
from .processor import DeferredError, ProcessorFactory


def make_cuda_factory(device: Device, options: StoreOptions) -> ProcessorFactory:
    """Returns the factory that makes processors for a GPU. Raises OptionError for options that GPUs do not support."""
    for name, default in (("eviction", "none"), ("admission", None), ("ttl_steps", None)):
        value = getattr(options, name)
        if value != default:
            raise OptionError(
                f"{name}={value!r}: tables on a GPU keep every row until it is deleted; leave {name} out, or keep the "
                "embedding on the CPU"
            )
    return lambda spec, state, capacity: CudaProcessor(device, spec, state, capacity)


class CudaProcessor:
    """The `Processor` for a GPU. A call returns before the device has done the work."""

    defers_errors = True  # errors for illegal ids, table ids and offsets, and for rows beyond a fixed capacity

    def __init__(self, device: Device, spec: TableSpec, state: RowState, capacity: int | None) -> None:
        self.device = device.torch_device
        self.layout = spec.make_layout(state)
        self._spec, self._capacity, self._device = spec, capacity, device
        self.capturer = device
        self.enter_side_stream, self.wait = device.enter_side_stream, device.wait
        self.record_event, self.wait_event = device.record_event, device.wait_event
        self._device_layout = Layout(device, spec.make_initial_values(state))
        self._faults = Faults(device, spec.name, spec.num_tables, capacity)
        self._written_counts = torch.zeros(spec.num_tables, dtype=torch.int64, device=self.device)
        self._dropped_counts = torch.zeros_like(self._written_counts)
        self._legal_ids = _make_legal_ids(spec, self.device)
        self._num_updates = torch.zeros(1, dtype=torch.int64, device=self.device)  # number of updates applied
        self._step_params = kernels.allocate_step_params(self.device)

    @property
    def written_counts(self) -> Counts:
        return np.asarray(self._written_counts.cpu())

    @property
    def dropped_counts(self) -> Counts:
        return np.asarray(self._dropped_counts.cpu())

    def take_deferred_error(self, wait: bool) -> DeferredError | None:
        error = self._faults.take_error(self._faults.read(wait))
        return None if error is None else DeferredError(error, int(self._num_updates))

    def read_free_memory(self) -> FreeMemory:
        return FreeMemory(self._device.read_free_memory(), f"on {self.device}")

    def make_full_table(self, tier: str) -> CudaFullTier:
        try:
            return CudaFullTier(self._device_layout, self.layout, self._capacity, self._faults, tier)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise OptionError(
                f"capacity={self._capacity}: a row takes {self._device_layout.line_bytes} bytes, so "
                f"{self.device if tier == 'device' else 'the host'} has too little memory ({error}). Give a smaller "
                "capacity, or None for a table that grows"
            ) from None

    def make_cache(self, lower_tier: Tier, options: CachedHostMemOptions) -> CudaCacheTier:
        return CudaCacheTier(self._device_layout, lower_tier, self._allocate_sets(options), self._faults)

    def make_table_cache(self, options: CachedHostMemOptions) -> tuple[CudaTableCache, CudaFullTier]:
        host = self.make_full_table("host")
        return CudaTableCache(self._device_layout, host, self._allocate_sets(options), self._faults), host

    def make_batch(self, lookups: Sequence[Lookup], sibling: Batch | None = None, is_future: bool = False) -> Batch:
        """See `Processor.make_batch`. If `is_future`, also groups the positions of ids by row, so the step need not."""
        _core.set_num_threads(torch.get_num_threads())  # used by host tiers below a cache
        if sibling is not None:
            return sibling.make_sibling(self._faults.word)
        arrays = [_make_lookup_tensors(lookup) for lookup in lookups]
        faults = torch.zeros_like(self._faults.word) if is_future else self._faults.word
        batch = Batch(self._device, arrays, self._legal_ids, faults)
        if is_future:
            for tensor in (tensor for lookup in lookups for tensor in lookup.tensors):
                if tensor is not None:
                    self._device.record_stream(tensor)
            _ = batch.occurrences  # computed now rather than in the step
        return batch

    def adopt(self, batch: Batch, announced_lookups: Sequence[Lookup], lookups: Sequence[Lookup]) -> None:
        batch.record_stream()  # a fetch that still runs may use the tensor `batch.faults`
        differences = [
            (old != new).any()
            for lookup_pair in zip(announced_lookups, lookups, strict=True)
            for old, new in zip(lookup_pair[0].tensors, lookup_pair[1].tensors, strict=True)
            if old is not None and new is not None
        ]
        batch.input_faults |= torch.stack(differences).any().to(torch.int32) * CHANGED

    def count_written(self, batch: Batch) -> Counts:
        return np.asarray(kernels.count_written(self._device_layout, batch, batch.lines).cpu())

    def gather_rows(self, top: object, lookup: Lookup, dtype: torch.dtype, is_training: bool) -> Tensor | None:
        return None

    def gather(
        self,
        batch: Batch,
        index: int,
        lookup: Lookup,
        weights: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        if batch.dropped_counts is not None and index == 0:  # once per batch
            self._dropped_counts += batch.dropped_counts
        if out is None:
            out = torch.empty((*lookup.shape, self._device_layout.dim), dtype=dtype, device=self.device)
        kernels.gather(batch, self._device_layout, index, out, lookup.pooling == "mean", _make_contiguous(weights))
        return out

    def weights_grad(self, batch: Batch, index: int, lookup: Lookup, grad: Tensor) -> Tensor:
        # the kernel writes no gradients for features that are not looked up, so start from zeros
        allocate = torch.empty if lookup.feature_columns is None else torch.zeros
        out = allocate(lookup.ids.shape, dtype=torch.float32, device=self.device)
        kernels.weights_grad(batch, self._device_layout, index, grad.contiguous(), out, lookup.pooling == "mean")
        return out

    def send_hyperparams(self, rule_name: str, hyperparams: Sequence[float], step: int, scale: float = 1.0) -> None:
        kernels.write_step_params(self._device_layout, rule_name, hyperparams, step, scale, self._step_params)

    def update(self, batch: Batch, gradients: Gradients, rule_name: str) -> None:
        tensors, layout = self._prepare_gradients(gradients), self._device_layout
        kernels.update(layout, rule_name, batch, tensors, self._step_params, self._written_counts, self._faults.word)
        self._num_updates += self._faults.word == 0

    def compute_squared_norms(self, batch: Batch, gradients: Gradients) -> Tensor:
        return kernels.compute_squared_norms(self._device_layout, batch, self._prepare_gradients(gradients))

    def sum_gradients(
        self, batch: Batch, gradients: Gradients, indices: NDArray[np.int64] | None = None, out: Tensor | None = None
    ) -> Tensor:
        if out is None:
            out = torch.empty((batch.num_unique, self._device_layout.dim), dtype=torch.float32, device=self.device)
        device_indices = None if indices is None else torch.from_numpy(indices).to(self.device)
        kernels.sum_gradients(self._device_layout, batch, self._prepare_gradients(gradients), device_indices, out)
        return out

    def list_unique_rows(self, batch: Batch) -> Lookup:
        keys = batch.keys
        tables = batch.tables[: len(keys)].to(torch.int64) if self._spec.num_tables > 1 else None
        return Lookup(keys, tables)

    def set_lookup_rows(
        self, batch: Batch, rows: Tensor, indices: NDArray[np.int64], other_rows: tuple[Batch, int] | None = None
    ) -> None:
        device_indices = torch.from_numpy(indices).to(self.device)
        lines = batch.keep_alive(rows.contiguous()) + 4 * self._device_layout.dim * device_indices
        if other_rows is not None:
            other, start = other_rows
            is_in_other = device_indices >= len(rows)
            other_positions = start + device_indices[is_in_other] - len(rows)
            lines[is_in_other] = kernels.decode_lines(other, self._device_layout, other_positions, batch)
        batch.has_float32_lines = self._device_layout.has_16bit_floats
        batch.lines[: len(indices)] = lines

    def _prepare_gradients(self, gradients: Gradients) -> tuple[list[Tensor], list[bool], list[Tensor | None]]:
        """Returns three lists with an item for each lookup: its gradient, True if it pools by mean, and its weights."""
        rows = [grad.detach().reshape(-1, self._device_layout.dim).contiguous() for grad in gradients.grads]
        means = [lookup.pooling == "mean" for lookup in gradients.lookups]
        return rows, means, [_make_contiguous(weights) for weights in gradients.weights]

    def assign(self, batch: Batch, values: NDArray[np.float32], step: int) -> None:
        device_values = torch.from_numpy(values).to(self.device)
        kernels.assign(batch, self._device_layout, device_values, step, self._written_counts, self._faults.word)

    def preview_catch_up(self, batch: Batch, rule_name: str) -> None:
        kernels.preview_catch_up(self._device_layout, rule_name, batch, self._step_params)

    def catch_up(self, batch: Batch, rule_name: str) -> None:
        kernels.catch_up(self._device_layout, rule_name, batch, self._step_params)

    def _allocate_sets(self, options: CachedHostMemOptions) -> CacheSets:
        budget_mb = as_mb(options.cache_budget_mb)
        try:
            return CacheSets(self._device_layout, int(budget_mb * MB), options.cache_policy)
        except (ValueError, torch.OutOfMemoryError) as error:
            raise make_budget_error("cache_budget_mb", budget_mb, self._device_layout.line_bytes, error) from None


def _make_lookup_tensors(lookup: Lookup) -> LookupTensors:
    """Convert a lookup to the arrays from which a batch is made. All values stay on the device."""
    ids = lookup.ids.detach().reshape(-1).contiguous()
    keys = ids.view(torch.int64) if ids.dtype == torch.uint64 else ids.to(torch.int64)
    tables, offsets = (
        None if part is None else part.detach().reshape(-1).to(torch.int64).contiguous()
        for part in (lookup.table_ids, lookup.offsets)
    )
    bags: int | Tensor | None = offsets
    if offsets is None and lookup.pooling is not None:  # without ids in the bags, only offsets tell the number of bags
        bags = lookup.ids.shape[-1] or keys.new_zeros(lookup.ids.shape[:-1].numel() + 1)
    return LookupTensors(keys, tables, bags, lookup.feature_columns)


def _make_legal_ids(spec: TableSpec, device: torch.device) -> LegalIds:
    if spec.max_ids is None:
        return LegalIds(spec.num_tables, spec.padding_key)
    last = torch.from_numpy(spec.max_ids.view(np.int64)).to(device)
    drops_illegal = torch.tensor(spec.drops_illegal, dtype=torch.bool).to(device) if spec.drops_illegal else None
    return LegalIds(spec.num_tables, spec.padding_key, last, drops_illegal)


def _make_contiguous(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.detach().contiguous()
