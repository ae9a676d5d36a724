"""A compiled step as text and as a flowchart: each op once, in its stage, with its shape and its store."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from support.graphs import DIM, Rating, embedding, graph_of, id_batches, mlp, training
from support.stores import options
from tierbed import Graph, GraphError, MultiTableEmbedding


def sections(graph: Graph, step: int = 0) -> list[tuple[str, list[str]]]:
    """The headings of a compiled step, and the lines under each."""
    code = str(graph).partition(f"# compiled step {step}\n")[2].partition("# compiled step")[0]
    parts = re.split(r"^    # ([a-z ]+)\n", code, flags=re.M)
    return list(zip(parts[1::2], map(str.splitlines, parts[2::2]), strict=True))


@pytest.fixture(scope="module")
def rating() -> Graph:
    """After a step, and an evaluation."""
    rows, net = embedding(), mlp(3 * DIM)
    graph = Rating(rows, net, torch.optim.Adam([*rows.parameters(), *net.parameters()], lr=0.1))
    graph.eval()(id_batches(8, 3)[0])
    graph.train()(id_batches(8, 3)[0])
    return graph


def test_the_listing_has_stages_shapes_and_stores(rating: Graph) -> None:
    evaluation, found = sections(rating, 0), sections(rating, 1)
    stages = ["pin", "gather", "forward", "backward", "update", "dense step", "outputs"]
    assert [stage for stage, _ in found] == stages
    assert [stage for stage, _ in evaluation] == ["gather", "forward", "outputs"]
    lines = dict(found)
    assert lines["pin"] == ["    pin = rows.pin([Lookup(ids)])  # rows in device_mem"]
    assert lines["gather"] == ["    gather = pin.gather(0)  # float32 [8, 3, 4], rows in device_mem"]
    assert "    relu = aten.relu.default(addmm)  # float32 [8, 8]" in lines["forward"]
    assert lines["backward"][-1] == "    view_3 = aten.view.default(slice_1, [8, 3, 4])  # float32 [8, 3, 4]"
    assert "    update = pin.update([view_3])  # rows in device_mem" in lines["update"]
    assert "    # ids: int64 [8, 3]\n" in str(rating)
    assert "    # mlp_0_weight: float32 [8, 12]\n" in str(rating)


def test_backward_begins_again_with_each_call_and_clipping_is_part_of_it() -> None:
    def build(graph: Any, x: Tensor) -> Tensor:
        out = graph.net(x)
        out.sum().backward(retain_graph=True)
        out.square().exp().sum().backward()
        nn.utils.clip_grad_norm_(graph.net.parameters(), 0.1)
        return out

    net = nn.Linear(3, 1)
    graph = graph_of(build, torch.optim.SGD(net.parameters(), lr=0.1), net=net)
    graph(torch.ones(2, 3))
    found = sections(graph)
    assert [stage for stage, _ in found] == ["forward", "backward", "forward", "backward", "dense step", "outputs"]
    assert "aten.exp.default" in "\n".join(found[2][1])
    assert "norm" in "\n".join(found[3][1])


def test_gradients_that_build_asks_for_are_backward() -> None:
    graph = graph_of(lambda graph, x: torch.autograd.grad(x.tanh().sum(), x)[0])
    graph(torch.ones(2, requires_grad=True))
    assert "tanh_backward" in "\n".join(dict(sections(graph))["backward"])


class Chart(NamedTuple):
    """A flowchart as it was written: its title, stages, boxes by number with stage and lines, and edges."""

    title: str
    stages: list[str]
    boxes: dict[str, tuple[str, list[str]]]
    edges: set[tuple[str, str]]
    stores: set[str]  # boxes that are drawn as a cylinder

    def texts(self, stage: str) -> list[list[str]]:
        return [lines for of, lines in self.boxes.values() if of == stage]


def drawn(graph: Graph, path: Path) -> Chart:
    """What `draw` writes. All edges are between boxes."""
    graph.draw(path / "step.mmd")
    head, title, end, kind, *lines = (path / "step.mmd").read_text().splitlines()
    assert (head, end, kind) == ("---", "---", "flowchart TB")
    chart = Chart(json.loads(title.removeprefix("title: ")), [], {}, set(), set())
    for line in lines:
        if stage := re.fullmatch(r'subgraph s\d+\["([a-z ]+)"\]', line):
            chart.stages.append(stage[1])
        elif box := re.fullmatch(r'    (n\d+)\[(\()?"([^"]+)"\)?\]', line):
            text = re.sub(r"#(\w+);", lambda m: f"&{'#' * m[1].isdigit()}{m[1]};", box[3])
            chart.boxes[box[1]] = chart.stages[-1], [html.unescape(part) for part in text.split("<br>")]
            if box[2]:
                chart.stores.add(box[1])
        elif line != "end":
            source, target = line.split(" --> ")
            chart.edges.add((source, target))
    assert {number for edge in chart.edges for number in edge} <= chart.boxes.keys()
    return chart


def test_a_flowchart_has_each_op_once_in_the_order_of_stages(tmp_path: Path, rating: Graph) -> None:
    chart = drawn(rating, tmp_path)
    assert chart.title == "Rating"
    assert chart.stages == ["inputs", "pin", "gather", "forward", "backward", "update", "dense step", "outputs"]
    assert ["ids", "int64 [8, 3]"] in chart.texts("inputs")
    assert chart.texts("gather") == [["gather", "float32 [8, 3, 4], rows in device_mem"]]
    forward = chart.texts("forward")
    assert ["addmm", "float32 [8, 8]", "mlp_0_bias", "mlp_0_weight"] in forward
    assert chart.texts("dense step") == [["dense_step", "adam", "mlp_0_weight", "mlp_0_bias", "and 2 more"]]
    chains = [lines[0].split(" \N{RIGHTWARDS ARROW} ") for _, lines in chart.boxes.values()]
    assert ["pow", "mul"] in chains
    listed = Counter(re.findall(r"^    \w+ = (?:\w+\.)?(\w+)", str(rating).partition("# compiled step 1")[2], re.M))
    views = Counter(t=2, adam=1)  # of parameters, and what the boxes of others name
    inputs = Counter(ids=1, output=1)
    assert Counter(op for chain in chains for op in chain) == listed - views + inputs
    (gather,) = (number for number, (stage, _) in chart.boxes.items() if stage == "gather")
    pinned = {chart.boxes[source][1][0] for source, target in chart.edges if target == gather}
    assert pinned == {"pin"}


def rows_of(name: str, store: str) -> MultiTableEmbedding:
    return MultiTableEmbedding(name, DIM, torch.float32, torch.int64, None, options(store))


def test_a_flowchart_says_which_store_each_lookup_goes_to(tmp_path: Path) -> None:
    def loss(graph: Any, ids: Tensor) -> Tensor:
        return (graph.users(ids) * graph.items(ids)).sum() + graph.users(ids + 1, pooling="mean").sum()

    graph = training(loss, users=rows_of("users", "host"), items=rows_of("items", "device"))
    graph.clip_grad_norm(1.0)
    graph(id_batches(6)[0])
    chart = drawn(graph, tmp_path)
    stores = [lines[1].partition("], ")[2] for lines in chart.texts("gather")]
    assert sorted(stores) == ["items in device_mem", "users in host_mem", "users in host_mem"]
    ((_, end, *_),) = chart.texts("update")
    assert set(end.split(", ")) == {"items in device_mem", "users in host_mem"}
    stages = {"pin", "gather", "update"}
    named = {number for number, (stage, lines) in chart.boxes.items() if stage in stages or lines[0] in stages}
    assert named <= chart.stores


def test_a_flowchart_says_which_rows_are_fetched_ahead_of_the_step(tmp_path: Path) -> None:
    def loss(graph: Any, ids: Tensor) -> Tensor:
        drawn_ids = torch.randint(0, 9, ids.shape)  # known in the step alone
        return (graph.users(ids) * graph.items(drawn_ids)).sum()

    graph = training(loss, users=rows_of("users", "device"), items=rows_of("items", "device"))
    graph(id_batches(6)[0])
    pinned = {rows: rest for _, rows, *rest in drawn(graph, tmp_path).texts("pin")}
    assert pinned == {"users in device_mem": ["ahead, on a separate thread"], "items in device_mem": []}


def test_names_are_escaped_and_the_last_call_is_drawn(tmp_path: Path) -> None:
    graph: Any = type('A<"B>&', (Graph,), {"build": lambda self, x, name: x.exp() + len(name)})()
    with pytest.raises(GraphError, match='A<"B>& has no step to draw yet; call it once'):
        graph.draw(tmp_path / "step.mmd")
    for rows in (2, 3, 2):
        graph(torch.ones(rows), "a & b < c")
        chart = drawn(graph, tmp_path)
        assert chart.title == 'A<"B>&'
        assert chart.texts("inputs") == [["x", f"float32 [{rows}]"]]
