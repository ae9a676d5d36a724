"""The snapshots of a store folder: saving, keeping, removing and selecting them."""
