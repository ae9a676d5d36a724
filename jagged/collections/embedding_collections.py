"""Collections: features of a batch in, rows out.

`EmbeddingBagCollection` returns one pooled row for each sample and feature, `EmbeddingCollection` the row of each id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...distributed.world import World
from ...embedding.modules.embedding import MultiTableEmbedding
from ...engine.checks import checked_arguments, int_option
from ...engine.errors import InputError, OptionError
from ...engine.options.lookup import Lookup, check_lookup
from ..tensors.jagged_tensor import JaggedTensor, is_value, padded
from ..tensors.keyed_jagged_tensor import KeyedJaggedTensor, VariableBatchKeyedJaggedTensor
from ..tensors.keyed_tensor import ColumnOrder, KeyedTensor
from ..tensors.validation import refuse_trace
from .configs import EmbeddingBagConfig, EmbeddingConfig
from .tables import TableCollection, TableView, numbers_of, output_names

PADDING_ID = -1  # of a collection that pads; no row


@dataclass(eq=False)
class _PooledLookup:
    """One lookup of an embedding. A feature occurs once, since a lookup takes a bag for each key of the batch."""

    embedding: str
    pooling: str
    dim: int
    features: list[str] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)


class EmbeddingBagCollection(TableCollection):
    """TorchRec's collection of pooled tables, over tiered hashed tables.

    tables: an EmbeddingBagConfig, or TorchRec's, for each. store_options: from a `make_*_store_options`, divided
    between the embeddings as `stores()` shows; or a mapping of such options by the name of an embedding. None: all rows
    in the memory of the device.
    name: embeddings are named `<name>-d<dim>`, one for all tables of a dim, or `<name>-d<dim>-<group>`. None is "ebc";
    if two such collections meet in a model, their embeddings are named by their places in it.
    is_weighted: whether rows are weighted by the batch's weights. key_type: the dtype of ids; ids of other integer
    dtypes are converted. seed: of initial rows, with the names of the embedding and its
    tables. output_dtype: of results and gradients.
    share: a collection whose tables of the same name are looked up here as well; store_options are for the others.
    device: where lookups run, as after `.to(device)`; "meta" computes shapes alone, and allocates nothing.
    world: a `World` of tierbed.distributed, over whose ranks the rows are spread; shared tables have their own.
    state_dtype: of the optimizer's state that every element has: torch.float32 or bfloat16.

    Raises OptionError.
    """

    _kind, _default_name = "embedding_bags", "ebc"

    @checked_arguments("name", "is_weighted", "seed")
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
        self._keys: list[str] = []
        self._lengths: list[int] = []
        self._lookups: list[_PooledLookup] = []
        lookup_of: list[int] = []  # each feature of the result
        for config, names in zip(self.configs, output_names(self.configs), strict=True):
            assert isinstance(config, EmbeddingBagConfig)
            self._keys += names
            self._lengths += [config.embedding_dim] * len(names)
            lookup_of += [self._add_feature(config, feature) for feature in config.feature_names]
        self._columns = ColumnOrder(lookup_of, [lookup.dim for lookup in self._lookups])

    def forward(self, features: Any) -> KeyedTensor:
        """A row for each sample and feature, [batch, sum of dims]: keys in the order of tables, then of their features.

        features: a KeyedJaggedTensor, or TorchRec's, with any other keys and in any order; or a dict of JaggedTensors.
        Rows of an empty bag are zeros. KeyError for a missing feature; InputError, StoreError as a lookup.
        """
        with self.raise_on_all_ranks():
            batch = features_of(features)
            weights = self._weights_of(batch)
            rows = [self._rows(lookup, batch, weights) for lookup in self._lookups]
        if not rows:
            return KeyedTensor([], [], torch.empty(batch.stride(), 0, device=batch.values().device))
        return KeyedTensor(self._keys, self._lengths, self._columns.join(rows))

    @property
    def embedding_bags(self) -> Mapping[str, TableView]:
        """The tables by their names, whose `weight` is a copy of the rows."""
        return dict(self.embeddings.tables)

    def is_weighted(self) -> bool:
        """Whether rows are weighted by the batch's weights."""
        return self._is_weighted

    embedding_bag_configs = TableCollection.embedding_configs  # models of TorchRec call it

    def _lookups_of(self, features: Any) -> Iterator[tuple[MultiTableEmbedding, Lookup]]:
        batch = features_of(features)
        keys, shares_bags = batch.keys(), isinstance(batch, VariableBatchKeyedJaggedTensor)
        for lookup in () if shares_bags else self._lookups:
            embedding, numbers = self.embedding(lookup.embedding), numbers_of(lookup.features, keys)
            arguments = self.ids_of(batch.values()), lookup.tables, batch.offsets(), lookup.pooling
            yield embedding, check_lookup(embedding.spec, *arguments, numbers, len(keys))

    def _add_feature(self, config: EmbeddingBagConfig, feature: str) -> int:
        """Add a feature of a table to the first lookup that can take it. Returns the number of the lookup."""
        embedding, table = self.table_location(config.name)
        pooling = config.pooling.value.lower()
        candidates = (one for one in self._lookups if (one.embedding, one.pooling) == (embedding, pooling))
        lookup = next((one for one in candidates if feature not in one.features), None)
        if lookup is None:
            lookup = _PooledLookup(embedding, pooling, config.embedding_dim)
            self._lookups.append(lookup)
        lookup.features.append(feature)
        lookup.tables.append(table)
        return self._lookups.index(lookup)

    def _weights_of(self, batch: KeyedJaggedTensor) -> Tensor | None:
        """The weights of a batch, if the collection takes them. InputError."""
        if not self._is_weighted:
            return None
        weights = batch.weights_or_none()
        if weights is None:
            raise InputError(
                f"features of {self.name!r}: is_weighted=True, and the batch has no weights; give weights to the "
                "KeyedJaggedTensor, or make the collection with is_weighted=False"
            )
        return weights if weights.dtype == torch.float32 else weights.to(torch.float32)

    def _rows(self, lookup: _PooledLookup, batch: KeyedJaggedTensor, weights: Tensor | None) -> Tensor:
        """[batch, columns * dim]"""
        if isinstance(batch, VariableBatchKeyedJaggedTensor):
            return self._expanded(lookup, batch)
        keys = batch.keys()
        rows: Tensor = self.embedding(lookup.embedding)(
            self.ids_of(batch.values()), lookup.tables, batch.offsets(), lookup.pooling, weights,
            features=numbers_of(lookup.features, keys), num_features=len(keys),
        )  # fmt: skip
        return rows.flatten(1)

    def _expanded(self, lookup: _PooledLookup, batch: VariableBatchKeyedJaggedTensor) -> Tensor:
        """[batch, columns * dim] of features whose samples share bags: each bag is looked up once."""
        refuse_trace(
            "a batch of variable batch sizes",
            "train it in a plain loop with an EagerOptimizer, or give the graph a KeyedJaggedTensor",
        )
        inverse, counts = batch.inverse_indices_or_none(), batch.stride_per_key()
        if inverse is None and len({*counts}) > 1:
            raise InputError(
                f"features of {self.name!r}: keys differ in their numbers of bags, {counts}, and "
                "inverse_indices=None; give inverse_indices, which say which bag each sample has"
            )
        numbers = numbers_of(lookup.features, batch.keys())
        chosen, device = batch.permute(numbers), batch.device()
        if device.type != "meta":
            chosen.validate()
        weights = chosen.weights().to(torch.float32) if self._is_weighted else None
        tables = torch.tensor(lookup.tables).repeat_interleave(torch.tensor(chosen.stride_per_key()))
        rows = self.embedding(lookup.embedding)(
            self.ids_of(chosen.values()), tables.to(device), chosen.offsets(), lookup.pooling, weights
        )
        firsts = torch.tensor(chosen.lengths_offset_per_key()[:-1], device=device)
        bags = torch.arange(batch.stride(), device=device) if inverse is None else inverse[1][numbers]
        samples = bags + firsts[:, None]  # [columns, batch]
        expanded: Tensor = rows[samples.t()].flatten(1)
        return expanded


