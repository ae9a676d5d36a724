"""Checks lookup arguments. The checks read only shapes and dtypes, so they also work while a step is traced."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..checks import as_int
from ..errors import InputError, OptionError
from ..row_format import find_overflows
from .table_names import find_table, format_choices
from .table_spec import DTYPES, KEY_TYPES, TableSpec

DEVICES = ("cpu", "cuda")  # device types that tables can be on
_INT_DTYPES = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32)
OUTPUT_DTYPES = DTYPES


class Lookup(NamedTuple):
    """The checked arguments of a lookup. A bag is a list of ids whose rows are pooled into one row."""

    ids: Tensor  # shape: [...] without pooling, [..., L] for bags of L ids, [n] if `offsets` define the bags
    # One table number for each id (with pooling, for each bag). With `feature_columns`, one for each result column.
    # None if the last dimension of `shape` indexes the tables.
    table_ids: Tensor | None = None
    offsets: Tensor | None = None  # [bags + 1]: where each bag starts, then where the last bag ends
    pooling: str | None = None  # "sum" or "mean"
    # For each feature, its column in the result, or -1 if the feature is not looked up. If `feature_columns` is set,
    # `offsets` has the shape [features * batch + 1].
    feature_columns: tuple[int, ...] | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self[:3]

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's shape without its last dimension."""
        if self.offsets is not None:
            bags, columns = self.offsets.shape[0] - 1, self.feature_columns
            return (bags,) if columns is None else (bags // len(columns), len(columns) - columns.count(-1))
        return tuple(self.ids.shape if self.pooling is None else self.ids.shape[:-1])


def check_lookup(
    spec: TableSpec,
    ids: Any,
    table_ids: Any = None,
    offsets: Any = None,
    pooling: Any = None,
    features: Any = None,
    num_features: Any = None,
) -> Lookup:
    """Check a lookup's arguments and return them as a `Lookup`. All tensors must be on one device. Raises InputError.

    Ids are converted to the key type if the key type can hold their integer dtype. Table ids may be a tensor, an array,
    or nested lists (possibly of table names). The returned tensor of table ids has one element for each id or bag. If
    `features` is given, the tensor has one element for each of these features.
    """
    if (
        type(ids) is Tensor
        and table_ids is offsets is pooling is features is num_features is None
        and spec.num_tables == 1
        and ids.dtype == spec.key_type
        and ids.layout == torch.strided
        and not ids.is_nested
        and ids.device.type in DEVICES
    ):
        return Lookup(ids)  # a fast path with the same result as the code below
    if not isinstance(ids, Tensor):
        remedy = f"give a torch.Tensor of {spec.key_type}, such as torch.tensor(ids, dtype={spec.key_type})"
        raise _error(spec, "ids", f"got {type(ids).__name__}; {remedy}")
    _check_tensor(spec, "ids", ids, ids)
    if ids.dtype != spec.key_type:
        key_range, id_range = torch.iinfo(spec.key_type), torch.iinfo(ids.dtype) if ids.dtype in _INT_DTYPES else None
        if id_range is None or id_range.min < key_range.min or id_range.max > key_range.max:
            remedy = _suggest_conversion(ids, spec)
            raise _error(spec, "ids", f"dtype {ids.dtype}, but key_type is {spec.key_type}; {remedy}")
        ids = ids.to(spec.key_type)
    _check_bags(spec, ids, offsets, pooling)
    lookup = Lookup(ids, None, offsets, pooling, _find_columns(spec, offsets, features, num_features))
    has_all_tables = features is not None and isinstance(table_ids, list) and lookup.shape[-1] == spec.num_tables
    if has_all_tables and set(map(type, table_ids)) == {int} and table_ids == [*range(spec.num_tables)]:
        return lookup  # features in table order need no table ids
    table_ids = _convert_table_ids(spec, table_ids, ids.device)
    if table_ids is None:
        _check_tables_in_order(spec, lookup)
        return lookup
    _check_tensor(spec, "table_ids", table_ids, ids)
    if table_ids.dtype.is_floating_point or table_ids.dtype.is_complex or table_ids.dtype == torch.bool:
        raise _error(spec, "table_ids", f"got {table_ids.dtype}; give a torch.Tensor of an integer dtype")
    shape = f"shape {tuple(table_ids.shape)}"
    expected = lookup.shape if lookup.feature_columns is None else lookup.shape[-1:]
    if spec.num_tables == 1 and pooling is None and table_ids.dim() == 1 and table_ids.shape != ids.shape:
        remedy = "give offsets= by name, with pooling='sum' or 'mean', or make a tierbed.EmbeddingBag"
        problem = f"{shape} with ids {tuple(ids.shape)}, and there is one table; for bags, {remedy}"
        raise _error(spec, "table_ids", problem)
    try:
        return lookup._replace(table_ids=table_ids.broadcast_to(expected))
    except RuntimeError:
        items, each = ("ids", "id, or for each column") if pooling is None else ("the bags", "bag")
        if lookup.feature_columns is not None:
            items, each = "the features", "feature"
        problem = f"{shape} does not broadcast to the shape of {items}, {expected}; give one table id for each {each}"
        raise _error(spec, "table_ids", problem) from None


def _find_columns(spec: TableSpec, offsets: Tensor | None, features: Any, num_features: Any) -> tuple[int, ...] | None:
    """Return `Lookup.feature_columns`. `features` lists the feature of each result column. Raises InputError."""
    if features is None:
        if num_features is not None:
            remedy = "give features, the numbers of the features to look up, or leave num_features out"
            raise _error(spec, "num_features", f"got {num_features!r} without features; {remedy}")
        return None
    if offsets is None:
        remedy = "a feature is a range of offsets, and there are no offsets; give offsets, feature by feature"
        raise _error(spec, "features", remedy)
    if not isinstance(features, (list, tuple)) or not features:
        remedy = "give a list of whole numbers, one for each column of the result"
        raise _error(spec, "features", f"got {features!r}; {remedy}")
    total = len(features) if num_features is None else as_int(num_features, minimum=1)
    if total is None:
        raise _error(spec, "num_features", f"got {num_features!r}; give the number of features in offsets")
    columns = dict[int, int]()
    for column, feature in enumerate(features):
        number = as_int(feature, 0, total - 1)
        if number is None or columns.setdefault(number, column) != column:
            remedy = f"give numbers from 0 to {total - 1}, each once, and num_features if offsets hold more features"
            raise _error(spec, "features", f"{feature!r} at position {column}; {remedy}")
    if (offsets.shape[0] - 1) % total:
        problem = f"shape {tuple(offsets.shape)} is not (features * batch + 1,) for {total} features"
        remedy = "give num_features if offsets hold more features than are looked up"
        raise _error(spec, "offsets", f"{problem}; {remedy}")
    return tuple(columns.get(feature, -1) for feature in range(total))


def _check_bags(spec: TableSpec, ids: Tensor, offsets: Any, pooling: Any) -> None:
    if pooling is not None and not (isinstance(pooling, str) and pooling in ("sum", "mean")):
        raise _error(spec, "pooling", f"got {pooling!r}; give 'sum' or 'mean', or None for one row per id")
    if offsets is None:
        if pooling is not None and ids.dim() == 0:
            problem = f"pooling={pooling!r} pools over the last dimension, and a scalar has none"
            raise _error(spec, "ids", f"{problem}; give ids of shape (..., L), or 1-D ids with offsets")
        return
    if pooling is None:
        raise _error(spec, "offsets", "offsets define bags to pool, but pooling=None; give pooling='sum' or 'mean'")
    _check_tensor(spec, "offsets", offsets, ids)
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64) or offsets.dim() != 1:
        raise _error(spec, "offsets", f"got {_describe(offsets)}; give a 1-D torch.Tensor of int64 or int32")
    if offsets.shape[0] == 0:
        raise _error(spec, "offsets", "shape (0,); give bags + 1 offsets, so [0] for no bags")
    if ids.dim() != 1:
        remedy = "give the ids of all bags in one dimension, ids.flatten(), or leave offsets out"
        raise _error(spec, "ids", f"shape {tuple(ids.shape)} with offsets; {remedy} to pool over the last dimension")


