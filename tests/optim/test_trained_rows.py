"""Rows that one processor trained go on with other bits on another."""

from __future__ import annotations

import json

import pytest

from support.golden_rows import CASES, trained
from support.places import GOLDEN


@pytest.mark.parametrize(("optimizer", "dtype"), CASES)
def test_trained_rows_have_the_bits_of_every_processor(optimizer: str, dtype: str) -> None:
    assert trained(optimizer, dtype) == json.loads((GOLDEN / "trained_rows.json").read_text())[f"{optimizer} {dtype}"]
