"""Rows that every processor must train: `trained_rows.json` has their hashes."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from support.embeddings import TABLES, contents, make
from support.optimizers import OPTIMIZERS
from support.stores import options
from tierbed.engine.options.lookup import Lookup

CASES = [(optimizer, dtype) for optimizer in OPTIMIZERS for dtype in ("float32", "bfloat16")]


def trained(optimizer: str, dtype: str) -> str:
    """A hash of all rows and states after steps of single ids and of bags, with gradients of single IEEE operations."""
    embedding = make(options("device"), optimizer, dtype=getattr(torch, dtype))
    for step in range(12):
        ids = torch.arange(600) * (step + 7) % 401
        bags = torch.arange(0, 601, 4)
        single = Lookup(ids.view(-1, 3), torch.arange(len(TABLES)).expand(200, 3))
        pooled = Lookup(ids, torch.tensor(step % 3).expand(150), bags, "mean")
        pinned = embedding.pin([single, pooled])
        grads = [
            ((rows / 8) + (torch.arange(rows.numel()).view(rows.shape) % 17 - 8) / 16)
            for rows in map(pinned.gather, (0, 1))
        ]
        pinned.update(grads)
    rows = contents(embedding)
    embedding.close()
    return hashlib.sha256(rows[np.argsort(rows, order=["table", "key"])].tobytes()).hexdigest()
