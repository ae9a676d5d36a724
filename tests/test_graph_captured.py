"""Steps that run as a CUDA graph have the bits of plain ones, whatever happens between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from cuda_tables import on_one_device, tables_on
from embeddings import DIM, OPTIMIZERS, contents, make, options
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from tierbed.engine import CapacityError, GraphError, MultiTableEmbedding, OptionError
from tierbed.engine.ops.cuda.device import Device
from tierbed.graph import Graph

PADDING = 3
RECORDED = "# recorded as a CUDA graph"
Batch = tuple[Tensor, ...]


@pytest.fixture
def place(device: Device) -> Iterator[torch.device]:
    with tables_on(device) as where:
        yield where


class Model(Graph):
    """Two embeddings, one of them pooled with weights that are trained, before an MLP; all learning rates decay."""

    def __init__(self, optimizer: str, path: Path | None = None, capacity: int = 500) -> None:
        super().__init__()
        self.rows = make(options("device", path, capacity=capacity), name="rows", padding_idx=PADDING)
        self.bags = make(options("device", capacity=500), name="bags", tables=1)
        self.mlp = nn.Sequential(nn.Linear(3 * DIM, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.weights = nn.Parameter(torch.ones(2))
        kind, settings = OPTIMIZERS[optimizer]
        of_rows = kind([*self.rows.parameters(), *self.bags.parameters()], **settings)  # type: ignore[arg-type]
        of_rest = torch.optim.AdamW([self.weights, *self.mlp.parameters()], lr=0.01)
        for one in (of_rows, of_rest):
            self.add_optimizer(one, ExponentialLR(one, 0.9))

    def build(self, ids: Tensor, tables: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.rows(ids, tables)
        bags = self.bags(ids, 0, pooling="mean", weights=self.weights.expand(ids.shape).contiguous())
        found = torch.cat([rows.flatten(1), bags], 1)
        loss = (self.mlp(found).squeeze(1) - y).square().mean()
        loss.backward()
        return loss, rows


def batches(count: int, size: int = 6, ids: int = 60, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, ids, (size, 2), generator=generator),
            torch.randint(0, 3, (size, 2), generator=generator),
            torch.rand(size, generator=generator),
        )
        for _ in range(count)
    ]


def counts(rows: MultiTableEmbedding) -> dict[str, dict[str, float]]:
    """Its metrics, but for batches made ahead, which a recorded step has none of."""
    metrics = rows.metrics()
    metrics["table"] = {name: value for name, value in metrics["table"].items() if not name.startswith("prefetch")}
    return metrics


class Pair:
    """A plain graph and one whose steps are recorded, to which the same happens."""

    def __init__(self, place: torch.device, make_graph: Callable[[str], Graph]) -> None:
        self.place = place
        self.graphs: list[Any] = [make_graph(name).to(place) for name in ("plain", "recorded")]
        for graph in self.graphs:
            torch.manual_seed(3)
            for module in graph.modules():
                if isinstance(module, nn.Linear):
                    module.reset_parameters()
        self.graphs[1].cuda_graph()

    def steps(self, given: list[Batch], errors: tuple[type[Exception], ...] = ()) -> list[str]:
        """The errors that the steps raised, alike on both sides, as are all that they returned and what they left."""
        seen: list[list[Any]] = []
        for graph in self.graphs:
            torch.manual_seed(4)
            seen.append([])
            for batch in given:
                try:
                    out = graph(*(tensor.to(self.place) for tensor in batch))
                    seen[-1] += [tensor.cpu() for tensor in (out if isinstance(out, tuple) else (out,))]
                except errors as error:
                    seen[-1].append(str(error))
                if self.place.type == "cuda":
                    torch.cuda.synchronize()  # so that what the step found has arrived
        for one, other in zip(*seen, strict=True):
            assert bits(one) == bits(other)
        self.check()
        return [one for one in seen[0] if isinstance(one, str)]

    def check(self) -> None:
        plain, recorded = ([m for m in graph.children() if hasattr(m, "chunks")] for graph in self.graphs)
        for one, other in zip(plain, recorded, strict=True):
            assert contents(one).tobytes() == contents(other).tobytes()
            assert counts(one) == counts(other)
        states = [graph.state_dict() for graph in self.graphs]
        for (name, one), other in zip(states[0].items(), states[1].values(), strict=True):
            assert not isinstance(one, Tensor) or bits(one) == bits(other), name

    def each(self, act: Callable[[Any], object]) -> list[Any]:
        return [act(graph) for graph in self.graphs]

    @property
    def is_recorded(self) -> bool:
        assert RECORDED not in repr(self.graphs[0])
        return RECORDED in repr(self.graphs[1])


def bits(value: Any) -> Any:
    return value.cpu().reshape(-1).view(torch.uint8).tolist() if isinstance(value, Tensor) else value


@on_one_device
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "rowwise", "catch-up"])
def test_every_optimizer_with_schedules_dropout_and_pooling(place: torch.device, optimizer: str) -> None:
    pair = Pair(place, lambda _: Model(optimizer))
    pair.steps(batches(3))
    assert not pair.is_recorded
    pair.steps(batches(6, seed=1))
    assert pair.is_recorded


@on_one_device
def test_gradients_clipped_by_value(place: torch.device) -> None:
    pair = Pair(place, lambda _: Model("adam"))
    pair.each(lambda graph: graph.clip_grad_value(0.01))
    pair.steps(batches(6))
    assert pair.is_recorded
    pair.each(lambda graph: graph.clip_grad_value(0.001))  # numbers are live, also those of clips
    pair.each(lambda graph: graph.rows.row_optimizer._optimizer.param_groups[0].update(clip_grad_row_norm=0.002))
    pair.steps(batches(3, seed=1))


@on_one_device
def test_sizes_have_recordings_of_their_own(place: torch.device) -> None:
    pair = Pair(place, lambda _: Model("rowwise"))
    mixed = [batch for two in zip(batches(6), batches(6, size=4), strict=True) for batch in two]
    pair.steps(mixed)
    assert repr(pair.graphs[1]).count(RECORDED) == 2


@on_one_device
@pytest.mark.parametrize("optimizer", ["adam", "catch-up"])
def test_rows_that_are_put_deleted_and_loaded_in_between(place: torch.device, tmp_path: Path, optimizer: str) -> None:
    pair = Pair(place, lambda name: Model(optimizer, tmp_path / name))
    pair.steps(batches(6))
    assert pair.is_recorded
    keys = torch.arange(0, 20, 2)
    got = pair.each(lambda g: g.rows.get(keys, 0))
    assert bits(got[0]) == bits(got[1])
    for act in (
        lambda g: g.rows.put(keys, torch.ones(10, DIM), 1),
        lambda g: g.rows.delete(torch.arange(40), 0),
        lambda g: g.rows.delete(torch.arange(30), 1),
        lambda g: g.rows.save_snapshot("first"),
    ):
        pair.each(act)
        pair.steps(batches(2, seed=1))
        assert pair.is_recorded  # nothing of it moved what the recording uses
    pair.each(lambda g: g.rows.load_snapshot("first"))
    pair.steps(batches(3, seed=2))
    assert not pair.is_recorded
    pair.steps(batches(3, seed=3))
    assert pair.is_recorded


@on_one_device
def test_snapshots_of_what_recorded_steps_changed(place: torch.device, tmp_path: Path) -> None:
    pair = Pair(place, lambda name: Model("adam", tmp_path / name))
    pair.each(lambda g: g.rows.save_snapshot("base"))
    pair.steps(batches(6))
    pair.each(lambda g: g.rows.save_snapshot("one", kind="incremental"))  # from here on changes are noted
    for name in ("two", "three"):
        pair.steps(batches(5, seed=1))
        assert pair.is_recorded
        pair.each(lambda g, name=name: g.rows.save_snapshot(name, kind="incremental"))
    expected = contents(pair.graphs[0].rows).tobytes()
    background = pair.each(lambda g: g.rows.save_snapshot("four", background=True))
    pair.steps(batches(2, seed=2))
    for save in background:
        save.wait()
    pair.steps(batches(2, seed=3))
    for name in ("three", "four"):
        for graph in pair.graphs:
            graph.rows.load_snapshot(name)
            assert contents(graph.rows).tobytes() == expected


@on_one_device
def test_a_snapshot_that_another_thread_asks_for_is_of_whole_steps(place: torch.device, tmp_path: Path) -> None:
    pair = Pair(place, lambda name: Model("adam", tmp_path / name))
    plain, recorded = pair.graphs
    pair.steps(batches(5))
    recorded.rows.save_snapshot("base")
    given = batches(30, seed=1)

    def save() -> None:
        for name in ("one", "two"):  # the second is of what changed since the first
            recorded.rows.opened().save_between_steps(name, "incremental", lambda _: None, lambda: False)

    visitor = Thread(target=save)
    torch.manual_seed(5)
    for number, batch in enumerate(given):
        if number == 3:
            visitor.start()
        recorded(*(tensor.to(place) for tensor in batch))
    visitor.join()
    for name in ("one", "two"):
        recorded.rows.load_snapshot(name)
        if name == "one":
            torch.manual_seed(5)
        step, done = (graph.rows.metrics()["table"]["step"] for graph in (recorded, plain))
        for batch in given[done - 5 : step - 5]:
            plain(*(tensor.to(place) for tensor in batch))
        assert contents(recorded.rows).tobytes() == contents(plain.rows).tobytes()


class Twins(Graph):
    """Two embeddings that look up the same ids."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.others = (make(options("device", capacity=500), name=name, tables=2) for name in ("a", "b"))
        self.add_optimizer(torch.optim.Adagrad([*self.rows.parameters(), *self.others.parameters()], lr=0.1))

    def build(self, ids: Tensor) -> Tensor:
        loss = (self.rows(ids) * self.others(ids).cos()).sum()
        loss.backward()
        return loss


