"""Defines the initial values of new rows by initializers and table options. Kernels read these options as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..checks import check_int, validate_arguments
from ..errors import OptionError
from .store_options import PlainDict, options_class
from .table_names import check_table_name

MASK64 = 0xFFFFFFFFFFFFFFFF
CONSTANT, UNIFORM, NORMAL = 0, 1, 2
FLOAT32_MAX = float(np.finfo(np.float32).max)
MIN_PROBABILITY = 1e-6  # a truncated normal's interval has at least this probability
MAX_DEVIATIONS = 7.0  # a normal draw is at most this many standard deviations from the mean
InitializerEntry = tuple[int, tuple[float, float], tuple[float, float]]  # kind, parameters, quantiles
ID_OPTIONS = ("name", "ids", "bad_ids")  # table options that do not affect initial values
BAD_IDS = ("raise", "drop")
_ID_DEFAULTS = {"name": None, "ids": None, "bad_ids": "raise"}


@options_class
class Initializer(PlainDict):
    """Base class for the distributions that initial values are drawn from, in float32."""

    type: str = field(init=False)

    def __post_init__(self) -> None:
        for item in fields(self)[1:]:
            value = getattr(self, item.name)
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not abs(number) <= FLOAT32_MAX:
                raise OptionError(f"{self.type} initializer: {item.name}={value!r}; give a finite float32 number")
            self._set(item.name, number)

    def make_entry(self) -> InitializerEntry:
        """Return the initializer as (kind, parameters, quantiles) for `_core.Layout`."""
        raise NotImplementedError

    @property
    def max_magnitude(self) -> float:
        _, parameters, _ = self.make_entry()
        return max(map(abs, parameters))


@options_class
class UniformInitializer(Initializer):
    """Initializes new rows uniformly from [low, high].

    Raises:
        OptionError: If `low > high`, or one of `low`, `high` and `high - low` overflows float32.
    """

    type: str = field(default="uniform", init=False)
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise OptionError(f"uniform initializer: low={self.low} > high={self.high}; give low <= high")
        if self.high - self.low > FLOAT32_MAX:
            bounds = f"low={self.low}, high={self.high}"
            raise OptionError(f"uniform initializer: {bounds}: high - low overflows float32; narrow the range")

    def make_entry(self) -> InitializerEntry:
        return UNIFORM, (self.low, self.high), (0.0, 1.0)


@options_class
class ConstantInitializer(Initializer):
    """Initializes new rows with `value`. Raises `OptionError` if `value` is not a finite float32 number."""

    type: str = field(default="constant", init=False)
    value: float

    def make_entry(self) -> InitializerEntry:
        return CONSTANT, (self.value, 0.0), (0.0, 1.0)


@options_class
class NormalInitializer(Initializer):
    """Initializes new rows from a normal distribution.

    Args:
        mean: The mean.
        std: The standard deviation; 0 initializes every element with the mean.

    Raises:
        OptionError: If `std < 0`, or float32 cannot hold `mean` plus or minus 7 standard deviations.
    """

    type: str = field(default="normal", init=False)
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.std < 0:
            raise OptionError(f"{self.type} initializer: std={self.std} < 0; give std >= 0")
        if abs(self.mean) + MAX_DEVIATIONS * self.std > FLOAT32_MAX:
            settings = f"mean={self.mean}, std={self.std}"
            raise OptionError(f"{self.type} initializer: {settings}: values overflow float32; give smaller numbers")

    def make_entry(self) -> InitializerEntry:
        return NORMAL, (self.mean, self.std), (0.0, 1.0)

    @property
    def max_magnitude(self) -> float:
        return abs(self.mean) + MAX_DEVIATIONS * self.std


@options_class
class TruncNormalInitializer(NormalInitializer):
    """Initializes new rows from a normal distribution truncated to [a, b], as `torch.nn.init.trunc_normal_` does.

    Values are drawn by inverting the distribution function, without resampling. All arguments and values are rounded to
    float32, so values lie in [float32(a), float32(b)].

    Args:
        mean: The mean before truncation.
        std: The standard deviation before truncation.
        a: The lower bound, an absolute value (not a multiple of `std`).
        b: The upper bound, an absolute value (not a multiple of `std`).

    Raises:
        OptionError: If `std < 0`, `a >= b`, the probability of [a, b] is below 1e-6, or float32 cannot hold the values.
    """

    type: str = field(default="trunc_normal", init=False)
    a: float = -2.0
    b: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.a >= self.b:
            raise OptionError(f"trunc_normal initializer: a={self.a} >= b={self.b}; give a < b")
        q0, q1 = _find_quantiles(self.mean, self.std, self.a, self.b)
        if q1 - q0 < MIN_PROBABILITY:
            raise OptionError(
                f"trunc_normal initializer: [a={self.a}, b={self.b}] holds less than {MIN_PROBABILITY} of the normal"
                f" distribution with mean={self.mean}, std={self.std} (all in float32); widen or move the interval"
            )

    def make_entry(self) -> InitializerEntry:
        return NORMAL, (self.mean, self.std), _find_quantiles(self.mean, self.std, self.a, self.b)

    @property
    def max_magnitude(self) -> float:
        return max(abs(self.a), abs(self.b))


@lru_cache(maxsize=1024)
def _find_quantiles(mean: float, std: float, a: float, b: float) -> tuple[float, float]:
    """Return (q0, q1), the smallest and the largest quantile whose unrounded value lies in [a, b]."""
    mean, std, a, b = (float(np.float32(number)) for number in (mean, std, a, b))
    if std == 0.0:
        return (0.0, 1.0) if a <= mean <= b else (0.0, 0.0)
    _, first = _bisect(lambda p: mean + std * _core.normal_quantile(p) >= a)
    last, _ = _bisect(lambda p: mean + std * _core.normal_quantile(p) > b)
    return first, last


def _bisect(is_reached: Callable[[float], bool]) -> tuple[float, float]:
    """Bisect [0, 1] in at most 100 steps. Return (low, high), two floats around the threshold of `is_reached`."""
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = low + (high - low) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if is_reached(middle) else (middle, high)
    return low, high


make_uniform_initializer = UniformInitializer
make_normal_initializer = NormalInitializer
make_constant_initializer = ConstantInitializer
make_trunc_normal_initializer = TruncNormalInitializer

_INITIALIZER_CLASSES: dict[str, type[Initializer]] = {
    cls.type: cls for cls in (UniformInitializer, NormalInitializer, ConstantInitializer, TruncNormalInitializer)
}
for _name, _class in _INITIALIZER_CLASSES.items():
    _class.constructor_name = f"make_{_name}_initializer"


def initializer_from_dict(options: Mapping[str, Any]) -> Initializer:
    """Make an initializer from its printed form, such as {"type": "uniform", "low": -0.1}. Raises OptionError."""
    if isinstance(options, Initializer):
        return options
    if not isinstance(options, Mapping):
        raise OptionError(f"initializer {options!r}: give the result of a make_*_initializer function")
    arguments = dict(options)
    type_name = arguments.pop("type", None)
    if type_name not in _INITIALIZER_CLASSES:
        raise OptionError(f"initializer type {type_name!r} is unknown; use one of {', '.join(_INITIALIZER_CLASSES)}")
    return _INITIALIZER_CLASSES[type_name](**arguments)


@options_class
class ColumnOptions(PlainDict):
    """The options of one column group."""

    initializer: Initializer


@options_class
class BaseTableOptions(PlainDict):
    """Base class for a table's options. Iteration skips `name`, `ids` and `bad_ids` if they have their defaults."""

    name: str | None = field(default=None, kw_only=True)
    ids: int | None = field(default=None, kw_only=True)
    bad_ids: str = field(default="raise", kw_only=True)

    def __post_init__(self) -> None:
        self._set("name", check_table_name(self.name))
        if self.ids is not None:
            expected = "the number of ids, from 1 to 2**64 (ids are below it), or None for any id"
            self._set("ids", check_int("ids", self.ids, expected, 1, 2**64))
        if not isinstance(self.bad_ids, str) or self.bad_ids not in BAD_IDS:
            raise OptionError(f"bad_ids={self.bad_ids!r}: give 'raise' or 'drop', the action for an illegal id")
        if self.bad_ids != "raise" and self.ids is None:
            raise OptionError(f"bad_ids={self.bad_ids!r}: without `ids`, every id is legal; give `ids` as well")

    def __iter__(self) -> Iterator[str]:
        return (key for key in super().__iter__() if key not in ID_OPTIONS or getattr(self, key) != _ID_DEFAULTS[key])


