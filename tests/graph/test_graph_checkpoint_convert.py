"""A checkpoint where it was not saved: rows of another dtype, and graphs that score or have other optimizers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support import checkpoints
from support.checkpoints import IDS, Rating, steps
from support.embeddings import contents, make
from support.refusals import check_refusal
from support.stores import STORES, options
from tierbed import Graph, MultiTableEmbedding, SnapshotError, load_checkpoint, save_checkpoint
from tierbed.engine.errors import InputError, StoreError

KINDS = ["device", pytest.param("host folder", marks=pytest.mark.slow), "ssd folder"]


def rating(kind: str, path: Path, dtype: torch.dtype, state_dtype: torch.dtype = torch.float32) -> Rating:
    store, *folder = kind.split()
    stored = options(store, path if folder else None)
    return Rating(make(stored, None, "rows", tables=2, dtype=dtype, state_dtype=state_dtype))


def rounded(graph: Rating) -> Tensor:
    return graph.rows.get(IDS[0], 0).bfloat16().float()


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_another_dtype_is_converted_if_that_is_asked_for(tmp_path: Path, kind: str) -> None:
    wide = rating(kind, tmp_path / "wide", torch.float32)
    steps(wide, IDS[:3])
    wide.save(tmp_path / "saved")
    save_checkpoint(tmp_path / "of-a-loop", wide.rows)
    numbers, keys = rounded(wide), contents(wide.rows)["key"]
    wide.rows.close()
    narrow = rating(kind, tmp_path / "narrow", torch.bfloat16, torch.bfloat16)
    before = steps(narrow, IDS[:1])
    for load in (lambda: narrow.load(tmp_path / "saved"), lambda: load_checkpoint(tmp_path / "of-a-loop", narrow.rows)):
        check_refusal((load, SnapshotError, "float32, not bfloat16", "convert=True"))
    load_checkpoint(tmp_path / "of-a-loop", narrow.rows, convert=True)
    assert torch.equal(narrow.rows.get(IDS[0], 0), numbers)
    narrow.load(tmp_path / "saved", convert=True)
    assert torch.equal(narrow.rows.get(IDS[0], 0), numbers)
    assert (contents(narrow.rows)["key"] == keys).all()
    assert narrow.rows.metrics()["table"]["step"] == 3
    assert steps(narrow, IDS[3:4]) != before
    narrow.rows.close()
    if "folder" in kind:
        again = rating(kind, tmp_path / "narrow", torch.bfloat16, torch.bfloat16)
        again.load(tmp_path / "saved", optimizers=False, convert=True)
        assert torch.equal(again.rows.get(IDS[0], 0), numbers)


def test_a_number_that_a_narrower_dtype_cannot_hold_replaces_no_row(tmp_path: Path) -> None:
    wide = rating("device", tmp_path, torch.float32)
    steps(wide, IDS[:1])
    wide.rows.put([7], torch.full((1, wide.rows.dim), 1e30), 0)
    wide.save(tmp_path / "saved")
    narrow = rating("device", tmp_path, torch.float16)
    steps(narrow, IDS[:2])
    before = contents(narrow.rows).tobytes()
    with pytest.raises(InputError, match="1e\\+30"):
        narrow.load(tmp_path / "saved", convert=True)
    assert contents(narrow.rows).tobytes() == before


def test_a_checkpoint_is_converted_in_the_folder_of_the_old_rows(tmp_path: Path) -> None:
    wide = rating("ssd folder", tmp_path / "rows", torch.float32)
    steps(wide, IDS[:3])
    wide.save(tmp_path / "saved")
    numbers = rounded(wide)
    wide.rows.close()
    said = r"""open with open="fresh", which drops them, and .*graph\.load\(path, convert=True\)"""
    with pytest.raises(StoreError, match=said):
        rating("ssd folder", tmp_path / "rows", torch.bfloat16).load(tmp_path / "saved", convert=True)
    fresh = options("ssd", tmp_path / "rows", open="fresh")
    narrow = Rating(make(fresh, None, "rows", tables=2, dtype=torch.bfloat16))
    narrow.load(tmp_path / "saved", convert=True)
    assert torch.equal(narrow.rows.get(IDS[0], 0), numbers)
    narrow.rows.close()


class Scoring(Graph):
    """The modules of `Rating`, and nothing that trains, or other optimizers."""

    def __init__(self, rows: MultiTableEmbedding, kind: type[torch.optim.Optimizer] | None = None) -> None:
        super().__init__()
        self.rows, width = rows, 2 * rows.spec.dim
        self.mlp = nn.Sequential(nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1))
        if kind is not None:
            self.add_optimizer(kind(self.parameters(), lr=0.1))  # type: ignore[call-arg]

    def build(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.mlp(self.rows(ids).flatten(1)).squeeze(1)
        if self.training:
            scores.square().mean().backward()
        return scores


@pytest.fixture(scope="module")
def best(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rating, Path]:
    """A graph that was trained, and its checkpoint."""
    path = tmp_path_factory.mktemp("trained")
    graph = checkpoints.rating("host", path)
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
    score = Scoring(make(options(store, tmp_path), None, tables=2), kind)
    torch.manual_seed(7)
    random = torch.get_rng_state()
    score.load(path, optimizers=False)
    assert torch.equal(torch.get_rng_state(), random)
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
    score = Scoring(make(options("device"), None, tables=2))
    check_refusal((lambda: score.load(best[1]), SnapshotError, "2 optimizers", "this graph has 0"))
    score.mlp.extra = nn.Parameter(torch.zeros(1))
    check_refusal((lambda: score.load(best[1], optimizers=False), SnapshotError, "lacks ['mlp.extra']"))
    assert score.rows.size() == 0
