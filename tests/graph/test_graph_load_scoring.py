"""A checkpoint in a graph that only scores, or trains by other optimizers: rows, parameters and buffers alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.checkpoints import IDS, Rating, rating, steps
from support.embeddings import make
from support.refusals import check_refusal
from support.stores import STORES, options
from tierbed import Graph, InputError, MultiTableEmbedding, SnapshotError


class Scoring(Graph):
    """The modules of `Rating`, and nothing that trains."""

    def __init__(self, rows: MultiTableEmbedding, kind: type[torch.optim.Optimizer] | None = None) -> None:
        super().__init__()
        self.rows = rows
        self.mlp = nn.Sequential(nn.BatchNorm1d(2 * rows.spec.dim), nn.Dropout(0.3), nn.Linear(2 * rows.spec.dim, 1))
        if kind is not None:
            self.add_optimizer(kind(self.parameters(), lr=0.1))  # type: ignore[call-arg]

    def build(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.mlp(self.rows(ids).flatten(1)).squeeze(1)
        if self.training:
            scores.square().mean().backward()
        return scores


def scoring(store: str, path: Path | None, kind: type[torch.optim.Optimizer] | None = None) -> Scoring:
    return Scoring(make(options(store, path), None, tables=2), kind)


@pytest.fixture(scope="module")
def best(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rating, Path]:
    """A graph that was trained, and its checkpoint."""
    path = tmp_path_factory.mktemp("trained")
    graph = rating("host", path)
    steps(graph, IDS[:4])
    graph.save(path / "best")
    return graph, path / "best"


@pytest.mark.parametrize("kind", [None, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.rotated("kind")
def test_a_graph_without_the_optimizers_of_a_checkpoint_scores_as_the_one_that_saved_it(
    tmp_path: Path,
    best: tuple[Rating, Path],
    store: str,
    kind: type[torch.optim.Optimizer] | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained, path = best
    torch.manual_seed(7)
    score = scoring(store, tmp_path, kind)
    score.load(path, optimizers=False)
    assert not caplog.records
    keys, tables = torch.arange(40).repeat(2), torch.arange(2).repeat_interleave(40)
    assert torch.equal(score.rows.get(keys, tables), trained.rows.get(keys, tables))
    for name, value in trained.mlp.state_dict().items():
        assert torch.equal(score.mlp.state_dict()[name], value)
    assert score.rows.last_snapshot is None
    if kind is None:
        expected = Scoring(trained.rows).eval()
        expected.mlp = trained.mlp
        assert torch.equal(score.eval()(IDS[5]), expected.eval()(IDS[5]))
    else:
        score(IDS[5])
        assert score.rows.metrics()["table"]["step"] == 1


def test_another_graph_is_refused_and_nothing_replaced(best: tuple[Rating, Path]) -> None:
    _, path = best
    score = scoring("device", None)
    torch.manual_seed(7)
    expected = torch.get_rng_state()
    score.load(path, optimizers=False)
    assert torch.equal(torch.get_rng_state(), expected)  # random numbers go on
    score = scoring("device", None)
    check_refusal((lambda: score.load(path), SnapshotError, "2 optimizers", "this graph has 0"))
    score.mlp.extra = nn.Parameter(torch.zeros(1))
    check_refusal((lambda: score.load(path, optimizers=False), SnapshotError, "lacks ['mlp.extra']"))
    check_refusal((lambda: score.load(path, optimizers=0), InputError, "optimizers=0"))  # type: ignore[arg-type]
    assert score.rows.size() == 0
