"""A wrong argument of a public call ends in a raw error, or is taken in silence."""

from __future__ import annotations

import inspect
import itertools
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tierbed
from tierbed import EagerOptimizer, Graph, MultiTableEmbedding, TierbedError, jagged, one_embedding, optim
from tierbed.distributed import World
from tierbed.engine.checks import fits

VALUES: list[Any] = [
    None, True, -1, 3, 1 << 70, 1.5, float("nan"), "", "../x", b"x", [None], ["a"], (), {1: None}, object(), len,
    np.zeros(2), torch.float64, torch.tensor(1.5), torch.zeros(2, 3), torch.tensor([-1, 7]),
    torch.zeros(0, dtype=torch.int64), torch.device("meta"), nn.Linear(1, 1), torch.zeros(2, device="meta"),
]  # fmt: skip
FIXED = 4  # ids of a table
Call = tuple[Callable[..., Any], dict[str, Any]]
CALLS: dict[str, Callable[[Path], Call]] = {}
numbers = itertools.count()


def call(make: Callable[[Path], Call]) -> Callable[[Path], Call]:
    CALLS[make.__name__] = make
    return make


def rows(folder: Path | None = None, name: str = "rows", **options: Any) -> MultiTableEmbedding:
    store = tierbed.make_host_mem_store_options(persistent_path=folder)
    made = MultiTableEmbedding(name, 2, torch.float32, torch.int64, None, store, **options)
    made.put([1, 2], torch.ones(2, 2))
    return made


class Model(Graph):
    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.rows, self.dense = rows(folder), nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.parameters(), 0.1)
        self.add_optimizer(self.optimizer)

    def build(self, ids: Any) -> Any:
        loss = self.dense(self.rows(ids)).sum()
        loss.backward()
        return loss


IDS = torch.tensor([1, 2])


def of_embedding(name: str, stored: bool = False, **good: Any) -> None:
    def make(folder: Path) -> Call:
        embedding = rows(folder if stored else None)
        if stored:
            embedding.save_snapshot("first")
        if name == "prefetch":
            EagerOptimizer(torch.optim.SGD(embedding.parameters(), 0.1), embedding)
        return getattr(embedding, name) if name != "__call__" else embedding, good

    CALLS[f"embedding.{name}"] = make


def of_graph(name: str, stored: bool = False, **good: Any) -> None:
    def make(folder: Path) -> Call:
        graph = Model(folder if stored else None)
        if stored:
            graph(IDS)
            graph.save_snapshot("first")
            graph.save(folder / "saved")
        given = {key: folder / value if key == "path" else value for key, value in good.items()}
        return getattr(graph, name), given

    CALLS[f"graph.{name}"] = make


def of_function(function: Callable[..., Any], **good: Any) -> None:
    CALLS[function.__name__] = lambda folder: (
        function, {name: folder / str(one)[1:] if str(one)[:1] == "@" else one for name, one in good.items()}
    )  # fmt: skip


OPTIONS = {"persistent_path": None, "capacity": None, "open": "resume", "snapshot_path": None, "eviction": "none",
           "admission": None, "ttl_steps": None, "state_dict_snapshots": False, "size_factor": None,
           "storage_dim": None, "physical_block_size": 4096}  # fmt: skip
CACHE = {"cache_budget_mb": 1, "cache_policy": "lru", "overflow_mb": 1}
SSD = {"host_cache_budget_mb": 0, "shards": 1, "read_mode": "buffered", "io_threads": None, "async_io": True,
       "rocksdb_cache_mb": None, "rocksdb_options": None}  # fmt: skip
for maker, given in {
    "make_device_mem_store_options": OPTIONS,
    "make_host_mem_store_options": OPTIONS,
    "make_cached_host_mem_store_options": OPTIONS | CACHE,
    "make_cached_ssd_store_options": OPTIONS | CACHE | SSD | {"persistent_path": "@ssd"},
    "make_uniform_initializer": {"low": 0, "high": 1},
    "make_normal_initializer": {"mean": 0, "std": 1},
    "make_constant_initializer": {"value": 1},
    "make_trunc_normal_initializer": {"mean": 0, "std": 1, "a": -1, "b": 1},
    "make_column_options": {"initializer": {"type": "constant", "value": 1}},
    "make_table_options": {"param": {"type": "constant", "value": 1}, "name": None, "ids": None, "bad_ids": None},
    "hash_keys": {"values": ["a"], "seed": 0, "null": None},
    "check_name": {"name": "a"},
    "load_store_options": {"path": "@x.toml", "name": "a"},
    "list_snapshots": {"folder": "@"},
    "latest_snapshot": {"folder": "@"},
    "plan": {"trace": [IDS], "dim": 4, "state": 0, "tables": 1, "padding_idx": None, "warmup": 0, "samples": 1024,
             "memory_mb": None, "world_size": None, "dtype": torch.float32},
}.items():  # fmt: skip
    of_function(getattr(tierbed, maker), **given)

