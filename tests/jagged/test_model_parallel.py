"""A model over ranks and its pipelines have the numbers of a plain loop, whatever batches look like or raise."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.ranks import run_ranks
from support.refusals import check_refusal
from tierbed import CapacityError, EagerOptimizer, InputError, OptionError, make_device_mem_store_options
from tierbed.jagged import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PositionWeightedModuleCollection,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
    get_module,
    get_unwrapped_module,
)

CPU, STEPS = torch.device("cpu"), 6
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@dataclass
class Batch:
    features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.features.to(device, non_blocking), self.labels.to(device))


class Model(nn.Module):
    def __init__(self, device: str = "cpu", **options: Any) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(30, 4, "user"), EmbeddingBagConfig(30, 8, "item")]
        self.bags = EmbeddingBagCollection(tables, device=device, **options)
        self.rows = EmbeddingCollection([EmbeddingConfig(30, 4, "user")], name="ec", device=device, **options)
        torch.manual_seed(0)
        self.over = nn.Linear(12, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        rows = self.rows(batch.features)["user"].values()
        out = self.over(self.bags(batch.features).values())
        loss = (out.squeeze(1) - batch.labels).square().mean() + rows.square().mean()
        return loss, loss.detach()


def train_in_backward(kind: Any, *modules: nn.Module, lr: float = 0.1) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own import
        from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(kind, [one for module in modules for one in module.parameters()], {"lr": lr})


def calls(pipeline: Any, loader: Iterator[Any], most: int = 99) -> list[Any]:
    """What calls of `progress` return or raise, up to the end of the loader, which is '|'."""
    found: list[Any] = []
    for _ in range(most):
        try:
            found.append(pipeline.progress(loader))
        except StopIteration:
            return [*found, "|"]
        except Exception as error:
            found.append(type(error).__name__)
    return found


def batches(count: int = STEPS, rank: int = 0) -> Iterator[Batch]:
    for step in range(count):
        random = torch.Generator().manual_seed(100 * step + rank)
        lengths = torch.randint(1, 4, (10,), generator=random)
        ids = torch.randint(30, (int(lengths.sum()),), generator=random)
        yield Batch(KeyedJaggedTensor(["user", "item"], ids, lengths=lengths), torch.rand(5, generator=random))


def state_of_all(model: Model) -> list[Tensor]:
    parts = (model.bags.embedding_of("user"), model.bags.embedding_of("item"), model.rows.embedding_of("user"))
    return [*(part.get(torch.arange(30)) for part in parts), *(one.detach() for one in model.over.parameters())]


def plain_loop(*ranks: int) -> tuple[list[Tensor], list[Tensor]]:
    """Losses, and rows and dense parameters, of one process that trains on the mean of these ranks' batches."""
    model, losses = Model(), []
    optimizer = EagerOptimizer(torch.optim.Adagrad(model.parameters(), lr=0.1, eps=1e-8), model)
    for of_ranks in zip(*(batches(rank=rank) for rank in ranks), strict=True):
        optimizer.zero_grad()
        losses.append(sum(model(batch)[0] / len(ranks) for batch in of_ranks))
        losses[-1].backward()
        optimizer.step()
    return [loss.detach() for loss in losses], state_of_all(model)


