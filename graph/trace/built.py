"""What a trace and a step need of a graph: a module with a `build`."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...engine.ops.rows_contract import NoTorchScript


class HasBuild(NoTorchScript, nn.Module):
    """A module whose `build` is one step, such as a subclass of `Graph`."""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The step, written by the subclass."""
        raise NotImplementedError(f"{type(self).__name__} defines no build(self, ...)")
