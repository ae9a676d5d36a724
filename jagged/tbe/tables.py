"""The tables of a table-batched embedding: the embeddings that hold them, and their rows as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar, cast
from zlib import crc32

import torch
from torch import Tensor, nn

from ...embedding.embedding import MultiTableEmbedding
from ...embedding.handle_contract import Ranks
from ...embedding.model_snapshots import ModelSnapshots
from ...embedding.training_group import train_together
from ...engine.errors import InputError, StoreError
from ...engine.options.initializers import (
    AnyTableOptions,
    make_constant_initializer,
    make_table_options,
    make_uniform_initializer,
)
from ...engine.options.options import StoreOptions
from ...engine.options.table_spec import check_reach
from ...engine.options.tables import choices, table_number
from ..collections.division import stores_text
from .bounds import Bounds
from .copies import copied_states, copied_weights, fill_uniform
from .read_only import ReadOnlyCopy
from .settings import ShiftedOptimizer
from .specs import Part, Table

T = TypeVar("T")


class TablesInEmbeddings(ModelSnapshots, nn.Module):
    """Tables, and the embeddings that hold them.

    parts, stores: what each embedding has, and by its name where it lives. rows: the optimizer of all of them. dtype:
    of outputs. world: the ranks that share the rows.
    """

    def __init__(
        self,
        name: str,
        tables: Sequence[Table],
        parts: Sequence[Part],
        stores: Mapping[str, StoreOptions],
        bounds: Bounds,
        rows: ShiftedOptimizer,
        dtype: torch.dtype,
        weights_dtype: torch.dtype,
        state_dtype: torch.dtype,
        seed: int,
        world: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.tables = tables
        self._parts, self._bounds, self._rows = parts, bounds, rows
        self.embeddings = nn.ModuleDict()
        for part in parts:
            embedding = MultiTableEmbedding(
                part.name,
                tables[part.tables[0]].dim,
                weights_dtype,
                torch.int64,
                self._options(part, make_constant_initializer(0.0)),
                stores[part.name],
                # rows of one seed, table and key begin alike in all embeddings; where they live does not matter
                seed=(seed + crc32(tables[part.tables[0]].name.encode())) % 2**63,
                output_dtype=dtype,
                world=world,
                state_dtype=state_dtype,
            )
            embedding.shadow.requires_grad_(False)  # no EagerOptimizer and no graph trains it
            embedding.use_optimizer(rows)
            self.embeddings[part.name] = embedding
        train_together(self.embeddings.values())

    def _options(self, part: Part, initializer: Mapping[str, Any]) -> list[AnyTableOptions]:
        tables = [self.tables[number] for number in part.tables]
        return [make_table_options(initializer, table.name, **self._bounds.options(table.rows)) for table in tables]

    def init_embedding_weights_uniform(self, min_val: float, max_val: float) -> None:
        """Let all rows be uniform over [min_val, max_val].

        Before the first use nothing is written: rows begin so, and rows that a store folder has stay. Later all rows
        are written, drawn from torch's generator; optimizer state stays. Raises OptionError, also for values beyond the
        largest number of `weights_precision`.
        """
        uniform = make_uniform_initializer(min_val, max_val)
        for part, embedding in self.each():
            check_reach(self._options(part, uniform), embedding.spec.dtype)
        for part, embedding in self.each():
            if embedding.is_open:
                for number, table in enumerate(part.tables):
                    fill_uniform(embedding, number, self.tables[table].rows, min_val, max_val)
            else:
                embedding.spec = replace(embedding.spec, tables=tuple(self._options(part, uniform)))

    def split_embedding_weights(self) -> list[Tensor]:
        """The rows of each table [rows, dim], copied: an in-place write into them raises InputError.

        `embedding_of(table).put(keys, rows, table)` writes, and `clone()` gives a tensor of your own.
        """
        copies = self._by_table(lambda embedding, rows: [copied_weights(embedding, i, n) for i, n in enumerate(rows)])
        return [
            ReadOnlyCopy.of(
                weights,
                f"split_embedding_weights of {self.name!r} copies rows, so writing into those of table {table.name!r} "
                f"changes none that is stored; call embedding_of({table.name!r}).put(torch.arange({table.rows}), rows, "
                f"{table.name!r}), or clone() them for a tensor of your own",
            )
            for weights, table in zip(copies, self.tables, strict=True)
        ]

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """The optimizer's states of each table, copied: an in-place write into them raises InputError.

        [rows, dim] each, of EXACT_ROWWISE_ADAGRAD [rows]. EXACT_SGD has none, and gives an empty list. Raises
        StoreError where ranks share the rows.
        """
        if not self._rows.states:
            return []
        for _, embedding in self.each():
            if embedding.world is not None:
                raise StoreError(
                    f"split_optimizer_states of {self.name!r}: ranks share the rows, and no call gathers their states; "
                    "save a snapshot, whose files have them"
                )
        copies = self._by_table(lambda embedding, rows: copied_states(embedding, rows, self._rows))
        return [
            [
                ReadOnlyCopy.of(
                    state,
                    f"split_optimizer_states of {self.name!r} copies them, so writing into that of table "
                    f"{table.name!r} changes no row; load a snapshot or state_dict() that has the state, or clone() it "
                    "for a tensor of your own",
                )
                for state in states
            ]
            for states, table in zip(copies, self.tables, strict=True)
        ]

    def embedding_of(self, table: int | str) -> MultiTableEmbedding:
        """The embedding that has a table, where the table goes by its name: for put, get, snapshots. InputError."""
        names = [one.name for one in self.tables]
        number = table_number(table, names)
        if number is None:
            raise InputError(f"table of {self.name!r}: got {table!r}; give one of {choices(names)}")
        return next(embedding for part, embedding in self.each() if number in part.tables)

    def metrics(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By the name of each embedding, its metrics: docs/metrics.md explains them."""
        return {part.name: embedding.metrics() for part, embedding in self.each()}

    def stores(self) -> None:
        """Print how the memory of stores is divided between the embeddings."""
        print(stores_text({part.name: embedding.store_options for part, embedding in self.each()}))

    def close(self) -> None:
        """Bring all rows down and close the stores. May be called again; a use raises ClosedError."""
        with ExitStack() as stack:  # an error in one leaves none open
            for _, embedding in self.each():
                stack.callback(embedding.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def each(self) -> Iterator[tuple[Part, MultiTableEmbedding]]:
        """The embeddings, with what each has."""
        return zip(self._parts, cast(Iterable[MultiTableEmbedding], self.embeddings.values()), strict=True)

    def _by_table(self, copy: Callable[[MultiTableEmbedding, list[int]], list[T]]) -> list[T]:
        """What `copy` gives for the tables of each embedding, in the order of embedding_specs."""
        found: dict[int, T] = {}
        for part, embedding in self.each():
            rows = [self.tables[number].rows for number in part.tables]
            found.update(zip(part.tables, copy(embedding, rows), strict=True))
        return [found[number] for number in range(len(self.tables))]
