"""TorchRec's embedding collections, modules that look up a batch's features.

`EmbeddingBagCollection` returns one pooled row per sample and feature; `EmbeddingCollection` returns one row per id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...distributed.world import World
from ...embedding.modules.embedding import MultiTableEmbedding
from ...engine.checks import check_int, validate_arguments
from ...engine.errors import InputError, OptionError
from ...engine.options.lookup import Lookup, check_lookup
from ..tensors.jagged_tensor import JaggedTensor, make_mask, pad_bags
from ..tensors.keyed_jagged_tensor import KeyedJaggedTensor, VariableBatchKeyedJaggedTensor
from ..tensors.keyed_tensor import ColumnJoiner, KeyedTensor
from ..tensors.validation import check_eager
from .configs import EmbeddingBagConfig, EmbeddingConfig
from .tables import TableCollection, TableView, find_key_indices, make_output_names

PADDING_ID = -1  # the id that means padding in a collection with padded features; no row is stored for it
_FeatureIds = tuple[Tensor, Tensor, Tensor | None]


@dataclass(eq=False)
class _PooledLookup:
    """One lookup in an embedding. Each feature occurs at most once: a lookup reads one bag per key of the batch."""

    embedding_name: str
    pooling: str
    dim: int
    features: list[str] = field(default_factory=list)
    table_ids: list[int] = field(default_factory=list)


class EmbeddingBagCollection(TableCollection):
    """TorchRec's EmbeddingBagCollection, with rows that tierbed stores. A lookup pools the rows of each bag.

    Tables with equal dim share an embedding. Embeddings are named `<name>-d<dim>`, or `<name>-d<dim>-<group>`.

    Args:
        tables: One EmbeddingBagConfig (tierbed's or TorchRec's) per table.
        store_options: Options from a `make_*_store_options`, or a dict {embedding name: options}. A single store's
            budgets are divided among the embeddings; `stores()` prints them. None keeps all rows in device memory.
        name: Prefix for embedding names. None means "ebc". If a model has several collections without a name, their
            embeddings are named by the collections' module paths.
        is_weighted: If True, multiplies rows by the batch's weights.
        key_type: The ids' dtype. Ids of other integer dtypes are converted.
        seed: A number that determines initial rows, together with the names of embeddings and tables.
        output_dtype: The dtype of results and gradients.
        share: Another collection. A table that is in both collections uses the embedding of `share`; `store_options`
            apply to the remaining tables.
        device: The device of lookups. On "meta", lookups compute only shapes and allocate nothing.
        world: A `tierbed.distributed.World` whose ranks divide the rows. Tables from `share` use the world of `share`.
        state_dtype: The dtype of optimizer states with one number per element: torch.float32 or torch.bfloat16.

    Raises:
        OptionError: If an argument is invalid.
    """

    _parameter_prefix, _default_name = "embedding_bags", "ebc"

    @validate_arguments("name", "is_weighted", "seed")
    def __init__(
        self,
        tables: Sequence[Any],
        store_options: Mapping[str, Any] | None = None,
        name: str | None = None,
        is_weighted: bool = False,
        key_type: torch.dtype = torch.int64,
        seed: int = 0,
        output_dtype: torch.dtype = torch.float32,
        share: TableCollection | None = None,
        device: torch.device | str | None = None,
        world: World | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            tables, EmbeddingBagConfig, store_options, name, key_type, seed, share, device,
            output_dtype=output_dtype, world=world, state_dtype=state_dtype,
        )  # fmt: skip
        self._is_weighted = is_weighted
        self._output_keys: list[str] = []
        self._output_lengths: list[int] = []
        self._lookups: list[_PooledLookup] = []
        lookup_indices: list[int] = []  # for each feature of the result, the index of its lookup in `_lookups`
        for config, names in zip(self.configs, make_output_names(self.configs), strict=True):
            assert isinstance(config, EmbeddingBagConfig)
            self._output_keys += names
            self._output_lengths += [config.embedding_dim] * len(names)
            lookup_indices += [self._add_feature(config, feature) for feature in config.feature_names]
        self._column_joiner = ColumnJoiner(lookup_indices, [lookup.dim for lookup in self._lookups])

    def forward(self, features: Any) -> KeyedTensor:
        """Return one pooled row per sample and feature.

        Args:
            features: A KeyedJaggedTensor (tierbed's or TorchRec's) or a dict of JaggedTensors. Keys may have any order,
                and unused keys are ignored.

        Returns:
            A KeyedTensor of values [batch, sum of dims], ordered by table, then feature. An empty bag gives zeros.

        Raises:
            KeyError: If a feature is missing.
            InputError, StoreError: As for an embedding's lookup.
        """
        with self.raise_on_all_ranks():
            batch = as_features(features)
            weights = self._get_weights(batch) if self._is_weighted else None
            rows = [self._look_up(lookup, batch, weights) for lookup in self._lookups]
        if not rows:
            return KeyedTensor([], [], torch.empty(batch.stride(), 0, device=batch.values().device))
        return KeyedTensor(self._output_keys, self._output_lengths, self._column_joiner.join(rows))

    @property
    def embedding_bags(self) -> Mapping[str, TableView]:
        """The tables by name. A table's `weight` is a copy of its rows."""
        return dict(self.embeddings.tables)

    def is_weighted(self) -> bool:
        """True if rows are multiplied by the batch's weights."""
        return self._is_weighted

    embedding_bag_configs = TableCollection.embedding_configs  # TorchRec's models call this method

    def _make_lookups(self, features: Any) -> Iterator[tuple[MultiTableEmbedding, Lookup]]:
        batch = as_features(features)
        keys, has_shared_bags = batch.keys(), isinstance(batch, VariableBatchKeyedJaggedTensor)
        for lookup in () if has_shared_bags else self._lookups:
            embedding, key_indices = self.embedding(lookup.embedding_name), find_key_indices(lookup.features, keys)
            arguments = self.convert_ids(batch.values()), lookup.table_ids, batch.offsets(), lookup.pooling
            yield embedding, check_lookup(embedding.spec, *arguments, key_indices, len(keys))

    def _add_feature(self, config: EmbeddingBagConfig, feature: str) -> int:
        """Add a feature to a lookup that does not have the feature yet. Return the lookup's index."""
        name, table_id = self.table_location(config.name)
        pooling = config.pooling.value.lower()
        candidates = (entry for entry in self._lookups if (entry.embedding_name, entry.pooling) == (name, pooling))
        lookup = next((entry for entry in candidates if feature not in entry.features), None)
        if lookup is None:
            lookup = _PooledLookup(name, pooling, config.embedding_dim)
            self._lookups.append(lookup)
        lookup.features.append(feature)
        lookup.table_ids.append(table_id)
        return self._lookups.index(lookup)

    def _get_weights(self, batch: KeyedJaggedTensor) -> Tensor:
        """Return the batch's weights as float32. Raises InputError if there are none."""
        if (weights := batch.weights_or_none()) is None:
            remedy = "give weights to the KeyedJaggedTensor, or make the collection with is_weighted=False"
            raise InputError(f"features of {self.name!r}: is_weighted=True, but the batch has no weights; {remedy}")
        return weights.float()

    def _look_up(self, lookup: _PooledLookup, batch: KeyedJaggedTensor, weights: Tensor | None) -> Tensor:
        """Return the pooled rows of one lookup, [batch, columns * dim]."""
        if isinstance(batch, VariableBatchKeyedJaggedTensor):
            return self._expand_bags(lookup, batch)
        keys = batch.keys()
        arguments = self.convert_ids(batch.values()), lookup.table_ids, batch.offsets(), lookup.pooling, weights
        indices = find_key_indices(lookup.features, keys)
        return self.embedding(lookup.embedding_name)(*arguments, features=indices, num_features=len(keys)).flatten(1)

    def _expand_bags(self, lookup: _PooledLookup, batch: VariableBatchKeyedJaggedTensor) -> Tensor:
        """Look each bag up once, then copy its row to each sample that shares it. Return [batch, columns * dim]."""
        remedy = "train it in a plain loop with an EagerOptimizer, or give the graph a KeyedJaggedTensor"
        check_eager("a batch of variable batch sizes", remedy)
        inverse, bag_counts = batch.inverse_indices_or_none(), batch.stride_per_key()
        if inverse is None and len({*bag_counts}) > 1:
            problem = f"keys differ in their numbers of bags, {bag_counts}, and inverse_indices=None"
            raise InputError(f"features of {self.name!r}: {problem}; give inverse_indices, the bag of each sample")
        key_indices = find_key_indices(lookup.features, batch.keys())
        selected, device = batch.permute(key_indices), batch.device()
        if device.type != "meta":
            selected.validate()
        weights = selected.weights().to(torch.float32) if self._is_weighted else None
        table_ids = torch.tensor(lookup.table_ids).repeat_interleave(torch.tensor(selected.stride_per_key()))
        rows = self.embedding(lookup.embedding_name)(
            self.convert_ids(selected.values()), table_ids.to(device), selected.offsets(), lookup.pooling, weights
        )
        first_bags = torch.tensor(selected.lengths_offset_per_key()[:-1], device=device)
        bags = torch.arange(batch.stride(), device=device) if inverse is None else inverse[1][key_indices]
        samples = bags + first_bags[:, None]  # [columns, batch]
        return rows[samples.t()].flatten(1)


