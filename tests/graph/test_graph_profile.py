"""A profile trains as the run, bit for bit, and has the time of each op and step."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.embeddings import DIM as WIDE
from support.embeddings import make
from support.forked import in_process
from support.graphs import DIM, Rating, embedding, graph_of, id_batches, mlp
from support.refusals import check_refusal
from support.stores import options
from tierbed import Graph, InputError, MultiTableEmbedding
from tierbed.graph.show.profile import Profile

STAGES = ["loader", "pin", "gather", "forward", "backward", "update", "dense step", "Python around"]


def rating(rows: MultiTableEmbedding | None = None, net: nn.Module | None = None) -> Graph:
    rows, net = embedding() if rows is None else rows, net or layers()
    return Rating(rows, net, torch.optim.Adagrad([*rows.parameters(), *net.parameters()], lr=0.1))


def trained(graph: Graph) -> list[Tensor]:
    return [graph.rows.get(torch.arange(50)), *graph.mlp.state_dict().values()]


def layers(dim: int = DIM) -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(3 * dim), nn.Dropout(0.3), mlp(3 * dim))


def batches() -> list[Tensor]:
    return [*id_batches(8, 3), torch.arange(15).view(5, 3)]  # the last one is smaller


@pytest.fixture(scope="module")
def profiled() -> Iterator[tuple[Graph, Profile]]:
    """A graph, and the profile of its first steps."""
    graph = rating()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # else a busy machine adds a line
        yield graph, graph.profile(batches(), ahead=2)


def test_wrong_arguments_are_refused(profiled: tuple[Graph, Profile]) -> None:
    graph, profile = profiled
    for most in (-1, 0, True, 2.0, None):
        check_refusal((lambda n=most: profile.by_op(n), InputError, f"={most}", "whole number"))
    check_refusal((lambda: profile.chrome_trace(3), InputError, "path=3"))  # type: ignore[arg-type]
    check_refusal((lambda: graph.profile(batches(), steps=0), InputError, "steps=0"))
    check_refusal((lambda: graph.profile(5), InputError, "DataLoader"))  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_profile_trains_to_the_bits_of_the_plain_run(tmp_path: Path, ahead: int) -> None:
    net = layers(WIDE)
    with make(options("cached_host", tmp_path), tables=1) as rows, make(options("device"), tables=1) as others:
        plain, profiled = rating(others, copy.deepcopy(net)), rating(rows, net)
        if ahead:
            for graph in (plain, profiled):
                graph.clip_grad_norm(0.01)
                graph.accumulate_grads(2)
        torch.manual_seed(1)
        for ids in batches():
            plain(ids)
        torch.manual_seed(1)
        assert profiled.profile(batches(), ahead=ahead).steps == 11
        assert all(map(torch.equal, trained(plain), trained(profiled)))


def test_the_table_has_every_stage_and_each_op_is_in_one(profiled: tuple[Graph, Profile]) -> None:
    _, profile = profiled
    assert list(profile.stages) == STAGES
    assert all(seconds > 0 for seconds in profile.stages.values())
    assert profile.compile_seconds > 0
    title, head, *rows, compiled = (line for line in str(profile).splitlines() if "compile_dense" not in line)
    assert title == "Rating: 11 steps"
    assert head.split() == ["total", "ms", "mean", "ms", "share"]
    assert [row[:14].strip() for row in rows] == [*STAGES, "step"]
    assert compiled.endswith("to compile and to add the clock, not counted above")
    totals = [float(row[14:].split()[0]) for row in rows]
    assert sum(totals[:-1]) == pytest.approx(totals[-1], abs=0.01)
    assert rows[-1].endswith("100.0%")


def test_ops_have_the_names_of_the_listing(profiled: tuple[Graph, Profile]) -> None:
    graph, profile = profiled
    listed = str(graph)
    head, *rows = profile.by_op(1000).splitlines()
    assert head.split() == ["stage", "total", "ms", "mean", "ms", "share"]
    names = [row.split()[0] for row in rows]
    assert all(f"    {name} = " in listed for name in names)
    assert {"pin", "gather", "update", "dense_step", "addmm"} <= set(names)
    longest = [float(row.split("%")[0].split()[-3]) for row in rows]
    assert longest == sorted(longest, reverse=True)
    assert [line.split()[0] for line in profile.by_op(3).splitlines()[1:]] == names[:3]


def test_the_chrome_trace_has_one_event_an_op_and_step_within_the_step(
    tmp_path: Path, profiled: tuple[Graph, Profile]
) -> None:
    graph, profile = profiled
    profile.chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    steps = [event for event in spans if event["cat"] == "step"]
    assert [event["name"] for event in steps] == [f"step {i}" for i in range(11)]
    assert len([event for event in spans if event["cat"] == "loader"]) == 11
    codes = str(graph).split("# compiled step")[1:]
    ops = [set(re.findall(r"^    (\w+) = (?!self\.)", code, re.M)) for code in codes]
    for number, step in enumerate(steps):
        inside = [event for event in spans if event["args"].get("step") == number and event["cat"] != "loader"]
        assert {event["name"] for event in inside} == ops[0 if number < 10 else 1]
        assert len(inside) == len({event["name"] for event in inside})
        end = step["ts"]
        for event in sorted(inside, key=lambda event: event["ts"]):
            assert event["ts"] >= end - 1e-3
            end = event["ts"] + event["dur"]
        assert end <= step["ts"] + step["dur"] + 1e-3


def elementwise(x: Tensor) -> Tensor:
    """All ops of which TorchInductor fuses."""
    for _ in range(20):
        x = (x + 1).tanh()
    return x


def test_a_step_of_many_small_ops_is_told_of_compile_dense() -> None:
    advice = "% went to dense ops that TorchInductor can fuse: try compile_dense()"
    graph = graph_of(lambda graph, x, fuses: elementwise(x) if fuses else x @ x @ x @ x @ x)
    x = torch.rand(300, 300)
    assert advice in str(graph.profile([(x, True)] * 3))
    assert advice not in str(graph.profile([(x, False)] * 3))
    graph.cuda_graph()  # which compile_dense does not go with
    assert advice not in str(graph.profile([(x, True)] * 3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own, at its import
@pytest.mark.slow
def test_a_part_that_inductor_compiled_is_one_op() -> None:
    graph = rating(net=mlp(3 * DIM))
    graph.compile_dense()
    profile = graph.profile(batches()[:3])
    assert list(profile.stages) == [
        "loader", "pin", "gather", "compiled", "update", "dense step", "Python around",
    ]  # fmt: skip
    assert "try compile_dense()" not in str(profile)
    assert "    # compiled\n    dense_0 = self.dense_0(gather, mlp_0_weight," in str(graph)
    assert "dense_0" in profile.by_op()


def test_what_the_loader_or_an_op_raises_comes_out_and_the_graph_goes_on() -> None:
    def loader() -> Iterator[Tensor]:
        yield torch.ones(1)
        raise KeyError("mine")

    graph = graph_of(lambda graph, x: (torch._assert_async((x < 5).all()), x * 2)[1])
    with pytest.raises(KeyError, match="mine"):
        graph.profile(loader())
    with pytest.raises(RuntimeError, match="nonzero"):
        graph.profile([torch.ones(1), torch.full((1,), 9.0)])
    assert graph(torch.ones(1)) == 2
    assert graph.profile([torch.ones(1)]).steps == 1


def test_a_profile_draws_so_many_batches_as_steps_and_an_evaluation_has_no_backward(tmp_path: Path) -> None:
    graph = rating().eval()
    loader = iter(batches())
    profile = graph.profile(loader, 4)
    assert torch.equal(next(loader), batches()[4])
    assert (profile.steps, list(profile.stages)) == (4, ["loader", "gather", "forward", "Python around"])
    assert graph.rows.size() == 0
    profile = graph.profile([])
    assert (profile.steps, profile.stages) == (0, {})
    assert "0 steps" in str(profile)
    assert len(profile.by_op().splitlines()) == 1
    profile.chrome_trace(tmp_path / "trace.json")


ADVICE = "start the process with OMP_WAIT_POLICY=PASSIVE"


def profiled_on_one_core(threads: int, policy: str | None) -> str:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ.pop("OMP_WAIT_POLICY", None)
    if policy is not None:
        os.environ["OMP_WAIT_POLICY"] = policy
    torch.set_num_threads(threads)
    return str(graph_of(lambda graph, x: elementwise(x).sum()).profile([torch.ones(1 << 20)] * 5))


@pytest.mark.parametrize(("threads", "policy", "advised"), [(2, None, True), (2, "PASSIVE", False), (1, None, False)])
def test_threads_that_wait_for_a_core_are_told_of_where_others_may_spin(
    threads: int, policy: str | None, advised: bool
) -> None:
    said = in_process(profiled_on_one_core, threads, policy)
    assert (ADVICE in said.splitlines()[-1]) == advised
    assert (ADVICE in said) == advised
