"""Names that are folders as well: of embeddings, snapshots and checkpoints."""

from __future__ import annotations

from typing import Any


def is_folder_name(name: Any) -> bool:
    """Whether `name` is 1 to 200 printable bytes of UTF-8, without separators and without a leading dot."""
    plain = isinstance(name, str) and name.isprintable() and not name.startswith(".") and not set(name) & set("/\\")
    return plain and 1 <= len(name.encode()) <= 200
