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
from tierbed.engine.checks import has_type

VALUES: list[Any] = [
    None, True, -1, 3, 1 << 70, 1.5, float("nan"), "", "../x", b"x", [None], ["a"], (), {1: None}, object(), len,
    np.zeros(2), torch.float64, torch.tensor(1.5), torch.zeros(2, 3), torch.tensor([-1, 7]),
    torch.zeros(0, dtype=torch.int64), torch.device("meta"), nn.Linear(1, 1), torch.zeros(2, device="meta"),
]  # fmt: skip
FIXED = 4  # ids of a table
IDS = torch.tensor([1, 2])
KEY_AND_VALUE = {"key_type": torch.int64, "value_type": torch.float32, "storage_dim": 2}
CONSTANT = {"type": "constant", "value": 1}
HOST = tierbed.make_host_mem_store_options()
Call = tuple[
    Callable[..., Any], dict[str, Any]
]  # a function, and good values of arguments that need others than theirs


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


def rows(folder: Path | None = None) -> MultiTableEmbedding:
    store = tierbed.make_host_mem_store_options(persistent_path=folder)
    made = MultiTableEmbedding("rows", 2, torch.float32, torch.int64, None, store)
    made.put([1, 2], torch.ones(2, 2))
    return made


def saved(folder: Path) -> MultiTableEmbedding:
    made = rows(folder)
    made.save_snapshot("first")
    return made


def saved_graph(folder: Path) -> Model:
    graph = Model(folder)
    graph.save_snapshot("first")
    graph.save(folder / "saved")
    return graph


def eager(made: MultiTableEmbedding) -> EagerOptimizer:
    return EagerOptimizer(torch.optim.SGD(made.parameters(), 0.1), made)


def trained(made: Any) -> Any:
    eager(made)
    return made


def plain(folder: Path) -> dict[str, Any]:
    model = nn.ModuleDict({"rows": rows(folder), "dense": nn.Linear(2, 1)})
    optimizer = EagerOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    return {"path": folder / "saved", "model": model, "optimizers": optimizer}


def clipping(folder: Path) -> Call:
    made = rows()
    optimizer = eager(made)
    made(IDS).sum().backward()
    return optimizer.clip_grad_norm_, {"parameters": list(made.parameters()), "max_norm": 1.0}


def loading(folder: Path) -> Call:
    given = plain(folder)
    tierbed.save_checkpoint(**given)
    return tierbed.load_checkpoint, given


def exporting(folder: Path) -> Call:
    saved(folder)
    [snapshot] = tierbed.list_snapshots(folder / "rows" / "snapshots").snapshots
    return tierbed.export_snapshot, {"snapshot": snapshot, "path": folder / "out", "format": "npz"}


def loading_states(folder: Path) -> Call:
    made = jagged.EmbeddingBagCollection([config()], HOST)
    EagerOptimizer(torch.optim.Adagrad(made.parameters()), made)
    made.load_state_dict({"embedding_bags.t.weight": torch.zeros(FIXED, 4)})
    state = {"embedding_bags.t.weight": {"sum": torch.zeros(FIXED, 4), "step": 3}}
    return made.load_torchrec_optimizer_state, {"state": state}


def moving(folder: Path) -> Call:
    permutes, ins, outs = jagged.multi_remap_to_groups([["a", "b"]], [[2, 3]], [["b"], ["a"]])
    given = {"values": [torch.zeros(2, 5)], "permutes": permutes, "in_lengths": ins, "out_lengths": outs}
    return jagged.permute_multi_embedding, {**given, "out_lengths_list": [3, 2]}


def config(kind: Any = jagged.EmbeddingBagConfig) -> Any:
    return kind(FIXED, 4, "t", feature_names=["f"])


def keyed() -> Any:
    return jagged.KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))


def bags() -> Any:
    return jagged.TableBatchedEmbeddingBags(SPECS)


def of(function: Callable[..., Any], **given: Any) -> Callable[[Path], Call]:
    """A call with good values, in which "@name" is a path in the folder of the test."""
    return lambda folder: (function, at(folder, given))


def method(made: Callable[[Path], Any], name: str, **given: Any) -> Callable[[Path], Call]:
    return lambda folder: (getattr(made(folder), name), at(folder, given))


def at(folder: Path, given: dict[str, Any]) -> dict[str, Any]:
    return {name: folder / one[1:] if isinstance(one, str) and one[:1] == "@" else one for name, one in given.items()}


