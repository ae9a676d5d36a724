"""Frozen models answer like the trainer's evaluation. Each call has rows and dense weights of one version."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierbed
from support.served_rows import snapshot_of
from support.stores import options
from tierbed import ClosedError, InputError, MultiTableEmbedding, OptionError, ServingError
from tierbed import jagged as tj
from tierbed.engine.ops.embedding_base import EmbeddingBase
from tierbed.jagged import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor
from tierbed.serving import FrozenModel, freeze, load_program, open_served, publish

NORMAL = tierbed.make_normal_initializer(0.0, 0.05)
AUTO = torch.export.Dim.AUTO
TABLES = [
    EmbeddingBagConfig(1000, 8, "a"),
    EmbeddingBagConfig(None, 8, "b", feature_names=["b", "c"], pooling=tj.PoolingType.MEAN),
    EmbeddingBagConfig(100, 4, "d", bad_ids="drop"),
]


class Net(nn.Module):
    """Every kind of embedding, and dense weights with a parameter, a buffer and a tied parameter."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        store = options("host", path)
        self.items = MultiTableEmbedding("items", 8, torch.float32, torch.int64, [NORMAL, NORMAL], store, padding_idx=0)
        self.bag = tierbed.EmbeddingBag(50, 8, mode="mean", padding_idx=3, store=store, name="bag")
        self.any = tierbed.Embedding(None, 8, store=store, padding_idx=5, name="any", dtype=torch.bfloat16)
        self.ebc = EmbeddingBagCollection(TABLES, store, name="ebc", is_weighted=True)
        configs = [tj.EmbeddingConfig(1000, 8, "e"), tj.EmbeddingConfig(1000, 4, "f")]
        self.ec = tj.EmbeddingCollection(configs, store, name="ec", padded={"f": 3})
        spec = tj.EmbeddingLocation.HOST, tj.ComputeDevice.CPU
        self.tbe = tj.TableBatchedEmbeddingBags(
            [(100, 8, *spec), (50, 4, *spec)], store_options=store, name="tbe", optimizer=tj.OptimType.EXACT_ADAGRAD
        )
        self.top = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.tied = self.top[0]

    def forward(
        self, ids: Tensor, features: Any, e: JaggedTensor, f: JaggedTensor, indices: Tensor, offsets: Tensor
    ) -> tuple[Tensor, ...]:
        lists, pooled = self.ec({"e": e, "f": f}), self.ebc(features)
        items = self.items(ids, 1)
        return (
            self.tied(self.top(items.flatten(0, 1)) * items.flatten(0, 1)), self.bag(ids % 50), self.any(ids),
            self.items(ids, [0, 1, 0], pooling=None), self.items(ids, 0, pooling="sum"), pooled.values(),
            pooled["c"], lists["e"].values(), *lists["f"], self.tbe(indices, offsets),
        )  # fmt: skip


def make_batch(seed: int, size: int = 4) -> tuple[Any, ...]:
    """Trained, new and padding ids, and empty bags. Keys are in another order than the collection's."""
    random = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=random)

    lengths = draw(4, 4 * size)
    count, tbe_lengths = int(lengths.sum()), draw(3, 2 * size)
    features = KeyedJaggedTensor(["d", "a", "b", "c"], draw(99, count), torch.rand(count, generator=random), lengths)
    jagged = [JaggedTensor(draw(99, size), None, torch.ones(size, dtype=torch.int64)) for _ in range(2)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), tbe_lengths.cumsum(0)])
    return draw(40, size, 3), features, *jagged, draw(50, int(tbe_lengths.sum())), offsets


# the sizes of everything in a batch may vary: tensors, and values, weights and offsets of jagged tensors
JAGGED = [{0: AUTO}, None, {0: AUTO}]
DYNAMIC_SHAPES = ({0: AUTO}, [{0: AUTO}] * 3, JAGGED, JAGGED, {0: AUTO}, {0: AUTO})


