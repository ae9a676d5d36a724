"""What mypy has to refuse in a user's script: it passes only where the names of tierbed have types.

`make types` checks this file. An import that mypy cannot follow makes its names `Any`, and then these comments are not
needed, which mypy reports.
"""

import tierbed
from tierbed import snapshots

graph: int = tierbed.Graph  # type: ignore[assignment]
embedding: int = tierbed.MultiTableEmbedding  # type: ignore[assignment]
error: int = tierbed.StoreError  # type: ignore[assignment]
listing: int = snapshots.list_snapshots("folder")  # type: ignore[assignment]