@options_class
class TableOptions(BaseTableOptions):
    """The options of a table with one initializer for all columns."""

    initializer: Initializer


@options_class
class MultiColumnTableOptions(BaseTableOptions):
    """The options of a table with an initializer for each column group."""

    columns: tuple[ColumnOptions, ...]


AnyTableOptions = TableOptions | MultiColumnTableOptions


@validate_arguments()
def make_column_options(initializer: Mapping[str, Any]) -> ColumnOptions:
    """Make the options of one column group.

    Args:
        initializer: An initializer, its printed form as a dict, or column options.

    Raises:
        OptionError: If the type or value of `initializer` is wrong.
    """
    if isinstance(initializer, Mapping) and set(initializer) == {"initializer"}:
        initializer = initializer["initializer"]
    return ColumnOptions(initializer_from_dict(initializer))


@validate_arguments()
def make_table_options(
    param: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    name: str | None = None,
    ids: int | None = None,
    bad_ids: str | None = None,
) -> AnyTableOptions:
    """Make the options of one table. If `name`, `ids` or `bad_ids` is None, its value in `param` applies.

    Args:
        param: An initializer, a list of column options, or table options. A dict in the printed form is accepted too.
        name: A name for the table, in addition to its number.
        ids: The number of legal ids, 0 to `ids - 1`. By default every id of the embedding's `key_type` is legal.
        bad_ids: What a lookup does with an illegal id: "raise" (the default) raises `InputError`; "drop" treats the id
            as padding and counts it in the metric `dropped`.

    Raises:
        OptionError: If an argument's type or value is wrong.
    """
    options: dict[str, Any] = {"name": name, "ids": ids, "bad_ids": bad_ids}
    if isinstance(param, Mapping) and set(param) - set(ID_OPTIONS) in ({"initializer"}, {"columns"}):
        options = {option: param.get(option) if value is None else value for option, value in options.items()}
        param = param["columns"] if "columns" in param else param["initializer"]
    options = {option: value for option, value in options.items() if value is not None}
    if isinstance(param, Mapping):
        return TableOptions(make_column_options(param).initializer, **options)
    if not isinstance(param, (list, tuple)) or not param:
        raise OptionError(f"table options {param!r}: give an initializer or a list of column options")
    return MultiColumnTableOptions(tuple(make_column_options(column) for column in param), **options)


