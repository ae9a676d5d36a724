"""User-facing options: stores, tables, initializers and names, and the checks of arguments."""
