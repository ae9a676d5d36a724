"""Several Python threads at once, on one table and on several: whole steps, and the rows of a run alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.embeddings import DIM, attach, contents, make, train
from support.stores import STORES, options

STEPS = 60


def run_at_once(tasks: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("store", STORES)
def test_lookups_beside_training_see_whole_steps_in_their_order(tmp_path: Path, store: str) -> None:
    keys = torch.arange(200)
    with make(options(store, tmp_path), tables=1) as embedding:
        attach(embedding, "sgd", lr=1.0, weight_decay=0.0)
        embedding.put(keys, torch.zeros(200, DIM))
        done = threading.Event()

        def learn() -> None:
            try:
                for _ in range(STEPS):
                    embedding.prefetch(keys)
                    train(embedding, keys, grad=-1.0)
            finally:
                done.set()

        def look() -> None:
            generator, last = torch.Generator().manual_seed(0), 0.0
            while not done.is_set():
                some = keys[torch.randperm(200, generator=generator)[:50]]
                with torch.no_grad():
                    rows = embedding(some)
                step = rows[0, 0].item()
                assert (rows == step).all(), "rows of several steps"
                assert last <= step == int(step)
                last = step

        run_at_once([learn, look, look])
        assert (embedding.get(keys) == STEPS).all()


def test_embeddings_of_one_path_train_at_the_same_time_each_in_its_folder(tmp_path: Path) -> None:
    batches = [(torch.arange(200) * step) % 501 for step in range(1, 30)]
    with make(options("device"), "adam", tables=1) as alone:
        for ids in batches:
            train(alone, ids)
        expected = contents(alone).tobytes()

    def run(store: str) -> None:
        with make(options(store, tmp_path), "adam", f"rows-{store}", tables=1) as embedding:
            for number, ids in enumerate(batches):
                train(embedding, ids)
                if number % 10 == 0:
                    embedding.save_snapshot(f"s{number}")

    run_at_once([lambda store=store: run(store) for store in STORES])  # type: ignore[misc]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == sorted(f"rows-{store}" for store in STORES)
    for store in STORES:
        with make(options(store, tmp_path, open="error"), "adam", f"rows-{store}", tables=1) as again:
            assert contents(again).tobytes() == expected
