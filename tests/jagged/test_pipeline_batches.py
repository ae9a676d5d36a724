"""A pipeline trains each batch once and scores what it is asked to, whatever batches look like and whatever raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.refusals import check_refusal
from tierbed import EagerOptimizer, InputError, OptionError
from tierbed.jagged import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)

KINDS = [TrainPipelineBase, TrainPipelineSparseDist]


class Model(nn.Module):
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


def state_of(model: Model) -> list[Tensor]:
    return [model.bags.embedding_of("f").get(torch.arange(50)), *(one.detach() for one in model.over.parameters())]


def trained_plainly(pick: Callable[[Any], Any], batches: list[Any]) -> list[Tensor]:
    model = Model(pick)
    optimizer = model.optimizer()
    for batch in batches:
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
    return state_of(model)


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
    model = Model()
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
    model = Model()
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
    model = Model(pick)
    assert len(calls(TrainPipelineSparseDist(model, model.optimizer(), "cpu"), iter(batches))) == 11
    assert all(map(torch.equal, state_of(model), trained_plainly(pick, batches)))
    shows_where = (what, first) != ("kind", 0)  # the first batch has the features
    assert (model.bags.embedding_of("f").metrics()["table"]["prefetch_hits"] > 0) == shows_where


class Bad(list[Any]):
    """A batch that cannot be moved."""

    def to(self, *given: Any, **named: Any) -> Any:
        raise OSError("no such device")


def loader_that_raises(bad: int) -> Iterator[Any]:
    class Loader:
        number = -1

        def __next__(self) -> Any:
            self.number += 1
            if self.number == bad:
                raise OSError("a file is damaged")
            if self.number == 6:
                raise StopIteration
            return f"{self.number}", features(self.number)

    return Loader()  # type: ignore[return-value]


def batches_of(wrong: Any) -> Callable[[int], Iterator[Any]]:
    return lambda bad: iter([wrong if i == bad else (f"{i}", features(i)) for i in range(6)])


ids_of_no_row = ("bad", KeyedJaggedTensor(["f"], torch.tensor([999, 1]), lengths=torch.tensor([1, 1, 0, 0])))
FAULTS = {
    "ids of no row": (batches_of(ids_of_no_row), "InputError"),
    "no features": (batches_of(("bad", None, 0)), "ValueError"),
    "a missing key": (
        batches_of(("bad", KeyedJaggedTensor(["x"], torch.tensor([1]), lengths=torch.tensor([1])))),
        "KeyError",
    ),
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

    model, (loader, error) = Model(pick), FAULTS[fault]
    done = calls(kind(model, model.optimizer(), "cpu"), loader(bad))
    assert done == [error if number == bad else f"{number}" for number in range(6)] + ["|"]
    good = [("", features(number)) for number in range(6) if number != bad]
    assert all(map(torch.equal, state_of(model), trained_plainly(pick, good)))


@pytest.mark.parametrize("kind", KINDS)
def test_mistakes_are_named_with_a_remedy(kind: Any) -> None:
    model = Model()
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
