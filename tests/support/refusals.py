"""Calls that are refused, each with what its error has to name: the argument, the value and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Refusal = tuple[Callable[[], Any], type[Exception], str, str, str]


def check_refusal(refusal: Refusal) -> None:
    call, kind, *named = refusal
    with pytest.raises(kind) as error:
        call()
    text = str(error.value.args[0])
    del error  # in a cycle with this frame, which would keep open what the call has opened
    assert [part for part in named if part not in text] == [], text
