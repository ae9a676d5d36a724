"""A method or an argument of TorchRec's containers is missing, or gives something else than TorchRec's.

Every public method is called on ordinary, empty, weighted, variable-batch, meta and single-element batches, ours beside
TorchRec's. docs/torchrec.md has the differences that are on purpose; `DIFFERS` names the calls that show them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Container
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torchrec.modules import embedding_configs, embedding_modules, feature_processor, feature_processor_
from torchrec.sparse import jagged_tensor

import tierbed.jagged as ours
from support.refusals import check_refusal
from tierbed.engine.errors import GraphError, InputError

theirs = SimpleNamespace(
    **{name: getattr(jagged_tensor, name) for name in ("JaggedTensor", "KeyedJaggedTensor", "KeyedTensor")},
    **{name: getattr(embedding_modules, name) for name in ("EmbeddingBagCollection", "EmbeddingCollection")},
    **{name: getattr(embedding_configs, name) for name in ("EmbeddingBagConfig", "EmbeddingConfig", "PoolingType")},
    **{
        name: getattr(feature_processor_, name)
        for name in ("PositionWeightedModule", "PositionWeightedModuleCollection")
    },
    PositionWeightedProcessor=feature_processor.PositionWeightedProcessor,
)
IDS, WEIGHTS = torch.arange(8), torch.arange(8) / 8
NONE = torch.empty(0, dtype=torch.int64)
SIX, FIVE = torch.tensor([2, 0, 1, 1, 1, 3]), torch.tensor([2, 1, 1, 1, 3])
INVERSE = torch.tensor([[0, 1, 0, 1], [2, 1, 0, 0]])
BATCHES: dict[str, dict[str, Any]] = {
    "lengths": {"keys": ["a", "b"], "values": IDS, "lengths": SIX},
    "offsets": {"keys": ["a", "b"], "values": IDS, "offsets": torch.tensor([0, 2, 2, 3, 4, 5, 8])},
    "int32": {"keys": ["a", "b"], "values": IDS, "lengths": SIX.int()},
    "weighted": {"keys": ["a", "b"], "values": IDS, "weights": WEIGHTS, "lengths": SIX, "stride": 3},
    "one": {"keys": ["a"], "values": IDS[:1], "lengths": torch.tensor([1])},
    "nothing": {"keys": [], "values": NONE, "lengths": NONE},
    "nothing of a batch": {"keys": [], "values": NONE, "lengths": NONE, "stride": 4},
    "no values": {"keys": ["a", "b"], "values": NONE, "lengths": torch.zeros(4, dtype=torch.int64)},
    "variable": {"keys": ["a", "b"], "values": IDS, "lengths": FIVE, "stride_per_key_per_rank": [[2], [3]]},
    "variable, weighted": {
        "keys": ["a", "b"], "values": IDS, "weights": WEIGHTS, "offsets": torch.tensor([0, 2, 3, 4, 5, 8]),
        "stride_per_key_per_rank": [[1, 1], [1, 2]],
    },
    "variable, expanded": {
        "keys": ["a", "b"], "values": IDS, "lengths": FIVE, "stride_per_key_per_rank": [[2], [3]],
        "inverse_indices": (["a", "b"], INVERSE),
    },
    "variable, of a batch": {
        "keys": ["a", "b"], "values": IDS, "lengths": FIVE, "stride": 5, "stride_per_key_per_rank": [[2], [3]],
    },
    "variable, of ranks": {
        "keys": ["a", "b"], "values": IDS, "lengths": SIX, "stride_per_key_per_rank": [[0, 2], [1, 3]],
    },
    "variable, alike": {"keys": ["a", "b"], "values": IDS, "lengths": SIX, "stride_per_key_per_rank": [[3], [3]]},
    "variable, no values": {"keys": ["a", "b"], "values": NONE, "lengths": NONE, "stride_per_key_per_rank": [[0], [0]]},
}  # fmt: skip


def methods(names: str) -> dict[str, Callable[[Any], Any]]:
    """Calls of the methods of these names, without arguments."""
    return {name: lambda one, name=name: getattr(one, name)() for name in names.split(" ")}


KEYED = {
    **methods(
        "keys values weights weights_or_none lengths offsets stride stride_per_key "
        "stride_per_key_per_rank device variable_stride_per_key inverse_indices inverse_indices_or_none "
        "length_per_key offset_per_key sync unsync lengths_offset_per_key index_per_key _key_indices "
        "to_dict flatten_lengths length_per_key_or_none offset_per_key_or_none"
    ),
    "itself": lambda one: one,
    "text": lambda one: one.device().type == "meta" or str(one),
    "after sync": lambda one: (one.sync().length_per_key_or_none(), one.offset_per_key_or_none()),
    "to_dict(False)": lambda one: {key: part.values() for key, part in one.to_dict(compute_offsets=False).items()},
    "one key": lambda one: one["a"],
    "no key": lambda one: one["nobody"],
    "split": lambda one: one.split([1, 1]),
    "split of all": lambda one: one.split([2]),
    "split of a part": lambda one: one.split([1]),
    "strides of parts": lambda one: (
        one.stride(),
        [(part.stride(), part.stride_per_key()) for part in (*one.split([1, 0, 1]), *one.split([0, 2]))],
    ),
    "permute": lambda one: one.permute([1, 0]),
    "permute, some": lambda one: one.permute([1]),
    "permute, twice": lambda one: one.permute([0, 0, 1], torch.tensor([0, 0, 1], dtype=torch.int32)),
    "empty_like of a device": lambda one: type(one).empty_like(one, one.device()).stride_per_key(),
    "to": lambda one: one.to(one.device(), non_blocking=True),
    "to meta": lambda one: one.to(torch.device("meta")),
    "to, dtype": lambda one: one.to(one.device(), dtype=torch.float64),
    "copy_": lambda one: one.copy_(copy.deepcopy(one)),
    "tree": lambda one: pytree.tree_map(lambda leaf: leaf, one),
}
CLASS = {
    "is one": lambda kind, given: isinstance(kind(**given), kind),
    "concat": lambda kind, given: kind.concat([kind(**given), kind(**renamed(given))]),
    "concat of one": lambda kind, given: kind.concat([kind(**given)]),
    "from_jt_dict": lambda kind, given: kind.from_jt_dict(kind(**given).to_dict()),
    "from_lengths_sync": lambda kind, given: kind.from_lengths_sync(**of_lengths(given)),
    "synced": lambda kind, given: kind.from_lengths_sync(**of_lengths(given)).offset_per_key_or_none(),
    "from_offsets_sync": lambda kind, given: kind.from_offsets_sync(**of_offsets(given)),
    "by position": lambda kind, given: kind(*map(given.get, list(inspect.signature(kind).parameters)[:7])),
}
# what docs/torchrec.md says of: inverse indices that stay, parts of a batch that keep its size, printing, [0]
DIFFERS = {
    *(("variable, expanded", call) for call in ("split", "split of a part", "flatten_lengths")),
    *(("variable, expanded", call) for call in ("permute", "permute, some", "permute, twice")),
    ("nothing of a batch", "tree"),
    ("variable, of a batch", "tree"),
}


def renamed(given: dict[str, Any]) -> dict[str, Any]:
    keys = [key * 2 for key in given["keys"]]
    inverse = {"inverse_indices": (keys, INVERSE)} if "inverse_indices" in given else {}
    return {**given, "keys": keys, **inverse}


def of_lengths(given: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in given.items() if name != "offsets"}
    return {"lengths": given["offsets"].diff() if "offsets" in given else None, **rest}


def of_offsets(given: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in given.items() if name != "lengths"}
    offsets = torch.cat([NONE.new_zeros(1), given["lengths"].cumsum(0)]) if "lengths" in given else None
    return {"offsets": offsets, **rest}


def on(device: str, given: dict[str, Any]) -> dict[str, Any]:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), given)


def plain(value: Any) -> Any:
    """Values of any kind as Python's, with shapes and, of floats, dtypes. Offsets of nothing are [0]."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype) if value.is_floating_point() else "integers"
        return dtype, tuple(value.shape), "meta" if value.is_meta else value.detach().tolist()
    if isinstance(value, ours.JaggedTensor | theirs.JaggedTensor):
        offsets = plain(value.offsets())
        return plain(value.values()), plain(value.weights_or_none()), plain(value.lengths()), ends(offsets)
    if isinstance(value, ours.KeyedJaggedTensor | theirs.KeyedJaggedTensor):
        numbers = value.stride(), value.stride_per_key(), value.stride_per_key_per_rank()
        parts = value.values(), value.weights_or_none(), value.lengths()
        rest = value.variable_stride_per_key(), plain(value.inverse_indices_or_none())
        return value.keys(), [plain(part) for part in parts], ends(plain(value.offsets())), numbers, rest
    if isinstance(value, ours.KeyedTensor | theirs.KeyedTensor):
        return value.keys(), plain(value.values()), value.length_per_key(), value.key_dim()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return {key: plain(one) for key, one in value.items()} if isinstance(value, dict) else value


