"""The tables of a collection: which embedding has each, and their stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self
from zlib import crc32

import torch
from torch import Tensor, nn

from ...distributed.world import World
from ...embedding.embedding import MultiTableEmbedding
from ...embedding.model_snapshots import ModelSnapshots
from ...embedding.saved_rows import SavedRows
from ...embedding.training_group import train_together
from ...engine.errors import InputError, OptionError
from ...engine.options.store_options import StoreOptions
from ...engine.options.table_spec import check_state_dtype
from .configs import EmbeddingConfig, config_of, suffix_of
from .other_types import warn_of_other_types
from .store_split import StoreRequest, stores_of, stores_text


class TableCollection(ModelSnapshots, nn.Module):
    """Tables in embeddings, one for each dim and group: `<name>-d<dim>`, and `-<group>` after it where there is one.

    tables, store_options, name, key_type, seed, output_dtype, share, world, state_dtype: as of a collection.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        kind: type[EmbeddingConfig],
        store_options: Mapping[str, Any] | None,
        name: str,
        key_type: torch.dtype,
        seed: int,
        output_dtype: torch.dtype,
        share: TableCollection | None,
        padding_idx: int | None = None,
        world: World | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if not isinstance(tables, (list, tuple)) or not tables:
            raise OptionError(f"tables={tables!r}: give a list of {kind.__name__}")
        self.name, self.key_type = name, key_type
        self.configs = [config_of(table, kind) for table in tables]
        self._check_names()
        self._at: dict[str, tuple[str, int]] = {}  # of each table: its embedding, and its number there
        self.embeddings = nn.ModuleDict()
        self._stores: dict[str, StoreOptions] = {}
        self._shared: list[str] = []  # the embeddings of another collection
        own = [config for config in self.configs if share is None or not share.has(config.name)]
        if share is not None:
            self._take(share, [config for config in self.configs if config not in own], output_dtype, state_dtype)
        if not own:
            if store_options is not None:
                raise OptionError("store_options: share has every table, with its store; leave store_options out")
            return
        if store_options is None:
            names = ", ".join(config.name for config in own)
            raise OptionError(f"store_options=None: nothing says where table {names} is; give store options")
        parts: dict[str, list[EmbeddingConfig]] = {}
        for config in own:
            parts.setdefault(_embedding_name(name, config, config.dtype), []).append(config)
        needs = {
            part: StoreRequest(configs[0].embedding_dim, _rows(configs), configs[0].dtype.itemsize)
            for part, configs in parts.items()
        }
        self._stores = stores_of(store_options, needs)
        for part, configs in parts.items():
            if "." in part or part in self.embeddings:
                raise OptionError(f"name={name!r}: {part!r} is taken or has a dot; give another name, without dots")
            warn_of_other_types(
                partial(_embedding_name, name, configs[0]),
                configs[0].dtype,
                self._stores[part],
                used={*parts, *self._shared},
                tables=[config.name for config in configs],
            )
            self.embeddings[part] = MultiTableEmbedding(
                part,
                configs[0].embedding_dim,
                configs[0].dtype,
                key_type,
                [config.table_options() for config in configs],
                self._stores[part],
                padding_idx=padding_idx,
                # rows of one seed, table and key begin alike in all embeddings
                seed=(seed + crc32(part.encode())) % 2**63,
                output_dtype=output_dtype,
                world=world,
                state_dtype=state_dtype,
            )
            self._at |= {config.name: (part, number) for number, config in enumerate(configs)}
        train_together(self.embeddings[part] for part in parts)

    def _snapshot_embeddings(self) -> list[SavedRows]:
        return [embedding for name, embedding in self.embeddings.items() if name not in self._shared]  # type: ignore[misc]

    def told(self) -> AbstractContextManager[None]:
        """A block of a call of all ranks: what it raises on one of them is raised on all."""
        embedding: Any = next(iter(self.embeddings.values()))
        block: AbstractContextManager[None] = embedding.raise_on_all_ranks()
        return block

    def has(self, table: str) -> bool:
        """Whether there is a table of this name."""
        return table in self._at

    def embedding_of(self, table: str) -> MultiTableEmbedding:
        """The embedding that has a table: its `parameters()` are what an optimizer of the table takes. InputError."""
        embedding: Any = self.embeddings[self.place_of(table)[0]]
        return embedding

    def place_of(self, table: str) -> tuple[str, int]:
        """The name of a table's embedding, and the table's number there. InputError."""
        if table not in self._at:
            raise InputError(f"table={table!r}: there is none of that name; give one of {', '.join(self._at)}")
        return self._at[table]

    def stores(self) -> None:
        """Print how the store is divided between the embeddings."""
        print(stores_text(self._stores))

    def ids_of(self, values: Tensor) -> Tensor:
        """Ids as `key_type`. InputError for what is no integer."""
        if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.bool:
            raise InputError(f"values of {self.name!r}: {values.dtype}; give ids of an integer dtype")
        if values.dtype.itemsize > self.key_type.itemsize:
            raise InputError(
                f"values of {self.name!r}: {values.dtype}, and key_type is {self.key_type}, which not every id fits; "
                "make the collection with key_type=torch.int64, or give values.to(torch.int32)"
            )
        return values if values.dtype == self.key_type else values.to(self.key_type)

    def close(self) -> None:
        """Close the stores of its own embeddings, not of those that it shares. May be called again."""
        with ExitStack() as stack:  # an error in one leaves none open
            for name, embedding in self.embeddings.items():
                if name not in self._shared:
                    stack.callback(embedding.close)  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(
        self,
        share: TableCollection,
        configs: Sequence[EmbeddingConfig],
        output_dtype: torch.dtype,
        state_dtype: torch.dtype,
    ) -> None:
        """Look up tables that `share` has there. OptionError where a config says something else than its own."""
        if not isinstance(share, TableCollection):
            raise OptionError(f"share={type(share).__name__}: give a collection")
        if share.key_type != self.key_type:
            raise OptionError(f"key_type={self.key_type}: the tables of share have ids of {share.key_type}; give that")
        theirs = {config.name: config for config in share.configs}
        for config in configs:
            there, (part, number) = theirs[config.name], share.place_of(config.name)
            for fact in ("num_embeddings", "embedding_dim", "dtype", "group"):
                if getattr(config, fact) != getattr(there, fact):
                    raise OptionError(
                        f"table {config.name!r}: {fact}={getattr(config, fact)!r}, and {getattr(there, fact)!r} where "
                        f"it is shared from, {share.name!r}; give the same, or another name for a table of its own"
                    )
            if config.table_options() != there.table_options():
                raise OptionError(
                    f"table {config.name!r}: new rows or bad_ids are not as where it is shared from, {share.name!r}; "
                    "give the same initializer, range and bad_ids, or another name for a table of its own"
                )
            dtype = share.embedding_of(config.name).output_dtype
            if dtype != output_dtype:
                raise OptionError(f"output_dtype={output_dtype}: the tables of share return {dtype}; give that")
            of_state = share.embedding_of(config.name).spec.state_dtype
            if check_state_dtype(state_dtype) != of_state:
                raise OptionError(
                    f"state_dtype={state_dtype}: the tables of share keep state of torch.{of_state}; give that"
                )
            self.embeddings[part] = share.embeddings[part]
            self._shared.append(part)
            self._stores |= {part: share._stores[part]}
            self._at[config.name] = part, number

    def _check_names(self) -> None:
        names = [config.name for config in self.configs]
        for name in names:
            if names.count(name) > 1:
                raise OptionError(f"tables: {names.count(name)} are called {name!r}; give each a name of its own")