@pytest.mark.parametrize("kind", [TrainPipelineBase, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_pipeline_trains_as_a_plain_loop(kind: Any, in_backward: bool) -> None:
    losses, state = plain_loop(0)
    model = Model("meta")
    if in_backward:
        train_in_backward(torch.optim.Adagrad, model.bags, model.rows)
    parallel = DistributedModelParallel(model, device=CPU)
    assert get_module(parallel) is get_unwrapped_module(parallel) is parallel.module is model
    assert set(parallel.state_dict()) == set(model.state_dict())
    assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in model.named_parameters()]
    optimizer: Any
    if in_backward:
        optimizer = torch.optim.Adagrad(model.over.parameters(), lr=0.1, eps=1e-8)
        assert [group["lr"] for group in parallel.fused_optimizer.param_groups] == [0.1] * 3
        parallel.fused_optimizer.load_state_dict(parallel.fused_optimizer.state_dict())
    else:
        optimizer = EagerOptimizer(torch.optim.Adagrad(parallel.parameters(), lr=0.1, eps=1e-8), parallel.module)
    pipeline = kind(parallel, optimizer, CPU)
    found = calls(pipeline, batches())[:-1]
    assert all(map(torch.equal, [*found, *state_of_all(model)], [*losses, *state]))
    met = [part.metrics()["table"]["prefetch_hits"] for part in model.bags.each()]
    assert met == [0 if kind is TrainPipelineBase else STEPS - 3] * 2  # three batches are held before the first step
    parallel.eval()
    [evaluated, _] = calls(pipeline, batches(1))
    assert torch.equal(evaluated, parallel(next(batches()))[1])


def test_each_epoch_may_have_an_iterator_of_its_own() -> None:
    model = Model()
    model.rows.requires_grad_(False)  # and so is not announced
    optimizer = EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    pipeline = TrainPipelineSparseDist(model, optimizer, CPU)
    for epoch in range(3):
        given = batches()
        for _ in range(STEPS):
            pipeline.progress(given)
        assert [part.metrics()["table"]["step"] for part in model.bags.each()] == [STEPS * (epoch + 1)] * 2
    assert model.rows.embedding_of("user").size() == 0


def test_a_step_in_backward_that_failed_is_not_taken_by_the_next() -> None:
    with EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "user")], make_device_mem_store_options(capacity=2)) as bags:
        train_in_backward(torch.optim.SGD, bags, lr=1.0)

        def step(*ids: int) -> None:
            batch = KeyedJaggedTensor(["user"], torch.tensor(ids), lengths=torch.tensor([len(ids)]))
            bags(batch).values().sum().backward()

        before = bags.embedding_of(0).get([0, 1, 2])
        with pytest.raises(CapacityError):
            step(0, 1, 2)
        step(2)
        assert torch.equal(before - bags.embedding_of(0).get([0, 1, 2]), torch.tensor([[0.0], [0], [1]]).expand(3, 4))


def test_what_has_no_meaning_here_is_refused_by_its_name() -> None:
    model = Model()
    plan = SimpleNamespace(plan={"bags": {"user": SimpleNamespace(sharding_type="table_wise")}})
    plans = [{"bags": {"user": "row_wise"}}, {"bags": "row_wise"}, {"bags": None}, "row_wise", 3]
    own = nn.ParameterDict({"own": nn.Parameter(torch.empty(3, device="meta"))})
    for call, kind, *named in (
        (lambda: DistributedModelParallel(model, plan=plan), OptionError, "plan", "bags.user", "'table_wise'"),
        *[(lambda wrong=one: DistributedModelParallel(model, plan=wrong), OptionError, "plan=") for one in plans],
        (lambda: DistributedModelParallel(model, data_parallel_wrapper=5), OptionError, "data_parallel_wrapper=", "5"),
        (lambda: DistributedModelParallel(model, env=3), OptionError, "env=", "int"),
        (lambda: TrainPipelineSemiSync(model, None, CPU), OptionError, "TrainPipelineSemiSync"),
        (lambda: TrainPipelineSparseDist(model, None, CPU, apply_jit=True), OptionError, "apply_jit=", "True"),
        (lambda: TrainPipelineSparseDist(model, None, CPU, enqueue=1), OptionError, "enqueue=", "1"),
        (lambda: DistributedModelParallel(own), InputError, "meta", "reset_parameters()"),
    ):
        check_refusal((call, kind, *named))
    plan.plan["bags"]["user"].sharding_type = "row_wise"
    assert DistributedModelParallel(model, plan=plan, sharders=[]).plan is plan


