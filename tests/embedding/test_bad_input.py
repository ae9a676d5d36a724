"""Every mistake is named with its argument, its value and the remedy, and the embedding works on as if nothing was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierbed
from support.embeddings import DIM, TABLES, attach, contents, make, train
from support.refusals import check_refusal
from support.stores import STORES, options
from tierbed import MultiTableEmbedding, MultiTableMultiColumnEmbedding
from tierbed.engine.errors import InputError, OptimizerError, OptionError, SnapshotError, StoreError, TierbedError
from tierbed.engine.options.lookup import Lookup

constant, normal = tierbed.make_constant_initializer, tierbed.make_normal_initializer
GOOD = {
    "name": "rows",
    "embedding_dim": DIM,
    "dtype": torch.float32,
    "key_type": torch.int64,
    "tables": TABLES,
    "store_options": tierbed.make_device_mem_store_options(),
}
ARGUMENTS = [
    ({"name": ""}, "name=''", "1 to 200 printable bytes"),
    ({"name": "a/b"}, "name='a/b'", "without slashes"),
    ({"name": ".."}, "name='..'"),
    ({"embedding_dim": 0}, "embedding_dim=0: give a whole number from 1"),
    ({"embedding_dim": True}, "embedding_dim=True"),
    ({"embedding_dim": 1 << 40}, "embedding_dim=1099511627776"),
    ({"dtype": torch.float64}, "dtype=torch.float64: "),
    ({"state_dtype": torch.float16}, "state_dtype=torch.float16: ", "torch.bfloat16"),
    ({"state_dtype": torch.int8}, "state_dtype=torch.int8: ", "torch.float32 or torch.bfloat16"),
    ({"dtype": torch.float16, "tables": [constant(65520.0)]}, "tables[0]", "65520 overflow dtype=torch.float16"),
    ({"key_type": torch.int16}, "key_type=torch.int16: ", "torch.int32, torch.int64 or torch.uint64"),
    ({"tables": []}, "tables=[]: ", "make_table_options"),
    ({"tables": TABLES[0]}, "tables=", "give a list"),
    ({"tables": [3]}, "table options 3"),
    ({"tables": [{"type": "xavier"}]}, "'xavier' is unknown", "uniform, normal"),
    ({"tables": [{"type": "uniform", "low": 2, "high": 1}]}, "low=2.0 > high=1.0"),
    ({"tables": [{"type": "uniform", "middle": 2}]}, "make_uniform_initializer", "middle", "low, high"),
    ({"tables": [[TABLES[0], TABLES[1]]]}, "tables[0] has 2 column options", "1 columns"),
    ({"tables": None, "default_initializer": {"type": "xavier"}}, "'xavier' is unknown"),
    ({"padding_idx": 1.5}, "padding_idx=1.5: give a whole number"),
    ({"padding_idx": 2**63}, "padding_idx=9223372036854775808"),
    ({"padding_idx": -1, "key_type": torch.uint64}, "padding_idx=-1: ", "from 0"),
    ({"padding_idx": 2**31, "key_type": torch.int32}, "padding_idx=2147483648"),
    ({"seed": 2**64}, "seed=18446744073709551616"),
    ({"output_dtype": torch.float64}, "output_dtype=", "torch.float32, torch.float16"),
    ({"output_dtype": []}, "output_dtype=[]"),
    ({"store_options": None}, "store_options=None"),
]


@pytest.mark.parametrize("row", ARGUMENTS, ids=str)
def test_an_argument_of_an_embedding_that_cannot_work_is_named(row) -> None:
    changes, *named = row
    check_refusal((lambda: MultiTableEmbedding(**{**GOOD, **changes}), OptionError, *named))


@pytest.mark.parametrize("columns", [[], [3, 0], [3, 1.5], "34", [1 << 16, 1], None])
def test_columns_that_are_no_widths_are_named(columns) -> None:
    with pytest.raises(OptionError, match=r"embedding_dim=.*list of them for several columns"):
        MultiTableMultiColumnEmbedding(**{**GOOD, "embedding_dim": columns, "tables": None})


@pytest.fixture
def embedding() -> Iterator[MultiTableEmbedding]:
    """Holds 40 rows of three tables, of which at the end none is gone or other, and which trains on."""
    with make(options("cached_host"), "adam") as made:
        train(made, torch.arange(40), torch.arange(40) % 3)
        before = contents(made)
        yield made
        assert contents(made).tobytes() == before.tobytes()
        assert made.size() == 40
        train(made, torch.arange(50), torch.arange(50) % 3)
        assert made.size() == 50


def ints(*shape: int, dtype: torch.dtype = torch.int64, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


IDS = [
    (ints(4), "shape (4,) is not (..., 3), one column for each table; give that shape, or table_ids"),
    (ints(), "shape () is not (..., 3)"),
    (ints(2, 3, device="meta"), "on meta", "ids.to('cpu')"),
    (ints(2, 3).to_sparse(),),
]
TABLE_IDS = [
    (torch.zeros(4), "torch.float32", "of an integer dtype"),
    (torch.zeros(4, dtype=torch.bool), "torch.bool"),
    (0.5, "give whole numbers"),
    (ints(3), "shape (3,) does not broadcast to the shape of ids, (2, 4)"),
    (ints(2, 2, 4), "shape (2, 2, 4) does not broadcast"),
    (ints(4, device="meta"), "meta"),
    (torch.tensor([0, -1, 0, 0]), "table id -1 at position 1"),
    (torch.tensor([0, 0, 2**32 + 1, 0]), "table id 4294967297 at position 2"),
    (torch.tensor([-(2**63), 0, 0, 0]), "table id -9223372036854775808 at position 0"),
]
KEYS = [
    [1.5],
    ["a"],
    [None],
    None,
    True,
    [True],
    "3",
    [2**63],
    [-(2**63) - 1],
    [[1, 2], [3]],
    {1: 2},
    float("nan"),
]
ROWS = [
    (torch.zeros(2, DIM + 1), "torch.float32 (2, 6); give float32 (2, 5)"),
    (0.0, "(1,)"),
    (np.zeros((2, DIM)), "torch.float64"),
    (torch.zeros(2, DIM, dtype=torch.int64), "torch.int64"),
    ([[0.0] * DIM, [0.0]],),
    (None,),
    (torch.zeros(2, DIM, device="meta"), "meta"),
]
NO_TABLES = ["a", [[0, 1], [1]], [0.5, 1.0], [0, 0, 0]]
Call = Callable[[MultiTableEmbedding], Any]
CALLS = [
    *((lambda e, ids=ids: e(ids), "ids of embedding 'rows'", *named) for ids, *named in IDS),
    *((lambda e, t=t: e(ints(2, 4), t), "table_ids of embedding 'rows'", *named) for t, *named in TABLE_IDS),
    *((lambda e, keys=keys: e.get(keys, 0), "keys of embedding 'rows'", "torch.int64") for keys in KEYS),
    *((lambda e, r=r: e.put([1, 100], r, 0), "rows of embedding 'rows'", *named) for r, *named in ROWS),
    *((lambda e, t=t: e.get([1, 2], t), "table_ids of embedding 'rows'") for t in NO_TABLES),
    *((lambda e, t=t: e.put([1, 2], torch.zeros(2, DIM), t), "table_ids of embedding 'rows'") for t in NO_TABLES),
]
WAYS_IN = [
    lambda e, tables: e.get([1, 2], tables),
    lambda e, tables: e.put([1, 2], torch.ones(2, DIM), tables),
    lambda e, tables: e.pin([Lookup(torch.tensor([1, 2]), torch.tensor(tables))]),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_an_argument_of_a_call_that_cannot_work_is_named(embedding, number) -> None:
    call, *named = CALLS[number]
    check_refusal((lambda: call(embedding), InputError, *named))


def test_table_ids_out_of_range_are_refused_in_every_way_in(embedding) -> None:
    for table in (3, -1, 2**32):
        for use in WAYS_IN:
            with pytest.raises(InputError, match=rf"table id {table} .*table ids run from 0 to 2"):
                use(embedding, [0, table])


@pytest.mark.parametrize(
    ("key_type", "wrong"),
    [(torch.int32, 2**31), (torch.int32, -(2**31) - 1), (torch.uint64, -1), (torch.uint64, 2**64)],
)
def test_keys_of_other_key_types_are_checked_against_them(key_type, wrong) -> None:
    with make(options("device"), key_type=key_type, tables=1) as made:
        with pytest.raises(InputError, match=f"whole numbers that {key_type} can hold"):
            made.get([wrong])
        assert made.get([torch.iinfo(key_type).max]).shape == (1, DIM)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("kind", [torch.as_tensor, np.array, list])
def test_a_put_of_values_that_are_not_finite_names_the_key_and_writes_nothing(value, kind) -> None:
    rows = [[0.0] * DIM, [0.0, 0.0, value, 0.0, 0.0]]
    given = kind(np.array(rows, np.float32)) if kind is not list else rows
    with make(options("host")) as embedding:
        with pytest.raises(InputError, match=r"for key 8 is not finite.*allow_nonfinite=True"):
            embedding.put([7, 8], given, 0)
        assert embedding.size() == 0
        embedding.put([7, 8], given, 0, allow_nonfinite=True)
        assert torch.equal(embedding.get([7, 8], 0).isfinite(), torch.tensor(rows).isfinite())


def test_gradients_of_a_wrong_shape_change_no_row(embedding) -> None:
    shapes = [(3, DIM), (DIM, 2), (1, DIM), (0, DIM)]
    for grads in [*map(torch.ones, shapes), torch.ones(2, DIM).double()]:
        pinned = embedding.pin([Lookup(torch.arange(2), ints(2))])
        with pytest.raises(InputError, match=rf"gradient of embedding 'rows'.*give torch.float32 \(2, {DIM}\)"):
            pinned.update([grads])
        embedding.unpin_rows()
    assert embedding.metrics()["table"]["step"] == 1


def test_a_module_moved_to_a_device_without_tables_is_refused_not_served_garbage() -> None:
    with make(options("device"), tables=1).to("meta") as moved, pytest.raises(TierbedError, match="meta"):
        moved(torch.tensor([1]))


@pytest.mark.parametrize("store", STORES)
def test_a_path_that_is_no_folder_to_write_in_is_refused_and_a_file_kept(tmp_path, store) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    (tmp_path / "rows").write_text("mine")
    for path in (Path("/proc/tierbed"), file, file / "below", tmp_path):
        made = make(options(store, path))
        for _ in range(2):
            with pytest.raises(StoreError, match=rf"store folder '{path}/rows'.*persistent_path must be a folder that"):
                made.size()
    assert (file.read_text(), (tmp_path / "rows").read_text()) == ("mine", "mine")
    (tmp_path / "rows").unlink()
    assert made.size() == 0  # the mistake repaired, the same embedding opens
    made.close()


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_dim": 7}, r"rows' holds rows of embedding_dim \[5\], not \[7\]; give that embedding_dim, or"),
        ({"key_type": torch.int32}, r"holds rows of key_type int64, not int32"),
        ({"tables": TABLES[:2]}, r"holds 3 tables, not 2; give all of them"),
    ],
)
@pytest.mark.rotated("store")
def test_rows_of_another_shape_are_refused_and_kept(tmp_path, store, changes, message) -> None:
    with make(options(store, tmp_path), "adam") as first:
        train(first, range(30))
        first.save_snapshot("kept")
        before = contents(first)
    other = MultiTableEmbedding(**{**GOOD, "store_options": options(store, tmp_path), **changes})
    for _ in range(2):
        with pytest.raises(StoreError, match=message):
            other.size()
    with make(options(store, tmp_path, open="error"), "adam") as again:
        assert contents(again).tobytes() == before.tobytes()


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("when", ["before the first use", "after reading"])
@pytest.mark.rotated("when")
def test_training_with_another_optimizer_than_the_stored_one_is_refused(tmp_path, store, when) -> None:
    with make(options(store, tmp_path), "adam") as first:
        train(first, range(30))
        before = contents(first)
    for optimizer in ("sgd", "adagrad", "adamw"):
        other = make(options(store, tmp_path))
        if when == "after reading":
            assert other.size() == 30
        with pytest.raises(OptimizerError, match=r"optimizer adam\b.*but the new"):  # noqa: PT012 either may be the first to know
            attach(other, optimizer)
            train(other, [1])
        other.close()
    with make(options(store, tmp_path, open="error")) as reader:
        assert reader.size() == 30
        attach(reader, "adam")
        assert contents(reader).tobytes() == before.tobytes()


def test_a_snapshot_without_a_name_or_a_place_is_refused(tmp_path) -> None:
    with make(options("device", tmp_path), "sgd") as made, make(options("device"), "sgd") as nowhere:
        train(made, range(5))
        before = sorted(tmp_path.rglob("*"))
        for name in ["", ".", "..", "../up", "a/b", ".hidden", "new\nline", 7, None]:
            for use in (made.save_snapshot, made.load_snapshot):
                with pytest.raises(SnapshotError, match=r"snapshot name"):
                    use(name)
        assert sorted(tmp_path.rglob("*")) == before
        assert made.size() == 5
        for use in (nowhere.save_snapshot, nowhere.load_snapshot):
            with pytest.raises(
                SnapshotError, match=r"'rows' has no persistent_path.*set persistent_path in its store options"
            ):
                use("s")
