"""Running compiled steps."""
