"""A function in the processes of a group whose tables are on emulated devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.cuda_emulation import EmulatedDevice
from support.cuda_tables import tables_on
from support.ranks import run_ranks
from tierbed import World


def run_device_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """As `run_ranks`, each rank with an emulated device of its own, whose order of threads differs from the others'."""
    return run_ranks(ranks, on_device, function, *arguments)


def on_device(world: World, function: Callable[..., Any], *arguments: Any) -> Any:
    with tables_on(EmulatedDevice(seed=1 + world.rank)):
        return function(world, *arguments)
