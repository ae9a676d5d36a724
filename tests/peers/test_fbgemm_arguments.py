"""An argument of FBGEMM's table-batched embedding is unknown, ignored, or taken for something else."""

from __future__ import annotations

import inspect
from enum import Enum

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import RecordCacheMetrics
from fbgemm_gpu.tbe.config.optimizer_config import (
    EmainplaceModeDefinition,
    EnsembleModeDefinition,
    GlobalWeightDecayDefinition,
    UserEnabledConfigDefinition,
)

from support.fbgemm import SplitTableBatchedEmbeddingBagsCodegen
from support.tbe import ours
from tierbed import make_cached_host_mem_store_options, make_host_mem_store_options
from tierbed.engine.errors import InputError, OptionError
from tierbed.jagged import (
    BoundsCheckMode,
    CacheAlgorithm,
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    PoolingMode,
    TableBatchedEmbeddingBags,
    WeightDecayMode,
)
from tierbed.jagged.tbe.call_arguments import CALL, CONSTRUCTOR, IDLE, IDLE_CALL
from tierbed.jagged.tbe.enums import parse_dtype, parse_enum

ENUMS = [
    BoundsCheckMode,
    CacheAlgorithm,
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    PoolingMode,
    WeightDecayMode,
]
CPU = ComputeDevice.CPU
TABLES = [(10, 4), (20, 4)]


def fbgemms(kind: type[Enum]) -> type[Enum]:
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as training

    return getattr(training, kind.__name__)


def parameters(function) -> dict[str, inspect.Parameter]:
    return {name: one for name, one in inspect.signature(function).parameters.items() if name != "self"}


def plain(value):
    return value.value if isinstance(value, Enum) else value


@pytest.mark.parametrize("kind", ENUMS)
def test_enums_have_fbgemms_names_and_values_and_take_its_members(kind):
    assert {one.name: one.value for one in kind} == {one.name: one.value for one in fbgemms(kind)}
    for member in kind:
        assert parse_enum(kind, fbgemms(kind)(member.value), "it") is parse_enum(kind, member.value, "it") is member


@pytest.mark.parametrize("given", [PoolingMode.SUM, True, "SUM", 77, None])
def test_no_other_enum_is_taken_by_its_value(given):
    with pytest.raises(OptionError, match=r"give one of EmbeddingLocation.DEVICE, "):
        TableBatchedEmbeddingBags([(4, 4, given, CPU)])


def test_every_argument_of_fbgemm_is_here_or_refused():
    peer, mine = SplitTableBatchedEmbeddingBagsCodegen, TableBatchedEmbeddingBags
    assert set(parameters(peer.__init__)) == set(CONSTRUCTOR) | set(IDLE) | set(parameters(mine.__init__)) - {
        "store_options",
        "name",
        "seed",
        "unsupported",
        "world",
    }
    for call in ("forward", "prefetch"):
        assert set(parameters(getattr(peer, call))) <= {*CALL, *IDLE_CALL, *parameters(getattr(mine, call))}


def test_defaults_are_fbgemms():
    peer, mine = parameters(SplitTableBatchedEmbeddingBagsCodegen), parameters(TableBatchedEmbeddingBags)
    defaults = {name: one.default for name, one in mine.items()} | {
        name: was for name, (was, _) in (CONSTRUCTOR | IDLE).items()
    }
    for name, one in peer.items():
        if name == "weights_precision":
            assert parse_dtype(one.default) == defaults[name]
        elif name != "output_dtype":
            assert plain(defaults[name]) == plain(one.default), name