def as_features(features: Any) -> KeyedJaggedTensor:
    """Convert TorchRec's KeyedJaggedTensor, or a dict of JaggedTensors, to tierbed's class. Raises InputError."""
    if isinstance(features, KeyedJaggedTensor):
        return features
    if isinstance(features, Mapping):
        return KeyedJaggedTensor.from_jt_dict({key: as_jagged(jagged) for key, jagged in features.items()})
    if hasattr(features, "variable_stride_per_key"):
        return KeyedJaggedTensor.from_torchrec(features)
    expected = "a KeyedJaggedTensor (tierbed's or TorchRec's) or a dict of JaggedTensors"
    raise InputError(f"features: got a {type(features).__name__}; give {expected}")


def as_jagged(feature: Any) -> JaggedTensor:
    """Convert TorchRec's JaggedTensor to tierbed's class. Raises InputError."""
    if isinstance(feature, JaggedTensor):
        return feature
    if not hasattr(feature, "offsets_or_none") or not hasattr(feature, "values"):
        raise InputError(f"features: got a {type(feature).__name__}; give a JaggedTensor for each key")
    offsets, lengths = feature.offsets_or_none(), feature.lengths_or_none()
    return JaggedTensor(feature.values(), feature.weights_or_none(), None if offsets is not None else lengths, offsets)


