"""The peer of tables beyond memory: plain torch on memory-mapped files, each distinct row read and written once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from contenders import EPS, LR
from models import Model
from torch import Tensor, nn


class MemoryMapped:
    """Rows of all tables in one file, the state of Adagrad in another: of each element, or one float of each row."""

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
        """numbers: row numbers, int64 [batch, tables]. dense: the loss of the looked up rows. Updates both parts."""
        unique, places = torch.unique(numbers + self._first, return_inverse=True)
        rows = self._weight.index_select(0, unique).requires_grad_()
        loss = dense(nn.functional.embedding(places, rows))
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