@on_one_device
def test_a_run_over_a_loader_is_recorded_and_shares_a_deduplication(place: torch.device) -> None:
    pair = Pair(place, lambda _: Twins())
    given = [(ids.to(place),) for ids, _, _ in batches(12)]
    losses = pair.each(lambda graph: torch.stack(list(graph.run(given, ahead=3))))
    assert torch.equal(*losses)
    pair.check()
    assert "prefetch_1 = prefetch(others, [Lookup(ids, None, None, None)], prefetch)" in repr(pair.graphs[1])
    assert pair.is_recorded
    hits = pair.each(lambda graph: graph.others.metrics()["table"]["prefetch_hits"])
    assert hits == [12, 0]


@on_one_device
def test_rows_beyond_the_capacity_are_told_by_a_later_step(place: torch.device) -> None:
    pair = Pair(place, lambda _: Model("catch-up", capacity=30))
    few, many = batches(6, ids=8), batches(1, size=6, ids=10**6, seed=5)
    pair.steps(few)
    assert pair.is_recorded
    told = pair.steps([*many * 1, *few, *batches(3, ids=10**6, seed=6), *few], errors=(CapacityError,))
    assert told
    assert "changed nothing" in told[0]
    assert pair.is_recorded
    assert pair.graphs[1].rows.size() <= 30


