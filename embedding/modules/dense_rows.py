"""Rows and optimizer states as dense tensors whose row i belongs to id i, as in torch, TorchRec and FBGEMM."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...engine.checks import as_int
from ...engine.errors import InputError, OptimizerError, StoreError, TierbedError
from ...engine.options.lookup import check_values
from ...engine.options.table_names import find_table, format_choices
from ...engine.options.table_spec import TableSpec
from ...engine.row_format import EMBEDDING, MAX_STEP, RowArray
from ...engine.table.table import OpenTable
from ...engine.table.table_report import scan_with_catch_up
from ..optim.eager import follow_in_backward
from ..saving.rows_reference import RowsReference
from ..state_dict.saved_rows import EXTRA_STATE_KEY, ROWS_PREFIX, make_extra_state
from ..tables.row_tensors import RowTensors
from .keyed_rows import KeyedRows

log = logging.getLogger("tierbed")
CHUNK_ROWS = 1 << 16  # rows per chunk
_FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def copy_rows(embedding: KeyedRows, table_id: int, num_rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a table's first rows, [num_rows, dim]. Unwritten rows have their initial values."""
    with torch.inference_mode(False):
        weights = torch.empty(num_rows, embedding.dim, dtype=dtype, device=embedding.device)
    for first in range(0, num_rows, CHUNK_ROWS):
        keys = torch.arange(first, min(first + CHUNK_ROWS, num_rows)).to(embedding.spec.key_type)
        weights[first : first + CHUNK_ROWS] = embedding.get(keys, table_id)
    return weights


def copy_states(embedding: KeyedRows, counts: Mapping[int, int]) -> dict[int, dict[str, Tensor]]:
    """Return the optimizer states by table and name: [rows, dim], or [rows] for a state with one number per row.

    counts: the number of rows to return for each table. Raises StoreError if ranks share the rows.
    """
    if embedding.world is not None:
        raise StoreError(
            f"optimizer states of embedding {embedding.name!r}: ranks share the rows, and their states cannot be "
            "gathered; save a snapshot, whose files contain the states"
        )
    follow_in_backward(embedding)
    table = embedding.table_handle().open_table
    state, is_scalar = table.state, _find_scalar_states(table)
    columns = [() if is_scalar[name] else (width,) for name, width in zip(state.names, state.widths, strict=True)]
    # inference tensors lack version counters, but a read-only copy needs version counters to detect writes
    with torch.inference_mode(False):
        states = {
            table_id: {
                name: torch.full((rows, *shape), float(value))
                for name, shape, value in zip(state.names, columns, state.initial_values, strict=True)
            }
            for table_id, rows in counts.items()
        }
        for _, chunk in scan_with_catch_up(table) if state.names else ():
            for table_id, rows in counts.items():
                is_requested = (chunk["table"] == table_id) & (chunk["key"] < rows)
                keys = torch.from_numpy(chunk["key"][is_requested].astype("i8"))
                for name, tensor in states[table_id].items():
                    numbers = torch.from_numpy(table.row_format.values(chunk, name)[is_requested])
                    tensor[keys] = numbers.view(len(keys), *tensor.shape[1:])
        device = embedding.device
        return {t: {name: tensor.to(device) for name, tensor in state.items()} for t, state in states.items()}


def convert_dense(
    embedding: KeyedRows, weights: Mapping[Any, Tensor], states: Mapping[Any, Mapping[str, Any]], step: Any
) -> dict[str, Tensor]:
    """Return the rows that `load_dense` would store for these arguments, in the format of `RowTensors.tensors`."""
    follow_in_backward(embedding)
    spec, table = embedding.spec, embedding.table_handle(for_load=True).open_table
    weights = _key_by_table(spec, "weights", weights)
    all_states = {table_id: dict(own) for table_id, own in _key_by_table(spec, "states", states).items()}
    steps = [_read_step(state.pop(name)) for state in all_states.values() for name in ("step", "iter") if name in state]
    has_states = any(all_states.values())
    if step is None and not steps and has_states:
        _check_step_known(table)
    if step is None and not has_states and len(weights) == spec.num_tables:
        step = max(steps, default=0)
    new_step = max(steps, default=table.step) if step is None else _read_step(step)
    for table_id, own in all_states.items():
        if table_id not in weights:
            raise InputError(f"states of table {spec.labels[table_id]} are given without its weights; give both")
        if own or table.state.names:  # if both are empty, `states` only gives a step
            _check_states(table, table_id, own, len(weights[table_id]))
    for table_id, rows in weights.items():
        _check_rows(spec, table_id, rows)
    if embedding.world is not None and len(weights) < spec.num_tables:
        raise InputError(f"weights of embedding {spec.name!r}: ranks share its rows; give the weights of all tables")
    if not has_states and table.state.names and table.step:
        log.warning(
            "embedding %r: loading rows drops the optimizer state of %d steps, and optimizer.state_dict() does not "
            "contain this state. To keep it, change rows by put(ids, rows), or load a state_dict() of this model",
            embedding.name,
            table.step,
        )
    with table.lock:
        hyperparams = table.optimizer.compute_hyperparams(new_step) if new_step and table.optimizer is not None else []
        retained = [] if len(weights) == spec.num_tables else _copy_other_tables(table, weights)
        if retained and new_step != table.step:
            raise InputError(
                f"step={new_step} of embedding {spec.name!r}: the rows of the other tables are kept, and were "
                f"trained for {table.step} steps; give step={table.step}, or the weights and states of all tables"
            )
        replaced = [rows for table_id in weights for rows in _make_rows(table, table_id, weights, all_states, new_step)]
        chunks = retained + replaced
        description = spec.describe(table.state, hyperparams, new_step)
        return RowTensors.from_chunks(description, sum(map(len, chunks)), chunks).tensors


