"""The names of an embedding's tables: which are legal, how stored names match, and which table a name means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ..checks import as_int
from ..errors import OptionError

FIELD = "table_names"  # of a description: a name or None for each table; without the field no table has a name
OF_TENSORS = "names_of_tensors"  # of a description: whether an import took these names from tensors
MAX_LENGTH = 200

Names = Sequence[str | None]  # a name for each table, None for a table without a name


def is_table_name(name: Any) -> bool:
    """Whether a table may have this name. A name of digits alone would be taken for a number."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_LENGTH:
        return False
    return name.isprintable() and name == name.strip() and not name.isdigit()


def check_table_name(name: Any) -> str | None:
    """Raises OptionError for a name that no table may have."""
    if name is not None and not is_table_name(name):
        raise OptionError(
            f"table name={name!r}: give 1 to {MAX_LENGTH} printable characters that are not all digits, without space "
            "around, or None"
        )
    return None if name is None else str(name)


def check_distinct(names: Names) -> None:
    """Raises OptionError if two tables have one name."""
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if name is not None and first.setdefault(name, index) != index:
            raise OptionError(
                f"tables[{first[name]}] and tables[{index}] both have name={name!r}; give each another name"
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
    """The number of the table that a number or a name means; None if there is no such table."""
    if isinstance(given, str):
        return names.index(given) if given in names else None
    return as_int(given, 0, len(names) - 1)


def choices(names: Names) -> str:
    """The values that `table_number` accepts, for messages."""
    given = [repr(name) for name in names if name is not None]
    return ", ".join([f"0 to {len(names) - 1}", *([f"or by name {given[0]}", *given[1:]] if given else [])])


def with_table_name(table: int, names: Names) -> dict[str, Any]:
    """A table as plain values: `table`, its number, and `table_name`, if it has a name."""
    name = names[table] if table < len(names) else None
    return {"table": table} if name is None else {"table": table, "table_name": name}


def mismatched_tables(stored: Names, names: Names) -> list[int]:
    """The tables whose stored name differs. Rows that were stored without a name fit any table."""
    padded = [*names, *[None] * len(stored)]
    return [index for index, name in enumerate(stored) if name is not None and name != padded[index]]


def merged_names(left: Names, right: Names) -> tuple[str | None, ...] | None:
    """The table names of two descriptions, of which one may lack some names; None if two names differ."""
    names = tuple(a or b for a, b in zip_longest(left, right))
    given = [name for name in names if name is not None]
    return None if mismatched_tables(right, names) or len(set(given)) < len(given) else names


def are_names(value: Any, tables: int) -> bool:
    """Whether a description of this number of tables may have `value` as their names."""
    if type(value) is not list or len(value) != tables:
        return False
    given = [name for name in value if name is not None]
    return all(map(is_table_name, given)) and len(set(given)) == len(given)
