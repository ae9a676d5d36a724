"""What trains several embeddings, whenever they join: killed and after steps that raise, all are at one moment."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tierbed
from support import tbe
from support.embeddings import contents
from support.graphs import graph_of
from support.ranks import fails
from support.stores import options
from support.together import keep_open, killed
from support.two_towers import TwoTowers, losses, optimizer_of
from tierbed import EagerOptimizer, MultiTableEmbedding
from tierbed.engine.durable import make_temporary_path
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
        digests = [hashlib.sha256(contents(one).tobytes()).hexdigest() for one in self.members]
        return [(one.metrics()["table"]["step"], digest) for one, digest in zip(self.members, digests, strict=True)]


def trained(saves: Any, model: nn.Module, step: Callable[[torch.Tensor], Any]) -> Trained:
    return Trained(saves, [module for module in model.modules() if isinstance(module, MultiTableEmbedding)], step)


def collection(path: Path, mode: str) -> Trained:
    configs = [EmbeddingBagConfig(50, dim, f"t{dim}", feature_names=[f"f{dim}"]) for dim in (8, 16)]
    bags = EmbeddingBagCollection(configs, options("host", path, open=mode))
    optimizer = EagerOptimizer(torch.optim.Adagrad(bags.parameters(), lr=0.5), bags)

    def step(ids: torch.Tensor) -> None:
        batch = KeyedJaggedTensor(["f8", "f16"], ids.flatten(), lengths=torch.full((16,), 2))
        optimizer.zero_grad()
        bags(batch).values().square().mean().backward()
        optimizer.step()

    return trained(bags, bags, step)


def graph(path: Path, mode: str, is_frozen: bool = False) -> Trained:
    """A graph of both towers, or of the first alone where the other is frozen."""
    model = TwoTowers(options("host", path, open=mode))
    model.items.requires_grad_(not is_frozen)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    made = graph_of(lambda graph, ids: graph.model(ids).backward(), optimizer, model=model)
    return trained(made, model, made)


def frozen(path: Path, mode: str) -> Trained:
    made = graph(path, mode, is_frozen=True)
    if made.members[1].size() == 0:
        made.members[1].put(torch.arange(40), torch.ones(40, 6))
    return made


def loop(path: Path, mode: str) -> Trained:
    model = TwoTowers(options("host", path, open=mode))
    optimizer = optimizer_of(model)
    return trained(optimizer, model, lambda ids: list(losses(model, optimizer, ids[None])))


def two_graphs(path: Path, mode: str) -> Trained:
    """One trains the first tower, the other both."""
    model = TwoTowers(options("host", path, open=mode))

    def sums(*towers: Any) -> Any:
        def build(graph: Any, ids: torch.Tensor) -> None:
            torch.stack([tower(ids[at]).square().sum() for at, tower in enumerate(graph.towers)]).sum().backward()

        every = nn.ModuleList(towers)
        return graph_of(build, torch.optim.SGD(every.parameters(), lr=0.1), towers=every)

    one, both = sums(model.users), sums(model.users, model.items)
    return trained(both, model, lambda ids: (one(ids[:1]), both(ids)))


def batched(path: Path, mode: str) -> Trained:
    bags = tbe.ours(tbe.TABLES, tbe.MAP, optimizer=OptimType.ADAM, store_options=options("host", path, open=mode))

    def step(ids: torch.Tensor) -> None:
        torch.manual_seed(int(ids.sum()))
        batch = tbe.batch(tbe.TABLES, tbe.MAP, [4] * len(tbe.MAP))
        bags(batch.indices, batch.offsets).square().sum().backward()

    return trained(bags, bags, step)


def made_open(path: Path, make: Make, mode: str = "resume") -> Trained:
    made = make(path, mode)
    keep_open(made)
    return made


def files(path: Path) -> list[tuple[str, int, int]]:
    """All of a folder but its locks."""
    there = [(place, place.lstat()) for place in sorted(path.rglob("*")) if not place.name.endswith("LOCK")]
    return [(str(place), status.st_size, status.st_mtime_ns) for place, status in there]


Make = Callable[[Path, str], Trained]
NAMES = {
    collection: ("ebc-d8", "ebc-d16"),
    batched: ("tbe-d8", "tbe-d4"),
    **dict.fromkeys((graph, frozen, loop, two_graphs), ("users", "items")),
}


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


def opened(path: Path, make: Make, mode: str = "resume") -> Rows:
    made = made_open(path, make, mode)
    found = made.rows()
    made.steps(5)
    return found


@pytest.mark.parametrize("make", NAMES)
def test_a_killed_trainer_recovers_rows_of_one_moment(tmp_path, make) -> None:
    kept, _ = killed(trains, tmp_path, make, True)
    assert killed(opened, tmp_path, make) == kept


@pytest.mark.parametrize("make", [collection, graph, batched])
def test_a_trainer_saved_only_apart_is_refused_and_changes_no_file_until_its_rows_are_accepted(tmp_path, make) -> None:
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
def test_a_step_that_raised_when_it_had_updated_one_embedding_stops_all_until_a_load(tmp_path, make) -> None:
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


def test_a_backward_pass_that_raised_between_its_updates_leaves_no_rows_to_go_on_with(tmp_path) -> None:
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


ID = torch.tensor([1])
RATE = 0.25  # so that rows are exact
USES = {
    "put": lambda one: one.put(ID, torch.ones(1, 2)),
    "get": lambda one: one.get(ID),
    "lookup": lambda one: one(ID),
    "size": lambda one: one.size(),
}


def eager_of(module: nn.Module) -> tierbed.EagerOptimizer:
    return tierbed.EagerOptimizer(torch.optim.SGD(module.parameters(), RATE), module)


def loss_of(members: Any, ids: Tensor = ID) -> Tensor:
    return torch.stack([one(ids).sum() for one in members.children()]).sum()


def step(model: nn.Module, *optimizers: tierbed.EagerOptimizer) -> None:
    loss_of(model).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def embeddings(path: Path, count: int) -> nn.ModuleList:
    """Embeddings in folders, of two kinds of store in turn, whose rows begin with ones."""
    ones = tierbed.make_constant_initializer(1.0)
    made = nn.ModuleList(
        tierbed.MultiTableEmbedding(f"e{number}", 2, torch.float32, torch.int64, [ones], options(store, path))
        for number, store in zip(range(count), ("host", "ssd", "host"), strict=False)
    )
    keep_open(made)
    return made


def joined(path: Path, count: int, used: int, use: str, how: str) -> None:
    """Three steps, a save of all, and a fourth step. The first `used` of the embeddings are used before."""
    model = embeddings(path, count)
    for one in list(model)[:used]:
        USES[use](one)
    if how == "graph":
        inner = torch.optim.SGD(model.parameters(), RATE)
        graph = graph_of(lambda graph, ids: loss_of(graph.model, ids).backward(), inner, model=model)
        for _ in range(3):
            graph(ID)
        graph.save_snapshot("three")
        graph(ID)
        return
    optimizers = [eager_of(model)] if how == "optimizer" else list(map(eager_of, model))
    for number in range(3):
        step(model, *optimizers)
        if how == "checkpoints":
            tierbed.save_checkpoint(path / f"checkpoint{number}", model, optimizers)
    if how == "optimizer":
        optimizers[0].save_snapshot("three")
    step(model, *optimizers)


def steps(path: Path, count: int) -> list[float]:
    """The steps of the embeddings' rows after a kill, in one group from the start."""
    model = embeddings(path, count)
    eager_of(model)
    return [(1 - float(one.get(ID)[0, 0])) / RATE for one in model.children()]  # type: ignore[operator]


