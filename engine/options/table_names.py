"""Checks table names, finds tables by name, and compares names with stored names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ..checks import as_int
from ..errors import OptionError

# Keys in a stored description. TABLE_NAMES lists each table's name or None; if the key is missing, no table is named.
TABLE_NAMES = "table_names"
NAMED_LIKE_TENSORS = "names_of_tensors"  # True if tables are named like the tensors that they were imported from
MAX_LENGTH = 200

Names = Sequence[str | None]  # each table's name; None if the table is unnamed


def is_table_name(name: Any) -> bool:
    """True if a table may have this name. A name made only of digits would look like a table number."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_LENGTH:
        return False
    return name.isprintable() and name == name.strip() and not name.isdigit()


def check_table_name(name: Any) -> str | None:
    """Return the name. Raises OptionError if the name is neither None nor legal for a table."""
    if name is not None and not is_table_name(name):
        raise OptionError(
            f"table name={name!r}: give None, or 1 to {MAX_LENGTH} printable characters, not only digits, without "
            "spaces at either end"
        )
    return None if name is None else str(name)


def check_distinct(names: Names) -> None:
    """Raise OptionError if two tables share a name."""
    indices: dict[str, int] = {}
    for index, name in enumerate(names):
        if name is not None and indices.setdefault(name, index) != index:
            raise OptionError(
                f"tables[{indices[name]}] and tables[{index}] both have name={name!r}; give each table its own name"
            )


def label_tables(names: Names) -> tuple[str, ...]:
    """Return a unique label for each table, for messages and metrics: its name, or its number if it is unnamed."""
    return tuple(label_table(index, names) for index in range(len(names)))


def label_table(table: int, names: Names) -> str:
    """Return one table's label. `names` may be too short, because imported files can contain more tables."""
    return describe_table(table, names).get("table_name", str(table))


def read_table_names(description: Mapping[str, Any]) -> tuple[str | None, ...]:
    return tuple(description.get(TABLE_NAMES) or [None] * len(description["tables"]))


def find_table(table: Any, names: Names) -> int | None:
    """Return a table's number, given its number or name, or None if there is no such table."""
    if isinstance(table, str):
        return names.index(table) if table in names else None
    return as_int(table, 0, len(names) - 1)


def format_choices(names: Names) -> str:
    """Return the values that `find_table` accepts, as text for messages."""
    quoted = [repr(name) for name in names if name is not None]
    return ", ".join([f"0 to {len(names) - 1}", *([f"or by name {quoted[0]}", *quoted[1:]] if quoted else [])])


def describe_table(table: int, names: Names) -> dict[str, Any]:
    """Return {"table": number}, and also "table_name" if the table is named."""
    name = names[table] if table < len(names) else None
    return {"table": table} if name is None else {"table": table, "table_name": name}


def find_mismatched_tables(stored: Names, names: Names) -> list[int]:
    """Return the numbers of tables whose stored name differs from `names`. Skips tables without a stored name."""
    padded_names = [*names, *[None] * len(stored)]
    return [index for index, name in enumerate(stored) if name is not None and name != padded_names[index]]


def merge_names(left: Names, right: Names) -> tuple[str | None, ...] | None:
    """Return each table's name, from `left` or `right`. Returns None if names conflict or occur twice."""
    names = tuple(a or b for a, b in zip_longest(left, right))
    named = [name for name in names if name is not None]
    return None if find_mismatched_tables(right, names) or len(set(named)) < len(named) else names


def are_table_names(value: Any, tables: int) -> bool:
    """True if `value` is a legal list of table names for this number of tables."""
    if type(value) is not list or len(value) != tables:
        return False
    named = [name for name in value if name is not None]
    return all(map(is_table_name, named)) and len(set(named)) == len(named)
