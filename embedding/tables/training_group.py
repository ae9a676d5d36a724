"""The embeddings that one process trains together. Recovery takes all these embeddings back to one moment.

A `Graph`, an `EagerOptimizer` or a collection calls `train_together` with its embeddings. Their tables share a gate, so
that a save can wait until a step has ended. If a step or a backward pass raises after it updated only some tables, the
tables are at different steps. `mark_inconsistent` then forbids saving and training until each store is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from ...engine.ops.embedding_base import EmbeddingBase
from ...engine.table.row_step import is_trained_by_other_thread
from ...engine.table.step_gate import StepGate
from ...snapshots.store.group import Member


class TrainingGroup:
    """The embeddings this process trains together. Grows as embeddings join; holds weak references."""

    def __init__(self) -> None:
        self.embeddings: WeakSet[Any] = WeakSet()
        self.gate = StepGate()  # shared by the tables of all embeddings

    def add(self, embeddings: Iterable[Any]) -> None:
        """Add embeddings to the group."""
        self.embeddings |= WeakSet(embeddings)
        for embedding in sorted(self.embeddings, key=lambda embedding: embedding.name):
            embedding.group = self
            if (handle := embedding.open_handle) is not None:
                handle.local.join(self)

    def begin_backward(self) -> None:
        """Called when a backward pass has pinned the rows of one embedding, before it reaches other embeddings."""
        if not self.gate.is_mid_step:
            self.gate.is_mid_step = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self) -> None:
        """Called when the backward pass has updated all rows that the pass reached."""
        self.gate.is_mid_step = False

    def detect_failed_backward(self) -> None:
        """Detect a backward pass that raised. Called before a forward pass and a close."""
        # a forward pass that a backward pass recomputes runs inside that backward pass
        if self.gate.is_mid_step and torch._C._current_graph_task_id() == -1:
            self.mark_backward_failed()

    def mark_backward_failed(self) -> None:
        """Mark the group inconsistent after a backward pass raised, because only some rows may have been updated."""
        if self.gate.is_mid_step:
            self.end_backward()
            mark_inconsistent(self.list_members(), "a backward pass raised during its updates")

    def list_handles(self) -> list[Any]:
        """Return the open embeddings' handles, ordered by name, so that all ranks use the same order."""
        handles = (embedding.open_handle for embedding in sorted(self.embeddings, key=lambda embedding: embedding.name))
        return [handle for handle in handles if handle is not None]

    def list_members(self) -> list[Member]:
        return [handle.local.member for handle in self.list_handles() if handle.local.member is not None]

    def list_folders(self) -> list[Path]:
        return [Path(e.store_options.persistent_path).absolute() / e.name for e in self.embeddings]

    @property
    def is_mid_step(self) -> bool:
        """True if a table is in a step, so that tables may be at different steps."""
        return self.gate.is_mid_step or any(handle.local.table.is_in_step for handle in self.list_handles())

    def mark_if_partly_updated(self, embeddings: Iterable[Any], error: BaseException) -> None:
        """Called after a step raised. Marks the group inconsistent if only some tables were updated."""
        own_handles = [e.open_handle for e in embeddings if e.group is self and e.world is None]
        handles = [handle for handle in own_handles if handle is not None and handle.member is not None]
        tables = [handle.local.table for handle in handles]
        interrupted_tables = [table for table in tables if table.is_in_step or table.failure is not None]
        was_updated = any(table.has_failed_update or table.failure is not None for table in interrupted_tables)
        if was_updated and len(interrupted_tables) < len(tables):
            mark_inconsistent([handle.member for handle in handles], f"a step raised during its updates ({error!r})")
        if torch._C._current_graph_task_id() != -1:
            self.mark_backward_failed()


def train_together(modules: Iterable[Any]) -> None:
    """Put all embeddings in `modules` that have a store folder into one group. Merges their present groups."""
    options = (
        (module, getattr(module, "store_options", None)) for module in modules if isinstance(module, EmbeddingBase)
    )
    persistent = [embedding for embedding, store in options if store is not None and store.persistent_path is not None]
    groups = {id(embedding.group): embedding.group for embedding in persistent if embedding.group is not None}
    target_group = next(iter(groups.values()), None) or TrainingGroup()
    if len(persistent) < 2 or (len(groups) == 1 and all(embedding.group is target_group for embedding in persistent)):
        return
    target_group.add([*persistent, *(embedding for group in groups.values() for embedding in group.embeddings)])


def mark_inconsistent(members: Iterable[Member], reason: str) -> None:
    """Forbid writes, saves and clean closes until each store is loaded. `reason` says how steps came to differ."""
    for member in members:
        member.mark_broken(
            f"embeddings that are trained together have rows of different steps: {reason}. Load a snapshot in each, or "
            "make them again: with a persistent_path they go back to the last step for which all have rows"
        )


@contextmanager
def lock_between_steps(handles: list[Any], awaits_step: bool = False, finishes_saves: bool = False) -> Iterator[None]:
    """Lock these tables and all tables trained with them, so that no other thread writes or saves the tables.

    awaits_step: first wait until no other thread is in a step, because a step updates one store after another.
    finishes_saves: first finish background saves, because they need the locks.
    """
    groups = {id(handle.group): handle.group for handle in handles if handle.group is not None}.values()
    all_handles = {id(handle): handle for handle in [*handles, *(h for group in groups for h in group.list_handles())]}
    gate: StepGate | None = None
    while True:
        tables = sorted({handle.local.table for handle in all_handles.values()}, key=id)
        for table in tables if finishes_saves else ():
            table.observers.skip_pauses()  # of all tables: one save may wait for another one
        for table in tables:
            table.observers.wait_for_foreground_save()
            if finishes_saves:
                table.observers.wait_for_background_save()
        with ExitStack() as stack:
            if gate is not None:
                stack.enter_context(gate.between_steps(tables.copy, lambda: False))
            for table in tables:
                stack.enter_context(table.lock)
            if any(table.is_replaced or table.observers.is_being_saved_by_other_thread for table in tables):
                continue
            if finishes_saves and any(table.observers.is_being_saved_in_background for table in tables):  # a new save
                continue
            groups_in_step = [group for group in groups if awaits_step and group.is_mid_step]
            gate = next((group.gate for group in groups_in_step if is_trained_by_other_thread(group.embeddings)), None)
            if gate is None:
                yield
                return