def _check_tables_in_order(spec: TableSpec, lookup: Lookup) -> None:
    if spec.num_tables == 1 or (lookup.feature_columns is not None and lookup.shape[-1] == spec.num_tables):
        return
    if lookup.offsets is not None:
        each = "bag" if lookup.feature_columns is None else "feature"
        problem = f"offsets do not say which of {spec.num_tables} tables a bag belongs to"
        raise _error(spec, "ids", f"{problem}; give table_ids, one for each {each}")
    last = [] if lookup.pooling is None else ["L"]
    if lookup.ids.dim() < 2 + len(last) or lookup.shape[-1] != spec.num_tables:
        expected = ", ".join(["...", str(spec.num_tables), *last])
        problem = f"shape {tuple(lookup.ids.shape)} is not ({expected}), one column for each table"
        remedy = f"give that shape, or table_ids, the table of each {'bag' if last else 'id'}"
        raise _error(spec, "ids", f"{problem}; {remedy}")


def check_row(spec: TableSpec, key: Any, table: Any) -> tuple[int, int]:
    """Return the key and its table's number. `table` may be None if there is only one table. Raises InputError."""
    if as_int(key) is None:
        raise _error(spec, "key", f"got {key!r}; give one whole number")
    if table is None and spec.num_tables == 1:
        table = 0
    number = find_table(table, spec.table_names)
    if number is None:
        raise _error(spec, "table", f"got {table!r}; give the key's table, from {format_choices(spec.table_names)}")
    return int(key), number


