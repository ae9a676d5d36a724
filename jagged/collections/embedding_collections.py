"""`EmbeddingBagCollection`: features of a batch in, one pooled row for each sample and feature out.

`EmbeddingCollection`: features of a batch in, the row of each id out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...distributed.world import World
from ...embedding.embedding import MultiTableEmbedding
from ...engine.checks import as_int
from ...engine.errors import InputError, OptionError
from ...engine.options.lookup import Lookup, check_lookup
from ..tensors.jagged_tensor import JaggedTensor, is_value, padded
from ..tensors.keyed_jagged_tensor import KeyedJagged, KeyedJaggedTensor, VariableBatchKeyedJaggedTensor
from ..tensors.keyed_tensor import KeyedTensor
from ..tensors.validation import refuse_trace
from .configs import EmbeddingBagConfig, EmbeddingConfig
from .tables import TableCollection, numbers_of, output_names, refuse_device

PADDING_ID = -1  # of a collection that pads; no row


@dataclass
class _Part:
    """A lookup of one embedding, whose columns are in the order of the result."""

    embedding: str
    pooling: str
    dim: int
    features: list[str] = field(default_factory=list)  # each once, as a lookup takes them
    tables: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)  # how many columns follow each other in the result


class EmbeddingBagCollection(TableCollection):
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
        share: TableCollection | None = None,
        device: None = None,
        world: World | None = None,
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


class Padded(NamedTuple):
    """A feature with as many places in each sample."""

    values: Tensor  # [batch, places, dim]: the rows of the first ids of each sample, then zeros
    mask: Tensor  # [batch, places] bool: which places have an id


class EmbeddingCollection(TableCollection):
    """TorchRec's collection of tables whose rows are not pooled, over tiered hashed tables. Tables may differ in dim.

    tables: an EmbeddingConfig, or TorchRec's, for each. need_indices: whether jagged results have ids as their weights.
    padded: {feature: places} of features whose rows are wanted as one dense tensor; ids are padded before the lookup,
    and those beyond `places` are left out. A collection that pads takes the id -1 (2**64 - 1 as uint64) for padding
    everywhere. The other arguments are those of an EmbeddingBagCollection. Raises OptionError.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        store_options: Mapping[str, Any] | None = None,
        name: str = "ec",
        need_indices: bool = False,
        key_type: torch.dtype = torch.int64,
        seed: int = 0,
        output_dtype: torch.dtype = torch.float32,
        share: TableCollection | None = None,
        padded: Mapping[str, int] | None = None,
        device: None = None,
        world: World | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        refuse_device(device)
        if padded is not None and not isinstance(padded, Mapping):
            raise OptionError(f"padded={padded!r}: give {{feature: places}}")
        self._padded = dict(padded or {})
        padding = (2**64 - 1 if key_type == torch.uint64 else PADDING_ID) if self._padded else None
        super().__init__(
            tables, EmbeddingConfig, store_options, name, key_type, seed, output_dtype, share, padding, world,
            state_dtype,
        )  # fmt: skip
        self.need_indices = need_indices
        self._names = output_names(self.configs)
        features = {feature for config in self.configs for feature in config.feature_names}
        for feature, places in self._padded.items():
            if feature not in features:
                raise OptionError(f"padded[{feature!r}]: no table has that feature; give one of {sorted(features)}")
            if as_int(places, 1) is None:
                raise OptionError(f"padded[{feature!r}]={places!r}: give how many places each sample has, 1 or more")
        if share is not None:
            self._check_padding(padding)

    def forward(self, features: Any) -> dict[str, JaggedTensor | Padded]:
        """The rows of each feature by its name: a JaggedTensor of values [ids, dim], or `Padded` where it is padded.

        features: a KeyedJaggedTensor, or TorchRec's, with more keys and in any order; or a dict of JaggedTensors,
        which in a graph is the way to have features apart. KeyError for a feature that is missing; InputError,
        StoreError as a lookup; GraphError in a graph for a feature of a KeyedJaggedTensor that is not padded.
        """
        result: dict[str, JaggedTensor | Padded] = {}
        with self.told():
            for name, embedding, table, given in self._lookups(features):
                rows = embedding(given.ids, table)
                if given.mask is not None:
                    result[name] = Padded(rows, given.mask)
                else:
                    result[name] = JaggedTensor(rows, given.ids if self.need_indices else None, offsets=given.offsets)
        return result

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The config of each table, as models of TorchRec ask for them."""
        return list(self.configs)

    def prefetch(self, features: Any) -> None:
        """Announce the batch of a coming step of a plain loop, as `MultiTableEmbedding.prefetch`.

        A graph announces its batches itself.
        """
        announced: dict[MultiTableEmbedding, list[Lookup]] = {}
        with self.told():
            for _, embedding, table, given in self._lookups(features):
                announced.setdefault(embedding, []).append(check_lookup(embedding.spec, given.ids, table))
        for embedding, lookups in announced.items():
            embedding.announce(lookups)

    def _lookups(self, features: Any) -> Iterator[tuple[str, MultiTableEmbedding, int, _Ids]]:
        """Each result's name, its embedding, the number of its table there, and its ids."""
        batch = dict(features) if isinstance(features, Mapping) else features_of(features)
        wanted = {feature for config in self.configs for feature in config.feature_names}
        numbers_of(sorted(wanted), [*batch] if isinstance(batch, dict) else batch.keys())
        apart = self._apart(batch, wanted)
        for config, names in zip(self.configs, self._names, strict=True):
            embedding, table = self.embedding_of(config.name), self.place_of(config.name)[1]
            for feature, name in zip(config.feature_names, names, strict=True):
                yield name, embedding, table, apart[feature]

    def _apart(self, batch: dict[str, Any] | KeyedJagged, wanted: set[str]) -> dict[str, _Ids]:
        """The ids of each wanted feature."""
        plain, dense = wanted - self._padded.keys(), wanted & self._padded.keys()
        if isinstance(batch, KeyedJagged) and batch.variable_stride_per_key():
            batch = {feature: batch[feature] for feature in wanted}
        if isinstance(batch, dict):
            jagged = {feature: jagged_of(batch[feature]) for feature in wanted}
            for one in jagged.values():
                one.check_bags()
            parts = {feature: (jagged[feature].values(), jagged[feature].offsets()) for feature in dense}
        else:
            batch.check_bags()
            jagged = {feature: batch[feature] for feature in plain}
            samples, keys = batch.stride(), batch.keys()
            firsts = {feature: keys.index(feature) * samples for feature in dense}
            parts = {
                feature: (batch.values(), batch.offsets()[first : first + samples + 1])
                for feature, first in firsts.items()
            }
        found = {
            feature: _Ids(self.ids_of(jagged[feature].values()), jagged[feature].offsets(), None) for feature in plain
        }
        for feature, (values, offsets) in parts.items():
            places = self._padded[feature]
            ids = self.ids_of(values)
            signed = ids.view(torch.int64) if ids.dtype == torch.uint64 else ids  # torch has no ops on uint64
            dense_ids = padded(signed, offsets, places, PADDING_ID).view(ids.dtype)
            found[feature] = _Ids(dense_ids, offsets, is_value(offsets, places))
        return found

    def _check_padding(self, padding: int | None) -> None:
        for config in self.configs:
            if padding is not None and self.embedding_of(config.name).spec.padding_idx != padding:
                raise OptionError(
                    f"padded={self._padded}: the shared table {config.name!r} does not take {padding} for padding, "
                    "which its embedding is made with; make this collection first, with store_options, and give it to "
                    "the other one as share"
                )


class _Ids(NamedTuple):
    """The ids of a feature: jagged [n], or padded [batch, places] with a mask of the places that have one."""

    ids: Tensor
    offsets: Tensor
    mask: Tensor | None
