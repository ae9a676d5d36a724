"""`graph.publish`: each version has the rows and the dense weights of one step, though training goes on meanwhile."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tierbed
from support.embeddings import contents
from support.served_rows import Rows, rows_of
from support.stores import STORES, options
from tierbed import ServingError
from tierbed.engine.table import background_save
from tierbed.serving import ServingFolder, Version
from tierbed.serving.row_file import hash_rows

IDS = 120


class Model(tierbed.Graph):
    def __init__(
        self, path: Path | None, store: str = "device", optimizer: Any = torch.optim.Adam, **more: Any
    ) -> None:
        super().__init__()
        self.items = tierbed.MultiTableEmbedding(
            "items", 4, torch.float32, torch.int64, None, options(store, path, **more), seed=0
        )
        self.top = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.add_optimizer(optimizer(self.parameters(), lr=0.1))

    def build(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = self.top(self.items(ids)).square().mean()
        loss.backward()
        return loss


def train(model: Model, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.randint(IDS, (9,), generator=torch.Generator().manual_seed(int(model.calls))))


def evaluated(model: Model) -> Rows:
    """What evaluation returns for all rows that the table has."""
    keys = torch.from_numpy(contents(model.items)["key"].astype(np.int64))
    model.eval()
    rows = model.items(keys).detach().numpy()
    model.train()
    hashes = hash_rows(0, keys.numpy().view(np.uint64)).tolist()
    return {("items", 0, hash): row.tobytes() for hash, row in zip(hashes, rows, strict=True)}


def dense_of(folder: Path, version: Version) -> dict[str, torch.Tensor]:
    assert version.tensors is not None
    return load_file(ServingFolder(folder).find_file(version.tensors))


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    model = Model(tmp_path / "store")
    train(model, 3)
    yield model
    model.items.close()


@pytest.mark.parametrize("store", STORES)
def test_a_version_has_one_step_though_training_goes_on(
    tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tierbed")
    model, served = Model(tmp_path / "store", store), tmp_path / "served"
    for number in range(1, 6):
        train(model, 4)
        if number == 3:
            model.items.delete(torch.arange(40))
        rows, dense = evaluated(model), {name: model.state_dict()[name].clone() for name in ("top.weight", "calls")}
        paused, trained = threading.Event(), threading.Event()

        handle = model.publish(served, "float32", check=lambda _, a=paused, b=trained: a.set() or b.wait(60))
        assert paused.wait(60)
        train(model, 3)
        if number % 2:
            model.save_snapshot(f"s{number}", kind="incremental" if number > 1 else "full")
        trained.set()
        version = handle.wait()
        assert version is not None
        assert (version.version, version.step) == (number, 7 * number - 3)
        assert rows_of(served) == rows
        for name, tensor in dense.items():
            assert torch.equal(dense_of(served, version)[name], tensor)
        assert dense_of(served, version).keys() == {"top.weight", "top.bias", "calls"}
    assert "written again" not in caplog.text  # only changes were read
    rows = evaluated(model)
    model.save_snapshot("end", kind="incremental")
    model.load_snapshot("end")
    assert evaluated(model) == rows  # publishes took nothing from the increments
    model.items.close()


def test_publishing_goes_on_after_a_load_and_in_another_process(tmp_path: Path, model: Model) -> None:
    served = tmp_path / "served"
    model.save_snapshot("early")
    train(model, 5)
    assert model.publish(served, "float32").wait()
    model.load_snapshot("early")
    rows = evaluated(model)
    version = model.publish(served, "float32").wait()
    assert version is not None
    assert (version.version, version.step) == (2, 3)
    assert rows_of(served) == rows
    model.items.close()
    again = Model(tmp_path / "store")
    train(again, 2)
    rows = evaluated(again)
    assert again.publish(served, "float32").wait() is not None
    assert rows_of(served) == rows
    assert ServingFolder(served).list_versions() == [1, 2, 3]
    again.items.close()


class Two(Model):
    """Two embeddings, which are saved together."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.users = tierbed.MultiTableEmbedding(
            "users", 4, torch.float32, torch.int64, None, options("device", path), seed=0
        )
        self.add_optimizer(torch.optim.SGD(self.users.parameters(), lr=0.1))

    def build(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.users(ids).square().mean() + super().build(ids).detach()
        loss.backward()
        return loss


def test_a_publish_ends_a_save_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_save, "PAUSE_RATIO", 1e9)  # the save lasts until somebody waits for it
    model = Two(tmp_path / "store")
    train(model, 3)
    save = model.save(tmp_path / "checkpoint", background=True)
    assert save is not None
    assert model.publish(tmp_path / "served", "float32").wait()
    assert save.done
    model.items.close()
    model.users.close()


