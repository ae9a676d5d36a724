"""`EmbeddingBag`, with the signature of torch.nn.EmbeddingBag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.world import World
from ..engine.errors import InputError, OptionError
from .embedding import MultiTableEmbedding
from .torch_table import Store, TorchTable


class EmbeddingBag(TorchTable, nn.EmbeddingBag):  # type: ignore[misc, override]
    """torch.nn.EmbeddingBag over a tierbed store. Train it by an `EagerOptimizer` or in a `Graph`.

    Args:
        mode: "sum" or "mean".
        include_last_offset: whether offsets have one number more, the end of the last bag.
        padding_idx: the id that is left out of bags. Its row begins as zeros.

    The other arguments are those of `Embedding`.

    Raises:
        OptionError: also for mode="max", `max_norm` and `scale_grad_by_freq`, which are not supported.
    """

    def __init__(
        self, num_embeddings: int | None, embedding_dim: int, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, _weight: Tensor | None = None,
        include_last_offset: bool = False, padding_idx: int | None = None, device: Any = None,
        dtype: torch.dtype | None = None, *, store: Store = None, name: str | None = None,
        initializer: Mapping[str, Any] | None = None, seed: int | None = None, world: World | None = None,
    ) -> None:  # fmt: skip
        if mode not in ("sum", "mean"):
            raise OptionError(f"mode={mode!r}: give 'sum' or 'mean'; for the largest of each column, call max of rows")
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight,
            device, dtype, store, name, initializer, seed, world,
        )  # fmt: skip
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(  # type: ignore[override]
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Sums or means of bags of rows, [bags, embedding_dim]. An empty bag is zeros.

        Args:
            input: integers [n], the ids of all bags one after another, with offsets; or [bags, L].
            offsets: int64 or int32 [bags], where each bag begins; [bags + 1] with `include_last_offset`.
            per_sample_weights: floats of the shape of input, by which rows are multiplied, for mode="sum".

        Raises:
            InputError: for other shapes and dtypes, and ids that are out of range.
        """
        offsets, weights, pooling = self._ends(input, offsets), per_sample_weights, self.mode
        if weights is not None:
            if self.mode != "sum":
                raise InputError(f"per_sample_weights: mode={self.mode!r} takes none; make it with mode='sum'")
            if not isinstance(weights, Tensor) or weights.shape != input.shape or not weights.is_floating_point():
                raise InputError(f"per_sample_weights: give a tensor of floats {tuple(input.shape)}, as input is")
            weights = weights.to(torch.float32)
        if self.padding_idx is None:
            return MultiTableEmbedding.forward(self, input, None, offsets, pooling, weights)
        is_row = (input.to(torch.int64) != self.padding_idx).to(torch.float32)  # as in Embedding
        weights = is_row if weights is None else weights * is_row
        sums = MultiTableEmbedding.forward(self, input, None, offsets, "sum", weights)
        return sums if self.mode == "sum" else sums / _counts(is_row, offsets).to(sums.dtype)

    def _ends(self, input: Tensor, offsets: Tensor | None) -> Tensor | None:
        """The offsets with the end of the last bag. InputError."""
        if not isinstance(input, Tensor) or input.dim() not in (1, 2):
            got = f"shape {tuple(input.shape)}" if isinstance(input, Tensor) else type(input).__name__
            raise InputError(f"input of embedding {self.name!r}: {got}; give a tensor [n] with offsets, or [bags, L]")
        if input.dim() == 2:
            if offsets is not None:
                raise InputError("offsets: input [bags, L] has a bag in each row; leave offsets out")
            return None
        if not isinstance(offsets, Tensor) or offsets.dim() != 1:
            raise InputError("offsets: input [n] has bags one after another; give a 1-D tensor, where each bag begins")
        return offsets if self.include_last_offset else torch.cat([offsets, offsets.new_full((1,), len(input))])

    def prefetch(self, input: Tensor, offsets: Tensor | None = None) -> None:  # type: ignore[override]
        """Announce the lookup of a later training step, as `MultiTableEmbedding.prefetch`."""
        pooling = self.mode if self.padding_idx is None else "sum"  # as forward looks up
        super().prefetch(input, None, self._ends(input, offsets), pooling)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


def _counts(is_row: Tensor, offsets: Tensor | None) -> Tensor:
    """The ids of each bag that are no padding [bags, 1], at least 1."""
    if offsets is None:
        return is_row.sum(-1, keepdim=True).clamp(min=1)
    ends = torch.cat([is_row.new_zeros(1, dtype=torch.int64), is_row.to(torch.int64).cumsum(0)])
    return (ends[offsets[1:].long()] - ends[offsets[:-1].long()]).clamp(min=1).unsqueeze(-1)