of_embedding("get", keys=IDS, table_ids=None)
of_embedding("put", keys=IDS, rows=torch.ones(2, 2), table_ids=None, allow_nonfinite=False)
of_embedding("delete", ids=IDS, table_ids=None)
of_embedding("explain", key=1, table=None)
of_embedding("prefetch", ids=IDS, table_ids=None, offsets=None, pooling=None, features=None, num_features=None)
of_embedding(
    "__call__",
    ids=IDS,
    table_ids=None,
    offsets=torch.tensor([0, 2]),
    pooling="sum",
    weights=None,
    features=None,
    num_features=None,
)
of_embedding("load_dense", weights={0: torch.zeros(FIXED, 2)}, states=None, step=None)
of_embedding("load_state_dict", state_dict={}, strict=False, assign=False)
of_embedding("save_snapshot", stored=True, snapshot_name="second", kind="full", background=False, overwrite=False)
of_embedding("check_save", stored=True, snapshot_name="second", kind="full", overwrite=False)
of_embedding(
    "load_snapshot",
    stored=True,
    snapshot_name="first",
    tables=None,
    where=None,
    strict=True,
    weights_only=False,
    convert=False,
)
of_embedding("prune_snapshots", stored=True, keep_last=1, keep_every=None)
of_graph("accumulate_grads", steps=2, mean=False)
of_graph("clip_grad_norm", max_norm=1.0)
of_graph("clip_grad_value", clip_value=1.0)
of_graph("cuda_graph", enabled=False)
of_graph("set_grad_scaler", scaler=None)
of_graph("run", batches=[IDS], ahead=None, progress=False, uneven="stop")
of_graph("profile", batches=[IDS], steps=None, ahead=None)
of_graph("save", stored=True, path="second", overwrite=False)
of_graph("check_save", stored=True, path="second", overwrite=False)
of_graph("load", stored=True, path="saved", optimizers=True, convert=False)
of_graph("save_snapshot", stored=True, snapshot_name="second", kind="full", background=False, overwrite=False)
of_graph("load_snapshot", stored=True, snapshot_name="first")
of_graph("prune_snapshots", stored=True, keep_last=1, keep_every=None)


@call
def embedding(folder: Path) -> Call:
    store = tierbed.make_host_mem_store_options()
    return MultiTableEmbedding, {
        "name": "rows", "embedding_dim": 2, "dtype": torch.float32, "key_type": torch.int64, "tables": None,
        "store_options": store, "default_initializer": None, "padding_idx": None, "seed": None,
        "output_dtype": torch.float32, "world": None, "state_dtype": torch.float32,
    }  # fmt: skip


@call
def add_optimizer(folder: Path) -> Call:
    graph = Model()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    return graph.add_optimizer, {"optimizer": optimizer, "lr_sch": None}


@call
def eager_optimizer(folder: Path) -> Call:
    embedding = rows()
    return EagerOptimizer, {"optimizer": torch.optim.SGD(embedding.parameters(), 0.1), "module": embedding}


@call
def eager_clip(folder: Path) -> Call:
    embedding = rows()
    optimizer = EagerOptimizer(torch.optim.SGD(embedding.parameters(), 0.1), embedding)
    embedding(IDS).sum().backward()
    return optimizer.clip_grad_norm_, {"parameters": list(embedding.parameters()), "max_norm": 1.0}


def plain(folder: Path) -> dict[str, Any]:
    model = nn.ModuleDict({"rows": rows(folder), "dense": nn.Linear(2, 1)})
    optimizer = EagerOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    return {"model": model, "optimizers": optimizer, "schedulers": (), "scaler": None}


