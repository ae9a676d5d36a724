from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

settings.register_profile("suite", max_examples=60, deadline=None)
settings.load_profile("suite")


def _poisoned(allocate: Callable[..., Any]) -> Callable[..., Any]:
    def poisoned(*args: Any, **kwargs: Any) -> Any:
        array = allocate(*args, **kwargs)
        if array.dtype.kind in "fcb":
            array.fill(np.nan)  # True for booleans
        elif array.nbytes and not array.dtype.hasobject:
            array.reshape(-1, order="A").view(np.uint8)[:] = 0xA5
        return array

    return poisoned


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN and nonsense, so that a result nobody wrote cannot pass for zeros."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "empty", _poisoned(np.empty))
        patch.setattr(np, "empty_like", _poisoned(np.empty_like))
        # torch fills its own where algorithms are deterministic; without the variable cuBLAS warns of that
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        patch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[1, 2, 16], ids="threads{}".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The test runs with this many native threads."""
    from tierbed.engine import _core

    _core.set_threads(request.param)
    yield request.param
    _core.set_threads(torch.get_num_threads())
