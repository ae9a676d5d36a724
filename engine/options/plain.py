"""Options as frozen dataclasses that read and print as plain dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, repr=False, eq=False)
class PlainDict(Mapping[str, Any]):
    """The base of option classes: `options["capacity"]`, `dict(options)` and `options == {...}` work as for a dict.

    Decorate a subclass with `@dataclass(frozen=True, repr=False, eq=False)`, so that the methods here stand.
    """

    def __getitem__(self, name: str) -> Any:
        if name not in set(self):
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def __repr__(self) -> str:
        return repr(dict(self))

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts and lists all the way down, as msgpack and JSON take them."""
        return {name: _plain(value) for name, value in self.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, PlainDict):
        return value.as_dict()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
