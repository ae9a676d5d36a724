"""Named tables in embeddings: what collections and the table-batched embedding share."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, cast
from zlib import crc32

import torch
from torch import Tensor, nn

from ...embedding.modules.dense_rows import dense_rows, dense_states, dense_tensors, put_in_state
from ...embedding.modules.embedding import MultiTableEmbedding
from ...embedding.optim.eager import follow_in_backward
from ...embedding.state_dict.model_snapshots import ModelSnapshots
from ...embedding.state_dict.read_only import ReadOnlyCopy
from ...embedding.tables.rows_in_tensors import RowTensors
from ...embedding.tables.training_group import train_together
from ...engine.checks import checked_arguments
from ...engine.errors import InputError, OptionError
from ...engine.ops.rows_contract import NoTorchScript
from ...engine.options.lookup import DEVICES, Lookup
from ...engine.options.store_options import StoreOptions, make_device_mem_store_options
from ...engine.options.table_names import choices, names_in, table_number
from ...engine.options.table_spec import DTYPES, check_state_dtype
from ...snapshots.store.folder_state import FolderState
from ..tensors.validation import is_empty
from .configs import EmbeddingConfig, config_of
from .store_split import StoreRequest, stores_of, stores_text

log = logging.getLogger("tierbed")


T = TypeVar("T", bound=EmbeddingConfig)


def embedding_name(module: str, table: EmbeddingConfig, dtype: torch.dtype) -> str:
    """The name of the embedding that has a table, if its rows are of `dtype`."""
    width = "" if dtype == torch.float32 else f"-{str(dtype).removeprefix('torch.')}"
    return f"{module}-d{table.embedding_dim}{width}{f'-{table.group}' if table.group else ''}"


def group_tables(module: str, tables: Iterable[T]) -> dict[str, list[T]]:
    """The tables of each embedding, by its name."""
    groups: dict[str, list[T]] = {}
    for table in tables:
        groups.setdefault(embedding_name(module, table, table.dtype), []).append(table)
    return groups


def store_requests(groups: Mapping[str, Sequence[EmbeddingConfig]]) -> dict[str, StoreRequest]:
    """What each embedding requests of the store that they share."""
    requests = {}
    for group, tables in groups.items():
        rows = [table.num_embeddings for table in tables if table.num_embeddings is not None]
        count = sum(rows) if len(rows) == len(tables) else None
        requests[group] = StoreRequest(tables[0].embedding_dim, count, tables[0].dtype.itemsize)
    return requests


class TableView(NamedTuple):
    """One table of a collection, as TorchRec's `embedding_bags[name]` and `embeddings[name]` show it."""

    name: str
    num_embeddings: int | None  # None: any id
    embedding_dim: int
    dtype: torch.dtype  # of stored rows
    embedding: MultiTableEmbedding
    group: str  # the name of the embedding in `embeddings`
    number: int  # of the table in the embedding

    @property
    def weight(self) -> Tensor:
        """The rows [num_embeddings, dim], copied: an in-place write into them raises InputError. On meta no rows.

        InputError for a table that takes any id.
        """
        embedding, number, rows = self.dense()
        name, device = self.name, embedding.device
        if device.type == "meta":
            return torch.empty(rows, self.embedding_dim, dtype=self.dtype, device=device)
        remedy = (
            f"weight of table {name!r} is a copy, so a write into it changes no stored row; call embedding_of({name!r})"
            f".put(torch.arange({rows}), rows, {name!r}) or load_dense, or clone() it for a tensor of your own"
        )
        return ReadOnlyCopy(dense_rows(embedding, number, rows, self.dtype), remedy)

    def dense(self) -> tuple[MultiTableEmbedding, int, int]:
        """The table's embedding, its number there, and how many rows it has as a dense table. InputError."""
        if self.num_embeddings is None:
            raise InputError(
                f"table {self.name!r} takes any id, so it is no dense tensor; make it with num_embeddings, or "
                "use save_snapshot or chunks()"
            )
        return self.embedding, self.number, self.num_embeddings