def ends(offsets: Any) -> Any:
    return ("integers", (1,), offsets[2] and [0]) if offsets[1] == (0,) else offsets


def outcome(call: Callable[..., Any], *given: Any) -> Any:
    """What a call gives, or that it raises."""
    try:
        return plain(call(*given))
    except Exception:
        return "raises"


def differing(calls: dict[str, Callable[..., Any]], *given: Any, skipped: Container[str] = ()) -> list[Any]:
    """The calls that give something else with our classes than with TorchRec's, unless TorchRec's raises."""
    found = []
    for name, call in calls.items():
        mine, peer = outcome(call, ours, *given), outcome(call, theirs, *given)
        if mine != peer and peer != "raises" and name not in skipped:
            found.append((name, mine, peer))
    return found


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.rotated("device")
def test_every_method_of_a_keyed_jagged_tensor_gives_what_torchrecs_gives(batch: str, device: str) -> None:
    def of_one(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda kind: call(kind.KeyedJaggedTensor(**on(device, BATCHES[batch])))

    def of_class(make: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
        return lambda kind: make(kind.KeyedJaggedTensor, on(device, BATCHES[batch]))

    skipped = {name for other, name in DIFFERS if other == batch}
    assert differing({name: of_one(call) for name, call in KEYED.items()}, skipped=skipped) == []
    assert differing({name: of_class(make) for name, make in CLASS.items()}) == []


JAGGED: dict[str, dict[str, Any]] = {
    "lengths": {"values": IDS, "lengths": torch.tensor([3, 0, 5])},
    "offsets": {"values": IDS, "offsets": torch.tensor([0, 3, 3, 8])},
    "weighted": {"values": IDS, "weights": WEIGHTS, "lengths": torch.tensor([3, 0, 5])},
    "rows": {"values": torch.arange(16.0).view(8, 2), "lengths": torch.tensor([3, 0, 5])},
    "rows, weighted": {
        "values": torch.arange(16.0).view(8, 2), "weights": torch.ones(8, 2), "lengths": torch.tensor([3, 0, 5]),
    },
    "one": {"values": IDS[:1], "lengths": torch.tensor([1])},
    "no values": {"values": NONE, "lengths": torch.tensor([0, 0])},
    "nothing": {"values": NONE, "lengths": NONE},
    "lengths of floats": {"values": IDS, "lengths": torch.tensor([3.0, 5.0])},
    "neither": {"values": IDS},
}  # fmt: skip
OF_ONE = {
    **methods(
        "values weights weights_or_none lengths offsets to_dense to_dense_weights to_padded_dense "
        "to_padded_dense_weights device"
    ),
    **{f"padded to {n}": lambda one, n=n: one.to_padded_dense(n, 7.0) for n in (0, 1, 9)},
    **{f"weights padded to {n}": lambda one, n=n: one.to_padded_dense_weights(n, 0.5) for n in (0, 1, 9)},
    "itself": lambda one: one,
    "text": lambda one: one.device().type == "meta" or str(one),
    "empty_like": lambda one: type(one).empty_like(one),
    "from_dense": lambda one: type(one).from_dense(one.to_dense(), one.to_dense_weights()),
    "from_dense_lengths": lambda one: type(one).from_dense_lengths(
        one.to_padded_dense(), one.lengths(), one.to_padded_dense_weights()
    ),
    "to meta": lambda one: one.to(torch.device("meta"), non_blocking=True),
    "copy_": lambda one: one.copy_(copy.deepcopy(one)),
    "tree": lambda one: pytree.tree_map(lambda leaf: leaf, one),
}


@pytest.mark.parametrize("batch", JAGGED)
def test_every_method_of_a_jagged_tensor_gives_what_torchrecs_gives(batch: str) -> None:
    def of_one(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda kind: call(kind.JaggedTensor(**on("cpu", JAGGED[batch])))

    assert differing({name: of_one(call) for name, call in OF_ONE.items()}) == []


DENSE = torch.ones(3, 2), torch.full((3, 1), 2.0), torch.full((3, 3), 3.0)
KEYED_TENSORS: dict[str, Callable[[Any], Any]] = {
    "of a list": lambda kind: kind.from_tensor_list(["a", "b", "c"], list(DENSE)),
    "one below the other": lambda kind: kind.from_tensor_list(["a", "b"], [DENSE[0], DENSE[0] + 1], 0, 0),
    "of three dimensions": lambda kind: kind.from_tensor_list(["a", "b"], [torch.ones(2, 3, 4), torch.ones(2, 1, 4)]),
    "of one dimension": lambda kind: kind(["a", "b"], [1, 2], torch.arange(3.0), 0),
    "all arguments": lambda kind: kind(["a", "b"], [1, 2], torch.eye(3)[:2], 1, [0, 1, 3], {"a": 0, "b": 1}),
    "no samples": lambda kind: kind(["a"], [2], torch.empty(0, 2)),
    "no columns": lambda kind: kind(["a", "b"], [0, 2], torch.ones(3, 2)),
    "meta": lambda kind: kind(["a", "b"], [1, 2], torch.ones(2, 3, device="meta")),
}
OF_KEYED = {
    **methods("keys length_per_key offset_per_key key_dim _key_indices to_dict device size_in_bytes"),
    "values": lambda one: one.values(),
    "text": lambda one: one.device().type == "meta" or str(one),
    **{key: lambda one, key=key: one[key] for key in ("a", "b", "nobody")},
    "to": lambda one: one.to(torch.device("meta"), non_blocking=True),
    **{
        f"regroup {groups}": lambda one, groups=groups: type(one).regroup([one], groups)
        for groups in ([["a"]], [["a", "b"]], [["b", "a"], ["a"]], [["nobody"]], [["a", "a"]])
    },
    "as a dict": lambda one: type(one).regroup_as_dict([one], [["b"], ["a"]], ["x", "y"]),
}


@pytest.mark.parametrize("made", KEYED_TENSORS)
def test_every_method_of_a_keyed_tensor_gives_what_torchrecs_gives(made: str) -> None:
    def of_one(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda kind: call(KEYED_TENSORS[made](kind.KeyedTensor))

    # with key_dim=0 TorchRec's regrouping reads columns of the other dimension
    skipped = [name for name in OF_KEYED if made.startswith("one below") and "regroup" in name]
    assert differing({name: of_one(call) for name, call in OF_KEYED.items()}, skipped=skipped) == []


def test_a_keyed_tensor_of_key_dim_0_needs_no_cat_dim() -> None:
    parts = [torch.ones(2, 3), torch.zeros(1, 3)]
    made = ours.KeyedTensor.from_tensor_list(["a", "b"], parts, key_dim=0)
    assert all(torch.equal(made[key], part) for key, part in zip("ab", parts, strict=True))


ROWS = {"t1": torch.arange(40.0).view(10, 4), "t2": -torch.arange(40.0).view(10, 4)}


def filled(collection: Any, config: Any, device: str | None, prefix: str, **options: Any) -> Any:
    tables = [
        config(num_embeddings=10, embedding_dim=4, name=name, feature_names=[feature])
        for name, feature in (("t1", "a"), ("t2", "b"))
    ]
    made = collection(tables=tables, device=None if device is None else torch.device(device), **options)
    if device != "meta":
        made.load_state_dict({f"{prefix}.{name}.weight": rows for name, rows in ROWS.items()})
    return made


def bags(kind: Any, device: str | None = None, pooling: str = "SUM", **options: Any) -> Any:
    config = partial(kind.EmbeddingBagConfig, pooling=getattr(kind.PoolingType, pooling))
    return filled(kind.EmbeddingBagCollection, config, device, "embedding_bags", **options)


def sequences(kind: Any, device: str | None = None, **options: Any) -> Any:
    return filled(kind.EmbeddingCollection, kind.EmbeddingConfig, device, "embeddings", **options)


MANY = "PositionWeightedModuleCollection"


def weighting(kind: Any, name: str, lengths: Any, device: str, batch: Any) -> Any:
    made = getattr(kind, name)(lengths, torch.device(device))
    with torch.no_grad():
        for number, weights in enumerate(made.parameters()):
            weights.copy_(torch.arange(len(weights)) + 10.0 * number)
    return made(batch).weights_or_none()


POOLED = BATCHES | {
    "expanded": {"keys": ["a", "b"], "values": IDS, "lengths": SIX, "inverse_indices": (["a", "b"], INVERSE)},
    "nothing of floats": {"keys": ["a", "b"], "values": torch.tensor([]), "lengths": torch.tensor([])},
    "neither": {"keys": ["a", "b"], "values": torch.tensor([])},
    "lengths by key": {"keys": ["a", "b"], "values": NONE, "lengths": torch.zeros(2, 3, dtype=torch.int32)},
}
FORWARDS: dict[str, Callable[[Any, str, Any], Any]] = {
    "bags": lambda kind, device, batch: bags(kind, device)(batch),
    "mean": lambda kind, device, batch: bags(kind, device, pooling="MEAN")(batch).values(),
    "weighted": lambda kind, device, batch: bags(kind, device, is_weighted=True)(batch).values(),
    "sequences": lambda kind, device, batch: sequences(kind, device)(batch),
    "indices": lambda kind, device, batch: {
        key: part.weights() for key, part in sequences(kind, device, need_indices=True)(batch).items()
    },
    "position weights": lambda kind, device, batch: weighting(kind, MANY, {"a": 8, "b": 8}, device, batch),
    "some position weights": lambda kind, device, batch: weighting(kind, MANY, {"a": 8}, device, batch),
    "weighted features": lambda kind, device, batch: weighting(
        kind, "PositionWeightedProcessor", {"a": 8, "b": 8}, device, batch
    ),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("batch", POOLED)
@pytest.mark.rotated("device")
def test_collections_and_position_weights_give_what_torchrecs_give(batch: str, device: str) -> None:
    given = POOLED[batch]

    def of_batch(forward: Callable[[Any, str, Any], Any]) -> Callable[[Any], Any]:
        return lambda kind: forward(kind, device, kind.KeyedJaggedTensor(**on(device, given)))

    # on purpose, and said: weights are not overwritten, and a feature that the batch lacks is no feature of it
    refused = given.get("weights") is not None or given["keys"] == ["a"]
    skipped = [name for name in FORWARDS if refused and ("position" in name or name == "weighted features")]
    assert differing({name: of_batch(forward) for name, forward in FORWARDS.items()}, skipped=skipped) == []
    taken = ours.KeyedJaggedTensor.from_torchrec(theirs.KeyedJaggedTensor(**on(device, given)))
    direct = ours.KeyedJaggedTensor(**on(device, given))
    assert outcome(bags(ours, device), taken) == outcome(bags(ours, device), direct)


@pytest.mark.parametrize("batch", [name for name in JAGGED if "rows" not in name])
def test_position_weights_of_one_feature_are_torchrecs(batch: str) -> None:
    def weighted(kind: Any, device: str) -> Any:
        return weighting(kind, "PositionWeightedModule", 8, device, kind.JaggedTensor(**on(device, JAGGED[batch])))

    assert differing({"of one": weighted}, "cpu") == differing({"of one": weighted}, "meta") == []


TABLES: dict[str, Callable[[Any, str | None], Any]] = {
    "bags": lambda kind, device: bags(kind, device).embedding_bags["t2"],
    "sequences": lambda kind, device: sequences(kind, device).embeddings["t2"],
}


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
@pytest.mark.parametrize("table", TABLES)
def test_a_table_of_a_collection_is_found_by_its_name_as_torchrecs(table: str, device: str | None) -> None:
    mine, peer = (TABLES[table](kind, device) for kind in (ours, theirs))
    assert plain(mine.weight) == plain(peer.weight)
    assert mine.weight.device == peer.weight.device
    assert (mine.num_embeddings, mine.embedding_dim) == (peer.num_embeddings, peer.embedding_dim)
    assert [*bags(ours, device).embedding_bags] == [*bags(theirs, device).embedding_bags]


def test_the_weight_of_a_table_is_a_copy_that_refuses_writes() -> None:
    made, rows = bags(ours), sequences(ours)
    whole = ours.EmbeddingBagCollection([ours.EmbeddingBagConfig(None, 4, "any")])
    for call, kind, named in (
        (lambda: made.embedding_bags["t1"].weight.data.fill_(0), InputError, "call embedding_of('t1').put"),
        (lambda: made.embedding_bags["nobody"], KeyError, "nobody"),
        (lambda: rows.embeddings["nobody"], KeyError, "nobody"),
        (lambda: whole.embedding_bags["any"].weight, InputError, "'any' takes any id"),
    ):
        check_refusal((call, kind, named))
    assert rows.embeddings["ec-d4"].spec.name == "ec-d4"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_is_refused_with_the_remedy() -> None:
    for module in (
        bags(ours),
        sequences(ours),
        torch.nn.Sequential(torch.nn.Linear(2, 2), bags(ours)),
        bags(ours).embedding_of("t1"),
        ours.PositionWeightedModuleCollection({"a": 3}),
        ours.PositionWeightedModule(3),
        ours.TableBatchedEmbeddingBags([(4, 4, 3, 0)]),
    ):
        check_refusal((lambda module=module: torch.jit.script(module), GraphError, "script the dense part alone"))
