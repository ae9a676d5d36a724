"""Optimizer states go from TorchRec's and FBGEMM's tables to ours and back, and training goes on as it would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen as TheirTBE
from safetensors.torch import save_file
from torch import Tensor, nn
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from support.refusals import check_refusal
from tierbed import (
    EagerOptimizer,
    InputError,
    OptimizerError,
    TierbedError,
    import_snapshot,
    make_host_mem_store_options,
)
from tierbed.jagged import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    SplitTableBatchedEmbeddingBagsCodegen,
)

TABLES = [
    torchrec.EmbeddingBagConfig(name="user", num_embeddings=20, embedding_dim=4, feature_names=["user"]),
    torchrec.EmbeddingBagConfig(name="item", num_embeddings=12, embedding_dim=4, feature_names=["item", "seen"]),
    torchrec.EmbeddingBagConfig(name="page", num_embeddings=15, embedding_dim=8, feature_names=["page"]),
]
KEYS = ["user", "item", "seen", "page"]
HOST = (EmbeddingLocation.HOST, ComputeDevice.CPU)


THEIRS = torchrec.KeyedJaggedTensor


def batch(seed: int, kind: type) -> Any:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(KEYS) * 5,), generator=random)
    return kind(KEYS, torch.randint(12, (int(lengths.sum()),), generator=random), lengths=lengths)


def train(collection: Any, optimizer: Any, seeds: range, kind: type = KeyedJaggedTensor) -> list[Tensor]:
    losses = []
    for seed in seeds:
        optimizer.zero_grad()
        loss = (collection(batch(seed, kind)).values() + 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def train_both(ours: Any, optimizer: Any, theirs: Any, their_optimizer: Any, seeds: range) -> None:
    close(train(ours, optimizer, seeds), train(theirs, their_optimizer, seeds, THEIRS))


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, RowWiseAdagrad])
def test_a_collection_goes_on_from_torchrecs_state_dict_and_back(kind: Any) -> None:
    def optimizer_of(collection: nn.Module) -> KeyedOptimizerWrapper:
        return KeyedOptimizerWrapper(dict(collection.named_parameters()), lambda given: kind(given, lr=0.2))

    theirs = torchrec.EmbeddingBagCollection(tables=TABLES)
    their_optimizer = optimizer_of(theirs)
    train(theirs, their_optimizer, range(3), THEIRS)
    with EmbeddingBagCollection(tables=TABLES) as ours:
        optimizer = EagerOptimizer(kind(ours.parameters(), lr=0.2), ours)
        result = ours.load_state_dict(theirs.state_dict())
        assert list(result.missing_keys + result.unexpected_keys) == []
        ours.load_torchrec_optimizer_state(their_optimizer.state_dict())
        train_both(ours, optimizer, theirs, their_optimizer, range(3, 6))
        close(ours.to_torchrec_state_dict(), dict(theirs.state_dict()))
        states, wanted = ours.to_torchrec_optimizer_state(), their_optimizer.state_dict()["state"]
        assert states.keys() == wanted.keys()
        for name, of_table in states.items():
            close(of_table["sum"], wanted[name]["sum"].view(of_table["sum"].shape))
        again = torchrec.EmbeddingBagCollection(tables=TABLES)
        again.load_state_dict(ours.to_torchrec_state_dict())
        their_again = optimizer_of(again)
        if kind is RowWiseAdagrad:  # its state exists before the first step
            their_again.load_state_dict({"state": states})
            train_both(ours, optimizer, again, their_again, range(6, 8))
        with EmbeddingBagCollection(tables=TABLES, name="second") as second:
            second.load_state_dict(ours.to_torchrec_state_dict(), assign=True)
            close(second.to_torchrec_state_dict(), dict(again.state_dict()))


def test_a_fused_collections_state_is_loaded_by_its_names() -> None:
    fused = FusedEmbeddingBagCollection(
        tables=TABLES,
        optimizer_type=torchrec.optim.RowWiseAdagrad,
        optimizer_kwargs={"learning_rate": 0.2, "eps": 1e-10},
        location=EmbeddingLocation.HOST,
        device=torch.device("cpu"),
    )
    train(fused, fused.fused_optimizer(), range(3), THEIRS)
    with EmbeddingBagCollection(tables=TABLES) as ours:
        optimizer = EagerOptimizer(RowWiseAdagrad(ours.parameters(), lr=0.2), ours)
        ours.load_state_dict(fused.state_dict())
        ours.load_torchrec_optimizer_state(fused.fused_optimizer().state_dict())
        train_both(ours, optimizer, fused, fused.fused_optimizer(), range(3, 6))


def test_a_state_dict_that_does_not_fit_is_named() -> None:
    with EmbeddingBagCollection(tables=TABLES) as ours:
        good, prefix = ours.to_torchrec_state_dict(), "embedding_bags"
        lacking = {name: weight for name, weight in good.items() if "item" not in name}
        for change, *named in (
            ({**good, f"{prefix}.user.weight": torch.rand(19, 4)}, "table user", "19 rows", "20"),
            (lacking, "Missing key", f"{prefix}.item.weight"),
            ({**good, f"{prefix}.other.weight": torch.rand(1, 4)}, "Unexpected key", f"{prefix}.other.weight"),
        ):
            check_refusal((lambda change=change: ours.load_state_dict(change), RuntimeError, *named))
        assert ours.load_state_dict(lacking, strict=False).missing_keys == [f"{prefix}.item.weight"]
        ours.load_state_dict(good)  # after loads that failed
    with EmbeddingCollection([EmbeddingConfig(None, 4, "any")]) as any_id:
        check_refusal((any_id.to_torchrec_state_dict, InputError, "table 'any'", "any id"))


def made(kind: type, optimizer: EmbOptimType) -> Any:
    return kind([(20, 4, *HOST), (12, 8, *HOST)], optimizer=optimizer, learning_rate=0.1, eps=1e-8)


@pytest.mark.parametrize("name", ["EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"])
def test_a_table_batched_embedding_goes_on_from_fbgemms_states_and_back(name: str) -> None:
    def steps(tbe: Any, seeds: range) -> list[Tensor]:
        outputs = []
        for seed in seeds:
            random = torch.Generator().manual_seed(seed)
            indices = torch.randint(12, (14,), generator=random)
            outputs.append(tbe(indices, torch.tensor([0, 3, 7, 7, 9, 12, 14])))
            outputs[-1].backward(torch.rand(outputs[-1].shape, generator=random))
        return [output.detach() for output in outputs]

    theirs, ours = (made(kind, EmbOptimType[name]) for kind in (TheirTBE, SplitTableBatchedEmbeddingBagsCodegen))
    theirs.init_embedding_weights_uniform(-1.0, 1.0)
    steps(theirs, range(3))
    weights = [one.clone() for one in theirs.split_embedding_weights()]
    for states in (theirs.split_optimizer_states(), theirs.get_optimizer_state()):
        ours.load_dense(weights, states, int(theirs.iter))
        assert int(ours.iter) == int(theirs.iter)
        close(ours.split_embedding_weights(), weights)
        close(ours.split_optimizer_states(), [list(one) for one in theirs.split_optimizer_states()])
    close(steps(ours, range(3, 6)), steps(theirs, range(3, 6)))
    for one, other in zip(ours.get_optimizer_state(), theirs.get_optimizer_state(), strict=True):
        close(dict(one), dict(other))
    ours.reset_embedding_weight_momentum(
        torch.tensor([1, 2, 5]), torch.tensor([0, 2, 3]), torch.tensor([0, 1]), torch.tensor([0, 1])
    )
    assert (ours.split_embedding_weights()[0][1:3] == 0).all()
    assert (ours.split_optimizer_states()[1][0][5] == 0).all()
    ours.flush()
    ours.reset_cache_states()


def test_keyed_combined_and_warmup_optimizers_of_torchrec_train_rows() -> None:
    def optimizer_of(model: nn.Module) -> Any:
        keyed = [
            KeyedOptimizerWrapper(dict(part.named_parameters()), lambda given: torch.optim.Adagrad(given, lr=0.2))
            for part in model.values()
        ]
        stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1)]
        combined = CombinedOptimizer([("ebc", keyed[0]), ("over", keyed[1])])
        return WarmupOptimizer(combined, stages, lr=0.2)

    torch.manual_seed(0)
    theirs = nn.ModuleDict({"ebc": torchrec.EmbeddingBagCollection(tables=TABLES), "over": nn.Linear(20, 1)})
    with EmbeddingBagCollection(tables=TABLES) as ebc:
        ours = nn.ModuleDict({"ebc": ebc, "over": nn.Linear(20, 1)})
        ebc.load_state_dict(theirs["ebc"].state_dict())
        optimizer = EagerOptimizer(optimizer_of(ours), ours)
        train_both(ebc, optimizer, theirs["ebc"], optimizer_of(theirs), range(6))
        optimizer.state_dict()


def test_a_wrapper_that_changes_gradients_is_refused_by_its_name() -> None:
    class Halved(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self._optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state
            self.defaults = optimizer.defaults

    with EmbeddingBagCollection(tables=TABLES) as ours:
        keyed = KeyedOptimizerWrapper(dict(ours.named_parameters()), lambda given: torch.optim.SGD(given, lr=0.2))
        with pytest.raises(OptimizerError, match="GradientClippingOptimizer clips gradients"):
            EagerOptimizer(GradientClippingOptimizer(keyed, GradientClipping.NORM), ours)
        with pytest.raises(OptimizerError, match="Halved cannot update rows"):
            EagerOptimizer(Halved(torch.optim.SGD(ours.parameters(), lr=1.0)), ours)
        assert [*in_backward_optimizer_filter(ours.named_parameters())]


def test_what_is_not_loaded_keeps_its_rows_state_and_step(caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddingBagCollection(tables=TABLES) as whole:
        optimizer = EagerOptimizer(torch.optim.Adam(whole.parameters(), lr=0.1), whole)
        train(whole, optimizer, range(3))
        before, states = whole.to_torchrec_state_dict(), whole.to_torchrec_optimizer_state()
        part = EmbeddingBagCollection(tables=TABLES[:1], name="part", share=whole)
        part.load_state_dict(part.to_torchrec_state_dict())
        assert "loading rows drops the optimizer state" in caplog.text
        close(whole.to_torchrec_state_dict(), before)
        whole.load_torchrec_optimizer_state(states)
        without = {name: {k: v for k, v in one.items() if k != "step"} for name, one in states.items()}
        whole.load_torchrec_optimizer_state(without)
        close(whole.to_torchrec_optimizer_state(), states)  # a state without step keeps the number
        short = {**states, "embedding_bags.page.weight": {"exp_avg": torch.rand(1), "exp_avg_sq": torch.rand(1)}}
        for given, *named in (
            ({name: {**one, "step": 99} for name, one in short.items()}, "table page", "'exp_avg' is [1]"),
            ({}, "table 'user'", "embedding_bags."),
            ({**states, "other.embedding_bags.page.weight": {}}, "table 'page'", "embedding_bags."),
            ({0: {}, "over.page.weight": {}}, "table 'user'", "embedding_bags."),
        ):
            check_refusal((lambda given=given: whole.load_torchrec_optimizer_state(given), InputError, *named))
        close(whole.to_torchrec_optimizer_state(), states)
        whole.reset_parameters()
        assert [embedding.size() for embedding in whole.each()] == [0, 0]
        assert steps_of(whole) == {0}
        train(whole, optimizer, range(1))


def test_a_state_that_is_no_dict_is_refused() -> None:
    collection = EmbeddingCollection([EmbeddingConfig(3, 4, "t")], name="states")
    for state in (None, [], {"embeddings.t.weight": 3}, {"embeddings.t.weight": None}):
        check_refusal((lambda state=state: collection.load_torchrec_optimizer_state(state), TierbedError, "state"))


def test_a_load_that_fails_changes_no_table() -> None:
    tbe = made(SplitTableBatchedEmbeddingBagsCodegen, EmbOptimType.EXACT_ADAGRAD)
    tbe.set_optimizer_step(7)
    weights = [torch.ones(20, 4), torch.ones(12, 8)]
    for states, *named in (
        ([[torch.ones(20, 4)], [torch.ones(1)]], "table-1", "'sum' is [1]"),
        ([[torch.ones(20, 4)] * 2] * 2, "'another'", "adagrad"),
        ([[], []], "'sum'"),
    ):
        check_refusal((lambda states=states: tbe.load_dense(weights, states), InputError, *named))
    check_refusal((lambda: tbe.load_dense(weights[:1]), InputError, "weights of 1 tables", "2 tables"))
    assert all((rows == 0).all() for rows in tbe.split_embedding_weights())
    tbe.load_dense(weights)
    assert int(tbe.iter) == 7
    tbe.load_dense(weights, [{"sum": rows, "step": torch.tensor(3.0)} for rows in weights])
    assert int(tbe.iter) == 3


def test_a_collection_of_an_optimizer_without_state_goes_both_ways() -> None:
    with EmbeddingBagCollection(tables=TABLES) as ours:
        train(ours, EagerOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours), range(2))
        ours.load_torchrec_optimizer_state({name: {"step": 9.0} for name in ours.to_torchrec_optimizer_state()})
        assert steps_of(ours) == {9}


def steps_of(collection: EmbeddingBagCollection) -> set[int]:
    return {int(one["step"]) for one in collection.to_torchrec_optimizer_state().values()}


def test_states_of_fused_adam_need_the_step_that_torchrec_keeps_elsewhere() -> None:
    with EmbeddingBagCollection(tables=TABLES) as ours:
        _kept = EagerOptimizer(torch.optim.Adam(ours.parameters(), lr=0.1), ours)
        rows = ours.to_torchrec_state_dict()
        ours.load_state_dict(rows)
        fused = {
            name: {f"{name.split('.')[1]}.{state}": torch.rand(weight.shape) for state in ("momentum1", "exp_avg_sq")}
            for name, weight in rows.items()
        }
        check_refusal((lambda: ours.load_torchrec_optimizer_state(fused), InputError, "'step' or 'iter'", "step="))
        ours.load_torchrec_optimizer_state(fused, step=70)
        assert steps_of(ours) == {70}
        ours.load_torchrec_optimizer_state({name: {**one, "t.iter": torch.tensor([80])} for name, one in fused.items()})
        assert steps_of(ours) == {80}


def test_states_of_a_table_batched_adam_need_a_step() -> None:
    tbe = made(SplitTableBatchedEmbeddingBagsCodegen, EmbOptimType.ADAM)
    weights = [torch.rand(20, 4), torch.rand(12, 8)]
    states = [[torch.rand_like(rows), torch.rand_like(rows)] for rows in weights]
    check_refusal((lambda: tbe.load_dense(weights, states), InputError, "step="))
    tbe.load_dense(weights, states, 9)
    assert int(tbe.iter) == 9


@pytest.mark.parametrize(("pools", "suffix"), [(True, "pt"), (True, "safetensors"), (False, "pt")])
def test_tables_of_a_checkpoint_become_rows(pools: bool, suffix: str, tmp_path: Path) -> None:
    """As docs/torchrec.md says."""
    config = torchrec.EmbeddingBagConfig if pools else torchrec.EmbeddingConfig
    tables = [config(num_embeddings=9 + n, embedding_dim=4 if pools and n else 8, name=f"t{n}") for n in range(3)]
    theirs = (torchrec.EmbeddingBagCollection if pools else torchrec.EmbeddingCollection)(tables=tables)
    store, prefix = make_host_mem_store_options(tmp_path / "store"), "embedding_bags" if pools else "embeddings"
    file = tmp_path / f"checkpoint.{suffix}"
    {"pt": torch.save, "safetensors": save_file}[suffix](nn.ModuleDict({"model": theirs}).state_dict(), file)
    with (EmbeddingBagCollection if pools else EmbeddingCollection)(tables, store) as ours:
        for name, embedding in ours.embeddings.items():
            of_it = [config.name for config in ours.configs if ours.embedding_of(config.name) is embedding]
            weights = [f"model.{prefix}.{table}.weight" for table in of_it]
            import_snapshot(tmp_path / "store" / name, "from-torchrec", file, tensor=weights)
            embedding.load_snapshot("from-torchrec")
        for table in tables:
            rows = ours.embedding_of(table.name).get(torch.arange(table.num_embeddings), table.name)
            assert torch.equal(rows, getattr(theirs, prefix)[table.name].weight)
        assert sum(embedding.size() for embedding in ours.embeddings.values()) == 9 + 10 + 11