LENGTHS = {"values": torch.tensor([1, 2, 3]), "lengths": torch.tensor([1, 2])}
SPECS = [(FIXED, 4, jagged.EmbeddingLocation.HOST, jagged.ComputeDevice.CPU)]
OF_EMBEDDINGS: dict[str, dict[str, Any]] = {
    "get": {"keys": IDS}, "put": {"keys": IDS, "rows": torch.ones(2, 2)}, "delete": {"ids": IDS}, "explain": {"key": 1},
    "prefetch": {"ids": IDS},
    "load_dense": {"weights": {0: torch.zeros(FIXED, 2)}}, "load_state_dict": {"state_dict": {}, "strict": False},
}  # fmt: skip
OF_SAVED: dict[str, dict[str, Any]] = {
    "save_snapshot": {"snapshot_name": "second"}, "load_snapshot": {"snapshot_name": "first"},
    "prune_snapshots": {"keep_last": 1},
}  # fmt: skip
OF_GRAPHS: dict[str, dict[str, Any]] = {
    "add_optimizer": {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)},
    "accumulate_grads": {"steps": 2}, "clip_grad_norm": {"max_norm": 1.0}, "clip_grad_value": {"clip_value": 1.0},
    "cuda_graph": {"enabled": False}, "set_grad_scaler": {"scaler": None}, "run": {"batches": [IDS]},
    "profile": {"batches": [IDS]},
}  # fmt: skip
OF_SAVED_GRAPHS = {
    **OF_SAVED,
    "save": {"path": "@second"},
    "check_save": {"path": "@second"},
    "load": {"path": "@saved"},
}
OF_KEYED: dict[str, dict[str, Any]] = {
    "from_jt_dict": {"jt_dict": keyed().to_dict()}, "concat": {"kjt_list": [keyed()]}, "permute": {"indices": [0]},
    "split": {"segments": [1]}, "__getitem__": {"key": "f"}, "flatten_lengths": {},
}  # fmt: skip
CALLS: dict[str, Callable[[Path], Call]] = {
    "device_options": of(tierbed.make_device_mem_store_options),
    "host_options": of(tierbed.make_host_mem_store_options),
    "cached_host_options": of(tierbed.make_cached_host_mem_store_options, cache_budget_mb=1),
    "ssd_options": of(tierbed.make_cached_ssd_store_options, cache_budget_mb=1, persistent_path="@ssd"),
    "uniform_initializer": of(tierbed.make_uniform_initializer),
    "normal_initializer": of(tierbed.make_normal_initializer),
    "constant_initializer": of(tierbed.make_constant_initializer, value=1),
    "trunc_normal_initializer": of(tierbed.make_trunc_normal_initializer),
    "column_options": of(tierbed.make_column_options, initializer=CONSTANT),
    "table_options": of(tierbed.make_table_options, param=CONSTANT),
    "hash_keys": of(tierbed.hash_keys, values=["a"]),
    "check_name": of(tierbed.check_name, name="a"),
    "load_store_options": of(tierbed.load_store_options, path="@x.toml", name="a"),
    "list_snapshots": of(tierbed.list_snapshots, folder="@"),
    "latest_snapshot": of(tierbed.latest_snapshot, folder="@"),
    "plan": of(tierbed.plan, trace=[IDS], dim=4, state=0, samples=1024),
    "embedding": of(
        MultiTableEmbedding, name="rows", embedding_dim=2, dtype=torch.float32, key_type=torch.int64, tables=None,
        store_options=HOST,
    ),
    **{f"embedding.{name}": method(lambda _: trained(rows()), name, **good) for name, good in OF_EMBEDDINGS.items()},
    "embedding.forward": lambda _: (rows(), {"ids": IDS, "offsets": torch.tensor([0, 2]), "pooling": "sum"}),
    **{f"embedding.{name}": method(saved, name, **good) for name, good in OF_SAVED.items()},
    "embedding.check_save": method(saved, "check_save", snapshot_name="second"),
    **{f"graph.{name}": method(lambda _: Model(), name, **good) for name, good in OF_GRAPHS.items()},
    **{f"graph.{name}": method(saved_graph, name, **good) for name, good in OF_SAVED_GRAPHS.items()},
    "eager_optimizer": lambda _: (
        EagerOptimizer, {"optimizer": torch.optim.SGD((made := rows()).parameters(), 0.1), "module": made}
    ),
    "eager_clip": clipping,
    "save_checkpoint": lambda folder: (tierbed.save_checkpoint, {**plain(folder), "extra": {}}),
    "load_checkpoint": loading,
    "world": of(World),
    "import_snapshot": of(
        tierbed.import_snapshot, store="@rows", name="imported", source=np.ones((2, 2), np.float32)
    ),
    "export_snapshot": exporting,
    "persistent_table_reader": lambda folder: (saved(folder), of(
        tierbed.make_persistent_table_reader, path="@rows", snapshot_name="first", **KEY_AND_VALUE
    )(folder))[1],
    "persistent_table_writer": of(
        tierbed.make_persistent_table_writer, path="@rows", snapshot_name="first", **KEY_AND_VALUE
    ),
    "bag_collection": of(jagged.EmbeddingBagCollection, tables=[config()], store_options=HOST, name="ebc"),
    "bag_collection_forward": lambda _: (jagged.EmbeddingBagCollection([config()], HOST), {"features": keyed()}),
    "collection": of(
        jagged.EmbeddingCollection, tables=[config(jagged.EmbeddingConfig)], store_options=HOST, name="ec"
    ),
    "collection_states": loading_states,
    "bag_config": of(jagged.EmbeddingBagConfig, num_embeddings=4, embedding_dim=4, name="t", feature_names=["f"]),
    "keyed_jagged": of(jagged.KeyedJaggedTensor, keys=["f"], **LENGTHS),
    **{f"keyed_jagged.{name}": method(lambda _: keyed(), name, **good) for name, good in OF_KEYED.items()},
    "jagged_tensor": of(jagged.JaggedTensor, **LENGTHS),
    "keyed_tensor": of(jagged.KeyedTensor, keys=["f"], length_per_key=[3], values=torch.zeros(2, 3)),
    "padded": of(jagged.JaggedTensor(torch.ones(3), lengths=torch.tensor([1, 2])).to_padded_dense, desired_length=2),
    "table_batched": of(jagged.TableBatchedEmbeddingBags, embedding_specs=SPECS),
    "table_batched_forward": lambda _: (bags(), {"indices": IDS, "offsets": torch.tensor([0, 2])}),
    "table_batched_numbers": method(lambda _: bags(), "update_hyper_parameters", params_dict={"lr": 0.1}),
    "table_batched_rows": method(lambda _: bags(), "load_dense", weights=[torch.zeros(FIXED, 4)]),
    "moves": of(jagged.multi_remap_to_groups, keys=[["a", "b"]], lengths=[[2, 3]], groups=[["b"], ["a"]]),
    "moved": moving,
    "weighted_positions": of(jagged.PositionWeightedModuleCollection, max_feature_lengths={"f": 3}),
    "position_weighted": of(jagged.PositionWeightedModule, max_feature_length=3),
    "pipeline": lambda _: (
        jagged.TrainPipelineSparseDist, {"model": (made := rows()), "optimizer": eager(made), "device": "cpu"}
    ),
    "model_parallel": lambda _: (jagged.DistributedModelParallel, {"module": rows()}),
    "fused_mlp": of(one_embedding.FusedMLP, in_features=2, hidden_features=[2], out_features=1),
    **{kind.__name__: of(kind, params=[nn.Parameter(torch.zeros(2, 2))]) for kind in (
        optim.RowWiseAdagrad, optim.PartialRowWiseAdam, optim.LAMB, optim.PartialRowWiseLAMB, optim.LarsSGD,
        optim.CatchUpAdam, optim.CatchUpAdamW, optim.Ftrl, one_embedding.SmartDecayAdam,
    )},
}  # fmt: skip
TORCHS = {  # whose errors are torch's or TorchRec's own for the same argument, which takes any object for a bool
    "embedding.load_state_dict": "state_dict strict assign",
    "keyed_jagged": "keys values stride stride_per_key_per_rank stride_per_key inverse_indices",
    "keyed_jagged.permute": "indices indices_tensor",
    "keyed_jagged.split": "segments",
    "keyed_jagged.__getitem__": "key",
    "keyed_tensor": "keys length_per_key",
    "padded": "desired_length padding_value",
    "position_weighted": "max_feature_length device",
    "weighted_positions": "device",
    "table_batched": "device",
    "pipeline": "device execute_all_batches apply_jit pipeline_postproc custom_model_fwd",
    "model_parallel": "device",
    "bag_collection": "device",
    "collection": "device",
    "fused_mlp": "in_features hidden_features out_features",
    "eager_clip": "parameters",
    "bag_config": "feature_names group init_fn need_pos total_num_buckets use_virtual_table stash_weights "
    "virtual_table_eviction_policy enable_embedding_update pruning_indices_remapping num_embeddings_post_pruning "
    "input_dim bad_ids",
    "SmartDecayAdam": "params lr betas eps weight_decay amsgrad do_bias_correction contiguous_params fused",
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
folders = (f"{number}" for number in itertools.count())


def arguments(function: Callable[..., Any]) -> list[str]:
    found = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters.values()
    return [one.name for one in found if one.kind is not one.VAR_KEYWORD]


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
    """After an error of tierbed, the next value is given to the same object."""
    monkeypatch.chdir(tmp_path)

    def fresh() -> Call:
        folder = tmp_path / next(folders)
        folder.mkdir()
        return CALLS[name](folder)

    function, good = fresh()
    wrong, of_torch = [], inspect.isclass(function) and issubclass(function, torch.optim.Optimizer)
    tried = [(argument, value) for argument in arguments(function) for value in VALUES]
    if name != "load_store_options":
        function(**good)
        function, good = fresh()
    for argument, value in [*tried, ("unknown", 1)]:
        is_torchs = of_torch or argument in TORCHS.get(name, "").split()
        try:
            function(**good | {argument: value})
        except TierbedError:
            continue
        except Exception as error:
            if not is_torchs and not (argument == "unknown" and isinstance(error, TypeError)):
                wrong.append(f"{argument}={value!r:.40}: {type(error).__name__}: {str(error)[:150]}")
        else:
            is_allowed = is_torchs or argument in IGNORED or has_type(value, hint(function, argument))
            if argument == "unknown" or not is_allowed:
                wrong.append(f"{argument}={value!r:.40}: taken silently")
        function, good = fresh()
    assert not wrong, "\n".join(wrong)
