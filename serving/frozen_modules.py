"""Modules over served rows, with the calls of the trained modules. `freeze` puts them into copies of models.

A trace records a lookup as an op, and op arguments can only be tensors and numbers. So the op finds its rows by a
random number in the buffer `tierbed_rows_id`. In a process that loads an exported program, no rows have this number;
`load_program` reads the buffer `tierbed_rows`, which describes the lookup, and exchanges the numbers.
"""

from __future__ import annotations

import json
import secrets
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..embedding.autograd.lookup_op import is_eager
from ..embedding.modules.embedding import MultiTableMultiColumnEmbedding
from ..embedding.modules.torch_modules import EmbeddingBag
from ..engine.errors import ServingError
from ..engine.ops.batch import flatten_weights, to_keys
from ..engine.ops.embedding_base import EmbeddingBase
from ..engine.options.lookup import Lookup
from ..engine.options.table_spec import DTYPES, KEY_TYPES
from ..jagged.collections.embedding_collections import EmbeddingBagCollection, _PooledLookup, as_features
from ..jagged.collections.tables import find_key_indices
from ..jagged.tensors.keyed_jagged_tensor import KeyedJaggedTensor
from ..jagged.tensors.keyed_tensor import KeyedTensor
from .served import ServedRows, ServedVersion

ROWS_ID, ROWS = "tierbed_rows_id", "tierbed_rows"  # buffers of a frozen embedding
_rows: weakref.WeakValueDictionary[int, ServedRows] = weakref.WeakValueDictionary()

