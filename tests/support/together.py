"""Embeddings that are trained together, in processes that are killed, and the step that each of them is at."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support.embeddings import make
from support.forked import with_pipe
from support.killed import holds, step
from support.stores import options
from tierbed import MultiTableEmbedding
from tierbed.embedding.state_dict.model_snapshots import ModelSnapshots
from tierbed.embedding.tables.training_group import train_together
from tierbed.engine.errors import TierbedError

NAMES = "abc"
_kept: list[Any] | None = None  # in a process that is killed: models, which would close when they are dropped


class Model(ModelSnapshots, nn.Module):
    """Embeddings a, b and so on, each of a store by its short name. world: the ranks that share their rows.

    path: of all, or one for each, None for a store without a folder.
    """

    def __init__(
        self, path: Path | Sequence[Path | None], stores: Sequence[str], world: Any = None, **more: Any
    ) -> None:
        super().__init__()
        self.members: list[MultiTableEmbedding] = []
        paths = [path] * len(stores) if isinstance(path, Path) else path
        for name, store, place in zip(NAMES, stores, paths, strict=False):
            made = options(store, place, **more)
            member = make(made, "adagrad", name=name, tables=1, seed=0, world=world)
            self.members.append(member)
            self.add_module(name, member)
        train_together(self.members)
        keep_open(self)

    def steps(self, count: int, *members: str) -> None:
        """So many steps of the members of these names, else of all."""
        for _ in range(count):
            for member in self.members:
                if not members or member.name in members:
                    step(member)

    def counts(self) -> list[int]:
        """The steps of the members, as they say."""
        return [int(member.metrics()["table"]["step"]) for member in self.members]

    def at(self) -> list[int]:
        """The steps of the members, whose rows are those of these steps."""
        found = self.counts()
        for member, count in zip(self.members, found, strict=True):
            holds(member, count)
        return found

    def close(self) -> None:
        for member in self.members:
            member.close()


def played(
    path: Path,
    stores: Sequence[str],
    plan: str,
    more: dict[str, Any] | None = None,
    begin: Callable[[], None] = lambda: None,
) -> Any:
    """What a plan says of a model: "step 2; save all; step 1 a; b load all; a overwrite all; prune 1; close; open".

    A part that begins with a name is of that member alone. "state" makes a state_dict durable, as file 0, 1 and so on,
    which "load-state 0" loads; "begin" calls `begin`. "at" and "last" set what is returned: the steps, whose rows are
    checked, or the last snapshots. more: of the model.
    """
    model, found = Model(path, stores, **(more or {})), None
    for part in plan.split("; "):
        first, *given = part.split()
        target: Any = model
        if first in NAMES:
            target, first, *given = model.members[NAMES.index(first)], *given
        if first == "step":
            model.steps(int(given[0]), *given[1:])
        elif first in ("save", "overwrite"):
            target.save_snapshot(*given, overwrite=first == "overwrite")
        elif first == "load":
            target.load_snapshot(*given)
        elif first == "prune":
            target.prune_snapshots(int(given[0]))
        elif first == "state":
            torch.save(target.state_dict(), path / f"state{len(list(path.glob('state*')))}")
        elif first == "load-state":
            state, prefix = torch.load(path / f"state{given[0]}"), "" if target is model else f"{target.name}."
            target.load_state_dict(
                {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}
            )
        elif first == "open":
            model = Model(path, stores, **(more or {}))
        elif first == "begin":
            begin()
        elif first == "at":
            found = model.at()
        elif first == "last":
            found = [member.last_snapshot for member in model.members]
        else:
            getattr(target, first)()
    return found


def played_from(path: Path, stores: Sequence[str], plan: str, begin: Callable[[], None]) -> None:
    """A plan for `killed_at`."""
    played(path, stores, plan, None, begin)


def at(path: Path, stores: Sequence[str], mode: str = "resume") -> list[int]:
    """The steps that a model opens at, of which it then takes one more."""
    return played(path, stores, "at; step 1", {"open": mode})  # type: ignore[no-any-return]


def keep_open(made: Any) -> None:
    """Let a model stay open in a process that is killed."""
    if _kept is not None:
        _kept.append(made)


def killed(task: Callable[..., Any], *arguments: Any) -> Any:
    """What `task(*arguments)` returns in a process that is killed after it, with all it has open; errors as text."""
    child, pipe = with_pipe(_then_killed, task, *arguments)
    with child, pipe:
        try:
            return pipe.recv()
        finally:
            assert child.wait() == -signal.SIGKILL  # until it has ended, it holds its locks


def _then_killed(task: Callable[..., Any], *given: Any) -> None:
    global _kept
    _kept = []
    *arguments, pipe = given
    try:
        pipe.send(task(*arguments))
    except TierbedError as error:
        pipe.send(f"{type(error).__name__}: {error}")
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(
    path: Path, call: str, number: int, task: Callable[..., Any], *arguments: Any, after: bool = False
) -> str:
    """ "done", or "killed" before or after the `number`th `call` that changes files below `path`.

    `task(*arguments, begin)` calls `begin` when calls are to be counted.
    """
    child, pipe = with_pipe(_killed_at, path, call, number, after, task, *arguments)
    with child, pipe:
        try:
            said = str(pipe.recv())
        except EOFError:
            said = "killed"
        child.wait()
    return said


def _killed_at(path: Path, call: str, number: int, after: bool, task: Callable[..., Any], *given: Any) -> None:
    global _kept
    _kept = []
    *arguments, pipe = given
    shim = ctypes.CDLL(None)
    shim.watch_calls(os.fsencode(path), os.fsencode(path.with_name("aside")), -1)

    def begin() -> None:
        shim.die_at(call.encode(), ctypes.c_long(number), int(after))

    task(*arguments, begin)
    shim.die_at(b"", ctypes.c_long(0), 0)
    pipe.send("done")
    os.kill(os.getpid(), signal.SIGKILL)
