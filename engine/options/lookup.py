"""Checks of the arguments of lookups. They read only shapes and dtypes, so they work in a trace as well."""

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
from ..row_format import overflows
from .table_names import choices, table_number
from .table_spec import DTYPES, KEY_TYPES, TableSpec

DEVICES = ("cpu", "cuda")  # of tables
_NARROW = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32)
OUTPUT_DTYPES = DTYPES


class Lookup(NamedTuple):
    """The checked arguments of a lookup. A bag is a group of ids whose rows are pooled into one row."""

    ids: Tensor  # [...]; pooled [..., L], or [n] with offsets
    # integers of the result's shape, or [columns] with feature_columns; None: the result's last dimension is the tables
    table_ids: Tensor | None = None
    offsets: Tensor | None = None  # [bags + 1], where each bag of ids begins and the last one ends
    pooling: str | None = None  # "sum" or "mean"
    # the column of each feature in the result, -1 for none; offsets are [features * batch + 1], feature by feature
    feature_columns: tuple[int, ...] | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """ids, table ids and offsets."""
        return self[:3]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result without its last dimension: of ids, of bags, or (batch, columns)."""
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
    """The checked arguments of a lookup, with table ids broadcast to the shape of the result, or of the features.

    ids: of the key type, or of an integer dtype that fits into it and is converted. table_ids: a tensor, an array or
    nested lists, also of names. The other arguments are unchanged. All tensors have to be on one device. Raises
    InputError.
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
        return Lookup(ids)  # as below, in less time
    if not isinstance(ids, Tensor):
        remedy = f"give a torch.Tensor of {spec.key_type}, such as torch.tensor(ids, dtype={spec.key_type})"
        raise _error(spec, "ids", f"got {type(ids).__name__}; {remedy}")
    _check_tensor(spec, "ids", ids, ids)
    if ids.dtype != spec.key_type:
        keys, given = torch.iinfo(spec.key_type), torch.iinfo(ids.dtype) if ids.dtype in _NARROW else None
        if given is None or given.min < keys.min or given.max > keys.max:
            remedy = _conversion(ids, spec)
            raise _error(spec, "ids", f"dtype {ids.dtype}, but key_type is {spec.key_type}; {remedy}")
        ids = ids.to(spec.key_type)
    _check_bags(spec, ids, offsets, pooling)
    lookup = Lookup(ids, None, offsets, pooling, _feature_columns(spec, offsets, features, num_features))
    has_all = features is not None and isinstance(table_ids, list) and lookup.shape[-1] == spec.num_tables
    if has_all and set(map(type, table_ids)) == {int} and table_ids == [*range(spec.num_tables)]:
        return lookup  # the tables in order need no ids
    table_ids = _table_ids_from(spec, table_ids, ids.device)
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
        what, one = ("ids", "id, or for each column") if pooling is None else ("the bags", "bag")
        if lookup.feature_columns is not None:
            what, one = "features", "of the features"
        problem = f"{shape} does not broadcast to that of {what}, {expected}; give one table id for each {one}"
        raise _error(spec, "table_ids", problem) from None


def _feature_columns(
    spec: TableSpec, offsets: Tensor | None, features: Any, num_features: Any
) -> tuple[int, ...] | None:
    """`Lookup.feature_columns` for features in the order of the result's columns. Raises InputError."""
    if features is None:
        if num_features is not None:
            remedy = "give features, the numbers of those to look up, or leave num_features out"
            raise _error(spec, "num_features", f"got {num_features!r} without features; {remedy}")
        return None
    if offsets is None:
        remedy = "features are ranges of offsets, and there are no offsets; give offsets, feature by feature"
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
            remedy = f"give numbers from 0 to {total - 1}, each once, and num_features if offsets have more features"
            raise _error(spec, "features", f"{feature!r} at position {column}; {remedy} than that")
    if (offsets.shape[0] - 1) % total:
        problem = f"shape {tuple(offsets.shape)} is not (features * batch + 1,) of {total} features"
        remedy = "give num_features if offsets have more features than are looked up"
        raise _error(spec, "offsets", f"{problem}; {remedy}")
    return tuple(columns.get(feature, -1) for feature in range(total))


