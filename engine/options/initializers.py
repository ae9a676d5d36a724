"""Initial values of new rows: initializers, table options, and the numbers from which kernels draw rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..checks import checked_arguments, int_option
from ..errors import OptionError
from .store_options import PlainDict, options_class
from .table_names import check_table_name

MASK64 = 0xFFFFFFFFFFFFFFFF
CONSTANT, UNIFORM, NORMAL = 0, 1, 2
FLOAT32_MAX = float(np.finfo(np.float32).max)
MIN_MASS = 1e-6  # of a distribution that a truncation must leave
MAX_DEVIATIONS = 7.0  # standard deviations from the mean that no normal draw exceeds
Entry = tuple[int, tuple[float, float], tuple[float, float]]  # kind, parameters, quantiles
TABLE_FACTS = ("name", "ids", "bad_ids")  # table options that do not change initial values
BAD_IDS = ("raise", "drop")
_DEFAULT = {"name": None, "ids": None, "bad_ids": "raise"}


@options_class
class Initializer(PlainDict):
    """A distribution of initial values, stored and computed as float32."""

    type: str = field(init=False)

    def __post_init__(self) -> None:
        for item in fields(self)[1:]:
            value = getattr(self, item.name)
            try:
                number = float(value)
                finite = math.isfinite(number) and abs(number) <= FLOAT32_MAX
            except (TypeError, ValueError, OverflowError):
                finite = False
            if not finite:
                raise OptionError(f"{self.type} initializer: {item.name}={value!r}; give a finite float32 number")
            self._set(item.name, number)

    def entry(self) -> Entry:
        """Kind, parameters and quantiles, for `_core.Layout`, of one column group of one table."""
        raise NotImplementedError

    @property
    def reach(self) -> float:
        """The largest possible absolute value."""
        _, parameters, _ = self.entry()
        return max(map(abs, parameters))


@options_class
class UniformInitializer(Initializer):
    """Uniform over [low, high]. Raises OptionError for low > high or what float32 cannot hold."""

    type: str = field(default="uniform", init=False)
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise OptionError(f"uniform initializer: low={self.low} > high={self.high}; give low <= high")
        if self.high - self.low > FLOAT32_MAX:
            raise OptionError(
                f"uniform initializer: low={self.low}, high={self.high}: high - low overflows float32; narrow the range"
            )

    def entry(self) -> Entry:
        return UNIFORM, (self.low, self.high), (0.0, 1.0)


@options_class
class ConstantInitializer(Initializer):
    """`value` everywhere. Raises OptionError for what float32 cannot hold."""

    type: str = field(default="constant", init=False)
    value: float

    def entry(self) -> Entry:
        return CONSTANT, (self.value, 0.0), (0.0, 1.0)


@options_class
class NormalInitializer(Initializer):
    """Normal with mean and standard deviation; `std=0` gives the mean.

    Raises OptionError for std < 0 or what float32 cannot hold.
    """

    type: str = field(default="normal", init=False)
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.std < 0:
            raise OptionError(f"{self.type} initializer: std={self.std} < 0; give std >= 0")
        if abs(self.mean) + MAX_DEVIATIONS * self.std > FLOAT32_MAX:
            raise OptionError(
                f"{self.type} initializer: mean={self.mean}, std={self.std}: values overflow float32; give smaller ones"
            )

    def entry(self) -> Entry:
        return NORMAL, (self.mean, self.std), (0.0, 1.0)

    @property
    def reach(self) -> float:
        return abs(self.mean) + MAX_DEVIATIONS * self.std


@options_class
class TruncNormalInitializer(NormalInitializer):
    """Normal within the absolute bounds [a, b] (not multiples of `std`), as `torch.nn.init.trunc_normal_`.

    It is drawn by inversion, without resampling. Bounds and parameters are rounded to float32, and so is each value: it
    lies in [float32(a), float32(b)]. Raises OptionError for std < 0, a >= b, bounds that hold less than 1e-6 of the
    distribution, or what float32 cannot hold.
    """

    type: str = field(default="trunc_normal", init=False)
    a: float = -2.0
    b: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.a >= self.b:
            raise OptionError(f"trunc_normal initializer: a={self.a} >= b={self.b}; give a < b")
        q0, q1 = _truncation(self.mean, self.std, self.a, self.b)
        if q1 - q0 < MIN_MASS:
            raise OptionError(
                f"trunc_normal initializer: [a={self.a}, b={self.b}] holds less than {MIN_MASS} of the normal"
                f" distribution with mean={self.mean}, std={self.std} (all in float32); widen or move the interval"
            )

    def entry(self) -> Entry:
        return NORMAL, (self.mean, self.std), _truncation(self.mean, self.std, self.a, self.b)

    @property
    def reach(self) -> float:
        return max(abs(self.a), abs(self.b))


@lru_cache(maxsize=1024)
def _truncation(mean: float, std: float, a: float, b: float) -> tuple[float, float]:
    """(q0, q1), the extreme p with values in [a, b], by a row's arithmetic before the last rounding."""
    mean, std, a, b = (float(np.float32(number)) for number in (mean, std, a, b))
    if std == 0.0:
        return (0.0, 1.0) if a <= mean <= b else (0.0, 0.0)
    return (
        _bisect(lambda p: mean + std * _core.normal_quantile(p) >= a)[1],
        _bisect(lambda p: mean + std * _core.normal_quantile(p) > b)[0],
    )


