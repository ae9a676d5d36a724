"""The processes that save or load a graph together: the ranks of its embeddings' world, or this one alone."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack  # type: ignore[import-untyped]
import torch
from torch import Tensor

from ...engine.durable import aside, made_aside
from ...engine.errors import GraphError

if TYPE_CHECKING:
    from ...distributed.group import Group

Random = list[Tensor]  # the states of a process's generators of random numbers


class Saving:
    """One save or load of a graph. `world` is None for one process; then every method does its call and no more."""

    def __init__(self, world: Group | None, what: str) -> None:
        """what: names the save or load in messages."""
        self._world, self._what = world, what

    def each(self, step: str, call: Callable[[], Any], same: Mapping[str, Any] | None = None) -> Any:
        """The result of a call of this rank. What one rank raises is raised on all. same: equal on all ranks."""
        if self._world is None:
            return call()
        from ...distributed.agreement import agree, attempt

        result, error = attempt(call)
        agree(self._world, f"{self._what}: {step}", error, same)
        return result

    def first(self, step: str, call: Callable[[], Any]) -> Any:
        """The result of a call of rank 0, plain values, on all ranks."""
        if self._world is None:
            return call()
        from ...distributed.agreement import told

        rank = self._world.rank
        return told(self._world, f"{self._what}: {step}", lambda: call() if rank == 0 else None)[0]

    @contextmanager
    def made_aside(self, folder: Path, overwrite: bool, errors: Callable[[], Any]) -> Iterator[Path]:
        """`durable.made_aside`, done by rank 0. errors: makes a block that tells an error of the system."""
        block = ExitStack()

        def begin() -> None:
            with errors():
                block.enter_context(made_aside(folder, overwrite))

        def end() -> None:
            with errors():
                block.close()

        self.first("its folder", begin)
        try:
            yield aside(folder)
        except BaseException:
            block.__exit__(*sys.exc_info())
            raise
        self.first("in place", end)

    def check_equal(self, plain: Any, tensors: Mapping[str, Tensor]) -> None:
        """Raises GraphError on all ranks where a value that training keeps equal differs between them."""
        if self._world is None:
            return
        from ...distributed.agreement import told

        names = [*tensors]
        sums = told(self._world, f"{self._what}: state", lambda: [_checksum(plain), *map(_bytes, tensors.values())])
        if any(len(one) != len(sums[0]) for one in sums):
            differ = ["the number of tensors"]
        else:
            differ = [name for i, name in enumerate(["what is no tensor", *names]) if len({one[i] for one in sums}) > 1]
        if differ:
            raise GraphError(
                f"{self._what}: ranks have other values of {', '.join(differ[:5])}{' and more' * (len(differ) > 5)}; a "
                "checkpoint holds those of one: train what differs by an optimizer of the graph, or keep it in a buffer"
            )

    def others_random(self, own: Random) -> list[Random]:
        """The random state of every rank but the first."""
        if self._world is None:
            return []
        from ...distributed.agreement import told

        sent = [state.cpu().numpy().tobytes() for state in own]
        ranks: list[list[bytes]] = told(self._world, f"{self._what}: random numbers", lambda: sent)
        return [[torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in states] for states in ranks[1:]]

    def own_random(self, first: Random, others: list[Random]) -> Random:
        """The random state of this rank in a checkpoint. A rank that it has none of keeps its own."""
        rank = 0 if self._world is None else self._world.rank
        if rank == 0:
            return first
        return others[rank - 1] if rank <= len(others) else [torch.get_rng_state()]


def _checksum(plain: Any) -> int:
    return zlib.crc32(msgpack.packb(plain))


def _bytes(tensor: Tensor) -> int:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(data.numpy().data)