@call
def save_checkpoint(folder: Path) -> Call:
    return tierbed.save_checkpoint, {"path": folder / "saved", **plain(folder), "extra": {}, "overwrite": False}


@call
def load_checkpoint(folder: Path) -> Call:
    given = plain(folder)
    tierbed.save_checkpoint(folder / "saved", **given)
    return tierbed.load_checkpoint, {"path": folder / "saved", **given, "convert": False}


@call
def world(folder: Path) -> Call:
    return World, {"group": None, "timeout": 600, "rows": torch.float32, "grads": torch.float32}


@call
def import_snapshot(folder: Path) -> Call:
    return tierbed.import_snapshot, {
        "store": folder / "rows", "name": "imported", "source": np.ones((2, 2), np.float32), "keys": None,
        "table_ids": None, "tensor": None, "states": None, "description": None, "dtype": None, "progress": None,
    }  # fmt: skip


@call
def export_snapshot(folder: Path) -> Call:
    rows(folder).save_snapshot("first")
    [snapshot] = tierbed.list_snapshots(folder / "rows" / "snapshots").snapshots
    return tierbed.export_snapshot, {
        "snapshot": snapshot, "path": folder / "out", "format": "npz", "progress": None, "tables": None, "state": True,
        "overwrite": False,
    }  # fmt: skip


@call
def persistent_table_reader(folder: Path) -> Call:
    rows(folder).save_snapshot("first")
    return tierbed.make_persistent_table_reader, {
        "path": folder / "rows", "snapshot_name": "first", "key_type": torch.int64, "value_type": torch.float32,
        "storage_dim": 2, "physical_block_size": 4096, "table_ids": False,
    }  # fmt: skip


@call
def persistent_table_writer(folder: Path) -> Call:
    return tierbed.make_persistent_table_writer, {
        "path": folder / "rows", "snapshot_name": "first", "key_type": torch.int64, "value_type": torch.float32,
        "storage_dim": 2, "physical_block_size": 4096, "description": None,
    }  # fmt: skip


def of_optimizer(kind: type, **good: Any) -> None:
    CALLS[kind.__name__] = lambda _: (kind, {"params": [nn.Parameter(torch.zeros(2, 2))], "lr": 0.1, **good})


of_optimizer(optim.RowWiseAdagrad, eps=1e-8, weight_decay=0.0, weight_decay_mode="l2", initial_accumulator_value=0.0)
of_optimizer(optim.PartialRowWiseAdam, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, maximize=False)
of_optimizer(optim.LAMB, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, maximize=False)
of_optimizer(optim.PartialRowWiseLAMB, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, maximize=False)
of_optimizer(optim.LarsSGD, momentum=0.9, weight_decay=0.0, eta=0.001, maximize=False)
of_optimizer(optim.CatchUpAdam, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, maximize=False)
of_optimizer(optim.CatchUpAdamW, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, maximize=False)
of_optimizer(
    optim.Ftrl, weight_decay=0.0, lr_power=-0.5, initial_accumulator_value=0.1, lambda1=0.0, lambda2=0.0, beta=0.0
)
of_optimizer(one_embedding.SmartDecayAdam, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, amsgrad=False)


def config(kind: Any = None) -> Any:
    return (kind or jagged.EmbeddingBagConfig)(FIXED, 4, "t", feature_names=["f"])


def keyed() -> Any:
    return jagged.KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))


@call
def bag_collection(folder: Path) -> Call:
    return jagged.EmbeddingBagCollection, {
        "tables": [config()], "store_options": tierbed.make_host_mem_store_options(), "name": "ebc",
        "is_weighted": False, "key_type": torch.int64, "seed": 0, "output_dtype": torch.float32, "share": None,
        "device": None, "world": None, "state_dtype": torch.float32,
    }  # fmt: skip


@call
def collection(folder: Path) -> Call:
    return jagged.EmbeddingCollection, {
        "tables": [config(jagged.EmbeddingConfig)],
        "store_options": tierbed.make_host_mem_store_options(),
        "name": "ec",
        "need_indices": False,
        "key_type": torch.int64,
        "seed": 0,
        "output_dtype": torch.float32,
        "share": None,
        "padded": None,
        "device": None,
        "world": None,
        "state_dtype": torch.float32,
    }


