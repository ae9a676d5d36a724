"""Rows that lookups take from a tensor, and sums of gradients that a tensor takes: no place is written beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.processors import cpu, spec_of
from tierbed.engine.ops.batch import Gradients
from tierbed.engine.optim.row_state import RowState
from tierbed.engine.options.lookup import Lookup

pytestmark = pytest.mark.op


def test_places_that_are_not_there_are_refused() -> None:
    processor = cpu(spec_of(2, padding=2), RowState())
    lookup = Lookup(torch.arange(3), torch.zeros(3, dtype=torch.int64))
    batch, other = (processor.make_batch([lookup]) for _ in range(2))  # of two rows and padding
    gradients = Gradients([lookup], [torch.ones(3, 2)], [None], torch.float32)
    for places in ([0, 2], [-1, 0], [0]):
        with pytest.raises(ValueError, match=r"index|position"):
            processor.set_lookup_rows(batch, torch.zeros(2, 2), np.array(places))
        with pytest.raises(ValueError, match=r"index|position"):
            processor.sum_gradients(batch, gradients, np.array(places), torch.zeros(2, 2))
    for begin, places in ((0, [0, 4]), (1, [0, 3]), (0, [1, 3]), (4, [0, 0])):  # the third is of padding
        with pytest.raises(ValueError, match=r"index|position"):
            processor.set_lookup_rows(other, torch.zeros(1, 2), np.array(places), (batch, begin))
    assert not any(batch.lines)
