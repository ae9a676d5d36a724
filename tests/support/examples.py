"""How many examples hypothesis tries of a test: a share of what conftest's profile in use says."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(share: float, **others: Any) -> settings:
    """Settings for a test whose examples cost more, or less, than those of most. others: of `hypothesis.settings`."""
    return settings(max_examples=max(1, round(share * settings.default.max_examples)), **others)