@pytest.mark.parametrize("name", CONSTRUCTOR)
def test_an_argument_without_a_meaning_is_refused_by_name(name):
    default, reason = CONSTRUCTOR[name]
    given = not default if isinstance(default, bool) else "other"
    with pytest.raises(OptionError) as error:
        ours(TABLES, [0, 1], weights_precision=torch.float16, **{name: given})
    assert str(error.value) == f"{name}={given!r}: {reason}"
    ours(TABLES, [0, 1], **{name: default})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"eps": 0.1, "weight_decay": 0.1}, "eps: OptimType.EXACT_SGD has none; weight_decay: OptimType.EXACT_SGD has"),
        ({"optimizer": OptimType.EXACT_ADAGRAD, "momentum": 0.1}, "momentum: OptimType.EXACT_ADAGRAD has none"),
        (
            {"optimizer": OptimType.EXACT_ROWWISE_ADAGRAD, "beta1": 0.5, "weight_decay": 0.1},
            "beta1: OptimType.EXACT_ROWWISE_ADAGRAD has none; weight_decay: with WeightDecayMode.NONE nothing decays",
        ),
        ({"cache_load_factor": 0.5}, "cache_load_factor: no table is in EmbeddingLocation.MANAGED_CACHING"),
        (
            {"cache_algorithm": CacheAlgorithm.LFU, "store_options": make_host_mem_store_options()},
            "cache_algorithm: sto",
        ),
        ({"use_experimental_tbe": True, "prefetch_pipeline": True}, "use_experimental_tbe: tierbed has one"),
        ({"stochastic_rounding": False, "preallocated_host_buffers": {}, "optimizer_state_dtypes": {}}, ""),
    ],
)
def test_an_argument_that_changes_nothing_is_taken_and_said_once(options, said, caplog):
    asked, plain = (
        ours(TABLES, [0, 1], **options),
        ours(TABLES, [0, 1], optimizer=options.get("optimizer", "exact_sgd")),
    )
    lines = [record.message for record in caplog.records]
    assert [
        line.startswith("TableBatchedEmbeddingBags 'tbe': arguments that change nothing: " + said) for line in lines
    ] == ([True] if said else [])
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 1, 2])
    for _ in range(2):
        rows = [tbe(ids, offsets) for tbe in (asked, plain)]
        assert torch.equal(*rows)
        for found in rows:
            found.sum().backward()
    assert len(caplog.records) == len(lines)


def test_weights_of_features_get_a_gradient_as_in_fbgemm():
    ids, offsets, wanted = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), torch.tensor([0, 1])
    tbe = ours(TABLES, [0, 1])
    for table, (rows, dim) in zip(tbe.tables, TABLES, strict=True):
        tbe.embedding_of(table.name).put(torch.arange(rows), torch.rand(rows, dim), table.name)
    weights = torch.rand(3, requires_grad=True)
    tbe(ids, offsets, weights, wanted).sum().backward()
    assert weights.grad[:2].tolist() == [0, 0]
    assert weights.grad[2] != 0
    for given, message in ((torch.ones(3), "give a tensor of 2 integers"), ("ab", "give a tensor")):
        with pytest.raises(InputError, match=message):
            tbe(ids, offsets, weights, given)
    assert torch.equal(tbe(ids, offsets, None, wanted), tbe(ids, offsets))


@pytest.mark.parametrize("name", CALL)
def test_an_argument_of_a_call_is_refused_by_name(name):
    tbe = ours(TABLES, [0, 1])
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 1, 2])
    for call in (tbe, tbe.prefetch):
        with pytest.raises(InputError, match=f"^{name}="):
            call(ids, offsets, **{name: torch.ones(2)})
        call(ids, offsets, **{name: None})


def test_identities_of_a_hash_change_nothing_and_are_said_once(caplog):
    tbe, given = ours(TABLES, [0, 1]), dict.fromkeys(IDLE_CALL, torch.tensor([7, 8]))
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 1, 2])
    tbe.prefetch(ids, offsets, **dict.fromkeys(IDLE_CALL))
    assert not caplog.records
    for _ in range(2):
        tbe.prefetch(ids, offsets, **given)
        assert torch.equal(tbe(ids, offsets, **given), tbe(ids, offsets))
    [line] = [record.message for record in caplog.records]
    assert "these change nothing: hash_zch_identities, hash_zch_runtime_meta" in line


