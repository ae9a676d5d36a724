"""The peer for tables larger than memory: plain torch on memory-mapped files. Each step reads and writes a row once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from contenders import EPS, LR
from models import Model
from torch import Tensor, nn


class MemoryMapped:
    """All tables' rows in one file and Adagrad's state in another: a float per element, or per row if row-wise."""

    def __init__(self, folder: Path, model: Model) -> None:
        folder.mkdir(parents=True)
        self._rows, self._row_wise = model.rows, model.optimizer == "rowwise_adagrad"
        dim, count, state = model.dim, model.tables * model.rows, 1 if self._row_wise else model.dim
        self._weight = torch.from_file(str(folder / "weight"), shared=True, size=count * dim).view(count, dim)
        self._state = torch.from_file(str(folder / "state"), shared=True, size=count * state).view(count, state)
        self._first = torch.arange(model.tables) * model.rows

    def put(self, table: int, numbers: Tensor, values: Tensor) -> None:
        self._weight[table * self._rows + numbers] = values
        self._state[table * self._rows + numbers] = 0.0

    def step(self, numbers: Tensor, dense: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
        """Train one step. numbers: row numbers, int64 [batch, tables]. dense: computes the loss from looked-up rows."""
        unique, inverse = torch.unique(numbers + self._first, return_inverse=True)
        rows = self._weight.index_select(0, unique).requires_grad_()
        loss = dense(nn.functional.embedding(inverse, rows))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert rows.grad is not None
        with torch.no_grad():
            square = rows.grad.square()
            state = self._state.index_select(0, unique) + (square.mean(1, keepdim=True) if self._row_wise else square)
            self._state.index_copy_(0, unique, state)
            self._weight.index_copy_(0, unique, rows - LR * rows.grad / (state.sqrt() + EPS))
        return loss.detach()
