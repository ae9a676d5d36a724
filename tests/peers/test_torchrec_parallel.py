"""Rows of a DistributedModelParallel are not trained as TorchRec's fused modules are, or its own wrappers go wrong."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection as TheirCollection
from torchrec import EmbeddingBagConfig as TheirConfig
from torchrec import KeyedJaggedTensor as TheirTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
from torchrec.distributed.model_parallel import DistributedModelParallel as TheirParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.tensor_pool import TensorPoolSharder
from torchrec.distributed.train_pipeline.gradient_accumulation import (
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
)
from torchrec.distributed.types import CacheParams, ParameterSharding, ShardingPlan
from torchrec.distributed.utils import _OPTIMIZER_CLASS_TO_EMB_OPT_TYPE as FUSED
from torchrec.inference.modules import quantize_inference_model
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from support.fbgemm import SplitTableBatchedEmbeddingBagsCodegen
from support.graphs import graph_of
from support.refusals import check_refusal
from tierbed import EagerOptimizer, GraphError, InputError, OptimizerError, OptionError
from tierbed.jagged import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    KeyedJaggedTensor,
    OptimType,
    TrainPipelineSparseDist,
)

CPU, ROWS, DIM = torch.device("cpu"), 12, 4
ON_CPU = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _one_rank_of_torchrec(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")


class Model(nn.Module):
    def __init__(self, theirs: bool = False) -> None:
        super().__init__()
        config = TheirConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["t"])
        self.ebc: Any = (TheirCollection if theirs else EmbeddingBagCollection)([config])

    def forward(self, features: Any) -> Tensor:
        pooled: Tensor = self.ebc(features).values()
        return pooled


def their_plan(model: Model, sharders: Any) -> ShardingPlan:
    """The fused module, where the planner would take a dense one for a small table."""
    [sharder, *_] = sharders or [EmbeddingBagCollectionSharder()]
    of_table = {"t": row_wise(compute_kernel="fused")}
    return ShardingPlan({"ebc": construct_module_sharding_plan(model.ebc, of_table, sharder, 1, 1, "cpu")})


def parallel(theirs: bool, kind: Any, numbers: dict[str, Any], fused: dict[str, Any] | None = None) -> Any:
    model = Model(theirs)
    if kind is not None:
        apply_optimizer_in_backward(kind, model.ebc.parameters(), dict(numbers))
    sharders = None if fused is None else [EmbeddingBagCollectionSharder(dict(fused)), EmbeddingCollectionSharder()]
    plan = their_plan(model, sharders) if theirs else None
    made = (TheirParallel if theirs else DistributedModelParallel)(model, device=CPU, plan=plan, sharders=sharders)
    rows = torch.linspace(-1, 1, ROWS * DIM).view(ROWS, DIM)
    if theirs:
        for shards in made.state_dict().values():
            (shards.local_shards()[0].tensor if hasattr(shards, "local_shards") else shards).copy_(rows)
    else:
        model.ebc.embedding_of("t").put(torch.arange(ROWS), rows, "t")
    return made


def trained(made: Any, theirs: bool) -> Tensor:
    """All rows after three steps with small gradients, on which eps shows."""
    kind = TheirTensor if theirs else KeyedJaggedTensor
    for step in range(3):
        features = kind(["t"], torch.tensor([0, 1, 1, 2, 5, step]), lengths=torch.tensor([2, 3, 1]))
        random = torch.Generator().manual_seed(step)
        made(features).backward(torch.randn(3, DIM, generator=random) * 1e-7)
    rows: Tensor = made(kind(["t"], torch.arange(ROWS), lengths=torch.ones(ROWS, dtype=torch.int64))).detach()
    return rows


CASES = [  # of an optimizer in backward, its numbers, and fused_params
    *((kind, {}, None) for kind, theirs in FUSED.items() if theirs in ON_CPU),
    (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}, None),
    (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-5}, {"eps": 1e-3}),
    (RowWiseAdagrad, {"lr": 0.1, "weight_decay": 0.1}, None),
    (torch.optim.Adagrad, {}, {"learning_rate": 0.3, "eps": 1e-6}),
    (None, {}, {"learning_rate": 1e4}),
    (None, {}, {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "output_dtype": SparseType.FP32}),
    (None, {}, {"optimizer": EmbOptimType.EXACT_ADAGRAD, "weight_decay_mode": WeightDecayMode.NONE}),
]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{getattr(case[0], '__module__', '')}.{getattr(case[0], '__name__', '')}"
)
def test_rows_are_torchrecs(case: Any) -> None:
    ours, theirs = (trained(parallel(is_theirs, *case), is_theirs) for is_theirs in (False, True))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", FUSED, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_numbers_that_are_not_given_are_fbgemms(kind: Any) -> None:
    made = parallel(False, kind, {})
    defaults = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen).parameters
    [group] = made.fused_optimizer.param_groups
    found = dict(group) | dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))
    names = {"lr": "learning_rate", **{name: name for name in ("eps", "beta1", "beta2", "eta", "weight_decay")}}
    if FUSED[kind] is EmbOptimType.LARS_SGD:
        names["momentum"] = "momentum"
    for name in names.keys() & found.keys():
        assert found[name] == defaults[names[name]].default, name
    rule = trained(made, False) is not None and made.module.ebc.embedding_of("t").row_optimizer.rule
    assert rule == {OptimType.ADAM.value: "adamw", "exact_sgd": "sgd"}.get(FUSED[kind].value, rule)


@pytest.mark.parametrize(
    "refusal",
    [
        (None, {}, {"cache_load_factor": 0.5}, "cache_load_factor=", "0.5"),
        (None, {}, {"output_dtype": SparseType.FP16}, "output_dtype="),
        (None, {}, {"optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD}, "EMAINPLACE_ROWWISE_ADAGRAD", "nearest"),
        (None, {}, {"optimizer": EmbOptimType.NONE}, "optimizer=", "NONE"),
        (None, {}, {"gradient_clipping": True}, "gradient_clipping=", "True"),
        (None, {}, {"learning_rat": 0.5}, "learning_rat", "did you mean learning_rate"),
        (None, {}, {"learning_rate": "fast"}, "learning_rate=", "'fast'"),
        (None, {}, {"optimizer": EmbOptimType.ADAM, "betas": 0.5}, "betas=", "0.5"),
        (None, {}, {"optimizer": EmbOptimType.ADAM, "betas": (0.5, 0.6, 0.7)}, "betas=", "(0.5, 0.6, 0.7)"),
        (torch.optim.AdamW, {}, {"eps": 0.1}, "AdamW", "fused_params"),
        (torch.optim.SGD, {"nesterov": False, "foreach": True}, None, "nesterov"),
    ],
)
def test_what_is_not_followed_is_refused_by_name(refusal: Any) -> None:
    kind, numbers, fused, *named = refusal
    check_refusal((lambda: parallel(False, kind, numbers, fused), OptionError, "ebc-d4", *named))


@pytest.mark.parametrize(
    ("kind", "name", "value", "fused"),
    [(torch.optim.Adam, "betas", (0.5, 0.6), None), (torch.optim.AdamW, "eps", 1e-5, {})],
)
def test_a_number_of_an_optimizer_in_backward_is_kept(kind: Any, name: str, value: Any, fused: Any) -> None:
    [group] = parallel(False, kind, {name: value}, fused).fused_optimizer.param_groups
    assert group[name] == value


def test_settings_that_change_nothing_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    parallel(False, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"prefetch_pipeline": True})
    [line] = [record.message for record in caplog.records if "change nothing" in record.message]
    assert "prefetch_pipeline" in line
    assert "momentum: OptimType.EXACT_SGD has none" in line


def plan_of(**options: Any) -> SimpleNamespace:
    return SimpleNamespace(plan={"ebc": {"t": ParameterSharding("row_wise", "fused", **options)}})


def test_sharders_and_plans_that_change_nothing_are_taken() -> None:
    DistributedModelParallel(Model(), device=CPU, sharders=[TensorPoolSharder(), EmbeddingBagCollectionSharder()])
    DistributedModelParallel(Model(), device=CPU, plan=plan_of(stochastic_rounding=True, enforce_hbm=False))


def test_what_else_sharders_and_plans_ask_for_is_refused() -> None:
    codecs = EmbeddingBagCollectionSharder(qcomm_codecs_registry={"all_to_all": object()})
    odd = [SimpleNamespace(fused_params=one, module_type=TheirCollection) for one in ([1], "eps", {3: 0.1})]
    given = [
        ({"sharders": [codecs]}, "qcomm_codecs_registry"),
        ({"sharders": [1]}, "sharders=", "[1]"),
        ({"sharders": 5}, "sharders=", "5"),
        *[({"sharders": [one]}, "fused_params=", str(one.fused_params)) for one in odd],
        ({"plan": plan_of(cache_params=CacheParams())}, "ebc.t", "cache_params="),
        ({"plan": plan_of(enforce_hbm=True)}, "ebc.t", "enforce_hbm=", "True"),
        ({"plan": plan_of(stochastic_rounding=False)}, "ebc.t", "stochastic_rounding=", "False"),
    ]
    for options, *named in given:
        check_refusal(
            (lambda options=options: DistributedModelParallel(Model(), device=CPU, **options), OptionError, *named)
        )
    bag, sharder = nn.Sequential(nn.EmbeddingBag(4, 4)), EmbeddingBagSharder({"learning_rate": 0.1})
    with pytest.raises(OptionError, match=r"has fused_params, but tierbed does not replace .*EmbeddingBag'>"):
        DistributedModelParallel(bag, device=CPU, sharders=[sharder])


def test_rows_that_are_open_cannot_take_other_numbers() -> None:
    model = Model()
    apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {})
    trained(model, False)
    with pytest.raises(InputError, match="'ebc-d4' is open; make DistributedModelParallel before"):
        DistributedModelParallel(model, device=CPU)


BATCH = KeyedJaggedTensor(["t"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
SAID = "a DistributedModelParallel, which shards TorchRec's own collections alone", "World of tierbed"


def wrapped(module: nn.Module) -> nn.Module:
    return TheirParallel(module, device=CPU)


def trainable() -> nn.Sequential:
    return nn.Sequential(Model(), nn.Linear(DIM, 1))


def adagrad(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(module.parameters())


def step(graph: Any, features: Any) -> Tensor:
    loss: Tensor = graph.model(features).sum()
    loss.backward()
    return loss


def test_training_in_torchrecs_wrapper_and_a_graph_in_or_around_it_are_refused_by_their_names() -> None:
    model = trainable()
    around = wrapped(model)
    check_refusal((lambda: EagerOptimizer(adagrad(around), around), OptimizerError, "the module", *SAID))
    optimizer = EagerOptimizer(adagrad(model), model)
    check_refusal((lambda: around(BATCH), OptimizerError, "'ebc-d4'", *SAID))
    model(BATCH).sum().backward()  # the remedy
    optimizer.step()
    assert model[0].ebc.embedding_of("t").size() == 3
    other = wrapped(trainable())
    check_refusal((lambda: graph_of(step, adagrad(other), model=other)(BATCH), GraphError, "model is", *SAID))
    graph = graph_of(step, adagrad(one := trainable()), model=one)
    check_refusal((lambda: wrapped(graph)(BATCH), GraphError, *SAID))
    graph(BATCH)


def test_torchrecs_quantised_serving_is_none_of_ours_as_the_page_says() -> None:
    model = Model()
    assert quantize_inference_model(model).ebc is model.ebc
    assert model(BATCH).isfinite().all()


def accumulated(steps: int, count: int) -> Iterator[KeyedJaggedTensor]:
    for number in range(count):
        ids = torch.randint(ROWS, (steps + 2,), generator=torch.Generator().manual_seed(number))
        yield KeyedJaggedTensor(["t"], ids, lengths=torch.tensor([2, steps]))


@pytest.mark.parametrize("steps", [2, 3])
def test_accumulated_batches_of_a_pipeline_are_prefetched_and_train_as_in_a_plain_loop(steps: int) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(trainable())
    model, plain = models
    ours, optimizer = (EagerOptimizer(adagrad(one), one) for one in models)
    rows, expected = (one[0].ebc.embedding_of("t") for one in models)
    count = 10 * steps + 1  # the last update has one
    for epoch in range(2):
        pipeline = TrainPipelineSparseDist(
            model, ours, "cpu", custom_model_fwd=lambda batch: (model(batch).sum(), None)
        )
        config = GradientAccumulationConfig(is_enabled=True, num_steps=steps)
        wrapper = GradientAccumulationWrapper(pipeline, ours, model, config)
        batches = accumulated(steps, count)
        for _ in range(count):
            wrapper.progress(batches)
        with pytest.raises(StopIteration):
            wrapper.progress(batches)
        for number, batch in enumerate(accumulated(steps, count), 1):
            plain(batch).sum().backward()
            if number % steps == 0 or number == count:
                optimizer.step()
                optimizer.zero_grad()
        assert rows.metrics()["table"]["prefetch_hits"] >= (epoch + 1) * (10 - 3)
        assert torch.equal(rows.get(torch.arange(ROWS)), expected.get(torch.arange(ROWS)))