def _check_bags(spec: TableSpec, ids: Tensor, offsets: Any, pooling: Any) -> None:
    if pooling is not None and not (isinstance(pooling, str) and pooling in ("sum", "mean")):
        raise _error(spec, "pooling", f"got {pooling!r}; give 'sum' or 'mean', or None for the row of each id")
    if offsets is None:
        if pooling is not None and ids.dim() == 0:
            remedy = "give (..., L), or 1-D ids with offsets"
            raise _error(
                spec, "ids", f"pooling={pooling!r} pools over their last dimension, and they have none; {remedy}"
            )
        return
    if pooling is None:
        remedy = "offsets make bags, and pooling=None pools none; give pooling='sum' or 'mean'"
        raise _error(spec, "offsets", remedy)
    _check_tensor(spec, "offsets", offsets, ids)
    if not isinstance(offsets, Tensor) or offsets.dtype not in (torch.int32, torch.int64) or offsets.dim() != 1:
        raise _error(spec, "offsets", f"got {_kind(offsets)}; give a 1-D torch.Tensor of int64 or int32")
    if offsets.shape[0] == 0:
        raise _error(spec, "offsets", "shape (0,); give bags + 1 offsets, [0] for no bag")
    if ids.dim() != 1:
        remedy = "by ids.flatten(), or leave offsets out to pool over the last dimension"
        problem = f"shape {tuple(ids.shape)} with offsets; give the ids of all bags one after another"
        raise _error(spec, "ids", f"{problem}, {remedy}")


def _check_tables_in_order(spec: TableSpec, lookup: Lookup) -> None:
    if spec.num_tables == 1:
        return
    if lookup.feature_columns is not None and lookup.shape[-1] == spec.num_tables:
        return
    if lookup.offsets is not None:
        each = "bag" if lookup.feature_columns is None else "of the features"
        problem = f"with offsets it is not known which of {spec.num_tables} tables a bag belongs to"
        raise _error(spec, "ids", f"{problem}; give table_ids, one for each {each}")
    last = [] if lookup.pooling is None else ["L"]
    if lookup.ids.dim() < 2 + len(last) or lookup.shape[-1] != spec.num_tables:
        expected = ", ".join(["...", str(spec.num_tables), *last])
        problem = f"shape {tuple(lookup.ids.shape)} is not ({expected}), one column for each table"
        remedy = f"give that, or table_ids that say which table each {'bag' if last else 'id'} belongs to"
        raise _error(spec, "ids", f"{problem}; {remedy}")


def check_row(spec: TableSpec, key: Any, table: Any) -> tuple[int, int]:
    """A key and its table; `table` may be None if the embedding has one table. Raises InputError."""
    if as_int(key) is None:
        raise _error(spec, "key", f"got {key!r}; give one whole number")
    if table is None and spec.num_tables == 1:
        table = 0
    number = table_number(table, spec.table_names)
    if number is None:
        raise _error(spec, "table", f"got {table!r}; give the key's, from {choices(spec.table_names)}")
    return int(key), number


def check_weights(spec: TableSpec, lookup: Lookup, weights: Any) -> None:
    """Raises InputError for weights that are not float32 of the shape of ids."""
    if weights is None:
        return
    if lookup.pooling is None:
        remedy = "weights multiply the rows of a bag, and pooling=None makes no bags; give pooling='sum'"
        raise _error(spec, "weights", remedy)
    _check_tensor(spec, "weights", weights, lookup.ids)
    expected = tuple(lookup.ids.shape)
    if not isinstance(weights, Tensor) or weights.dtype != torch.float32 or tuple(weights.shape) != expected:
        raise _error(spec, "weights", f"got {_kind(weights)}; give torch.float32 of the shape of ids, {expected}")


def check_output_dtype(dtype: Any) -> torch.dtype:
    """Raises OptionError for a dtype that lookups cannot return."""
    if not isinstance(dtype, torch.dtype) or dtype not in OUTPUT_DTYPES:
        raise OptionError(f"output_dtype={dtype!r}: give torch.float32, torch.float16 or torch.bfloat16")
    return dtype


def _error(spec: TableSpec, argument: str, problem: str) -> InputError:
    return InputError(f"{argument} of embedding {spec.name!r}: {problem}")


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _check_tensor(spec: TableSpec, name: str, values: Any, ids: Tensor) -> None:
    """Raises InputError for a nested or sparse tensor, or one that is on another device than the ids."""
    if not isinstance(values, Tensor):
        return
    if values.is_nested:
        problem = "a nested tensor"
        remedy = (
            f"make it contiguous(), with layout=torch.jagged, and give {name}.values(), and for its bags "
            "offsets=ids.offsets() with pooling='sum' or 'mean'"
        )
    elif values.device.type not in (*DEVICES, "meta"):
        problem = f"on {values.device}"
        remedy = f"tables are on the CPU or on CUDA devices: give {name}.cpu() or {name}.cuda()"
    elif values.device != ids.device:
        problem, remedy = f"on {values.device} and the ids on {ids.device}", f"give {name}.to(ids.device)"
    elif values.layout != torch.strided:
        problem, remedy = f"{values.layout}", f"give {name}.to_dense()"
    else:
        return
    raise InputError(f"{name} of embedding {spec.name!r} are {problem}; {remedy}")


