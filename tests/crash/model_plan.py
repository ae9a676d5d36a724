"""What a round of embeddings that are trained together does, drawn from its seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from support.stores import STORES

from .plan import CALLS, MOST, Kill

NAMES = "abc"
# how often a trainer does what; "freeze" is the close and the open of one member, "command" the shell on all, closed
WEIGHTS = {"step": 10, "save": 4, "save_all": 4, "background": 1, "load": 1, "load_all": 2, "checkpoint": 2}
WEIGHTS |= {"state": 2, "load_state": 2}
WEIGHTS |= {"restore": 1, "prune": 2, "prune_all": 1, "overwrite": 2, "reopen": 2, "command": 1}
INSIDE = {"step": 2, "save": 3, "save_all": 6, "background": 1, "load": 2, "load_all": 5, "checkpoint": 2, "restore": 2}
INSIDE |= {"state": 3, "load_state": 4}
INSIDE |= {"prune_all": 1, "overwrite": 2, "reopen": 2, "open": 5, "command": 2}


@dataclass(frozen=True)
class ModelSession:
    """One trainer: the seed of its operations, how many at most, the stores of its members, and its kill."""

    seed: int
    operations: int
    stores: list[str]
    kill: Kill


@dataclass(frozen=True)
class ModelRound:
    """Trainers one after the other, each killed, of as many members. frozen: the member that is never trained."""

    seed: int
    dims: list[int]
    frozen: str | None
    power: bool
    sessions: list[ModelSession]
    life = "for ever"
    types = ("float32", "float32")


def draw_model_round(seed: int) -> ModelRound:
    chance = random.Random(seed)
    members = chance.choice([2, 2, 3])
    return ModelRound(
        seed=seed,
        dims=[chance.choice([1, 3, 8]) for _ in range(members)],
        frozen=NAMES[members - 1] if chance.random() < 1 / 3 else None,
        power=chance.random() < 0.5,
        sessions=[_session(chance, members) for _ in range(chance.choice([1, 2, 2, 3]))],
    )


def _session(chance: random.Random, members: int) -> ModelSession:
    return ModelSession(
        seed=chance.randrange(1 << 32),
        operations=chance.randint(3, 14),
        stores=[chance.choice(STORES) for _ in range(members)],
        kill=_kill(chance),
    )


def _kill(chance: random.Random) -> Kill:
    if chance.random() < 0.25:
        return Kill(None, events=chance.randrange(30), wait=chance.uniform(0, 0.04))
    inside = chance.choices(list(INSIDE), list(INSIDE.values()))[0]
    call = chance.choice(["rename", "rename", *CALLS])
    number = round(MOST[call] ** chance.random())
    return Kill(inside, call=call, number=number, when=chance.choice(["before", "after"]))


def as_orders(plan: ModelRound, session: ModelSession, number: int) -> dict[str, Any]:
    """What a trainer is told of its round."""
    kill = session.kill
    return {
        "seed": session.seed,
        "operations": session.operations,
        "stores": session.stores,
        "dims": plan.dims,
        "frozen": plan.frozen,
        "power": plan.power,
        "number": number,
        "kill": {"inside": kill.inside, "call": kill.call, "number": kill.number, "when": kill.when},
    }
