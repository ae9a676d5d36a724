"""An index that its table has no row for trains some row, stops what it must not, or passes unseen."""

from __future__ import annotations

import pytest
import torch

from support.tbe import fill, ours
from tierbed.engine.errors import InputError
from tierbed.jagged import BoundsCheckMode, OptimType, PoolingMode

TABLES = [(4, 4), (9, 4)]
BAD = torch.tensor([1, -1, 3, 4, 2, 9, 8])  # two of each table are no rows: -1 and 4, and 9 beside 4 of the second
OFFSETS = torch.tensor([0, 2, 4, 5, 7])
GOOD, GOOD_OFFSETS = torch.tensor([1, 3, 2, 8]), torch.tensor([0, 1, 2, 3, 4])


def bounded(mode: BoundsCheckMode, **options):
    options = {"optimizer": OptimType.EXACT_ROWWISE_ADAGRAD, **options}
    tbe = ours(TABLES, [0, 1], bounds_check_mode=mode, table_names=["user", "item"], **options)
    torch.manual_seed(0)
    fill(tbe, [torch.rand(rows, dim) for rows, dim in TABLES])
    return tbe


@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.NONE])
@pytest.mark.parametrize("mode", [BoundsCheckMode.FATAL, BoundsCheckMode.V2_FATAL])
def test_fatal_raises_before_any_row_changed(mode, pooling):
    tbe = bounded(mode, pooling_mode=pooling)
    before = tbe.split_embedding_weights()
    with pytest.raises(InputError, match="user"):
        tbe(BAD, OFFSETS)
    tbe(GOOD, GOOD_OFFSETS)
    assert all(map(torch.equal, tbe.split_embedding_weights(), before))


@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.MEAN])
@pytest.mark.parametrize("mode", [BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE, BoundsCheckMode.V2_IGNORE])
def test_dropped_indices_are_like_none(mode, pooling, caplog):
    """FBGEMM reads and trains row 0 in their place."""
    tbe, other = bounded(mode, pooling_mode=pooling), bounded(mode, pooling_mode=pooling)
    for _ in range(3):
        output, wanted = tbe(BAD, OFFSETS), other(GOOD, GOOD_OFFSETS)
        assert torch.equal(output, wanted)
        for result in (output, wanted):
            result.backward(torch.ones_like(result))
    assert all(map(torch.equal, tbe.split_embedding_weights(), other.split_embedding_weights()))
    counted = tbe.metrics()["tbe-d4-host"]["tables"]
    assert counted["user"]["dropped"] == 2 * counted["item"]["dropped"] > 0
    warned = [record for record in caplog.records if "dropped" in record.getMessage()]
    assert len(warned) == (mode is BoundsCheckMode.WARNING)
    assert not warned or "'user', 'item'" in warned[0].getMessage()


def test_without_pooling_a_dropped_index_is_a_row_of_zeros():
    tbe = bounded(BoundsCheckMode.WARNING, pooling_mode=PoolingMode.NONE)
    rows, zeros = tbe.split_embedding_weights(), torch.zeros(4)
    wanted = [rows[0][1], zeros, rows[0][3], zeros, rows[1][2], zeros, rows[1][8]]
    assert torch.equal(tbe(BAD, OFFSETS), torch.stack(wanted))


def test_unchecked_indices_are_rows():
    tbe = bounded(BoundsCheckMode.NONE, learning_rate=1.0)
    before = tbe.split_embedding_weights()
    output = tbe(BAD, OFFSETS)
    output.sum().backward()
    embedding = tbe.embedding_of("user")
    assert not torch.equal(embedding.get([-1, 4], "user"), torch.zeros(2, 4))
    assert embedding.size() == 13 + 3
    assert torch.equal(tbe.split_embedding_weights()[0][0], before[0][0])
