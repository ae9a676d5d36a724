"""`EmbeddingCollection`: features of a batch in, the row of each id out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...embedding.embedding import MultiTableEmbedding
from ...embedding.handle_contract import Ranks
from ...engine.errors import OptionError
from ...engine.numeric import whole
from ...engine.options.inputs import Lookup, check_lookup
from ..tensors.jagged_tensor import JaggedTensor
from ..tensors.keyed_jagged import KeyedJagged
from ..tensors.padding import is_value, padded
from .bag_collection import features_of, jagged_of
from .configs import EmbeddingConfig
from .tables import Tables, numbers_of, output_names, refuse_device

PADDING_ID = -1  # of a collection that pads; no row


class Padded(NamedTuple):
    """A feature with as many places in each sample."""

    values: Tensor  # [batch, places, dim]: the rows of the first ids of each sample, then zeros
    mask: Tensor  # [batch, places] bool: which places have an id


class EmbeddingCollection(Tables):
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
        share: Tables | None = None,
        padded: Mapping[str, int] | None = None,
        device: None = None,
        world: Ranks | None = None,
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
            if whole(places, 1) is None:
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
