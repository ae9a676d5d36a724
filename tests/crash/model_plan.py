"""What a round of embeddings that are trained together does, drawn from its seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from support.stores import ONE_SET_MB, STORES

from .plan import CALLS, MAX_CALLS, Kill

NAMES = "abc"
# how often a trainer does what: "over" saves all over a name, "part" trains some while the others are closed, "command"
# is the shell on all, closed, and "live" the shell on all that are open
WEIGHTS = {"step": 10, "part": 2, "save": 6, "save_all": 4, "background": 2, "load": 1, "load_all": 2, "checkpoint": 2}
WEIGHTS |= {"state": 6, "load_state": 3, "over": 2, "live": 1}
WEIGHTS |= {"restore": 1, "prune": 4, "prune_all": 1, "overwrite": 2, "reopen": 2, "command": 2}
KINDS: dict[str, dict[str, float]] = {  # of rounds: what trainers of one do more or less often
    "any": {},
    "apart": {"save": 12, "prune": 8, "overwrite": 3, "save_all": 1, "over": 0.5, "background": 0.5, "checkpoint": 0.5},
    "states": {"state": 10, "load_state": 4, "reopen": 5, "save_all": 1, "save": 1},
}
INSIDE = {"step": 3, "save": 3, "save_all": 6, "background": 2, "load": 2, "load_all": 5, "checkpoint": 2, "restore": 2}
INSIDE |= {"state": 3, "load_state": 4, "over": 5, "live": 2}
INSIDE |= {"prune_all": 1, "overwrite": 2, "reopen": 2, "open": 3, "command": 3}


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
    sessions = [_session(chance, members)]
    for _ in range(chance.choice([0, 1, 1, 2])):
        sessions.append(_session(chance, members, recovers=not sessions[-1].checked))
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


def _session(chance: random.Random, members: int, recovers: bool = False) -> ModelSession:
    return ModelSession(
        seed=chance.randrange(1 << 32),
        operations=chance.randint(3, 14),
        stores=[chance.choice(STORES) for _ in range(members)],
        budgets=[chance.choice([1, 1, 50]) * ONE_SET_MB for _ in range(members)],
        kill=_kill(chance, recovers),
        checked=chance.random() < 0.5,
    )


def _kill(chance: random.Random, recovers: bool) -> Kill:
    if chance.random() < 0.25:
        return Kill(None, events=chance.randrange(30), wait=chance.uniform(0, 0.04))
    inside = chance.choices(list(INSIDE), list(INSIDE.values()))[0]
    if recovers and chance.random() < 0.5:
        inside = "open"
    call = chance.choice(["rename", "rename", *CALLS])
    number = round(MAX_CALLS[call] ** chance.random())
    return Kill(inside, call=call, number=number, when=chance.choice(["before", "after"]))
