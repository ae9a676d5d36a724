"""Base classes for modules of named tables: `TableModule`, and `TableCollection` for TorchRec's collections."""

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

from ...embedding.modules.dense_rows import add_rows_to_state, convert_dense, copy_rows, copy_states
from ...embedding.modules.embedding import MultiTableEmbedding
from ...embedding.optim.eager import follow_in_backward
from ...embedding.state_dict.model_snapshots import ModelSnapshots
from ...embedding.state_dict.read_only import ReadOnlyCopy
from ...embedding.tables.row_tensors import RowTensors
from ...embedding.tables.training_group import train_together
from ...engine.checks import validate_arguments
from ...engine.errors import InputError, OptionError
from ...engine.ops.embedding_base import Unscriptable
from ...engine.options.lookup import DEVICES, Lookup
from ...engine.options.store_options import StoreOptions, make_device_mem_store_options
from ...engine.options.table_names import find_table, format_choices, read_table_names
from ...engine.options.table_spec import DTYPES, check_state_dtype
from ...snapshots.store.folder_state import FolderState
from ..tensors.validation import is_empty
from .configs import EmbeddingConfig, as_config
from .store_split import EmbeddingSize, assign_stores, format_stores

log = logging.getLogger("tierbed")
T = TypeVar("T", bound=EmbeddingConfig)


def make_embedding_name(module_name: str, table: EmbeddingConfig, dtype: torch.dtype) -> str:
    """Return the embedding name for a table whose rows have this dtype."""
    width = "" if dtype == torch.float32 else f"-{str(dtype).removeprefix('torch.')}"
    return f"{module_name}-d{table.embedding_dim}{width}{f'-{table.group}' if table.group else ''}"


def group_tables(module_name: str, tables: Iterable[T]) -> dict[str, list[T]]:
    """Return {embedding name: its tables}."""
    table_groups: dict[str, list[T]] = {}
    for table in tables:
        table_groups.setdefault(make_embedding_name(module_name, table, table.dtype), []).append(table)
    return table_groups


def collect_embedding_sizes(table_groups: Mapping[str, Sequence[EmbeddingConfig]]) -> dict[str, EmbeddingSize]:
    """Return {embedding name: EmbeddingSize} for the store that the embeddings share."""
    sizes = {}
    for name, tables in table_groups.items():
        row_counts = [table.num_embeddings for table in tables if table.num_embeddings is not None]
        num_rows = sum(row_counts) if len(row_counts) == len(tables) else None
        sizes[name] = EmbeddingSize(tables[0].embedding_dim, num_rows, tables[0].dtype.itemsize)
    return sizes


class TableView(NamedTuple):
    """One table of a collection, like TorchRec's `embedding_bags[name]` and `embeddings[name]`."""

    name: str
    num_embeddings: int | None  # None: any id
    embedding_dim: int
    dtype: torch.dtype  # of stored rows
    embedding: MultiTableEmbedding
    embedding_name: str  # the embedding's key in the module's `embeddings`
    table_id: int  # index of the table in the embedding

    @property
    def weight(self) -> Tensor:
        """A copy of the rows [num_embeddings, dim]. In-place writes raise InputError. On meta, only the shape is real.

        Raises InputError if num_embeddings is None.
        """
        embedding, table_id, num_rows = self.locate_rows()
        if embedding.device.type == "meta":
            return torch.empty(num_rows, self.embedding_dim, dtype=self.dtype, device="meta")
        name = repr(self.name)
        remedy = (
            f"weight of table {name} is a copy, so a write into it changes no stored row; call embedding_of({name})"
            f".put(torch.arange({num_rows}), rows, {name}) or load_dense, or clone() it for a tensor of your own"
        )
        return ReadOnlyCopy(copy_rows(embedding, table_id, num_rows, self.dtype), remedy)

    def locate_rows(self) -> tuple[MultiTableEmbedding, int, int]:
        """Return (embedding, table number, number of rows). Raises InputError if num_embeddings is None."""
        if self.num_embeddings is None:
            remedy = "make it with num_embeddings, or use save_snapshot or chunks()"
            raise InputError(f"table {self.name!r} takes any id, so its rows do not form a dense tensor; {remedy}")
        return self.embedding, self.table_id, self.num_embeddings


