"""Every mistake is named with its argument, its value and the remedy, and the embedding works on as if nothing was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierbed
from support.embeddings import DIM, TABLES, attach, contents, make, train
from support.forked import with_pipe
from support.stores import STORES, options
from tierbed import (
    InputError,
    MultiTableEmbedding,
    MultiTableMultiColumnEmbedding,
    OptimizerError,
    OptionError,
    StoreError,
    TierbedError,
)
from tierbed.engine.options.lookup import Lookup
from tierbed.snapshots.store.folder import StoreFolder

constant, normal = tierbed.make_constant_initializer, tierbed.make_normal_initializer
GOOD = {
    "name": "rows",
    "embedding_dim": DIM,
    "dtype": torch.float32,
    "key_type": torch.int64,
    "tables": TABLES,
    "store_options": tierbed.make_device_mem_store_options(),
}


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, r"name=''.*give 1 to 200 printable bytes"),
        ({"name": "a/b"}, r"name='a/b'.*without slashes"),
        ({"name": ".."}, r"name='\.\.'"),
        ({"name": 7}, r"name=7"),
        ({"embedding_dim": 0}, r"embedding_dim=0: give a whole number from 1"),
        ({"embedding_dim": -1}, r"embedding_dim=-1"),
        ({"embedding_dim": 2.0}, r"embedding_dim=2\.0"),
        ({"embedding_dim": True}, r"embedding_dim=True"),
        ({"embedding_dim": 1 << 40}, r"embedding_dim=1099511627776"),
        ({"dtype": torch.int32}, r"dtype=torch\.int32: "),
        ({"dtype": "bfloat16"}, r"dtype='bfloat16'"),
        ({"state_dtype": torch.float16}, r"state_dtype=torch\.float16: .*give torch\.bfloat16"),
        ({"state_dtype": torch.int8}, r"state_dtype=torch\.int8: give torch\.float32 or torch\.bfloat16"),
        ({"dtype": torch.float16, "tables": [constant(65520.0)]}, r"tables\[0\].*65520 overflow dtype=torch\.float16"),
        ({"dtype": torch.float16, "tables": [normal(0.0, 2e4)]}, r"overflow dtype=torch\.float16"),
        ({"dtype": torch.float64}, r"dtype=torch\.float64"),
        ({"dtype": "float32"}, r"dtype='float32'"),
        ({"key_type": torch.int16}, r"key_type=torch\.int16: give torch\.int32, torch\.int64 or torch\.uint64"),
        ({"key_type": "int64"}, r"key_type='int64'"),
        ({"key_type": []}, r"key_type=\[\]"),
        ({"tables": []}, r"tables=\[\]: give a list with make_table_options"),
        ({"tables": 3}, r"tables=3"),
        ({"tables": TABLES[0]}, r"tables=.*give a list"),
        ({"tables": [3]}, r"table options 3"),
        ({"tables": [{"type": "xavier"}]}, r"'xavier' is unknown; use one of uniform, normal"),
        ({"tables": [{"type": "uniform", "low": 2, "high": 1}]}, r"low=2\.0 > high=1\.0; give low <= high"),
        ({"tables": [{"type": "uniform", "middle": 2}]}, r"make_uniform_initializer: .*middle.*; it has low, high"),
        ({"tables": [[TABLES[0], TABLES[1]]]}, r"tables\[0\] has 2 column options.*1 columns"),
        ({"tables": None, "default_initializer": {"type": "xavier"}}, r"'xavier' is unknown"),
        ({"padding_idx": 1.5}, r"padding_idx=1\.5: give a whole number"),
        ({"padding_idx": 2**63}, r"padding_idx=9223372036854775808"),
        ({"padding_idx": -1, "key_type": torch.uint64}, r"padding_idx=-1: give a whole number from 0"),
        ({"padding_idx": 2**31, "key_type": torch.int32}, r"padding_idx=2147483648"),
        ({"seed": 1.5}, r"seed=1\.5"),
        ({"seed": 2**64}, r"seed=18446744073709551616"),
        ({"store_options": None}, r"store_options=None"),
    ],
)
def test_an_argument_of_an_embedding_that_cannot_work_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MultiTableEmbedding(**{**GOOD, **changes})


@pytest.mark.parametrize("columns", [[], [3, 0], [3, -1], [3, 1.5], "34", [1 << 16, 1], None])
def test_columns_that_are_no_widths_are_named(columns: Any) -> None:
    with pytest.raises(OptionError, match=r"embedding_dim=.*list of them for several columns"):
        MultiTableMultiColumnEmbedding(**{**GOOD, "embedding_dim": columns, "tables": None})


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            torch.ones(3, dtype=torch.bool),
            r"ids of embedding 'rows': dtype torch\.bool.* is torch\.int64.*ids\.to\(",
        ),
        (torch.zeros(3), r"dtype torch\.float32"),
        (torch.zeros(3, dtype=torch.bool), r"dtype torch\.bool"),
        (ints(3, dtype=torch.uint64), r"dtype torch\.uint64"),
        ([1, 2, 3], r"got list; give a torch\.Tensor of torch\.int64"),
        (np.zeros(3, np.int64), r"got ndarray"),
        (None, r"got NoneType"),
        (ints(4), r"shape \(4,\) is not \(\.\.\., 3\), one column for each table; give that shape, or table_ids"),
        (ints(3, 2), r"shape \(3, 2\) is not \(\.\.\., 3\)"),
        (ints(3), r"shape \(3,\) is not \(\.\.\., 3\)"),
        (ints(), r"shape \(\) is not \(\.\.\., 3\)"),
        (ints(2, 3, device="meta"), r"ids of embedding 'rows' are on meta.*ids\.to\('cpu'\)"),
        (ints(2, 3).to_sparse(), r"ids of embedding 'rows'"),
    ],
)
def test_ids_of_a_wrong_kind_or_shape_are_refused(embedding: MultiTableEmbedding, ids: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        embedding(ids)


@pytest.mark.parametrize(
    ("table_ids", "message"),
    [
        (torch.zeros(4), r"table_ids of embedding 'rows': got torch\.float32; .* of an integer dtype"),
        (torch.zeros(4, dtype=torch.bool), r"got torch\.bool"),
        (torch.zeros(4, dtype=torch.complex64), r"got torch\.complex64"),
        ("0", r"table_ids of embedding 'rows': give whole numbers"),
        (0.5, r"give whole numbers"),
        (ints(3), r"shape \(3,\) does not broadcast to the shape of ids, \(2, 4\); give one table id"),
        (ints(2), r"shape \(2,\) does not broadcast"),
        (ints(2, 2, 4), r"shape \(2, 2, 4\) does not broadcast"),
        (ints(4, device="meta"), r"table_ids of embedding 'rows'.* meta"),
        (torch.tensor([0, 1, 2, 3]), r"table_ids of embedding 'rows': table id 3 at position 3; .* from 0 to 2"),
        (torch.tensor([0, -1, 0, 0]), r"table id -1 at position 1"),
        (torch.tensor([0, 2**32, 0, 0]), r"table id 4294967296 at position 1"),
        (torch.tensor([0, 0, 2**32 + 1, 0]), r"table id 4294967297 at position 2"),
        (torch.tensor([-(2**63), 0, 0, 0]), r"table id -9223372036854775808 at position 0"),
        (torch.full((4,), 255, dtype=torch.uint8), r"table id 255 at position 0"),
    ],
)
def test_table_ids_of_a_wrong_kind_shape_or_range_are_refused(
    embedding: MultiTableEmbedding, table_ids: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        embedding(ints(2, 4), table_ids)


@pytest.mark.parametrize("table", [3, -1, 2**32])
def test_table_ids_out_of_range_are_refused_in_every_way_in(embedding: MultiTableEmbedding, table: int) -> None:
    uses: list[Callable[[], Any]] = [
        lambda: embedding.get([1, 2], [0, table]),
        lambda: embedding.put([1, 2], torch.ones(2, DIM), [0, table]),
        lambda: embedding.pin([Lookup(torch.tensor([1, 2]), torch.tensor([0, table]))]),
    ]
    for use in uses:
        with pytest.raises(InputError, match=rf"table id {table} .*they run from 0 to 2"):
            use()


@pytest.mark.parametrize(
    "keys", [[1.5], ["a"], [None], None, True, [2**63], [-(2**63) - 1], [2**70], [[1, 2], [3]], {1: 2}, float("nan")]
)
def test_keys_that_the_key_type_cannot_hold_are_refused(embedding: MultiTableEmbedding, keys: Any) -> None:
    with pytest.raises(InputError, match=r"keys of embedding 'rows': give whole numbers that torch\.int64 can hold"):
        embedding.get(keys, 0)


def test_keys_of_other_key_types_are_checked_against_them() -> None:
    for key_type, wrong in (
        (torch.int32, 2**31),
        (torch.int32, -(2**31) - 1),
        (torch.uint64, -1),
        (torch.uint64, 2**64),
    ):
        with make(options("device"), key_type=key_type, tables=1) as made:
            with pytest.raises(InputError, match=f"whole numbers that {key_type} can hold"):
                made.get([wrong])
            with pytest.raises(InputError, match=f"key_type is {key_type}"):
                made.get(torch.tensor([1]))
            assert made.get([torch.iinfo(key_type).max]).shape == (1, DIM)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.zeros(2, DIM + 1), r"rows of embedding 'rows': torch\.float32 \(2, 6\); give float32 \(2, 5\)"),
        (torch.zeros(3, DIM), r"\(3, 5\); give float32 \(2, 5\)"),
        (torch.zeros(DIM), r"\(5,\)"),
        (0.0, r"\(1,\)"),
        (torch.zeros(2, DIM, dtype=torch.float64), r"torch\.float64"),
        (np.zeros((2, DIM)), r"torch\.float64"),
        (torch.zeros(2, DIM, dtype=torch.int64), r"torch\.int64"),
        ([[0.0] * DIM, [0.0]], r"rows of embedding 'rows'"),
        ("rows", r"rows of embedding 'rows'"),
        (None, r"rows of embedding 'rows'"),
        (torch.zeros(2, DIM, device="meta"), r"rows of embedding 'rows'.*meta"),
    ],
)
def test_rows_of_a_wrong_kind_or_shape_are_refused(embedding: MultiTableEmbedding, rows: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        embedding.put([1, 100], rows, 0)


@pytest.mark.parametrize("tables", ["a", [[0, 1], [1]], [0.5, 1.0], [0, 0, 0]])
def test_table_ids_of_get_and_put_that_are_no_integers_are_refused(embedding: MultiTableEmbedding, tables: Any) -> None:
    for use in (lambda: embedding.get([1, 2], tables), lambda: embedding.put([1, 2], torch.zeros(2, DIM), tables)):
        with pytest.raises(InputError, match=r"table_ids of embedding 'rows'"):
            use()


def test_gradients_of_a_wrong_shape_change_no_row(embedding: MultiTableEmbedding) -> None:
    shapes = [(3, DIM), (DIM, 2), (1, DIM), (0, DIM)]
    for grads in [*map(torch.ones, shapes), torch.ones(2, DIM).double()]:
        pinned = embedding.pin([Lookup(torch.arange(2), ints(2))])
        with pytest.raises(InputError, match=rf"gradient of embedding 'rows'.*give torch.float32 \(2, {DIM}\)"):
            pinned.update([grads])
        embedding.release()
    assert embedding.metrics()["table"]["step"] == 1


def test_a_module_moved_to_a_device_without_tables_is_refused_not_served_garbage() -> None:
    with make(options("device"), tables=1).to("meta") as moved, pytest.raises(TierbedError, match="meta"):
        moved(torch.tensor([1]))


@pytest.mark.parametrize("store", STORES)
def test_a_path_that_is_a_file_or_below_one_is_refused_and_the_file_kept(tmp_path: Path, store: str) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    (tmp_path / "rows").write_text("mine")
    for path in (file, file / "below", tmp_path):
        made = make(options(store, path))
        for _ in range(2):
            with pytest.raises(
                StoreError, match=r"cannot open store folder '.*rows'.*persistent_path must be a folder"
            ):
                made.size()
    assert (file.read_text(), (tmp_path / "rows").read_text()) == ("mine", "mine")
    (tmp_path / "rows").unlink()
    assert made.size() == 0  # the mistake repaired, the same embedding opens
    made.close()


@pytest.mark.parametrize("store", ["device", "ssd"])
def test_a_path_that_cannot_be_written_is_refused(store: str) -> None:
    with pytest.raises(StoreError, match=r"store folder '/proc/tierbed/rows'.*that this user can write"):
        make(options(store, Path("/proc/tierbed"))).size()


def hold(folder: Path, pipe: Connection) -> None:
    with StoreFolder(folder):
        pipe.send("held")
        pipe.recv()


def test_a_folder_in_use_by_another_process_is_refused_until_it_ends(tmp_path: Path) -> None:
    child, pipe = with_pipe(hold, tmp_path / "rows")
    with child, pipe:
        assert pipe.recv() == "held"
        made = make(options("device", tmp_path), "sgd", tables=1)
        for use in (made.size, lambda: train(made, [1]), lambda: made.put([1], torch.ones(1, DIM))):
            with pytest.raises(StoreError, match=rf"rows' is in use by process {child.pid}: close the embedding there"):
                use()
        pipe.send("let go")
        assert child.wait() == 0
    train(made, [1])
    assert made.size() == 1
    made.close()


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_dim": 7}, r"rows' holds rows of embedding_dim \[5\], not \[7\]; give that embedding_dim, or"),
        ({"key_type": torch.int32}, r"holds rows of key_type int64, not int32"),
        ({"key_type": torch.uint64}, r"holds rows of key_type int64, not uint64"),
        ({"tables": TABLES[:2]}, r"holds 3 tables, not 2; give all of them"),
    ],
)
@pytest.mark.rotated("store")
def test_rows_of_another_shape_are_refused_and_kept(
    tmp_path: Path, store: str, changes: dict[str, Any], message: str
) -> None:
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
def test_training_with_another_optimizer_than_the_stored_one_is_refused(tmp_path: Path, store: str, when: str) -> None:
    with make(options(store, tmp_path), "adam") as first:
        train(first, range(30))
        before = contents(first)
    for optimizer in ("sgd", "adagrad", "adamw"):
        other = make(options(store, tmp_path))
        if when == "after reading":
            assert other.size() == 30
        with pytest.raises(OptimizerError, match=r"optimizer adam\b.*not of"):  # noqa: PT012 either may be the first to know
            attach(other, optimizer)
            train(other, [1])
        other.close()
    with make(options(store, tmp_path, open="error")) as reader:
        assert reader.size() == 30
        attach(reader, "adam")
        assert contents(reader).tobytes() == before.tobytes()


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", ".hidden", "new\nline", 7, None])
def test_a_snapshot_name_that_is_no_name_is_refused(tmp_path: Path, name: Any) -> None:
    with make(options("device", tmp_path), "sgd") as made:
        train(made, range(5))
        before = sorted(tmp_path.rglob("*"))
        for use in (made.save_snapshot, made.load_snapshot):
            with pytest.raises(tierbed.SnapshotError, match=r"snapshot name"):
                use(name)
        assert sorted(tmp_path.rglob("*")) == before
        assert made.size() == 5


def test_a_snapshot_without_a_place_is_refused() -> None:
    with make(options("device"), "sgd") as made:
        for use in (made.save_snapshot, made.load_snapshot):
            with pytest.raises(
                tierbed.SnapshotError, match=r"'rows' has no persistent_path.*give one in its store options"
            ):
                use("s")


@pytest.mark.parametrize(
    ("key_type", "given", "remedy"),
    [
        (torch.int64, torch.uint64, r"ids\.view\(torch\.int64\)"),
        (torch.uint64, torch.int64, r"ids\.view\(torch\.uint64\)"),
        (torch.int32, torch.int64, r"key_type=torch\.int64; ids\.to\(torch\.int32\) would drop the high bits"),
    ],
)
def test_the_remedy_for_ids_of_another_dtype_keeps_their_values(
    key_type: torch.dtype, given: torch.dtype, remedy: str
) -> None:
    with make(options("host"), key_type=key_type) as embedding, pytest.raises(InputError, match=remedy):
        embedding(torch.tensor([1, 2]).to(given), 0)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("kind", ["tensor", "array", "list"])
def test_a_put_of_values_that_are_not_finite_names_the_key_and_writes_nothing(value: float, kind: str) -> None:
    rows = torch.zeros(2, DIM)
    rows[1, 2] = value
    given = {"tensor": rows, "array": rows.numpy(), "list": rows.tolist()}[kind]
    with make(options("host")) as embedding:
        with pytest.raises(InputError, match=r"for key 8 is not finite.*allow_nonfinite=True"):
            embedding.put([7, 8], given, 0)
        assert embedding.size() == 0
        embedding.put([7, 8], given, 0, allow_nonfinite=True)
        assert torch.equal(embedding.get([7, 8], 0).isfinite(), rows.isfinite())