def test_a_model_on_meta_gets_the_values_of_its_modules() -> None:
    positions = nn.ModuleDict(
        {"p": PositionWeightedModuleCollection({"f": 3}, device="meta"), "n": nn.BatchNorm1d(2, device="meta")}
    )
    DistributedModelParallel(positions)
    assert positions["p"].position_weights["f"].tolist() == [1, 1, 1]
    assert positions["n"].running_var.tolist() == [1, 1]
    tied = nn.ModuleList([nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")])
    tied[1].weight = tied[0].weight
    tied[0].register_buffer("kept", torch.full((3,), 2.0))
    DistributedModelParallel(tied)
    assert tied[1].weight is tied[0].weight
    assert tied[0].kept.tolist() == [2, 2, 2]


def test_ranks_train_the_mean_of_their_losses() -> None:
    _, expected = plain_loop(0, 1)
    for found in run_ranks(2, of_unlike_batches):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def of_unlike_batches(world: Any) -> list[Tensor]:
    """Trains batches whose features one rank finds elsewhere in some of them, and in the first, where they are made."""
    model = Model("meta")
    train_in_backward(torch.optim.Adagrad, model.bags, model.rows)
    parallel = DistributedModelParallel(model, env=world, device=CPU)
    optimizer = torch.optim.Adagrad(parallel.module.over.parameters(), lr=0.1, eps=1e-8)

    def forward(batch: Any) -> Any:
        features = batch["f"] if "f" in batch else KeyedJaggedTensor.concat([batch["g"]])
        return parallel(Batch(features, batch["labels"]))

    given = (
        {"g" if (step % 3 == world.rank) else "f": batch.features, "labels": batch.labels}
        for step, batch in enumerate(batches(rank=world.rank))
    )
    pipeline = TrainPipelineSparseDist(parallel, optimizer, CPU, custom_model_fwd=forward)
    assert len(calls(pipeline, iter(given))) == STEPS + 1
    return state_of_all(model)


def mistakes(world: Any) -> list[str]:
    """What calls raise on each rank, of which rank 1 alone makes a mistake, but for the first."""
    used = Model()
    used(next(batches()))
    bags = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "user"), EmbeddingBagConfig(8, 4, "item")], world=world)
    kept = EagerOptimizer(torch.optim.Adagrad(bags.parameters(), lr=0.1), bags)
    bags.embedding_of("user").put([0], torch.ones(1, 4), "user")  # on one of the ranks
    good, bad = bags.to_torchrec_state_dict(), world.rank == 1
    state = {name: {"sum": torch.ones(8, 4), "step": 2} for name in good}
    heard = []
    tried: list[Any] = [
        lambda: DistributedModelParallel(used, env=world),
        lambda: bags.load_state_dict({**good, "embedding_bags.user.weight": torch.ones(7 if bad else 8, 4)}),
        lambda: bags.load_torchrec_optimizer_state({} if bad else state),
        lambda: bags.load_torchrec_optimizer_state(state if not bad else {name: {"sum": 1} for name in state}),
    ]
    for call in tried:
        try:
            call()
        except Exception as error:
            heard.append(str(error))
        for embedding in bags.each():
            embedding.keep_rows()  # as a state that could not be loaded asks for
    bags.load_torchrec_optimizer_state(state)
    bags.reset_parameters()
    del kept
    return [*heard, str(bags.embedding_of("user").size())]


def test_a_mistake_of_one_rank_is_raised_on_all_and_rows_of_one_process_are_refused() -> None:
    alone = "is already open without a world"
    wanted = alone, "7 rows", "found no entry for table", "'sum' is int", "0"
    for found in run_ranks(2, mistakes):
        assert [what in said for said, what in zip(found, wanted, strict=True)] == [True] * 5


KINDS = [TrainPipelineBase, TrainPipelineSparseDist]


class Named(nn.Module):
    """Names the batches that it gets: upper case in eval mode."""

    def __init__(self, pick: Callable[[Any], Any] = lambda batch: batch[1]) -> None:
        super().__init__()
        self.bags, self.pick = EmbeddingBagCollection([EmbeddingBagConfig(50, 4, "f")]), pick
        torch.manual_seed(0)
        self.over = nn.Linear(4, 1)

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        features = self.pick(batch)
        rows = torch.zeros(4, 4) if features is None else self.bags(features).values()
        loss = (self.over(rows) - 1).square().mean()
        name = batch[0] if isinstance(batch, tuple) and isinstance(batch[0], str) else ""
        return loss, name if self.training else name.upper()

    def optimizer(self) -> EagerOptimizer:
        return EagerOptimizer(torch.optim.Adagrad(self.parameters(), lr=0.1), self)


def features(number: int) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(number)
    lengths = torch.randint(1, 4, (4,), generator=random)
    return KeyedJaggedTensor(["f"], torch.randint(50, (int(lengths.sum()),), generator=random), lengths=lengths)


