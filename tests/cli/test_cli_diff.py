"""`tierbed snapshot diff`: what it counts, how far apart it says rows are, and what it exits with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.shell import Cli
from support.small_snapshots import chunked, description, make_buckets, save
from tierbed.snapshots import write_snapshot

COUNTS = {0: 20, 5: 1, 63: 9}


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """On a store with snapshot "before", of finite rows."""
    write(tmp_path, "before", rows())
    return Cli(tmp_path, capsys)


def rows(seed: int = 0) -> dict[int, NDArray[np.void]]:
    buckets = make_buckets(6, COUNTS)
    for bucket in buckets.values():
        bucket["values"] = np.random.default_rng(seed).normal(size=bucket["values"].shape)
    return buckets


def write(store: Path, name: str, buckets: dict[int, NDArray[np.void]], **changes: Any) -> None:
    write_snapshot(store / "snapshots" / name, description(**changes), chunked(buckets, 4))


def different(cli: Cli, *names: str) -> Any:
    """The document of a diff that finds one."""
    found = json.loads(cli.says("diff", *names, "--json", code=1))
    assert found["differs"]
    return found


def test_the_same_rows_do_not_differ(cli: Cli) -> None:
    write(cli.store, "after", rows())
    found = cli.json("diff", "before", "after")
    assert (found["differs"], found["same"], found["fields"], found["rows"]) == (False, 30, {}, [])
    assert cli.says("diff", "before", "after") == "the same: 30 rows\n"


def test_added_changed_and_gone_rows_are_counted_by_table_and_shown(cli: Cli) -> None:
    buckets = rows()
    gone, changed = buckets[0][3].copy(), buckets[0][7].copy()
    buckets[0]["values"][7, 1] += 2.5
    buckets[0]["values"][7, 4] -= 0.5  # of the state
    buckets[0] = np.delete(buckets[0], 3)
    buckets[9] = make_buckets(6, {9: 1})[9]
    added = buckets[9][0]
    buckets[63]["step"][2] += 1
    write(cli.store, "after", dict(sorted(buckets.items())), step=13)
    found = different(cli, "before", "after")
    assert (found["added"], found["changed"], found["gone"], found["same"]) == (1, 2, 1, 27)
    assert found["by_table"]["added"] == {str(added["table"]): 1}
    assert found["by_table"]["gone"] == {str(gone["table"]): 1}
    assert found["largest"]["embedding"] == pytest.approx(2.5)
    assert found["largest"]["sum"] == pytest.approx(0.5)
    assert found["fields"] == {"step": [12, 13]}
    shown = {(row["sort"], row["table"], row["key"] % 2**64): row["largest"] for row in found["rows"]}
    assert shown.keys() >= {("gone", gone["table"], gone["key"]), ("added", added["table"], added["key"])}
    assert shown["changed", changed["table"], changed["key"]] == pytest.approx(2.5)
    out = cli.says("diff", "before", "after", "--rows", "1", code=1)
    assert all(part in out for part in ("27 rows are the same", "step  12 -> 13", "and 3 more"))


def test_nan_is_the_same_as_itself_and_infinitely_far_from_numbers(cli: Cli) -> None:
    buckets = rows()
    buckets[63]["values"][1, 0] = np.nan
    write(cli.store, "nan", buckets)
    buckets[63]["values"][2, 4] += 1
    write(cli.store, "later", buckets)
    found = different(cli, "before", "nan")
    assert (found["changed"], found["largest"]["embedding"], found["rows"][0]["largest"]) == (1, "inf", "inf")
    found = different(cli, "nan", "later")
    assert (found["changed"], found["largest"]["embedding"]) == (1, 0.0)
    assert found["largest"]["sum"] == pytest.approx(1)


def test_rows_of_another_optimizer_are_compared_by_their_embeddings(cli: Cli) -> None:
    buckets = {}
    for bucket, wide in rows().items():
        buckets[bucket] = make_buckets(3, {bucket: len(wide)})[bucket]
        for field in ("table", "key", "updates", "step"):
            buckets[bucket][field] = wide[field]
        buckets[bucket]["values"] = wide["values"][:, :3]
    changes = {"optimizer": "sgd", "hyper": [0.1, 0.0, 0.0, 0.0, 0.0]}
    write_snapshot(cli.store / "snapshots" / "bare", description(3, **changes), chunked(buckets))
    found = different(cli, "before", "bare")
    assert (found["changed"], found["same"], found["largest"]) == (30, 0, {"embedding": 0.0})
    assert {"optimizer", "states", "width"} <= found["fields"].keys()


def test_settings_of_the_optimizer_differ_by_their_names_and_of_one_that_is_not_known_here_as_numbers(cli: Cli) -> None:
    write(cli.store, "after", rows(), hyper=[0.05, 0.0, 0.0, 1e-10, 0.0, 1.0])
    fields = different(cli, "before", "after")["fields"]
    assert fields == {"hyper": [{"lr": 0.1, "clip_grad_row_norm": 0.0}, {"lr": 0.05, "clip_grad_row_norm": 1.0}]}
    assert '{"lr": 0.1, "clip_grad_row_norm": 0.0} -> {"lr": 0.05' in cli.says("diff", "before", "after", code=1)
    for name, lr in (("other", 0.1), ("another", 0.2)):
        write(cli.store, name, rows(), optimizer="shampoo", hyper=[lr, 3.0])
    assert different(cli, "other", "another")["fields"] == {"hyper": [[0.1, 3.0], [0.2, 3.0]]}
    assert cli.json("inspect", "other")["description"]["hyper"] == [0.1, 3.0]


def test_what_cannot_be_compared_exits_with_2(cli: Cli) -> None:
    save(cli.store / "snapshots" / "other", width=8)
    write(cli.store, "damaged", rows())
    (cli.store / "snapshots" / "damaged" / "bucket-05.npy").unlink()
    assert "their columns is [3] and [4]" in cli.fails("diff", "before", "other", code=2)
    assert "bucket-05.npy" in cli.fails("diff", "before", "damaged", code=2)
    assert "there is no snapshot 'missing'" in cli.json("diff", "missing", "before", code=2)["error"]
