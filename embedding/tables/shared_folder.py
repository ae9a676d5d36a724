"""The store folder of an embedding sharded across ranks. Only rank 0 opens the folder; all ranks see its snapshots."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from ...engine.errors import StoreError
from ...engine.options.store_options import StoreOptions
from ...snapshots.store.folder import StoreFolder
from ...snapshots.store.folder_state import FolderState, locate_snapshots
from ...snapshots.store.group import Member

_TOKEN = ".token-"


class SharedFolder:
    """The common store folder. `folder` is set only on rank 0. Raises StoreError if rank 0 cannot lock the folder."""

    def __init__(self, rank: int, name: str, options: StoreOptions) -> None:
        assert options.persistent_path is not None
        snapshots = locate_snapshots(options.snapshot_path, name)
        self.path = Path(options.persistent_path).absolute() / name
        self.folder = StoreFolder(self.path, f"embedding {name!r}", snapshots) if rank == 0 else None
        self.snapshots_path = snapshots or FolderState(self.path).snapshot_store.snapshots_path

    @property
    def snapshot_store(self) -> StoreFolder:
        """The store folder that contains the snapshots, on rank 0."""
        assert self.folder is not None
        return self.folder.snapshot_store

    def write_token(self) -> str:
        """Write a token file with a random name next to the snapshots, and return its name. Raises StoreError."""
        self.remove_tokens()
        token = _TOKEN + secrets.token_hex(16)
        try:
            (self.snapshot_store.path / token).touch()
        except OSError as error:
            raise StoreError(
                f"cannot write to {str(self.snapshot_store.path)!r}: {error}; {StoreFolder.remedy}"
            ) from error
        return token

    def check_token(self, token: str) -> None:
        """Raise StoreError if this rank does not see rank 0's token, because the ranks then see different folders."""
        folder = self.snapshots_path.parent
        if not (folder / token).exists():
            raise StoreError(
                f"{str(folder)!r} is another folder here than on rank 0, so ranks would not see each other's "
                "snapshots. Set snapshot_path to a folder that all ranks see under the same path. persistent_path may "
                "be a local disk of each host"
            )

    def remove_tokens(self) -> None:
        """Remove the token file, and token files that killed processes left."""
        for token in self.snapshot_store.path.glob(_TOKEN + "*"):
            with contextlib.suppress(OSError):
                token.unlink()

    def begin(self, num_ranks: int, member: Member | None) -> None:
        """On rank 0: remove a single process's live rows. Record how many ranks store shards. Raises StoreError."""
        if self.folder is None or member is None:
            return
        if self.folder.live_path.exists() or self.folder.clean_marker is not None:
            self.folder.discard_live_rows()
        member.move_to(self.snapshot_store, num_ranks)

    def unlock(self) -> None:
        """Unlock the folder. May be called again."""
        if self.folder is not None:
            self.folder.unlock()
