"""TorchRec shards and quantises no collection of tierbed, and what refuses to train in its wrapper names it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)
from torchrec.inference.modules import quantize_inference_model

from tierbed import EagerOptimizer, Graph, GraphError, OptimizerError, make_host_mem_store_options
from tierbed.jagged import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, TrainPipelineSparseDist

BATCH = KeyedJaggedTensor(["a"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # TorchRec gives them
SAID = r"a DistributedModelParallel, which shards TorchRec's own collections alone: .*without it.* World of tierbed"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(100, 8, "a")], make_host_mem_store_options())
        self.top = nn.Linear(8, 1)

    def forward(self, features: Any) -> Tensor:
        out: Tensor = self.top(self.ebc(features).values()).sum()
        return out


class Step(Graph):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(torch.optim.Adagrad(model.parameters()))

    def build(self, features: Any) -> Tensor:
        loss: Tensor = self.model(features)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(module: nn.Module) -> nn.Module:
    return DistributedModelParallel(module, device=torch.device("cpu"))


def test_training_in_torchrecs_wrapper_is_refused_by_its_name() -> None:
    model = Model()
    around = wrapped(model)
    with pytest.raises(OptimizerError, match=f"the module is {SAID}"):
        EagerOptimizer(torch.optim.Adagrad(around.parameters()), around)
    optimizer = EagerOptimizer(torch.optim.Adagrad(model.parameters()), model)
    with pytest.raises(OptimizerError, match=f"embedding 'ebc-d8' is in {SAID}"):
        around(BATCH)
    model(BATCH).backward()  # the remedy
    optimizer.step()
    assert model.ebc.embedding_of("a").size() == 3


def test_a_graph_in_torchrecs_wrapper_or_around_it_is_refused_by_its_name() -> None:
    with pytest.raises(GraphError, match=f"model is {SAID}"):
        Step(wrapped(Model()))(BATCH)
    graph = Step(Model())
    with pytest.raises(GraphError, match=f"Step is in {SAID}"):
        wrapped(graph)(BATCH)
    graph(BATCH)


def test_torchrecs_quantised_serving_is_none_of_ours_as_the_page_says() -> None:
    model = Model()
    assert quantize_inference_model(model).ebc is model.ebc
    assert model(BATCH).isfinite()


def accumulated(steps: int, count: int) -> Iterator[KeyedJaggedTensor]:
    for number in range(count):
        ids = torch.randint(100, (steps + 2,), generator=torch.Generator().manual_seed(number))
        yield KeyedJaggedTensor(["a"], ids, lengths=torch.tensor([2, steps]))


@pytest.mark.parametrize("steps", [2, 3])
def test_accumulated_batches_of_a_pipeline_are_prefetched_and_train_as_in_a_plain_loop(steps: int) -> None:
    torch.manual_seed(0)
    model = Model()
    torch.manual_seed(0)
    plain = Model()
    ours, optimizer = (EagerOptimizer(torch.optim.Adagrad(one.parameters()), one) for one in (model, plain))
    rows = model.ebc.embedding_of("a")
    count = 10 * steps + 1  # the last update has one
    for epoch in range(2):
        pipeline = TrainPipelineSparseDist(model, ours, "cpu", custom_model_fwd=lambda batch: (model(batch), None))
        config = GradientAccumulationConfig(is_enabled=True, num_steps=steps)
        wrapper = GradientAccumulationWrapper(pipeline, ours, model, config)
        batches = accumulated(steps, count)
        for _ in range(count):
            wrapper.progress(batches)
        with pytest.raises(StopIteration):
            wrapper.progress(batches)
        for number, batch in enumerate(accumulated(steps, count), 1):
            plain(batch).backward()
            if number % steps == 0 or number == count:
                optimizer.step()
                optimizer.zero_grad()
        assert rows.metrics()["table"]["prefetch_hits"] >= (epoch + 1) * (10 - 3)
        assert torch.equal(rows.get(torch.arange(100)), plain.ebc.embedding_of("a").get(torch.arange(100)))
