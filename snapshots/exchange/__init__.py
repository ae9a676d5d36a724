"""Rows of snapshots to and from other formats, and the arrays of a program."""

from .descriptions import description_for
from .export import FORMATS, export_snapshot
from .importing import import_snapshot
from .persistent_table import make_persistent_table_reader, make_persistent_table_writer

__all__ = [
    "FORMATS",
    "description_for",
    "export_snapshot",
    "import_snapshot",
    "make_persistent_table_reader",
    "make_persistent_table_writer",
]
