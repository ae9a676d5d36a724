"""The embedding modules that users make, and how their rows train."""