@on_one_device
def test_a_parameter_that_moved_is_found(place: torch.device) -> None:
    pair = Pair(place, lambda _: Model("sgd"))
    pair.steps(batches(5))

    def move(graph: Any) -> None:
        graph.mlp[0].weight.data = graph.mlp[0].weight.detach() * 2
        graph.mlp[1].running_mean = graph.mlp[1].running_mean + 1

    pair.each(move)
    pair.steps(batches(2, seed=1))
    assert not pair.is_recorded
    pair.steps(batches(3, seed=2))
    assert pair.is_recorded


@on_one_device
def test_what_it_returned_stays_as_it_was(place: torch.device) -> None:
    graph = Pair(place, lambda _: Model("sgd")).graphs[1]
    kept = [(rows, rows.clone()) for _, rows in (graph(*(t.to(place) for t in batch)) for batch in batches(7))]
    for now, then in kept:
        assert torch.equal(now, then)


@on_one_device
def test_frozen_rows_with_trained_weights_and_rows_that_another_graph_trains(place: torch.device) -> None:
    class Frozen(Model):
        def build(self, ids: Tensor, tables: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            bags = self.bags(ids, 0, pooling="sum", weights=self.weights.expand(ids.shape).contiguous())
            loss = ((bags.sum(1) - y) ** 2).mean() + self.rows(ids, 1).square().sum()
            loss.backward()
            return loss, bags

    class Bags(Graph):
        def __init__(self, model: Frozen) -> None:
            super().__init__()
            self.bags = model.bags
            self.add_optimizer(OPTIMIZERS["catch-up"][0](self.bags.parameters(), lr=0.3))  # type: ignore[call-arg]

        def build(self, ids: Tensor) -> None:
            (self.bags(ids, 0) ** 2).sum().backward()

    def frozen(_: str) -> Frozen:
        model = Frozen("catch-up")
        model.bags.requires_grad_(False)
        return model

    pair = Pair(place, frozen)
    others = [Bags(graph) for graph in pair.graphs]
    for number in range(8):
        for graph, other in zip(pair.graphs, others, strict=True):
            graph.bags.requires_grad_(True)
            other(batches(1, seed=number)[0][0].to(place))
            graph.bags.requires_grad_(False)
        pair.steps(batches(1, seed=20 + number))
    assert pair.is_recorded


@on_one_device
def test_evaluation_and_profiles_run_plainly(place: torch.device) -> None:
    pair = Pair(place, lambda _: Model("adam"))
    pair.steps(batches(5))
    pair.each(lambda graph: graph.eval())
    pair.steps(batches(5, seed=1))
    assert repr(pair.graphs[1]).count(RECORDED) == 1
    pair.each(lambda graph: graph.train())
    given = [tuple(tensor.to(place) for tensor in batch) for batch in batches(3, seed=2)]
    pair.each(lambda graph: torch.manual_seed(1) and graph.profile(given))
    pair.check()
    pair.steps(batches(2, seed=3))


@on_one_device
def test_a_step_that_waits_for_the_device_is_refused_with_its_cause(place: torch.device) -> None:
    class Masked(Model):
        def build(self, ids: Tensor, tables: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            rows = self.rows(ids, tables)
            loss = (rows.sum((1, 2)) - y).square()
            scale = torch.ones_like(y)
            scale[y > 0.5] = scale[:1] * 2
            (loss * scale).mean().backward()
            return loss.detach().sum(), rows

    pair = Pair(place, lambda _: Masked("adam"))
    with pytest.raises(GraphError, match=r"cuda_graph: aten.index_put.*waits for the device.*torch.where"):
        pair.graphs[1](*(tensor.to(place) for tensor in batches(1)[0]))
    pair.graphs[0].rows.opened()  # as the refused step did
    pair.check()  # it left nothing
    pair.graphs[1].cuda_graph(False)
    pair.steps(batches(3, seed=1))


@torch.library.custom_op("tierbed_tests::read", mutates_args=())
def read(given: Tensor) -> Tensor:
    return given * (2 if given.sum().item() > 0 else 1)


read.register_fake(torch.empty_like)
read.register_autograd(lambda context, grad: grad)


@on_one_device
def test_an_op_that_reads_a_value_is_told_by_the_fourth_call_and_tried_once(
    place: torch.device, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reading(Model):
        def build(self, ids: Tensor, tables: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            rows = self.rows(ids, tables)
            loss = (read(rows).sum((1, 2)) - y).square().mean()
            loss.backward()
            return loss, rows

    tries = []
    record = device.record
    monkeypatch.setattr(device, "record", lambda launches: tries.append(launches) or record(launches))
    pair = Pair(place, lambda _: Reading("adam"))
    pair.steps(batches(3))
    for _ in range(2):
        with pytest.raises(
            GraphError, match=r"cuda_graph: the step could not be recorded: .*(captur|permitted).*reads"
        ):
            pair.graphs[1](*(tensor.to(place) for tensor in batches(1)[0]))
        pair.check()  # the step left nothing
    assert len(tries) == 1
    pair.graphs[1].cuda_graph(False)
    pair.steps(batches(3, seed=1))


class Small(Graph):
    def __init__(self, where: Any, build: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.rows = make(where, tables=1)
        self.add_optimizer(torch.optim.SGD(self.rows.parameters(), lr=0.1))
        self.cuda_graph()
        self.inside = build

    def build(self, ids: Tensor, y: Tensor) -> Any:
        loss = self.rows(ids, 0).sum()
        loss.backward()
        return loss, None if self.inside is None else self.inside(ids, y)


@on_one_device
@pytest.mark.parametrize(
    ("store", "more"),
    [("device", {}), ("host", {"capacity": 50}), ("cached_host", {"capacity": 50})],
    ids=["growing", "host", "cached"],
)
def test_stores_that_wait_for_the_device_are_refused(place: torch.device, store: str, more: dict[str, Any]) -> None:
    graph = Small(options(store, **more)).to(place)
    ids, y = torch.arange(3, device=place), torch.ones(1, device=place)
    with pytest.raises(OptionError, match=r"cuda_graph: embedding 'rows' has store='\w+', capacity=\w+, .*or call cud"):
        graph(ids, y)
    assert graph.rows.metrics()["table"]["step"] == 0
    graph.cuda_graph(False)
    graph(ids, y)


def test_tables_on_the_cpu_are_refused() -> None:
    with pytest.raises(GraphError, match=r"cuda_graph: embedding 'rows' is on cpu, .* move the graph by \.cuda\(\)"):
        Small(options("device", capacity=50))(torch.arange(3), torch.ones(1))


@on_one_device
def test_arguments_of_another_device_or_changed_in_place_are_refused(place: torch.device) -> None:
    ids, away = torch.arange(3, device=place), torch.ones(1, device="meta" if place.type == "cpu" else "cpu")
    with pytest.raises(GraphError, match=r"cuda_graph: argument y is on (meta|cpu), .* make it on (cpu|cuda:0)"):
        Small(options("device", capacity=50), lambda _, y: y * 2).to(place)(ids, away)
    with pytest.raises(GraphError, match=r"cuda_graph: argument y is a slice or was expanded.*y.contiguous"):
        Small(options("device", capacity=50), lambda _, y: y * 2).to(place)(ids, torch.ones(6, device=place)[::2])
    with pytest.raises(GraphError, match=r"cuda_graph: build changes its argument y in place.* change a clone"):
        Small(options("device", capacity=50), lambda _, y: y.add_(1)).to(place)(ids, torch.ones(1, device=place))


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("clip_grad_norm", 1.0),
        ("accumulate_grads", 2),
        ("set_grad_scaler", torch.amp.GradScaler("cpu")),
        ("compile_dense", None),
    ],
)
def test_what_asks_the_device_for_numbers_is_refused(method: str, value: Any) -> None:
    given = [] if value is None else [value]
    graph = Small(options("device", capacity=50))
    with pytest.raises(OptionError, match=rf"cuda_graph and {method}: .*leave out one of them"):
        getattr(graph, method)(*given)
    graph.cuda_graph(False)
    getattr(graph, method)(*given)
    with pytest.raises(OptionError, match=rf"cuda_graph and {method}"):
        graph.cuda_graph()
    with pytest.raises(OptionError, match="enabled=1: give True or False"):
        graph.cuda_graph(1)  # type: ignore[arg-type]
    if method != "compile_dense":
        getattr(graph, method)(1 if method == "accumulate_grads" else None)
        graph.cuda_graph()
