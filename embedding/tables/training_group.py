"""Embeddings that one process trains together: a record of recovery names the rows of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

from ...engine.ops.rows_contract import EmbeddingBase
from ...engine.table.row_step import is_trained_elsewhere
from ...engine.table.step_gate import StepGate
from ...snapshots.store.group import Member


class TrainingGroup:
    """A set of embeddings that grows, and that holds them weakly."""

    def __init__(self) -> None:
        self.embeddings: WeakSet[Any] = WeakSet()
        self.gate = StepGate()  # of all their tables

    def add(self, embeddings: Iterable[Any]) -> None:
        """Let these be trained together with the others."""
        self.embeddings |= WeakSet(embeddings)
        for one in sorted(self.embeddings, key=lambda one: one.name):
            one.group = self
            if (handle := one.open_handle) is not None:
                handle.own.join(self)

    def begin_pass(self) -> None:
        """A backward pass has pinned the rows of one of them, which it updates before it comes to others."""
        if not self.gate.closed:
            self.gate.closed = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_pass)

    def end_pass(self) -> None:
        """The backward pass has updated all that it reached."""
        self.gate.closed = False

    def check_passed(self) -> None:
        """Called before a forward pass and a close: if the last backward pass raised, rows may differ in step."""
        if self.gate.closed and torch._C._current_graph_task_id() == -1:  # not one that the pass makes again
            self.fail_pass()

    def fail_pass(self) -> None:
        """The backward pass raised: if it had begun its updates, rows may differ in step."""
        if self.gate.closed:
            self.end_pass()
            tear(self.members(), "a backward pass raised during its updates")

    def handles(self) -> list[Any]:
        """The handles of those that are open, in the order of their names, which is one order on all ranks."""
        found = (one.open_handle for one in sorted(self.embeddings, key=lambda one: one.name))
        return [handle for handle in found if handle is not None]

    def members(self) -> list[Member]:
        """The stores of those that are open here."""
        return [handle.own.member for handle in self.handles() if handle.own.member is not None]

    def folders(self) -> list[Path]:
        """The store folders of all of them."""
        return [Path(one.store_options.persistent_path).absolute() / one.name for one in self.embeddings]

    @property
    def is_amid_step(self) -> bool:
        """Whether one of them is in a step, so that their rows are of no common moment."""
        return self.gate.closed or any(handle.own.table.in_step for handle in self.handles())

    def note_failed_step(self, embeddings: Iterable[Any], error: BaseException) -> None:
        """A step of embeddings raised: if it updated some of them alone, or in a backward pass, rows differ in step."""
        found = [one.open_handle for one in embeddings if one.group is self and one.world is None]
        handles = [handle for handle in found if handle is not None and handle.member is not None]
        behind = [table for one in handles if (table := one.own.table).in_step or table.failure is not None]
        if 0 < len(behind) < len(handles) and any(table.refused or table.failure is not None for table in behind):
            tear([one.member for one in handles], f"a step raised during its updates ({error!r})")
        if torch._C._current_graph_task_id() != -1:
            self.fail_pass()


def train_together(modules: Iterable[Any]) -> None:
    """Let the embeddings among modules, and those that each is trained with already, be one group.

    Those without a folder are left out.
    """
    options = ((one, getattr(one, "store_options", None)) for one in modules if isinstance(one, EmbeddingBase))
    stored = [one for one, given in options if given is not None and given.persistent_path is not None]
    groups = {id(one.group): one.group for one in stored if one.group is not None}
    together = next(iter(groups.values()), None) or TrainingGroup()
    if len(stored) < 2 or (len(groups) == 1 and all(one.group is together for one in stored)):
        return
    together.add([*stored, *(one for group in groups.values() for one in group.embeddings)])


def tear(members: Iterable[Member], why: str) -> None:
    """Let none of these stores be written or saved, or be marked clean, until it is loaded.

    why: what left their rows at different steps.
    """
    for member in members:
        member.tear(
            f"embeddings that are trained together have rows of different steps: {why}. Load a snapshot in each, or "
            "make them again: with a persistent_path they go back to the last step of which all have rows"
        )


@contextmanager
def between_steps(handles: Iterable[Any], waits: bool = False, replaces: bool = False) -> Iterator[None]:
    """A block in which no other thread writes to or saves these tables, nor any that is trained together with them.

    waits: for the end of a step of another thread, in which some of the stores may be a step ahead of the others.
    replaces: whether the block replaces the rows: it begins once no save in the background goes on, which it could not
    wait for while it has the locks that the save needs.
    """
    handles = list(handles)
    groups = {id(one.group): one.group for one in handles if one.group is not None}.values()
    everyone = {id(one): one for one in handles} | {id(one): one for group in groups for one in group.handles()}
    gate: StepGate | None = None
    while True:
        tables = sorted({one.own.table for one in everyone.values()}, key=id)
        for table in tables:
            table.observers.wait_for_foreground()
            if replaces:
                table.observers.finish_saving()
        with ExitStack() as stack:
            if gate is not None:
                stack.enter_context(gate.between_steps(tables.copy, lambda: False))
            for table in tables:
                stack.enter_context(table.lock)
            if any(table.is_replaced or table.observers.is_saved_by_another for table in tables):
                continue
            if replaces and any(table.observers.is_saving for table in tables):  # one has begun meanwhile
                continue
            amid = [group for group in groups if waits and group.is_amid_step]
            gate = next((group.gate for group in amid if is_trained_elsewhere(group.embeddings)), None)
            if gate is None:
                yield
                return
