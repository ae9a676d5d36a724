"""A rank's shard of a table is a table in a store folder of its own, opened as all ranks decide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support.embeddings import TABLES
from support.optimizers import OPTIMIZERS
from support.stores import options
from tierbed import StoreError
from tierbed.distributed.world import World
from tierbed.embedding.saving.save_and_load import save_together
from tierbed.embedding.saving.snapshots import Snapshots
from tierbed.embedding.tables.local_table import LocalTable
from tierbed.embedding.tables.recovery import FolderContents, OpenPlan, RankShard
from tierbed.engine import _core
from tierbed.engine.optim.row_optimizer import row_optimizer
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.options.table_spec import table_spec
from tierbed.snapshots import Snapshot
from tierbed.snapshots.files.format import HashShard

SHARE = RankShard(1, 3)
every_kind = pytest.mark.parametrize("store", ["host", "ssd"])


def open_shard(
    store_options: Any, decide: Callable[[FolderContents], OpenPlan] | None = None, share: RankShard | None = SHARE
) -> Any:
    kind, settings = OPTIMIZERS["adam"]
    optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **settings)  # type: ignore[arg-type]
    spec = table_spec("rows", [5], torch.int64, TABLES, None, 0)
    rule = row_optimizer(optimizer, optimizer.param_groups[0])
    return LocalTable(spec, store_options, rule, torch.device("cpu"), share, decide)


def write(handle: LocalTable, keys: int) -> None:
    handle.table.before_write(handle.table.step)
    handle.count_write()
    ids = torch.arange(keys)
    handle.table.put(Lookup(ids, torch.zeros(keys, dtype=torch.int64)), np.ones((keys, 5), np.float32))


def rows_of(handle: LocalTable) -> NDArray[np.uint64]:
    keys = [rows["key"].copy() for _, rows in handle.table.scan()]
    return np.sort(np.concatenate([np.empty(0, np.uint64), *keys]))


@every_kind
def test_the_mark_of_a_share_tells_the_run_and_the_count_of_writes(tmp_path: Path, store: str) -> None:
    found: list[FolderContents] = []

    def decide(what: FolderContents) -> OpenPlan:
        found.append(what)
        return OpenPlan(
            what.clean_marker,
            run="one",
            writes=0 if what.clean_marker is None else what.clean_marker["share"]["writes"],
        )

    for writes in (0, 2, 4):
        share = open_shard(options(store, tmp_path), decide)
        assert len(rows_of(share)) == 10 * writes // 2
        for _ in range(2):
            write(share, 5 * (writes + 2))
        share.close()
    assert [None if one.clean_marker is None else one.clean_marker["share"] for one in found] == [
        None,
        {"rank": 1, "ranks": 3, "run": "one", "writes": 2},
        {"rank": 1, "ranks": 3, "run": "one", "writes": 4},
    ]
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["ranks"]
    assert [path.name for path in (tmp_path / "rows" / "ranks").iterdir()] == ["1-of-3"]


@every_kind
def test_a_write_without_rows_of_the_share_takes_its_mark_as_well(tmp_path: Path, store: str) -> None:
    def decide(what: FolderContents) -> OpenPlan:
        return OpenPlan(what.clean_marker, run="one")

    share = open_shard(options(store, tmp_path), decide)
    write(share, 3)
    share.close()
    share = open_shard(options(store, tmp_path), decide)
    share.table.before_write(share.table.step)
    share.count_write()
    folder = share.persistence.folder
    assert folder.clean_marker is None
    share.close()
    assert folder.clean_marker["share"]["writes"] == 1


@every_kind
def test_rows_are_those_of_the_decision_also_where_the_live_rows_are_whole(tmp_path: Path, store: str) -> None:
    with_all = open_shard(options(store, tmp_path / "all"), share=None)
    ids = torch.arange(40)
    with_all.table.put(Lookup(ids, torch.zeros(40, dtype=torch.int64)), np.ones((40, 5), np.float32))
    tables = [Snapshots(with_all, World.of_one(), with_all.store.snapshots, with_all.store)]
    save_together(World.of_one(), tables, "a")
    with_all.close()
    snapshot = Snapshot.open(tmp_path / "all" / "rows" / "snapshots" / "a")
    mine = HashShard(1, 3)
    share = open_shard(options(store, tmp_path))
    write(share, 2)
    share.close()
    share = open_shard(
        options(store, tmp_path), lambda what: OpenPlan(snapshot=snapshot.restrict_to_shard(mine), run="two")
    )
    keys = np.arange(40).astype(np.uint64)
    assert rows_of(share).tolist() == np.flatnonzero(_core.owners(np.zeros(40, np.uint32), keys, 3) == 1).tolist()
    share.close()
    assert share.persistence.folder.clean_marker["share"] == {"rank": 1, "ranks": 3, "run": "two", "writes": 0}
    share = open_shard(options(store, tmp_path), lambda what: OpenPlan(run="three"))
    assert not len(rows_of(share))
    share.close()


def test_an_open_that_ranks_refuse_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    def refuse(what: FolderContents) -> OpenPlan:
        raise StoreError("rank 0: no")

    share = open_shard(options("host", tmp_path))
    write(share, 2)
    share.close()
    with pytest.raises(StoreError, match="rank 0: no"):
        open_shard(options("host", tmp_path), refuse)
    share = open_shard(options("host", tmp_path))
    assert len(rows_of(share)) == 2
    share.close()


def test_an_evicting_share_has_its_part_of_the_capacity(tmp_path: Path) -> None:
    share = open_shard(options("host", tmp_path, capacity=10, eviction="lru"))
    for keys in (2, 3, 4, 9):
        share.table.put(
            Lookup(torch.arange(keys - 2, keys), torch.zeros(2, dtype=torch.int64)), np.ones((2, 5), np.float32)
        )
    assert share.table.size() == 4
    share.close()
    whole = RankShard(0, 2).options(options("host", capacity=10))
    assert whole.capacity == 10
