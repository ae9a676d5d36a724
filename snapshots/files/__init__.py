"""A snapshot by itself: its format, writing, reading and checking it."""
