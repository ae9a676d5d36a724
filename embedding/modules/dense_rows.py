"""Rows and optimizer states as the dense tensors of `nn.EmbeddingBag`, TorchRec and FBGEMM: row i is that of id i."""

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
from ...engine.options.table_names import choices, table_number
from ...engine.options.table_spec import TableSpec
from ...engine.row_format import EMBEDDING, LAST_STEP, RowArray
from ...engine.table.table import OpenTable
from ...engine.table.table_report import scan_caught_up
from ..optim.eager import follow_in_backward
from ..saving.rows_reference import RowsReference
from ..state_dict.saved_rows import EXTRA, ROWS, extra_state_of
from ..tables.rows_in_tensors import RowTensors
from .keyed_rows import KeyedRows

log = logging.getLogger("tierbed")
CHUNK = 1 << 16  # rows
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def dense_rows(embedding: KeyedRows, number: int, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The rows [rows, dim] of one table; a row that was never written has its initial value."""
    with torch.inference_mode(False):
        weights = torch.empty(rows, embedding.dim, dtype=dtype, device=embedding.device)
    for first in range(0, rows, CHUNK):
        keys = torch.arange(first, min(first + CHUNK, rows)).to(embedding.spec.key_type)
        weights[first : first + CHUNK] = embedding.get(keys, number)
    return weights


def dense_states(embedding: KeyedRows, counts: Mapping[int, int]) -> dict[int, dict[str, Tensor]]:
    """The optimizer's states of each table, by name: [rows, dim] of a state of elements, [rows] of one number a row.

    counts: the rows of each table, by its number. StoreError if ranks share the rows.
    """
    if embedding.world is not None:
        raise StoreError(
            f"optimizer states of embedding {embedding.name!r}: ranks share the rows, and no call gathers their "
            "states; save a snapshot, whose files have them"
        )
    follow_in_backward(embedding)
    table = embedding.table_handle().local_table
    state, of_row = table.state, _of_row(table)
    columns = [() if of_row[name] else (width,) for name, width in zip(state.names, state.widths, strict=True)]
    # without inference mode, since a read-only copy detects writes by the tensor's version
    with torch.inference_mode(False):
        states = {
            number: {
                name: torch.full((rows, *shape), float(value))
                for name, shape, value in zip(state.names, columns, state.initial, strict=True)
            }
            for number, rows in counts.items()
        }
        for _, chunk in scan_caught_up(table) if state.names else ():
            for number, rows in counts.items():
                chosen = (chunk["table"] == number) & (chunk["key"] < rows)
                keys = torch.from_numpy(chunk["key"][chosen].astype("i8"))
                for name, copied in states[number].items():
                    numbers = torch.from_numpy(table.form.numbers(chunk, name)[chosen])
                    copied[keys] = numbers.view(len(keys), *copied.shape[1:])
        device = embedding.device
        return {number: {name: one.to(device) for name, one in own.items()} for number, own in states.items()}


def dense_tensors(
    embedding: KeyedRows,
    weights: Mapping[Any, Tensor],
    states: Mapping[Any, Mapping[str, Any]],
    step: Any,
) -> dict[str, Tensor]:
    """The rows of an embedding after its `load_dense` with these arguments, as `RowTensors.tensors`."""
    follow_in_backward(embedding)
    spec, table = embedding.spec, embedding.table_handle(for_load=True).local_table
    given, given_states = _by_number(spec, "weights", weights), _by_number(spec, "states", states)
    given_states = {number: dict(of_table) for number, of_table in given_states.items()}
    steps = [_step(one.pop(name)) for one in given_states.values() for name in ("step", "iter") if name in one]
    has_states = any(given_states.values())
    if step is None and not steps and has_states:
        _check_step_known(table)
    if step is None and not has_states and len(given) == spec.num_tables:
        step = max(steps, default=0)
    at = max(steps, default=table.step) if step is None else _step(step)
    for number, of_table in given_states.items():
        if number not in given:
            raise InputError(f"states of table {spec.labels[number]}: give its weights as well")
        if of_table or table.state.names:  # others have a step alone
            _check_states(table, number, of_table, len(given[number]))
    for number, rows in given.items():
        _check_rows(spec, number, rows)
    if embedding.world is not None and len(given) < spec.num_tables:
        raise InputError(f"weights of embedding {spec.name!r}: ranks share its rows; give those of all tables at once")
    if not has_states and table.state.names and table.step:
        log.warning(
            "embedding %r: a load of rows drops optimizer state, that of %d steps, which no state of the optimizer "
            "holds; change rows by put(ids, rows), which keeps it, or load a state_dict() of this model, which has it",
            embedding.name,
            table.step,
        )
    with table.lock:
        hyper = table.optimizer.hyper(at) if at and table.optimizer is not None else []
        kept = [] if len(given) == spec.num_tables else _kept(table, given)
        if kept and at != table.step:
            raise InputError(
                f"step={at} of embedding {spec.name!r}: the rows of other tables are kept, and were trained for "
                f"{table.step}; give the weights and states of all tables, or the same step"
            )
        chunks = kept + [rows for number in given for rows in _dense(table, number, given, given_states, at)]
        description = spec.describe(table.state, hyper, at)
        return RowTensors.filled(description, sum(map(len, chunks)), chunks).tensors


def put_in_state(
    embedding: KeyedRows, weights: Mapping[Any, Tensor], state: dict[str, Any], prefix: str, errors: list[str]
) -> None:
    """Let a state that has dense weights of tables have the embedding's rows instead, at `prefix`.

    errors: takes what is wrong with the weights.
    """
    rows: Mapping[str, Tensor] = {}
    try:
        with embedding.raise_on_all_ranks():
            if weights:
                rows = dense_tensors(embedding, weights, {}, None)
    except TierbedError as error:
        errors.append(f"the rows of embedding {embedding.name!r} cannot be loaded: {error}")
        embedding.note_failed()
    state.pop(prefix + EXTRA, None)  # of rows that the state had besides
    state[f"{prefix}{embedding.parameter_name}"] = embedding.shadow
    state |= {f"{prefix}{ROWS}{name}": tensor for name, tensor in rows.items()}
    if not rows:
        state[prefix + EXTRA] = extra_state_of(RowsReference(None))


def _step(given: Any) -> int:
    """A number of steps; torch has it as a tensor of a float. InputError."""
    number = given.item() if isinstance(given, Tensor) and given.numel() == 1 else given
    step = as_int(int(number) if isinstance(number, float) and number.is_integer() else number, 0, LAST_STEP)
    if step is None:
        raise InputError(f"step={given!r}: give a whole number from 0 to {LAST_STEP}")
    return step


def _check_step_known(table: OpenTable) -> None:
    """InputError if states come without the step that the rule counts, and the table has none; else a warning."""
    if table.optimizer is None or not table.optimizer.counts_steps():
        return
    at, rule = table.step + table.optimizer.shift, table.optimizer.rule
    said = f"states of embedding {table.spec.name!r} have no 'step' or 'iter', and {rule} counts steps"
    if not at:
        raise InputError(f"{said}; give step=, how many the rows were trained")
    log.warning("%s: it goes on from %d; give step= for another number", said, at)


def _by_number(spec: TableSpec, argument: str, given: Any) -> dict[int, Any]:
    """What is given for each table, by its number. InputError."""
    if not isinstance(given, Mapping):
        form = "torch.from_numpy of it" if isinstance(given, np.ndarray) else "a dict by table"
        raise InputError(f"{argument} of embedding {spec.name!r}: got {type(given).__name__}; give {form}")
    found: dict[int, Any] = {}
    for name, of_table in given.items():
        number = table_number(name, spec.table_names)
        if number is None:
            raise InputError(
                f"{argument}: table {name!r} of embedding {spec.name!r}; give one of {choices(spec.table_names)}"
            )
        if number in found:
            raise InputError(f"{argument}: table {spec.labels[number]} is given twice; give it by number or by name")
        found[number] = of_table
    return found


def _check_rows(spec: TableSpec, number: int, rows: Any) -> None:
    where, ids = f"weights of table {spec.labels[number]}", spec.tables[number].ids
    if isinstance(rows, Tensor) and type(rows).__module__.startswith("torch.distributed"):
        raise InputError(f"{where}: a {type(rows).__name__}, parts of which are on other ranks; give the whole tensor")
    if not isinstance(rows, Tensor) or rows.dtype not in _FLOATS or rows.dim() != 2 or rows.shape[1] != spec.dim:
        got = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        form = " by torch.from_numpy" if isinstance(rows, np.ndarray) else ""
        raise InputError(f"{where}: got {got}; give torch.float32{form}, or floats of 16 bits, [rows, {spec.dim}]")
    if ids is not None and len(rows) != ids:
        raise InputError(f"{where}: {len(rows)} rows, and the table has {ids}; make it with num_embeddings of them")
    for first in range(0, len(rows), CHUNK):
        keys = torch.arange(first, min(first + CHUNK, len(rows)))
        check_values(spec, keys, _numbers(rows[first : first + CHUNK]), allow_nonfinite=True)
    padding = spec.padding_idx
    if padding is not None and 0 <= padding < len(rows) and rows[padding].any():
        raise InputError(
            f"{where}: row {padding} is that of padding_idx, for which this embedding returns zeros; use "
            "tierbed.Embedding, which keeps and returns such a row, or give zeros there"
        )


def _check_states(table: OpenTable, number: int, states: Mapping[str, Tensor], rows: int) -> None:
    where, names = f"states of table {table.spec.labels[number]}", table.state.names
    if not names:
        raise OptimizerError(
            f"{where}: embedding {table.spec.name!r} has no optimizer with state; give its parameters to that of a "
            "Graph or an EagerOptimizer first"
        )
    widths = dict(zip(names, table.state.widths, strict=True))
    for name, state in states.items():
        if name not in widths:
            raise InputError(f"{where}: {name!r} is none of {table.state.rule}, which has {', '.join(names)}")
        shapes = [(rows, widths[name])] + [(rows,)] * _of_row(table)[name]
        if not isinstance(state, Tensor) or state.shape not in shapes:
            got = list(state.shape) if isinstance(state, Tensor) else type(state).__name__
            raise InputError(f"{where}: {name!r} is {got}; give a tensor {list(shapes[-1])}")
        if not state.is_floating_point() or (state.isfinite() & ~state.float().isfinite()).any():
            raise InputError(f"{where}: {name!r} is {state.dtype}, or beyond float32; give floats that float32 holds")
    if missing := [name for name in names if name not in states]:
        raise InputError(f"{where}: there is no {missing[0]!r}; give all of {', '.join(names)}, or none")


def _of_row(table: OpenTable) -> dict[str, bool]:
    """Whether each state is one number a row. With a dim of 1 widths do not show it."""
    dim, widths = table.spec.dim, table.state.widths
    if table.optimizer is not None:
        dim, widths = 2, table.optimizer.row_state(2).widths
    return {name: width != dim for name, width in zip(table.state.names, widths, strict=True)}


def _kept(table: OpenTable, given: Collection[int]) -> list[RowArray]:
    """The rows of the other tables, as of the last step."""
    chunks = (rows[~np.isin(rows["table"], list(given))] for _, rows in scan_caught_up(table))
    kept = [rows for rows in chunks if len(rows)]  # copies
    for rows in kept if table.catch_up_rule else ():
        rows["step"] = table.step
    return kept


def _dense(
    table: OpenTable, number: int, weights: Mapping[int, Tensor], states: Mapping[int, Mapping[str, Tensor]], step: int
) -> Iterator[RowArray]:
    spec, form, count = table.spec, table.form, len(weights[number])
    initial = dict(zip(table.state.names, table.state.initial, strict=True))
    for first in range(0, count, CHUNK):
        part = slice(first, min(first + CHUNK, count))
        rows = np.zeros(part.stop - first, form.dtype)
        rows["table"], rows["key"] = number, np.arange(first, part.stop)
        rows["updates"], rows["step"] = 1, step
        form.set_numbers(rows, EMBEDDING, _numbers(weights[number][part]))
        for name, value in initial.items():
            given = states.get(number, {}).get(name)
            numbers = np.float32(value) if given is None else _numbers(given[part]).reshape(len(rows), -1)
            form.set_numbers(rows, name, np.broadcast_to(numbers, (len(rows), form.counts[name])))
        yield rows if spec.padding_key is None else rows[rows["key"] != np.uint64(spec.padding_key)]


def _numbers(tensor: Tensor) -> Any:
    return tensor.detach().to("cpu", torch.float32).numpy()