class EmbeddingDict(nn.ModuleDict):
    """A collection's embeddings by name. As in TorchRec, `embeddings[table name]` returns the table."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, TableView] = {}

    def __getitem__(self, name: str) -> Any:
        return self._modules[name] if name in self._modules else self.tables[name]


class TableModule(Unscriptable, ModelSnapshots, nn.Module):
    """A module of named tables, each held by one of its `embeddings`."""

    _default_name: str  # used if name=None

    def __init__(self, name: str | None, tables: Sequence[str]) -> None:
        super().__init__()
        self.name, self._is_named = name or self._default_name, name is not None
        self.embeddings = EmbeddingDict()
        self._table_names = list(tables)
        self._shared_names: list[str] = []  # names of embeddings that belong to another collection

    def _make_embeddings(
        self,
        table_groups: Mapping[str, Sequence[EmbeddingConfig]],
        stores: Mapping[str, StoreOptions],
        seed: int,
        key_type: torch.dtype = torch.int64,
        **options: Any,
    ) -> None:
        """Make one embedding per group of tables. The embeddings form one training group. options: their arguments."""
        for name, tables in table_groups.items():
            if "." in name:
                raise OptionError(f"name={self.name!r}: the name becomes part of module names; use no dots")
            if name in self.embeddings:
                problem = f"the shared collection already has an embedding named {name!r}"
                raise OptionError(f"name={self.name!r}: {problem}; give another name")
            self._warn_of_other_dtypes(name, tables, stores[name], {*table_groups, *self._shared_names})
            # each embedding has its own seed; otherwise a key would get the same initial row in every embedding
            own_seed = (seed + crc32(self._make_seed_text(name, tables).encode())) % 2**63
            row_format = tables[0].embedding_dim, tables[0].dtype, key_type
            table_options = [table.table_options() for table in tables]
            embedding = MultiTableEmbedding(name, *row_format, table_options, stores[name], seed=own_seed, **options)
            self.embeddings[name] = embedding
            embedding.set_spec(has_own_seed=False)  # stored rows keep their seed if tables were added since
            if not self._is_named and stores[name].persistent_path is None:
                embedding.name_source = "default"
            for table_id, table in enumerate(tables):
                self._add_table(table, name, table_id)
        train_together(self.embeddings[name] for name in table_groups)

    def _add_table(self, table: EmbeddingConfig, name: str, table_id: int) -> None:
        """Register a table under its embedding's name and its number in that embedding."""
        fields = table.num_embeddings, table.embedding_dim, table.dtype
        self.embeddings.tables[table.name] = TableView(table.name, *fields, self.embedding(name), name, table_id)

    def _make_seed_text(self, embedding_name: str, tables: Sequence[EmbeddingConfig]) -> str:
        return "\n".join([embedding_name, *(table.name for table in tables)])

    def _warn_of_other_dtypes(
        self, name: str, tables: Sequence[EmbeddingConfig], options: StoreOptions, existing_names: set[str]
    ) -> None:
        """Warn if an embedding starts empty although its tables have stored rows of another dtype."""
        if options.persistent_path is None or options.open == "fresh":
            return
        path = Path(options.persistent_path)
        if (path / name).exists():
            return
        for other_name in {make_embedding_name(self.name, tables[0], dtype) for dtype in DTYPES} - existing_names:
            if (path / other_name).exists() and _can_have_rows(path / other_name, {table.name for table in tables}):
                log.warning(
                    "embedding %r starts empty. Folder %s has rows of the same tables in another dtype. To keep them, "
                    "copy a snapshot from there to %s. Then call embedding_of(table).load_snapshot(name, convert=True)",
                    name, path / other_name, path / name / "snapshots",
                )  # fmt: skip

    def _find_embeddings(self) -> list[Any]:
        return [self.embedding(name) for name in self.embeddings if name not in self._shared_names]

    def each(self) -> Iterator[MultiTableEmbedding]:
        """Iterate over the embeddings, including shared ones."""
        return iter(cast(Iterable[MultiTableEmbedding], self.embeddings.values()))

    def embedding(self, name: str) -> MultiTableEmbedding:
        """Return the embedding of this name."""
        return cast(MultiTableEmbedding, self.embeddings[name])

    def raise_on_all_ranks(self) -> AbstractContextManager[None]:
        """Return a context in which an exception on one rank is raised on every rank. All ranks must enter it."""
        return next((embedding.raise_on_all_ranks() for embedding in self.each()), nullcontext())

    def embedding_of(self, table: int | str) -> MultiTableEmbedding:
        """Return the embedding that holds a table, for put, get, snapshots and optimizers. Raises InputError.

        table: The table's name, or its index among the module's tables.
        """
        return self.embedding(self.table_location(table)[0])

    def table_location(self, table: int | str) -> tuple[str, int]:
        """Return (embedding name, table number in the embedding). Raises InputError."""
        if (index := find_table(table, self._table_names)) is None:
            raise InputError(f"table of {self.name!r}: got {table!r}; give one of {format_choices(self._table_names)}")
        view = self.embeddings.tables[self._table_names[index]]
        return view.embedding_name, view.table_id

    def _dense_states(self) -> dict[str, dict[str, Tensor]]:
        """Return {table name: its optimizer state from `copy_states`}. Raises InputError, StoreError."""
        locations = {name: self.embeddings.tables[name].locate_rows() for name in self._table_names}
        states = {}
        for embedding in self.each():
            row_counts = {table_id: rows for owner, table_id, rows in locations.values() if owner is embedding}
            states[embedding] = copy_states(embedding, row_counts)
        return {name: states[embedding][table_id] for name, (embedding, table_id, _) in locations.items()}

    def _load_rows(self, weights: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Any]], step: Any) -> None:
        """Load rows and states, by table name, as `load_dense` does. Checks all tables before it changes any."""
        loads = []
        for embedding in self.each():
            rows = {name: weights[name] for name in self._table_names if self.embedding_of(name) is embedding}
            own_states = {name: states[name] for name in rows if name in states}
            with embedding.raise_on_all_ranks():
                loads.append((embedding, convert_dense(embedding, rows, own_states, step)))
        for embedding, tensors in loads:
            embedding.load_tensors(tensors)

    def stores(self) -> None:
        """Print how the store is divided between the embeddings."""
        print(format_stores({embedding.name: embedding.store_options for embedding in self.each()}))

    def close(self) -> None:
        """Flush and close the embeddings' stores, except shared ones. Further calls do nothing.

        A later lookup raises ClosedError.
        """
        with ExitStack() as stack:  # if one close raises, the others still run
            for embedding in self._find_embeddings():
                stack.callback(embedding.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TableCollection(TableModule):
    """Base of the collections. Makes an embedding for each combination of dim, data_type and group.

    Arguments are the same as for EmbeddingBagCollection; `options` go to each embedding.
    """

    _parameter_prefix: str  # prefix of TorchRec's parameter names

    def __init__(
        self,
        tables: Sequence[Any],
        config_class: type[EmbeddingConfig],
        store_options: Mapping[str, Any] | None,
        name: str | None,
        key_type: torch.dtype,
        seed: int,
        share: TableCollection | None,
        device: torch.device | str | None,
        **options: Any,
    ) -> None:
        if not isinstance(tables, (list, tuple)):
            raise OptionError(f"tables={tables!r}: give a list of {config_class.__name__}")
        if share is not None and not isinstance(share, TableCollection):
            raise OptionError(f"share={type(share).__name__}: give a collection")
        configs = [as_config(table, config_class) for table in tables]
        table_names = [config.name for config in configs]
        if duplicate := next((name for name in table_names if table_names.count(name) > 1), None):
            raise OptionError(f"tables: {table_names.count(duplicate)} have name={duplicate!r}; give each its own name")
        super().__init__(name, table_names)
        self.configs, self.key_type, self._original_configs = configs, key_type, list(tables)
        for config in configs:
            if share is not None and config.name in share.embeddings.tables:
                self._adopt_shared(share, config, options["output_dtype"], options["state_dtype"])
        new_configs = [config for config in configs if config.name not in self.embeddings.tables]
        if new_configs:
            table_groups = group_tables(self.name, new_configs)
            store = make_device_mem_store_options() if store_options is None else store_options
            stores = assign_stores(store, collect_embedding_sizes(table_groups))
            self._make_embeddings(table_groups, stores, seed, key_type, **options)
        elif store_options is not None and configs:
            raise OptionError("store_options: all tables use the shared collection's store; leave store_options out")
        views = self.embeddings.tables
        views |= {name: views.pop(name) for name in table_names}  # restores the configs' order, for state_dict
        if device is not None:
            self._move_to(device)

    @property
    def device(self) -> torch.device:
        """The device of lookups. Without tables, the CPU."""
        return next((embedding.device for embedding in self.each()), torch.device("cpu"))

    def embedding_configs(self) -> list[Any]:
        """Return the configs that the constructor received."""
        return list(self._original_configs)

    def to_torchrec_state_dict(self) -> dict[str, Tensor]:
        """Return the tables as TorchRec's collection returns them from `state_dict()`.

        `load_state_dict` loads rows and resets optimizer state. `load_torchrec_optimizer_state` loads optimizer state.

        Returns:
            {TorchRec's parameter name: a copy [num_embeddings, dim] of the table in its dtype}.

        Raises:
            InputError: If a table has `num_embeddings=None`.
        """
        views, configs = self.embeddings.tables, self._configs_by_parameter
        return {name: copy_rows(*views[table.name].locate_rows(), table.dtype) for name, table in configs.items()}

    def to_torchrec_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return each table's optimizer state in the form of TorchRec's KeyedOptimizer.

        Returns:
            {TorchRec's parameter name: {torch's state name: tensor, "step": scalar}}. A tensor is
            [num_embeddings, dim], or [num_embeddings, 1] for a state with one number per row.

        Raises:
            InputError: If a table has `num_embeddings=None`.
            StoreError: If ranks share the rows.
        """
        result, states = {}, self._dense_states()
        for name, config in self._configs_by_parameter.items():
            step = torch.tensor(float(self.embedding_of(config.name).table_handle().open_table.step))
            result[name] = {"step": step} | {key: s.view(len(s), -1) for key, s in states[config.name].items()}
        return result

    @validate_arguments("state")
    def load_torchrec_optimizer_state(self, state: Mapping[str, Any], step: int | None = None) -> None:
        """Load optimizer state from `to_torchrec_optimizer_state` or from TorchRec's `optimizer.state_dict()`.

        Call this method last: first make the optimizer, then load the rows. The method writes all rows of each table.

        Args:
            state: The state. Names may have a prefix from enclosing modules.
            step: Number of updates so far, as in `load_dense`. TorchRec's fused Adam does not save it: pass it here.

        Raises:
            InputError: If a table's state is missing; further errors as in `load_dense`.
        """
        with self.raise_on_all_ranks():
            entries, prefix = state.get("state", state), self._parameter_prefix
            state_by_table = {config.name: _find_state(prefix, config.name, entries) for config in self.configs}
        states = {}
        for table, table_state in state_by_table.items():
            embedding = self.embedding_of(table)
            with embedding.raise_on_all_ranks():
                follow_in_backward(embedding)
                state_names = embedding.table_handle().open_table.state.names
            states[table] = {_convert_state_name(name, state_names): tensor for name, tensor in table_state.items()}
        rows = {table: copy_rows(*self.embeddings.tables[table].locate_rows()) for table in state_by_table}
        self._load_rows(rows, states, step)

    @property
    def _configs_by_parameter(self) -> dict[str, EmbeddingConfig]:
        """{TorchRec's parameter name: table config}."""
        return {f"{self._parameter_prefix}.{config.name}.weight": config for config in self.configs}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        configs, (_, _, missing, _, errors) = self._configs_by_parameter, args
        weights = {name: state_dict.pop(prefix + name) for name in configs if prefix + name in state_dict}
        if weights:
            missing += [prefix + name for name in configs if name not in weights]
        rows_by_table = {config.name: weights[name] for name, config in configs.items() if name in weights}
        for name in self.embeddings if weights else ():
            own_rows = {table: rows for table, rows in rows_by_table.items() if self.table_location(table)[0] == name}
            add_rows_to_state(self.embedding(name), own_rows, state_dict, f"{prefix}embeddings.{name}.", errors)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def reset_parameters(self) -> None:
        """Delete the rows and optimizer state of all tables, including shared tables. Does nothing on meta."""
        for embedding in self.each():
            if embedding.device.type != "meta":
                embedding.load_tensors(RowTensors.make_empty(embedding.spec).tensors)

    def _move_to(self, device: torch.device | str) -> None:
        """Move lookups to a device. On meta, lookups compute only shapes. Raises OptionError."""
        try:
            target = torch.device(device)
        except (RuntimeError, TypeError):
            target = None
        if target is None or target.type not in (*DEVICES, "meta"):
            raise OptionError(f"device={device!r}: lookups run on 'cpu', 'cuda' or 'meta'; give one of them")
        for name in self._shared_names:
            embedding = self.embedding(name)
            if embedding.device.type != target.type:
                problem = f"the shared embedding {embedding.name!r} is on {embedding.device}"
                raise OptionError(f"device={device!r}: {problem}; use that device, or move both by .to(device)")
        self.to(target)

    def prefetch(self, features: Any) -> None:
        """Prefetch the rows of a future step's batch, like `MultiTableEmbedding.prefetch`. Use it in a plain loop.

        A graph prefetches by itself. An EmbeddingBagCollection does not prefetch batches with variable batch sizes.
        """
        lookups_by_embedding: dict[MultiTableEmbedding, list[Lookup]] = {}
        with self.raise_on_all_ranks():
            for embedding, lookup in self._make_lookups(features):
                lookups_by_embedding.setdefault(embedding, []).append(lookup)
        for embedding, lookups in lookups_by_embedding.items():
            embedding.announce(lookups)

    @abstractmethod
    def _make_lookups(self, features: Any) -> Iterator[tuple[MultiTableEmbedding, Lookup]]:
        """Yield the checked lookups of a batch, each with its embedding."""

    def convert_ids(self, values: Tensor) -> Tensor:
        """Convert ids to `key_type`. Raises InputError if values are not integers or are wider than `key_type`."""
        if is_empty(values):
            return values.to(self.key_type)
        if values.dtype.is_floating_point or values.dtype.is_complex or values.dtype == torch.bool:
            raise InputError(f"values of {self.name!r}: {values.dtype}; give ids of an integer dtype")
        if values.dtype.itemsize > self.key_type.itemsize:
            problem = f"{values.dtype} is wider than key_type={self.key_type}"
            remedy = "make the collection with key_type=torch.int64, or give values.to(torch.int32)"
            raise InputError(f"values of {self.name!r}: {problem}; {remedy}")
        return values if values.dtype == self.key_type else values.to(self.key_type)

    def _adopt_shared(
        self, share: TableCollection, config: EmbeddingConfig, output_dtype: torch.dtype, state_dtype: torch.dtype
    ) -> None:
        """Use the embedding of `share` for a table. Raises OptionError if the table's two configs differ."""
        shared_config = next(other for other in share.configs if other.name == config.name)
        for field in ("num_embeddings", "embedding_dim", "dtype", "group"):
            own, other = getattr(config, field), getattr(shared_config, field)
            if own != other:
                difference = f"{field}={own!r}, but it is {other!r} in the shared collection {share.name!r}"
                remedy = "give the same value, or rename the table to keep it separate"
                raise OptionError(f"table {config.name!r}: {difference}; {remedy}")
        if config.table_options() != shared_config.table_options():
            raise OptionError(
                f"table {config.name!r}: its initializer, range or bad_ids is different in the shared collection "
                f"{share.name!r}; give the same values, or rename the table to keep it separate"
            )
        embedding_name, table_id = share.table_location(config.name)
        embedding = share.embedding(embedding_name)
        for option, own, other in (
            ("key_type", self.key_type, share.key_type),
            ("output_dtype", output_dtype, embedding.output_dtype),
            ("state_dtype", f"torch.{check_state_dtype(state_dtype)}", f"torch.{embedding.spec.state_dtype}"),
        ):
            if own != other:
                raise OptionError(f"{option}={own}: the shared collection has {option}={other}; give the same value")
        if embedding_name not in self._shared_names:
            self._shared_names.append(embedding_name)
            self.embeddings[embedding_name] = embedding
        self._add_table(config, embedding_name, table_id)


def _can_have_rows(folder: Path, table_names: set[str]) -> bool:
    """True if a store folder may have live rows of these tables. Also True if the folder lists no tables."""
    marker = FolderState(folder).clean_marker
    stored_names = () if marker is None or "tables" not in marker else read_table_names(marker)
    return not stored_names or None in stored_names or not table_names.isdisjoint(stored_names)


def _find_state(prefix: str, table: str, state: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a copy of a table's entry in TorchRec's optimizer state. Raises InputError."""
    suffix = f".{prefix}.{table}.weight"
    parameter_names = [name for name in state if f".{name}".endswith(suffix) or name == f"{table}.weight"]
    if len(parameter_names) != 1 or not isinstance(state[parameter_names[0]], Mapping):
        raise InputError(
            f"state: found {parameter_names or 'no entry'} for table {table!r}; give one dict, named {suffix[1:]!r}. "
            f"The state has entries for {', '.join(map(str, state)) or 'no parameter'}"
        )
    return dict(state[parameter_names[0]])


def _convert_state_name(torchrec_name: str, names: Sequence[str]) -> str:
    """Convert TorchRec's name of a state to tierbed's. FBGEMM's `<table>.momentum_1` is the first of `names`."""
    last = torchrec_name.rpartition(".")[2]
    index = {"momentum1": 0, "momentum_1": 0, "momentum2": 1, "momentum_2": 1}.get(last, len(names))
    return names[index] if index < len(names) else last


def make_output_names(configs: Sequence[EmbeddingConfig]) -> list[list[str]]:
    """Return the feature names of a result, one list per table. Raises OptionError if two names are equal.

    If several tables share a feature, each table's result for it is named `feature@table`.
    """
    features = [feature for config in configs for feature in config.feature_names]
    names_by_table = [
        [f"{feature}@{config.name}" if features.count(feature) > 1 else feature for feature in config.feature_names]
        for config in configs
    ]
    all_names = [name for table_names in names_by_table for name in table_names]
    for name in all_names:
        if all_names.count(name) > 1:
            raise OptionError(f"feature_names: two results would be called {name!r}; give the feature another name")
    return names_by_table


def find_key_indices(features: Iterable[str], keys: Sequence[str]) -> list[int]:
    """Return each feature's index in the batch's keys. Raises KeyError for a missing feature."""
    index_by_key = {key: index for index, key in enumerate(keys)}
    for feature in features:
        if feature not in index_by_key:
            raise KeyError(f"feature {feature!r} is not in the batch, whose keys are {', '.join(keys)}")
    return [index_by_key[feature] for feature in features]
