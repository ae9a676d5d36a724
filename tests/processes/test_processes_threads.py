"""Several Python threads at once, on one table and on several: whole steps, and the rows of a run alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from support.embeddings import DIM, attach, contents, make, train
from support.stores import STORES, options

STEPS = 60


def run_at_once(*tasks: Callable[[], None]) -> None:
    with ThreadPoolExecutor(len(tasks)) as pool:
        for done in [pool.submit(task) for task in tasks]:
            done.result()


@pytest.mark.parametrize("store", STORES)
def test_lookups_beside_training_see_their_own_rows_after_whole_steps(tmp_path: Path, store: str) -> None:
    keys = torch.arange(600)
    first = keys.to(torch.float32)[:, None].expand(-1, DIM).contiguous()  # each step adds 1
    with make(options(store, tmp_path), tables=1) as embedding:
        attach(embedding, "sgd", lr=1.0, weight_decay=0.0)
        embedding.put(keys, first)
        done = threading.Event()

        def learn() -> None:
            try:
                for _ in range(STEPS):
                    embedding.prefetch(keys)
                    train(embedding, keys, grad=-1.0)
            finally:
                done.set()

        def look(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
            generator, last = torch.Generator().manual_seed(0), 0.0
            while not done.is_set():
                some = keys[torch.randperm(len(keys), generator=generator)[:50]]
                with torch.no_grad():
                    seen = read(some) - first[some]
                step = seen[0, 0].item()
                assert (seen == step).all(), "rows of several steps, or of other keys"
                assert last <= step == int(step)
                last = step

        run_at_once(learn, lambda: look(embedding), lambda: look(embedding.get))
        assert torch.equal(embedding.get(keys), first + STEPS)


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

    run_at_once(*(lambda store=store: run(store) for store in STORES))  # type: ignore[misc]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == sorted(f"rows-{store}" for store in STORES)
    for store in STORES:
        with make(options(store, tmp_path, open="error"), "adam", f"rows-{store}", tables=1) as again:
            assert contents(again).tobytes() == expected