def _bisect(reached: Callable[[float], bool]) -> tuple[float, float]:
    """Neighbours in (0, 1): the last p before a threshold and the first that reached it, to 2^-100 near 0."""
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = low + (high - low) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if reached(middle) else (middle, high)
    return low, high


make_uniform_initializer = UniformInitializer
make_normal_initializer = NormalInitializer
make_constant_initializer = ConstantInitializer
make_trunc_normal_initializer = TruncNormalInitializer

_INITIALIZERS: dict[str, type[Initializer]] = {
    one.type: one for one in (UniformInitializer, NormalInitializer, ConstantInitializer, TruncNormalInitializer)
}
for _name, _class in _INITIALIZERS.items():
    _class.maker = f"make_{_name}_initializer"


def initializer_from_dict(options: Mapping[str, Any]) -> Initializer:
    """An initializer from its printed form, e.g. {"type": "uniform", "low": -0.1}; defaults as in the makers.

    Raises OptionError for anything else.
    """
    if isinstance(options, Initializer):
        return options
    if not isinstance(options, Mapping):
        raise OptionError(f"initializer {options!r}: make one with make_uniform_initializer or another maker")
    given = dict(options)
    kind = given.pop("type", None)
    if kind not in _INITIALIZERS:
        raise OptionError(f"initializer type {kind!r} is unknown; use one of {', '.join(_INITIALIZERS)}")
    return _INITIALIZERS[kind](**given)


@options_class
class ColumnOptions(PlainDict):
    """One column group of a table."""

    initializer: Initializer


@options_class
class NamedOptions(PlainDict):
    """The options of one table. `name`, `ids` and `bad_ids` are items if they are not their defaults."""

    name: str | None = field(default=None, kw_only=True)
    ids: int | None = field(default=None, kw_only=True)
    bad_ids: str = field(default="raise", kw_only=True)

    def __post_init__(self) -> None:
        self._set("name", check_table_name(self.name))
        if self.ids is not None:
            expected = "how many ids the table has, from 1 to 2**64, all below it, or None for any id"
            self._set("ids", int_option("ids", self.ids, expected, 1, 2**64))
        if not isinstance(self.bad_ids, str) or self.bad_ids not in BAD_IDS:
            raise OptionError(f"bad_ids={self.bad_ids!r}: give 'raise' or 'drop', for ids that are not below `ids`")
        if self.bad_ids != "raise" and self.ids is None:
            raise OptionError(f"bad_ids={self.bad_ids!r}: without ids every id is legal; give ids as well")

    def __iter__(self) -> Iterator[str]:
        return (item for item in super().__iter__() if item not in TABLE_FACTS or getattr(self, item) != _DEFAULT[item])