def features_of(given: Any) -> KeyedJaggedTensor:
    """A batch of features: ours, TorchRec's, or a dict of JaggedTensors. InputError."""
    if isinstance(given, KeyedJaggedTensor):
        return given
    if isinstance(given, Mapping):
        return KeyedJaggedTensor.from_jt_dict({key: jagged_of(one) for key, one in given.items()})
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


class Padded(NamedTuple):
    """A feature with the same number of positions in each sample."""

    values: Tensor  # [batch, length, dim]: the rows of the first ids of each sample, then zeros
    mask: Tensor  # [batch, length] bool: which positions have an id


class EmbeddingCollection(TableCollection):
    """TorchRec's collection of tables whose rows are not pooled, over tiered hashed tables. Tables may differ in dim.

    tables: an EmbeddingConfig, or TorchRec's, for each. need_indices: whether jagged results have ids as their weights.
    padded: {feature: length} of features whose rows are returned as one dense tensor. Their ids are padded before the
    lookup; those beyond `length` are left out. Such a collection takes the id -1 (2**64 - 1 as uint64) for padding in
    every feature. The other arguments are those of an EmbeddingBagCollection. Raises OptionError.
    """

    _kind, _default_name = "embeddings", "ec"

    @checked_arguments("name", "need_indices", "seed")
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
        padding = (2**64 - 1 if key_type == torch.uint64 else PADDING_ID) if padded else None
        super().__init__(
            tables, EmbeddingConfig, store_options, name, key_type, seed, share, device,
            output_dtype=output_dtype, world=world, state_dtype=state_dtype, padding_idx=padding,
        )  # fmt: skip
        self._need_indices = need_indices
        self._padded = dict(padded or {})
        self._names = output_names(self.configs)
        self._features = list(dict.fromkeys(feature for config in self.configs for feature in config.feature_names))
        for feature, length in self._padded.items():
            if feature not in self._features:
                raise OptionError(f"padded[{feature!r}]: no table has that feature; give one of {self._features}")
            int_option(f"padded[{feature!r}]", length, "the number of positions of a sample, from 1", 1)
        for embedding in self.each():
            if padding is not None and embedding.spec.padding_idx != padding:
                raise OptionError(
                    f"padded={self._padded}: the shared embedding {embedding.name!r} was made without {padding} for "
                    "padding; make this collection first, with store_options, and give it to the other one as share"
                )

    def forward(self, features: Any) -> dict[str, JaggedTensor | Padded]:
        """The rows of each feature by its name: a JaggedTensor of values [ids, dim], or `Padded` if it is padded.

        features: a KeyedJaggedTensor, or TorchRec's, with any other keys and in any order; or a dict of JaggedTensors,
        which a graph needs for features that are not padded: else it raises GraphError. KeyError for a missing
        feature; InputError, StoreError as a lookup.
        """
        result: dict[str, JaggedTensor | Padded] = {}
        with self.raise_on_all_ranks():
            for name, embedding, table, given in self._lookups(features):
                rows = embedding(given.ids, table)
                if given.mask is not None:
                    result[name] = Padded(rows, given.mask)
                else:
                    result[name] = JaggedTensor(rows, given.ids if self._need_indices else None, offsets=given.offsets)
        return result

    def need_indices(self) -> bool:
        """Whether jagged results have ids as their weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """The dim of the tables. InputError if they differ; -1 if there are none."""
        dims = {config.embedding_dim for config in self.configs}
        if len(dims) > 1:
            raise InputError(f"embedding_dim of {self.name!r}: tables have {sorted(dims)}; read it of a config")
        return dims.pop() if dims else -1

    def embedding_names_by_table(self) -> list[list[str]]:
        """The names of each table's features in a result."""
        return [list(names) for names in self._names]

    def _lookups_of(self, features: Any) -> Iterator[tuple[MultiTableEmbedding, Lookup]]:
        for _, embedding, table, given in self._lookups(features):
            yield embedding, check_lookup(embedding.spec, given.ids, table)

    def _lookups(self, features: Any) -> Iterator[tuple[str, MultiTableEmbedding, int, _Ids]]:
        """The name of each result, its embedding, the number of its table there, and its ids."""
        batch: Any = features if isinstance(features, Mapping) else features_of(features)
        numbers_of(self._features, list(batch.keys()))  # raises for a missing feature
        if isinstance(batch, Mapping):
            batch = {feature: jagged_of(batch[feature]) for feature in self._features}
        for one in batch.values() if isinstance(batch, dict) else [batch]:
            one.check_bags()
        ids = {feature: self._ids(batch, feature) for feature in self._features}
        for config, names in zip(self.configs, self._names, strict=True):
            embedding, table = self.embedding_of(config.name), self.table_location(config.name)[1]
            for feature, name in zip(config.feature_names, names, strict=True):
                yield name, embedding, table, ids[feature]

    def _ids(self, batch: dict[str, JaggedTensor] | KeyedJaggedTensor, feature: str) -> _Ids:
        length = self._padded.get(feature)
        if length is None or isinstance(batch, dict) or batch.variable_stride_per_key():
            jagged = batch[feature]
            values, offsets = jagged.values(), jagged.offsets()
        else:  # does not split values by key, which a graph could not trace
            first = batch.keys().index(feature) * batch.stride()
            values, offsets = batch.values(), batch.offsets()[first : first + batch.stride() + 1]
        ids = self.ids_of(values)
        if length is None:
            return _Ids(ids, offsets, None)
        signed = ids.view(torch.int64) if ids.dtype == torch.uint64 else ids  # torch has no ops on uint64
        return _Ids(padded(signed, offsets, length, PADDING_ID).view(ids.dtype), offsets, is_value(offsets, length))


class _Ids(NamedTuple):
    """The ids of a feature: jagged [n], or padded [batch, length] with a mask of the positions that have one."""

    ids: Tensor
    offsets: Tensor
    mask: Tensor | None
