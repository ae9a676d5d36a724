"""Model checker for the recovery of stores that train together: random histories, killed before any durable write.

    PYTHONPATH=tests python -m crash.record_model 20000

snapshots/store/recovery_rule.py has the rule, `record_processes` the processes that follow it. `Checker` remembers
every moment: the rows that all stores had side by side. A recovery has to find one of these, none older than the newest
one with a begin of a save or an end of a load that returned saves cover, and exactly the last one after a clean end.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from collections.abc import Collection

from tierbed.snapshots.store.recovery_rule import EMPTY_ID, FOREVER, Record, SnapshotIds

from .record_processes import Disk, Forward, Kill, Refused, Rows, Shards, Trainer

Backup = tuple[dict[str, str], Shards, Record | Forward]  # a folder: snapshots, live rows, MARK


class Violation(AssertionError):
    """The rule lost rows, mixed moments or served stale rows."""


class Checker:
    """Drives one history and compares it with every moment that existed. `log` has the operations."""

    def __init__(self, stores: str, ranks: int, draw: random.Random) -> None:
        self.stores, self.draw, self.disk = stores, draw, Disk(stores, ranks)
        self.ranks, self.count, self.trainer = ranks, 0, Trainer(self.disk, draw, 0)
        self.current: dict[str, Rows] = dict.fromkeys(stores, ())  # of closed stores, what an open finds
        self.moments: list[dict[str, Rows] | None] = [dict(self.current)]
        self.counted = {0}  # the moments that the trainer counts
        self.saved: dict[str, dict[str, int]] = {x: {EMPTY_ID: 0} for x in stores}  # id: the first moment it covers
        self.pending = dict[str, int]()  # the same of saves in the background
        self.changed = dict.fromkeys(stores, 0)  # the moment of the last change
        self.promised: dict[frozenset[str], int] = {}  # by group the newest moment that returned saves cover
        self.durable = dict.fromkeys(stores, True)  # nothing was written since the last save, load or close
        self.lost, self.log = set[str](), list[tuple[object, ...]]()
        self.backups: dict[str, Backup] = {}
        self.first = 0  # the moment at which the trainer began: no record has older ones that it completes
        self.before = 0, True  # the number of writes before the operation, and whether all rows were durable

    def do(self, operation: str, *details: object) -> None:
        """Note the operation, run it, and note the rows after it."""
        self.log.append((operation, *details))
        self.before = self.disk.writes, all(self.durable.values())
        getattr(self, operation)(*details)
        self.observe()

    def observe(self) -> None:
        trainer = self.trainer
        self.current.update(trainer.rows)
        if not trainer.broken | trainer.diverged and self.current != self.moments[-1]:
            self.moments.append(dict(self.current))

    def count_moment(self) -> None:
        """The trainer counts the present moment, unless the rows of some stores are of none."""
        if not self.trainer.broken | self.trainer.diverged:
            self.counted.add(len(self.moments) - 1)

    def require(self, holds: object, message: str) -> None:
        if not holds:
            raise Violation(message)

    def open(self, stores: str) -> None:
        self.trainer.open(stores)
        for x in stores:
            rows, right = self.trainer.rows[x], self.current[x]
            if rows != right:
                together = {y: self.current[y] for y in self.trainer.at} | {x: rows}
                goes_back = not self.durable[x] and self.is_moment(together)
                self.require(goes_back, f"open of {x}: {rows}, not {right}")
                self.changed[x] = len(self.moments)

    def is_moment(self, rows: dict[str, Rows]) -> bool:
        """Whether these stores had the rows side by side, and no save of all of them has returned since."""
        since = self.promised.get(frozenset(rows), 0)
        return any(m is not None and rows.items() <= m.items() for m in self.moments[since:])

    def lock(self) -> None:
        self.trainer.lock()

    def prune(self, store: str) -> None:
        self.trainer.prune(store)

    def step(self, stores: str, fails: bool = False, diverges: bool = False) -> None:
        self.count += 1
        self.durable.update(dict.fromkeys(stores, False))
        self.changed.update(dict.fromkeys(stores, len(self.moments)))
        self.trainer.step(stores, self.count, fails, diverges and self.ranks > 1)

    def save(self, stores: str, name: str) -> None:
        self.count += 1
        self.count_moment()
        self.trainer.save(stores, name, f"{name}-{self.count}")
        self.durable.update(dict.fromkeys(stores, True))
        self.promise({x: f"{name}-{self.count}{x}" for x in stores})

    def promise(self, snapshots: SnapshotIds) -> None:
        for x, snapshot in snapshots.items():
            self.saved[x].setdefault(snapshot, self.changed[x])
        group = frozenset(self.trainer.at)
        saved = {x: [s for s in self.saved[x].items() if self.trainer.exists(x, s[0])] for x in group}
        first = max(self.first, self.promised.get(group, 0))
        for i in sorted((i for i in self.counted if i >= first), reverse=True):
            moment, contents = self.moments[i], self.disk.contents
            if moment and all(any(first <= i and contents[s] == moment[x] for s, first in saved[x]) for x in group):
                self.promised[group] = i
                return

    def background(self, stores: str, name: str) -> None:
        self.count += 1
        self.count_moment()
        self.trainer.begin_background(stores, name, f"{name}-{self.count}")
        for x in stores:
            self.pending[x] = self.changed[x]

    def finish(self, store: str) -> None:
        snapshot = self.trainer.background[store][1]
        self.trainer.finish_background(store)
        self.saved[store][snapshot] = self.pending[store]
        self.promise({})

    def load(self, snapshots: dict[str, str], fails_in: str = "") -> None:
        self.durable.update(dict.fromkeys(snapshots, False))
        self.changed.update(dict.fromkeys(snapshots, len(self.moments)))
        self.moments.append({**self.current, **{x: self.disk.contents[s] for x, s in snapshots.items()}})
        if self.trainer.broken - set(snapshots) or self.trainer.diverged - set(snapshots):
            self.moments[-1] = None
        self.trainer.load(snapshots, fails_in)
        if fails_in:
            self.moments[-1] = None
        else:
            self.durable.update(dict.fromkeys(snapshots, True))
            self.count_moment()

    def close(self, store: str) -> None:
        if store in self.trainer.background:
            self.finish(store)
        self.current[store] = self.trainer.rows[store]
        self.trainer.close(store)
        self.durable[store] = store not in self.trainer.broken | self.trainer.diverged
        if not self.trainer.rows:  # the next open recovers
            self.settle(None if self.trainer.broken | self.trainer.diverged else dict(self.current))
            self.trainer.broken.clear()
            self.trainer.diverged.clear()

    def require_excuse(self, refused: Refused) -> None:
        excused = self.lost or self.trainer.broken | self.trainer.diverged
        self.require(excused, f"refused: {refused}")

    # between two trainers

    def back_up(self, store: str) -> None:
        disk = self.disk
        self.backups[store] = dict(disk.names[store]), list(disk.live[store]), disk.files[store]

    def restore_backup(self, store: str) -> None:
        """A user puts back an older copy of the folder. It may lose what saves promised, but not mix moments."""
        if store in self.backups:
            names, live, mark = self.backups[store]
            self.disk.names[store], self.disk.live[store], self.disk.files[store] = dict(names), list(live), mark
            self.accept_loss(store)
            self.check_pairs(self.current, list(self.stores))

    def delete_snapshot(self, store: str) -> None:
        if names := self.disk.names[store]:
            names.pop(self.draw.choice(sorted(names)))
            self.accept_loss(store)

    def accept_loss(self, store: str) -> None:
        self.lost.add(store)
        self.promised.clear()
        self.saved = {x: {} for x in self.stores}  # an entry may have named the one that is gone
        self.current = self.check(None)

    def end(self, killed: bool) -> None:
        """Compare what the next process will find with the moments, then begin with a new trainer."""
        trainer, self.disk.budget = self.trainer, FOREVER
        clean = not killed and not trainer.broken | trainer.diverged
        untouched = killed and self.before == (self.disk.writes, True)
        self.settle(dict(self.current) if clean or untouched else None)
        self.trainer = Trainer(self.disk, self.draw, trainer.run + 1)

    def settle(self, right: dict[str, Rows] | None) -> None:
        """What the next open finds is what counts from here on."""
        self.current, self.durable = self.check(right), dict.fromkeys(self.stores, True)
        self.moments.append(dict(self.current))
        self.first = len(self.moments) - 1
        self.counted.add(self.first)

    def check(self, right: dict[str, Rows] | None) -> dict[str, Rows]:
        groups: dict[str, list[str]] = {}
        for x in self.stores:
            groups.setdefault(self.disk.leads_to(x), []).append(x)
        rows: dict[str, Rows] = {}
        for key in groups:
            for x, entry in self.disk.target(key).items():
                rows[x] = self.disk.rows(x, entry)
        self.require(right is None or rows == right, f"left with {right}, found {rows}")
        for group, first in self.promised.items():
            if any(self.lost.intersection(members) for members in groups.values() if group.intersection(members)):
                continue  # all go back further if one has to
            kept = any(m and all(m[x] == rows[x] for x in group) for m in self.moments[first:])
            self.require(kept, f"lost: {self.moments[first]} was saved, found {rows}")
        for members in groups.values():
            if not any(m and all(m[x] == rows[x] for x in members) for m in self.moments):
                self.check_pairs(rows, members)
        return rows

    def check_pairs(self, rows: dict[str, Rows], members: list[str]) -> None:
        """Groups that were just joined may meet at moments of their own, stores with joint writes may not."""
        for x, y in itertools.combinations(members, 2):
            past = [m for m in self.moments if m]
            joint = {w for m in past for w in m[x]} & {w for m in past for w in m[y]}
            apart = joint & (set(rows[x]) ^ set(rows[y]))
            side_by_side = any(m[x] == rows[x] and m[y] == rows[y] for m in past)
            self.require(not apart or side_by_side, f"torn: {x} {rows[x]}, {y} {rows[y]}")


# ---- random histories ----------------------------------------------------------------------------------------------

OPERATIONS = {"step": 6, "fail": 0.4, "diverge": 0.3, "save": 3, "background": 1, "finish": 2, "load": 1.5}
OPERATIONS |= {"fail_load": 0.5, "prune": 1.5, "close": 1, "open": 1}


class History:
    """Draws one history from its seed and runs it."""

    def __init__(self, seed: int) -> None:
        self.draw, self.kills = random.Random(seed), 0
        stores = "abc"[: self.draw.choice([2, 2, 3])]
        self.checker = Checker(stores, self.draw.choice([1, 1, 2]), self.draw)

    def some(self, stores: Collection[str]) -> str:
        few = self.draw.sample(sorted(stores), self.draw.randint(1, len(stores)))
        return "".join(sorted(stores if self.draw.random() < 0.5 else few))

    def run(self) -> int:
        """Returns the number of kills."""
        checker, draw = self.checker, self.draw
        for _ in range(draw.randint(2, 6)):
            killed = True
            checker.disk.budget = FOREVER if draw.random() < 0.3 else checker.disk.writes + draw.randint(0, 25)
            try:
                self.train()
                killed = False
            except Kill:
                self.kills += 1
            except Refused as refused:
                checker.require_excuse(refused)
            checker.log.append(("kill" if killed else "end",))
            try:
                checker.end(killed)
                self.between()
            except Refused as refused:
                checker.require(checker.lost, f"refused, though no folder was touched: {refused}")
                break
        return self.kills

    def train(self) -> None:
        checker, draw, trainer = self.checker, self.draw, self.checker.trainer
        checker.do("open", self.some(checker.stores))
        for operation in draw.choices(list(OPERATIONS), list(OPERATIONS.values()), k=draw.randint(1, 14)):
            self.draw_operation(operation, sorted(trainer.rows.keys() - trainer.broken - trainer.diverged))
        for x in sorted(trainer.rows):
            checker.do("close", x)

    def draw_operation(self, operation: str, sound: list[str]) -> None:
        """Run an operation on some open stores, if there are any for it."""
        checker, draw, trainer = self.checker, self.draw, self.checker.trainer
        closed = set(checker.stores) - trainer.rows.keys() - trainer.broken
        name = draw.choice(["daily", "weekly", f"once-{checker.count}"])
        if operation in ("step", "fail", "diverge") and sound:
            checker.do("step", self.some(sound), operation == "fail", operation == "diverge")
        elif operation in ("save", "background") and (idle := set(sound) - trainer.background.keys()):
            checker.do(operation, self.some(idle), name)
        elif operation == "finish" and trainer.background:
            checker.do("finish", draw.choice(sorted(trainer.background)))
        elif operation in ("load", "fail_load") and trainer.rows:
            for x in sorted(trainer.background):
                checker.do("finish", x)
            choice = {x: [EMPTY_ID, *checker.disk.snapshots(x), *checker.disk.snapshots(x)] for x in trainer.rows}
            snapshots = {x: draw.choice(choice[x]) for x in self.some(trainer.rows)}
            checker.do("load", snapshots, draw.choice(sorted(snapshots)) if operation == "fail_load" else "")
        elif operation in ("prune", "close") and trainer.rows:
            checker.do(operation, draw.choice(sorted(trainer.rows)))
        elif operation == "open" and closed:
            checker.do(operation, draw.choice(sorted(closed)))

    def between(self) -> None:
        """What users do while no trainer runs."""
        checker, draw = self.checker, self.draw
        x = draw.choice(checker.stores)
        if draw.random() < 0.2:
            checker.do("back_up", x)
        if draw.random() < 0.08:
            checker.do(draw.choice(["restore_backup", "delete_snapshot"]), x)


def main(histories: int) -> None:
    operations = Counter[str]()
    for seed in range(1, histories + 1):
        history = History(seed)
        try:
            history.run()
        except Violation:
            print(f"seed {seed}:", *history.checker.log, sep="\n  ")
            raise
        operations.update(str(entry[0]) for entry in history.checker.log)
    print(f"{histories} histories, none wrong; {dict(operations.most_common())}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
