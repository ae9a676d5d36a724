"""benchmarks/dlrm.py at tiny sizes: contenders are one model, and a model that differs has no figure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.figures import check_quick_run
from support.places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
import dlrm
import dlrm_contenders
from dlrm_contenders import Contender, Tierbed, Torch, TorchRec
from dlrm_model import Batches, Model
from tier_stores import Mismatch


def small(length: int) -> Model:
    return Model(batch=32, length=length, tables=3, rows=50, bottom=(8,), top=(8,))


def losses(contender: Contender, model: Model) -> list[Tensor]:
    batches = Batches(model)
    return contender.run([contender.prepared(batches[number]) for number in range(10)])


@pytest.mark.slow
def test_every_section_has_figures_for_sides_that_agree(tmp_path: Path) -> None:
    check_quick_run(dlrm, tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of TorchRec and of sparse gradients
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("peer", [Torch, TorchRec])
def test_the_peers_train_the_same_model(peer: type[Torch], length: int) -> None:
    model = small(length)
    ours, theirs = losses(Tierbed(model), model), losses(peer(model), model)
    torch.testing.assert_close(torch.stack(theirs), torch.stack(ours), rtol=1e-5, atol=0)


def test_a_learning_rate_a_twentieth_off_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(4)
    ours = losses(Tierbed(model), model)
    monkeypatch.setattr(dlrm_contenders, "ROW_LR", 1.05 * dlrm_contenders.ROW_LR)
    with pytest.raises(Mismatch, match=r"by tierbed, .* by another"):
        dlrm.check({"tierbed": ours, "another": losses(Tierbed(model), model)}, 0, dlrm.SECTIONS["1 id"].tolerance)
