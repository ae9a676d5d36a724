"""Asking whether a snapshot may be replaced while it is being replaced in the background."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.small_snapshots import chunked, description, make_buckets, save
from tierbed.snapshots import write_snapshot
from tierbed.snapshots.files.writer import check_replaceable


def test_asking_whether_a_snapshot_can_be_replaced_fails_no_save_that_replaces_it(tmp_path: Path) -> None:
    save(tmp_path / "x")
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(check_replaceable, tmp_path / "x") for _ in range(100)]
        for _ in range(20):
            write_snapshot(tmp_path / "x", description(), chunked(make_buckets(6, {3: 5})), overwrite=True)
        for answer in asked:
            answer.result()
    assert [place.name for place in tmp_path.iterdir()] == ["x"]
