"""Folders of the repository, and the environment in which a child process imports what tests do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
GOLDEN = TESTS / "golden"
DOCS = ROOT / "docs"
BENCHMARKS = ROOT / "benchmarks"
EXAMPLES = ROOT / "examples"
PACKAGE = sorted(link.name for link in (ROOT / "src/tierbed").iterdir() if link.is_symlink())  # its folders


def environment() -> dict[str, str]:
    """The one of this process, with `support` and the tests that this process can import on the path of Python."""
    here = [folder for folder in sys.path if Path(folder).is_relative_to(TESTS)]
    given = filter(None, [os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys([str(TESTS), *here, *given]))}
