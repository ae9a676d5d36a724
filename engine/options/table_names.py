"""The names of an embedding's tables: which names may be, how stored names fit, and which table a name means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ..checks import as_int
from ..errors import OptionError

FIELD = "table_names"  # of a description: a name or None for each table; without the field no table has a name
OF_TENSORS = "names_of_tensors"  # of a description: whether an import took these names from tensors
LONGEST = 200

Names = Sequence[str | None]  # a name for each table, None for a table without a name


def is_table_name(name: Any) -> bool:
    """Whether a table may have this name. A name of digits alone would be taken for a number."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST:
        return False
    return name.isprintable() and name == name.strip() and not name.isdigit()


def check_table_name(name: Any) -> str | None:
    """Raises OptionError for a name that no table may have."""
    if name is not None and not is_table_name(name):
        raise OptionError(
            f"table name={name!r}: give 1 to {LONGEST} printable characters that are not all digits, without space "
            "around, or None"
        )
    return None if name is None else str(name)


def check_distinct(names: Names) -> None:
    """Raises OptionError where two tables have one name."""
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if name is not None and first.setdefault(name, index) != index:
            raise OptionError(
                f"tables[{first[name]}] and tables[{index}] both have name={name!r}; give each a name of its own"
            )


def labels_of(names: Names) -> tuple[str, ...]:
    """What messages and metrics call each table: the table's name, else its number. No two labels are alike."""
    return tuple(label_of(index, names) for index in range(len(names)))


def label_of(table: int, names: Names) -> str:
    """The label of one table. A foreign file may hold rows of a table that the embedding does not have."""
    return with_table_name(table, names).get("table_name", str(table))


def names_in(description: Mapping[str, Any]) -> tuple[str | None, ...]:
    """The table names in a valid description."""
    return tuple(description.get(FIELD) or [None] * len(description["tables"]))


def table_number(given: Any, names: Names) -> int | None:
    """The number of the table that a number or a name means; None where there is no such table."""
    if isinstance(given, str):
        return names.index(given) if given in names else None
    return as_int(given, 0, len(names) - 1)


def choices(names: Names) -> str:
    """What `table_number` takes, for messages."""
    named = [repr(name) for name in names if name is not None]
    return ", ".join([f"0 to {len(names) - 1}", *([f"or by name {named[0]}", *named[1:]] if named else [])])


def with_table_name(table: int, names: Names) -> dict[str, Any]:
    """A table as plain values: `table`, its number, and where it has a name `table_name`."""
    name = names[table] if table < len(names) else None
    return {"table": table} if name is None else {"table": table, "table_name": name}


def mismatched_tables(stored: Names, mine: Names) -> list[int]:
    """The tables whose stored name is not their own. Rows that were stored without a name fit any table."""
    padded = [*mine, *[None] * len(stored)]
    return [index for index, name in enumerate(stored) if name is not None and name != padded[index]]


def merged_names(left: Names, right: Names) -> tuple[str | None, ...] | None:
    """The table names of two descriptions, where some tables may be named in one alone; None where two names differ."""
    names = tuple(a or b for a, b in zip_longest(left, right))
    named = [name for name in names if name is not None]
    return None if mismatched_tables(right, names) or len(set(named)) < len(named) else names


def are_names(value: Any, tables: int) -> bool:
    """Whether a description of so many tables may hold `value` as their names."""
    if type(value) is not list or len(value) != tables:
        return False
    named = [name for name in value if name is not None]
    return all(map(is_table_name, named)) and len(set(named)) == len(named)
