"""What trains several embeddings, of every kind: killed and after steps that raise, all are at one moment."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from support import tbe
from support.embeddings import contents
from support.stores import options
from support.together import keep_open, killed
from support.two_towers import TwoTowers, losses, optimizer_of
from tierbed import EagerOptimizer, Graph, MultiTableEmbedding
from tierbed.engine.errors import StoreError
from tierbed.jagged import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, OptimType

IDS = torch.randint(0, 40, (12, 2, 16), generator=torch.Generator().manual_seed(3))
Rows = list[tuple[int, str]]  # of each embedding its step and a digest of its rows


class Trained(NamedTuple):
    """`saves`: what saves and loads all `members`; `step`: trains all that are not frozen with a batch."""

    saves: Any
    members: list[Any]
    step: Callable[[torch.Tensor], Any]

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.step(IDS[number])

    def close(self) -> None:
        for one in self.members:
            one.close()

    def rows(self) -> Rows:
        return [
            (one.metrics()["table"]["step"], hashlib.sha256(contents(one).tobytes()).hexdigest())
            for one in self.members
        ]


def embeddings_in(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, MultiTableEmbedding)]


def collection(path: Path, mode: str) -> Trained:
    configs = [EmbeddingBagConfig(50, dim, f"t{dim}", feature_names=[f"f{dim}"]) for dim in (8, 16)]
    bags = EmbeddingBagCollection(configs, options("host", path, open=mode))
    optimizer = EagerOptimizer(torch.optim.Adagrad(bags.parameters(), lr=0.5), bags)

    def step(ids: torch.Tensor) -> None:
        batch = KeyedJaggedTensor(["f8", "f16"], ids.flatten(), lengths=torch.full((16,), 2))
        optimizer.zero_grad()
        bags(batch).values().square().mean().backward()
        optimizer.step()

    return Trained(bags, embeddings_in(bags), step)


class Towers(Graph):
    """Trains both towers, or the first alone where the other is frozen."""

    def __init__(self, path: Path, mode: str, frozen: bool) -> None:
        super().__init__()
        self.model = TwoTowers(options("host", path, open=mode))
        self.model.items.requires_grad_(not frozen)
        self.add_optimizer(torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad], lr=0.02))

    def build(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(ids)
        loss.backward()
        return loss


def graph(path: Path, mode: str) -> Trained:
    made = Towers(path, mode, frozen=False)
    return Trained(made, embeddings_in(made), made)


def frozen(path: Path, mode: str) -> Trained:
    made = Towers(path, mode, frozen=True)
    if made.model.items.size() == 0:
        made.model.items.put(torch.arange(40), torch.ones(40, 6))
    return Trained(made, embeddings_in(made), made)


def loop(path: Path, mode: str) -> Trained:
    model = TwoTowers(options("host", path, open=mode))
    optimizer = optimizer_of(model)
    return Trained(optimizer, embeddings_in(model), lambda ids: list(losses(model, optimizer, ids[None])))


class Sums(Graph):
    def __init__(self, *towers: Any) -> None:
        super().__init__()
        self.towers = nn.ModuleList(towers)
        self.add_optimizer(torch.optim.SGD(self.parameters(), lr=0.1))

    def build(self, ids: torch.Tensor) -> torch.Tensor:
        loss = torch.stack([tower(of).square().sum() for tower, of in zip(self.towers, ids, strict=False)]).sum()
        loss.backward()
        return loss


def two_graphs(path: Path, mode: str) -> Trained:
    model = TwoTowers(options("host", path, open=mode))
    one, both = Sums(model.users), Sums(model.users, model.items)
    return Trained(both, embeddings_in(model), lambda ids: (one(ids[:1]), both(ids)))


def batched(path: Path, mode: str) -> Trained:
    bags = tbe.ours(tbe.TABLES, tbe.MAP, optimizer=OptimType.ADAM, store_options=options("host", path, open=mode))

    def step(ids: torch.Tensor) -> None:
        torch.manual_seed(int(ids.sum()))
        batch = tbe.batch(tbe.TABLES, tbe.MAP, [4] * len(tbe.MAP))
        bags(batch.indices, batch.offsets).square().sum().backward()

    return Trained(bags, embeddings_in(bags), step)


Make = Callable[[Path, str], Trained]
NAMES: dict[Make, tuple[str, str]] = {
    collection: ("ebc-d8", "ebc-d16"),
    batched: ("tbe-d8", "tbe-d4"),
    **dict.fromkeys((graph, frozen, loop, two_graphs), ("users", "items")),
}
TRAINERS = list(NAMES)


def trains(path: Path, make: Make, together: bool) -> tuple[Rows, Rows]:
    """Saves of all, or of none, then of each alone at another step. Returns the last rows in common, and of each."""
    made = made_open(path, make)
    made.steps(0, 1)
    both = made.rows()
    if together:
        made.saves.save_snapshot("all")
    made.steps(2)
    apart = made.rows()
    if make is frozen:  # the second embedding has the same rows at both saves
        both = apart
    made.members[0].save_snapshot("early")
    made.steps(3)
    apart[1] = made.rows()[1]
    made.members[1].save_snapshot("late")
    made.steps(4)
    return both, apart


def made_open(path: Path, make: Make, mode: str = "resume") -> Trained:
    made = make(path, mode)
    keep_open(made)
    return made


def opened(path: Path, make: Make, mode: str = "resume") -> Rows:
    made = made_open(path, make, mode)
    found = made.rows()
    made.steps(5)
    return found


def files(path: Path) -> list[tuple[str, int, int]]:
    """All of a folder but its locks."""
    there = [(place, place.lstat()) for place in sorted(path.rglob("*")) if not place.name.endswith("LOCK")]
    return [(str(place), status.st_size, status.st_mtime_ns) for place, status in there]


@pytest.mark.parametrize("make", TRAINERS)
def test_a_killed_trainer_recovers_rows_of_one_moment(tmp_path: Path, make: Make) -> None:
    kept, _ = killed(trains, tmp_path, make, True)
    assert killed(opened, tmp_path, make) == kept


@pytest.mark.parametrize("make", [collection, graph, batched])
def test_a_trainer_saved_only_apart_is_refused_and_changes_no_file_until_its_rows_are_accepted(
    tmp_path: Path, make: Make
) -> None:
    _, apart = killed(trains, tmp_path, make, False)
    before = files(tmp_path)
    said = killed(opened, tmp_path, make)
    assert said.startswith("StoreError")
    for member, snapshot, (step, _) in zip(NAMES[make], ("early", "late"), apart, strict=True):
        assert f"{member!r} has snapshot {snapshot!r}, at step {step}" in said
    assert all(remedy in said for remedy in ("load_snapshot", 'open="fresh"', 'open="mixed"'))
    assert files(tmp_path) == before
    assert killed(opened, tmp_path, make, "mixed") == apart
    assert killed(opened, tmp_path, make) == apart


@pytest.mark.parametrize("make", [graph, loop, batched])
def test_a_step_that_raised_when_it_had_updated_one_embedding_stops_all_until_a_load(
    tmp_path: Path, make: Make
) -> None:
    made = make(tmp_path, "resume")
    made.steps(0, 1)
    made.saves.save_snapshot("two")
    made.steps(2)
    kept = made.rows()
    made.close()
    made = make(tmp_path, "resume")
    half_a_step(made, tmp_path, make)
    made.close()
    again = make(tmp_path, "resume")
    assert again.rows() == kept
    again.close()  # a first write clears the clean marker, which `half_a_step` makes impossible
    again = make(tmp_path, "resume")
    half_a_step(again, tmp_path, make)
    again.saves.load_snapshot("before")
    assert again.rows() == kept
    again.steps(3)
    again.saves.save_snapshot("three")
    again.close()


def half_a_step(made: Trained, path: Path, make: Make) -> None:
    """A step whose second update cannot be made, and all that is refused after it."""
    before = [step for step, _ in made.rows()]
    made.saves.save_snapshot("before", overwrite=True)  # takes the group's lock, which reads all MARKs
    second = NAMES[make][0 if make is batched else 1]  # autograd comes to the last lookup first
    with no_marks(path / second), pytest.raises(StoreError, match="MARK"):
        made.steps(3)
    assert [step for step, _ in made.rows()] != before
    saves = [partial(one.save_snapshot, "torn") for one in (made.saves, *made.members)]
    for call in (*saves, partial(made.steps, 4), partial(made.saves.save_snapshot, "torn", background=True)):
        with pytest.raises(StoreError, match="rows of different steps"):
            call()
    assert not list(path.glob("*/snapshots/*torn"))


def test_a_backward_pass_that_raised_between_its_updates_leaves_no_rows_to_go_on_with(tmp_path: Path) -> None:
    made = batched(tmp_path, "resume")
    made.steps(0, 1)
    made.saves.save_snapshot("two")
    kept = made.rows()
    indices, offsets, _ = tbe.batch(tbe.TABLES, tbe.MAP, [4] * len(tbe.MAP))
    first, second = made.saves(indices, offsets), made.saves(indices, offsets)
    first.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (first + second).sum().backward()
    assert made.rows() != kept
    made.close()
    assert batched(tmp_path, "resume").rows() == kept


@contextmanager
def no_marks(store: Path) -> Iterator[None]:
    """A block in which the MARK of a store cannot be written."""
    marker, kept = store / "MARK", store / "kept"
    marker.rename(kept)
    marker.mkdir()
    try:
        yield
    finally:
        marker.rmdir()
        kept.rename(marker)
