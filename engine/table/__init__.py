"""An embedding's open table and its parts."""