def test_a_rebase_writes_all_rows_again(tmp_path: Path, model: Model) -> None:
    assert model.publish(tmp_path / "served", "float32").wait()
    train(model)
    for rebase in (True, False):
        version = model.publish(tmp_path / "served", "float32", rebase=rebase).wait()
        assert version is not None
        (table,) = version.embeddings[0].tables
        assert table.delta is None
        assert rows_of(tmp_path / "served") == evaluated(model)
    with pytest.raises(tierbed.OptionError, match="rebase=1: give True or False"):
        model.publish(tmp_path / "served", rebase=1)  # type: ignore[arg-type]
    model.items.close()


def test_names_are_without_wrappers(tmp_path: Path, model: Model) -> None:
    model.top = torch.compile(model.top, backend="eager")  # type: ignore[assignment]
    version = model.publish(tmp_path / "served", "float32").wait()
    assert version is not None
    assert dense_of(tmp_path / "served", version).keys() == {"top.weight", "top.bias", "calls"}
    model.items.close()


def test_rows_that_catch_up_later_are_settled_when_they_are_written(tmp_path: Path) -> None:
    model, served = Model(tmp_path / "store", optimizer=tierbed.optim.CatchUpAdam), tmp_path / "served"
    train(model, 9)
    rows = evaluated(model)
    model.publish(served, "float32").wait()
    assert rows_of(served) == rows
    model.save_snapshot("s")
    tierbed.serving.publish(tmp_path / "saved", tmp_path / "store" / "items" / "snapshots" / "s", "float32")
    assert rows_of(tmp_path / "saved") == rows
    model(torch.arange(5))
    rows = evaluated(model)
    model.publish(served, "float32").wait()
    written = {("items", 0, hash) for hash in hash_rows(0, np.arange(5, dtype=np.uint64)).tolist()}
    assert {name: row for name, row in rows_of(served).items() if name in written} == {n: rows[n] for n in written}
    model.items.close()


def test_errors_are_raised_by_wait_or_the_next_publish(tmp_path: Path, model: Model) -> None:
    served = tmp_path / "served"

    def refuse(version: Version) -> None:
        raise ArithmeticError("the model is worse")

    assert model.publish(served, "float32").wait()
    train(model)
    with pytest.raises(ArithmeticError):
        model.publish(served, "float32", check=refuse).wait()
    model.publish(served, "float32", check=refuse)
    with pytest.raises(ArithmeticError):
        model.publish(served, "float32")
    train(model)
    rows = evaluated(model)
    version = model.publish(served, "float32").wait()
    assert version is not None
    assert version.version == 2
    assert rows_of(served) == rows
    assert version.embeddings[0].tables[0].delta is not None  # the failed publishes lost no change
    with (
        ServingFolder(served).lock("a test"),
        pytest.raises(ServingError, match="is locked by a test"),
    ):
        model.publish(served, "float32").wait()
    model.items.put(torch.tensor([7]), torch.full((1, 4), torch.nan), allow_nonfinite=True)
    with pytest.raises(tierbed.InputError, match="row 7 of table 0 of embedding 'items'"):
        model.publish(served, "float32").wait()
    model.items.delete(torch.tensor([7]))
    with torch.no_grad():
        model.top.weight[0, 1] = torch.nan
    with pytest.raises(tierbed.InputError, match=r"tensors: 'top\.weight' has NaN: restore"):
        model.publish(served, "float32").wait()
    assert ServingFolder(served).list_versions() == [1, 2]


def test_a_publish_waits_for_another_process(tmp_path: Path, model: Model) -> None:
    """A process that locks the folder, and ends once its input ends."""
    model.publish(tmp_path / "served").wait()
    code = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", code, str(tmp_path / "served" / "LOCK")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        handle = model.publish(tmp_path / "served")
        assert handle.wait(0.2) is None
        process.communicate(b"\n")
        assert handle.wait() is not None