def state_of(model: Named) -> list[Tensor]:
    return [model.bags.embedding_of("f").get(torch.arange(50)), *(one.detach() for one in model.over.parameters())]


def trained_plainly(pick: Callable[[Any], Any], batches: list[Any]) -> list[Tensor]:
    model = Named(pick)
    optimizer = model.optimizer()
    for batch in batches:
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
    return state_of(model)


@pytest.mark.parametrize(
    ("actions", "expected"),
    [  # loaders a, b, v and w have five batches each; a3: three steps of a
        ("a3 eval v train a", "a0 a1 a2 V0 V1 V2 V3 V4 | a3 a4 |"),
        ("a3 eval v2 train a2 eval v train a", "a0 a1 a2 V0 V1 a3 a4 V2 V3 V4 | |"),
        ("a4 eval v2 w train a", "a0 a1 a2 a3 V0 V1 W0 W1 W2 W3 W4 | a4 |"),
        ("a3 eval v w train b a", "a0 a1 a2 V0 V1 V2 V3 V4 | W0 W1 W2 W3 W4 | a3 a4 b0 b1 b2 b3 b4 | |"),
        ("a2 eval a2 train a", "a0 a1 A2 A3 a4 |"),
        ("a3 eval a train b1", "a0 a1 a2 A3 A4 | b0"),
        ("a5 eval v1 train a a b", "a0 a1 a2 a3 a4 V0 | | b0 b1 b2 b3 b4 |"),
        ("a3 b1 a b", "a0 a1 a2 a3 a4 b0 | b1 b2 b3 b4 |"),  # in the order in which they were drawn
        ("eval v1 train a2 eval v1 a1 w1 train a", "V0 a0 a1 V1 A2 W0 a3 a4 |"),
    ],
)
def test_each_batch_is_trained_once_and_evaluation_scores_its_own(actions: str, expected: str) -> None:
    model = Named()
    pipeline = TrainPipelineSparseDist(model, model.optimizer(), "cpu")
    loaders = {name: iter([(f"{name}{i}", features(i)) for i in range(5)]) for name in "abvw"}
    done: list[str] = []
    for action in actions.split():
        if action in ("eval", "train"):
            model.train(action == "train")
        else:
            done += calls(pipeline, loaders[action[0]], int(action[1:] or 99))
    assert " ".join(done) == expected
    assert model.bags.embedding_of("f").metrics()["table"]["step"] == sum(name.islower() for name in done)


@pytest.mark.parametrize("in_between", [False, True])
def test_batches_that_are_held_at_the_end_are_the_first_of_the_next_epoch(in_between: bool) -> None:
    model = Named()
    pipeline = TrainPipelineSparseDist(model, model.optimizer(), "cpu", execute_all_batches=False)
    epoch = [iter([(f"{name}{i}", features(i)) for i in range(4)]) for name in "abv"]
    done = calls(pipeline, epoch[0])
    if in_between:
        model.eval()
        assert calls(pipeline, epoch[2]) == ["V0", "V1", "V2", "V3", "|"]
        model.train()
    done += calls(pipeline, epoch[1])
    assert " ".join(done) == "a0 a1 | a2 a3 b0 b1 |"
    pipeline.reset()
    assert calls(pipeline, epoch[1]) == ["|"]


@dataclass(slots=True)
class Slots:
    f: Any


STRUCTURES: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "key": (lambda i: {"f" if i % 3 else "g": features(i)}, lambda b: b.get("f", b.get("g"))),
    "key is missing": (lambda i: {"f": features(i)} if i % 3 else {}, lambda b: b.get("f")),
    "length of a tuple": (lambda i: (0, features(i)) if i % 3 else (features(i),), lambda b: b[-1]),
    "place": (lambda i: (features(i), 0) if i % 3 else (0, features(i)), lambda b: b[0] or b[1]),
    "attribute": (
        lambda i: SimpleNamespace(f=features(i)) if i % 3 else SimpleNamespace(g=features(i)),
        lambda b: getattr(b, "f", None) or b.g,
    ),
    "slots": (lambda i: Slots(features(i) if i % 3 else None), lambda b: b.f),
    "None": (lambda i: (features(i) if i % 3 else None, 0), lambda b: b[0]),
    "list": (lambda i: [0] * (i % 3) + [features(i)], lambda b: b[-1]),
    "kind": (lambda i: features(i) if i % 3 else torch.tensor([i]), lambda b: b if hasattr(b, "keys") else features(5)),
}


