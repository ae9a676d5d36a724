"""The modules that users hold."""
