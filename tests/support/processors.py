"""The processor of a table as a parameter of tests: the native core, and a GPU, emulated or real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from support.cuda_tables import EMULATED, GPU
from support.rows import INITIALIZERS
from tierbed.engine import _core
from tierbed.engine.ops.cuda.device import Device
from tierbed.engine.optim.row_state import RowState
from tierbed.engine.options.initializers import make_table_options
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.options.table_spec import TableSpec, make_table_spec
from tierbed.engine.processors.cpu import CpuProcessor
from tierbed.engine.processors.cuda import CudaProcessor

Make = Callable[[TableSpec, RowState], Any]  # a processor
CPU = torch.device("cpu")


def cpu(spec: TableSpec, state: RowState) -> CpuProcessor:
    return CpuProcessor(spec, state, None)


def _on(device: Callable[[], Device], spec: TableSpec, state: RowState) -> CudaProcessor:
    return CudaProcessor(device(), spec, state, None)


def _made(param: Any) -> Any:
    return pytest.param(partial(_on, param.values[0]), id=param.id, marks=param.marks)


ON_GPU = [_made(param) for param in GPU]
ON_EMULATED = [*map(_made, EMULATED)]
PROCESSORS = [pytest.param(cpu, id="cpu"), *ON_EMULATED[1:2], *ON_GPU]
processors = pytest.mark.parametrize("make", PROCESSORS)


@contextmanager
def instruction_set(name: str | None) -> Iterator[None]:
    """The native loops use it, until this ends."""
    if name is not None:
        _core.use_instruction_set(name)
    try:
        yield
    finally:
        _core.use_instruction_set(_core.list_instruction_sets()[0])


def instruction_sets(make: Make) -> list[str | None]:
    """Those on which a processor runs: of a GPU, its own."""
    return list(_core.list_instruction_sets()) if make is cpu else [None]


def spec_of(
    columns: int | list[int],
    types: tuple[str, str] = ("float32", "float32"),
    tables: int = len(INITIALIZERS),
    padding: int | None = None,
    last: list[int] | None = None,
) -> TableSpec:
    """The spec of a `rows.Table`. last: the last id of each table, if ids have numbers."""
    groups = range(len(columns) if isinstance(columns, list) else 1)
    limits = [None] * tables if last is None else [one + 1 for one in last]
    made = [
        make_table_options([INITIALIZERS[(at + group) % len(INITIALIZERS)] for group in groups], ids=limit)
        for at, limit in enumerate(limits)
    ]
    return make_table_spec("t", columns, torch.int64, made, padding, 7, *(getattr(torch, one) for one in types))


def moved(lookup: Lookup, device: torch.device) -> Lookup:
    parts = [None if part is None else part.to(device) for part in lookup.tensors]
    return Lookup(*parts, lookup.pooling, lookup.feature_columns)  # type: ignore[arg-type]


def names_of(processor: Any, batch: Any) -> list[tuple[int, int]]:
    """(table, key) of each row, keys without sign."""
    unique = processor.list_unique_rows(batch)
    tables = torch.zeros_like(unique.ids) if unique.table_ids is None else unique.table_ids
    keys = unique.ids.cpu().numpy().view(np.uint64).tolist()
    return list(zip(tables.tolist(), keys, strict=True))


def on_host(values: NDArray[Any] | Tensor) -> NDArray[Any]:
    return values.cpu().numpy() if isinstance(values, Tensor) else values
