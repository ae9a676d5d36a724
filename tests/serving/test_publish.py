"""A publish writes all rows of a snapshot and no others, from increments or in full; or nothing that readers see."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support import shim
from support.embeddings import make, train
from support.examples import examples
from support.killed import Warm
from support.limits import file_size_limit
from support.served_rows import rows_in, rows_of, save_finite, snapshot_of
from support.snapshot_parts import in_parts
from support.stores import STORES, options
from tierbed import InputError, MultiTableEmbedding, OptionError, ServingError, SnapshotError
from tierbed.serving import ServingFolder, Version, merging, publish
from tierbed.serving.row_file import encode, hash_rows
from tierbed.serving.served import ServedVersion, open_served
from tierbed.snapshots import Snapshot, list_snapshots

Folders = pytest.TempPathFactory


@pytest.fixture
def embedding(tmp_path: Path) -> Iterator[MultiTableEmbedding]:
    """Trained for a step."""
    with make(options("device", tmp_path), "adagrad") as embedding:
        train(embedding, range(40))
        yield embedding


def save(embedding: MultiTableEmbedding, path: Path, kind: str = "incremental") -> Snapshot:
    """A snapshot s1, s2 and so on, of which the first is full."""
    names = [snapshot.name for snapshot in list_snapshots(path / "rows" / "snapshots").snapshots]
    number = 1 + max((int(name[1:]) for name in names), default=0)
    embedding.save_snapshot(f"s{number}", kind if number > 1 else "full")
    return snapshot_of(embedding, path, f"s{number}")


def step(embedding: MultiTableEmbedding, path: Path, ids: Any = range(5)) -> Snapshot:
    """Train a step, and save it as an increment."""
    train(embedding, ids)
    return save(embedding, path)


def named_files(folder: Path) -> set[str]:
    """The files that versions and PENDING name."""
    opened = ServingFolder(folder)
    records = [opened.read_pending(), *map(opened.read_version, opened.list_versions())]
    return {file.name for record in records for file in record.files}


def sizes(version: Version) -> list[tuple[int, int]]:
    """Rows in the base and in the delta of each table; -1 without a delta."""
    (embedding,) = version.embeddings
    return [(table.base.rows, table.delta.rows if table.delta else -1) for table in embedding.tables]


OPERATIONS = ["train", "train", "train", "put", "delete", "save", "back", "rebase", "prune", "full"]


@examples(0.5)
@given(st.lists(st.sampled_from(OPERATIONS), max_size=12), st.sampled_from(["evicts", "expires", ""]), st.randoms())
def test_each_version_has_exactly_the_rows_of_the_trainer(
    tmp_path_factory: Folders, operations: list[str], leaving: str, random: Any
) -> None:
    path = tmp_path_factory.mktemp("publish")
    rules: Any = {"evicts": {"capacity": 120, "eviction": "lru"}, "expires": {"ttl_steps": 2}, "": {}}[leaving]
    store = "device" if rules else random.choice(STORES)
    dtype = random.choice([torch.float32, torch.bfloat16, torch.float16])
    with make(options(store, path, **rules), "adagrad", tables=2, dtype=dtype) as embedding:
        train(embedding, range(60))
        save(embedding, path)
        for operation in operations:
            ids = torch.tensor(random.sample(range(100), 8))
            if operation == "train":
                train(embedding, ids, random.randrange(2))
            elif operation == "put":
                embedding.put(ids, torch.full((8, embedding.dim), random.random()), table_ids=random.randrange(2))
            elif operation == "delete":
                embedding.delete(ids, table_ids=0)
            elif operation == "back":
                embedding.load_snapshot(random.choice(list_snapshots(path / "rows" / "snapshots").snapshots).name)
                train(embedding, ids)
            snapshot = save(embedding, path, "full" if operation == "full" else "incremental")
            more = {"encoding": "float32", "allow_older": True, "check": False}
            version = publish(path / "served", snapshot, rebase=operation == "rebase", **more)
            assert rows_of(path / "served") == rows_in(snapshot)
            check_lookups(path / "served", embedding)
            in_ranks = in_parts(snapshot, path / "parts", random.randrange(1, 4))
            whole = publish(path / "whole", in_ranks, rebase=True, **more)
            assert rows_of(path / "whole") == rows_of(path / "served")
            if all(table.delta is None for each in version.embeddings for table in each.tables):
                assert contents_of(path / "whole", whole) == contents_of(path / "served", version)
            shutil.rmtree(path / "parts")
            if operation == "prune":
                embedding.prune_snapshots(keep_last=2)
    shutil.rmtree(path)


def check_lookups(folder: Path, embedding: MultiTableEmbedding) -> None:
    """Lookups have the trainer's bits, for rows that it has, that are gone, and that it never had."""
    ids = torch.arange(-20, 120).repeat(2)
    tables = torch.arange(2).repeat_interleave(140)
    embedding.eval()
    with open_served(folder) as served:
        found = served["rows"](ids, table_ids=tables)
    assert found.numpy().tobytes() == embedding(ids, table_ids=tables).detach().to(torch.float32).numpy().tobytes()
    embedding.train()


