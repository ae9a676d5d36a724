"""`graph.publish` of rows that ranks share: the versions that one process would publish, or an error on every rank."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tierbed
from support.embeddings import make
from support.ranks import fails, run_kept, run_ranks
from support.served_rows import Rows, rows_in, rows_of
from support.stores import options
from tierbed import GroupError, OptionError, ServingError, Snapshot, StoreError
from tierbed.serving import ServingFolder, open_served

IDS = 200


class Model(tierbed.Graph):
    def __init__(self, world: Any, path: Path, store: str = "host") -> None:
        super().__init__()
        self.users, self.items = (
            make(options(store, path), name=name, tables=2, world=world) for name in ("users", "items")
        )
        torch.manual_seed(0)
        self.top = nn.Linear(self.users.dim, 1)
        self.add_optimizer(torch.optim.Adam(self.parameters(), lr=0.1))
        self.step = 0

    def build(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.top(self.users(ids) * self.items(ids)).square().mean()
        loss.backward()
        return loss

    def train(self, steps: int | bool = True) -> Any:  # type: ignore[override]
        if isinstance(steps, bool):
            return super().train(steps)
        for _ in range(steps):
            self.step += 1
            self(torch.randint(IDS, (8, 2), generator=torch.Generator().manual_seed(self.step)))
        return self


def saved(path: Path, name: str) -> tuple[list[Snapshot], Rows]:
    """The snapshots of both embeddings, and all their rows."""
    both = [Snapshot.open(path / embedding / "snapshots" / name) for embedding in ("users", "items")]
    return both, rows_in(both[0]) | rows_in(both[1])


def versions_equal_snapshots(world: Any, path: Path, store: str) -> None:
    model, served = Model(world, path / "store", store), path / "served"
    for number in range(1, 6):
        model.train(5)
        if number == 3:
            model.items.delete(torch.arange(0, IDS, 2), 0)
        name = f"s{number}"
        model.save_snapshot(name, kind="incremental")
        top = model.top.weight.clone()

        handle = model.publish(served, "float32")
        model.train(3 * (number % 2))  # which may complete the publish
        version = handle.wait()
        assert handle.done
        assert handle.wait() == version
        assert version is not None
        assert version.version == number
        if world.rank == 0:
            snapshots, rows = saved(path / "store", name)
            assert rows_of(served) == rows
            assert version.step == snapshots[0].description["step"]
            assert version.tensors is not None
            assert torch.equal(load_file(ServingFolder(served).find_file(version.tensors))["top.weight"], top)
            deltas = [table.delta for embedding in version.embeddings for table in embedding.tables]
            assert all(deltas) == (number > 1) or number == 5  # a new base may have come
            assert {file.name for file in served.iterdir()} == {"CURRENT", "LOCK", "PENDING", "files", "versions"}
        world.handshake("compared")


@pytest.mark.parametrize(("ranks", "store"), [(2, "host"), (3, "cached_host"), (2, "ssd_host")])
def test_versions_have_the_rows_and_weights_of_one_step(tmp_path: Path, ranks: int, store: str) -> None:
    run_kept(ranks, versions_equal_snapshots, tmp_path, store)


def published_files(world: Any, path: Path) -> list[tuple[int, int]]:
    model = Model(world, path / "store")
    model.load_snapshot("rows")
    version = model.publish(path / f"served-{world.size}").wait()
    assert version is not None
    model.users.close()
    model.items.close()
    return [(file.bytes, file.crc32) for file in version.files if file.name.endswith(".rows")]


def test_equal_rows_give_equal_files_on_any_number_of_ranks(tmp_path: Path) -> None:
    model = Model(None, tmp_path / "store")
    model.train(20)
    model.save_snapshot("rows")
    model.users.close()
    model.items.close()
    files = [run_kept(ranks, published_files, tmp_path) for ranks in (1, 2, 3)]
    assert files == [[files[0][0]] * ranks for ranks in (1, 2, 3)]


def refuse(_: object) -> None:
    raise ValueError("not good enough")


def errors_are_raised_on_all_ranks(world: Any, path: Path) -> None:
    model, served = Model(world, path / "store"), path / "served"
    model.train(3)
    assert "encoding" in fails(lambda: model.publish(served, "float16" if world.rank else "int8"), GroupError)
    assert "encoding='int9'" in fails(lambda: model.publish(served, "int9"), OptionError)
    elsewhere = served if world.rank == 0 else path / "elsewhere"
    assert "elsewhere" in fails(lambda: model.publish(elsewhere), GroupError)
    model.top.register_buffer("values", torch.empty(1, device="meta"))  # which only rank 0 copies
    assert "meta" in fails(lambda: model.publish(served), GroupError)
    del model.top.values
    assert model.publish(served, "float32").wait() is not None
    for waits in (True, False):
        model.train(2)
        handle = model.publish(served, "float32", check=refuse)
        said = fails(handle.wait if waits else lambda: model.publish(served, "float32"), ServingError)
        assert f"a publish to '{served}' failed: not good enough" in said
    version = model.publish(served, "float32").wait()
    assert version is not None
    assert version.version == 2
    assert all(table.delta for embedding in version.embeddings for table in embedding.tables)  # changes since version 1
    model.save_snapshot("now")
    world.handshake("published")
    folder = ServingFolder(served)
    if world.rank == 0:
        assert rows_of(served) == saved(path / "store", "now")[1]
    with folder.lock("a test") if world.rank == 0 else contextlib.nullcontext():
        assert "is locked by a test" in fails(lambda: model.publish(served, "float32"), ServingError)


def saves_wait_and_closes_give_up(world: Any, path: Path) -> None:
    model, served = Model(world, path / "store"), path / "served"
    model.train(3)
    handle = model.publish(served)
    model.save_snapshot("beside", kind="full")
    model.train(3)
    background = model.save_snapshot("background", kind="incremental", background=True)
    assert background is not None
    second = model.publish(served)  # which ends the save, and waits for the first publish
    model.load_snapshot("background")
    versions = [handle.wait(), second.wait()]
    assert [version and version.version for version in versions] == [1, 2]
    model.train(3)
    lost = model.publish(served)
    model.users.close()
    model.items.close()
    assert "closed" in fails(lost.wait, StoreError)
    if world.rank == 0:
        with ServingFolder(served).lock("a test"):
            assert {file.name for file in served.iterdir()} == {"CURRENT", "LOCK", "PENDING", "files", "versions"}


@pytest.mark.parametrize("case", [errors_are_raised_on_all_ranks, saves_wait_and_closes_give_up])
def test_ranks_agree_on(tmp_path: Path, case: Any) -> None:
    run_kept(2, case, tmp_path)


def publish_slowly(world: Any, path: Path) -> None:
    model = Model(world, path / "store")
    model.train(3)
    handle = model.publish(path / "served", check=lambda _: time.sleep(4))
    assert handle.wait(0.1) is None
    assert handle.wait() is not None
    model.train(1)


def test_a_publish_may_take_longer_than_ranks_wait_for_each_other(tmp_path: Path) -> None:
    run_ranks(2, publish_slowly, tmp_path, timeout=3)


def killed_in_a_publish(world: Any, path: Path) -> None:
    model = Model(world, path / "store")
    model.train(3)
    model.publish(path / "served", check=lambda _: os.kill(os.getpid(), signal.SIGKILL)).wait()


def test_what_a_killed_rank_left_is_removed(tmp_path: Path) -> None:
    served = tmp_path / "served"
    with pytest.raises(AssertionError, match="a rank ended"):
        run_ranks(2, killed_in_a_publish, tmp_path)
    assert any(file.name.startswith(".tmp-") for file in served.iterdir())
    with pytest.raises(ServingError, match="has no file CURRENT"):
        open_served(served)
    model = Model(None, tmp_path / "other")
    model.train(3)
    assert model.publish(served).wait() is not None
    assert {file.name for file in served.iterdir()} == {"CURRENT", "LOCK", "PENDING", "files", "versions"}