def check_weights(spec: TableSpec, lookup: Lookup, weights: Any) -> None:
    """Raise InputError unless the weights are float32 in the shape of ids."""
    if weights is None:
        return
    if lookup.pooling is None:
        raise _error(spec, "weights", "weights scale the rows that are pooled, but pooling=None; give pooling='sum'")
    _check_tensor(spec, "weights", weights, lookup.ids)
    expected = tuple(lookup.ids.shape)
    if not isinstance(weights, Tensor) or weights.dtype != torch.float32 or tuple(weights.shape) != expected:
        raise _error(spec, "weights", f"got {_describe(weights)}; give torch.float32 in the shape of ids, {expected}")


def check_output_dtype(dtype: Any) -> torch.dtype:
    """Return the dtype. Raises OptionError if lookups cannot return this dtype."""
    if not isinstance(dtype, torch.dtype) or dtype not in OUTPUT_DTYPES:
        raise OptionError(f"output_dtype={dtype!r}: give torch.float32, torch.float16 or torch.bfloat16")
    return dtype


def _error(spec: TableSpec, argument: str, problem: str) -> InputError:
    return InputError(f"{argument} of embedding {spec.name!r}: {problem}")


def _describe(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _check_tensor(spec: TableSpec, name: str, values: Any, ids: Tensor) -> None:
    """Raise InputError if a tensor is nested or sparse, or not on the same device as the ids."""
    if not isinstance(values, Tensor):
        return
    if values.is_nested:
        problem, bags = "a nested tensor", "offsets=ids.offsets() and pooling='sum' or 'mean'"
        remedy = f"make it contiguous() with layout=torch.jagged, and give {name}.values(); to pool, also give {bags}"
    elif values.device.type not in (*DEVICES, "meta"):
        problem, remedy = f"on {values.device}", f"tables are on CPUs or CUDA GPUs: give {name}.cpu() or {name}.cuda()"
    elif values.device != ids.device:
        problem, remedy = f"on {values.device} but the ids are on {ids.device}", f"give {name}.to(ids.device)"
    elif values.layout != torch.strided:
        problem, remedy = f"{values.layout}", f"give {name}.to_dense()"
    else:
        return
    raise InputError(f"{name} of embedding {spec.name!r} are {problem}; {remedy}")


def _suggest_conversion(ids: Tensor, spec: TableSpec) -> str:
    """Return advice for ids in another dtype: how to convert them, or what to do if conversion would change them."""
    if {ids.dtype, spec.key_type} == {torch.int64, torch.uint64}:
        return f"give the same 64 bits as ids.view({spec.key_type})"  # .to() differs between CPUs if values >= 2**63
    if ids.dtype in KEY_TYPES and ids.dtype.itemsize > spec.key_type.itemsize:
        return f"make the embedding with key_type={ids.dtype}; ids.to({spec.key_type}) would drop the high bits"
    return f"convert them with ids.to({spec.key_type})"


def convert_keys(spec: TableSpec, keys: Any) -> Tensor:
    """Convert an array or nested lists of whole numbers to a tensor of the key type. Raises InputError."""
    message = f"keys of embedding {spec.name!r}: give whole numbers that {spec.key_type} can hold"
    array = _to_array(keys, message)
    converted = array.astype(KEY_TYPES[spec.key_type]) if array.dtype.kind in "iu" or array.size == 0 else None
    if converted is None or (converted.astype(object) != array.astype(object)).any():
        raise InputError(message)
    return torch.from_numpy(converted)


def _convert_table_ids(spec: TableSpec, table_ids: Any, device: torch.device) -> Tensor | None:
    """Convert table ids, an array or nested lists of numbers or names, to an int64 tensor. Raises InputError."""
    if table_ids is None or isinstance(table_ids, Tensor):
        return table_ids
    message = f"table_ids of embedding {spec.name!r}: give whole numbers, or names of tables"
    array = _to_array(table_ids, message, "iuU")
    if array.dtype.kind == "U":
        names = np.asarray(table_ids, object)
        numbers = [find_table(name, spec.table_names) for name in names.flat]
        if None in numbers:
            unknown = names.flat[numbers.index(None)]
            raise InputError(f"{message}. {unknown!r} is not a table; tables are {format_choices(spec.table_names)}")
        array = np.array(numbers, np.int64).reshape(names.shape)
    if array.dtype.kind not in "iu" or (array.astype(np.int64) != array).any():
        raise InputError(message)
    values = array.astype(np.int64)
    if values.ndim == 0:
        return _make_scalar(int(values), device)
    with _disable_current_modes():  # the tensor becomes a constant of a traced step, so steps do not copy it
        return torch.from_numpy(values).to(device, non_blocking=True)


@cache
def _make_scalar(value: int, device: torch.device) -> Tensor:
    """Return the same tensor for the same value. So even in a trace, one can see that two table ids are equal."""
    with _disable_current_modes(), torch.inference_mode(False):
        return torch.full((), value, dtype=torch.int64, device=device)


def convert_rows(spec: TableSpec, rows: Any, shape: torch.Size) -> NDArray[np.float32]:
    """Convert float32 rows [*shape, dim] to an array [n, dim]. `shape` is the shape of the keys. Raises InputError."""
    where, expected = f"rows of embedding {spec.name!r}", (*shape, spec.dim)
    if isinstance(rows, Tensor):
        if rows.device.type == "meta":
            raise InputError(f"{where} are on {rows.device} and have no values; give them on the CPU")
        tensor = rows.detach().cpu()
    else:
        array = _to_array(rows, f"{where}: give float32 {expected}")
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        # nested lists are converted to float32, because they lack a dtype
        tensor = torch.from_numpy(array if isinstance(rows, np.ndarray) else array.astype(np.float32))
    if tensor.dtype != torch.float32 or tuple(tensor.shape) != expected:
        raise InputError(f"{where}: {tensor.dtype} {tuple(tensor.shape)}; give float32 {expected}")
    return tensor.reshape(-1, spec.dim).contiguous().numpy()


def check_values(spec: TableSpec, keys: Tensor, values: NDArray[np.float32], allow_nonfinite: bool) -> None:
    """Raise InputError if `values` [n, dim], the rows of n keys, are not finite or overflow the stored dtype."""
    is_invalid, problem = np.zeros(0, np.bool_), ""
    if not allow_nonfinite:
        is_invalid, problem = ~np.isfinite(values), "is not finite; give a finite number, or allow_nonfinite=True"
    if spec.dtype != "float32" and not is_invalid.any():
        remedy = "give smaller numbers, or make the embedding with torch.float32"
        is_invalid, problem = find_overflows(values, spec.dtype), f"overflows dtype=torch.{spec.dtype}; {remedy}"
    if is_invalid.any():
        row, column = np.argwhere(is_invalid)[0].tolist()
        raise _error(spec, "rows", f"{values[row, column]} for key {keys.flatten()[row].item()} {problem}")


def _to_array(values: Any, message: str, kinds: str = "iuf") -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError:
        raise InputError(message) from None
    if array.dtype.kind not in kinds:
        raise InputError(message)
    return array
