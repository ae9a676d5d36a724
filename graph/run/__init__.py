"""Run compiled steps."""