@options_class
class TableOptions(NamedOptions):
    """One table, whose initializer serves all columns."""

    initializer: Initializer


@options_class
class MultiColumnTableOptions(NamedOptions):
    """One table with an initializer for each column group."""

    columns: tuple[ColumnOptions, ...]


AnyTableOptions = TableOptions | MultiColumnTableOptions


@checked_arguments()
def make_column_options(initializer: Mapping[str, Any]) -> ColumnOptions:
    """Options of one column group. `initializer`: an initializer, a dict that describes one, or column options.

    Raises OptionError for anything else.
    """
    if isinstance(initializer, Mapping) and set(initializer) == {"initializer"}:
        initializer = initializer["initializer"]
    return ColumnOptions(initializer_from_dict(initializer))


@checked_arguments()
def make_table_options(
    param: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    name: str | None = None,
    ids: int | None = None,
    bad_ids: str | None = None,
) -> AnyTableOptions:
    """Options of one table. `param`: an initializer, a list of column options, or table options; or dicts of the kind.

    name: the table's name, in addition to its number. ids: how many ids are legal, 0 to ids - 1; None for all of
    `key_type`. bad_ids: what a lookup does with other ids: "raise" (the default) raises InputError; "drop" treats them
    as padding, and counts them in the metric `dropped`. None keeps the one of `param`. Raises OptionError for anything
    else.
    """
    facts: dict[str, Any] = {"name": name, "ids": ids, "bad_ids": bad_ids}
    if isinstance(param, Mapping) and set(param) - set(TABLE_FACTS) in ({"initializer"}, {"columns"}):
        facts = {fact: param.get(fact) if given is None else given for fact, given in facts.items()}
        param = param["columns"] if "columns" in param else param["initializer"]
    given = {fact: value for fact, value in facts.items() if value is not None}
    if isinstance(param, Mapping):
        return TableOptions(make_column_options(param).initializer, **given)
    if not isinstance(param, (list, tuple)) or not param:
        raise OptionError(f"table options {param!r}: give an initializer or a list of column options")
    return MultiColumnTableOptions(tuple(make_column_options(column) for column in param), **given)


make_table = make_table_options


class InitialValues(NamedTuple):
    """The initial values of new rows, for `_core.Layout`."""

    states: Sequence[float]
    state_widths: Sequence[int]
    seed: int
    columns: Sequence[int]
    kinds: Sequence[int]
    parameters: NDArray[np.float32]
    quantiles: NDArray[np.float64]
    dtype: str = "float32"  # of the embedding's numbers
    state_dtype: str = "float32"  # of the numbers of the first `narrow_states` states
    narrow_states: int = 0
    zero_key: int | None = None  # of a row that begins as zeros, whatever the initializer


def as_arrays(
    tables: Sequence[AnyTableOptions], columns: Sequence[int]
) -> tuple[list[int], NDArray[np.float32], NDArray[np.float64]]:
    """(kinds, parameters [n, 2], quantiles [n, 2]) for `_core.Layout`, n = len(tables) * len(columns).

    `columns` are the widths of the column groups. Raises OptionError if a table lists another number of groups.
    """
    entries: list[Entry] = []
    for index, table in enumerate(tables):
        if isinstance(table, TableOptions):
            entries += [table.initializer.entry()] * len(columns)
        elif len(table.columns) == len(columns):
            entries += [column.initializer.entry() for column in table.columns]
        else:
            raise OptionError(
                f"tables[{index}] has {len(table.columns)} column options, but embedding_dim={list(columns)} has"
                f" {len(columns)} columns; give one for each, or a single initializer"
            )
    kinds, parameters, quantiles = zip(*entries, strict=True)
    return list(kinds), np.array(parameters, np.float32), np.array(quantiles, np.float64)
