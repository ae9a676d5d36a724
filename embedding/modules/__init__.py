"""The embedding modules that users create."""
