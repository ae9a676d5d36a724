"""An argument of the table-batched embedding is ignored, taken for another, or refused without its name and value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.refusals import check_refusal
from support.tbe import ours
from tierbed import make_cached_host_mem_store_options, make_host_mem_store_options
from tierbed.engine.errors import InputError, OptionError
from tierbed.jagged import (
    CacheAlgorithm,
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    PoolingMode,
    SSDTableBatchedEmbeddingBags,
    TableBatchedEmbeddingBags,
    WeightDecayMode,
)
from tierbed.jagged.tbe.call_arguments import IGNORED_CALL_ARGS, REFUSED_ARGS, REFUSED_CALL_ARGS

ADAM, ADAGRAD, ROWWISE = OptimType.ADAM, OptimType.EXACT_ADAGRAD, OptimType.EXACT_ROWWISE_ADAGRAD
LAMB, LARS, BF16 = OptimType.LAMB, OptimType.LARS_SGD, torch.bfloat16
CPU, HOST, L2 = ComputeDevice.CPU, EmbeddingLocation.HOST, WeightDecayMode.L2
TABLES, STATES = [(10, 4), (20, 4)], "optimizer_state_dtypes"
IDS, OFFSETS = torch.tensor([1, 2]), torch.tensor([0, 1, 2])


def tbe_of(**options: Any) -> Callable[[], TableBatchedEmbeddingBags]:
    return lambda: ours(TABLES, [0, 1], **options)


def states(optimizer: OptimType, dtypes: Any) -> Callable[[], TableBatchedEmbeddingBags]:
    return tbe_of(optimizer=optimizer, optimizer_state_dtypes=dtypes)


def specs(given: Any, *more: Any) -> Callable[[], TableBatchedEmbeddingBags]:
    return lambda: TableBatchedEmbeddingBags(given, *more)


def ssd(given: Any, sets: Any) -> Callable[[], SSDTableBatchedEmbeddingBags]:
    return lambda: SSDTableBatchedEmbeddingBags(given, None, sets, "no-folder")


def change(optimizer: OptimType = OptimType.EXACT_SGD, **numbers: Any) -> Callable[[], None]:
    return lambda: tbe_of(optimizer=optimizer)().update_hyper_parameters(numbers)


OPTIONS = [
    (tbe_of(learning_rat=0.1), "learning_rat=", "0.1", "did you mean learning_rate"),
    (tbe_of(learning_rate=-1.0), "EXACT_SGD", "learning rate", "-1.0"),
    (tbe_of(weight_decay_mode=WeightDecayMode.DECOUPLE), "weight_decay_mode=", "DECOUPLE", "EXACT_SGD"),
    (tbe_of(optimizer=ROWWISE, weight_decay_mode=WeightDecayMode.COUNTER), "weight_decay_mode=", "COUNTER"),
    *[(tbe_of(optimizer=one, weight_decay_mode=L2), "weight_decay_mode=", "L2", one.name) for one in (ADAM, LAMB)],
    (tbe_of(optimizer=LARS, eta=-0.5), "LARS_SGD", "eta=", "-0.5"),
    (tbe_of(optimizer=LAMB, beta1=1.0), "LAMB", "betas=", "(1.0, 0.999)"),
    (tbe_of(max_norm=-1.0), "max_norm=", "-1.0"),
    (tbe_of(max_gradient=0.5), "max_gradient=", "0.5", "gradient_clipping=True"),
    (tbe_of(max_gradient=-1, gradient_clipping=True), "max_gradient=", "-1"),
    (tbe_of(cache_load_factor=1.5), "cache_load_factor=", "1.5"),
    (tbe_of(table_names=["one"]), "table_names=", "['one']"),
    (tbe_of(table_names=["one", "one"]), "name=", "'one'"),
    (tbe_of(output_dtype=torch.int8), "output_dtype=", "torch.int8"),
    (tbe_of(weights_precision="int8"), "weights_precision=", "'int8'"),
    (tbe_of(device="cuda"), "device=", "'cuda'", "ComputeDevice.CPU"),
    (tbe_of(name="a.b"), "name=", "'a.b'"),
    (tbe_of(store_options={"tbe-d8": make_host_mem_store_options()}), "store_options", "'tbe-d8'", "'tbe-d4'"),
    (lambda: ours([(4, 4), (4, 8)], [0, 1], pooling_mode=PoolingMode.NONE), "dims", "[4, 8]"),
    (states(ADAM, {"momentum1": BF16}), STATES, "bfloat16", "give each the same"),
    (states(ADAM, {"momentum3": BF16}), STATES, "momentum3"),
    (states(ADAM, {"momentum1": torch.int8}), f"{STATES}['momentum1']=", "int8"),
    (states(ROWWISE, {"momentum1": BF16}), STATES, "momentum1"),
    (states(OptimType.EXACT_SGD, {"momentum1": BF16}), STATES, "momentum1"),
    (states(ADAGRAD, {"momentum1": torch.float16}), "state_dtype=", "float16"),
    *[(specs([(4, 4, given, CPU)]), "EmbeddingLocation") for given in (PoolingMode.SUM, True, "SUM", 77, None)],
    *[(specs([(4, 4, HOST, CPU)] * 2, given), "feature_table_map=") for given in ([0], [0, 2], [], "01", [0, 1.5])],
    *[(specs(given), "embedding_specs") for given in ([], [(4, 4)], [(0, 4, HOST, CPU)], [(4, 0, HOST, CPU)])],
    (specs([(4, 4, EmbeddingLocation.MTIA, CPU)]), "embedding_specs"),
    (specs([(4, 4, HOST, CPU), (4, 4, HOST, ComputeDevice.CUDA)]), "embedding_specs"),
    (ssd([(10, 4)], 0), "cache_sets=", "0"),
    (ssd([(10, 4)], 1.5), "cache_sets=", "1.5"),
    *[(ssd(given, 1), "embedding_specs=", str(given)) for given in ([], None, [(10, "4")], [(10, 4, 0, 0)], [10])],
    (change(lr=0.1, lower_bound=1.0), "lower_bound=", "1.0"),
    (change(eps=0.1), "eps=", "0.1"),
    (change(lr=-1), "lr=", "-1"),
    (change(ROWWISE, weight_decay=0.5), "weight_decay=", "0.5"),
    (lambda: tbe_of()().set_optimizer_step(-1), "step=", "-1"),
    (lambda: tbe_of()().init_embedding_weights_uniform(1, 0), "low=", "1.0", "high=0.0"),
]


@pytest.mark.parametrize("refusal", OPTIONS)
def test_an_option_that_cannot_be_is_refused(refusal: tuple[Callable[[], Any], str]) -> None:
    call, *named = refusal
    check_refusal((call, OptionError, *named))


INPUTS = [
    (([1, 2], OFFSETS), "indices", "list"),
    ((torch.tensor([1.0, 2.0]), OFFSETS), "indices", "torch.float32 (2,)"),
    ((torch.tensor([[1, 2]]), OFFSETS), "indices", "(1, 2)"),
    ((IDS, torch.tensor([0.0, 2.0])), "offsets", "torch.float32"),
    ((IDS, torch.tensor([0, 2])), "offsets", "2"),
    ((IDS, torch.empty(0, dtype=torch.int64)), "offsets", "0"),
    ((IDS, torch.tensor([0, 1, 1])), "offsets"),
    ((IDS, torch.tensor([0, 2, 1])), "offsets"),
    ((IDS, torch.tensor([1, 1, 2])), "offsets"),
    ((IDS, OFFSETS, torch.ones(3)), "per_sample_weights", "(3,)"),
    ((IDS, OFFSETS, torch.ones(2), torch.ones(3)), "feature_requires_grad", "give a tensor of 2 integers"),
    ((IDS, OFFSETS, torch.ones(2), "ab"), "feature_requires_grad", "give a tensor"),
    ((IDS, OFFSETS, None, None, torch.ones(2)), "batch_size_per_feature_per_rank"),
    ((IDS, OFFSETS, None, None, [[1], [2]]), "3 bags", "give 4 offsets, not 3"),
    ((IDS, OFFSETS, None, None, [[1], [0, 1]]), "batch_size_per_feature_per_rank"),
    ((IDS, OFFSETS, None, None, [[1], [1.5]]), "batch_size_per_feature_per_rank", "1.5"),
]


@pytest.mark.parametrize("refusal", INPUTS)
def test_an_input_that_cannot_be_is_refused(refusal: tuple[Any, str]) -> None:
    given, *named = refusal
    check_refusal((lambda: tbe_of()()(*given), InputError, *named))


def test_without_pooling_there_are_neither_weights_nor_batch_sizes() -> None:
    tbe = tbe_of(pooling_mode=PoolingMode.NONE)()
    for name, given in (("per_sample_weights", torch.ones(2)), ("batch_size_per_feature_per_rank", [[1], [1]])):
        check_refusal((lambda given={name: given}: tbe(IDS, OFFSETS, **given), InputError, name, "PoolingMode.NONE"))


@pytest.mark.parametrize("name", REFUSED_ARGS)
def test_an_argument_without_a_meaning_is_refused_by_name(name: str) -> None:
    default, reason = REFUSED_ARGS[name]
    given = not default if isinstance(default, bool) else "other"
    check_refusal(
        (tbe_of(weights_precision=torch.float16, **{name: given}), OptionError, f"{name}={given!r}: {reason}")
    )
    tbe_of(**{name: default})()


@pytest.mark.parametrize("name", REFUSED_CALL_ARGS)
def test_an_argument_of_a_call_without_a_meaning_is_refused_by_name(name: str) -> None:
    tbe = tbe_of()()
    for call in (tbe, tbe.prefetch):
        with pytest.raises(InputError, match=f"^{name}="):
            call(IDS, OFFSETS, **{name: torch.ones(2)})
        call(IDS, OFFSETS, **{name: None})


BUILT = {ADAM, ADAGRAD, ROWWISE, LAMB, LARS, OptimType.EXACT_SGD, OptimType.PARTIAL_ROWWISE_ADAM}
BUILT |= {OptimType.PARTIAL_ROWWISE_LAMB, OptimType.NONE}


@pytest.mark.parametrize("optimizer", OptimType)
def test_an_optimizer_that_is_not_built_names_the_nearest(optimizer: OptimType) -> None:
    if optimizer in BUILT:
        tbe_of(optimizer=optimizer)()
        return
    with pytest.raises(OptionError, match=f"OptimType.{optimizer.name} .*nearest.* (OptimType.)?[A-Z_]+$"):
        tbe_of(optimizer=optimizer)()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"eps": 0.1, "weight_decay": 0.1}, ["eps: OptimType.EXACT_SGD", "weight_decay: OptimType.EXACT_SGD"]),
        ({"optimizer": ADAGRAD, "momentum": 0.1}, ["momentum: OptimType.EXACT_ADAGRAD"]),
        (
            {"optimizer": ROWWISE, "beta1": 0.5, "weight_decay": 0.1},
            ["beta1: OptimType.EXACT_ROWWISE_ADAGRAD", "weight_decay: with WeightDecayMode.NONE"],
        ),
        ({"cache_load_factor": 0.5}, ["cache_load_factor: "]),
        ({"cache_algorithm": CacheAlgorithm.LFU, "store_options": make_host_mem_store_options()}, ["cache_algorithm"]),
        ({"use_experimental_tbe": True, "prefetch_pipeline": True}, ["use_experimental_tbe: ", "prefetch_pipeline: "]),
        ({"stochastic_rounding": False, "preallocated_host_buffers": {}, "optimizer_state_dtypes": {}}, []),
    ],
)
def test_an_argument_that_changes_nothing_is_taken_and_said_once(options: Any, said: list[str], caplog: Any) -> None:
    asked, plain = tbe_of(**options)(), tbe_of(optimizer=options.get("optimizer", "exact_sgd"))()
    for _ in range(2):
        rows = [tbe(IDS, OFFSETS) for tbe in (asked, plain)]
        assert torch.equal(*rows)
        for found in rows:
            found.sum().backward()
    lines = [record.message for record in caplog.records]
    assert len(lines) == bool(said)
    assert all("change nothing" in lines[0] and part in lines[0] for part in said)


def test_identities_of_a_hash_change_nothing_and_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    tbe, given = tbe_of()(), dict.fromkeys(IGNORED_CALL_ARGS, torch.tensor([7, 8]))
    tbe.prefetch(IDS, OFFSETS, **dict.fromkeys(IGNORED_CALL_ARGS))
    assert not caplog.records
    for _ in range(2):
        tbe.prefetch(IDS, OFFSETS, **given)
        assert torch.equal(tbe(IDS, OFFSETS, **given), tbe(IDS, OFFSETS))
    [line] = [record.message for record in caplog.records]
    assert "hash_zch_identities, hash_zch_runtime_meta" in line


def test_no_number_is_set_if_one_is_refused() -> None:
    tbe = tbe_of(learning_rate=0.5)()
    with pytest.raises(OptionError):
        tbe.update_hyper_parameters({"lr": 0.1, "lower_bound": 1.0})
    assert tbe.get_learning_rate() == 0.5


def test_tables_and_features_are_attributes_and_found_by_name_and_number() -> None:
    tbe = ours(TABLES, [0, 0, 1], table_names=["user", "item"])
    assert tbe.embedding_specs == [(rows, dim, HOST, CPU) for rows, dim in TABLES]
    assert tbe.feature_table_map == [0, 0, 1]
    assert ours(TABLES, None).feature_table_map == [0, 1]
    assert tbe.embedding_of("item") is tbe.embedding_of(1)
    check_refusal((lambda: tbe.embedding_of("users"), InputError, "'tbe'", "'users'", "0 to 1", "'user', 'item'"))


def test_locations_are_stores() -> None:
    places = [EmbeddingLocation.DEVICE, EmbeddingLocation.MANAGED, EmbeddingLocation.MANAGED_CACHING, HOST]
    options = {"cache_load_factor": 0.5, "cache_algorithm": CacheAlgorithm.LFU, "optimizer": ROWWISE}
    tbe = TableBatchedEmbeddingBags([(6400, 4, place, CPU) for place in places], **options)
    stores = {embedding.name: embedding.store_options for embedding in tbe.embeddings.values()}
    assert {name: store.store for name, store in stores.items()} == {
        "tbe-d4-device": "device_mem",
        "tbe-d4-managed": "host_mem",
        "tbe-d4-managed_caching": "cached_host_mem",
        "tbe-d4-host": "host_mem",
    }
    assert stores["tbe-d4-managed_caching"].cache_policy == "lfu"
    tbe(torch.arange(4), torch.arange(5))
    assert tbe.metrics()["tbe-d4-managed_caching"]["device"]["capacity"] == 3200


def test_a_store_is_divided_by_dim(capsys: pytest.CaptureFixture[str]) -> None:
    store = make_cached_host_mem_store_options(40)
    tbe = ours([(10, 4), (10, 60), (10, 4)], [0, 1, 2], store_options=store, name="wide")
    assert list(tbe.embeddings) == ["wide-d4", "wide-d60"]
    small, large = (embedding.store_options.cache_budget_mb for embedding in tbe.embeddings.values())
    assert 2 * small < large
    assert small + large <= 40
    tbe.stores()
    assert "wide-d60" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_tables_are_looked_up_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    tbe = TableBatchedEmbeddingBags([(4, 4, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)])
    assert "torch sees no GPU" in caplog.text
    assert tbe(torch.tensor([1]), torch.tensor([0, 1])).device.type == "cpu"