@call
def bag_config(folder: Path) -> Call:
    return jagged.EmbeddingBagConfig, {
        "num_embeddings": 4, "embedding_dim": 4, "name": "t", "data_type": "FP32", "feature_names": ["f"],
        "weight_init_max": None, "weight_init_min": None, "pooling": jagged.PoolingType.SUM,
    }  # fmt: skip


@call
def bag_collection_forward(folder: Path) -> Call:
    return jagged.EmbeddingBagCollection([config()], tierbed.make_host_mem_store_options()), {"features": keyed()}


@call
def keyed_jagged(folder: Path) -> Call:
    return jagged.KeyedJaggedTensor, {
        "keys": ["f"],
        "values": torch.tensor([1, 2, 3]),
        "weights": None,
        "lengths": torch.tensor([1, 2]),
        "offsets": None,
        "stride": None,
    }


@call
def jagged_tensor(folder: Path) -> Call:
    return jagged.JaggedTensor, {
        "values": torch.tensor([1, 2, 3]), "weights": None, "lengths": torch.tensor([1, 2]), "offsets": None
    }  # fmt: skip


@call
def keyed_tensor(folder: Path) -> Call:
    return jagged.KeyedTensor, {"keys": ["f"], "length_per_key": [3], "values": torch.zeros(2, 3), "key_dim": 1}


for name, good in {
    "from_jt_dict": {"jt_dict": keyed().to_dict()}, "concat": {"kjt_list": [keyed()]},
    "permute": {"indices": [0]}, "split": {"segments": [1]}, "__getitem__": {"key": "f"}, "flatten_lengths": {},
}.items():  # fmt: skip
    CALLS[f"keyed_jagged.{name}"] = lambda folder, name=name, good=good: (getattr(keyed(), name), good)  # type: ignore[misc],


@call
def padded(folder: Path) -> Call:
    tensor = jagged.JaggedTensor(torch.ones(3), lengths=torch.tensor([1, 2]))
    return tensor.to_padded_dense, {"desired_length": 2, "padding_value": 0.0}


@call
def table_batched(folder: Path) -> Call:
    place = jagged.EmbeddingLocation.HOST, jagged.ComputeDevice.CPU
    return jagged.TableBatchedEmbeddingBags, {
        "embedding_specs": [(FIXED, 4, *place)],
        "feature_table_map": None,
        "optimizer": jagged.OptimType.EXACT_SGD,
        "learning_rate": 0.1,
        "eps": 1e-8,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.0,
        "momentum": 0.9,
        "eta": 0.1,
        "pooling_mode": jagged.PoolingMode.SUM,
        "weights_precision": torch.float32,
    }


@call
def table_batched_forward(folder: Path) -> Call:
    place = jagged.EmbeddingLocation.HOST, jagged.ComputeDevice.CPU
    bags = jagged.TableBatchedEmbeddingBags([(FIXED, 4, *place)])
    return bags, {"indices": IDS, "offsets": torch.tensor([0, 2]), "per_sample_weights": None}


@call
def table_batched_numbers(folder: Path) -> Call:
    place = jagged.EmbeddingLocation.HOST, jagged.ComputeDevice.CPU
    bags = jagged.TableBatchedEmbeddingBags([(FIXED, 4, *place)])
    return bags.update_hyper_parameters, {"params_dict": {"lr": 0.1}}


@call
def table_batched_rows(folder: Path) -> Call:
    place = jagged.EmbeddingLocation.HOST, jagged.ComputeDevice.CPU
    bags = jagged.TableBatchedEmbeddingBags([(FIXED, 4, *place)])
    return bags.load_dense, {"weights": [torch.zeros(FIXED, 4)], "states": None, "step": None}


@call
def collection_states(folder: Path) -> Call:
    made = jagged.EmbeddingBagCollection([config()], tierbed.make_host_mem_store_options())
    EagerOptimizer(torch.optim.Adagrad(made.parameters()), made)
    made.load_state_dict({"embedding_bags.t.weight": torch.zeros(FIXED, 4)})
    state = {"embedding_bags.t.weight": {"sum": torch.zeros(FIXED, 4), "step": 3}}
    return made.load_torchrec_optimizer_state, {"state": state, "step": None}


@call
def moves(folder: Path) -> Call:
    return jagged.multi_remap_to_groups, {"keys": [["a", "b"]], "lengths": [[2, 3]], "groups": [["b"], ["a"]]}