def add_rows_to_state(
    embedding: KeyedRows, weights: Mapping[Any, Tensor], state: dict[str, Any], prefix: str, errors: list[str]
) -> None:
    """Convert dense weights to rows, and add the rows to a state_dict under `prefix`. Appends problems to `errors`."""
    rows: Mapping[str, Tensor] = {}
    try:
        with embedding.raise_on_all_ranks():
            if weights:
                rows = convert_dense(embedding, weights, {}, None)
    except TierbedError as error:
        errors.append(f"the rows of embedding {embedding.name!r} cannot be loaded: {error}")
        embedding.mark_load_failed()
    state.pop(prefix + EXTRA_STATE_KEY, None)  # the extra state does not describe these weights
    state[f"{prefix}{embedding.parameter_name}"] = embedding.shadow
    state |= {f"{prefix}{ROWS_PREFIX}{name}": tensor for name, tensor in rows.items()}
    if not rows:
        state[prefix + EXTRA_STATE_KEY] = make_extra_state(RowsReference(None))


def _read_step(value: Any) -> int:
    """Return a step count as an int; torch stores step counts as float tensors. Raises InputError."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    step = as_int(int(number) if isinstance(number, float) and number.is_integer() else number, 0, MAX_STEP)
    if step is None:
        raise InputError(f"step={value!r}: give a whole number from 0 to {MAX_STEP}")
    return step


def _check_step_known(table: OpenTable) -> None:
    """Warn that states without a step get the table's own step. Raises InputError if the table's own step is 0."""
    if table.optimizer is None or not table.optimizer.depends_on_step():
        return
    step, rule = table.step + table.optimizer.step_shift, table.optimizer.rule
    problem = f"states of embedding {table.spec.name!r} have no 'step' or 'iter', and {rule} counts steps"
    if not step:
        raise InputError(f"{problem}; give step=, the number of steps the rows were trained")
    log.warning("%s: counting continues from step %d; give step= to continue from another step", problem, step)


def _key_by_table(spec: TableSpec, argument: str, values: Any) -> dict[int, Any]:
    """Return `values`, a dict by table number or table name, as a dict by table number. Raises InputError."""
    if not isinstance(values, Mapping):
        form = "torch.from_numpy(array)" if isinstance(values, np.ndarray) else "a dict by table"
        raise InputError(f"{argument} of embedding {spec.name!r}: got {type(values).__name__}; give {form}")
    by_table: dict[int, Any] = {}
    for name, value in values.items():
        table_id = find_table(name, spec.table_names)
        if table_id is None:
            choices = format_choices(spec.table_names)
            raise InputError(f"{argument}: embedding {spec.name!r} has no table {name!r}; give one of {choices}")
        if table_id in by_table:
            raise InputError(f"{argument}: table {spec.labels[table_id]} is given twice; give it by number or by name")
        by_table[table_id] = value
    return by_table


def _check_rows(spec: TableSpec, table_id: int, rows: Any) -> None:
    where, num_ids = f"weights of table {spec.labels[table_id]}", spec.tables[table_id].ids
    if isinstance(rows, Tensor) and type(rows).__module__.startswith("torch.distributed"):
        raise InputError(f"{where}: a {type(rows).__name__} has parts on other ranks; give the whole tensor")
    if not isinstance(rows, Tensor) or rows.dtype not in _FLOAT_DTYPES or rows.dim() != 2 or rows.shape[1] != spec.dim:
        actual = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        form = "torch.from_numpy(array), " if isinstance(rows, np.ndarray) else ""
        raise InputError(f"{where}: got {actual}; give {form}a float32, float16 or bfloat16 tensor [rows, {spec.dim}]")
    if num_ids is not None and (size := len(rows)) != num_ids:
        raise InputError(f"{where}: {size} rows; give {num_ids}, or make the table with num_embeddings={size}")
    for first in range(0, len(rows), CHUNK_ROWS):
        keys = torch.arange(first, min(first + CHUNK_ROWS, len(rows)))
        check_values(spec, keys, _to_numpy(rows[first : first + CHUNK_ROWS]), allow_nonfinite=True)
    padding = spec.padding_idx
    if padding is not None and 0 <= padding < len(rows) and rows[padding].any():
        raise InputError(
            f"{where}: row {padding} belongs to padding_idx, but this embedding returns zeros for padding_idx; give "
            "zeros in that row, or use tierbed.Embedding, which keeps and returns the row"
        )


def _check_states(table: OpenTable, table_id: int, states: Mapping[str, Tensor], num_rows: int) -> None:
    where, names = f"states of table {table.spec.labels[table_id]}", table.state.names
    if not names:
        raise OptimizerError(
            f"{where}: embedding {table.spec.name!r} has no optimizer with state; first give its parameters to the "
            "optimizer of a Graph or an EagerOptimizer"
        )
    widths = dict(zip(names, table.state.widths, strict=True))
    for name, state in states.items():
        if name not in widths:
            raise InputError(f"{where}: {name!r} is no state of {table.state.rule}, which has {', '.join(names)}")
        shapes = [(num_rows, widths[name])] + [(num_rows,)] * _find_scalar_states(table)[name]
        if not isinstance(state, Tensor) or state.shape not in shapes:
            actual = list(state.shape) if isinstance(state, Tensor) else type(state).__name__
            raise InputError(f"{where}: {name!r} is {actual}; give a tensor {list(shapes[-1])}")
        if not state.is_floating_point() or (state.isfinite() & ~state.float().isfinite()).any():
            raise InputError(f"{where}: {name!r} is {state.dtype}; give floats within float32's range")
    if missing := [name for name in names if name not in states]:
        raise InputError(f"{where}: there is no {missing[0]!r}; give all of {', '.join(names)}, or none")


def _find_scalar_states(table: OpenTable) -> dict[str, bool]:
    """Map the name of each optimizer state to True if the state is one number per row."""
    dim, widths = table.spec.dim, table.state.widths
    if table.optimizer is not None:
        dim, widths = 2, table.optimizer.make_row_state(2).widths  # with dim 1, all states have width 1
    return {name: width != dim for name, width in zip(table.state.names, widths, strict=True)}


def _copy_other_tables(table: OpenTable, replaced: Collection[int]) -> list[RowArray]:
    """Return copies of the other tables' rows, after applying the optimizer steps that the rows missed."""
    chunks = (rows[~np.isin(rows["table"], list(replaced))] for _, rows in scan_with_catch_up(table))
    retained = [rows for rows in chunks if len(rows)]
    for rows in retained if table.catch_up_rule else ():
        rows["step"] = table.step
    return retained


