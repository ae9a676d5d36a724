"""What a compiled step calls, in the order of a step: prefetch, gather, (the dense part), update.

Evaluation calls read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ..embedding import MultiTableMultiColumnEmbedding
    from ..inputs import Lookup
    from ..table import PinnedBatch


def prefetch(embedding: MultiTableMultiColumnEmbedding, lookups: list[Lookup]) -> PinnedBatch:
    """Deduplicate the ids of all lookups (ids, table ids or None), bring their rows to the top tier and pin them."""
    return embedding.prefetch(lookups)


def gather(batch: PinnedBatch, index: int) -> Tensor:
    """The rows of lookup number `index`: ids.shape + (dim,), float32."""
    return batch.gather(index)


def update(batch: PinnedBatch, grads: list[Tensor]) -> None:
    """Apply the embedding's optimizer to the rows of the batch.

    grads: one tensor ids.shape + (dim,) a lookup. Ends the pin.
    """
    batch.update(grads)


def read(embedding: MultiTableMultiColumnEmbedding, ids: Tensor, table_ids: Tensor | None) -> Tensor:
    """Rows of ids, shape ids.shape + (dim,), inserting nothing."""
    return embedding.read(ids, table_ids)
