"""Clicks with categorical fields and dense features: Criteo's file, MovieLens, or a synthetic log like Criteo's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from movielens_data import GENRE, GENRES, PADDING, key, read_log

DENSE, FIELDS = 13, 26  # Criteo's columns, after the label
FACTORS = 4


@dataclass(frozen=True)
class Clicks:
    """Click examples with categorical and dense features."""

    source: str
    ids: torch.Tensor  # int64 [rows, fields]; `PADDING` where a value is missing; field j belongs to table j
    dense: torch.Tensor  # float32 [rows, features]
    labels: torch.Tensor  # float32 [rows], 0 or 1

    def __str__(self) -> str:
        return (
            f"{self.source}: {len(self.labels):,} examples, {self.ids.shape[1]} categorical fields, "
            f"{self.dense.shape[1]} dense features, {self.labels.mean():.1%} clicked"
        )


def read_clicks(path: Path | None, rows: int) -> Clicks:
    """Read all of MovieLens from a folder, or the first `rows` lines of Criteo's file. None: make synthetic examples.

    Raises OSError if the path cannot be read, and ValueError with file and line if a line has another layout.
    """
    if path is None:
        return synthetic_clicks(rows)
    return movielens_clicks(path) if path.is_dir() else criteo_clicks(path, rows)


def criteo_clicks(path: Path, rows: int) -> Clicks:
    """Read Criteo's display advertising file. A line holds a label, 13 counts and 26 hex values, separated by tabs."""
    parsed = list(islice(_criteo_lines(path), rows))
    if not parsed:
        raise ValueError(f"{path} holds no lines")
    labels, dense, ids = zip(*parsed, strict=True)
    return Clicks(str(path), torch.tensor(ids), torch.tensor(dense), torch.tensor(labels))


def _criteo_lines(path: Path) -> Iterator[tuple[float, list[float], list[int]]]:
    with path.open() as file:
        for number, line in enumerate(file, 1):
            label, *cells = line.rstrip("\n").split("\t")
            try:
                if len(cells) != DENSE + FIELDS or label not in ("0", "1"):
                    raise ValueError
                dense = [math.log1p(max(int(cell or 0), 0)) for cell in cells[:DENSE]]  # counts are long-tailed
                ids = [int(cell, 16) if cell else PADDING for cell in cells[DENSE:]]
            except ValueError:
                raise ValueError(
                    f"{path}:{number}: expected a label of 0 or 1, {DENSE} integers and {FIELDS} hex values, "
                    "separated by tabs"
                ) from None
            yield float(label), dense, ids


def movielens_clicks(folder: Path) -> Clicks:
    """Read MovieLens, with a film's genres as dense flags. A rating of 4 or more is a click."""
    log = read_log(folder)
    genres = torch.tensor([key(genre) for genre in GENRES[1:]])
    flags = (log.ids[:, GENRE:, None] == genres).any(1).float()
    return Clicks(log.source, log.ids[:, :GENRE], flags, log.labels)


def synthetic_clicks(rows: int, seed: int = 0) -> Clicks:
    """Make examples shaped like Criteo's. A model can learn effects of single fields and of pairs of fields.

    Fields have 10 to 30,000 values, drawn from a power law; 3 % are missing. The click probability is the logistic
    function of a sum. The sum adds the weighted dense features, an effect for each value, and dot products of the first
    four fields' hidden factors. The examples are the same on every machine.
    """
    rng = np.random.RandomState(seed)
    sizes = np.geomspace(10, 30_000, FIELDS).astype(np.int64)
    dense = np.log1p(np.floor(rng.lognormal(sigma=1.5, size=(rows, DENSE))))
    values = np.column_stack([(size ** rng.rand(rows)).astype(np.int64) for size in sizes])
    missing = rng.rand(rows, FIELDS) < 0.03

    effects, factors = np.zeros((rows, FIELDS)), np.zeros((rows, FIELDS, FACTORS))
    for field, size in enumerate(sizes):
        effects[:, field] = rng.randn(size)[values[:, field]]
        factors[:, field] = rng.randn(size, FACTORS)[values[:, field]]
    effects[missing], factors[missing] = 0, 0
    pairs = factors[:, :4].sum(1) ** 2 - (factors[:, :4] ** 2).sum(1)
    logits = dense @ rng.randn(DENSE) * 0.3 + effects.sum(1) * 0.3 + pairs.sum(1) * 0.15
    clicked = rng.rand(rows) < 1 / (1 + np.exp(np.median(logits) + 1 - logits))

    ids = np.where(missing, PADDING, values * 0x9E3779B1 % 2**32)  # an odd factor, so that ids stay distinct
    return Clicks(
        "synthetic click log (no --data was given)",
        torch.from_numpy(ids),
        torch.from_numpy(dense).float(),
        torch.from_numpy(clicked).float(),
    )
