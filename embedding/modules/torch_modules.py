"""`Embedding` and `EmbeddingBag`: torch's modules, with the same signatures and attributes, over a tierbed store."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ...distributed.world import World
from ...engine.checks import as_int
from ...engine.errors import InputError, OptionError
from ...engine.ops.embedding_base import REMEDY_ATTRIBUTE
from ...engine.options.initializers import make_normal_initializer, make_table_options
from ...engine.options.lookup import Lookup
from ...engine.options.store_options import load_store_options, make_host_mem_store_options, read_store_options
from ...engine.table.table import OpenTable
from ..autograd import lookup_op as ops
from ..state_dict.read_only import ReadOnlyCopy
from ..state_dict.saved_rows import exclude_rows
from ..tables.row_tensors import RowTensors
from .dense_rows import copy_rows
from .embedding import MultiTableEmbedding

Store = Mapping[str, Any] | str | os.PathLike[str] | None
# functions that configure a parameter; on a `weight` they would only affect one lookup's result
_PARAMETER_METHODS = ("__set__", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad")
MAX_WEIGHT_ELEMENTS = 1 << 26  # largest number of elements in `weight`; in float32, this is 256 MiB


class Weight(ReadOnlyCopy):
    """The rows of a table as a differentiable tensor. Writing to the tensor raises InputError.

    Torch's weight is a parameter and stays current. A `Weight` is the result of one lookup. After a training step or a
    load, its rows are old, and computing with the `Weight` or with a view of it raises InputError.
    """

    def __init__(self, tensor: Tensor, remedy: str, table: OpenTable, step: int) -> None:
        super().__init__(tensor, remedy)
        self.table, self.step = table, step

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_grad = getattr(func, "__self__", None) is Tensor.grad and detect_fake_mode() is None  # Dynamo reads .grad
        if (is_grad or func.__name__ in _PARAMETER_METHODS) and isinstance(args[0], Weight):
            raise InputError(args[0].remedy)
        result = super().__torch_function__(func, types, args, kwargs)
        for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(result, Tensor | np.ndarray) else ():
            if isinstance(leaf, Weight) and (leaf.table.step != leaf.step or leaf.table.is_replaced):
                raise InputError(
                    f"weight of embedding {leaf.table.spec.name!r} was read before a training step or a load, so it "
                    "has old rows. Read the attribute in each forward pass; to keep old rows, clone() it"
                )
        return result


class TorchTable(MultiTableEmbedding):
    """One table, with torch.nn.Embedding's constructor arguments plus store, name, initializer, seed and world."""

    parameter_name = "weight"  # as in torch, for code that selects parameters by name
    num_embeddings: int | None
    embedding_dim: int
    _is_constructed = False  # False in the constructor, so that reset_parameters keeps an earlier run's rows

    def __init__(
        self, num_embeddings: int | None, embedding_dim: int, padding_idx: int | None = None,
        max_norm: float | None = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
        _weight: Tensor | None = None, _freeze: bool = False, device: Any = None, dtype: torch.dtype | None = None,
        *, store: Store = None, name: str | None = None, initializer: Mapping[str, Any] | None = None,
        seed: int | None = None, world: World | None = None,
    ) -> None:  # fmt: skip
        if num_embeddings is not None and (num_embeddings := as_int(num_embeddings, minimum=1)) is None:
            raise OptionError("num_embeddings: give a whole number from 1, or None for a table that takes any id")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        initializer = make_normal_initializer(0.0, 1.0) if initializer is None else initializer
        table, options = make_table_options(initializer, ids=num_embeddings), _make_store_options(store, name)
        super().__init__(
            name, embedding_dim, dtype, torch.int64, [table], options, seed=seed, output_dtype=dtype, world=world
        )
        self.num_embeddings, self.embedding_dim = num_embeddings, self.spec.dim
        self.norm_type, self.sparse = norm_type, sparse
        self.max_norm, self.scale_grad_by_freq = max_norm or None, bool(scale_grad_by_freq)
        self.padding_idx = _normalize_padding_idx(padding_idx, num_embeddings)
        if self.padding_idx is not None:
            self.set_spec(zero_key=self.padding_idx % 2**64)
        if device is not None:
            self.to(device)
        if _weight is not None:
            self.load_dense(_weight)
        elif type(self).reset_parameters is not TorchTable.reset_parameters:  # as in torch's constructor
            self.reset_parameters()
        if _freeze:
            self.requires_grad_(False)
        self._is_constructed = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and getattr(value, "shape", None) != (1, 1):  # load_state_dict(assign=True) sets a shadow
            raise InputError(self._write_remedy())
        if name in _REMEDIES and value:
            raise OptionError(f"{name}={value!r}: {_REMEDIES[name]}")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name == "weight":
            raise InputError(self._write_remedy())
        super().__delattr__(name)

    @property
    def weight(self) -> Tensor:
        """All rows as a differentiable tensor [num_embeddings, embedding_dim], the result of a lookup.

        Each read of this attribute looks up all rows; call `emb(ids)` for a few rows. Writing to the tensor or
        assigning the attribute raises InputError; in torch.compile such writes are dropped.

        Raises:
            InputError: If the table takes any id, or has more than 2**26 elements.
        """
        rows = self.num_embeddings
        if rows is None:
            raise InputError(f"weight of embedding {self.name!r}: it takes any id; look up the ids that you need")
        if rows * self.embedding_dim > MAX_WEIGHT_ELEMENTS:
            raise InputError(
                f"weight of embedding {self.name!r}: {rows} rows of {self.embedding_dim} numbers are more than "
                f"{MAX_WEIGHT_ELEMENTS:,}; call emb(torch.arange(n)) for the rows that you need"
            )
        ids = torch.arange(rows, device=self.device)
        weight_rows = self.look_up(Lookup(ids), None)
        if not ops.is_eager(ids):
            if not torch.compiler.is_dynamo_compiling() and isinstance(weight_rows, FakeTensor):
                setattr(weight_rows.untyped_storage(), REMEDY_ATTRIBUTE, self._write_remedy())
            return weight_rows
        table = self.table_handle().open_table
        return Weight(weight_rows, self._write_remedy(), table, table.step)

    def _write_remedy(self) -> str:
        return (
            f"weight of embedding {self.name!r} is the result of a lookup: writing to it, setting its attributes or "
            "hooking it would change no row, and its gradient is with the rows. Call load_dense(weight) to replace "
            "rows, give initializer= to choose initial rows, call requires_grad_(False) of the module to freeze them, "
            "and register hooks on what a lookup returns"
        )

    def load_dense(self, weights: Any, states: Any = None, step: int | None = None) -> None:
        """Replace the rows, as `MultiTableEmbedding.load_dense` does.

        Args:
            weights: The tensor [num_embeddings, embedding_dim], or {0: tensor}.
            states: Optimizer states by name, or {0: states}.
            step: How many steps trained the rows.
        """
        by_table = {0: weights} if isinstance(weights, Tensor) else weights
        super().load_dense(by_table, {0: states} if states and 0 not in states else states, step)

    def reset_parameters(self) -> None:
        """Delete all rows and their optimizer state. Each id starts again from its initial row."""
        if self._handle is not None or (self._is_constructed and self.store_options.persistent_path is not None):
            self.load_tensors(RowTensors.make_empty(self.spec).tensors)

    def to_dense_state_dict(self) -> dict[str, Tensor]:
        """Return the state_dict of torch's module: {"weight": [num_embeddings, embedding_dim]}, a copy of the rows.

        Raises:
            InputError: If the table takes any id.
        """
        if self.num_embeddings is None:
            raise InputError(f"embedding {self.name!r} takes any id, so it has no dense tensor; use chunks()")
        return {"weight": copy_rows(self, 0, self.num_embeddings, self.output_dtype)}

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, store={self.store_options.store}"

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, *arguments: Any, **options: Any) -> Self:
        """Create a module from existing rows, as torch.nn.Embedding.from_pretrained does.

        Args:
            embeddings: Floats [num_embeddings, embedding_dim].
            freeze: If True, training leaves the rows as they are.
            arguments, options: The constructor's other arguments.

        Raises:
            InputError: If `embeddings` is not a 2-D tensor.
        """
        if not isinstance(embeddings, Tensor) or embeddings.dim() != 2:
            raise InputError("embeddings: give a tensor [num_embeddings, embedding_dim]")
        module = cls(*embeddings.shape, *arguments, _weight=embeddings, **options)  # type: ignore[misc]
        return module.requires_grad_(not freeze)


