"""Ranks that train in a store folder and close it or do not, and what they find when they open it again."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from support.embeddings import contents, make
from support.ranks import run_kept
from support.stores import options
from tierbed import GroupError, MultiTableEmbedding, SnapshotError, StoreError
from tierbed.distributed import World

STORES = ["host", "ssd"]
KEYS = torch.arange(200)
Rows = dict[tuple[int, int], list[float]]


def opened(world: World | None, folder: Path, store: str = "host", tables: int = 2, **more: Any) -> MultiTableEmbedding:
    return make(options(store, folder, **more), "adagrad", tables=tables, world=world)


def step(embedding: MultiTableEmbedding, number: int) -> None:
    """A step whose gradients depend on its number; every rank looks up keys of its own."""
    rank = 0 if embedding.world is None else embedding.world.rank  # type: ignore[attr-defined]
    ids = (KEYS + 31 * number + 17 * rank) % 300
    pinned = embedding.pin([_lookup(ids, number)])
    rows = pinned.gather(0)
    pinned.update([torch.full_like(rows, 0.125 * number + 0.5)])


def _lookup(ids: Tensor, number: int) -> Any:
    from tierbed.engine.options.lookup import Lookup

    return Lookup(ids, torch.full_like(ids, number % 2))


def own_rows(embedding: Any) -> bytes:
    return b"".join(rows.tobytes() for _, rows in embedding.table_handle().open_table.scan())


def remarks_of(name: str = "tierbed") -> list[str]:
    """What is logged from here on by this process."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    logging.getLogger(name).setLevel(logging.INFO)
    return said


def trained(world: World | None, folder: Path, store: str, steps: int, killed: int | None = None, **more: Any) -> Any:
    """Train that many steps more. Returns what this rank found at the open, its rows in the end, and what was logged.

    killed: the rank that ends without closing.
    """
    said = remarks_of()
    embedding = opened(world, folder, store, **more)
    before = own_rows(embedding)
    begun = embedding.table_handle().open_table.step
    for number in range(begun, begun + steps):
        step(embedding, number)
    after = own_rows(embedding)
    if world is not None and killed == world.rank:
        left_open(embedding)
    embedding.close()
    return before, after, said


def run(ranks: int, folder: Path, store: str, steps: int, **more: Any) -> list[tuple[bytes, bytes, list[str]]]:
    """`trained` on that many ranks."""
    return run_kept(ranks, partial(trained, folder=folder, store=store, steps=steps, **more))


class Ran(NamedTuple):
    """What `trained` returns, each by rank."""

    before: list[bytes]
    after: list[bytes]
    said: list[list[str]]


def ran(ranks: int, folder: Path, steps: int = 0, store: str = "host", **more: Any) -> Ran:
    """`trained` on that many ranks, one of which is a process without a world."""
    found = [trained(None, folder, store, steps, **more)] if ranks == 1 else run(ranks, folder, store, steps, **more)
    return Ran(*map(list, zip(*found, strict=True)))


def left_open(embedding: Any) -> None:
    """As a kill leaves it: no clean marker comes back."""
    embedding.table_handle().open_table.failure = RuntimeError("killed")  # closes without a clean marker


def alone(folder: Path, store: str, steps: int, save: str | None, **more: Any) -> bytes:
    """One process trains that many steps and saves. Returns its rows."""
    with opened(None, folder, store, **more) as embedding:
        begun = embedding.table_handle().open_table.step
        for number in range(begun, begun + steps):
            step(embedding, number)
        if save is not None:
            embedding.save_snapshot(save)
        return contents(embedding).tobytes()


def together(parts: list[bytes], like: bytes) -> bool:
    """Whether the rows of ranks are those of one process."""
    return sorted(b"".join(parts)) == sorted(like) and sum(map(len, parts)) == len(like)


def fails(
    world: World | None, folder: Path, more: dict[str, Any], of_rank: dict[int, dict[str, Any]]
) -> tuple[str, str]:
    """The error of opening, and the exchange that works after it; of_rank: what is otherwise on a rank."""
    given = {"path": folder, **more, **(of_rank.get(world.rank, {}) if world else {})}
    path, store, seed = given.pop("path"), given.pop("store", "host"), given.pop("seed", 0)
    with pytest.raises((StoreError, SnapshotError, GroupError)) as caught:
        make(options(store, path, **given), "adagrad", tables=2, world=world, seed=seed).size()
    return type(caught.value).__name__, str(caught.value)


def own_disks(world: World, folder: Path, steps: int) -> Any:
    return trained(world, folder / f"{world.rank}", "host", steps, snapshot_path=folder / "shared")
