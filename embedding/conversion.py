"""Conversions of an embedding by `half()`, `to()` and the like, which move it and change no dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..engine.errors import OptionError
from ..engine.ops.rows_contract import EmbeddingBase

IN_PART = "A model around it may be converted in part by now: make or load it again"


def converter(
    embedding: EmbeddingBase, function: Callable[[Tensor], Tensor], by_now: str = IN_PART
) -> Callable[[Tensor], Tensor]:
    """What converts the parameters of a module by `function`, for those of an embedding, which stay float32.

    OptionError for another dtype than that which lookups return, and for a GPU where there is none. by_now: what is
    converted when it is raised.
    """
    try:
        dtype = function(embedding.shadow.detach()).dtype
    except (AssertionError, RuntimeError) as error:
        if torch.cuda.is_available():
            raise
        raise OptionError(
            f'embedding {embedding.name!r}: torch has no such device here ({error}); call .to("cpu"), where its rows '
            f"have the same bits. {by_now}"
        ) from error
    if dtype not in (torch.float32, embedding.output_dtype):
        if dtype in (torch.float16, torch.bfloat16):
            remedy = f"give output_dtype={dtype} when it is made, and dtype={dtype} for stored rows of 16 bits"
        else:
            remedy = f"rows are float32 at most: convert its results by .to({dtype})"
        raise OptionError(
            f"embedding {embedding.name!r}: a conversion to {dtype} would change neither its rows nor what lookups "
            f"return, {embedding.output_dtype}; {remedy}, or convert the other modules alone. {by_now}"
        )
    return lambda tensor: function(tensor).to(torch.float32).as_subclass(Tensor)  # no Shadow
