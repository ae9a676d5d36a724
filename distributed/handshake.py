"""The handshake before every collective operation.

A handshake checks that all ranks are in the same call, can make the call, and agree on the call's arguments. Ranks
exchange headers of a fixed size, so a handshake works even if ranks are in different calls. Other transfers would crash
in this case, because ranks would expect different sizes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import msgpack  # type: ignore[import-untyped]
import numpy as np
import torch

from ..engine import errors
from ..engine.errors import GroupError, TierbedError
from .rank_group import CollectiveSequence, PendingAllToAll, RankGroup

# the header: has_error (0 or 1), checksum of `op`, checksum of `shared_values`, count, payload, needs_call (0 or 1)
NUM_HEADER_FIELDS = 6
MAX_NAMES = 3  # an error names at most this many differing values


class HandshakeResult(NamedTuple):
    """The headers of all ranks, in rank order."""

    counts: list[int]  # how many items each rank will send to this rank
    payloads: list[int]  # each rank's `payload`
    needs_call: bool  # True if any rank requests one more call


class Handshake:
    """One exchange of headers between all ranks, in flight until `wait` returns.

    Args:
        op: the operation's name. All ranks must pass the same name.
        shared_values: values by name. They must be equal on all ranks.
        counts: how many items this rank will send to each rank.
        payload: a number to send to all ranks.
        needs_call: True if this rank requests one more call.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        op: str,
        error: BaseException | None = None,
        shared_values: Mapping[str, Any] | None = None,
        counts: Sequence[int] | None = None,
        payload: int = 0,
        needs_call: bool = False,
    ) -> None:
        self._rank_group, self._op, self._local_error = rank_group, op, error
        self._shared_values = dict(shared_values or {})
        self._result: HandshakeResult | None = None
        self.raised_error: BaseException | None = None  # the exception that `wait` raised
        if rank_group.size == 1:
            self.raised_error, self._result = error, HandshakeResult([*(counts or [0])], [payload], needs_call)
            return
        rank_group.check_thread()
        if rank_group.pending_handshake is not None:
            rank_group.pending_handshake.wait()  # if ranks are in different calls, all ranks raise here first
        headers = np.empty((rank_group.size, NUM_HEADER_FIELDS), np.int64)  # small arrays are faster in NumPy
        headers[:] = (error is not None, _hash(op), _hash(self._shared_values), 0, payload, needs_call)
        if counts is not None:
            headers[:, 3] = counts
        self._own_fields = headers[0, :3].tolist()
        self._exchange: PendingAllToAll = rank_group.start_all_to_all(op, torch.from_numpy(headers))
        rank_group.pending_handshake = self

    def wait(self) -> HandshakeResult:
        """Wait for all headers. All ranks raise if any rank has an error, or if calls or values differ between ranks.

        All ranks raise the lowest failing rank's error. If this error is no TierbedError, all ranks raise a GroupError.
        """
        if self.raised_error is not None:
            raise self.raised_error
        if self._result is not None:
            return self._result
        self._rank_group.pending_handshake = None
        headers = self._exchange.wait().tolist()
        self._rank_group.num_shared_calls = max(self._rank_group.num_shared_calls, self._exchange.call_number)
        if self._own_fields[0] or any(header[:3] != self._own_fields for header in headers):
            try:
                self._raise_on_all_ranks()
            except BaseException as error:
                self.raised_error = error
                raise
        counts, payloads, needs_call = map(list, zip(*(header[3:] for header in headers), strict=True))
        self._result = HandshakeResult(counts, payloads, any(needs_call))
        return self._result

    def _raise_on_all_ranks(self) -> NoReturn:
        rank_group, error = self._rank_group, self._local_error
        own_error = None if error is None else {"kind": _name_kind(error), "message": _to_text(str(error))}
        report = msgpack.packb({"op": self._op, "same": _to_texts(self._shared_values), "error": own_error})
        reports = [msgpack.unpackb(data) for data in rank_group.exchange_bytes(self._op, report)]
        errors_by_rank = {rank: report["error"] for rank, report in enumerate(reports) if report["error"] is not None}
        if error is not None and not isinstance(error, Exception):
            rank_group.raise_shared_error(error)  # the rank that received Ctrl-C raises KeyboardInterrupt
        if not errors_by_rank:
            rank_group.num_mismatches += 1
            rank_group.raise_shared_error(GroupError(_describe_difference(reports)))
        rank, first_error = next(iter(errors_by_rank.items()))
        error_class: Any = getattr(errors, first_error["kind"], None)
        is_tierbed_error = isinstance(error_class, type) and issubclass(error_class, TierbedError)
        suffix = f" (and {len(errors_by_rank) - 1} more ranks failed)" if len(errors_by_rank) > 1 else ""
        message = first_error["message"] if is_tierbed_error else f"{first_error['kind']}: {first_error['message']}"
        shared_error = (error_class if is_tierbed_error else GroupError)(f"rank {rank}: {message}{suffix}")
        rank_group.raise_shared_error(shared_error, error if rank == rank_group.rank else None)


def _hash(value: Any) -> int:
    try:
        return zlib.crc32(msgpack.packb(value, default=repr))
    except (ValueError, OverflowError):  # a number or text that msgpack cannot encode
        return zlib.crc32(repr(value).encode(errors="backslashreplace"))


def _name_kind(error: BaseException) -> str:
    """Return the name of the error's class, or of its closest base class that all ranks know."""
    names = (kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    return next(names, type(error).__name__)


def _to_text(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text.encode(errors="backslashreplace").decode()


def _to_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as text, by name. Each part of a map or CollectiveSequence becomes a separate entry."""
    texts: dict[str, str] = {}
    for name, value in values.items():
        parts = value.parts if isinstance(value, CollectiveSequence) else value
        flat = {f"{name}: {key}": part for key, part in parts.items()} if isinstance(parts, dict) else {name: parts}
        texts |= {key: _to_text(part) for key, part in flat.items()}
    return texts


def _describe_difference(reports: Sequence[Mapping[str, Any]]) -> str:
    """Describe how ranks differ: each rank's call, or the values that are not equal."""
    if any(report["op"] != reports[0]["op"] for report in reports):
        calls = "; ".join(f"rank {rank}: {report['op']}" for rank, report in enumerate(reports))
        return (
            f"ranks are in different calls, {calls}; all ranks must make lookups, steps, saves and publishes with a "
            "World in the same order"
        )
    values = [report["same"] for report in reports]
    all_names = dict.fromkeys(name for by_name in values for name in by_name)
    names = [name for name in all_names if any(by_name.get(name) != values[0].get(name) for by_name in values)]
    shown_names = names[:MAX_NAMES]
    texts = "; ".join(
        f"rank {rank}: " + ", ".join(f"{name}={by_name.get(name)}" for name in shown_names)
        for rank, by_name in enumerate(values)
    )
    more = f" (and {len(names) - len(shown_names)} more differ)" if len(names) > len(shown_names) else ""
    return f"{reports[0]['op']}: ranks differ, {texts}{more}; pass the same values on all ranks"