def contents_of(folder: Path, version: Version) -> list[bytes]:
    return [ServingFolder(folder).find_file(file).read_bytes() for file in version.files]


def test_only_increments_are_read_and_only_changed_tables_written(
    tmp_path: Path, embedding: MultiTableEmbedding, caplog: pytest.LogCaptureFixture
) -> None:
    first = publish(tmp_path / "served", save(embedding, tmp_path), tensors={"w": torch.zeros(2)})
    missing = min((tmp_path / "rows" / "snapshots" / "s1").glob("bucket-*.npy"))
    missing.unlink()
    train(embedding, range(3), 2)
    second = publish(tmp_path / "served", step(embedding, tmp_path, range(5)), tensors={})
    assert sizes(first) == [(40, -1), (0, -1), (0, -1)]
    assert sizes(second) == [(40, 5), (0, -1), (0, 3)]
    assert second.tensors is None
    third = publish(tmp_path / "served", step(embedding, tmp_path, range(3, 8)))
    assert sizes(third) == [(40, 8), (0, -1), (3, -1)]  # the new base of table 2, from the last publish
    assert not caplog.records
    with pytest.raises(SnapshotError, match=missing.name):
        publish(tmp_path / "served", snapshot_of(embedding, tmp_path, "s3"), rebase=True)
    again = publish(tmp_path / "served", snapshot_of(embedding, tmp_path, "s3"), tensors={"w": torch.ones(2)})
    assert again.embeddings == third.embeddings
    assert again.tensors
    assert ServingFolder(tmp_path / "served").find_file(again.tensors).read_bytes()[-8:] == np.ones(2, "f4").tobytes()