def _conversion(ids: Tensor, spec: TableSpec) -> str:
    """How to convert ids to the key type, or what to do where ids of their dtype would become other ids."""
    if {ids.dtype, spec.key_type} == {torch.int64, torch.uint64}:
        return f"give the same 64 bits as ids.view({spec.key_type})"  # .to() depends on the processor from 2**63 on
    if ids.dtype in KEY_TYPES and ids.dtype.itemsize > spec.key_type.itemsize:
        return f"make the embedding with key_type={ids.dtype}; ids.to({spec.key_type}) keeps the low bits alone"
    return f"convert them with ids.to({spec.key_type})"


def keys_from(spec: TableSpec, keys: Any) -> Tensor:
    """Keys, given as an array or nested lists of whole numbers, as a tensor of the key type. Raises InputError."""
    error = f"keys of embedding {spec.name!r}: give whole numbers that {spec.key_type} can hold"
    given = _array(keys, error)
    expected = given.astype(KEY_TYPES[spec.key_type]) if given.dtype.kind in "iu" or given.size == 0 else None
    if expected is None or (expected.astype(object) != given.astype(object)).any():
        raise InputError(error)
    return torch.from_numpy(expected)


def _table_ids_from(spec: TableSpec, table_ids: Any, device: torch.device) -> Tensor | None:
    """Table ids, given as an array or nested lists, as a tensor."""
    if table_ids is None or isinstance(table_ids, Tensor):
        return table_ids
    error = f"table_ids of embedding {spec.name!r}: give whole numbers, or names of tables"
    given = _array(table_ids, error, "iuU")
    if given.dtype.kind == "U":
        names = np.asarray(table_ids, object)
        numbers = [table_number(name, spec.table_names) for name in names.flat]
        if None in numbers:
            unknown = names.flat[numbers.index(None)]
            raise InputError(f"{error}, {choices(spec.table_names)}; {unknown!r} is not one")
        given = np.array(numbers, np.int64).reshape(names.shape)
    if given.dtype.kind not in "iu" or (given.astype(np.int64) != given).any():
        raise InputError(error)
    values = given.astype(np.int64)
    if values.ndim == 0:
        return _number(int(values), device)
    with _disable_current_modes():  # a constant of a traced step, so that no step copies it to the device
        return torch.from_numpy(values).to(device, non_blocking=True)


@cache
def _number(value: int, device: torch.device) -> Tensor:
    """One tensor for each number, which shows that two lookups have the same table ids, in a trace as well."""
    with _disable_current_modes(), torch.inference_mode(False):
        return torch.full((), value, dtype=torch.int64, device=device)


def rows_from(spec: TableSpec, rows: Any, shape: torch.Size) -> NDArray[np.float32]:
    """The rows given for keys of `shape` as an array [n, dim]. Raises InputError."""
    where, expected = f"rows of embedding {spec.name!r}", (*shape, spec.dim)
    if isinstance(rows, Tensor):
        if rows.device.type == "meta":
            raise InputError(f"{where} are on {rows.device} and have no values; give them on the CPU")
        given = rows.detach().cpu()
    else:
        array = _array(rows, f"{where}: give float32 {expected}")
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        # numbers of Python have no dtype
        given = torch.from_numpy(array if isinstance(rows, np.ndarray) else array.astype(np.float32))
    if given.dtype != torch.float32 or tuple(given.shape) != expected:
        raise InputError(f"{where}: {given.dtype} {tuple(given.shape)}; give float32 {expected}")
    return given.reshape(-1, spec.dim).contiguous().numpy()


def check_values(spec: TableSpec, keys: Tensor, values: NDArray[np.float32], allow_nonfinite: bool) -> None:
    """Raises InputError for a number in values [n, dim], of n keys, that is not finite, or not in stored rows."""
    flags, problem = np.zeros(0, np.bool_), ""
    if not allow_nonfinite:
        flags, problem = ~np.isfinite(values), "is not finite; give a finite number, or allow_nonfinite=True"
    if spec.dtype != "float32" and not flags.any():
        remedy = "give smaller numbers, or make the embedding with torch.float32"
        flags, problem = overflows(values, spec.dtype), f"overflows dtype=torch.{spec.dtype}; {remedy}"
    if flags.any():
        row, column = np.argwhere(flags)[0].tolist()
        raise _error(spec, "rows", f"{values[row, column]} for key {keys.flatten()[row].item()} {problem}")


def _array(values: Any, error: str, kinds: str = "iuf") -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError:
        raise InputError(error) from None
    if array.dtype.kind not in kinds:
        raise InputError(error)
    return array
