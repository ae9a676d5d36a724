from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.optimizers import MAKERS, optimizer_of
from support.rows import Table, any_key, same_bits
from tierbed.engine import _core
from tierbed.engine.lines import naive as rounding
from tierbed.engine.ops import naive
from tierbed.engine.optim.optimizers import RowOptimizer
from tierbed.engine.row_format import narrowed, widened

pytestmark = pytest.mark.optimizer

TYPES = [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32"), ("float16", "bfloat16")]
NARROW = ["bfloat16", "float16"]
KEYS = np.arange(1 << 16, dtype=np.uint64)
SGD = "sgd", [1.0, 0.0, 0.0, 0.0, 0.0]  # with a learning rate of 1


def table_of(optimizer: RowOptimizer, dim: int, types: tuple[str, str]) -> Table:
    states = len(optimizer.kernel.element_states) if types[1] != "float32" else 0
    types = types[0], types[1] if states else "float32"
    return Table([dim], optimizer.initial, state_widths=optimizer.row_state(dim).widths, types=types, narrow_states=states)
