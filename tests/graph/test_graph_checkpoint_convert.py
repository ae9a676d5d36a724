"""A checkpoint whose rows have another dtype is refused, or with `convert=True` loaded with rounded numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.checkpoints import IDS, Rating, steps
from support.embeddings import contents, make
from support.refusals import check_refusal
from support.stores import options
from tierbed import load_checkpoint, save_checkpoint
from tierbed.engine.errors import InputError, SnapshotError, StoreError

KINDS = ["device", "host folder", "ssd folder"]


def rating(kind: str, path: Path, dtype: torch.dtype, state_dtype: torch.dtype = torch.float32) -> Rating:
    store, *folder = kind.split()
    stored = options(store, path if folder else None)
    return Rating(make(stored, None, "rows", tables=2, dtype=dtype, state_dtype=state_dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_another_dtype_is_converted_if_that_is_asked_for(tmp_path: Path, kind: str) -> None:
    wide = rating(kind, tmp_path / "wide", torch.float32)
    steps(wide, IDS[:3])
    wide.save(tmp_path / "saved")
    save_checkpoint(tmp_path / "of-a-loop", wide.rows)
    numbers, keys = wide.rows.get(IDS[0], 0).bfloat16().float(), contents(wide.rows)["key"]
    wide.rows.close()
    narrow = rating(kind, tmp_path / "narrow", torch.bfloat16, torch.bfloat16)
    before = steps(narrow, IDS[:1])
    for refusal in (
        (lambda: narrow.load(tmp_path / "saved"), SnapshotError, "float32, not bfloat16"),
        (lambda: load_checkpoint(tmp_path / "of-a-loop", narrow.rows), SnapshotError, "convert=True"),
        (lambda: narrow.load(tmp_path / "saved", convert=1), InputError, "convert=1"),  # type: ignore[arg-type]
    ):
        check_refusal(refusal)  # type: ignore[arg-type]
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


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_a_checkpoint_is_converted_in_the_folder_of_the_old_rows(tmp_path: Path, store: str) -> None:
    wide = rating(f"{store} folder", tmp_path / "rows", torch.float32)
    steps(wide, IDS[:3])
    wide.save(tmp_path / "saved")
    numbers = wide.rows.get(IDS[0], 0)
    wide.rows.close()
    said = r"""open with open="fresh", which drops them, and .*graph\.load\(path, convert=True\)"""
    with pytest.raises(StoreError, match=said):
        rating(f"{store} folder", tmp_path / "rows", torch.bfloat16).load(tmp_path / "saved", convert=True)
    stored = options(store, tmp_path / "rows", open="fresh")
    narrow = Rating(make(stored, None, "rows", tables=2, dtype=torch.bfloat16))
    narrow.load(tmp_path / "saved", convert=True)
    assert torch.equal(narrow.rows.get(IDS[0], 0), numbers.bfloat16().float())
    narrow.rows.close()
