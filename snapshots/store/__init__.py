"""A store folder's snapshots: saves, keeps, removes and selects them."""