@pytest.mark.parametrize("changed", [pytest.param(1, marks=pytest.mark.slow), 10, 100])
def test_a_new_base_is_written_when_it_saves_bytes(tmp_path: Path, changed: int) -> None:
    with make(options("device", tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, range(1000))
        publish(tmp_path / "served", save(embedding, tmp_path))
        seen, deltas, bases, count = {*os.listdir(tmp_path / "served" / "files")}, 0, 0, 0
        while bases < 3:
            snapshot = step(embedding, tmp_path, range(count * changed % 1000, count * changed % 1000 + changed))
            deltas += sizes(publish(tmp_path / "served", snapshot, keep=1))[0][1]
            files = {*os.listdir(tmp_path / "served" / "files")}
            bases += sum("base" in name for name in files - seen)
            seen |= files
            count += 1
            if count % 50 == 0:
                embedding.prune_snapshots(keep_last=2)
        best = (2 * 1000 * changed) ** 0.5  # rows written for each publish at the best number of publishes for a base
        assert (deltas + 3 * 1000) / count <= 1.2 * best + changed


def test_more_rows_than_are_sorted_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_finite(tmp_path / "s", 3000)
    publish(tmp_path / "one", Snapshot.open(tmp_path / "s"), "float32")
    monkeypatch.setattr(merging, "SORT_BYTES", 300)
    monkeypatch.setattr(merging, "PIECE_ROWS", 7)
    publish(tmp_path / "two", tmp_path / "s", "float32")
    assert rows_of(tmp_path / "one") == rows_of(tmp_path / "two") == rows_in(Snapshot.open(tmp_path / "s"))


def test_a_rollback_holds_until_it_is_released(tmp_path: Path, embedding: MultiTableEmbedding) -> None:
    served, folder = tmp_path / "served", ServingFolder(tmp_path / "served")
    for _ in range(3):
        publish(served, step(embedding, tmp_path), keep=2)
    assert folder.list_versions() == [2, 3]
    held = rows_of(served, folder.read_version(2))
    folder.rollback(2)
    for _ in range(3):
        version = publish(served, step(embedding, tmp_path), keep=2)
        assert (folder.read_current().version, folder.read_current().hold) == (2, True)
        assert rows_of(served) == held
    assert folder.list_versions() == [2, 5, 6]
    assert folder.release() == version
    assert rows_of(served) == rows_of(served, version) != held
    assert folder.prune(1) == [2, 5]
    assert {*os.listdir(served / "files")} == named_files(served)


def test_a_trainer_that_went_back_is_published_with_higher_numbers(
    tmp_path: Path, embedding: MultiTableEmbedding, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tierbed")
    served = tmp_path / "served"
    for _ in range(3):
        publish(served, step(embedding, tmp_path))
    embedding.load_snapshot("s1")
    train(embedding, range(90, 95))
    snapshot = save(embedding, tmp_path)
    caplog.clear()
    with pytest.raises(SnapshotError, match=r"'s4' is of step 3, .* version has step 4 .* allow_older=True"):
        publish(served, snapshot)
    version = publish(served, snapshot, allow_older=True)
    assert (version.version, version.step) == (4, 3)
    assert "all rows are written again, because snapshot 's4' is no increment of version 3" in caplog.text
    assert sizes(version)[0] == (45, -1)
    publish(tmp_path / "whole", snapshot)
    assert rows_of(served) == rows_of(tmp_path / "whole")
    assert publish(served, step(embedding, tmp_path)).version == 5


def needles_of(row: NDArray[np.float32], encoding: str, key: int) -> set[bytes]:
    """What shows a row: its encoded bytes, each pair of its numbers, and its hash and key as bytes and digits."""
    encoded = encode(row[None], encoding, 0, np.array([key]))[0].tobytes()
    found = {encoded, *(row[at : at + 2].tobytes() for at in range(len(row) - 1))}
    for number in (key, int(hash_rows(0, np.array([key], np.uint64))[0])):
        found |= {number.to_bytes(8, order) for order in ("little", "big")} | {b"%d" % number, b"%x" % number}
    return found


@pytest.mark.parametrize("encoding", ["float32", "int8"])
@pytest.mark.parametrize("recipe", ["prune", "keep", "merged"])
def test_deleted_rows_leave_no_byte_after_a_rebase_and_a_prune(
    tmp_path: Path, embedding: MultiTableEmbedding, encoding: str, recipe: str
) -> None:
    """recipe: whether the publish prunes, and whether a base with the row waits for the next version."""
    served, folder, key = tmp_path / "served", ServingFolder(tmp_path / "served"), 0x1122334455667788
    row = np.float32([7.123, 8.456, 9.789, 1.5, 2.25])
    needles = needles_of(row, encoding, key)
    is_secret = torch.tensor([key])

    def holders() -> set[str]:
        files = {path: path.read_bytes() for path in served.rglob("*") if path.is_file()}
        return {path.name.split("-")[2] for path, data in files.items() if any(one in data for one in needles)}

    publish(served, save(embedding, tmp_path), encoding)
    embedding.put(is_secret, torch.from_numpy(row)[None], table_ids=0)
    publish(served, step(embedding, tmp_path, range(40 if recipe == "merged" else 3)), encoding)
    assert holders() == ({"base", "delta"} if recipe == "merged" else {"delta"})
    assert bool(folder.read_pending().files) == (recipe == "merged")
    with open_served(served) as reader:
        assert not torch.equal(reader["rows"](is_secret, 0), before_training(is_secret))
        embedding.delete(is_secret, table_ids=0)
        publish(served, save(embedding, tmp_path), encoding)
        assert reader.refresh()
        assert torch.equal(reader["rows"](is_secret, 0), before_training(is_secret))
    assert "delta" in holders()
    folder.rollback(2)
    snapshot = snapshot_of(embedding, tmp_path, "s3")
    publish(served, snapshot, encoding, rebase=True, keep=1)
    folder.prune(1)
    assert "delta" in holders()  # a rollback keeps it
    folder.release()
    if recipe == "keep":
        publish(served, snapshot, encoding, rebase=True, keep=1)
    else:
        folder.prune(1)
    assert holders() == set()
    with open_served(served) as reader:
        assert torch.equal(reader["rows"](is_secret, 0), before_training(is_secret))
    assert not folder.verify(folder.read_current().version)


def before_training(ids: torch.Tensor) -> torch.Tensor:
    """The rows of ids of table 0 that were never trained."""
    with make(options("device"), "adagrad") as untrained:
        return untrained(ids, 0).detach()


def killed(path: str, call: str, number: int, when: str, full: bool, events: int) -> None:
    """Publish s2, and be killed at a call that changes the folder; or on a disk that is full from that call on."""
    served = Path(path, "served")
    shim.watch(served)
    if full:
        shim.fill_disk(True)
    else:
        shim.die_at(call, number, when)
    try:
        publish(served, Path(path, "rows", "snapshots", "s2"), "float32", tensors={"w": torch.ones(9)}, keep=1)
    except ServingError as error:
        os.write(events, f"{error}\n".encode())
    else:
        os.write(events, b"returned\n")
    shim.live_on()
    shim.fill_disk(False)


@pytest.mark.parametrize("call", ["sync", "rename", "write", "unlink"])
def test_a_killed_publish_leaves_a_version_and_the_next_one_cleans_up(tmp_path: Path, call: str) -> None:
    with make(options("device", tmp_path), "adagrad", tables=1) as embedding:
        snapshots = [step(embedding, tmp_path, range(number, 30 + number)) for number in range(3)]
    publish(tmp_path / "first", snapshots[0], "float32", tensors={"w": torch.zeros(9)})
    (tmp_path / "aside").mkdir()
    warm, served, number, has_returned = Warm(killed), tmp_path / "served", 1, False
    while not has_returned:
        shutil.rmtree(served, ignore_errors=True)
        shutil.copytree(tmp_path / "first", served)
        plan = {"path": str(tmp_path), "call": call, "number": number, "when": shim.WHEN[number % 2], "full": False}
        has_returned = warm.order(plan)["events"] == ["returned"]
        assert rows_of(served) in (rows_in(snapshots[0]), rows_in(snapshots[1]))
        assert all(not ServingFolder(served).verify(version) for version in ServingFolder(served).list_versions())
        publish(served, snapshots[2], "float32", tensors={"w": torch.zeros(9)})
        assert rows_of(served) == rows_in(snapshots[2])
        assert {*os.listdir(served / "files")} == named_files(served)
        number += 1
    assert number > 3, f"no {call} was reached"


def test_a_full_disk_leaves_the_version_and_no_files(tmp_path: Path, embedding: MultiTableEmbedding) -> None:
    served, first = tmp_path / "served", save(embedding, tmp_path)
    publish(served, first, "float32")
    step(embedding, tmp_path)
    before = {path.name for path in served.rglob("*")}
    events = Warm(killed).order({"path": str(tmp_path), "call": "", "number": 0, "when": "before", "full": True})[
        "events"
    ]
    assert "No space left" in events[0]
    assert "free space" in events[0]
    assert {path.name for path in served.rglob("*")} == before
    assert rows_of(served) == rows_in(first)


def test_bases_that_cannot_be_written_delay_no_version(
    tmp_path: Path, embedding: MultiTableEmbedding, caplog: pytest.LogCaptureFixture
) -> None:
    served = tmp_path / "served"
    train(embedding, range(1000))
    publish(served, save(embedding, tmp_path), "float32")
    publish(served, step(embedding, tmp_path, range(500)), "float32")
    snapshot = step(embedding, tmp_path, range(500))
    with file_size_limit(30_000):  # room for a delta
        version = publish(served, snapshot, "float32")
    assert sizes(version)[0] == (1000, 500)
    assert "is published, but without new bases for the next version: cannot write to" in caplog.text
    assert {*os.listdir(served / "files")} == named_files(served)
    snapshot = step(embedding, tmp_path, range(3))
    publish(served, snapshot, "float32")
    assert rows_of(served) == rows_in(snapshot)
    assert ServingFolder(served).read_pending().files


def test_foreign_files_are_not_removed(tmp_path: Path, embedding: MultiTableEmbedding) -> None:
    notes = tmp_path / "served" / "files" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.touch()
    publish(tmp_path / "served", save(embedding, tmp_path))
    ServingFolder(tmp_path / "served").prune(1)
    assert notes.exists()


def test_a_second_publisher_is_refused(tmp_path: Path, embedding: MultiTableEmbedding) -> None:
    snapshot, errors = save(embedding, tmp_path), []

    def publish_again(version: ServedVersion) -> None:
        with pytest.raises(ServingError, match="is locked by a publish, in this process: wait") as caught:
            publish(tmp_path / "served", snapshot)
        with pytest.raises(ServingError, match="is locked"):
            ServingFolder(tmp_path / "served").prune(1)
        errors.append(caught.value)

    publish(tmp_path / "served", snapshot, check=publish_again)
    assert len(errors) == 1
    publish(tmp_path / "served", snapshot)


def test_a_check_that_raises_hides_the_version_from_readers(tmp_path: Path, embedding: MultiTableEmbedding) -> None:
    served, first = tmp_path / "served", save(embedding, tmp_path)
    publish(served, first, "float32")

    def refuse(new: ServedVersion) -> None:
        ids, tables = torch.arange(9), torch.zeros(9, dtype=torch.int64)
        assert torch.equal(new["rows"](ids, table_ids=tables), embedding(ids, table_ids=tables))
        with open_served(served) as old:
            assert not torch.equal(old["rows"](ids, table_ids=tables), new["rows"](ids, table_ids=tables))
        raise ArithmeticError("the model is worse")

    snapshot = step(embedding, tmp_path)
    embedding.eval()
    with pytest.raises(ArithmeticError):
        publish(served, snapshot, "float32", check=refuse)
    assert rows_of(served) == rows_in(first)
    assert {*os.listdir(served / "files")} == named_files(served)
    embedding.delete(torch.arange(30), table_ids=0)
    with pytest.raises(ServingError, match=r"'rows' has 10 rows, and had 40: .* check=False"):
        publish(served, save(embedding, tmp_path), "float32")
    assert publish(served, snapshot_of(embedding, tmp_path, "s3"), "float32", check=False).version == 2


@pytest.mark.parametrize("encoding", ["int8", "float32", "bfloat16", "float16"])
def test_rows_that_are_not_finite_are_named(tmp_path: Path, embedding: MultiTableEmbedding, encoding: str) -> None:
    publish(tmp_path / "served", save(embedding, tmp_path), encoding)
    rows = torch.zeros(1, embedding.dim)
    rows[0, 3] = float("inf")
    embedding.put(torch.tensor([-5]), rows, table_ids=1, allow_nonfinite=True)
    with pytest.raises(InputError, match=r"(?s)(?=.*-5)(?=.*table 1)"):
        publish(tmp_path / "served", save(embedding, tmp_path), encoding)
    assert ServingFolder(tmp_path / "served").list_versions() == [1]


def test_wrong_arguments_and_other_models_are_refused_with_the_remedy(
    tmp_path: Path, embedding: MultiTableEmbedding
) -> None:
    served, snapshot = tmp_path / "served", save(embedding, tmp_path)
    for wrong, text in (
        ({"encoding": "int4"}, "encoding='int4': give one of 'int8', 'float32'"),
        ({"keep": 0}, "keep=0: give how many"),
        ({"rebase": 1}, "rebase=1: give True or False"),
        ({"snapshots": []}, r"snapshots=\[\]: give a snapshot"),
        ({"snapshots": [snapshot, snapshot]}, "two of embedding 'rows'"),
        ({"tensors": {"w": [1.0]}}, "give a dict of tensors"),
        ({"tensors": {"__metadata__": torch.ones(1)}}, "tensors: "),
    ):
        with pytest.raises(OptionError, match=text):
            publish(served, **{"snapshots": snapshot, **wrong})
    publish(served, snapshot)
    save_finite(tmp_path / "users", 9)
    with pytest.raises(
        ServingError, match=r"of embeddings \['users'\], and the serving folder has \['rows'\]: publish"
    ):
        publish(served, tmp_path / "users")
    for field, value in {"key_type": "uint64", "seed": 1, "padding_idx": 3}.items():
        save_finite(tmp_path / field, 9, 10, **{"name": "rows", "seed": 0, field: value})
        with pytest.raises(ServingError, match=f"embedding 'rows' has {field}={value!r} .* in another folder"):
            publish(served, tmp_path / field)
    with pytest.raises(SnapshotError, match="no snapshot 's9'"):
        publish(served, tmp_path / "rows" / "snapshots" / "s9")


def test_damage_to_files_and_records_is_found(tmp_path: Path, embedding: MultiTableEmbedding) -> None:
    served = tmp_path / "served"
    publish(served, save(embedding, tmp_path))
    publish(served, step(embedding, tmp_path), tensors={"w": torch.ones(3)})
    folder = ServingFolder(served)
    for path in [path for path in served.rglob("*") if path.is_file() and path.name not in ("LOCK", "PENDING")]:
        data = path.read_bytes()
        for damaged in (
            data[:-1],
            b"",
            bytes([data[0] ^ 1]) + data[1:],
            data[:-9] + bytes([data[-9] ^ 64]) + data[-8:],
        ):
            path.write_bytes(damaged)
            if path.parent.name == "files":
                assert any(path.name in text for version in folder.list_versions() for text in folder.verify(version))
            else:
                with pytest.raises(ServingError, match=f"{path.name}' is damaged or foreign"):
                    folder.read_version(folder.read_current().version), folder.read_version(1)
        path.write_bytes(data)
    (served / "CURRENT").unlink()
    with pytest.raises(ServingError, match="has no file CURRENT: publish a version"):
        folder.read_current()
    with pytest.raises(ServingError, match="no version 7; it has: 1, 2"):
        folder.rollback(7)


ODD = [None, -1, 1 << 63, 10**30, 1.5, True, "", "../x", [], [[]], {}, "int8"]


def test_forged_records_are_refused(tmp_path: Path, embedding: MultiTableEmbedding) -> None:
    served = tmp_path / "served"
    publish(served, save(embedding, tmp_path), tensors={"w": torch.ones(3)})
    folder, path = ServingFolder(served), served / "versions" / "000001.json"
    value = json.loads(path.read_bytes().partition(b"\n")[2])

    def forge(value: Any, part: Any) -> None:
        """Replace each value in `part` of the record, one after the other."""
        for key in part if isinstance(part, dict) else range(len(part)):
            before = part[key]
            for odd in ODD:
                part[key] = odd
                line = json.dumps(value).encode()
                path.write_bytes(b"%08x\n%s\n" % (crc32(line), line))
                with contextlib.suppress(ServingError):
                    assert folder.read_version(1).version == 1
            part[key] = before
            if isinstance(before, (dict, list)):
                forge(value, before)

    forge(value, value)
    line = json.dumps({**value, "format": 9}).encode()
    path.write_bytes(b"%08x\n%s\n" % (crc32(line), line))
    with pytest.raises(ServingError, match="its format is 9, and this tierbed reads 1: upgrade"):
        folder.read_version(1)


def test_bases_of_an_overtaken_version_are_not_used(tmp_path: Path, embedding: MultiTableEmbedding) -> None:
    served, copy = tmp_path / "served", tmp_path / "copy"
    publish(served, save(embedding, tmp_path))
    publish(served, step(embedding, tmp_path, range(40)))
    assert ServingFolder(served).read_pending().files
    shutil.copytree(served, copy)
    publish(served, snapshot_of(embedding, tmp_path, "s2"), "float32")
    shutil.copytree(copy / "files", served / "files", dirs_exist_ok=True)
    shutil.copy(copy / "PENDING", served / "PENDING")  # as after a kill before the publish replaced it
    last = step(embedding, tmp_path)
    publish(served, last, "float32")
    assert rows_of(served) == rows_in(last)
    open_served(served).close()


def test_a_new_folder_whose_version_has_the_same_number_is_taken(
    tmp_path: Path, embedding: MultiTableEmbedding
) -> None:
    served = tmp_path / "served"
    publish(served, save(embedding, tmp_path), "float32")
    with open_served(served) as reader:
        assert not reader.refresh()
        shutil.rmtree(served)
        publish(served, step(embedding, tmp_path), "float32")
        assert reader.refresh()
        with torch.no_grad():
            assert torch.equal(reader["rows"](torch.arange(9), 0), embedding(torch.arange(9), 0))


def test_dense_weights_are_not_left_out_by_mistake(tmp_path: Path, embedding: MultiTableEmbedding) -> None:
    served = tmp_path / "served"
    publish(served, save(embedding, tmp_path), tensors={"w": torch.ones(3)})
    last = step(embedding, tmp_path)
    with pytest.raises(OptionError, match=r"tensors=None, and version 1 has dense weights.*tensors=\{\}"):
        publish(served, last)
    assert publish(served, last, tensors={}).tensors is None
    assert publish(served, last).tensors is None
