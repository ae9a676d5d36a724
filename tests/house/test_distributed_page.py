"""What docs/distributed.md shows runs on one rank and on two."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest

from support.places import DOCS
from support.ranks import run_ranks
from tierbed import World


def run_page(_: World, page: str, folder: str) -> None:
    os.chdir(folder)
    warnings.simplefilter("error")
    exec(compile(page, "distributed.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_page_runs(ranks: int, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "distributed.md").read_text(), re.M | re.S)
    run_ranks(ranks, run_page, "\n".join(blocks), str(tmp_path))
    ranked = (tmp_path / "store" / "items" / "ranks").is_dir()
    assert ranked == (ranks > 1)
