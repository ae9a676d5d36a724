"""An embedding on a disk that fails, beside one in memory that nothing happens to."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.embeddings import contents, make, train
from support.stores import options
from tierbed import MultiTableEmbedding, TierbedError

ON_DISK = ["ssd", "ssd_host"]
# RocksDB gathers 64 KiB before it writes a file, of which two may wait
SMALL = {"write_buffer_size": 1 << 16, "min_write_buffer_number_to_merge": 1, "max_write_buffer_number": 2}


class Twins:
    """An embedding on the disk, and one that nothing happens to, which takes the steps that the first one took."""

    def __init__(self, path: Path, store: str, life: dict[str, Any] | None = None) -> None:
        self.path, self.store, self.life = path, store, life or {}
        self.plain = make(options("device", **self.life), "adam", "plain", tables=1)
        self.tested = self.reopened()
        self.step = 0

    def reopened(self, **more: str) -> MultiTableEmbedding:
        small = {"rocksdb_options": SMALL} if self.store in ON_DISK else {}
        return make(options(self.store, self.path, **small, **self.life, **more), "adam", tables=1)

    def train(self) -> str | None:
        """One step of 400 rows; what the embedding said where it failed."""
        ids = (torch.arange(400) * 7 + 150 * self.step) % 20_000
        said = None
        try:
            train(self.tested, ids)
        except TierbedError as error:
            said = str(error)
        if said is None or self.tested.metrics()["table"]["step"] > self.step:
            self.step += 1
            train(self.plain, ids)
        return said

    def train_until_it_fails(self, times: int) -> None:
        """Rows go down in the background, so the step that raises it is a later one."""
        failures = 0
        while failures < times:
            if said := self.train():
                self.names_path_and_remedy(said)
                failures += 1
            time.sleep(0.002)

    def names_path_and_remedy(self, said: str) -> None:
        assert str(self.path / "rows") in said, said
        assert re.search(r"space|room|disk", said), said

    def fails(self, call: Callable[[], object]) -> None:
        with pytest.raises(TierbedError) as error:
            call()
        self.names_path_and_remedy(str(error.value))

    def reads_as_before(self) -> None:
        some = torch.arange(0, 20_000, 37)
        assert torch.equal(self.tested.get(some), self.plain.get(some))

    def same(self) -> None:
        assert contents(self.tested).tobytes() == contents(self.plain).tobytes()

    def close_and_compare(self) -> None:
        self.tested.close()
        self.tested = self.reopened(open="error")
        assert self.tested.metrics()["table"]["step"] == self.step
        self.same()
        self.tested.close()