@pytest.mark.parametrize("what", STRUCTURES)
@pytest.mark.parametrize("first", [0, 1])
def test_a_batch_of_another_structure_trains_as_in_a_plain_loop(what: str, first: int) -> None:
    make, pick = STRUCTURES[what]
    batches = [make(i) for i in range(first, first + 10)]
    model = Named(pick)
    assert len(calls(TrainPipelineSparseDist(model, model.optimizer(), "cpu"), iter(batches))) == 11
    assert all(map(torch.equal, state_of(model), trained_plainly(pick, batches)))
    shows_where = (what, first) != ("kind", 0)  # the first batch has the features
    assert (model.bags.embedding_of("f").metrics()["table"]["prefetch_hits"] > 0) == shows_where


class Bad(list[Any]):
    """A batch that cannot be moved."""

    def to(self, *given: Any, **named: Any) -> Any:
        raise OSError("no such device")


def loader_that_raises(bad: int) -> Iterator[Any]:
    numbers = itertools.count()

    def load() -> Any:
        number = next(numbers)
        if number == bad:
            raise OSError("a file is damaged")
        return None if number == 6 else (f"{number}", features(number))

    return iter(load, None)  # which goes on after it raised


def batches_of(wrong: Any) -> Callable[[int], Iterator[Any]]:
    return lambda bad: iter([wrong if i == bad else (f"{i}", features(i)) for i in range(6)])


ids_of_no_row = ("bad", KeyedJaggedTensor(["f"], torch.tensor([999, 1]), lengths=torch.tensor([1, 1, 0, 0])))
another_key = KeyedJaggedTensor(["x"], torch.tensor([1]), lengths=torch.tensor([1]))
FAULTS = {
    "ids of no row": (batches_of(ids_of_no_row), "InputError"),
    "no features": (batches_of(("bad", None, 0)), "ValueError"),
    "a missing key": (batches_of(("bad", another_key)), "KeyError"),
    "not moved": (batches_of(Bad()), "OSError"),
    "loader": (loader_that_raises, "OSError"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [0, 2, 5])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.rotated("bad")
def test_a_bad_batch_is_raised_in_its_turn_and_passed_over(kind: Any, bad: int, fault: str) -> None:
    def pick(batch: Any) -> Any:
        if len(batch) == 3:
            raise ValueError("a batch without features")
        return batch[1]

    model, (loader, error) = Named(pick), FAULTS[fault]
    done = calls(kind(model, model.optimizer(), "cpu"), loader(bad))
    assert done == [error if number == bad else f"{number}" for number in range(6)] + ["|"]
    good = [("", features(number)) for number in range(6) if number != bad]
    assert all(map(torch.equal, state_of(model), trained_plainly(pick, good)))


@pytest.mark.parametrize("kind", KINDS)
def test_mistakes_are_named_with_a_remedy(kind: Any) -> None:
    model = Named()
    optimizer, loader = model.optimizer(), [("a", features(0))]

    def progress(forward: Any) -> Callable[[], Any]:
        return lambda: kind(model, optimizer, "cpu", custom_model_fwd=forward).progress(iter(loader))

    for call, error, *named in (
        (progress(lambda batch: model(batch)[0]), InputError, "model returned a Tensor", "a pair"),
        (progress(lambda batch: model(batch)[0].repeat(2)), InputError, "model returned a Tensor"),
        (progress(lambda batch: (*model(batch), 1)), InputError, "model returned 3 values"),
        (lambda: kind(model, optimizer, "cpu").progress(loader), InputError, "dataloader_iter=", "list"),
        (lambda: kind(model, None, "cpu").progress(iter(loader)), OptionError, "optimizer=", "None", "eval()"),
        (lambda: kind(model, 0.1, "cpu"), OptionError, "optimizer=", "float"),
        (lambda: kind(lambda batch: batch, optimizer, "cpu"), OptionError, "model=", "function"),
    ):
        check_refusal((call, error, *named))
    model.eval()
    assert kind(model, None, "cpu").progress(iter(loader)) == "A"