class Embedding(TorchTable, nn.Embedding):  # type: ignore[misc, override]
    """A drop-in torch.nn.Embedding over a tierbed store. Train it with an `EagerOptimizer` or in a `Graph`.

    Args:
        num_embeddings: The number of ids; ids start at 0. None for a table that takes any id and grows.
        embedding_dim: How many elements a row has.
        padding_idx: Id whose row gets no gradient from lookups. The row starts as zeros, unless you load it.
        sparse: Ignored; gradients always cover only the rows that were looked up.
        device: Where lookups run: "cpu", "cuda" or "meta".
        dtype: The dtype of rows and results, torch.float32, float16 or bfloat16. Default: torch's default dtype.
        store: The result of a `make_*_store_options` function, the dict that the function prints, or the path of a
            TOML file. The file's section [name] is used; without `name`, its only section. Default: host memory.
        name: The embedding's name, also used for the store's folder. Default: the module's path in the model.
        initializer: Initial rows, from a `make_*_initializer` function. Default: normal(0, 1), as in torch.
        seed: For initial rows, as in `MultiTableEmbedding`. torch.manual_seed does not change them.
        world: A `World` whose ranks share the rows. Default: all rows are in this process.

    Raises:
        OptionError: If an argument is invalid, or `max_norm` or `scale_grad_by_freq` is given; they are not supported.

    Example:

        >>> embedding = tierbed.Embedding(10, 3)
        >>> embedding(torch.tensor([[1, 2, 4], [4, 3, 9]])).shape
        torch.Size([2, 3, 3])
    """

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        """Look up rows.

        Args:
            input: Integer ids of any shape.

        Returns:
            Rows with the shape input.shape + (embedding_dim,).

        Raises:
            InputError: If `input` has another dtype, or an id is out of range.
        """
        rows = MultiTableEmbedding.forward(self, input)  # faster than super()
        if self.padding_idx is None or not rows.requires_grad:
            return rows
        is_padding = input.to(torch.int64) == self.padding_idx  # a narrow dtype would compare only the low bits
        return torch.where(is_padding.unsqueeze(-1), rows.detach(), rows)


