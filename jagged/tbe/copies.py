"""The rows of a table, and their optimizer's state, as whole tensors: for tables that fit into memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...embedding.embedding import MultiTableEmbedding
from ...engine.optim.optimizers import RowOptimizer
from ...engine.table.report import settled

CHUNK = 1 << 16  # rows


def copied_weights(embedding: MultiTableEmbedding, number: int, rows: int) -> Tensor:
    """The rows [rows, dim] of one table, those that were never written as they begin."""
    with torch.inference_mode(False):
        weights = torch.empty(rows, embedding.dim, device=embedding.device)
    for first in range(0, rows, CHUNK):
        keys = torch.arange(first, min(first + CHUNK, rows))
        weights[first : first + CHUNK] = embedding.get(keys, number)
    return weights


def fill_uniform(embedding: MultiTableEmbedding, number: int, rows: int, low: float, high: float) -> None:
    """Write all rows of one table, uniform over [low, high], drawn in the order of the rows."""
    for first in range(0, rows, CHUNK):
        keys = torch.arange(first, min(first + CHUNK, rows))
        embedding.put(keys, torch.empty(len(keys), embedding.dim).uniform_(low, high), number)


def copied_states(embedding: MultiTableEmbedding, rows: Sequence[int], optimizer: RowOptimizer) -> list[list[Tensor]]:
    """For each table each state of its rows, [rows, dim], or [rows] where a row has one number.

    rows: of each table.
    """
    state = optimizer.row_state(embedding.dim)
    of_rows = [width == 1 for width in optimizer.row_state(2).widths]  # a dim of 1 does not tell
    with torch.inference_mode(False):  # a read-only copy tells a write by the tensor's version
        states = [
            [
                torch.full((count, width), value, dtype=torch.float32)
                for width, value in zip(state.widths, state.initial, strict=True)
            ]
            for count in rows
        ]
    if state.names:
        table = embedding.opened().own_table
        for _, chunk in settled(table):
            values = [torch.from_numpy(table.form.numbers(chunk, name).copy()) for name in state.names]
            for number, count in enumerate(rows):
                chosen = (chunk["table"] == number) & (chunk["key"] < count)
                keys, here = torch.from_numpy(chunk["key"][chosen].astype("i8")), torch.from_numpy(chosen)
                for copied, value in zip(states[number], values, strict=True):
                    copied[keys] = value[here]
    device = embedding.device
    with torch.inference_mode(False):
        return [
            [
                (copied.flatten() if of_row else copied).to(device)
                for copied, of_row in zip(of_table, of_rows, strict=True)
            ]
            for of_table in states
        ]
