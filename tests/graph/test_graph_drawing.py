"""A compiled step as text and as a picture: each op once, in its stage, with its shape and its store."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import tierbed
from support.graphs import DIM, Rating, embedding, graph_of, id_batches, mlp
from tierbed import Graph, GraphError, MultiTableEmbedding

SVG = "{http://www.w3.org/2000/svg}"


def rating(rows: MultiTableEmbedding, net: nn.Module) -> Graph:
    return Rating(rows, net, torch.optim.Adam([*rows.parameters(), *net.parameters()], lr=0.1))


def sections(graph: Graph) -> list[tuple[str, list[str]]]:
    """The headings of the first compiled step, and the lines under each."""
    code = str(graph).partition("# compiled step 0\n")[2].partition("# compiled step")[0]
    parts = re.split(r"^    # ([a-z ]+)\n", code, flags=re.M)
    return list(zip(parts[1::2], map(str.splitlines, parts[2::2]), strict=True))


def test_the_listing_has_stages_shapes_and_stores() -> None:
    graph = rating(embedding(), mlp(3 * DIM))
    graph(id_batches(8, 3)[0])
    found = sections(graph)
    stages = ["pin", "gather", "forward", "backward", "update", "dense step", "outputs"]
    assert [stage for stage, _ in found] == stages
    lines = dict(found)
    assert lines["pin"] == ["    pin = pin(rows, [Lookup(ids)])  # rows in device_mem"]
    assert lines["gather"] == ["    gather = gather(pin, 0)  # float32 [8, 3, 4], rows in device_mem"]
    assert "    relu = aten.relu.default(addmm)  # float32 [8, 8]" in lines["forward"]
    assert lines["backward"][-1] == "    view_3 = aten.view.default(slice_1, [8, 3, 4])  # float32 [8, 3, 4]"
    assert "    update = update(pin, [view_3])  # rows in device_mem" in lines["update"]
    assert "    # ids: int64 [8, 3]\n" in str(graph)
    assert "    # mlp_0_weight: float32 [8, 12]\n" in str(graph)


def test_an_evaluation_lists_a_read_and_no_backward() -> None:
    graph = rating(embedding(), mlp(3 * DIM)).eval()
    graph(id_batches(8, 3)[0])
    assert [stage for stage, _ in sections(graph)] == ["gather", "forward", "outputs"]


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
    def build(graph: Any, x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(x.tanh().sum(), x)
        return grad

    graph = graph_of(build)
    graph(torch.ones(2, requires_grad=True))
    assert "tanh_backward" in "\n".join(dict(sections(graph))["backward"])


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    text: list[str]
    nodes: list[str]


def boxes(svg: ElementTree.Element) -> list[Box]:
    return [
        Box(
            *(float(rect.attrib[name]) for name in ("x", "y", "width", "height")),
            [text.text or "" for text in group.iter(f"{SVG}text")],
            [line.split(" ")[0] for line in str(group.findtext(f"{SVG}title")).splitlines()],
        )
        for group in svg.iter(f"{SVG}g")
        for rect in group.iter(f"{SVG}rect")
    ]


def drawn(graph: Graph, path: Path) -> ElementTree.Element:
    graph.draw(path / "step.svg")
    svg = ElementTree.parse(path / "step.svg").getroot()
    assert svg.tag == f"{SVG}svg"
    return svg


def check_places(svg: ElementTree.Element) -> None:
    """Boxes lie in the picture and apart; edges lead from the bottom of one to the top of another."""
    found = boxes(svg)
    for box in found:
        assert 0 <= box.x <= box.x + box.width <= float(svg.attrib["width"])
        assert 0 <= box.y <= box.y + box.height <= float(svg.attrib["height"])
        assert max(map(len, box.text)) * 6.6 < box.width
    for row in {box.y for box in found}:
        for left, right in pairwise(sorted(box for box in found if box.y == row)):
            assert left.x + left.width < right.x
    by_row = sorted((box.y, box.y + box.height) for box in found)
    assert all(top == other or bottom < other for (top, bottom), (other, _) in pairwise(by_row) if top != other)
    tops = {(f"{box.x + box.width / 2:.0f}", f"{box.y:.0f}") for box in found}
    bottoms = {(f"{box.x + box.width / 2:.0f}", f"{box.y + box.height:.0f}") for box in found}
    for path in svg.iter(f"{SVG}path"):
        numbers = [float(number) for number in re.findall(r"[\d.]+", path.attrib["d"])]
        assert near(numbers[:2], bottoms)
        assert near(numbers[-2:], tops)


def near(point: list[float], places: set[tuple[str, str]]) -> bool:
    return any(abs(point[0] - float(x)) < 1 and abs(point[1] - float(y)) < 1 for x, y in places)


def test_a_picture_has_each_op_once_in_the_order_of_stages(tmp_path: Path) -> None:
    graph = rating(embedding(), mlp(3 * DIM))
    graph(id_batches(8, 3)[0])
    svg = drawn(graph, tmp_path)
    check_places(svg)
    names = [text.text for text in svg.findall(f"{SVG}text")]
    assert names == [
        "Rating", "inputs", "pin", "gather", "forward", "backward", "update", "dense step", "outputs",
    ]  # fmt: skip
    found = boxes(svg)
    assert len(found) < len(str(graph).splitlines())
    nodes = [node for box in found for node in box.nodes]
    listed = re.findall(r"^    (\w+) = ", str(graph), re.M)
    views = {"t", "t_1", "adam"}  # of parameters, and what the boxes of others name
    assert sorted(nodes) == sorted({*listed, "ids", "return"} - views)
    texts = {box.nodes[-1]: box.text for box in found}
    assert texts["ids"] == ["ids", "int64 [8, 3]"]
    assert texts["gather"] == ["gather", "float32 [8, 3, 4], rows in device_mem"]
    assert texts["addmm"] == ["addmm", "float32 [8, 8]", "mlp_0_bias", "mlp_0_weight"]
    assert texts["dense_step"] == ["dense_step", "adam", "mlp_0_weight", "mlp_0_bias", "and 2 more"]
    assert any(box.text[0] == "pow \N{RIGHTWARDS ARROW} mul" for box in found)


def test_a_picture_says_which_store_each_lookup_goes_to(tmp_path: Path) -> None:
    host = tierbed.make_host_mem_store_options()
    users = MultiTableEmbedding("users", DIM, torch.float32, torch.int64, None, host)

    def build(graph: Any, ids: Tensor) -> Tensor:
        loss = (graph.users(ids) * graph.items(ids)).sum() + graph.users(ids + 1, pooling="mean").sum()
        loss.backward()
        return loss

    items = embedding()
    optimizer = torch.optim.SGD([*users.parameters(), *items.parameters()], lr=0.1)
    graph = graph_of(build, optimizer, users=users, items=items)
    graph.clip_grad_norm(1.0)
    graph(id_batches(6)[0])
    svg = drawn(graph, tmp_path)
    check_places(svg)
    stores = [box.text[1].partition("], ")[2] for box in boxes(svg) if box.text[0] == "gather"]
    assert sorted(stores) == ["items in device_mem", "users in host_mem", "users in host_mem"]
    (end,) = [box for box in boxes(svg) if box.nodes == ["apply_gradients"]]
    assert set(end.text[1].split(", ")) == {"items in device_mem", "users in host_mem"}


def test_a_picture_says_whose_rows_come_up_ahead_of_the_step(tmp_path: Path) -> None:
    store = tierbed.make_device_mem_store_options()
    users, items = (MultiTableEmbedding(n, DIM, torch.float32, torch.int64, None, store) for n in ("users", "items"))

    def build(graph: Any, ids: Tensor) -> Tensor:
        drawn_ids = torch.randint(0, 9, ids.shape)  # known in the step alone
        loss = (graph.users(ids) * graph.items(drawn_ids)).sum()
        loss.backward()
        return loss

    optimizer = torch.optim.SGD([*users.parameters(), *items.parameters()], lr=0.1)
    graph = graph_of(build, optimizer, users=users, items=items)
    graph(id_batches(6)[0])
    svg = drawn(graph, tmp_path)
    check_places(svg)
    pinned = {box.text[1]: box.text[2:] for box in boxes(svg) if box.text[0] == "pin"}
    assert pinned == {"users in device_mem": ["ahead, on a thread of its own"], "items in device_mem": []}


def test_a_large_step_stays_legible(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3 * DIM, 8), *(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(20)))
    rows = [embedding() for _ in range(12)]

    def build(graph: Any, ids: Tensor) -> Tensor:
        loss = graph.net(sum(table(ids).flatten(1) for table in graph.rows)).square().mean()
        loss.backward()
        return loss

    modules = {"net": net, "rows": nn.ModuleList(rows)}
    optimizer = torch.optim.Adam([p for module in modules.values() for p in module.parameters()])
    graph = graph_of(build, optimizer, **modules)
    graph(id_batches(8, 3)[0])
    svg = drawn(graph, tmp_path)
    check_places(svg)
    assert float(svg.attrib["width"]) < 1300


def test_names_are_escaped_and_the_last_call_is_drawn(tmp_path: Path) -> None:
    graph: Any = type("A<B>&", (Graph,), {"build": lambda self, x, name: x.exp() + len(name)})()
    with pytest.raises(GraphError, match="A<B>& has no step to draw yet; call it once"):
        graph.draw(tmp_path / "step.svg")
    for rows in (2, 3, 2):
        graph(torch.ones(rows), "a & b < c")
        svg = drawn(graph, tmp_path)
        assert svg.findtext(f"{SVG}text") == "A<B>&"
        assert boxes(svg)[0].text == ["x", f"float32 [{rows}]"]
