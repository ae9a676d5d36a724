"""`tierbed snapshot diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.errors import TierbedError
from .arguments import Json, Name, Store, open_snapshot
from .output import PROBLEM, USAGE, fail, print_fields, print_json, print_table, progress, text

if TYPE_CHECKING:
    from ..snapshots.inspection.comparison import Comparison


def diff(
    store: Store,
    before: Name,
    after: Name,
    rows: Annotated[int, typer.Option(help="Show up to this many rows that differ.", min=0)] = 10,
    as_json: Json = False,
) -> None:
    """Show how a snapshot differs from an earlier one. Exit code: 0 if equal, 1 if different, 2 for an error.

    Example: tierbed snapshot diff store/users monday tuesday
    """
    from ..snapshots.inspection.comparison import compare

    try:
        old, new = open_snapshot(store, before), open_snapshot(store, after)
        with progress("comparing", old.manifest.rows + new.manifest.rows) as advance:
            found = compare(old, new, advance, first=rows)
    except TierbedError as error:
        fail(str(error), USAGE, as_json)
    if as_json:
        print_json({"before": before, "after": after, **_plain(found)})
    else:
        _print(found)
    if found.differs:
        raise typer.Exit(PROBLEM)


def _plain(found: Comparison) -> dict[str, Any]:
    from ..engine.options.table_names import with_table_name

    counts = {sort: dict(sorted(tables.items())) for sort, tables in found.counts.items()}
    named = {"table_names": list(found.names)} if any(found.names) else {}
    return {
        "differs": found.differs,
        **{sort: sum(tables.values()) for sort, tables in counts.items()},
        "same": found.same,
        "by_table": counts,
        **named,
        "largest": found.largest,
        "fields": {name: list(pair) for name, pair in found.fields.items()},
        "rows": [
            {
                "sort": row.sort,
                **with_table_name(row.table, found.names),
                "key": row.key,
                "largest": row.largest,
            }
            for row in found.first
        ],
    }


def _print(found: Comparison) -> None:
    from ..engine.options.table_names import label_of

    if not found.differs:
        print(f"the same: {found.same:,} rows")
        return
    counters = found.counts.values()
    tables = sorted(set().union(*counters))
    lines = [["table", *found.counts]]
    lines += [[label_of(table, found.names), *(f"{counter[table]:,}" for counter in counters)] for table in tables]
    sums = [counter.total() for counter in counters]
    print_table([*lines, ["all", *(f"{count:,}" for count in sums)]], right={1, 2, 3})
    print(f"{found.same:,} rows are the same")
    if found.counts["changed"]:
        print("greatest absolute difference: " + ", ".join(f"{n} {v:.6g}" for n, v in found.largest.items()))
    if found.fields:
        print()
        print_fields({name: f"{text(old)} -> {text(new)}" for name, (old, new) in found.fields.items()})
    if found.first:
        print()
        apart = ["" if row.largest is None else f"{row.largest:.6g}" for row in found.first]
        labels = [label_of(row.table, found.names) for row in found.first]
        shown = [[r.sort, of, str(r.key), far] for r, of, far in zip(found.first, labels, apart, strict=True)]
        print_table([["row", "table", "key", "difference"], *shown], right={1, 2, 3})
        if sum(sums) > len(found.first):
            print(f"and {sum(sums) - len(found.first):,} more")
