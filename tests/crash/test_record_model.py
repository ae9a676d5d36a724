"""The rule of recovery holds in random histories, and the checker finds faults that are planted into it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tierbed.snapshots.store import recovery_rule as rule
from tierbed.snapshots.store.recovery_rule import EMPTY_ID, FOREVER, NO_ENTRY, Entry, Record, drop_lost_rows

from . import record_processes as processes
from .record_model import Checker, History, Violation
from .record_processes import Kill, Refused, Trainer

HISTORIES = 500  # also until a fault is found


def newest_or_none(spans: Mapping[str, Any], clock: int) -> tuple[int, Mapping[str, str]] | None:
    """The commit is only the last write's entries, if all have a snapshot."""
    last = {x: next((s.snapshot for s in store if s.last == FOREVER), "") for x, store in spans.items()}
    return (clock, last) if all(last.values()) else None


def any_moment(record: Record, at: Mapping[str, Entry], moment: Any) -> Record:
    return rule.make_next_record(record, at, {x: entry.snapshot or record.commit[x] for x, entry in at.items()})


def count_at_present(trainer: Trainer, store: str, snapshot: str, span: Any) -> None:
    trainer.spans[store].append(span)
    trainer.at[store] = Entry(snapshot, trainer.at[store].live_version)


def forget_at_close(trainer: Trainer, store: str, close: Callable[..., None] = Trainer.close) -> None:
    close(trainer, store)
    if store in trainer.at:  # others of its group are open
        trainer.at[store] = trainer.disk.record(trainer.group).entries[store]


def union_without_commits(records: Any, at: Mapping[str, Entry]) -> Record:
    empty = dict.fromkeys(at, EMPTY_ID)
    return replace(rule.merge_records(records, at), commit=empty, previous_commit=empty)


def choose_own(record: Record, folders: Mapping[str, Any]) -> dict[str, Entry]:
    chosen = {x: drop_lost_rows(record.entries[x], folder) for x, folder in folders.items()}
    return {x: Entry(record.commit[x]) if e == NO_ENTRY else e for x, e in chosen.items()}


def first_shard_only(entry: Entry, folder: Any) -> Entry:
    return drop_lost_rows(entry, folder._replace(live_versions=folder.live_versions[:1]))


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "commit: only the entries of the last write count": (processes, "find_newest_moment", newest_or_none),
    "commit: an incomplete set counts": (processes, "make_next_record", any_moment),
    "recovery: of each store alone": (processes, "choose_entries", choose_own),
    "prune: what the commit needs": (processes, "find_needed_ids", lambda record, x: {record.entries[x].snapshot}),
    "overwrite: exchange without a link": (Trainer, "retain_replaced", lambda trainer, store, old: None),
    "background: counts for the present rows": (Trainer, "count_snapshot", count_at_present),
    "load: a failure takes nothing back": (Trainer, "take_back", lambda trainer, at: None),
    "write: no clean marker is cleared, nor the live entry": (Trainer, "clear_before_write", lambda trainer, x: None),
    "close: a store that was not closed cleanly has its old entry": (Trainer, "close", forget_at_close),
    "ranks: the first shard decides": (rule, "drop_lost_rows", first_shard_only),
    "join: the old commits are forgotten": (processes, "merge_records", union_without_commits),
}


def test_the_rule_holds_in_random_histories() -> None:
    assert sum(History(seed).run() for seed in range(1, HISTORIES + 1)) > HISTORIES


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(Violation):  # noqa: PT012
        for seed in range(1, HISTORIES + 1):
            History(seed).run()


def kill(operations: list[tuple[Any, ...]], write: int) -> Checker | None:
    """Run the operations on stores a, b and c, and kill the last one before a write. None if it has fewer writes."""
    checker = Checker("abc", 1, random.Random(0))
    for operation in operations[:-1]:
        if operation == ("end",):
            checker.end(killed=False)
        else:
            checker.do(*operation)
    checker.disk.budget = checker.disk.writes + write
    try:
        checker.do(*operations[-1])
    except Kill:
        checker.end(killed=True)
        return checker
    return None


TOGETHER = [("open", "ab"), ("step", "ab"), ("save", "ab", "old"), ("step", "ab"), ("save", "ab", "all")]


def test_a_kill_in_a_load_beside_a_reopened_store_forgets_or_finishes_it() -> None:
    """Model seed 411: a closed and opened again, b loads an older snapshot alone."""
    load = ("load", {"b": "old-2b"})
    history = [*TOGETHER, ("step", "ab"), ("close", "a"), ("open", "a"), load]
    ends = [checker.current for write in range(9) if (checker := kill(history, write))]
    assert ends == [{"a": (1, 3), "b": (1, 3), "c": ()}]  # forgotten: b had no durable rows of the last step
    after = kill([*history, ("save", "b", "after")], 0)
    assert after
    assert after.current == {"a": (1, 3, 5), "b": (1,), "c": ()}  # finished: the record's one write has both
    history = [*TOGETHER, ("step", "ab"), ("close", "a"), ("close", "b"), ("open", "a"), ("open", "b"), load]
    ends = [checker.current for write in range(9) if (checker := kill(history, write))]
    assert ends[0] == {"a": (1, 3, 5), "b": (1, 3, 5), "c": ()}
    assert ends[1:] == [{"a": (1, 3, 5), "b": (1,), "c": ()}]  # finished: before the clean marker is cleared


@pytest.mark.parametrize("unsaved", [[], [("step", "c")]], ids=["clean", "written"])
def test_a_kill_at_each_write_of_a_join_leaves_each_group_whole(unsaved: list[tuple[Any, ...]]) -> None:
    parts = [*TOGETHER, ("close", "a"), ("close", "b"), ("end",), ("open", "c"), ("step", "c"), ("save", "c", "alone")]
    kills = [checker for write in range(20) if (checker := kill([*parts, *unsaved, ("open", "ab"), ("lock",)], write))]
    assert len(kills) == 8  # the union, two forwards, the end of the join, three MARKs, the old GROUP file
    assert [checker.current for checker in kills] == [{"a": (1, 3), "b": (1, 3), "c": (5,)}] * 8


def test_a_snapshot_that_was_removed_is_of_no_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice a save of a in the background ends when the snapshot of b, of the same moment, is gone."""
    of_one_store = [("background", "a", "slow"), ("save", "b", "once"), ("step", "ab"), ("save", "b", "after")]
    once_more = [("step", "ab"), *of_one_store, ("prune", "b"), ("finish", "a")]
    history = [*TOGETHER, *once_more, *once_more, ("step", "ab"), ("save", "a", "last")]
    checker = kill(history, 0)
    assert checker
    assert checker.current == {"a": (1, 3), "b": (1, 3), "c": ()}
    monkeypatch.setattr(Trainer, "forget_removed", lambda trainer: None)
    with pytest.raises(Refused, match="no moment"):
        kill(history, 0)
