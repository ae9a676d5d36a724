"""What a round of ranks does, drawn from its seed: how many ranks, their stores, and which of them are killed where."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from .history import TYPES, Types
from .plan import Kill, draw_kill, draw_store

WEIGHTS = {"steps": 10, "save": 6, "background": 2, "load": 3, "prune": 2, "reopen": 3, "fresh": 0.3, "command": 2}
INSIDE = {"step": 2, "save": 6, "background": 2, "load": 4, "prune": 1, "close": 3, "open": 4}
LIVES = ["forever", "ttl"]  # which rows an evicting table has depends on the number of ranks


@dataclass(frozen=True)
class RankSession:
    """So many ranks: the seed of their operations, how many at most, their stores, and a kill.

    victim: the rank that the plan kills. all_die: whether the others are killed as soon as it is; else they find out.
    """

    seed: int
    ranks: int
    operations: int
    stores: list[dict[str, Any]]
    ahead: int
    kill: Kill
    victim: int
    all_die: bool


@dataclass(frozen=True)
class RankRound:
    """Sessions one after the other in one folder. After each, ranks with the stores of `checks` open it."""

    seed: int
    keys: int
    life: str
    power: bool  # whether the power is cut at each kill
    sessions: list[RankSession]
    checks: list[list[dict[str, Any]] | None]
    types: Types


def draw_rank_round(seed: int, ranks: int) -> RankRound:
    """A round that begins with that many ranks."""
    chance = random.Random(seed)
    power = chance.random() < 0.5
    numbers = [ranks] + [chance.choice([ranks, ranks, 1, 2, 3]) for _ in range(chance.choice([0, 0, 1, 2]))]
    checked = [number % 2 == 0 for number in reversed(range(len(numbers)))]
    return RankRound(
        seed=seed,
        keys=chance.choice([50, 150, 400]),
        life=chance.choice(LIVES),
        power=power,
        sessions=[_session(chance, number, power) for number in numbers],
        checks=[draw_stores(chance, chance.choice([ranks, ranks, 1, 2, 3])) if check else None for check in checked],
        types=chance.choice(TYPES),
    )


def draw_stores(chance: random.Random, ranks: int) -> list[dict[str, Any]]:
    return [draw_store(chance) for _ in range(ranks)]


def _session(chance: random.Random, ranks: int, power: bool) -> RankSession:
    return RankSession(
        seed=chance.randrange(1 << 32),
        ranks=ranks,
        operations=chance.randint(4, 16),
        stores=draw_stores(chance, ranks),
        ahead=chance.choice([0, 0, 1, 3]),
        kill=draw_kill(chance, INSIDE),
        victim=chance.randrange(ranks),
        all_die=power or chance.random() < 0.5,
    )
