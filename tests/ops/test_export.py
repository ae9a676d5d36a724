"""A program that was recorded with a lookup never reads the rows of another embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from support.graphs import DIM, embedding, graph_of
from support.scripts import run_script
from tierbed import EagerOptimizer, MultiTableEmbedding
from tierbed.engine.errors import ClosedError, GraphError

IDS = torch.arange(4)
ELSEWHERE = """
import sys
import torch
from tierbed import EagerOptimizer, MultiTableEmbedding
from tierbed.engine.errors import ClosedError

others = [
    MultiTableEmbedding(f"other{i}", 4, torch.float32, torch.int64, None, {"store": "device_mem"}) for i in range(50)
]
program = torch.load(sys.argv[1], weights_only=False)
try:
    print(program(torch.arange(4)))
except ClosedError as error:
    print("ClosedError", error)
"""


class Model(nn.Module):
    def __init__(self, rows: MultiTableEmbedding) -> None:
        super().__init__()
        self.rows, self.dense = rows, nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dense(self.rows(ids))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("gradients", [False, True])
def test_an_export_with_an_embedding_is_refused_by_name_not_bound_to_this_process(gradients: bool) -> None:
    model = Model(embedding())
    if gradients:  # are alive
        optimizer = EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        model(IDS).sum().backward()
        optimizer.step()
    for export in (
        lambda: torch.export.export(model, (IDS,), strict=False),
        lambda: torch.export.export(model, (IDS,), strict=True),
        lambda: torch.export.export(model.rows, (IDS,)),
        lambda: torch.jit.trace(model, (IDS,)),
    ):
        with pytest.raises(
            GraphError, match=f"embedding '{model.rows.name}' cannot be exported.*pass them the embedding's result"
        ):
            export()
    model(IDS)  # nothing of the export is left


def test_the_remedy_of_an_export_works(tmp_path: Path) -> None:
    model = Model(embedding())
    torch.export.save(torch.export.export(model.dense, (model.rows.get(IDS),)), tmp_path / "dense.pt2")
    program = torch.export.load(tmp_path / "dense.pt2").module()
    assert torch.equal(program(model.rows(IDS)), model(IDS))


def test_a_recorded_lookup_reads_no_other_embedding_of_another_process(tmp_path: Path) -> None:
    torch.save(make_fx(embedding())(IDS), tmp_path / "program.pt")
    done = run_script(ELSEWHERE, tmp_path / "program.pt")
    assert done.returncode == 0, done.stderr
    assert "ClosedError a lookup of embedding_id" in done.stdout
    assert "another process" in done.stdout


def test_a_recorded_lookup_reads_no_embedding_that_came_after_its_own() -> None:
    rows = embedding()
    program = make_fx(rows)(IDS)
    assert torch.equal(program(IDS), rows(IDS))
    del rows
    later = [embedding() for _ in range(20)]
    with pytest.raises(ClosedError, match="keep a reference to it"):
        program(IDS)
    assert not any(rows.is_open for rows in later)


def test_a_lookup_by_a_small_number_as_in_programs_of_old_reads_no_embedding() -> None:
    rows = [embedding() for _ in range(20)]
    for number in range(100):
        with pytest.raises(ClosedError, match=f"embedding_id {number}, but this process has no embedding"):
            torch.ops.tierbed.lookup(rows[0].shadow, IDS, *[None] * 5, number)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_model_under_torch_compile_reads_the_rows_of_its_own_embeddings(backend: str) -> None:
    torch.compiler.reset()
    for _ in range(2):
        model = Model(embedding())
        assert torch.equal(torch.compile(model, backend=backend, fullgraph=True)(IDS), model(IDS))


def test_a_graph_that_is_compiled_beside_an_export_of_its_dense_part_trains() -> None:
    rows, dense = embedding(), nn.Linear(DIM, 1)
    optimizer = torch.optim.SGD([*rows.parameters(), *dense.parameters()], lr=0.1)

    def build(graph: Any, ids: Tensor) -> Tensor:
        loss = graph.dense(graph.rows(ids)).sum()
        loss.backward()
        return loss

    before = rows.get(IDS)
    torch.export.export(dense, (before,))
    graph_of(build, optimizer, rows=rows, dense=dense)(IDS)
    assert not torch.equal(rows.get(IDS), before)
