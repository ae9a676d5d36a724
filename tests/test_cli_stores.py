"""The command line on folders of real stores: what it saves and loads is what the engine trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from embeddings import STORES, contents, make, options, train

from tierbed.snapshots.cli import main


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["snapshot", *arguments])
    assert not end.value.code


@pytest.mark.parametrize("store", STORES)
def test_a_snapshot_saved_by_the_shell_loads_on_every_store(tmp_path: Path, store: str) -> None:
    folder = str(tmp_path / "rows")
    with make(options(store, tmp_path), "adam") as embedding:
        train(embedding, list(range(500)))
        trained = contents(embedding)
    run("save", folder, "shell")
    run("verify", folder)
    for other in ("device", "ssd"):
        with make(options(other, tmp_path), "adam") as embedding:
            train(embedding, [1, 2, 3, 1000])
            embedding.load_snapshot("shell")
            assert contents(embedding).tobytes() == trained.tobytes()
            train(embedding, [4, 5, 6])


@pytest.mark.parametrize("store", ["device", "ssd"])
def test_a_snapshot_loaded_by_the_shell_is_what_the_next_run_resumes(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "adam") as embedding:
        train(embedding, list(range(500)))
        embedding.save_snapshot("early")
        early = contents(embedding)
        train(embedding, list(range(600)))
    run("load", str(tmp_path / "rows"), "early")
    with make(options(store, tmp_path, open="error"), "adam") as embedding:
        assert contents(embedding).tobytes() == early.tobytes()
        assert embedding.size() == 500
        train(embedding, list(range(600)))
