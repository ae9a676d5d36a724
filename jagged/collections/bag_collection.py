"""`EmbeddingBagCollection`: features of a batch in, one pooled row for each sample and feature out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...embedding.handle_contract import Ranks
from ...engine.errors import InputError
from ...engine.options.inputs import Lookup, check_lookup
from ..tensors.checks import refuse_trace
from ..tensors.jagged_tensor import JaggedTensor
from ..tensors.keyed_jagged import KeyedJagged
from ..tensors.keyed_jagged_tensor import KeyedJaggedTensor
from ..tensors.keyed_tensor import KeyedTensor
from ..tensors.variable_batch import VariableBatchKeyedJaggedTensor
from .configs import EmbeddingBagConfig, EmbeddingConfig
from .tables import Tables, numbers_of, output_names, refuse_device


@dataclass
class _Part:
    """A lookup of one embedding, whose columns are in the order of the result."""

    embedding: str
    pooling: str
    dim: int
    features: list[str] = field(default_factory=list)  # each once, as a lookup takes them
    tables: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)  # how many columns follow each other in the result


class EmbeddingBagCollection(Tables):
    """TorchRec's collection of pooled tables, over tiered hashed tables.

    tables: an EmbeddingBagConfig, or TorchRec's, for each. store_options: from a `make_*_store_options`, divided
    between the embeddings as `stores()` tells; or a mapping of such options by the name of an embedding.
    name: embeddings are named `<name>-d<dim>`, one for all tables of a dim, or `<name>-d<dim>-<group>`.
    is_weighted: rows are weighted by the batch's weights. key_type: the dtype of ids; ids of other integer dtypes are
    converted. seed: of initial rows, with the name of the embedding. output_dtype: of results and gradients.
    share: a collection whose tables of the same name are looked up here as well; store_options are for the others.
    device: TorchRec's argument, which is refused: store_options say where rows are.
    world: a `World` of tierbed.distributed, over whose ranks the rows are spread; shared tables have their own.
    state_dtype: of the optimizer's state that every element has: torch.float32 or bfloat16.

    Raises OptionError.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        store_options: Mapping[str, Any] | None = None,
        name: str = "ebc",
        is_weighted: bool = False,
        key_type: torch.dtype = torch.int64,
        seed: int = 0,
        output_dtype: torch.dtype = torch.float32,
        share: Tables | None = None,
        device: None = None,
        world: Ranks | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        refuse_device(device)
        super().__init__(
            tables, EmbeddingBagConfig, store_options, name, key_type, seed, output_dtype, share, None, world,
            state_dtype,
        )  # fmt: skip
        self.is_weighted = is_weighted
        self._keys: list[str] = []
        self._lengths: list[int] = []
        self._parts: list[_Part] = []
        self._order: list[int] = []  # of the result's runs: the part that each is of
        for config, names in zip(self.configs, output_names(self.configs), strict=True):
            assert isinstance(config, EmbeddingBagConfig)
            self._keys += names
            self._lengths += [config.embedding_dim] * len(names)
            for feature in config.feature_names:
                self._append(config, feature)

    def forward(self, features: Any) -> KeyedTensor:
        """A row for each sample and feature, [batch, sum of dims]: keys in the order of tables, then of their features.

        features: a KeyedJaggedTensor, or TorchRec's, with more keys and in any order; or a dict of JaggedTensors. Rows
        of an empty bag are zeros. KeyError for a feature that is missing; InputError, StoreError as a lookup.
        """
        with self.told():
            batch = features_of(features)
            weights = self._weights_of(batch)
            if isinstance(batch, VariableBatchKeyedJaggedTensor):
                rows = [self._expanded(part, batch, weights) for part in self._parts]
            else:
                rows = [self._looked_up(part, batch, weights) for part in self._parts]
        return KeyedTensor(self._keys, self._lengths, self._together(rows))

    def embedding_bag_configs(self) -> list[EmbeddingConfig]:
        """The config of each table, as models of TorchRec ask for them."""
        return list(self.configs)

    def prefetch(self, features: Any) -> None:
        """Announce the batch of a coming step of a plain loop, as `MultiTableEmbedding.prefetch`.

        A graph announces its batches itself. Features whose samples share bags are not announced.
        """
        announced: dict[str, list[Lookup]] = {}
        with self.told():
            batch = features_of(features)
            if isinstance(batch, VariableBatchKeyedJaggedTensor):
                return
            for part in self._parts:
                embedding = self._embedding(part)
                given = (part.tables, batch.offsets(), part.pooling, numbers_of(part.features, batch.keys()))
                lookup = check_lookup(embedding.spec, self.ids_of(batch.values()), *given, len(batch.keys()))
                announced.setdefault(part.embedding, []).append(lookup)
        for name, lookups in announced.items():
            self.embeddings[name].announce(lookups)  # type: ignore[operator]

    def _append(self, config: EmbeddingBagConfig, feature: str) -> None:
        """Put a feature of a table into the first lookup of its embedding and pooling that has not this feature."""
        embedding, table = self.place_of(config.name)
        pooling = config.pooling.value.lower()
        at = next(
            (
                number
                for number, part in enumerate(self._parts)
                if (part.embedding, part.pooling) == (embedding, pooling) and feature not in part.features
            ),
            len(self._parts),
        )
        if at == len(self._parts):
            self._parts.append(_Part(embedding, pooling, config.embedding_dim))
        part = self._parts[at]
        part.features.append(feature)
        part.tables.append(table)
        if self._order[-1:] == [at]:
            part.runs[-1] += 1
        else:
            part.runs.append(1)
            self._order.append(at)

    def _embedding(self, part: _Part) -> Any:
        return self.embeddings[part.embedding]

    def _weights_of(self, batch: KeyedJagged) -> Tensor | None:
        """The weights of a batch, where the collection takes them. InputError."""
        if not self.is_weighted:
            return None
        weights = batch.weights_or_none()
        if weights is None:
            raise InputError(
                f"features of {self.name!r}: is_weighted=True, and the batch has no weights; give weights to the "
                "KeyedJaggedTensor, or make the collection with is_weighted=False"
            )
        return weights if weights.dtype == torch.float32 else weights.to(torch.float32)

    def _looked_up(self, part: _Part, batch: KeyedJagged, weights: Tensor | None) -> Tensor:
        """[batch, columns * dim]"""
        keys = batch.keys()
        rows: Tensor = self._embedding(part)(
            self.ids_of(batch.values()), part.tables, batch.offsets(), part.pooling, weights,
            features=numbers_of(part.features, keys), num_features=len(keys),
        )  # fmt: skip
        return rows.flatten(1)

    def _expanded(self, part: _Part, batch: VariableBatchKeyedJaggedTensor, weights: Tensor | None) -> Tensor:
        """The same of features whose samples share bags."""
        refuse_trace(
            "a batch of variable batch sizes",
            "train it in a plain loop with an EagerOptimizer, or give the graph a KeyedJaggedTensor",
        )
        inverse = batch.inverse_indices_or_none()
        if inverse is None:
            raise InputError(
                f"features of {self.name!r}: keys differ in their numbers of bags, {batch.stride_per_key()}, and "
                "nothing tells which bag a sample has; give inverse_indices"
            )
        numbers = numbers_of(part.features, batch.keys())
        chosen = batch.permute(numbers)
        chosen.validate()
        weights = None if weights is None else chosen.weights().to(torch.float32)
        strides = chosen.strides()
        owners = torch.tensor(part.tables, device=strides.device).repeat_interleave(strides)
        rows = self._embedding(part)(self.ids_of(chosen.values()), owners, chosen.offsets(), part.pooling, weights)
        firsts = strides.cumsum(0) - strides
        samples = inverse[1][numbers] + firsts[:, None]  # [columns, batch]
        return rows[samples.t()].flatten(1)

    def _together(self, rows: Sequence[Tensor]) -> Tensor:
        """The columns of all lookups in the order of the result."""
        if len(rows) == 1:
            return rows[0]
        split = [
            iter(out.split([run * part.dim for run in part.runs], 1))
            for out, part in zip(rows, self._parts, strict=True)
        ]
        return torch.cat([next(split[at]) for at in self._order], 1)


def features_of(given: Any) -> KeyedJagged:
    """A batch of features: ours, TorchRec's, or a dict of JaggedTensors. InputError."""
    if isinstance(given, KeyedJagged):
        return given
    if isinstance(given, Mapping):
        return KeyedJaggedTensor.from_jt_dict(
            {key: one if isinstance(one, JaggedTensor) else jagged_of(one) for key, one in given.items()}
        )
    if hasattr(given, "variable_stride_per_key"):
        return KeyedJaggedTensor.from_torchrec(given)
    raise InputError(
        f"features: got a {type(given).__name__}; give a KeyedJaggedTensor, TorchRec's, or a dict of JaggedTensors"
    )


def jagged_of(given: Any) -> JaggedTensor:
    """One feature: ours, or TorchRec's JaggedTensor. InputError."""
    if isinstance(given, JaggedTensor):
        return given
    if not hasattr(given, "offsets_or_none") or not hasattr(given, "values"):
        raise InputError(f"features: got a {type(given).__name__}; give a JaggedTensor for each key")
    offsets, lengths = given.offsets_or_none(), given.lengths_or_none()
    return JaggedTensor(given.values(), given.weights_or_none(), None if offsets is not None else lengths, offsets)