class Trained:
    """A model, and the folder to which it is published."""

    def __init__(self, model: nn.Module, path: Path) -> None:
        self.model, self.path, self.folder, self.count = model, path, path / "served", 0
        self.embeddings = [module for module in model.modules() if isinstance(module, MultiTableEmbedding)]
        model.eval()

    def train(self, *batch: Any) -> None:
        self.model.train()
        trained = [weight for name, weight in self.model.named_parameters() if not name.startswith("tbe")]
        optimizer = tierbed.EagerOptimizer(torch.optim.SGD(trained, lr=0.1), self.model)
        results = self.model(*batch)
        sum(part.float().square().mean() for part in results if part.is_floating_point()).backward()
        optimizer.step()
        self.model.eval()

    def dense(self) -> dict[str, Tensor]:
        prefixes = [path for path, module in self.model.named_modules() if isinstance(module, EmbeddingBase)]
        state = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor for name, tensor in state if name.rpartition(".")[0] not in prefixes}

    def publish(self, encoding: str = "float32", **options: Any) -> None:
        self.count += 1
        for embedding in self.embeddings:
            embedding.save_snapshot(f"s{self.count}", "full" if self.count == 1 else "incremental")
        snapshots = [snapshot_of(embedding, self.path, f"s{self.count}") for embedding in self.embeddings]
        publish(self.folder, snapshots, encoding, **{"tensors": self.dense(), **options})

    def close(self) -> None:
        for embedding in self.embeddings:
            embedding.close()


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Trained]:
    trained = Trained(Net(tmp_path), tmp_path)
    trained.train(*make_batch(0))
    trained.publish()
    yield trained
    trained.close()


@torch.no_grad()
def assert_equal(model: Callable[..., Any], trained: Trained, size: int = 4) -> None:
    for seed in range(4):
        batch = make_batch(seed, size)
        for number, (own, expected) in enumerate(zip(model(*batch), trained.model(*batch), strict=True)):
            assert own.dtype == expected.dtype, number
            assert expected.isfinite().all()
            assert torch.equal(own, expected), number


def test_a_frozen_model_has_the_trainers_bits(trained: Trained) -> None:
    before = {name: weight.clone() for name, weight in trained.dense().items()}
    with open_served(trained.folder) as served:
        frozen = freeze(trained.model, served)
        for size in (1, 4, 4):
            assert_equal(frozen, trained, size)
            trained.train(*make_batch(served.version))
            trained.publish()
            assert served.refresh()
        served.refresh()
        assert_equal(frozen, trained)
        assert isinstance(trained.model.items, MultiTableEmbedding)
        assert not torch.equal(before["top.0.weight"], frozen.model.top[0].weight)
        assert frozen.model.top[0].weight is frozen.model.tied.weight
        assert frozen.model.top[0].weight.data_ptr() == served.current.tensors["top.0.weight"].data_ptr()
        assert str(trained.folder) in Path("/proc/self/maps").read_text()
        assert not any(module.training for module in frozen.modules())


def test_int8_rows_are_within_the_bound(trained: Trained) -> None:
    trained.publish("int8")
    ids = torch.arange(60)
    with open_served(trained.folder) as served:
        rows, expected = freeze(trained.model.items, served)(ids, 1), trained.model.items(ids, 1).detach()
    scale = (expected.amax(-1, keepdim=True) - expected.amin(-1, keepdim=True)) / 255
    assert not torch.equal(rows, expected)
    assert ((rows - expected).abs() <= 0.51 * scale + 2**-10 * expected.abs().amax(-1, keepdim=True)).all()


class Towers(tierbed.Graph):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"rows": tierbed.EmbeddingBag(None, 4, mode="sum"), "top": nn.Linear(4, 1)})
        self.other = tierbed.Embedding(None, 4)
        self.add_optimizer(torch.optim.Adam(self.parameters(), lr=0.1))

    def build(self, ids: Tensor) -> Tensor:
        loss = (self.net["top"](self.net["rows"](ids)) + self.other(ids).sum()).square().mean()
        loss.backward()
        return loss


def test_a_part_of_a_published_graph(tmp_path: Path) -> None:
    graph, ids = Towers(), torch.arange(12).view(4, 3)
    graph(ids)
    graph.publish(tmp_path / "served", "float32").wait()
    with open_served(tmp_path / "served") as served:
        part = nn.Sequential(*graph.net.values())
        with pytest.raises(ServingError, match=r"no tensor for the model's '1.weight'.*prefix="):
            freeze(part, served)
        for source in (graph, Towers()):  # a model that was never trained gets its embeddings' names from their paths
            frozen = freeze(source.net, served, "net").model
            assert torch.equal(frozen["rows"](ids), graph.net["rows"](ids).detach())
            assert torch.equal(frozen["top"].weight, graph.net["top"].weight)
        with pytest.raises(OptionError, match=r"freeze\(graph.model, served, prefix='model'\)"):
            freeze(graph, served)
    graph.net["rows"].close()
    graph.other.close()


def test_versions_without_dense_weights(trained: Trained) -> None:
    trained.publish(tensors={})
    with open_served(trained.folder) as served:
        frozen = freeze(trained.model, served)
        assert_equal(frozen, trained)
        trained.train(*make_batch(9))
        trained.publish()
        served.refresh()
        assert_equal(frozen, trained)
        trained.publish(tensors={})
        with pytest.raises(ServingError, match="has no dense weights, and earlier versions had"):
            served.refresh()
        assert_equal(frozen, trained)
        assert served.metrics()["failed_refreshes"] == 1


