"""Served lookups answer like the trained embedding in evaluation, in every form of lookup and every encoding."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import tierbed
from support.background_saves import until
from support.embeddings import DIM, TABLES, make, train
from support.examples import examples
from support.served_rows import save_finite, snapshot_of
from support.stores import options
from tierbed import ClosedError, InputError, MultiTableEmbedding, OptionError, ServingError
from tierbed.serving import ServingFolder, open_served, publish
from tierbed.serving.row_file import ENCODINGS, decode, encode
from tierbed.serving.served import Served

PADDING = -3
DELETED, OTHER_IDS = {(0, 4), (0, 5)}, [-7, 2**62]
STEPS = (range(8), range(4, 12))  # the ids of each snapshot


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MultiTableEmbedding]:
    """Three tables with rows in bases, in deltas and with deleted rows, published with each encoding."""
    path = tmp_path_factory.mktemp("trained")
    tables = [tierbed.make_table_options(each, name=name) for each, name in zip(TABLES, "abc", strict=True)]
    tables[2] = tierbed.make_table_options(tables[2], ids=12, bad_ids="drop")
    store = options("device", path)
    with MultiTableEmbedding("rows", DIM, torch.float32, torch.int64, tables, store, padding_idx=PADDING) as embedding:
        for number, ids in enumerate(STEPS, 1):
            for table in range(3):
                embedding.put([*ids], torch.randn(len(ids), DIM).numpy(), table_ids=table)
            if number == 2:
                embedding.delete(torch.tensor([4, 5]), table_ids=0)
                embedding.put(torch.tensor(OTHER_IDS), -torch.zeros(2, DIM), table_ids=1)
            embedding.save_snapshot(f"s{number}", "full" if number == 1 else "incremental")
            for encoding in ENCODINGS:
                version = publish(path / encoding, snapshot_of(embedding, path, f"s{number}"), encoding)
                entry = version.embeddings[0]
                limits = {"ids": [None, None, 12], "bad_ids": [None, None, "drop"]}  # snapshots do not have them
                entry = replace(entry, description=entry.description | limits)
                ServingFolder(path / encoding).write_version(replace(version, embeddings=(entry,)))
        embedding.eval()
        embedding.served = {encoding: path / encoding for encoding in ENCODINGS}  # type: ignore[assignment]
        yield embedding


def naive(embedding: MultiTableEmbedding, encoding: str, lookup: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """Read rows one by one from the trainer, encode and decode the trained ones, and pool them in order."""
    ids, pooling, offsets, weights = (lookup[name] for name in ("ids", "pooling", "offsets", "weights"))
    flat = ids.flatten().tolist()
    if offsets is None:
        offsets = torch.arange(ids.shape[:-1].numel() + 1) * ids.shape[-1] if pooling else torch.arange(len(flat) + 1)
    bags = [range(*pair) for pair in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    tables = lookup["table_ids"]
    tables = [bag % 3 for bag in range(len(bags))] if tables is None else tables.flatten().tolist()
    result = np.zeros((len(bags), DIM), np.float32)
    for number, (bag, table) in enumerate(zip(bags, tables, strict=True)):
        count = 0
        for at in bag:
            if flat[at] == PADDING or (table == 2 and not 0 <= flat[at] < 12):
                continue
            row = read_row(embedding, encoding, flat[at], table)
            if pooling is None:
                result[number] = row
            else:
                result[number] += row if weights is None else weights.flatten()[at].numpy() * row
            count += 1
        if pooling == "mean" and count:
            result[number] /= np.float32(count)
    shape = ids.shape if pooling is None else (len(bags),) if lookup["offsets"] is not None else ids.shape[:-1]
    return torch.from_numpy(result).to(dtype).reshape(*shape, DIM)


def read_row(embedding: MultiTableEmbedding, encoding: str, id: int, table: int) -> NDArray[np.float32]:
    row = embedding(torch.tensor([id]), table_ids=table).detach().numpy()
    is_known = (0 <= id < 12 and (table, id) not in DELETED) or (table == 1 and id in OTHER_IDS)
    if not is_known:
        return np.asarray(row[0], np.float32)  # an initial row is not encoded
    return np.asarray(decode(encode(row, encoding, 0, np.array([0])), encoding, DIM)[0], np.float32)


@st.composite
def lookups(draw: st.DrawFn) -> dict[str, Any]:
    ids = st.sampled_from([*range(-3, 16), -7, 2**62, -(2**63)])
    pooling = draw(st.sampled_from([None, "sum", "mean"]))
    has_offsets = pooling is not None and draw(st.booleans())
    if has_offsets:
        lengths = draw(st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 70]), max_size=20))
        offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=draw(st.sampled_from([torch.int32, torch.int64])))
        shape, bags = (sum(lengths),), (len(lengths),)
    else:
        bags = (draw(st.integers(0, 40)), 3)
        offsets, shape = None, (*bags, draw(st.integers(0, 3))) if pooling else bags
    count = int(np.prod(shape))
    drawn = draw(st.lists(ids, min_size=count, max_size=count))
    tables = draw(st.lists(st.integers(0, 2), min_size=int(np.prod(bags)), max_size=int(np.prod(bags))))
    weights = torch.rand(shape) - 0.5 if pooling and draw(st.booleans()) else None
    table_ids = torch.tensor(tables, dtype=torch.int64).reshape(bags) if has_offsets or draw(st.booleans()) else None
    made = torch.tensor(drawn, dtype=torch.int64).reshape(shape)
    return {"ids": made, "table_ids": table_ids, "offsets": offsets, "pooling": pooling, "weights": weights}


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(lookup=lookups(), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
@examples(2)
def test_lookups_have_the_trainers_bits(
    embedding: MultiTableEmbedding, encoding: str, lookup: dict[str, Any], dtype: torch.dtype
) -> None:
    with open_served(embedding.served[encoding], output_dtype=dtype) as served:  # type: ignore[index]
        rows = served["rows"](**lookup)
    expected = naive(embedding, encoding, lookup, dtype)
    assert rows.shape == expected.shape
    assert rows.flatten().view(torch.uint8).tolist() == expected.flatten().view(torch.uint8).tolist()
    if encoding == "float32" and dtype == torch.float32:
        assert torch.equal(rows.view(torch.int32), embedding(**lookup).detach().view(torch.int32))


def test_features_unknown_ids_and_metrics(embedding: MultiTableEmbedding) -> None:
    path = embedding.served["float32"]  # type: ignore[index]
    ids, offsets = torch.arange(18), torch.arange(0, 19, 3)
    more = {"table_ids": ["b", "a"], "pooling": "sum", "features": [2, 0], "num_features": 3}
    with open_served(path, "zeros") as served:
        with open_served(path) as initial:
            assert torch.equal(initial["rows"](ids, offsets=offsets, **more), embedding(ids, offsets=offsets, **more))
        rows = served["rows"](torch.tensor([[99, 99, 8], [4, 99, 99]]))
        assert (rows[0, :2] == 0).all()
        assert (rows[1] == 0).all()
        assert torch.equal(rows[0, 2], embedding(torch.tensor(8), table_ids=2))
        counts = served.metrics()["embeddings"]["rows"]
        times = [counts.pop(f"lookup_seconds_{quantile}") for quantile in ("p50", "p90", "p99", "max")]
        assert times == sorted(times)
        assert times[0] > 0
        assert counts == {"lookups": 1, "ids": 6, "unknown": 4, "delta": 2, "dropped": 1}
        assert served.metrics()["version"] == 2
        assert served.metrics()["seconds_behind"] >= 0


def test_errors_are_those_of_the_embedding(embedding: MultiTableEmbedding) -> None:
    one, two = torch.tensor([1]), torch.tensor([0, 2])
    with open_served(embedding.served["int8"]) as served:  # type: ignore[index]
        for arguments in (
            {"ids": one},
            {"ids": one.float(), "table_ids": 0},
            {"ids": one, "table_ids": 3},
            {"ids": one, "table_ids": "d"},
            {"ids": one, "table_ids": torch.tensor([0]), "offsets": two, "pooling": "sum"},
            {"ids": one, "table_ids": 0, "weights": torch.ones(1)},
        ):
            messages = set()
            for look_up in (served["rows"], embedding):
                with pytest.raises(InputError) as raised:
                    look_up(**arguments)
                messages.add(str(raised.value))
            assert len(messages) == 1, messages
        with pytest.raises(OptionError, match="'items' is not a served embedding: give one of 'rows'"):
            served["items"]
        rows = served["rows"]
    for use in (lambda: rows(one), lambda: served["rows"], served.refresh, served.metrics, lambda: served.version):
        with pytest.raises(ClosedError, match="is closed: open it again"):
            use()


def test_an_illegal_id_raises_and_bad_arguments_name_the_remedy(tmp_path: Path) -> None:
    table = [tierbed.make_table_options(TABLES[0], ids=5)]
    with MultiTableEmbedding("few", DIM, torch.float32, torch.int32, table, options("device", tmp_path)) as few:
        few.put(torch.arange(5, dtype=torch.int32), torch.ones(5, DIM))
        few.save_snapshot("s", "full")
        version = publish(tmp_path / "served", snapshot_of(few, tmp_path, "s"))
    assert version.embeddings[0].description.get("ids") is None  # a snapshot does not know them
    for wrong, error in (({"unknown": "none"}, OptionError), ({"output_dtype": torch.int8}, OptionError)):
        with pytest.raises(error, match="give"):
            open_served(tmp_path / "served", **wrong)
    with pytest.raises(ServingError, match="publish a version there first"):
        open_served(tmp_path / "empty")


def test_a_refresh_changes_the_version_and_shares_unchanged_files(tmp_path: Path) -> None:
    with make(options("device", tmp_path), "adagrad", tables=2) as embedding:
        numbers = itertools.count()

        def publish_step(ids: range) -> None:
            train(embedding, ids)
            name = f"s{(number := next(numbers))}"
            embedding.save_snapshot(name, "incremental" if number else "full")
            publish(tmp_path / "served", snapshot_of(embedding, tmp_path, name), "float32")

        publish_step(range(40))
        with open_served(tmp_path / "served") as served:
            assert not served.refresh()
            assert served.version == 1
            old, mapped = served.current, count_mapped(tmp_path)
            publish_step(range(5))
            assert served.version == 1
            assert served.refresh()
            assert served.version == 2
            assert count_mapped(tmp_path) == mapped + 1  # the delta
            ids = torch.arange(40)
            assert torch.equal(served["rows"](ids, table_ids=0), embedding(ids, table_ids=0))
            assert not torch.equal(old["rows"](ids, table_ids=0), embedding(ids, table_ids=0))
            publish_step(range(5))
            entry = ServingFolder(tmp_path / "served").read_version(3).embeddings[0].tables[0].delta
            assert entry is not None
            path = tmp_path / "served" / "files" / entry.name
            path.write_bytes(path.read_bytes()[:-9])
            with pytest.raises(ServingError, match=r"version 3 cannot be opened.*truncated"):
                served.refresh()
            assert served.version == 2
            assert served.metrics()["failed_refreshes"] == 1
            del old
        assert count_mapped(tmp_path) == 0


def test_metrics_are_exported_to_prometheus(embedding: MultiTableEmbedding) -> None:
    registry = prometheus_client.CollectorRegistry(auto_describe=True)
    with open_served(embedding.served["int8"]) as served:  # type: ignore[index]
        registry.register(served)
        served["rows"](torch.tensor([[99, 99, 8]]))
        exported = {
            (sample.name, sample.labels.get("quantile")): sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.labels.get("embedding", "rows") == "rows"
        }
        metrics = served.metrics()
    counts = metrics["embeddings"]["rows"]
    assert exported["tierbed_serving_version", None] == 2
    assert exported["tierbed_serving_failed_refreshes_total", None] == 0
    assert exported["tierbed_serving_ids_total", None] == 3
    assert exported["tierbed_serving_unknown_ids_total", None] == counts["unknown"] == 2
    assert exported["tierbed_serving_lookup_seconds", "0.99"] == counts["lookup_seconds_p99"]
    assert len(exported) == len(metrics) - 1 + len(counts)
    assert not [*registry.collect()]  # once it is closed


def test_following_refreshes_until_the_folder_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_finite(tmp_path / "s", 40)
    path = tmp_path / "served"
    publish(path, tmp_path / "s")
    served = open_served(path)
    for wrong in (0, -1.0, float("nan"), "1", True):
        with pytest.raises(OptionError, match=r"seconds=.*: give a number above 0"):
            served.follow(wrong)  # type: ignore[arg-type]
    served.follow(1e9)
    served.follow(0.001)  # replaces the one before
    publish(path, tmp_path / "s")
    until(lambda: served.version == 2)
    current = (path / "CURRENT").read_bytes()
    (path / "CURRENT").write_bytes(b"damaged")
    until(lambda: served.metrics()["failed_refreshes"] > 3)
    assert [record.message.count("damaged or foreign") for record in caplog.records] == [1]
    (path / "CURRENT").write_bytes(current)
    publish(path, tmp_path / "s")
    until(lambda: served.version == 3)
    served.close()
    until(lambda: not followers())
    with pytest.raises(ClosedError):
        served.follow()
    forgotten = open_served(path)
    forgotten.follow(0.001)
    del forgotten
    until(lambda: gc.collect() >= 0 and not followers())


def followers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tierbed-follow"]


def count_mapped(folder: Path) -> int:
    with open("/proc/self/maps") as maps:
        return len({line.split()[-1] for line in maps if str(folder) in line})


def test_threads_see_one_version_at_a_time(tmp_path: Path) -> None:
    """All rows of a version are equal, so a lookup that met two versions would show it."""
    ids, errors = torch.arange(600), list[Any]()
    with make(options("device", tmp_path), tables=1) as embedding:

        def publish_constant(value: float, served: Served | None = None) -> None:
            embedding.put(ids, torch.full((600, DIM), value))
            embedding.save_snapshot("s", overwrite=True)
            publish(tmp_path / "served", snapshot_of(embedding, tmp_path, "s"), "float32")

        publish_constant(1.0)
        with open_served(tmp_path / "served") as served:
            has_ended = threading.Event()

            def look_up() -> None:
                while not has_ended.is_set():
                    version = served.current
                    rows = version["rows"](ids)
                    if not (rows == version.version).all():
                        errors.append(rows.unique())

            threads = [threading.Thread(target=look_up) for _ in range(3)]
            for thread in threads:
                thread.start()
            for value in range(2, 8):
                publish_constant(float(value))
                served.refresh()
            has_ended.set()
            for thread in threads:
                thread.join()
            assert not errors
            assert served.version == 7