torch.library.define(
    "tierbed::served_lookup",
    "(Tensor rows_id, Tensor ids, Tensor? table_ids, Tensor? offsets, str? pooling, int[]? feature_columns, "
    "Tensor? weights, int dim, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("tierbed::served_lookup", "cpu")
def _(rows_id: Tensor, *rest: Any) -> Tensor:
    ids, table_ids, offsets, pooling, columns, weights, _, _ = rest
    rows = _rows.get(int(rows_id))
    if rows is None:
        raise ServingError(
            f"rows_id={int(rows_id)}: this process has no such rows, because another process exported the program, or "
            "its version was closed; load the program with tierbed.serving.load_program"
        )
    lookup = Lookup(ids, table_ids, offsets, pooling, None if columns is None else tuple(columns))
    return rows.look_up_checked(lookup, weights)


@torch.library.register_fake("tierbed::served_lookup")
def _(rows_id: Tensor, *rest: Any) -> Tensor:
    *fields, _, dim, dtype = rest
    return torch.empty((*Lookup(*fields).shape, dim), dtype=dtype, device=rows_id.device)


@dataclass(frozen=True)
class FrozenLookup:
    """What a frozen embedding needs to find its rows in a version, and what its model needs to find dense weights.

    prefix: the model's name in the published model. renamed: the published names of weights that have another name
    there, as {name: published name}: of shared weights the first name, in wrappers the name without the wrapper.
    """

    name: str
    prefix: str
    renamed: dict[str, str]
    columns: list[int]
    key_type: str
    dtype: str
    tables: list[str | None]
    padding_idx: int | None
    seed: int | None  # None if the model does not determine it
    ids: list[int | None]
    bad_ids: list[str]
    zero_key: int | None
    output_dtype: str

    @classmethod
    def of(cls, embedding: EmbeddingBase, name: str, prefix: str, renamed: dict[str, str]) -> Self:
        spec = embedding.spec
        return cls(
            name, prefix, renamed, list(spec.columns), KEY_TYPES[spec.key_type], spec.dtype, list(spec.table_names),
            spec.padding_idx, spec.seed if spec.has_own_seed else None, [table.ids for table in spec.tables],
            [table.bad_ids for table in spec.tables], spec.zero_key, DTYPES[embedding.output_dtype],
        )  # fmt: skip

    @classmethod
    def unpack(cls, packed: Tensor) -> Self:
        return cls(**json.loads(packed.numpy().tobytes()))

    def pack(self) -> Tensor:
        return torch.frombuffer(bytearray(json.dumps(asdict(self)).encode()), dtype=torch.uint8)

    def find_rows(self, version: ServedVersion) -> ServedRows:
        """Returns the rows, with the model's limits of ids and its `output_dtype`. Raises ServingError."""
        rows = version.embeddings.get(self.name)
        if rows is None:
            names = ", ".join(map(repr, version.embeddings))
            remedy = "publish all embeddings of the model together, or freeze the model that was published"
            raise ServingError(f"version {version.version} has no embedding {self.name!r}, only {names}: {remedy}")
        spec = rows.spec
        for field, own, other in (
            ("columns", self.columns, list(spec.columns)),
            ("key_type", self.key_type, KEY_TYPES[spec.key_type]),
            ("dtype", self.dtype, spec.dtype),
            ("tables", self.tables, list(spec.table_names)),
            ("padding_idx", self.padding_idx, spec.padding_idx),
            ("seed", spec.seed if self.seed is None else self.seed, spec.seed),
        ):
            if own != other:
                problem = f"{field}={own!r} in the model and {other!r} in version {version.version}"
                raise ServingError(f"embedding {self.name!r} has {problem}: freeze the model that was published")
        limits = zip(spec.tables, self.ids, self.bad_ids, strict=True)
        tables = tuple(replace(table, ids=ids, bad_ids=bad_ids) for table, ids, bad_ids in limits)
        output_dtype = next(dtype for dtype, name in DTYPES.items() if name == self.output_dtype)
        return rows.adapt(replace(spec, tables=tables, zero_key=self.zero_key), output_dtype)


def register_rows(rows: ServedRows) -> Tensor:
    """Returns a new number for rows, by which the op finds them while they exist."""
    rows_id = secrets.randbits(62)  # random, so it matches no number of another process
    _rows[rows_id] = rows
    return torch.tensor(rows_id)


class FrozenEmbedding(nn.Module):
    """An embedding of one version. `forward` takes the arguments of the trained embedding's."""

    tierbed_rows_id: Tensor
    device = torch.device("cpu")

    def __init__(self, rows: ServedRows, lookup: FrozenLookup) -> None:
        super().__init__()
        self.rows, self.spec, self.output_dtype = rows, rows.spec, rows.output_dtype
        self.name, self.dim = rows.spec.name, rows.spec.dim
        self.register_buffer(ROWS_ID, register_rows(rows))
        self.register_buffer(ROWS, lookup.pack())

    def forward(self, ids: Tensor, table_ids: Any = None, *arguments: Any, **named: Any) -> Tensor:
        if torch.compiler.is_dynamo_compiling() and not isinstance(table_ids, Tensor | None):
            table_ids = torch.tensor(self._find_tables(table_ids))  # Dynamo cannot trace the conversion by NumPy
        return MultiTableMultiColumnEmbedding.forward(self, ids, table_ids, *arguments, **named)  # type: ignore[arg-type]

    def _find_tables(self, tables: Any) -> Any:
        """Returns the numbers of tables, given by numbers or names, in nested lists of the same form."""
        if isinstance(tables, list | tuple):
            return [self._find_tables(table) for table in tables]
        return self.spec.table_names.index(tables) if isinstance(tables, str) else tables

    def look_up(self, lookup: Lookup, weights: Tensor | None) -> Tensor:
        """Returns a checked lookup's result, or records it in a trace."""
        if is_eager(lookup.ids):
            return self.rows.look_up_checked(lookup, weights)
        result: Tensor = torch.ops.tierbed.served_lookup(
            self.tierbed_rows_id, *lookup, weights, self.dim, self.output_dtype
        )
        return result

    def raise_on_all_ranks(self) -> AbstractContextManager[None]:
        return nullcontext()  # collections enter it around each call

    def extra_repr(self) -> str:
        return f"{self.name!r}, columns={list(self.spec.columns)}, tables={list(self.spec.labels)}"


class FrozenEmbeddingBag(FrozenEmbedding):
    """A frozen `tierbed.EmbeddingBag`."""

    forward: Any = EmbeddingBag.forward
    _complete_offsets: Any = EmbeddingBag._complete_offsets

    def __init__(self, rows: ServedRows, lookup: FrozenLookup, bag: EmbeddingBag) -> None:
        super().__init__(rows, lookup)
        self.mode, self.include_last_offset, self.padding_idx = bag.mode, bag.include_last_offset, bag.padding_idx


class _Plan(NamedTuple):
    """What all batches with the same keys share.

    lookups: for each lookup its rows, the table of each column, the index of each column's feature in the keys, and
    whether it takes the mean. fields: of the resulting KeyedTensor, without its values.
    """

    keys: tuple[str, ...]
    lookups: list[tuple[ServedRows, NDArray[np.uint32], NDArray[np.uint32], bool]]
    fields: dict[str, Any]


class FrozenEmbeddingBagCollection(EmbeddingBagCollection):
    """A copy of a collection over frozen embeddings. Its `forward` skips the checks that a KeyedJaggedTensor made."""

    _plan: _Plan | None = None  # of the last batch

    def forward(self, features: Any) -> KeyedTensor:
        batch = features if type(features) is KeyedJaggedTensor else as_features(features)
        ids, offsets = batch.values(), batch.offsets()
        weights = self._get_weights(batch) if self._is_weighted else None
        if type(batch) is not KeyedJaggedTensor or not self._lookups or not ids.is_cpu or ids.dim() != 1:
            return super().forward(batch)
        if ids.dtype != self.key_type:
            ids = self.convert_ids(ids)
        if not is_eager(ids):
            parts = [self._trace(lookup, batch._keys, ids, offsets, weights) for lookup in self._lookups]
        elif weights is not None and weights.shape != ids.shape:
            return super().forward(batch)
        else:
            keys, bags, size, parts = to_keys(ids), offsets.numpy(), batch.stride(), []
            factors = None if weights is None else flatten_weights(weights)
            plan = self._plan
            if plan is None or plan.keys != batch._keys:
                plan = self._plan = self._make_plan(batch._keys)
            for rows, tables, columns, is_mean in plan.lookups:
                arguments, shape = (keys, tables, bags, columns, size), (size, len(columns) * rows.spec.dim)
                try:
                    parts.append(rows.look_up(arguments, shape, is_mean, factors))
                except ValueError:
                    return super().forward(batch)  # raises the error that names the offsets
            result = KeyedTensor.__new__(KeyedTensor)  # skips checks
            vars(result).update(plan.fields, _values=self._column_joiner.join(parts))
            return result
        return KeyedTensor(self._output_keys, self._output_lengths, self._column_joiner.join(parts))

    def _make_plan(self, keys: tuple[str, ...]) -> _Plan:
        """Raises KeyError if a feature is missing."""
        lookups = []
        for lookup in self._lookups:
            rows = cast(Any, self.embedding(lookup.embedding_name)).rows
            tables = np.array(lookup.table_ids, np.uint32)
            columns = np.array(find_key_indices(lookup.features, keys), np.uint32)
            lookups.append((rows, tables, columns, lookup.pooling == "mean"))
        fields = {"_keys": tuple(self._output_keys), "_lengths": tuple(self._output_lengths), "_dim": 1}
        return _Plan(keys, lookups, fields)

    def _trace(
        self, lookup: _PooledLookup, keys: Sequence[str], ids: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Record a lookup without `check_lookup`, which torch.compile cannot trace."""
        features = find_key_indices(lookup.features, keys)
        columns = tuple(features.index(key) if key in features else -1 for key in range(len(keys)))
        embedding, tables = self.embedding(lookup.embedding_name), lookup.table_ids
        table_ids = None if tables == list(range(embedding.spec.num_tables)) else torch.tensor(tables)
        return embedding.look_up(Lookup(ids, table_ids, offsets, lookup.pooling, columns), weights).flatten(1)
