from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from support.embeddings import DIM, make, train
from support.examples import examples
from support.exchange import FILES, VALUES, columns_of, dense, imported, whole, write_columns
from support.refusals import check_refusal
from support.small_snapshots import description
from support.stores import STORES, options
from tierbed import (
    EagerOptimizer,
    MultiTableEmbedding,
    make_host_mem_store_options,
    make_table_options,
    row_optimizer,
)
from tierbed.engine import _core
from tierbed.engine.errors import InputError
from tierbed.engine.options.initializers import make_constant_initializer
from tierbed.engine.row_format import LAST_STEP, row_dtype
from tierbed.optim import RowWiseAdagrad
from tierbed.snapshots import Snapshot, write_snapshot
from tierbed.snapshots.exchange.descriptions import description_for
from tierbed.snapshots.exchange.export import FORMATS, export_snapshot
from tierbed.snapshots.exchange.importing import import_snapshot
from tierbed.snapshots.exchange.sources import open_source


@pytest.mark.parametrize("format", FORMATS)
@examples(0.5)
@given(st.data(), st.sampled_from(["int32", "int64", "uint64"]), st.sampled_from([[], ["sum"], ["m", "row"]]))
def test_what_was_exported_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, format: str, data: st.DataObject, key_type: str, states: list[str]
) -> None:
    path = tmp_path_factory.mktemp("store")
    widths = [2, 1][: len(states)]
    about = description(
        key_type=key_type,
        columns=[1, 1],
        width=2 + sum(widths),
        optimizer="foreign" if states else None,
        states=states,
        state_widths=widths,
        initial=[0.5] * len(states),
        hyper=[0.1, 1e300, 1e-300],
        tables=[{"type": "constant", "value": 0.0}] * 3,
        seed=-(2**63),
        step=LAST_STEP,
    )
    limits = np.iinfo(key_type)
    some = st.sampled_from([limits.min, limits.max, 0, 1]) | st.integers(limits.min, limits.max)
    ids = data.draw(st.lists(st.tuples(st.integers(0, 2), some), max_size=12, unique=True))
    rows = np.zeros(len(ids), row_dtype(about["width"]))
    rows["table"], rows["key"] = [table for table, _ in ids], [key % 2**64 for _, key in ids]
    random = np.random.default_rng(len(ids))
    rows["values"] = random.integers(0, 2**32, rows["values"].shape, np.uint32).view(np.float32)
    rows["updates"], rows["step"] = random.integers(1, LAST_STEP, (2, len(rows)), np.uint32)
    rows = rows[np.lexsort((rows["key"], rows["table"], _core.buckets(rows["table"].copy(), rows["key"].copy())))]
    buckets = _core.buckets(rows["table"].copy(), rows["key"].copy())
    write_snapshot(path / "s", about, ((int(b), rows[i : i + 1]) for i, b in enumerate(buckets)))
    export_snapshot(Snapshot.open(path / "s"), path / f"x.{format}", format)
    manifest = import_snapshot(path / "store", "back", path / f"x.{format}")
    found = Snapshot.open(path / "store" / "snapshots" / "back")
    assert found.manifest == manifest
    assert found.description == about
    assert whole(found).tobytes() == rows.tobytes()


