"""Rows that one processor trained go on with other bits on another."""

from __future__ import annotations

import json

import pytest

from support.golden_rows import CASES, trained
from support.places import GOLDEN
from tierbed.engine import _core


@pytest.mark.parametrize(("optimizer", "dtype"), CASES)
def test_trained_rows_have_the_bits_of_every_processor(optimizer: str, dtype: str) -> None:
    golden = json.loads((GOLDEN / "trained_rows.json").read_text())[f"{optimizer} {dtype}"]
    sets = _core.list_instruction_sets()
    try:
        for name in sets:
            _core.use_instruction_set(name)
            assert trained(optimizer, dtype) == golden, name
    finally:
        _core.use_instruction_set(sets[0])