@pytest.mark.parametrize("how", ["optimizer", "graph", "checkpoints"])
@pytest.mark.parametrize(
    ("count", "used", "use"),
    [
        (2, 2, "put"),
        (2, 1, "get"),
        (3, 2, "lookup"),
        *(
            pytest.param(count, used, use, marks=pytest.mark.slow)
            for count in (2, 3)
            for used in range(count + 1)
            for use in USES
        ),
    ],
)
def test_embeddings_that_were_used_before_they_join_recover_to_one_step(tmp_path, count, used, use, how) -> None:
    assert killed(joined, tmp_path, count, used, use, how) is None
    assert killed(steps, tmp_path, count) == [3.0] * count


def joined_again(path: Path, blocked: int) -> str:
    """The first step cannot write the MARK of one of two embeddings; then they are joined."""
    model = embeddings(path, 2)
    for one in model.children():
        USES["put"](one)  # type: ignore[arg-type]
    in_the_way = make_temporary_path(path / f"e{blocked}" / "MARK")
    in_the_way.mkdir()
    first = eager_of(model)
    said = fails(lambda: step(model, first), StoreError)
    in_the_way.rmdir()
    first.zero_grad()
    optimizer = eager_of(model)
    for _ in range(3):
        step(model, optimizer)
    optimizer.save_snapshot("three")
    step(model, optimizer)
    model[0].save_snapshot("four")  # of one alone: it is no step of both
    return said


@pytest.mark.parametrize("blocked", [0, 1])
def test_a_join_that_failed_is_made_up_for_by_the_next(tmp_path, blocked) -> None:
    assert "write MARK" in killed(joined_again, tmp_path, blocked)
    assert killed(steps, tmp_path, 2) == [3.0, 3.0]


def beside_a_new_store(path: Path) -> list[float]:
    """One store of a group is opened beside another that is new and knows of no group, and no optimizer is made."""
    two = embeddings(path, 2)
    with torch.no_grad():
        return [float(one(ID)[0, 0]) for one in reversed(list(two.children()))]


def test_a_store_of_a_group_opens_beside_one_whose_folder_is_new(tmp_path) -> None:
    assert killed(joined, tmp_path, 2, 0, "get", "optimizer") is None
    (tmp_path / "e1").rename(tmp_path / "aside")
    assert killed(beside_a_new_store, tmp_path)
