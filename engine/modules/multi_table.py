"""The embedding module whose columns are one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import OptionError
from ..numeric import whole
from ..persist.held_contract import Ranks
from .embedding import MultiTableMultiColumnEmbedding


class MultiTableEmbedding(MultiTableMultiColumnEmbedding):
    """Hashed tables of rows of one width. `embedding_dim` is an int; all else as `MultiTableMultiColumnEmbedding`."""

    def __init__(
        self,
        name: str,
        embedding_dim: int,
        dtype: torch.dtype,
        key_type: torch.dtype,
        tables: Sequence[Mapping[str, Any]] | None,
        store_options: Mapping[str, Any],
        default_initializer: Mapping[str, Any] | None = None,
        padding_idx: int | None = None,
        seed: int | None = None,
        output_dtype: torch.dtype = torch.float32,
        world: Ranks | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        if whole(embedding_dim) is None:
            raise OptionError(
                f"embedding_dim={embedding_dim!r}: give a whole number, or use MultiTableMultiColumnEmbedding"
            )
        super().__init__(
            name,
            embedding_dim,
            dtype,
            key_type,
            tables,
            store_options,
            default_initializer,
            padding_idx,
            seed,
            output_dtype,
            world,
            state_dtype,
        )
