"""Optimizers of rows with the settings that change what a rule does, and batches of rows that a rule is applied to."""

from __future__ import annotations

import numpy as np
import torch

from support.rows import SPECIAL_KEYS, Table
from tierbed.engine import _core
from tierbed.engine.optim import (
    LAMB,
    CatchUpAdam,
    CatchUpAdamW,
    Ftrl,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
from tierbed.engine.optim.row_optimizer import RowOptimizer, row_optimizer

MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01, maximize=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.1),
    "adagrad without eps": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=0.0),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "adam without eps": lambda p: torch.optim.Adam(p, lr=0.01, eps=0.0),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, maximize=True),
    "rowwise adagrad": lambda p: RowWiseAdagrad(p, lr=0.1, weight_decay=0.01, initial_accumulator_value=0.1),
    "rowwise decoupled": lambda p: RowWiseAdagrad(p, lr=0.1, eps=0.0, weight_decay=0.1, weight_decay_mode="decoupled"),
    "ftrl": lambda p: Ftrl(p, lr=0.1, weight_decay=0.01, lambda1=0.01, lambda2=0.1, beta=0.5),
    "ftrl power": lambda p: Ftrl(p, lr=0.1, lr_power=-0.3, initial_accumulator_value=0.0),
    "ftrl grows": lambda p: Ftrl(p, lr=0.1, lr_power=-0.7, power_sign="lr_power"),
    "catch-up adam": lambda p: CatchUpAdam(p, lr=0.01, maximize=True),
    "catch-up adam with a rest": lambda p: CatchUpAdam(p, lr=0.01, betas=(0.1, 0.9)),
    "catch-up adam with decay": lambda p: CatchUpAdam(p, lr=0.01, weight_decay=0.1, maximize=True),
    "catch-up adamw": lambda p: CatchUpAdamW(p, lr=0.01, weight_decay=0.1),
    "catch-up adamw with a rest": lambda p: CatchUpAdamW(p, lr=0.1, betas=(0.1, 0.9), weight_decay=0.5),
    "partial row-wise adam": lambda p: PartialRowWiseAdam(p, lr=0.01, weight_decay=0.1, maximize=True),
    "partial row-wise adam without eps": lambda p: PartialRowWiseAdam(p, lr=0.01, eps=0.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, weight_decay=0.01, maximize=True),
    "rmsprop without eps": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.5, eps=0.0),
    "lamb": lambda p: LAMB(p, lr=0.01, weight_decay=0.1, maximize=True),
    "lamb without eps": lambda p: LAMB(p, lr=0.01, eps=0.0),
    "partial row-wise lamb": lambda p: PartialRowWiseLAMB(p, lr=0.01, weight_decay=0.1),
    "lars": lambda p: LarsSGD(p, lr=0.1, eta=0.02, weight_decay=0.01, maximize=True),
    "lars without decay": lambda p: LarsSGD([{"params": p, "clip_grad_row_norm": 0.1}], lr=0.1, momentum=0.0),
    "row norm": lambda p: torch.optim.SGD([{"params": p, "max_row_norm": 0.3}], lr=0.1),
    "everything limited": lambda p: LAMB(
        [{"params": p, "clip_grad_value": 0.5, "clip_grad_row_norm": 1.0, "max_row_norm": 0.1}]
    ),
    "clipped": lambda p: torch.optim.Adagrad([{"params": p, "clip_grad_value": 0.5, "clip_grad_row_norm": 1.0}]),
    "clipped rowwise": lambda p: RowWiseAdagrad([{"params": p, "clip_grad_row_norm": 0.1}]),
}


def optimizer_of(name: str) -> RowOptimizer:
    optimizer = MAKERS[name]([torch.nn.Parameter(torch.zeros(1))])
    return row_optimizer(optimizer, optimizer.param_groups[0])


def pinned(
    table: Table, store: _core.FullTable, keys: np.ndarray, tables: np.ndarray, padding: int | None = None
) -> _core.Batch:
    batch = table.batch(keys, tables, padding)
    if store.look_up_rows(batch):
        store.insert_missing(batch, table.layout)
    return batch


def random_ids(rng: np.random.Generator, count: int, table: Table) -> tuple[np.ndarray, np.ndarray]:
    keys = np.where(
        rng.random(count) < 0.2,
        rng.choice(np.array(SPECIAL_KEYS, np.uint64), count),
        rng.integers(0, count, count, np.uint64),
    )
    return keys, rng.integers(0, table.tables, count, np.uint32)


def table_of(optimizer: RowOptimizer, dim: int, types: tuple[str, str] = ("float32", "float32")) -> Table:
    """types: of the embedding and of the states that elements have."""
    state = optimizer.make_row_state(dim, types[1])
    state_type, count = state.states_16bit
    return Table(
        [dim], optimizer.initial_values, state_widths=state.widths, types=(types[0], state_type), num_16bit_states=count
    )
