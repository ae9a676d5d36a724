from .descriptions import description_for as description_for
from .export import FORMATS as FORMATS
from .export import export_snapshot as export_snapshot
from .importing import import_snapshot as import_snapshot
from .persistent_table import make_persistent_table_reader as make_persistent_table_reader
from .persistent_table import make_persistent_table_writer as make_persistent_table_writer