def refuse_device(device: Any) -> None:
    """OptionError for TorchRec's argument of a collection that says where its tables are."""
    if device is not None:
        raise OptionError(
            f"device={device!r}: store_options say where rows are, and .to(device) where lookups run; leave it out"
        )


def _embedding_name(name: str, config: EmbeddingConfig, dtype: torch.dtype) -> str:
    """What a collection calls the embedding of a table, if its rows are of `dtype`."""
    group = f"-{config.group}" if config.group else ""
    return f"{name}-d{config.embedding_dim}{suffix_of(dtype)}{group}"


def _rows(configs: Sequence[EmbeddingConfig]) -> int | None:
    """How many rows tables may have, together; None where one may have any number."""
    rows = [config.num_embeddings for config in configs]
    return None if None in rows else sum(count for count in rows if count is not None)


def output_names(configs: Sequence[EmbeddingConfig]) -> list[list[str]]:
    """What the features of each table are called in a result: feature@table, where two tables have the feature.

    OptionError where two are called alike.
    """
    every = [feature for config in configs for feature in config.feature_names]
    made = [
        [f"{feature}@{config.name}" if every.count(feature) > 1 else feature for feature in config.feature_names]
        for config in configs
    ]
    flat = [name for names in made for name in names]
    for name in flat:
        if flat.count(name) > 1:
            raise OptionError(f"feature_names: two results would be called {name!r}; give the feature another name")
    return made


def numbers_of(features: Sequence[str], keys: Sequence[str]) -> list[int]:
    """Where features are among the keys of a batch. KeyError for one that is not there."""
    at = {key: number for number, key in enumerate(keys)}
    for feature in features:
        if feature not in at:
            raise KeyError(f"feature {feature!r} is not in the batch, whose keys are {', '.join(keys)}")
    return [at[feature] for feature in features]
