"""Saves, loads and removes a store folder's snapshots, and recovers stores after a kill."""