make_table = make_table_options


class InitialValues(NamedTuple):
    """The arguments of `_core.Layout` that determine the initial values of new rows."""

    states: Sequence[float]
    state_widths: Sequence[int]
    seed: int
    columns: Sequence[int]
    kinds: Sequence[int]
    parameters: NDArray[np.float32]
    quantiles: NDArray[np.float64]
    dtype: str = "float32"  # the embedding's stored dtype
    state_dtype: str = "float32"  # dtype of the first `num_16bit_states` states; other states are float32
    num_16bit_states: int = 0
    zero_key: int | None = None  # the key whose row starts as zeros, whatever the initializer


def as_arrays(
    tables: Sequence[AnyTableOptions], columns: Sequence[int]
) -> tuple[list[int], NDArray[np.float32], NDArray[np.float64]]:
    """Return (kinds, parameters [n, 2], quantiles [n, 2]) for `_core.Layout`, with n = len(tables) * len(columns).

    `columns` holds one width per column group. Raises OptionError unless each table has one option per group.
    """
    entries: list[InitializerEntry] = []
    for index, table in enumerate(tables):
        if isinstance(table, TableOptions):
            entries += [table.initializer.make_entry()] * len(columns)
        elif len(table.columns) == len(columns):
            entries += [column.initializer.make_entry() for column in table.columns]
        else:
            raise OptionError(
                f"tables[{index}] has {len(table.columns)} column options, but embedding_dim={list(columns)} has"
                f" {len(columns)} columns; give one for each, or a single initializer"
            )
    kinds, parameters, quantiles = zip(*entries, strict=True)
    return list(kinds), np.array(parameters, np.float32), np.array(quantiles, np.float64)