class Constant(nn.Module):
    """In version k, all rows and weights are k, so results are 4 * k * k + k + 2 * k."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(None, 4, "a")], options("host", path), name="ebc")
        self.top, self.any = nn.Linear(4, 1), tierbed.Embedding(None, 2, store=options("host", path), name="any")

    def forward(self, features: KeyedJaggedTensor, ids: Tensor) -> Tensor:
        return self.top(self.ebc(features).values()).squeeze(1) + self.any(ids).sum(1)

    def fill(self, value: int) -> None:
        ids = torch.arange(50)
        self.ebc.embedding_of("a").put(ids, torch.full((50, 4), float(value)))
        self.any.put(ids, torch.full((50, 2), float(value)))
        for weight in self.top.parameters():
            nn.init.constant_(weight, value)


@pytest.mark.parametrize("form", ["frozen", "compiled", "program"])
def test_a_call_never_mixes_versions(tmp_path: Path, form: str) -> None:
    trained, ids = Trained(Constant(tmp_path), tmp_path), torch.arange(50)
    trained.model.fill(1)
    trained.publish()
    batch, compilations = (KeyedJaggedTensor(["a"], ids, offsets=torch.arange(51)), ids), list[int]()

    def backend(module: Any, inputs: Any) -> Any:
        compilations.append(1)
        return module.forward

    with open_served(trained.folder) as served:
        model: Any = freeze(trained.model, served)
        if form == "compiled":
            model = torch.compile(model, backend=backend)  # with fullgraph, torch counts frames in a global variable
        elif form == "program":
            model = load_program(torch.export.export(model, batch), served)
        model(*batch)
        results, stop = [list[float]() for _ in range(3)], threading.Event()

        def call(results: list[float]) -> None:
            while not stop.is_set():
                answers = model(*batch).unique().tolist()
                results.append(answers[0] if len(answers) == 1 else -1)

        threads = [threading.Thread(target=call, args=[each]) for each in results]
        for thread in threads:
            thread.start()
        for value in range(2, 14):
            trained.model.fill(value)
            trained.publish()
            assert served.refresh()
        stop.set()
        for thread in threads:
            thread.join()
        assert model(*batch).unique().tolist() == [4 * 13 * 13 + 3 * 13]
    for each in results:
        assert each == sorted(each)
        assert {*each} <= {4 * k * k + 3 * k for k in range(1, 14)}
        assert len({*each}) > 2
    assert len(compilations) == (form == "compiled")
    trained.close()


LOADER = """
import sys, torch
from tierbed.serving import load_program, open_served
from tierbed.jagged import JaggedTensor, KeyedJaggedTensor
path, folder, batches, out = sys.argv[1:]
with open_served(folder) as served:
    program = load_program(path, served)
    for number in range(3):
        torch.save([program(*batch) for batch in torch.load(batches, weights_only=False)], f"{out}{number}")
        print(served.version, flush=True)
        input()
        served.refresh()
