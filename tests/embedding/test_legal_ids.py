"""An id that its table does not have reaches a row, or goes unsaid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tierbed
from support.cuda_tables import on_devices, tables_on
from support.embeddings import DIM, contents
from support.stores import options
from tierbed import InputError, MultiTableEmbedding, OptionError
from tierbed.engine.ops.cuda.device import Device
from tierbed.engine.options.lookup import Lookup

START = tierbed.make_constant_initializer(1.0)


def limited(bad_ids: str = "raise", key_type: torch.dtype = torch.int64, **more: Any) -> MultiTableEmbedding:
    """Two tables: `users` of 5 ids, and a table of any ids."""
    tables = [tierbed.make_table_options(START, name="users", ids=5, bad_ids=bad_ids), START]
    embedding = MultiTableEmbedding("rows", DIM, torch.float32, key_type, tables, options("device"), **more)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    embedding.attach(optimizer, optimizer.param_groups[0])
    return embedding


def step(embedding: MultiTableEmbedding, ids: Any, tables: Any = 0) -> Tensor:
    given = torch.as_tensor(ids, dtype=embedding.spec.key_type, device=embedding.device)
    owners = torch.as_tensor(tables, device=embedding.device).broadcast_to(given.shape)
    pinned = embedding.pin([Lookup(given, owners)])
    rows = pinned.gather(0)
    pinned.update([torch.ones_like(rows)])
    return rows


@pytest.mark.parametrize(("key_type", "bad"), [(torch.int64, -1), (torch.int32, -7), (torch.uint64, 2**64 - 1)])
def test_a_bad_id_is_told_with_its_table_before_anything_changes(key_type: torch.dtype, bad: int) -> None:
    with limited(key_type=key_type) as embedding:
        step(embedding, [0, 4])
        before = contents(embedding).tobytes()
        for wrong in (5, bad):
            with pytest.raises(
                InputError, match=rf"ids of embedding 'rows': {wrong} is no id of table users, .*0 to 4"
            ):
                step(embedding, [1, wrong, 99], [0, 0, 0])
        assert contents(embedding).tobytes() == before
        step(embedding, [4, 5], [0, 1])  # the other table has any id
        assert embedding.size() == 3


def test_every_way_to_a_row_checks_ids() -> None:
    with limited() as embedding:
        for ask in (
            lambda: embedding(torch.tensor([7]), 0),
            lambda: embedding.get([7], 0),
            lambda: embedding.put([7], torch.zeros(1, DIM), 0),
            lambda: embedding.delete([7], 0),
            lambda: embedding.explain(7, 0),
        ):
            with pytest.raises(InputError, match="7 is no id of table users"):
                ask()
        assert embedding.size() == 0


def test_dropped_ids_are_padding_and_counted_once() -> None:
    with limited("drop") as embedding:
        rows = step(embedding, [3, 5, -1, 5], [0, 0, 0, 1])
        assert rows[:, 0].tolist() == [1, 0, 0, 1]
        assert embedding.size() == 2
        assert embedding.metrics()["table"]["dropped"] == 2
        assert [table["dropped"] for table in embedding.metrics()["tables"].values()] == [2, 0]
        ids = torch.tensor([[3, 8], [9, 9]])
        pooled = embedding(ids, torch.tensor(0).expand(2), pooling="mean")
        assert pooled[:, 0].tolist() == [0.0, 0.0]  # the row of 3 is 1 - 1; a bag of none is zeros
        assert embedding.metrics()["table"]["dropped"] == 5
        with pytest.raises(InputError, match="7 is no id of table users"):
            embedding.put([7], torch.zeros(1, DIM), 0)


def test_a_prefetched_batch_counts_what_it_drops_in_its_step() -> None:
    with limited("drop") as embedding:
        ids, owners = torch.tensor([1, 7, 8]), torch.zeros(3, dtype=torch.int64)
        embedding.prefetch(ids, owners)
        embedding.prefetch(ids, owners)
        pinned = embedding.pin([Lookup(ids, owners)])
        pinned.update([torch.ones_like(pinned.gather(0))])
        metrics = embedding.metrics()["table"]
        assert (metrics["prefetch_hits"], metrics["dropped"]) == (1, 2)
        embedding.forget_announced()
        assert embedding.metrics()["table"]["dropped"] == 2


def test_a_bad_id_in_a_prefetched_batch_is_told_in_its_step() -> None:
    with limited() as embedding:
        ids, owners = torch.tensor([1, 7]), torch.zeros(2, dtype=torch.int64)
        embedding.prefetch(ids, owners)
        with pytest.raises(InputError, match="7 is no id of table users"):
            embedding.pin([Lookup(ids, owners)])
        assert step(embedding, [1])[0, 0] == 1


@on_devices
@pytest.mark.parametrize("bad_ids", ["raise", "drop"])
def test_a_gpu_finds_bad_ids_late_and_drops_them_alike(device: Device, bad_ids: str) -> None:
    with tables_on(device) as place:
        embedding = limited(bad_ids).to(place)
        rows = step(embedding, [3, 5, -1, 5], [0, 0, 0, 1])
        if bad_ids == "raise":
            with pytest.raises(InputError, match="one is no id of its table"):
                embedding.size()
            assert embedding.size() == 0
        else:
            assert rows[:, 0].tolist() == [1, 0, 0, 1]
            assert embedding.size() == 2
            assert embedding.metrics()["table"]["dropped"] == 2
        step(embedding, [4])
        assert embedding.size() == (1 if bad_ids == "raise" else 3)
        embedding.close()


def test_ids_are_no_part_of_what_is_stored(tmp_path: Path) -> None:
    def make(**facts: Any) -> MultiTableEmbedding:
        tables = [tierbed.make_table_options(START, **facts)]
        return MultiTableEmbedding("rows", DIM, torch.float32, torch.int64, tables, options("host", tmp_path))

    with make() as embedding:
        embedding.put([4, 7], torch.zeros(2, DIM))
        embedding.save_snapshot("all")
    with make(ids=5, bad_ids="drop") as embedding:
        embedding.load_snapshot("all")
        assert embedding(torch.tensor([4, 7]))[:, 0].tolist() == [0, 0]
        assert embedding.metrics()["table"]["dropped"] == 1


def test_table_options_print_and_take_ids() -> None:
    made = tierbed.make_table_options(START, name="users", ids=5, bad_ids="drop")
    assert made == {"name": "users", "ids": 5, "bad_ids": "drop", "initializer": {"type": "constant", "value": 1.0}}
    assert tierbed.make_table_options(dict(made)) == made
    assert tierbed.make_table_options(made, ids=6)["ids"] == 6
    assert "ids" not in tierbed.make_table_options(START)
    for wrong in (0, -1, 2**64 + 1, 1.5, "5", True):
        with pytest.raises(OptionError, match=r"ids=.*: give the number of ids"):
            tierbed.make_table_options(START, ids=wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"bad_ids='skip': give 'raise' or 'drop'"):
        tierbed.make_table_options(START, ids=5, bad_ids="skip")
    with pytest.raises(OptionError, match=r"bad_ids='drop': without `ids`, every id is legal"):
        tierbed.make_table_options(START, bad_ids="drop")
