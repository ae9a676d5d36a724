"""Options for stores, tables and initializers. Also checks table names and lookup arguments."""