class Embeddings(nn.ModuleDict):
    """The embeddings of a collection by their names. As in TorchRec, a table's name gives the table."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, TableView] = {}

    def __getitem__(self, name: str) -> Any:
        return self._modules[name] if name in self._modules else self.tables[name]


class TableModule(NoTorchScript, ModelSnapshots, nn.Module):
    """A module of named tables, each in one of its `embeddings`."""

    _default_name: str  # of one that was made without a name

    def __init__(self, name: str | None, tables: Sequence[str]) -> None:
        super().__init__()
        self.name, self._is_named = name or self._default_name, name is not None
        self.embeddings = Embeddings()
        self._tables = list(tables)
        self._shared: list[str] = []  # the embeddings of another collection

    def _make_embeddings(
        self,
        groups: Mapping[str, Sequence[EmbeddingConfig]],
        stores: Mapping[str, StoreOptions],
        seed: int,
        key_type: torch.dtype = torch.int64,
        **options: Any,
    ) -> None:
        """Make the embedding of each group, and let all of them be trained together. options: of each embedding."""
        for group, tables in groups.items():
            first = tables[0]
            if "." in group:
                raise OptionError(f"name={self.name!r}: it names modules; use no dots")
            if group in self.embeddings:
                raise OptionError(f"name={self.name!r}: share has an embedding {group!r} too; give another name")
            self._warn_of_other_dtypes(group, tables, stores[group], {*groups, *self._shared})
            self.embeddings[group] = MultiTableEmbedding(
                group,
                first.embedding_dim,
                first.dtype,
                key_type,
                [table.table_options() for table in tables],
                stores[group],
                # with one seed for all, the same key would have the same initial row in several embeddings
                seed=(seed + crc32(self._seed_name(group, tables).encode())) % 2**63,
                **options,
            )
            embedding = self.embedding(group)
            embedding.set_spec(has_own_seed=False)  # stored rows may be of an earlier formula
            if not self._is_named and stores[group].persistent_path is None:
                embedding.naming = "default"
            for number, table in enumerate(tables):
                self._add(table, group, number)
        train_together(self.embeddings[group] for group in groups)

    def _add(self, table: EmbeddingConfig, group: str, number: int) -> None:
        """Add a table, which has this number in an embedding of `embeddings`."""
        size = table.num_embeddings, table.embedding_dim, table.dtype
        self.embeddings.tables[table.name] = TableView(table.name, *size, self.embedding(group), group, number)

    def _seed_name(self, group: str, tables: Sequence[EmbeddingConfig]) -> str:
        """The text that an embedding's initial rows depend on."""
        return "\n".join([group, *(table.name for table in tables)])

    def _warn_of_other_dtypes(
        self, group: str, tables: Sequence[EmbeddingConfig], options: StoreOptions, used: set[str]
    ) -> None:
        """Log that an embedding starts empty, if only rows of another dtype are stored for its tables."""
        if options.persistent_path is None or options.open == "fresh":
            return
        path = Path(options.persistent_path)
        if (path / group).exists():
            return
        for other in {embedding_name(self.name, tables[0], dtype) for dtype in DTYPES} - used:
            if (path / other).exists() and _may_have(path / other, {table.name for table in tables}):
                log.warning(
                    "embedding %r starts empty, and %s has rows of another dtype: to keep them, copy a snapshot of "
                    "them to %s, and load it by embedding_of(table).load_snapshot(name, convert=True)",
                    group,
                    path / other,
                    path / group / "snapshots",
                )

    def _snapshot_embeddings(self) -> list[Any]:
        return [self.embedding(group) for group in self.embeddings if group not in self._shared]

    def each(self) -> Iterator[MultiTableEmbedding]:
        """The embeddings, those of shared tables too."""
        return iter(cast(Iterable[MultiTableEmbedding], self.embeddings.values()))

    def embedding(self, name: str) -> MultiTableEmbedding:
        """The embedding of this name."""
        return cast(MultiTableEmbedding, self.embeddings[name])

    def raise_on_all_ranks(self) -> AbstractContextManager[None]:
        """A block of a call that all ranks make: an exception on one rank is raised on every rank."""
        return next((embedding.raise_on_all_ranks() for embedding in self.each()), nullcontext())

    def embedding_of(self, table: int | str) -> MultiTableEmbedding:
        """The embedding that has a table, by the table's name or number: for put, get, snapshots and optimizers.

        InputError.
        """
        return self.embedding(self.table_location(table)[0])

    def table_location(self, table: int | str) -> tuple[str, int]:
        """The name of a table's embedding, and the table's number in it. InputError."""
        number = table_number(table, self._tables)
        if number is None:
            raise InputError(f"table of {self.name!r}: got {table!r}; give one of {choices(self._tables)}")
        view = self.embeddings.tables[self._tables[number]]
        return view.group, view.number

    def _dense_states(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's states of each table, as `dense_states` has them. InputError, StoreError."""
        places = {name: self.embeddings.tables[name].dense() for name in self._tables}
        states = {
            one: dense_states(one, {number: rows for embedding, number, rows in places.values() if embedding is one})
            for one in self.each()
        }
        return {name: states[embedding][number] for name, (embedding, number, _) in places.items()}

    def _load_rows(self, weights: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Any]], step: Any) -> None:
        """As `load_dense` of each embedding, by the names of tables. All are checked before one changes."""
        loads = []
        for embedding in self.each():
            own = [name for name in self._tables if self.embedding_of(name) is embedding]
            rows = {name: weights[name] for name in own}
            of_tables = {name: states[name] for name in own if name in states}
            with embedding.raise_on_all_ranks():
                loads.append((embedding, dense_tensors(embedding, rows, of_tables, step)))
        for embedding, tensors in loads:
            embedding.load_tensors(tensors)

    def stores(self) -> None:
        """Print how the store is divided between the embeddings."""
        print(stores_text({embedding.name: embedding.store_options for embedding in self.each()}))

    def close(self) -> None:
        """Flush and close the stores of its embeddings, but those that it shares. May be called again.

        A later lookup raises ClosedError.
        """
        with ExitStack() as stack:  # closes all, also if one of them raises
            for embedding in self._snapshot_embeddings():
                stack.callback(embedding.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TableCollection(TableModule):
    """Tables of configs, in an embedding for each dim, data_type and group.

    tables, store_options, name, key_type, seed, share, device: as of a collection. options: of each embedding.
    """

    _kind: str  # begins the names of TorchRec's parameters

    def __init__(
        self,
        tables: Sequence[Any],
        kind: type[EmbeddingConfig],
        store_options: Mapping[str, Any] | None,
        name: str | None,
        key_type: torch.dtype,
        seed: int,
        share: TableCollection | None,
        device: torch.device | str | None,
        **options: Any,
    ) -> None:
        if not isinstance(tables, (list, tuple)):
            raise OptionError(f"tables={tables!r}: give a list of {kind.__name__}")
        if share is not None and not isinstance(share, TableCollection):
            raise OptionError(f"share={type(share).__name__}: give a collection")
        configs = [config_of(table, kind) for table in tables]
        names = [config.name for config in configs]
        if repeated := next((one for one in names if names.count(one) > 1), None):
            raise OptionError(f"tables: {names.count(repeated)} have name={repeated!r}; give each its own name")
        super().__init__(name, names)
        self.configs, self.key_type, self._original_configs = configs, key_type, list(tables)
        for config in configs:
            if share is not None and config.name in share.embeddings.tables:
                self._adopt_shared(share, config, options["output_dtype"], options["state_dtype"])
        own = [config for config in configs if config.name not in self.embeddings.tables]
        if own:
            groups = group_tables(self.name, own)
            store = make_device_mem_store_options() if store_options is None else store_options
            stores = stores_of(store, store_requests(groups))
            self._make_embeddings(groups, stores, seed, key_type, **options)
        elif store_options is not None and configs:
            raise OptionError("store_options: share has every table, with its store; leave store_options out")
        views = self.embeddings.tables
        views |= {name: views.pop(name) for name in names}  # in the order of the configs, which state_dict has
        if device is not None:
            self._move_to(device)

    @property
    def device(self) -> torch.device:
        """Where lookups run; the CPU if there are no tables."""
        return next((embedding.device for embedding in self.each()), torch.device("cpu"))

    def embedding_configs(self) -> list[Any]:
        """The configs of the tables, as they were given."""
        return list(self._original_configs)

    def to_torchrec_state_dict(self) -> dict[str, Tensor]:
        """The tables as `state_dict()` of TorchRec's collection has them, [num_embeddings, dim] of their dtype, copied.

        `load_state_dict` takes such a state as well: then optimizers begin with new state, until
        `load_torchrec_optimizer_state`. InputError for a table that takes any id.
        """
        tables = self.embeddings.tables
        return {name: dense_rows(*tables[one.name].dense(), one.dtype) for name, one in self._weight_names.items()}

    def to_torchrec_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The state of each table as TorchRec's KeyedOptimizer has it: tensors by the names of torch, and `step`.

        [num_embeddings, dim] each, or [num_embeddings, 1] of one number a row. InputError, StoreError.
        """
        found, states = {}, self._dense_states()
        for name, config in self._weight_names.items():
            step = torch.tensor(float(self.embedding_of(config.name).table_handle().local_table.step))
            of_table = {one: state.view(len(state), -1) for one, state in states[config.name].items()}
            found[name] = {"step": step, **of_table}
        return found

    @checked_arguments("state")
    def load_torchrec_optimizer_state(self, state: Mapping[str, Any], step: int | None = None) -> None:
        """Load state as `to_torchrec_optimizer_state`, or `state_dict()` of TorchRec's optimizer, has it.

        The optimizer comes first, then the rows, then their state: give the collection's parameters to it, and load the
        rows. Names may begin with those of modules around the collection. Writes all rows of each table.
        step: as of `load_dense` of an embedding. TorchRec's fused Adam has none in its state: give it here.

        Raises as `load_dense` of an embedding; InputError for a table without state.
        """
        with self.raise_on_all_ranks():
            given = {one.name: _state_of(self._kind, one.name, state.get("state", state)) for one in self.configs}
        states = {}
        for table, of_table in given.items():
            embedding = self.embedding_of(table)
            with embedding.raise_on_all_ranks():
                follow_in_backward(embedding)
                names = embedding.table_handle().local_table.state.names
            states[table] = {_state_name(name, names): one for name, one in of_table.items()}
        self._load_rows({table: dense_rows(*self.embeddings.tables[table].dense()) for table in given}, states, step)

    @property
    def _weight_names(self) -> dict[str, EmbeddingConfig]:
        """The tables by the names of TorchRec's parameters."""
        return {f"{self._kind}.{config.name}.weight": config for config in self.configs}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        _, _, missing, _, errors = rest
        dense = {name: state_dict.pop(prefix + name) for name in self._weight_names if prefix + name in state_dict}
        if dense:
            missing += [prefix + name for name in self._weight_names if name not in dense]
        for group in self.embeddings if dense else ():
            embedding = self.embedding(group)
            tables = {config.name: dense[name] for name, config in self._weight_names.items() if name in dense}
            own = {name: rows for name, rows in tables.items() if self.embedding_of(name) is embedding}
            put_in_state(embedding, own, state_dict, f"{prefix}embeddings.{group}.", errors)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def reset_parameters(self) -> None:
        """Forget all rows and their optimizer state, those of shared tables too. On meta there are none."""
        for embedding in self.each():
            if embedding.device.type != "meta":
                embedding.load_tensors(RowTensors.none(embedding.spec).tensors)

    def _move_to(self, device: torch.device | str) -> None:
        """Let lookups run on a device; on meta they only have shapes. OptionError."""
        try:
            wanted = torch.device(device)
        except (RuntimeError, TypeError):
            wanted = None
        if wanted is None or wanted.type not in (*DEVICES, "meta"):
            raise OptionError(f"device={device!r}: lookups run on 'cpu', 'cuda' or 'meta'; give one of them")
        for group in self._shared:
            embedding = self.embedding(group)
            if embedding.device.type != wanted.type:
                raise OptionError(
                    f"device={device!r}: the shared embedding {embedding.name!r} is on {embedding.device}; give that, "
                    "or move both collections by .to(device)"
                )
        self.to(wanted)

    def prefetch(self, features: Any) -> None:
        """Announce the batch of a future step of a plain loop, as `MultiTableEmbedding.prefetch`.

        A graph announces its batches itself. Bags that samples share are not announced.
        """
        announced: dict[MultiTableEmbedding, list[Lookup]] = {}
        with self.raise_on_all_ranks():
            for embedding, lookup in self._lookups_of(features):
                announced.setdefault(embedding, []).append(lookup)
        for embedding, lookups in announced.items():
            embedding.announce(lookups)

    @abstractmethod
    def _lookups_of(self, features: Any) -> Iterator[tuple[MultiTableEmbedding, Lookup]]:
        """The lookups of a batch, checked."""

    def ids_of(self, values: Tensor) -> Tensor:
        """Ids as `key_type`. InputError for values that are not integers, or wider than `key_type`."""
        if is_empty(values):
            return values.to(self.key_type)
        if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.bool:
            raise InputError(f"values of {self.name!r}: {values.dtype}; give ids of an integer dtype")
        if values.dtype.itemsize > self.key_type.itemsize:
            raise InputError(
                f"values of {self.name!r}: {values.dtype}, and key_type is {self.key_type}, which not every id fits; "
                "make the collection with key_type=torch.int64, or give values.to(torch.int32)"
            )
        return values if values.dtype == self.key_type else values.to(self.key_type)

    def _adopt_shared(
        self, share: TableCollection, config: EmbeddingConfig, output_dtype: torch.dtype, state_dtype: torch.dtype
    ) -> None:
        """Look up a table in the embedding of `share`. OptionError if the two configs of the table differ."""
        theirs = next(one for one in share.configs if one.name == config.name)
        for fact in ("num_embeddings", "embedding_dim", "dtype", "group"):
            if getattr(config, fact) != getattr(theirs, fact):
                raise OptionError(
                    f"table {config.name!r}: {fact}={getattr(config, fact)!r}, and {getattr(theirs, fact)!r} in share, "
                    f"{share.name!r}; give the same, or another name for a separate table"
                )
        if config.table_options() != theirs.table_options():
            raise OptionError(
                f"table {config.name!r}: new rows or bad_ids differ from those in share, {share.name!r}; give the same "
                "initializer, range and bad_ids, or another name for a separate table"
            )
        group, number = share.table_location(config.name)
        embedding = share.embedding(group)
        for option, own, other in (
            ("key_type", self.key_type, share.key_type),
            ("output_dtype", output_dtype, embedding.output_dtype),
            ("state_dtype", f"torch.{check_state_dtype(state_dtype)}", f"torch.{embedding.spec.state_dtype}"),
        ):
            if own != other:
                raise OptionError(f"{option}={own}: the tables of share keep {option}={other}; give that")
        if group not in self._shared:
            self._shared.append(group)
            self.embeddings[group] = embedding
        self._add(config, group, number)


def _may_have(folder: Path, tables: set[str]) -> bool:
    """Whether a store's live rows may be of one of the tables. It is not known without a clean marker, or of names."""
    marker = FolderState(folder).clean_marker
    names = () if marker is None or "tables" not in marker else names_in(marker)
    return not names or None in names or not tables.isdisjoint(names)


def _state_of(kind: str, table: str, given: Mapping[Any, Any]) -> dict[str, Any]:
    """A copy of the state that an optimizer of TorchRec has of a table. InputError."""
    ends = f".{kind}.{table}.weight"
    names = [name for name in given if f".{name}".endswith(ends) or name == f"{table}.weight"]
    if len(names) != 1 or not isinstance(given[names[0]], Mapping):
        raise InputError(
            f"state: it has {names or 'none'} of table {table!r}; give one, as {ends[1:]!r}, a dict, among those of "
            f"{', '.join(map(str, given)) or 'no parameter'}"
        )
    return dict(given[names[0]])


def _state_name(theirs: str, names: Sequence[str]) -> str:
    """The name of a state here, by that in TorchRec: FBGEMM's `<table>.momentum_1` is the first one."""
    last = theirs.rpartition(".")[2]
    number = {"momentum1": 0, "momentum_1": 0, "momentum2": 1, "momentum_2": 1}.get(last, len(names))
    return names[number] if number < len(names) else last


def output_names(configs: Sequence[EmbeddingConfig]) -> list[list[str]]:
    """For each table the names of its features in a result: feature@table if two tables have the feature.

    OptionError if two names are the same.
    """
    every = [feature for config in configs for feature in config.feature_names]
    names = [
        [f"{feature}@{config.name}" if every.count(feature) > 1 else feature for feature in config.feature_names]
        for config in configs
    ]
    flat = [name for of_table in names for name in of_table]
    for name in flat:
        if flat.count(name) > 1:
            raise OptionError(f"feature_names: two results would be called {name!r}; give the feature another name")
    return names


def numbers_of(features: Iterable[str], keys: Sequence[str]) -> list[int]:
    """The positions of features among the keys of a batch. KeyError for a feature that is missing."""
    at = {key: number for number, key in enumerate(keys)}
    for feature in features:
        if feature not in at:
            raise KeyError(f"feature {feature!r} is not in the batch, whose keys are {', '.join(keys)}")
    return [at[feature] for feature in features]
