"""Random programs, each drawn by its seed: a model, its optimizers, what is done to gradients, and the calls."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch

from .blocks import BLOCKS, IDS, WIDTH, Batch

ROW_OPTIMIZERS = ("sgd", "adagrad", "rowwise", "catch-up")
DENSE_OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam", "adamw")
HANDS = 9  # this many consecutive seeds, from a multiple of it on, have each block at least once
STORES = ("device", "host", "cached_host", "ssd", "ssd_host")
FLOAT32 = (torch.float32, torch.float32)
NARROW = tuple(itertools.product((torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)))


@dataclass(frozen=True)
class Event:
    """What happens before a call: "evaluate", "freeze" or "thaw" of the block of that number."""

    kind: str
    block: int = 0


@dataclass(frozen=True)
class Program:
    """`print` shows all of it; `draw_program(seed)` gives it again."""

    seed: int
    blocks: tuple[str, ...]
    residual: bool
    row_optimizer: str
    dense_optimizer: str
    schedule: bool
    max_norm: float | None
    clip_value: float | None
    accumulated: int
    scaled: bool
    ahead: int | None  # of `run`; None: plain calls
    sizes: tuple[int, ...]
    own: int  # the number of sizes with static-shape steps
    events: dict[int, Event]  # by the number of the call
    other_store: str | None  # beside the device's; None: no other
    types: tuple[torch.dtype, torch.dtype]  # of rows and of their state, where two stores are compared

    @property
    def shares(self) -> bool:
        """Whether a dynamic-shape step can be made."""
        return not any(BLOCKS[name].one_size for name in self.blocks)

    def batches(self) -> list[Batch]:
        generator = torch.Generator().manual_seed(self.seed)

        def integers(high: int, *shape: int) -> torch.Tensor:
            return torch.randint(0, high, shape, generator=generator)

        made = []
        for size in self.sizes:
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), integers(4, size).cumsum(0)])
            x, y = torch.randn(size, WIDTH, generator=generator), torch.randn(size, generator=generator)
            made.append(Batch(x, integers(IDS, size, 3), integers(IDS, int(offsets[-1])), offsets, y))
        return made


def draw_program(seed: int) -> Program:
    draw = random.Random(seed)

    def one_of(*values: Any) -> Any:
        return draw.choice(values)

    accumulated = one_of(1, 1, 1, 2, 3)
    own = one_of(2, 2, 3)
    sizes = draw.sample(range(2, 24), own + 4)
    blocks = _deal(seed)
    draw.shuffle(blocks)
    blocks += draw.choices(blocks, k=draw.randint(0, 1))
    smallest = 2 if "BatchNorm" in blocks else 1  # which takes the statistics of one sample for an error
    sizes += draw.choices([smallest, *sizes, *range(24, 40)], k=4)
    row_optimizer = one_of(*ROW_OPTIMIZERS)
    events = {}
    for call in range(accumulated, len(sizes), accumulated):
        if draw.random() < 0.25:
            later = ("freeze", "thaw") if call > own else ()  # not before there is a dynamic-shape step
            events[call] = Event(one_of("evaluate", "evaluate", *later), draw.randrange(len(blocks)))
    return Program(
        seed,
        tuple(blocks),
        draw.random() < 0.5,
        row_optimizer,
        one_of(*DENSE_OPTIMIZERS),
        row_optimizer != "catch-up" and draw.random() < 0.4,
        one_of(None, None, 0.05, 1.0),
        one_of(None, None, 0.01),
        accumulated,
        draw.random() < 0.3,
        one_of(None, None, 0, 2, 8),
        tuple(sizes),
        own,
        events,
        one_of(*STORES[1:]),
        one_of(*[FLOAT32] * 8, *NARROW),
    )


def _deal(seed: int) -> list[str]:
    """A hand of a shuffled deck of all blocks. Those for one size come first: they hide what others do for many."""
    deck = random.Random(f"deck {seed // HANDS}").sample(list(BLOCKS), len(BLOCKS))
    deck.sort(key=lambda name: not BLOCKS[name].one_size)
    place = seed % HANDS
    return deck[place * len(deck) // HANDS : (place + 1) * len(deck) // HANDS]
