"""Programs that the docs give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from support.places import DOCS


def reader_of_the_docs() -> Callable[[Path], dict[tuple[int, int], NDArray[Any]]]:
    """`read` of docs/snapshots.md: the numbers of each row of a snapshot, by table and key."""
    page = (DOCS / "snapshots.md").read_text()
    script = page[page.index("```python\n") + 10 :]
    names: dict[str, Any] = {}
    exec(script[: script.index("```")], names)
    read: Callable[[Path], dict[tuple[int, int], NDArray[Any]]] = names["read"]
    return read
