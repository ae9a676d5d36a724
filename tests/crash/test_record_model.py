"""The rule of recovery holds in random histories, and the checker finds every fault that is planted into it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tierbed.snapshots.store import recovery_rule as rule
from tierbed.snapshots.store.recovery_rule import EMPTY, FOREVER, NOTHING, Entry, Record, next_record, union, usable

from . import record_processes as processes
from .record_model import Checker, History, Violation
from .record_processes import Forward, Kill, Reader, Refused, Trainer

HISTORIES = 2500
MAX_HISTORIES = 3000  # until a fault is found; the slowest takes 598


def newest_or_none(spans: Mapping[str, Any], clock: int) -> tuple[int, Mapping[str, str]] | None:
    """The commit is only the last write's entries, if all have a snapshot."""
    last = {x: next((s.snapshot for s in store if s.last == FOREVER), "") for x, store in spans.items()}
    return (clock, last) if all(last.values()) else None


def copy_is_member(trainer: Trainer, path: str) -> None:
    key = trainer.disk.leads_to(path)
    record = trainer.disk.record(key)
    if path not in record.now:
        trainer.disk.files[key] = replace(record, now={**record.now, path[0]: NOTHING})
        alone = Entry(EMPTY)
        trainer.disk.files[path] = Record({path: alone}, {path: EMPTY}, {path: EMPTY})


def lenient_members(disk: Any, key: str) -> list[str]:
    return [x for x in disk.record(key).now if disk.leads_to(x) == key and x not in disk.absent]


def members_that_lead_here(disk: Any, key: str) -> list[str]:
    record = disk.record(key)
    if disk.absent & set(record.now):
        raise Refused("a folder is missing")
    return [x for x in record.now if disk.leads_to(x) == key]


def count_at_present(trainer: Trainer, store: str, snapshot: str, span: Any) -> None:
    trainer.spans[store].append(span)
    trainer.at[store] = Entry(snapshot, trainer.at[store].live)


def count_newer_than_last_write(trainer: Trainer, store: str, snapshot: str, span: Any) -> None:
    if span.last == FOREVER:
        trainer.spans[store].append(span)
        trainer.at[store] = Entry(snapshot, trainer.at[store].live)


def both_clears_left_out(patch: Any) -> None:
    patch.setattr(Trainer, "clear_markers", lambda trainer, store: None)
    patch.setattr(Trainer, "clear_live_entry", lambda trainer, store: None)


def forget_at_close(trainer: Trainer, store: str, close: Callable[..., None] = Trainer.close) -> None:
    close(trainer, store)
    trainer.at[store] = trainer.disk.record(trainer.group).now[store]


def forward_first(trainer: Trainer, keys: list[str], join: Callable[..., None] = Trainer.join) -> None:
    """The old records lead to the new one before it is written."""
    key = f"g{trainer.run}-{trainer.clock}-{trainer.disk.writes}"
    records = {old: trainer.disk.files[old] for old in keys}
    for old in keys:
        trainer.disk.put(old, Forward(key))
    trainer.disk.files.update(records)
    trainer.disk.writes -= len(keys)
    join(trainer, keys)


def union_without_commits(records: Any, at: Mapping[str, Entry]) -> Record:
    joined = union(records, at)
    return replace(joined, commit=dict.fromkeys(at, EMPTY), before=dict.fromkeys(at, EMPTY))


def choose_own(record: Record, folders: Mapping[str, Any]) -> dict[str, Entry]:
    chosen = {x: usable(record.now[x], folder) for x, folder in folders.items()}
    return {x: Entry(record.commit[x]) if e == NOTHING else e for x, e in chosen.items()}


def first_shard_only(entry: Entry, folder: Any) -> Entry:
    return usable(entry, folder._replace(live=folder.live[:1]))


def patch(owner: Any, name: str, value: object) -> Callable[[Any], None]:
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value)


def read_own_entry(reader: Reader, store: str, lock_is_free: bool, read: Callable[..., None] = Reader.open) -> None:
    own = usable(reader.disk.record(reader.disk.leads_to(store)).now[store], reader.disk.folder(store))
    read(reader, store, own == NOTHING and lock_is_free)


def exchange_only(trainer: Trainer, store: str, old: str) -> None: ...


FAULTS: dict[str, Callable[[Any], None]] = {
    "commit: only the entries of the last write count": patch(processes, "newest_moment", newest_or_none),
    "commit: an incomplete set counts": patch(
        processes,
        "next_record",
        lambda record, at, moment: next_record(record, at, {x: e.snapshot or record.commit[x] for x, e in at.items()}),
    ),
    "recovery: of each store alone": patch(processes, "choose", choose_own),
    "prune: what the commit needs": patch(processes, "needed", lambda record, x: {record.now[x].snapshot}),
    "overwrite: exchange without a link": patch(Trainer, "retain_replaced", exchange_only),
    "background: counts for the present rows": patch(Trainer, "count_snapshot", count_at_present),
    "background: older than the last write is dropped": patch(Trainer, "count_snapshot", count_newer_than_last_write),
    "background: its moment is that of the last save before it": patch(
        Trainer, "capture", lambda trainer, store: trainer.noted.discard(store)
    ),
    "load: a failure takes nothing back": patch(Trainer, "take_back", lambda trainer, at: None),
    "write: no clean marker and no live entry is cleared": both_clears_left_out,
    "close: a store that was not closed cleanly has its old entry": patch(Trainer, "close", forget_at_close),
    "reader: trains what it read": patch(Trainer, "is_current", lambda trainer, store, entry: True),
    "reader: opens its own entry after a kill": patch(Reader, "open", read_own_entry),
    "ranks: the first shard decides": patch(rule, "usable", first_shard_only),
    "folder: a missing one is no member": patch(processes.Disk, "members", lenient_members),
    "folder: a copy is the member": patch(Trainer, "separate_copy", copy_is_member),
    "join: forwards go first": patch(Trainer, "join", forward_first),
    "join: the old commits are forgotten": patch(processes, "union", union_without_commits),
}


def test_the_rule_holds_in_random_histories() -> None:
    assert sum(History(seed).run() for seed in range(1, HISTORIES + 1)) > HISTORIES


def histories_until_found() -> int:
    for seed in range(1, MAX_HISTORIES + 1):
        try:
            History(seed).run()
        except Violation:
            return seed
    return 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    FAULTS[fault](monkeypatch)
    assert histories_until_found()


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


def test_a_folder_from_before_the_join_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def restore() -> None:
        checker = Checker("ab", 1, random.Random(0))
        checker.back_up("b")
        for operation in [*TOGETHER, ("close", "a"), ("close", "b")]:
            checker.do(*operation)
        checker.end(killed=False)
        checker.restore_backup("b")

    with pytest.raises(Refused, match="from before"):
        restore()
    monkeypatch.setattr(processes.Disk, "members", members_that_lead_here)
    with pytest.raises(Violation, match="torn"):
        restore()