"""


def test_a_program_in_another_process_follows_versions(trained: Trained, tmp_path: Path) -> None:
    with open_served(trained.folder) as served:
        program = torch.export.export(freeze(trained.model, served), make_batch(0), dynamic_shapes=DYNAMIC_SHAPES)
    torch.export.save(program, tmp_path / "model.pt2")
    batches = [make_batch(seed, size) for seed, size in ((1, 4), (2, 7), (3, 2))]
    torch.save(batches, tmp_path / "batches")
    with pytest.raises(ServingError, match=r"rows_id=7: this process has no such rows.*load_program"):
        torch.ops.tierbed.served_lookup(torch.tensor(7), torch.tensor([1]), *[None] * 5, 8, torch.float32)
    arguments = [str(path) for path in (tmp_path / "model.pt2", trained.folder, tmp_path / "batches", tmp_path / "out")]
    command = [sys.executable, "-W", "error", "-c", LOADER, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(3):
            assert process.stdout.readline() == f"{number + 1}\n"
            for results, batch in zip(torch.load(tmp_path / f"out{number}"), batches, strict=True):
                for own, expected in zip(results, trained.model(*batch), strict=True):
                    assert torch.equal(own, expected)
            trained.train(*make_batch(20 + number))
            trained.publish()
            print(file=process.stdin, flush=True)
    assert process.returncode == 0


def test_a_compiled_model_of_every_kind(trained: Trained) -> None:
    with open_served(trained.folder) as served:
        compiled = torch.compile(freeze(trained.model, served), fullgraph=True, backend="aot_eager")
        assert_equal(compiled, trained)
        trained.train(*make_batch(3))
        trained.publish()
        served.refresh()
        assert_equal(compiled, trained)


def make_other(path: Path, name: str = "items", dim: int = 8, **more: Any) -> MultiTableEmbedding:
    settings = {
        "key_type": torch.int64,
        "tables": [NORMAL, NORMAL],
        "store_options": options("host"),
        "padding_idx": 0,
    } | more
    return MultiTableEmbedding(name, dim, torch.float32, **settings)


class Doubled(tierbed.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_errors(trained: Trained, tmp_path: Path) -> None:
    served = open_served(trained.folder)
    wrong: list[tuple[Mapping[str, Any], str]] = [
        ({"name": "users"}, "version 1 has no embedding 'users', only 'any', 'bag'"),
        ({"dim": 4}, r"columns=\[4\] in the model and \[8\] in version 1"),
        ({"tables": [NORMAL]}, r"tables=\[None\] in the model and \[None, None\]"),
        ({"key_type": torch.int32}, "key_type='int32' in the model and 'int64'"),
        ({"padding_idx": None}, "padding_idx=None in the model and 0"),
        ({"seed": 99}, "seed=99 in the model and"),
    ]
    for change, message in wrong:
        with pytest.raises(ServingError, match=message):
            freeze(make_other(tmp_path, **change), served)
    model = nn.ModuleDict({"rows": make_other(tmp_path), "top": nn.Sequential(nn.Linear(8, 3))})
    with pytest.raises(ServingError, match=r"'top.0.weight' of version 1 is torch.float32 \[8, 8\], and the model's"):
        freeze(model, served)
    with pytest.raises(OptionError, match="Linear has no tierbed embedding"):
        freeze(nn.Linear(1, 1), served)
    with pytest.raises(OptionError, match="got a dict"):
        freeze({}, served)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="Doubled has a forward of its own"):
        freeze(Doubled(None, 8, name="any", dtype=torch.bfloat16), served)
    model.top.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(OptionError, match=r"cannot be copied.*without loaders"):
        freeze(model, served)
    for make in (lambda: freeze(model, "served"), lambda: load_program("a", "served")):  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="served='served': give the result of open_served"):
            make()
    with pytest.raises(OptionError, match=r"program='missing\.pt2': give a file from torch\.export\.save"):
        load_program("missing.pt2", served)
    with pytest.raises(OptionError, match="no frozen embedding"):
        load_program(torch.export.export(nn.Linear(1, 1), (torch.ones(1),)), served)
    frozen: FrozenModel = freeze(trained.model.items, served)
    with pytest.raises(OptionError, match="rows are read-only"):
        frozen.train()
    with pytest.raises(OptionError, match="cannot move"):
        frozen.double()
    with pytest.raises(InputError, match="ids of embedding 'items'"):
        frozen(torch.ones(2), 0)
    served.close()
    with pytest.raises(ClosedError, match="open it again with open_served"):
        frozen(torch.ones(2), 0)
    with pytest.raises(ClosedError):
        freeze(trained.model, served)


def test_errors_of_a_bag_collection_are_those_of_the_trainer(trained: Trained) -> None:
    ids = torch.tensor([1, 2000])
    with open_served(trained.folder) as served:
        frozen = freeze(trained.model.ebc, served)
        for model in (trained.model.ebc, frozen):

            def call(keys: list[str], ids: Tensor, offsets: list[int], model: Any = model, **more: Any) -> None:
                model(KeyedJaggedTensor(keys, ids, torch.ones(len(ids)), offsets=torch.tensor(offsets)))

            with pytest.raises(KeyError, match="feature 'd' is not in the batch"):
                call(["a", "b", "c"], ids, [0, 1, 2, 2])
            with pytest.raises(InputError, match="2000 is no id of table a, whose ids are 0 to 999"):
                call(["a", "b", "c", "d"], ids, [0, 2, 2, 2, 2])
            with pytest.raises(InputError, match="offsets of embedding"):
                call(["a", "b", "c", "d"], ids, [0, 2, 1, 2, 2])
            with pytest.raises(InputError, match="the batch has no weights"):
                model(KeyedJaggedTensor(["a", "b", "c", "d"], ids, offsets=torch.tensor([0, 1, 2, 2, 2])))


def test_wrapped_modules_find_their_weights(tmp_path: Path) -> None:
    trained = Trained(Constant(tmp_path), tmp_path)
    trained.model.fill(1)
    trained.publish()
    trained.model.fill(2)
    batch = KeyedJaggedTensor(["a"], torch.arange(50), offsets=torch.arange(51)), torch.arange(50)
    trained.model.top = torch.compile(trained.model.top, backend="eager")
    with open_served(trained.folder) as served:
        for model in (trained.model, torch.compile(trained.model, backend="eager")):
            assert freeze(model, served)(*batch).unique().tolist() == [7]