class EmbeddingBag(TorchTable, nn.EmbeddingBag):  # type: ignore[misc, override]
    """A drop-in torch.nn.EmbeddingBag over a tierbed store. Train it with an `EagerOptimizer` or in a `Graph`.

    Args:
        mode: How to pool a bag: "sum" or "mean".
        include_last_offset: If True, offsets contain one more element, the end of the last bag.
        padding_idx: Id to leave out of bags. The id's row starts as zeros.

    The other arguments are the same as for `Embedding`.

    Raises:
        OptionError: If an argument is invalid or not supported: mode="max", `max_norm` or `scale_grad_by_freq`.
    """

    def __init__(
        self, num_embeddings: int | None, embedding_dim: int, max_norm: float | None = None, norm_type: float = 2.0,
        scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, _weight: Tensor | None = None,
        include_last_offset: bool = False, padding_idx: int | None = None, device: Any = None,
        dtype: torch.dtype | None = None, *, store: Store = None, name: str | None = None,
        initializer: Mapping[str, Any] | None = None, seed: int | None = None, world: World | None = None,
    ) -> None:  # fmt: skip
        if mode not in ("sum", "mean"):
            raise OptionError(f"mode={mode!r}: give 'sum' or 'mean'; for a maximum, call max() on looked-up rows")
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight,
            False, device, dtype, store=store, name=name, initializer=initializer, seed=seed, world=world,
        )  # fmt: skip
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(  # type: ignore[override]
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Look up bags of ids, and sum or average each bag's rows.

        Args:
            input: Integer ids. With `offsets`: [n], all bags in sequence. Without `offsets`: [bags, L], a bag per row.
            offsets: Each bag's first index, int64 or int32 [bags]; [bags + 1] with `include_last_offset`.
            per_sample_weights: Floats with the shape of input, to multiply rows with. For mode="sum" only.

        Returns:
            Pooled rows [bags, embedding_dim]; zeros for an empty bag.

        Raises:
            InputError: If a shape or dtype is wrong, or an id is out of range.
        """
        offsets, weights, pooling = self._complete_offsets(input, offsets), per_sample_weights, self.mode
        if weights is not None:
            if self.mode != "sum":
                raise InputError(f"per_sample_weights: mode={self.mode!r} takes none; make the module with mode='sum'")
            if not isinstance(weights, Tensor) or weights.shape != input.shape or not weights.is_floating_point():
                raise InputError(f"per_sample_weights: give floats of the same shape as input, {tuple(input.shape)}")
            weights = weights.to(torch.float32)
        if self.padding_idx is None:
            return MultiTableEmbedding.forward(self, input, None, offsets, pooling, weights)
        row_mask = (input.to(torch.int64) != self.padding_idx).to(torch.float32)  # int64, as in Embedding.forward
        weights = row_mask if weights is None else weights * row_mask
        sums = MultiTableEmbedding.forward(self, input, None, offsets, "sum", weights)
        return sums if self.mode == "sum" else sums / _count_ids(row_mask, offsets).to(sums.dtype)

    def _complete_offsets(self, input: Tensor, offsets: Tensor | None) -> Tensor | None:
        """Return the offsets, with the end of the last bag added; None for 2-D input. Raises InputError."""
        if not isinstance(input, Tensor) or input.dim() not in (1, 2):
            got = f"shape {tuple(input.shape)}" if isinstance(input, Tensor) else type(input).__name__
            raise InputError(f"input of embedding {self.name!r}: {got}; give a tensor [n] with offsets, or [bags, L]")
        if input.dim() == 2:
            if offsets is not None:
                raise InputError("offsets: input [bags, L] has a bag in each row; leave offsets out")
            return None
        if not isinstance(offsets, Tensor) or offsets.dim() != 1:
            raise InputError("offsets: input [n] has bags one after another; give the index where each bag begins")
        return offsets if self.include_last_offset else torch.cat([offsets, offsets.new_full((1,), len(input))])

    def prefetch(self, input: Tensor, offsets: Tensor | None = None) -> None:  # type: ignore[override]
        """Announce the lookup of a later training step, as `MultiTableEmbedding.prefetch` does.

        Args:
            input, offsets: As in `forward`.
        """
        pooling = self.mode if self.padding_idx is None else "sum"  # the same pooling as in forward
        super().prefetch(input, None, self._complete_offsets(input, offsets), pooling)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


def to_dense_state_dict(model: nn.Module) -> OrderedDict[str, Any]:
    """Return the state_dict that `model` would have with torch's modules: each embedding's rows are its `weight`.

    Raises:
        InputError: If a table takes any id.
    """
    modules = model.named_modules(remove_duplicate=False)
    tables = {f"{path}." if path else "": module for path, module in modules if isinstance(module, TorchTable)}
    with exclude_rows():
        state = model.state_dict()
    dense: OrderedDict[str, Any] = OrderedDict()
    for key, value in state.items():
        prefix = next((prefix for prefix in tables if key.startswith(prefix)), None)
        if prefix is None:
            dense[key] = value
        elif f"{prefix}weight" not in dense:
            dense[f"{prefix}weight"] = tables[prefix].to_dense_state_dict()["weight"]
    return dense


_REMEDIES = {
    "max_norm": "leave max_norm out; to scale rows after updates, set max_row_norm in their optimizer's param group",
    "scale_grad_by_freq": "leave it out; gradients cannot be divided by the counts of ids in a batch",
}


def _make_store_options(store: Store, name: str | None) -> Mapping[str, Any]:
    """Return the store options in `store`, which may be a dict or the path of a TOML file with a table [name]."""
    if store is None:
        return make_host_mem_store_options()
    if not isinstance(store, (str, os.PathLike)):
        return store
    if name is None:
        tables = list(read_store_options(store))
        if len(tables) != 1:
            raise OptionError(f"store={os.fspath(store)!r} has the tables {', '.join(tables)}; give name=, one of them")
        name = tables[0]
    return load_store_options(Path(store), name)


def _normalize_padding_idx(padding_idx: Any, num_embeddings: int | None) -> int | None:
    """Return padding_idx counted from 0; a negative index counts from the end, as in torch. Raises OptionError."""
    if padding_idx is None:
        return None
    low, high = (-(2**63), 2**63 - 1) if num_embeddings is None else (-num_embeddings, num_embeddings - 1)
    padding = as_int(padding_idx, low, high)
    if padding is None:
        raise OptionError(f"padding_idx={padding_idx!r}: give a whole number from {low} to {high}, or None")
    return padding if num_embeddings is None else padding % num_embeddings


def _count_ids(row_mask: Tensor, offsets: Tensor | None) -> Tensor:
    """Return how many ids of each bag are not padding, as a tensor [bags, 1]. Zeros become 1, for a division."""
    if offsets is None:
        return row_mask.sum(-1, keepdim=True).clamp(min=1)
    ends = torch.cat([row_mask.new_zeros(1, dtype=torch.int64), row_mask.to(torch.int64).cumsum(0)])
    return (ends[offsets[1:].long()] - ends[offsets[:-1].long()]).clamp(min=1).unsqueeze(-1)