class Padded(NamedTuple):
    """A feature's rows, padded to the same number of rows in each sample."""

    values: Tensor  # [batch, length, dim]: the rows of a sample's first ids, then zeros
    mask: Tensor  # bool [batch, length]: True where there is an id


class EmbeddingCollection(TableCollection):
    """TorchRec's EmbeddingCollection, with rows that tierbed stores. A lookup returns one row per id.

    Args:
        tables: One EmbeddingConfig (tierbed's or TorchRec's) per table.
        name: Prefix for embedding names. None means "ec".
        need_indices: If True, the weights of each returned JaggedTensor are its ids.
        padded: {feature: length}. Each of these features is returned as a dense `Padded`. Ids beyond `length` are left
            out. If this argument is given, the id -1 (2**64 - 1 as uint64) means padding in every feature.

    The other arguments are the same as for EmbeddingBagCollection. Tables may differ in dim.

    Raises:
        OptionError: If an argument is invalid.
    """

    _parameter_prefix, _default_name = "embeddings", "ec"

    @validate_arguments("name", "need_indices", "seed")
    def __init__(
        self,
        tables: Sequence[Any],
        store_options: Mapping[str, Any] | None = None,
        name: str | None = None,
        need_indices: bool = False,
        key_type: torch.dtype = torch.int64,
        seed: int = 0,
        output_dtype: torch.dtype = torch.float32,
        share: TableCollection | None = None,
        padded: Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
        world: World | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        if padded is not None and not isinstance(padded, Mapping):
            raise OptionError(f"padded={padded!r}: give {{feature: length}}")
        padding_id = (2**64 - 1 if key_type == torch.uint64 else PADDING_ID) if padded else None
        super().__init__(
            tables, EmbeddingConfig, store_options, name, key_type, seed, share, device,
            output_dtype=output_dtype, world=world, state_dtype=state_dtype, padding_idx=padding_id,
        )  # fmt: skip
        self._need_indices = need_indices
        self._padded_lengths = dict(padded or {})
        self._output_names = make_output_names(self.configs)
        self._features = list(dict.fromkeys(feature for config in self.configs for feature in config.feature_names))
        for feature, length in self._padded_lengths.items():
            if feature not in self._features:
                raise OptionError(f"padded[{feature!r}]: no table has that feature; give one of {self._features}")
            check_int(f"padded[{feature!r}]", length, "the length to pad each sample to, a whole number >= 1", 1)
        for embedding in self.each():
            if padding_id is not None and embedding.spec.padding_idx != padding_id:
                raise OptionError(
                    f"padded={self._padded_lengths}: the shared embedding {embedding.name!r} does not use id "
                    f"{padding_id} as padding. Make the padded collection first, with store_options. Then make the "
                    "other collection, and pass the padded collection as share"
                )

    def forward(self, features: Any) -> dict[str, JaggedTensor | Padded]:
        """Look up each id of each feature.

        Args:
            features: A KeyedJaggedTensor (tierbed's or TorchRec's) or a dict of JaggedTensors. Keys may have any order,
                and unused keys are ignored.

        Returns:
            {feature: JaggedTensor of values [ids, dim]}, or `Padded` for the features in `padded`.

        Raises:
            KeyError: If a feature is missing.
            GraphError: In a graph, if a feature is not padded and `features` is a KeyedJaggedTensor made in the graph.
            InputError, StoreError: As for an embedding's lookup.
        """
        result: dict[str, JaggedTensor | Padded] = {}
        with self.raise_on_all_ranks():
            for name, embedding, table_id, (ids, offsets, mask) in self._iter_lookups(features):
                rows, indices = embedding(ids, table_id), ids if self._need_indices else None
                result[name] = JaggedTensor(rows, indices, None, offsets) if mask is None else Padded(rows, mask)
        return result

    def need_indices(self) -> bool:
        """True if the weights of each returned JaggedTensor are its ids."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the dim of all tables, or -1 if there are none. Raises InputError if dims differ."""
        dims = {config.embedding_dim for config in self.configs}
        if len(dims) > 1:
            raise InputError(f"embedding_dim of {self.name!r}: dims are {sorted(dims)}; read a config's embedding_dim")
        return dims.pop() if dims else -1

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return, for each table, the names of its features in results."""
        return [list(names) for names in self._output_names]

    def _make_lookups(self, features: Any) -> Iterator[tuple[MultiTableEmbedding, Lookup]]:
        for _, embedding, table_id, (ids, _, _) in self._iter_lookups(features):
            yield embedding, check_lookup(embedding.spec, ids, table_id)

    def _iter_lookups(self, features: Any) -> Iterator[tuple[str, MultiTableEmbedding, int, _FeatureIds]]:
        """Yield (result name, embedding, table number in the embedding, ids) for each result."""
        batch: Any = features if isinstance(features, Mapping) else as_features(features)
        find_key_indices(self._features, list(batch.keys()))  # raises KeyError if a feature is missing
        if isinstance(batch, Mapping):
            batch = {feature: as_jagged(batch[feature]) for feature in self._features}
        for jagged in batch.values() if isinstance(batch, dict) else [batch]:
            jagged.check_bags()
        ids = {feature: self._read_ids(batch, feature) for feature in self._features}
        for config, names in zip(self.configs, self._output_names, strict=True):
            embedding, table_id = self.embedding_of(config.name), self.table_location(config.name)[1]
            for feature, name in zip(config.feature_names, names, strict=True):
                yield name, embedding, table_id, ids[feature]

    def _read_ids(self, batch: dict[str, JaggedTensor] | KeyedJaggedTensor, feature: str) -> _FeatureIds:
        """Return (ids, offsets, mask). A padded feature has ids [batch, length]. Others have ids [n] and no mask."""
        length = self._padded_lengths.get(feature)
        if length is None or isinstance(batch, dict) or batch.variable_stride_per_key():
            jagged = batch[feature]
            values, offsets = jagged.values(), jagged.offsets()
        else:  # a graph cannot trace `batch[feature]`: use the values of all features, and this feature's offsets
            first_bag = batch.keys().index(feature) * batch.stride()
            values, offsets = batch.values(), batch.offsets()[first_bag : first_bag + batch.stride() + 1]
        ids = self.convert_ids(values)
        if length is None:
            return ids, offsets, None
        signed_ids = ids.view(torch.int64) if ids.dtype == torch.uint64 else ids  # torch has no ops on uint64
        return pad_bags(signed_ids, offsets, length, PADDING_ID).view(ids.dtype), offsets, make_mask(offsets, length)
