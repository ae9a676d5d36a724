"""`tierbed snapshot verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import Json, Store, complete_names, open_snapshot
from .entries import report_sound
from .model import stores_at
from .output import progress

if TYPE_CHECKING:
    from ..engine.errors import SnapshotError
    from ..snapshots.files.reader import Snapshot


def verify(
    store: Store,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Which snapshots; all by default.", autocompletion=complete_names),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read snapshots and those that they go over, and compare every file with its checksum. Exits with 1 for damage.

    Example: tierbed snapshot verify store/users
    """
    from ..snapshots.files.reader import Listing, list_snapshots

    stores = stores_at(store)
    damaged: dict[str, SnapshotError] = {}
    sound: list[str] = []
    for one in stores:
        if names:
            listing = Listing([open_snapshot(one, name) for name in dict.fromkeys(names)], {})
        else:
            listing = list_snapshots(one / "snapshots")
        wrong = {**listing.damaged, **_damaged_of(listing.snapshots)}
        prefix = "" if stores == [store] else f"{one.name}/"
        damaged |= {prefix + name: error for name, error in wrong.items()}
        sound += [prefix + s.name for s in listing.snapshots if s.name not in wrong]
    report_sound(sound, damaged, as_json)


def _damaged_of(snapshots: list[Snapshot]) -> dict[str, SnapshotError]:
    from ..snapshots.files.soundness import chains_of, verify_all

    chains, damaged = chains_of(snapshots)
    links = {link.name: link for chain in chains.values() for link in chain}
    with progress("verifying", sum(link.manifest.own_rows for link in links.values())) as told:
        return verify_all(chains, damaged, told)
