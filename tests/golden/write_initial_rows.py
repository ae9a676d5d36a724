"""Writes `initial_rows.npz`: rows that every machine and every later version must begin with.

Run it only to add cases: a change of the rows that are there breaks every stored embedding.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from support.naive import initial_rows
from tierbed.engine.options.initializers import (
    as_arrays,
    make_constant_initializer,
    make_normal_initializer,
    make_table_options,
    make_trunc_normal_initializer,
    make_uniform_initializer,
)

TABLES = [
    make_table_options([make_uniform_initializer(-0.05, 0.05), make_normal_initializer(0.0, 1.0)]),
    make_table_options([make_normal_initializer(0.1, 0.02), make_constant_initializer(0.25)]),
    make_table_options(make_trunc_normal_initializer(0.0, 0.5, -1.0, 0.75)),
    make_table_options([make_trunc_normal_initializer(1.0, 2.0, 7.0, 30.0), make_uniform_initializer(0.0, 1e-20)]),
]
KEYS = [0, 1, 2, 3, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1, 0x0123456789ABCDEF]
COLUMNS = [7, 4]
SEED = 0xFEDCBA9876543210


def main() -> None:
    tables = np.repeat(np.arange(len(TABLES), dtype=np.uint32), len(KEYS))
    keys = np.tile(np.array(KEYS, np.uint64), len(TABLES))
    kinds, parameters, quantiles = as_arrays(TABLES, COLUMNS)
    np.savez(
        Path(__file__).with_name("initial_rows.npz"),
        seed=np.uint64(SEED),
        columns=np.array(COLUMNS),
        kinds=np.array(kinds),
        parameters=parameters,
        quantiles=quantiles,
        tables=tables,
        keys=keys,
        rows=initial_rows(tables, keys, SEED, COLUMNS, kinds, parameters, quantiles),
    )


if __name__ == "__main__":
    main()
