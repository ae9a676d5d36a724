"""What a round does, drawn from its seed alone: stores, sizes, operations, and where each of its trainers is killed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from support.stores import ONE_SET_MB, STORES

from .history import LIVES, TYPES, Types

# how often a trainer does what; "reopen" opens with other options, "command" runs the command line while it is closed,
# "short" opens it where the disk is full or descriptors are few
WEIGHTS = {"steps": 10, "save": 6, "background": 3, "load": 3, "prune": 2, "compact": 1, "reopen": 2, "fresh": 0.3}
WEIGHTS |= {"command": 2, "short": 1}
RANK_WEIGHTS = {"steps": 10, "save": 6, "background": 2, "load": 3, "prune": 2, "reopen": 3, "fresh": 0.3, "command": 2}
CHAINS = {"save": 20, "prune": 3, "load": 0.3, "background": 0.3, "reopen": 0.5, "command": 0.5}  # with chains
# what a kill at a named point is inside of
INSIDE = {"step": 1, "save": 6, "background": 3, "load": 3, "prune": 2, "merge": 1, "compact": 1, "close": 2, "open": 2}
RANK_INSIDE = {"step": 2, "save": 6, "background": 2, "load": 4, "prune": 1, "close": 3, "open": 4}
# "forget" removes old snapshots of the trainer
SERVING_WEIGHTS = {"publish": 12, "rollback": 2, "release": 3, "prune": 2, "load": 1, "forget": 1}
SERVING_INSIDE = {"publish": 10, "rollback": 1, "release": 1, "prune": 2}
RANK_LIVES = ["forever", "ttl"]  # which rows an evicting table has depends on the number of ranks
# calls that it may be before or after, and how many of them an operation has at most
MAX_CALLS = {"any": 400, "open": 70, "write": 200, "sync": 70, "rename": 4, "mkdir": 3, "unlink": 80, "link": 4}
CALLS = ["any", "open", "write", "sync", "rename", "mkdir", "unlink"]
SMALL = {"write_buffer_size": 1 << 16, "min_write_buffer_number_to_merge": 1, "max_write_buffer_number": 2}


@dataclass(frozen=True)
class Kill:
    """SIGKILL after that many `events` and a `wait` in s; or, with `inside`, at a call that changes files.

    That is the `number`th `call` since an operation `inside` began, before the call, after it, or with half of it done.
    """

    inside: str | None
    events: int = 0
    wait: float = 0.0
    call: str = "any"
    number: int = 0
    when: str = "before"

    def __str__(self) -> str:
        if self.inside is None:
            return f"after {self.events} events and {1000 * self.wait:.1f} ms"
        return f"inside {self.inside}, {self.when} its {self.call} {self.number}"


@dataclass(frozen=True)
class Session:
    """One trainer: the seed of its operations, how many at most, how it opens the store, and its kill.

    has_chains: whether it saves mostly incremental snapshots, and prunes fold these.
    Of `ranks` each has a store, and the `victim` is killed. all_die: the others are as soon as it is; else they find
    out.
    """

    seed: int
    operations: int
    store: Any
    ahead: int
    kill: Kill
    has_chains: bool = False
    ranks: int = 1
    victim: int = 0
    all_die: bool = True


@dataclass(frozen=True)
class Round:
    """Trainers one after the other in one folder, each killed. Checks open it too, by these options, where not None."""

    seed: int
    keys: int
    life: str
    power: bool  # whether the power is cut at each kill
    sessions: list[Session]
    checks: list[Any]
    types: Types


def draw_round(seed: int) -> Round:
    chance = random.Random(seed)
    sessions = [_session(chance, INSIDE, draw_store) for _ in range(chance.choice([1, 1, 2, 3]))]
    return Round(
        seed=seed,
        keys=chance.choice([50, 150, 400]),
        life=chance.choice(["forever", *LIVES]),
        power=chance.random() < 0.5,
        sessions=sessions,
        checks=[draw_store(chance) if number % 2 == 0 else None for number in reversed(range(len(sessions)))],
        types=chance.choice(TYPES),
    )


def draw_rank_round(seed: int, ranks: int) -> Round:
    """A round that begins with that many ranks."""
    chance = random.Random(seed)
    power = chance.random() < 0.5
    numbers = [ranks] + [chance.choice([ranks, ranks, 1, 2, 3]) for _ in range(chance.choice([0, 0, 1, 2]))]
    checked = [number % 2 == 0 for number in reversed(range(len(numbers)))]
    return Round(
        seed=seed,
        keys=chance.choice([50, 150, 400]),
        life=chance.choice(RANK_LIVES),
        power=power,
        sessions=[_rank_session(chance, number, power) for number in numbers],
        checks=[draw_stores(chance, chance.choice([ranks, ranks, 1, 2, 3])) if check else None for check in checked],
        types=chance.choice(TYPES),
    )


def draw_serving_round(seed: int) -> Round:
    """checks: whether the check after a trainer publishes. Only then, the power may be cut before."""
    chance = random.Random(seed)
    sessions = [
        Session(
            seed=chance.randrange(1 << 32),
            operations=chance.randint(3, 16),
            store={"store": chance.choice(["device", "host"])},
            ahead=0,
            kill=draw_kill(chance, SERVING_INSIDE),
        )
        for _ in range(chance.choice([1, 2, 2, 3]))
    ]
    return Round(
        seed=seed,
        keys=chance.choice([50, 150, 400]),
        life=chance.choice([*LIVES]),
        power=chance.random() < 0.5,
        sessions=sessions,
        checks=[*(chance.random() < 0.5 for _ in sessions[1:]), True],
        types=chance.choice(TYPES),
    )


def _session(chance: random.Random, inside: Mapping[str, float], store: Any) -> Session:
    has_chains = chance.random() < 0.3
    return Session(
        seed=chance.randrange(1 << 32),
        operations=chance.randint(12, 40) if has_chains else chance.randint(4, 16),
        store=store(chance),
        ahead=chance.choice([0, 0, 1, 3]),
        kill=draw_kill(chance, {"prune": 1} if has_chains else inside),
        has_chains=has_chains,
    )


def _rank_session(chance: random.Random, ranks: int, power: bool) -> Session:
    session = _session(chance, RANK_INSIDE, lambda chance: draw_stores(chance, ranks))
    return replace(session, ranks=ranks, victim=chance.randrange(ranks), all_die=power or chance.random() < 0.5)


def draw_kill(chance: random.Random, weights: Mapping[str, float]) -> Kill:
    """A kill at an instant, or inside of an operation of `weights`."""
    if chance.random() < 0.3:
        return Kill(None, events=chance.randrange(24), wait=chance.uniform(0, 0.04))
    inside = chance.choices(list(weights), list(weights.values()))[0]
    is_long = inside in ("save", "background", "load", "close", "prune", "merge", "publish")
    call = chance.choice(CALLS if is_long else ["any", "write"])
    number = round(MAX_CALLS[call] ** chance.random())  # the first calls of an operation differ most
    when = chance.choice(["before", "after", "torn"] if call in ("any", "write") else ["before", "after"])
    return Kill(inside, call=call, number=number, when=when)


def draw_stores(chance: random.Random, ranks: int) -> list[dict[str, Any]]:
    return [draw_store(chance) for _ in range(ranks)]


def draw_store(chance: random.Random) -> dict[str, Any]:
    """Keyword arguments of `History.embedding`."""
    store = chance.choice(STORES)
    if store in ("device", "host"):
        return {"store": store}
    made: dict[str, Any] = {"store": store, "budget_mb": chance.choice([1, 1, 50]) * ONE_SET_MB}
    made["changed_keys_mb"] = chance.choice([256, 256, 0.001, 0])  # 0.001: of some tens of rows
    if store in ("ssd", "ssd_host"):
        made |= {"shards": chance.choice([None, 1, 2, 7]), "io_threads": chance.choice([1, 2])}
        made["index_mb"] = chance.choice([None, None, 1])
        made |= {"rocksdb_options": SMALL} if chance.random() < 0.5 else {}
    return made


NAMES = "abc"
# how often a trainer does what: "over" saves all over a name, "part" trains some while the others are closed, "command"
# is the shell on all, closed, and "live" the shell on all that are open
MODEL_WEIGHTS = {"step": 10, "part": 2, "save": 6, "save_all": 4, "background": 2, "load": 1, "load_all": 2}
MODEL_WEIGHTS |= {"checkpoint": 2, "state": 6, "load_state": 3, "over": 2, "live": 1}
MODEL_WEIGHTS |= {"restore": 1, "prune": 4, "prune_all": 1, "overwrite": 2, "reopen": 2, "command": 2}
KINDS: dict[str, dict[str, float]] = {  # of rounds: what trainers of one do more or less often
    "any": {},
    "apart": {"save": 12, "prune": 8, "overwrite": 3, "save_all": 1, "over": 0.5, "background": 0.5, "checkpoint": 0.5},
    "states": {"state": 10, "load_state": 4, "reopen": 5, "save_all": 1, "save": 1},
}
MODEL_INSIDE = {"step": 3, "save": 3, "save_all": 6, "background": 2, "load": 2, "load_all": 5, "checkpoint": 2}
MODEL_INSIDE |= {"restore": 2, "state": 3, "load_state": 4, "over": 5, "live": 2}
MODEL_INSIDE |= {"prune_all": 1, "overwrite": 2, "reopen": 2, "open": 3, "command": 3}


@dataclass(frozen=True)
class ModelSession:
    """One trainer: the seed of its operations, how many at most, stores and budgets of its members, and its kill.

    checked: whether the rows that it left are read before the next trainer begins, else that one recovers them.
    """

    seed: int
    operations: int
    stores: list[str]
    budgets: list[float]
    kill: Kill
    checked: bool


@dataclass(frozen=True)
class ModelRound:
    """Trainers one after the other, each killed, of as many members as `dims`.

    kind: of `KINDS`. frozen: the member that is not trained, from the trainer `frozen_from` on. capacity: whether rows
    have a limit. apart: whether snapshots are in another folder. states: how many are kept, True for all.
    """

    seed: int
    kind: str
    dims: list[int]
    frozen: str | None
    frozen_from: int
    capacity: bool
    apart: bool
    states: int
    power: bool
    sessions: list[ModelSession]


def draw_model_round(seed: int) -> ModelRound:
    chance = random.Random(seed)
    members = chance.choice([2, 2, 3])
    power = chance.random() < 0.5
    sessions = [_model_session(chance, members)]
    for _ in range(chance.choice([0, 1, 1, 2])):
        sessions.append(_model_session(chance, members, recovers=not sessions[-1].checked))
    return ModelRound(
        seed=seed,
        kind=chance.choice(list(KINDS)),
        dims=[chance.choice([1, 3, 8]) for _ in range(members)],
        frozen=NAMES[members - 1] if chance.random() < 1 / 3 else None,
        frozen_from=chance.choice([0, 1]),
        capacity=chance.random() < 0.3,
        apart=not power and chance.random() < 0.6,  # a trace of calls knows no links
        states=chance.choice([True, True, 1, 2]),
        power=power,
        sessions=sessions,
    )


def _model_session(chance: random.Random, members: int, recovers: bool = False) -> ModelSession:
    return ModelSession(
        seed=chance.randrange(1 << 32),
        operations=chance.randint(3, 14),
        stores=[chance.choice(STORES) for _ in range(members)],
        budgets=[chance.choice([1, 1, 50]) * ONE_SET_MB for _ in range(members)],
        kill=_model_kill(chance, recovers),
        checked=chance.random() < 0.5,
    )


def _model_kill(chance: random.Random, recovers: bool) -> Kill:
    if chance.random() < 0.25:
        return Kill(None, events=chance.randrange(30), wait=chance.uniform(0, 0.04))
    inside = chance.choices(list(MODEL_INSIDE), list(MODEL_INSIDE.values()))[0]
    if recovers and chance.random() < 0.5:
        inside = "open"
    call = chance.choice(["rename", "rename", *CALLS])
    number = round(MAX_CALLS[call] ** chance.random())
    return Kill(inside, call=call, number=number, when=chance.choice(["before", "after"]))
