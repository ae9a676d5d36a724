"""`Embedding`, with the signature of torch.nn.Embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.world import World
from .embedding import MultiTableEmbedding
from .torch_table import Store, TorchTable


class Embedding(TorchTable, nn.Embedding):  # type: ignore[misc, override]
    """torch.nn.Embedding over a tierbed store. Train it by an `EagerOptimizer` or in a `Graph`.

    Args:
        num_embeddings: how many ids there are, from 0; None for a table that takes any id and grows.
        embedding_dim: the numbers of a row.
        padding_idx: the id whose row gets no gradient from lookups. The row begins as zeros, and may be loaded with
            other values, as torch's.
        sparse: changes nothing: gradients are of the rows that were looked up.
        device: where lookups run: "cpu", "cuda" or "meta".
        dtype: of rows and results: torch.float32, float16 or bfloat16; None is torch's default dtype.
        store: a `make_*_store_options`, or the dict that it prints; or the path of a TOML file with a table [name],
            or with one table. None keeps rows in host memory.
        name: names the folder in the store; None takes the module's path in the model.
        initializer: how rows begin; None is normal(0, 1), as torch's.
        seed: of initial rows, as `MultiTableEmbedding`. torch.manual_seed does not change them.
        world: a `World` over whose ranks the rows are spread.

    Raises:
        OptionError: also for `max_norm` and `scale_grad_by_freq`, which are not supported.
    """

    def __init__(
        self, num_embeddings: int | None, embedding_dim: int, padding_idx: int | None = None,
        max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
        _weight: Tensor | None = None, _freeze: bool = False, device: Any = None, dtype: torch.dtype | None = None,
        *, store: Store = None, name: str | None = None, initializer: Mapping[str, Any] | None = None,
        seed: int | None = None, world: World | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight,
            device, dtype, store, name, initializer, seed, world,
        )  # fmt: skip
        if _freeze:
            self.requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        """Rows of ids, input.shape + (embedding_dim,).

        input: integers of any shape. Raises InputError.
        """
        rows = MultiTableEmbedding.forward(self, input)  # super() takes longer
        if self.padding_idx is None or not rows.requires_grad:
            return rows
        is_padding = input.to(torch.int64) == self.padding_idx  # in a narrow dtype torch compares the low bits
        return torch.where(is_padding.unsqueeze(-1), rows.detach(), rows)