@pytest.mark.parametrize("store", STORES)
def test_a_dense_embedding_becomes_rows_of_every_store(tmp_path: Path, store: str) -> None:
    source = nn.Embedding(40, DIM, padding_idx=7)
    import_snapshot(tmp_path / "rows", "dense", source)
    with make(options(store, tmp_path), "adam", tables=1, padding_idx=7) as embedding:
        embedding.load_snapshot("dense")
        assert embedding.size() == 39
        ids = torch.arange(40)
        assert torch.equal(embedding(ids), source(ids))
        train(embedding, ids)
        assert embedding.size() == 39


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dense_tables_of_16_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = torch.randn(30, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.save({"emb.weight": weight}, tmp_path / "x.pt")
    save_file({"emb.weight": weight}, tmp_path / "x.safetensors")
    sources: list[Any] = [weight, nn.Embedding.from_pretrained(weight), tmp_path / "x.pt", tmp_path / "x.safetensors"]
    if dtype == torch.float16:  # NumPy has no bfloat16
        np.save(tmp_path / "x.npy", weight.numpy())
        sources.append(tmp_path / "x.npy")
    for number, source in enumerate(sources):
        given = {"tensor": "emb.weight"} if getattr(source, "suffix", "") in (".pt", ".safetensors") else {}
        found = imported(tmp_path / str(number), source, **given)
        assert found == dense(weight.float().numpy())


def test_numpy_arrays_and_their_files(tmp_path: Path) -> None:
    arrays = {"keys": np.array([-5, 2**40, -5, 0]), "table_ids": np.array([0, 1, 0, 1], np.uint8)}
    about = description_for("users", [2, 3], tables=[make_constant_initializer(0.0)] * 2)
    wanted = {(0, -5): VALUES[2].tolist(), (1, 2**40): VALUES[1].tolist(), (1, 0): VALUES[3].tolist()}
    files = {name: tmp_path / f"{name}.npy" for name in (*arrays, "values")}
    for name, array in {**arrays, "values": VALUES[:4]}.items():
        np.save(files[name], array)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for number, (values, more) in enumerate(
        ((VALUES[:4], arrays), (str(files.pop("values")), files), (torch.from_numpy(VALUES[:4]), tensors))
    ):
        place = tmp_path / str(number)
        assert imported(place, values, **more, description=about) == wanted
        assert Snapshot.open(place / "snapshots" / "s").description == about
    one_table = {(1, key): row for (_, key), row in dense(VALUES[:4]).items()}
    assert imported(tmp_path / "d", VALUES[:4], table_ids=1, description=about) == one_table
    assert imported(tmp_path / "e", VALUES[:0]) == imported(tmp_path / "f", VALUES[:0], keys=np.arange(0)) == {}


@pytest.mark.parametrize("suffix", ["pt", "safetensors", "npz"])
def test_dense_tables_of_a_state_dict(tmp_path: Path, suffix: str) -> None:
    weights = {"emb.0.weight": VALUES, "emb.1.weight": VALUES[:7] + 1, "bias": np.zeros(3)}
    path = tmp_path / f"model.{suffix}"
    if suffix == "pt":
        torch.save({"model": {name: torch.from_numpy(array) for name, array in weights.items()}, "epoch": 3}, path)
    else:
        write_columns(path, weights)
    outer = "model." if suffix == "pt" else ""
    names = [f"{outer}emb.{index}.weight" for index in (0, 1)]
    assert imported(tmp_path / "one", path, tensor=names[1]) == dense(VALUES[:7] + 1)
    assert imported(tmp_path / "two", path, tensor=names) == dense() | dense(VALUES[:7] + 1, 1)
    assert len(Snapshot.open(tmp_path / "two" / "snapshots" / "s").description["tables"]) == 2
    keys = np.arange(100, 140, dtype=np.uint64)
    assert imported(tmp_path / "keyed", path, tensor=names[0], keys=keys).keys() == {(0, k) for k in range(100, 140)}
    for tensor, *named in (
        ("other", "tensor='other' does not exist", names[0]),
        (None, "bias", "'key' and 'embedding' are needed", "tensor="),
        (f"{outer}bias", "bias is float64 (3,)", "(n, dim) of float32"),
    ):
        call = partial(import_snapshot, tmp_path / "three", "s", path, tensor=tensor)
        check_refusal((call, InputError, *named))


@pytest.mark.parametrize("format", FILES)
def test_tables_that_others_wrote(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"x.{format}"
    write_columns(path, columns_of(9, other=np.arange(9)) | ({} if format == "parquet" else {"epoch": np.array(3)}))
    wanted = {(0, 8 - key): row for (_, key), row in dense(VALUES[:9]).items()}
    assert imported(tmp_path / "a", path) == wanted
    rows = whole(Snapshot.open(tmp_path / "a" / "snapshots" / "s"))
    assert set(rows["updates"].tolist()) == {1}
    path = tmp_path / f"y.{format}"
    write_columns(path, columns_of(9, table=np.full(9, 1, np.int32)))
    with pytest.raises(InputError, match="its number of tables is unknown; give description="):
        import_snapshot(tmp_path / "b", "s", path)
    about = description_for("b", DIM, tables=[make_constant_initializer(0.0)] * 2)
    assert imported(tmp_path / "b", path, description=about) == {(1, key): row for (_, key), row in wanted.items()}


def test_the_state_of_an_optimizer_from_arrays(tmp_path: Path) -> None:
    """Those of a dense torch optimizer, say."""
    weight = torch.nn.Parameter(torch.from_numpy(VALUES.copy()))
    adagrad = torch.optim.Adagrad([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    adagrad.step()
    arrays = {"key": np.arange(40), "embedding": weight.detach().numpy(), "sum": adagrad.state[weight]["sum"].numpy()}
    np.savez(tmp_path / "x.npz", **arrays)  # type: ignore[arg-type]
    rows = row_optimizer(adagrad, adagrad.param_groups[0])
    about = description_for("rows", DIM, optimizer=rows, step=1)
    import_snapshot(tmp_path / "rows", "s", tmp_path / "x.npz", description=about)
    with make(options("host", tmp_path), tables=1) as embedding:
        trained = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
        embedding.attach(trained, trained.param_groups[0])
        embedding.load_snapshot("s")
        train(embedding, torch.arange(40), grad=torch.ones(40, DIM))
        adagrad.step()
        assert torch.allclose(embedding.get(torch.arange(40)), weight.detach(), rtol=1e-6, atol=0)


def test_the_table_is_the_stores(tmp_path: Path) -> None:
    """The live rows of a clean store describe the table, else its snapshots."""
    with make(options("host", tmp_path), "adam", seed=3, tables=1) as embedding:
        train(embedding, [1, 2])
    path = tmp_path / "rows"
    for name in ("from the clean marker", "from a snapshot"):
        import_snapshot(path, name, VALUES)
        about = Snapshot.open(path / "snapshots" / name).description
        assert (about["seed"], about["optimizer"], about["step"]) == (3, None, 0)
        (path / "MARK").unlink(missing_ok=True)
    wrong_keys = np.arange(40, dtype=np.uint64)
    check_refusal((lambda: import_snapshot(path, "s", VALUES[:, :4]), InputError, "rows of 4 floats", "has 5"))
    check_refusal((lambda: import_snapshot(path, "s", VALUES, keys=wrong_keys), InputError, "uint64", "int64"))


def test_the_row_of_padding(tmp_path: Path) -> None:
    about, zeroed = description_for("t", DIM, padding_idx=3), VALUES.copy()
    zeroed[3] = 0
    assert imported(tmp_path / "t", zeroed, description=about).keys() == dense().keys() - {(0, 3)}
    for source, more, named in (
        (VALUES, {}, "row 3 is padding_idx"),
        (zeroed, {"keys": np.arange(40)}, "padding_idx=3"),
        (nn.Embedding(9, DIM, padding_idx=2), {}, "padding_idx=2, and the table 3"),
    ):
        call = partial(import_snapshot, tmp_path / "u", "s", source, description=about, **more)
        check_refusal((call, InputError, named))


@pytest.mark.parametrize("format", ["parquet", "npz", "safetensors", "npy", "pt"])
def test_sources_are_read_a_chunk_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    from tierbed.snapshots.exchange import sources

    monkeypatch.setattr(sources, "chunk_rows", lambda width: 16)
    path = tmp_path / f"x.{format}"
    if format == "npy":
        np.save(path, VALUES)
    elif format == "pt":
        torch.save({"w": torch.from_numpy(VALUES)}, path)
    else:
        write_columns(path, columns_of(40))
    source = open_source(path, tensor="w" if format == "pt" else None)
    assert (source.rows, source.dim) == (40, DIM)
    sizes = [len(batch["embedding"]) for batch in source.batches(["key", "embedding"])]
    assert sizes == [16, 16, 8]
    seen: list[int] = []
    import_snapshot(tmp_path / "t", "s", source, progress=seen.append)
    assert seen[:3] == [16, 16, 8]
    assert sum(seen) == 80  # read, then written


@pytest.mark.parametrize("kind", ["arrays", "npy", "file", "tables"])
@pytest.mark.parametrize(("name", "kind_of"), [("sum", torch.optim.Adagrad), ("scale", RowWiseAdagrad)])
def test_states_of_a_dense_table_come_with_its_rows(kind: str, name: str, kind_of: Any, tmp_path: Path) -> None:
    weights, state = torch.rand(20, DIM), torch.rand(20, DIM) if name == "sum" else torch.rand(20)
    tables = [make_table_options(make_constant_initializer(0.0))] * (1 + (kind == "tables"))
    about = description_for("rows", DIM, tables=tables, optimizer=optimizer_of(kind_of), step=3)
    file, npy = tmp_path / "x.pt", tmp_path / "x.npy"
    torch.save({"w": weights, "nested": {"s": state}}, file)
    np.save(npy, state.numpy())
    source, more = {
        "arrays": (weights, {"states": {"sum": state}}),
        "npy": (weights, {"states": {"sum": npy}}),
        "file": (file, {"tensor": "w", "states": {"sum": "nested.s"}}),
        "tables": (file, {"tensor": ["w", "w"], "states": {"sum": ["nested.s", "nested.s"]}}),
    }[kind]
    import_snapshot(tmp_path / "rows", "s", source, **more, description=about)  # type: ignore[arg-type]
    place = make_host_mem_store_options(persistent_path=tmp_path)
    with MultiTableEmbedding("rows", DIM, torch.float32, torch.int64, tables, place) as rows:
        kept = EagerOptimizer(kind_of(rows.parameters(), lr=0.1), rows)
        rows.load_snapshot("s")
        table = rows.table_handle().local_table
        assert (rows.size(), table.step) == (20 * len(tables), 3)
        for _, chunk in table.scan():
            keys = chunk["key"].astype("i8")
            for field, wanted in (("sum", state), ("embedding", weights)):
                found = torch.from_numpy(table.form.numbers(chunk, field).copy())
                assert torch.equal(found, wanted[keys].view(len(chunk), -1))
        del kept


def optimizer_of(kind: Any) -> Any:
    optimizer = kind([nn.Parameter(torch.zeros(1))], lr=0.1)
    return row_optimizer(optimizer, optimizer.param_groups[0])


def test_states_that_the_description_lacks_without_their_step_and_beyond_float32_are_refused(tmp_path: Path) -> None:
    weights, state = torch.rand(20, DIM), torch.rand(20, DIM, dtype=torch.float64)
    torch.save({"w": weights}, tmp_path / "x.pt")
    kinds = torch.optim.Adagrad, torch.optim.Adam
    adagrad, adam = (description_for("rows", DIM, optimizer=optimizer_of(kind)) for kind in kinds)
    states, two = {"exp_avg": state, "exp_avg_sq": state}, {"sum": ["a", "b"]}
    for source, more, *named in (
        (weights, {"states": {"other": state}, "description": adagrad}, "states: 'other'"),
        (weights, {"states": {"sum": 1.0}, "description": adagrad}, "states['sum']=float"),
        (
            tmp_path / "x.pt",
            {"tensor": "w", "states": two, "description": adagrad},
            "states['sum']=['a', 'b']",
            "['w']",
        ),
        (weights, {"states": states, "description": adam}, "adam counts steps", "step=0"),
        *(
            (weights, {"states": {"sum": wrong}, "description": adagrad}, "states['sum']", "overflows float32")
            for wrong in (state * 1e39, torch.ones(20, DIM, dtype=torch.int64), torch.ones(20, DIM, dtype=torch.bool))
        ),
    ):
        check_refusal((partial(import_snapshot, tmp_path / "t", "s", source, **more), InputError, *named))
    import_snapshot(tmp_path / "t", "s", weights, states=states, description=adam | {"step": 9})
    import_snapshot(tmp_path / "t", "t", weights, description=adam)  # without states
