"""Checkpoints of a graph over ranks: a run goes on with the bits of one that never stopped, or all ranks refuse it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.checkpoints import IDS, Rating
from support.embeddings import make
from support.live_rows import own_rows, together
from support.optimizers import Stumbling
from support.ranks import fails, on_ranks, outcome, run_kept
from support.stores import options
from tierbed import Graph, GraphError, SnapshotError, StoreError
from tierbed.distributed import World


def rating(world: World | None, store: str | None, folder: Path, name: str = "rows") -> Rating:
    path = None if store is None else folder
    return Rating(make(options(store or "host", path), None, name, tables=2, world=world))


def part(world: World | None) -> Tensor:
    """The batches of this rank."""
    return IDS if world is None else IDS.roll(3 * world.rank, 1)


def steps(graph: Rating, ids: Tensor) -> list[float]:
    return [float(graph(batch).detach()) for batch in ids]


def dense(graph: Rating) -> bytes:
    tensors = list[Tensor](graph.mlp.parameters())
    tensors += [of_one[name] for of_one in graph.dense.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)


def save_and_go_on(world: World, folder: Path, store: str | None, how: str) -> tuple[list[float], bytes, bytes]:
    graph = rating(world, store, folder / "a")
    torch.manual_seed(100 + world.rank)
    steps(graph, part(world)[:4])
    graph.check_save(folder / "c")
    saving = graph.save(folder / "c", background=how == "background", extra={"position": 4})
    losses = steps(graph, part(world)[4:8])
    if saving is not None:
        assert saving.wait()
    found = losses, own_rows(graph.rows), dense(graph)
    graph.rows.close()
    return found


def load_and_go_on(world: World, folder: Path, store: str | None) -> tuple[list[float], bytes, bytes]:
    graph = rating(world, store, folder / "b")
    torch.manual_seed(7)
    steps(graph, part(world)[:1])
    assert graph.load(folder / "c") == {"position": 4}
    losses = steps(graph, part(world)[4:8])
    found = losses, own_rows(graph.rows), dense(graph)
    graph.save(folder / "c", overwrite=True)
    graph.rows.close()
    return found


@pytest.mark.parametrize(
    ("store", "how"),
    [
        (None, "foreground"),
        ("host", "background"),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in ((None, "background"), ("ssd", "foreground"))),
    ],
)
def test_a_loaded_graph_goes_on_to_the_bits_of_the_run_that_saved_it(
    tmp_path: Path, store: str | None, how: str
) -> None:
    saved = run_kept(2, save_and_go_on, tmp_path, store, how)
    assert saved[0][0] != saved[1][0]
    assert saved[0][2] == saved[1][2]
    assert run_kept(2, load_and_go_on, tmp_path, store) == saved
    one = rating(None, store, tmp_path / "of one")
    one.load(tmp_path / "c")
    assert dense(one) == saved[0][2]
    assert together([rows for _, rows, _ in saved], own_rows(one.rows))
    names = os.listdir(tmp_path / "a" / "rows" / "snapshots") if store is not None else []
    assert len(names) == (store is not None)


class Pair(Graph):
    """Two embeddings, each with an optimizer group of its own."""

    def __init__(self, world: World, folder: Path) -> None:
        super().__init__()
        self.first, self.second = (
            make(options("host", folder), None, tables=1, name=name, world=world) for name in ("first", "second")
        )
        groups = [{"params": rows.parameters()} for rows in (self.first, self.second)]
        self.add_optimizer(torch.optim.SGD(groups, lr=0.5))

    def build(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.first(ids).sum() + self.second(ids).sum()
        loss.backward()
        return loss

    def rows(self) -> list[list[float]]:
        return [rows.get(range(8), 0).flatten().tolist() for rows in (self.first, self.second)]


@on_ranks(2, run_kept)
def test_a_checkpoint_mends_what_a_rank_left_that_failed_in_the_middle_of_a_step(world: World, tmp_path: Path) -> None:
    """Rank 1 fails before it updates the second embedding. After a load the ranks go on, close and open again."""
    graph, ids = Pair(world, tmp_path), torch.arange(8)
    graph(ids)
    graph.save(tmp_path / "c")
    groups = graph.first.row_optimizer._optimizer.param_groups  # type: ignore[union-attr]
    groups[0] = group = Stumbling(groups[0])
    graph(ids)
    plain = graph.rows()
    if world.rank == 1:
        group.fails_at = 2 * group.reads  # the last time in a step, which is in the update
    assert outcome(lambda: graph(ids)) == ("ArithmeticError: stumbled" if world.rank == 1 else "fine")
    said = outcome(lambda: graph.first.get([1], 0))
    assert said.startswith("StoreError: rank 1: embedding 'first', step 3 raised ArithmeticError('stumbled') on this")
    said = outcome(lambda: graph.first.save_snapshot("d"))
    assert said.startswith("StoreError: rank 1: embedding 'first' failed in the middle of a write")
    graph.load(tmp_path / "c")
    graph(ids)
    assert graph.rows() == plain
    graph.first.close()
    graph.second.close()
    assert Pair(world, tmp_path).rows() == plain


@on_ranks(2, run_kept)
def test_what_one_rank_cannot_do_is_refused_on_all(world: World, tmp_path: Path) -> None:
    graph = rating(world, "host", tmp_path / "a")
    steps(graph, part(world)[:2])
    graph.save(tmp_path / "c")
    (tmp_path / "file").mkdir(exist_ok=True)
    assert "exists: choose another path" in fails(lambda: graph.save(tmp_path / "c"), SnapshotError)
    assert "exists and is not a checkpoint" in fails(lambda: graph.save(tmp_path / "file"), SnapshotError)
    assert "exists: choose another path" in fails(lambda: graph.check_save(tmp_path / "c"), SnapshotError)
    assert "there is no checkpoint" in fails(lambda: graph.load(tmp_path / "none"), SnapshotError)
    before = own_rows(graph.rows)
    with torch.no_grad():
        weight = graph.mlp[2].weight
        kept = weight.clone()
        weight += world.rank
    said = fails(lambda: graph.save(tmp_path / "d"), GraphError)
    assert "ranks have different values of mlp.2.weight" in said
    assert own_rows(graph.rows) == before
    with torch.no_grad():
        weight.copy_(kept)
    graph.save(tmp_path / "d")
    steps(graph, part(world)[2:4])
    world.sum(torch.zeros(1))
    if world.rank == 0:
        file = sorted((tmp_path / "d" / "rows" / "0").glob("*/*-0001.npy"))[0]
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data[:-1] + b"\xff")
    world.sum(torch.zeros(1))
    before = own_rows(graph.rows)
    assert "its checksum does not match" in fails(lambda: graph.load(tmp_path / "d"), SnapshotError)
    assert own_rows(graph.rows) == before
    graph.load(tmp_path / "c")
    steps(graph, part(world)[2:3])
    saving = graph.save(tmp_path / "dropped", background=True)
    graph.rows.close()
    assert "dropped' was not saved: its embeddings were closed" in fails(saving.wait, StoreError)  # type: ignore[union-attr]
    world.sum(torch.zeros(1))  # each rank drops its part
    assert sorted(os.listdir(tmp_path)) == ["a", "c", "d", "file"]


@on_ranks(2, run_kept)
def test_ranks_convert_a_checkpoint_together(world: World, tmp_path: Path) -> None:
    wide = rating(world, "host", tmp_path / "a")
    steps(wide, part(world)[:2])
    wide.save(tmp_path / "c")
    numbers = wide.rows.get(IDS[0], 0)
    wide.rows.close()
    stored = options("host", tmp_path / "b")
    with make(stored, None, "rows", tables=2, dtype=torch.bfloat16, world=world) as narrow:
        graph = Rating(narrow)
        with pytest.raises(SnapshotError, match="holds rows of dtype float32, not bfloat16"):
            graph.load(tmp_path / "c")
        graph.load(tmp_path / "c", convert=True)
        assert torch.equal(narrow.get(IDS[0], 0), numbers.bfloat16().float())