def _make_rows(
    table: OpenTable, table_id: int, weights: Mapping[int, Tensor], states: Mapping[int, dict[str, Tensor]], step: int
) -> Iterator[RowArray]:
    """Yield the rows of one table from its dense weights and states."""
    spec, row_format, count = table.spec, table.row_format, len(weights[table_id])
    initial = dict(zip(table.state.names, table.state.initial_values, strict=True))
    for first in range(0, count, CHUNK_ROWS):
        part = slice(first, min(first + CHUNK_ROWS, count))
        rows = np.zeros(part.stop - first, row_format.dtype)
        rows["table"], rows["key"] = table_id, np.arange(first, part.stop)
        rows["updates"], rows["step"] = 1, step
        row_format.set_values(rows, EMBEDDING, _to_numpy(weights[table_id][part]))
        for name, value in initial.items():
            state = states.get(table_id, {}).get(name)
            numbers = np.float32(value) if state is None else _to_numpy(state[part]).reshape(len(rows), -1)
            row_format.set_values(rows, name, np.broadcast_to(numbers, (len(rows), row_format.counts[name])))
        yield rows if spec.padding_key is None else rows[rows["key"] != np.uint64(spec.padding_key)]


def _to_numpy(tensor: Tensor) -> Any:
    return tensor.detach().to("cpu", torch.float32).numpy()