@call
def moved(folder: Path) -> Call:
    permutes, ins, outs = jagged.multi_remap_to_groups([["a", "b"]], [[2, 3]], [["b"], ["a"]])
    return jagged.permute_multi_embedding, {
        "values": [torch.zeros(2, 5)], "permutes": permutes, "out_lengths_list": [3, 2], "in_lengths": ins,
        "out_lengths": outs,
    }  # fmt: skip


@call
def weighted_positions(folder: Path) -> Call:
    return jagged.PositionWeightedModuleCollection, {"max_feature_lengths": {"f": 3}}


@call
def pipeline(folder: Path) -> Call:
    embedding = rows()
    optimizer = EagerOptimizer(torch.optim.SGD(embedding.parameters(), 0.1), embedding)
    return jagged.TrainPipelineSparseDist, {"model": embedding, "optimizer": optimizer, "device": "cpu"}


@call
def model_parallel(folder: Path) -> Call:
    return jagged.DistributedModelParallel, {
        "module": rows(), "env": None, "device": None, "plan": None, "sharders": None, "init_data_parallel": True,
    }  # fmt: skip


@call
def position_weighted(folder: Path) -> Call:
    return jagged.PositionWeightedModule, {"max_feature_length": 3, "device": None}


@call
def fused_mlp(folder: Path) -> Call:
    return one_embedding.FusedMLP, {
        "in_features": 2,
        "hidden_features": [2],
        "out_features": 1,
        "hidden_dropout_rates": None,
        "out_dropout_rate": 0.0,
        "skip_final_activation": False,
    }


TORCHS = {  # whose errors are torch's or TorchRec's own for the same argument, which takes any object for a bool
    "embedding.load_state_dict": "state_dict strict assign",
    "keyed_jagged": "keys values stride",
    "keyed_jagged.permute": "indices",
    "keyed_jagged.split": "segments",
    "keyed_jagged.__getitem__": "key",
    "keyed_tensor": "keys length_per_key",
    "padded": "desired_length padding_value",
    "position_weighted": "max_feature_length device",
    "pipeline": "device",
    "model_parallel": "device",
    "bag_collection": "device",
    "collection": "device",
    "fused_mlp": "in_features hidden_features out_features",
    "eager_clip": "parameters",
    "bag_config": "feature_names",
    "SmartDecayAdam": "params lr betas eps weight_decay amsgrad",
    "save_checkpoint": "optimizers schedulers",  # a text without letters is a sequence of none
    "load_checkpoint": "optimizers schedulers",
    # the caller's own functions and loaders
    "graph.run": "batches",
    "graph.profile": "batches",
    "embedding.load_snapshot": "where",
    "export_snapshot": "progress",
    "import_snapshot": "progress",
}
IGNORED = {"physical_block_size"}  # of readers and writers: has no effect


def hint(function: Callable[..., Any], name: str) -> Any:
    """The type that the annotation of an argument names; Any where there is none that a program can see."""
    target = function.__init__ if inspect.isclass(function) else function  # type: ignore[misc]
    target = getattr(target, "forward", target) if isinstance(function, nn.Module) else target
    try:
        return typing.get_type_hints(inspect.unwrap(target)).get(name, Any)
    except (NameError, TypeError, AttributeError):
        return Any


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_an_error_of_tierbed_and_none_is_taken_silently(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = []

    def try_value(argument: str, value: Any) -> None:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        function, good = CALLS[name](folder)
        is_torchs = argument in TORCHS.get(name, "").split() or issubclass_of_torch(function)
        try:
            function(**good | {argument: value})
        except TierbedError:
            return
        except Exception as error:
            if not is_torchs and not (argument == "unknown" and isinstance(error, TypeError)):
                wrong.append(f"{argument}={value!r:.40}: {type(error).__name__}: {str(error)[:150]}")
            return
        if argument == "unknown" or not (is_torchs or argument in IGNORED or fits(value, hint(function, argument))):
            wrong.append(f"{argument}={value!r:.40}: taken silently")

    function, good = CALLS[name](tmp_path)
    if name != "load_store_options":
        function(**good)
    for argument in good:
        for value in VALUES:
            try_value(argument, value)
    try_value("unknown", 1)
    assert not wrong, "\n".join(wrong)


def issubclass_of_torch(function: Any) -> bool:
    return inspect.isclass(function) and issubclass(function, torch.optim.Optimizer)
