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
    graph(IDS)
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


def reading(folder: Path) -> Call:
    saved(folder)
    return tierbed.make_persistent_table_reader, {
        "path": folder / "rows", "snapshot_name": "first", **KEY_AND_VALUE
    }  # fmt: skip


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
    specs = [(FIXED, 4, jagged.EmbeddingLocation.HOST, jagged.ComputeDevice.CPU)]
    return jagged.TableBatchedEmbeddingBags(specs)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, 2))]


LENGTHS = {"values": torch.tensor([1, 2, 3]), "lengths": torch.tensor([1, 2])}
CALLS: dict[str, Callable[[Path], Call]] = {
    "make_device_mem_store_options": lambda _: (tierbed.make_device_mem_store_options, {}),
    "make_host_mem_store_options": lambda _: (tierbed.make_host_mem_store_options, {}),
    "make_cached_host_mem_store_options": lambda _: (
        tierbed.make_cached_host_mem_store_options, {"cache_budget_mb": 1}
    ),
    "make_cached_ssd_store_options": lambda folder: (
        tierbed.make_cached_ssd_store_options, {"cache_budget_mb": 1, "persistent_path": folder / "ssd"}
    ),
    "make_uniform_initializer": lambda _: (tierbed.make_uniform_initializer, {}),
    "make_normal_initializer": lambda _: (tierbed.make_normal_initializer, {}),
    "make_constant_initializer": lambda _: (tierbed.make_constant_initializer, {"value": 1}),
    "make_trunc_normal_initializer": lambda _: (tierbed.make_trunc_normal_initializer, {}),
    "make_column_options": lambda _: (tierbed.make_column_options, {"initializer": CONSTANT}),
    "make_table_options": lambda _: (tierbed.make_table_options, {"param": CONSTANT}),
    "hash_keys": lambda _: (tierbed.hash_keys, {"values": ["a"]}),
    "check_name": lambda _: (tierbed.check_name, {"name": "a"}),
    "load_store_options": lambda folder: (tierbed.load_store_options, {"path": folder / "x.toml", "name": "a"}),
    "list_snapshots": lambda folder: (tierbed.list_snapshots, {"folder": folder}),
    "latest_snapshot": lambda folder: (tierbed.latest_snapshot, {"folder": folder}),
    "plan": lambda _: (tierbed.plan, {"trace": [IDS], "dim": 4, "state": 0, "samples": 1024}),
    "embedding": lambda _: (MultiTableEmbedding, {
        "name": "rows", "embedding_dim": 2, "dtype": torch.float32, "key_type": torch.int64, "tables": None,
        "store_options": HOST,
    }),
    "embedding.get": lambda _: (rows().get, {"keys": IDS}),
    "embedding.put": lambda _: (rows().put, {"keys": IDS, "rows": torch.ones(2, 2)}),
    "embedding.delete": lambda _: (rows().delete, {"ids": IDS}),
    "embedding.explain": lambda _: (rows().explain, {"key": 1}),
    "embedding.prefetch": lambda _: (trained(rows()).prefetch, {"ids": IDS}),
    "embedding.__call__": lambda _: (rows(), {"ids": IDS, "offsets": torch.tensor([0, 2]), "pooling": "sum"}),
    "embedding.load_dense": lambda _: (rows().load_dense, {"weights": {0: torch.zeros(FIXED, 2)}}),
    "embedding.load_state_dict": lambda _: (rows().load_state_dict, {"state_dict": {}, "strict": False}),
    "embedding.save_snapshot": lambda folder: (saved(folder).save_snapshot, {"snapshot_name": "second"}),
    "embedding.check_save": lambda folder: (saved(folder).check_save, {"snapshot_name": "second"}),
    "embedding.load_snapshot": lambda folder: (saved(folder).load_snapshot, {"snapshot_name": "first"}),
    "embedding.prune_snapshots": lambda folder: (saved(folder).prune_snapshots, {"keep_last": 1}),
    "graph.add_optimizer": lambda _: (
        Model().add_optimizer, {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)}
    ),
    "graph.accumulate_grads": lambda _: (Model().accumulate_grads, {"steps": 2}),
    "graph.clip_grad_norm": lambda _: (Model().clip_grad_norm, {"max_norm": 1.0}),
    "graph.clip_grad_value": lambda _: (Model().clip_grad_value, {"clip_value": 1.0}),
    "graph.cuda_graph": lambda _: (Model().cuda_graph, {"enabled": False}),
    "graph.set_grad_scaler": lambda _: (Model().set_grad_scaler, {"scaler": None}),
    "graph.run": lambda _: (Model().run, {"batches": [IDS]}),
    "graph.profile": lambda _: (Model().profile, {"batches": [IDS]}),
    "graph.save": lambda folder: (saved_graph(folder).save, {"path": folder / "second"}),
    "graph.check_save": lambda folder: (saved_graph(folder).check_save, {"path": folder / "second"}),
    "graph.load": lambda folder: (saved_graph(folder).load, {"path": folder / "saved"}),
    "graph.save_snapshot": lambda folder: (saved_graph(folder).save_snapshot, {"snapshot_name": "second"}),
    "graph.load_snapshot": lambda folder: (saved_graph(folder).load_snapshot, {"snapshot_name": "first"}),
    "graph.prune_snapshots": lambda folder: (saved_graph(folder).prune_snapshots, {"keep_last": 1}),
    "eager_optimizer": lambda _: (
        EagerOptimizer, {"optimizer": torch.optim.SGD((made := rows()).parameters(), 0.1), "module": made}
    ),
    "eager_clip": clipping,
    "save_checkpoint": lambda folder: (tierbed.save_checkpoint, {**plain(folder), "extra": {}}),
    "load_checkpoint": loading,
    "world": lambda _: (World, {}),
    "import_snapshot": lambda folder: (
        tierbed.import_snapshot,
        {"store": folder / "rows", "name": "imported", "source": np.ones((2, 2), np.float32)},
    ),
    "export_snapshot": exporting,
    "persistent_table_reader": reading,
    "persistent_table_writer": lambda folder: (
        tierbed.make_persistent_table_writer, {"path": folder / "rows", "snapshot_name": "first", **KEY_AND_VALUE}
    ),
    "bag_collection": lambda _: (
        jagged.EmbeddingBagCollection, {"tables": [config()], "store_options": HOST, "name": "ebc"}
    ),
    "collection": lambda _: (
        jagged.EmbeddingCollection,
        {"tables": [config(jagged.EmbeddingConfig)], "store_options": HOST, "name": "ec"},
    ),
    "bag_config": lambda _: (
        jagged.EmbeddingBagConfig, {"num_embeddings": 4, "embedding_dim": 4, "name": "t", "feature_names": ["f"]}
    ),
    "bag_collection_forward": lambda _: (jagged.EmbeddingBagCollection([config()], HOST), {"features": keyed()}),
    "collection_states": loading_states,
    "keyed_jagged": lambda _: (jagged.KeyedJaggedTensor, {"keys": ["f"], **LENGTHS}),
    "keyed_jagged.from_jt_dict": lambda _: (keyed().from_jt_dict, {"jt_dict": keyed().to_dict()}),
    "keyed_jagged.concat": lambda _: (keyed().concat, {"kjt_list": [keyed()]}),
    "keyed_jagged.permute": lambda _: (keyed().permute, {"indices": [0]}),
    "keyed_jagged.split": lambda _: (keyed().split, {"segments": [1]}),
    "keyed_jagged.__getitem__": lambda _: (keyed().__getitem__, {"key": "f"}),
    "keyed_jagged.flatten_lengths": lambda _: (keyed().flatten_lengths, {}),
    "jagged_tensor": lambda _: (jagged.JaggedTensor, LENGTHS),
    "keyed_tensor": lambda _: (
        jagged.KeyedTensor, {"keys": ["f"], "length_per_key": [3], "values": torch.zeros(2, 3)}
    ),
    "padded": lambda _: (
        jagged.JaggedTensor(torch.ones(3), lengths=torch.tensor([1, 2])).to_padded_dense, {"desired_length": 2}
    ),
    "table_batched": lambda _: (jagged.TableBatchedEmbeddingBags, {
        "embedding_specs": [(FIXED, 4, jagged.EmbeddingLocation.HOST, jagged.ComputeDevice.CPU)]
    }),
    "table_batched_forward": lambda _: (bags(), {"indices": IDS, "offsets": torch.tensor([0, 2])}),
    "table_batched_numbers": lambda _: (bags().update_hyper_parameters, {"params_dict": {"lr": 0.1}}),
    "table_batched_rows": lambda _: (bags().load_dense, {"weights": [torch.zeros(FIXED, 4)]}),
    "moves": lambda _: (
        jagged.multi_remap_to_groups, {"keys": [["a", "b"]], "lengths": [[2, 3]], "groups": [["b"], ["a"]]}
    ),
    "moved": moving,
    "weighted_positions": lambda _: (jagged.PositionWeightedModuleCollection, {"max_feature_lengths": {"f": 3}}),
    "position_weighted": lambda _: (jagged.PositionWeightedModule, {"max_feature_length": 3}),
    "pipeline": lambda _: (
        jagged.TrainPipelineSparseDist, {"model": (made := rows()), "optimizer": eager(made), "device": "cpu"}
    ),
    "model_parallel": lambda _: (jagged.DistributedModelParallel, {"module": rows()}),
    "fused_mlp": lambda _: (
        one_embedding.FusedMLP, {"in_features": 2, "hidden_features": [2], "out_features": 1}
    ),
    **{kind.__name__: lambda _, kind=kind: (kind, {"params": parameters()}) for kind in (
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
    of_torch = inspect.isclass(function) and issubclass(function, torch.optim.Optimizer)
    tried = [(argument, value) for argument in arguments(function) for value in VALUES]
    if name != "load_store_options":
        function(**good)
        function, good = fresh()
    wrong = []
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
            if argument == "unknown" or not (is_torchs or argument in IGNORED or fits(value, hint(function, argument))):
                wrong.append(f"{argument}={value!r:.40}: taken silently")
        function, good = fresh()
    assert not wrong, "\n".join(wrong)
