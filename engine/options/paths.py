"""Paths of options, with `~` and environment variables in them."""

from __future__ import annotations

import os
import re

from ..errors import OptionError

_VARIABLE = re.compile(r"\$(?:\{([^}]*)\}|([A-Za-z_]\w*))")


def expanded(option: str, path: str) -> str:
    """The path with `${NAME}`, `$NAME` and a leading `~` replaced. `option` names it in errors.

    Raises OptionError for a variable that is not set or empty, and for an unknown user: no folder has such a name by
    mistake.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] if match[2] is None else match[2]
        if found := os.environ.get(name):
            return found
        raise OptionError(
            f"{option}={path!r}: the environment variable {name!r} is not set, or empty; set it, or give the folder"
        )

    result = os.path.expanduser(_VARIABLE.sub(value, path))
    if result.startswith("~"):
        user = result.partition("/")[0]
        raise OptionError(f"{option}={path!r}: {user!r} is no user here; give './{user}' for a folder of that name")
    return result
