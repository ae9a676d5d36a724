"""What a rank hears of the end of its group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from time import monotonic, sleep
from typing import Any, NamedTuple

import pytest
import torch

from tierbed import GroupError, World


class Heard(NamedTuple):
    said: str
    ranks: tuple[int, ...]  # that did not answer
    seconds: float  # until the group's end was heard
    after: float  # that later calls and `close` took


def heard(world: World, call: Callable[[], object], close: Callable[[], object] = lambda: None) -> Heard:
    """What a call raises that meets the end of the group, and every call ever after, until `close` and the world's."""
    began = monotonic()
    with pytest.raises(GroupError) as error:
        call()
    ended = monotonic()
    for later in (lambda: world.sum(torch.tensor(1)), lambda: world.all_gather_object("names", lambda: b""), call):
        with pytest.raises(GroupError, match="the group of ranks has ended") as again:
            later()
        assert str(error.value) in str(again.value)
        assert again.value.ranks == error.value.ranks
    close()
    world.close()
    return Heard(str(error.value), error.value.ranks, ended - began, monotonic() - ended)


def all_name(found: Iterable[Heard], lost: int, how: str) -> None:
    """Each of these ranks heard which one is lost, and how."""
    for one in found:
        assert f"rank {lost} did not answer ({how})" in one.said
        assert one.ranks == (lost,)


def calls(world: World) -> int:
    """How many exchanges this rank has begun."""
    assert world._peer_monitor is not None
    return world._peer_monitor.last_call_number


def until_told(world: World) -> None:
    """Compute until another rank has ended the group."""
    assert world._peer_monitor is not None
    while world._peer_monitor.abort_error is None:
        sleep(0.001)


def end_after(world: World, exchanges: int, number: int, is_sent: bool) -> None:
    """This process gets a signal at its exchange of this number from here: before it begins, or when it has begun."""
    start = world.start_all_to_all
    left = exchanges

    def counted(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and not is_sent:
            os.kill(os.getpid(), number)
        exchange = start(*arguments)
        if left == 0:
            os.kill(os.getpid(), number)
        return exchange

    world.start_all_to_all = counted  # type: ignore[method-assign]
