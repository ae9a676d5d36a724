"""PyTorch Lightning keeps whole models: `ckpt_path` resumes bit for bit, and the best epoch has its rows."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from support.two_towers import IDS, TwoTowers, kinds, losses, optimizer_of, stores
from tierbed import EagerOptimizer, MultiTableEmbedding, make_host_mem_store_options
from tierbed.distributed import World

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.tuner import Tuner

pytestmark = pytest.mark.filterwarnings("ignore")  # of the package
QUIET: Any = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False) | {"accelerator": "cpu"}


class Trained(pl.LightningModule):
    """manual: whether the steps are called here."""

    def __init__(self, store_options: Any, manual: bool = False, world: World | None = None) -> None:
        super().__init__()
        self.model, self.automatic_optimization = TwoTowers(store_options, world), not manual
        self.losses: list[float] = []

    def configure_optimizers(self) -> EagerOptimizer:
        return EagerOptimizer(torch.optim.Adam(self.model.parameters(), lr=0.02), self.model)

    def training_step(self, ids: Tensor, number: int) -> Tensor:
        torch.manual_seed(int(ids.sum()))
        loss: Tensor = self.model(ids[0])
        self.losses.append(float(loss.detach()))
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(loss)
            optimizer.step()  # type: ignore[union-attr]
        # the best epoch is the second
        self.log("score", abs(float(self.current_epoch - 1)), on_step=False, on_epoch=True)
        return loss


class Clipped(Trained):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **unused: Any) -> None:
        optimizer.clip_grad_norm_(self.parameters(), gradient_clip_val)


def fit(module: Trained, path: Path, epochs: int, resume: str | None = None, **more: Any) -> ModelCheckpoint:
    monitor = more.pop("monitor", None)
    keeps = ModelCheckpoint(path / "kept", monitor=monitor, save_top_k=2 if monitor else 1, save_last=True)
    trainer = pl.Trainer(default_root_dir=path, max_epochs=epochs, **QUIET, callbacks=[keeps], **more)
    trainer.fit(module, DataLoader(IDS[:6], batch_size=1), ckpt_path=resume)  # type: ignore[arg-type]
    return keeps


@kinds
@pytest.mark.parametrize("way", ["automatic", "manual", "accumulated"])
@pytest.mark.rotated("way")
def test_a_run_that_is_resumed_by_ckpt_path_is_the_uninterrupted_one(tmp_path: Path, kind: str, way: str) -> None:
    more = {"accumulate_grad_batches": 2} if way == "accumulated" else {}
    whole = Trained(stores("host", tmp_path), way == "manual")
    fit(whole, tmp_path / "whole", 2, **more)
    first = Trained(stores(kind, tmp_path / "store"), way == "manual")
    keeps = fit(first, tmp_path / "a", 1, **more)
    first.model.close()
    again = Trained(stores(kind, tmp_path / "store"), way == "manual")
    fit(again, tmp_path / "a", 2, keeps.last_model_path, **more)
    assert first.losses + again.losses == whole.losses


@kinds
def test_the_best_epoch_comes_back_whole(tmp_path: Path, kind: str) -> None:
    second = Trained(stores("host", tmp_path))
    fit(second, tmp_path / "second", 2)
    module = Trained(stores(kind, tmp_path / "store"))
    keeps = fit(module, tmp_path / "all", 4, monitor="score")
    assert "epoch=1-" in keeps.best_model_path
    module.model.close()
    again = Trained(stores(kind, tmp_path / "store"))
    fit(again, tmp_path / "again", 3, keeps.best_model_path)
    assert again.losses == module.losses[12:18]
    again.model.close()
    module = Trained(stores(kind, tmp_path / "store"))
    module.load_state_dict(torch.load(keeps.best_model_path, weights_only=False)["state_dict"])
    for ids in IDS[6:9]:
        assert float(module.eval().model(ids)) == float(second.eval().model(ids))


def test_gradients_are_clipped_by_lightning_and_by_its_hook(tmp_path: Path) -> None:
    plain, module = Trained(stores("host", tmp_path)), Clipped(stores("ssd folder", tmp_path / "store"))
    fit(plain, tmp_path / "a", 2, gradient_clip_val=0.05)
    fit(module, tmp_path / "b", 2, gradient_clip_val=0.05)
    model = TwoTowers(stores("host", tmp_path))
    expected = list(losses(model, optimizer_of(model), IDS[:6].repeat(2, 1, 1), 0.05))
    assert module.losses == expected
    assert plain.losses == pytest.approx(expected, rel=1e-6)
    module.model.close()


class Tuned(pl.LightningModule):
    """ours: whether the rows are of tierbed, or a plain nn.Embedding."""

    def __init__(self, ours: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows: Any = torch.nn.Embedding(32, 4)
        self.out = torch.nn.Linear(4, 1)
        if ours:
            plain = self.rows.weight.detach()
            options = make_host_mem_store_options()
            self.rows = MultiTableEmbedding("tuned", 4, torch.float32, torch.int64, None, options)
            self.rows.load_dense({0: plain})
        self.ours, self.lr, self.batch_size = ours, 0.01, 2
        self.losses: list[float] = []

    def training_step(self, ids: Tensor, number: int) -> Tensor:
        loss: Tensor = (self.out(self.rows(ids)) - ids / 32).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return EagerOptimizer(optimizer, self) if self.ours else optimizer

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(32), batch_size=self.batch_size)  # type: ignore[arg-type]


def tuned(ours: bool, ways: tuple[str, ...], path: Path) -> list[float]:
    module = Tuned(ours)
    quiet = QUIET | {"max_epochs": 1, "enable_checkpointing": False, "default_root_dir": path}
    for way in ways:
        trainer = pl.Trainer(**quiet)
        if way == "fit":
            trainer.fit(module)
        elif way == "lr_find":
            Tuner(trainer).lr_find(module, num_training=12, min_lr=1e-4, max_lr=0.1)
            module.lr = 0.01
        else:
            Tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=2)
    return module.losses


@pytest.mark.parametrize("ways", [("fit", "fit"), ("scale_batch_size", "lr_find", "fit")])
def test_what_makes_the_optimizer_again_trains_as_with_a_plain_embedding(ways: tuple[str, ...], tmp_path: Path) -> None:
    losses = tuned(True, ways, tmp_path)
    assert len(losses) > 10
    torch.testing.assert_close(losses, tuned(False, ways, tmp_path), rtol=1e-6, atol=1e-6)
