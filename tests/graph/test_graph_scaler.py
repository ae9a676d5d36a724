"""A gradient scaler that is replaced: no step multiplies by one scale and divides by another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from support.graphs import compiled_steps, training
from tierbed import Graph


def scaled() -> tuple[Any, nn.Linear]:
    layer = nn.Linear(3, 1)
    return training(lambda graph, x: graph.scaler.scale(graph.layer(x).mean()), lr=1.0, layer=layer), layer


def assert_steps_by_one(graph: Graph, layer: nn.Linear) -> None:
    """The gradient of the bias is 1, whatever the scale."""
    before = layer.bias.item()
    graph(torch.ones(4, 3))
    assert layer.bias.item() == pytest.approx(before - 1)


def test_a_scaler_at_the_address_of_a_dead_one_takes_no_step_of_its_scale() -> None:
    graph, layer = scaled()
    addresses: list[int] = []
    while len(set(addresses)) == len(addresses):  # until an address is used again
        graph.scaler = GradScaler("cpu", init_scale=2.0 ** (len(addresses) % 5))
        addresses.append(id(graph.scaler))
        graph.set_grad_scaler(graph.scaler)
        assert_steps_by_one(graph, layer)
        graph.scaler = None
        graph.set_grad_scaler(None)


def test_a_scale_that_is_replaced_or_loaded_is_used() -> None:
    graph, layer = scaled()
    graph.scaler = scaler = GradScaler("cpu", init_scale=4.0)
    graph.set_grad_scaler(scaler)
    for change in (
        lambda: None,
        lambda: setattr(scaler, "_scale", torch.full((), 64.0)),
        lambda: scaler.load_state_dict(GradScaler("cpu", init_scale=16.0).state_dict()),
        lambda: scaler.update(new_scale=32.0),
    ):
        change()
        assert_steps_by_one(graph, layer)
    assert compiled_steps(graph) == 2
    assert "gradient scaler: another GradScaler" in graph.why_recompiled()[0]