DEFINITIONS = {
    "extra_optimizer_config": (
        UserEnabledConfigDefinition(),
        UserEnabledConfigDefinition(use_rowwise_bias_correction=True),
    ),
    "ensemble_mode": (EnsembleModeDefinition(), EnsembleModeDefinition(step_ema=1)),
    "emainplace_mode": (EmainplaceModeDefinition(), EmainplaceModeDefinition(step_start=1)),
    "global_weight_decay": (GlobalWeightDecayDefinition(), GlobalWeightDecayDefinition(start_iter=1)),
    "record_cache_metrics": (RecordCacheMetrics(False, False), RecordCacheMetrics(True, False)),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_definition_of_defaults_alone_is_taken(name):
    plain, other = DEFINITIONS[name]
    ours(TABLES, [0, 1], **{name: plain})
    with pytest.raises(OptionError, match=f"^{name}="):
        ours(TABLES, [0, 1], **{name: other})


def test_the_tables_and_features_are_attributes():
    tbe = ours(TABLES, [0, 0, 1])
    assert tbe.embedding_specs == [(rows, dim, EmbeddingLocation.HOST, CPU) for rows, dim in TABLES]
    assert tbe.feature_table_map == [0, 0, 1]
    assert ours(TABLES, None).feature_table_map == [0, 1]


def test_an_unknown_argument_is_refused_with_the_nearest():
    with pytest.raises(OptionError, match=r"learning_rat=0.1: there is no such argument; did you mean learning_rate"):
        ours(TABLES, [0, 1], learning_rat=0.1)


BUILT = {
    *("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "ADAM", "PARTIAL_ROWWISE_ADAM"),
    *("LAMB", "PARTIAL_ROWWISE_LAMB", "LARS_SGD", "NONE"),
}


@pytest.mark.parametrize("optimizer", OptimType)
def test_an_optimizer_that_is_not_built_names_the_nearest(optimizer):
    if optimizer.name in BUILT:
        ours(TABLES, [0, 1], optimizer=optimizer)
        return
    with pytest.raises(OptionError, match=f"OptimType.{optimizer.name} .*nearest.* (OptimType.)?[A-Z_]+$"):
        ours(TABLES, [0, 1], optimizer=optimizer)


ROWWISE = OptimType.EXACT_ROWWISE_ADAGRAD


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": ROWWISE, "weight_decay_mode": WeightDecayMode.COUNTER}, "WeightDecayMode.COUNTER: Opt"),
        ({"optimizer": OptimType.ADAM, "weight_decay_mode": WeightDecayMode.L2}, "WeightDecayMode.L2: OptimType.ADAM"),
        ({"weight_decay_mode": WeightDecayMode.DECOUPLE}, "WeightDecayMode.DECOUPLE: OptimType.EXACT_SGD has"),
        ({"learning_rate": -1.0}, "optimizer=OptimType.EXACT_SGD: Invalid learning rate"),
        ({"learning_rate": "fast"}, "learning_rate='fast': give a number"),
        ({"max_gradient": 0.5}, "max_gradient=0.5: nothing is clamped; give gradient_clipping=True"),
        ({"max_gradient": -1, "gradient_clipping": True}, "max_gradient=-1"),
        ({"gradient_clipping": 1}, "gradient_clipping=1"),
        ({"cache_load_factor": 1.5}, "cache_load_factor=1.5: give a number > 0 and <= 1"),
        ({"table_names": ["one"]}, "table_names="),
        ({"table_names": ["one", "one"]}, "both have name='one'"),
        ({"table_names": ["one", None]}, "give a name for each table"),
        ({"output_dtype": torch.int8}, "output_dtype=torch.int8"),
        ({"device": "cuda"}, "device='cuda': embedding_specs say ComputeDevice.CPU"),
        ({"device": "moon"}, "device='moon'"),
        ({"name": "a/b"}, "name='a/b'"),
        ({"name": "a.b"}, "name='a.b': it names modules; use no dots"),
        ({"store_options": {"tbe-d8": make_host_mem_store_options()}}, "did you mean 'tbe-d4'"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(OptionError) as error:
        ours(TABLES, [0, 1], **options)
    assert message in str(error.value)


@pytest.mark.parametrize("feature_table_map", [[0], [0, 2], [], "01", [0, 1.5]])
def test_a_map_that_is_none_is_refused(feature_table_map):
    with pytest.raises(OptionError, match="feature_table_map="):
        TableBatchedEmbeddingBags([(4, 4, EmbeddingLocation.HOST, CPU)] * 2, feature_table_map)


@pytest.mark.parametrize(
    "specs",
    [
        [],
        None,
        [(4, 4)],
        [(0, 4, EmbeddingLocation.HOST, CPU)],
        [(4, 0, EmbeddingLocation.HOST, CPU)],
        [(4, 4, EmbeddingLocation.MTIA, CPU)],
        [(4, 4, EmbeddingLocation.HOST, CPU), (4, 4, EmbeddingLocation.HOST, ComputeDevice.CUDA)],
    ],
)
def test_specs_that_are_none_are_refused(specs):
    with pytest.raises(OptionError, match="embedding_specs"):
        TableBatchedEmbeddingBags(specs)


def test_no_pooling_has_one_dim():
    with pytest.raises(OptionError, match=r"dims \[4, 8\]"):
        ours([(4, 4), (4, 8)], [0, 1], pooling_mode=PoolingMode.NONE)


def test_locations_are_stores():
    places = [EmbeddingLocation.DEVICE, EmbeddingLocation.MANAGED, EmbeddingLocation.MANAGED_CACHING]
    specs = [(6400, 4, place, CPU) for place in (*places, EmbeddingLocation.HOST)]
    options = {"cache_load_factor": 0.5, "cache_algorithm": CacheAlgorithm.LFU, "optimizer": ROWWISE}
    tbe = TableBatchedEmbeddingBags(specs, **options)
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


def test_a_store_is_divided_by_dim(capsys):
    store = make_cached_host_mem_store_options(40)
    tbe = ours([(10, 4), (10, 60), (10, 4)], [0, 1, 2], store_options=store, name="wide")
    assert list(tbe.embeddings) == ["wide-d4", "wide-d60"]
    small, large = (embedding.store_options.cache_budget_mb for embedding in tbe.embeddings.values())
    assert 2 * small < large
    assert small + large <= 40
    tbe.stores()
    assert "wide-d60" in capsys.readouterr().out


def test_without_a_gpu_its_tables_are_looked_up_on_the_cpu(caplog):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    tbe = TableBatchedEmbeddingBags([(4, 4, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)])
    assert "torch sees no GPU" in caplog.text
    assert tbe(torch.tensor([1]), torch.tensor([0, 1])).device.type == "cpu"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (([1, 2], torch.tensor([0, 1, 2])), "indices of 'tbe': got list"),
        ((torch.tensor([1.0, 2.0]), torch.tensor([0, 1, 2])), r"indices of 'tbe': got torch.float32 \(2,\)"),
        ((torch.tensor([[1, 2]]), torch.tensor([0, 1, 2])), "indices of 'tbe'"),
        ((torch.tensor([1, 2]), torch.tensor([0.0, 2.0])), "offsets of 'tbe'"),
        ((torch.tensor([1, 2]), torch.tensor([0, 2])), "offsets of 'tbe': got 2; give features"),
        ((torch.tensor([1, 2]), torch.empty(0, dtype=torch.int64)), "offsets of 'tbe': got 0; give features"),
        ((torch.tensor([1, 2]), torch.tensor([0, 1, 1])), "offsets of"),
        ((torch.tensor([1, 2]), torch.tensor([0, 2, 1])), "offsets of"),
        ((torch.tensor([1, 2]), torch.tensor([1, 1, 2])), "offsets of"),
        ((torch.tensor([1, 2]), torch.tensor([0, 1, 2]), torch.ones(3)), "per_sample_weights of 'tbe'"),
        ((torch.tensor([1, 2]), torch.arange(3), None, None, torch.ones(2)), "batch_size_per_feature_per_rank of"),
        ((torch.tensor([1, 2]), torch.arange(3), None, None, [[1], [2]]), "3 bags, and offsets have 2"),
        ((torch.tensor([1, 2]), torch.arange(3), None, None, [[1], [0, 1]]), "one batch size for each rank"),
        ((torch.tensor([1, 2]), torch.arange(3), None, None, [[1], [1.5]]), "whole numbers"),
    ],
)
def test_inputs_that_are_none_are_refused(call, message):
    with pytest.raises(InputError, match=message):
        ours(TABLES, [0, 1])(*call)


def test_without_pooling_there_are_no_weights():
    with pytest.raises(InputError, match=r"per_sample_weights: PoolingMode\.NONE"):
        ours(TABLES, [0, 1], pooling_mode=PoolingMode.NONE)(torch.tensor([1]), torch.tensor([0, 1, 1]), torch.ones(1))
