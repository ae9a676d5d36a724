"""`tierbed snapshot diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.errors import TierbedError
from .arguments import Json, Name, Store, open_snapshot
from .output import EXIT_PROBLEM, EXIT_USAGE, escape, fail, print_fields, print_json, print_table, show_progress

if TYPE_CHECKING:
    from ..snapshots.inspection.comparison import Comparison


def diff(
    store: Store,
    before: Name,
    after: Name,
    rows: Annotated[int, typer.Option(help="Maximum number of differing rows to show.", min=0)] = 10,
    as_json: Json = False,
) -> None:
    """Show the differences between two snapshots. Exit code: 0 if equal, 1 if different, 2 for an error.

    Example: tierbed snapshot diff store/users monday tuesday
    """
    from ..snapshots.inspection.comparison import compare

    try:
        old_snapshot, new_snapshot = open_snapshot(store, before), open_snapshot(store, after)
        with show_progress("comparing", old_snapshot.manifest.rows + new_snapshot.manifest.rows) as advance:
            comparison = compare(old_snapshot, new_snapshot, advance, max_diffs=rows)
    except TierbedError as error:
        fail(str(error), EXIT_USAGE, as_json)
    if as_json:
        print_json({"before": before, "after": after, **_to_plain(comparison)})
    else:
        _print_comparison(comparison)
    if comparison.has_differences:
        raise typer.Exit(EXIT_PROBLEM)


def _to_plain(comparison: Comparison) -> dict[str, Any]:
    from ..engine.options.table_names import describe_table

    counts = {kind: dict(sorted(tables.items())) for kind, tables in comparison.counts.items()}
    return {
        "differs": comparison.has_differences,
        **{kind: sum(tables.values()) for kind, tables in counts.items()},
        "same": comparison.num_equal,
        "by_table": counts,
        **({"table_names": list(comparison.names)} if any(comparison.names) else {}),
        "largest": comparison.column_diffs,
        "fields": {name: list(pair) for name, pair in comparison.fields.items()},
        "rows": [
            {"sort": row.kind, **describe_table(row.table, comparison.names), "key": row.key, "largest": row.difference}
            for row in comparison.first_diffs
        ],
    }


def _print_comparison(comparison: Comparison) -> None:
    from ..engine.options.table_names import label_table

    if not comparison.has_differences:
        print(f"the same: {comparison.num_equal:,} rows")
        return
    counters = comparison.counts.values()
    tables = sorted(set().union(*counters))
    lines = [["table", *comparison.counts]]
    for table in tables:
        lines.append([label_table(table, comparison.names), *(f"{counter[table]:,}" for counter in counters)])
    sums = [counter.total() for counter in counters]
    print_table([*lines, ["all", *(f"{count:,}" for count in sums)]], right_columns={1, 2, 3})
    print(f"{comparison.num_equal:,} rows are the same")
    if comparison.counts["changed"]:
        print("greatest absolute difference: " + ", ".join(f"{n} {v:.6g}" for n, v in comparison.column_diffs.items()))
    if comparison.fields:
        print()
        print_fields({name: f"{escape(old)} -> {escape(new)}" for name, (old, new) in comparison.fields.items()})
    if comparison.first_diffs:
        print()
        lines = [["row", "table", "key", "difference"]]
        for row in comparison.first_diffs:
            difference = "" if row.difference is None else f"{row.difference:.6g}"
            lines.append([row.kind, label_table(row.table, comparison.names), str(row.key), difference])
        print_table(lines, right_columns={1, 2, 3})
        if sum(sums) > len(comparison.first_diffs):
            print(f"and {sum(sums) - len(comparison.first_diffs):,} more")
