from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from support.embeddings import DIM, contents, make, train
from support.exchange import FILES, VALUES, columns_of, dense, imported, whole, write_columns
from support.optimizers import OPTIMIZERS
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
from tierbed.engine.errors import InputError, OptionError
from tierbed.engine.options.initializers import make_constant_initializer
from tierbed.engine.row_format import LAST_STEP, row_dtype
from tierbed.optim import RowWiseAdagrad
from tierbed.snapshots import Snapshot, write_snapshot
from tierbed.snapshots.exchange.descriptions import description_for
from tierbed.snapshots.exchange.export import FORMATS, export_snapshot
from tierbed.snapshots.exchange.importing import import_snapshot
from tierbed.snapshots.exchange.sources import open_source


def test_what_an_import_returns_is_no_wall_of_files(tmp_path: Path) -> None:
    manifest = import_snapshot(tmp_path / "rows", "a", np.ones((1000, 2), np.float32))
    assert len(manifest.files) == 64
    size = f"64 files of {manifest.total_bytes:,} bytes"
    assert repr(manifest) == f"<full snapshot of 'rows': 1,000 rows at step 0, {size}>"


@pytest.mark.parametrize("format", FORMATS)
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


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.rotated("format")
def test_training_goes_on_from_an_import_bit_for_bit(tmp_path: Path, optimizer: str, format: str) -> None:
    with make(options("host", tmp_path / "a"), optimizer) as embedding:
        for step in range(3):
            train(embedding, torch.arange(-6, 9) * (step + 1), torch.arange(15) % 3)
        embedding.save_snapshot("s")
        train(embedding, torch.arange(-9, 9))
        wanted = contents(embedding)
    export_snapshot(Snapshot.open(tmp_path / "a" / "rows" / "snapshots" / "s"), tmp_path / f"x.{format}", format)
    import_snapshot(tmp_path / "b" / "rows", "s", tmp_path / f"x.{format}")
    with make(options("ssd", tmp_path / "b"), optimizer) as embedding:
        embedding.load_snapshot("s")
        train(embedding, torch.arange(-9, 9))
        assert contents(embedding).tobytes() == wanted.tobytes()


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
@pytest.mark.parametrize("kind", ["tensor", "module", "pt", "safetensors", "npy"])
def test_dense_tables_of_16_bits(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    weight = torch.randn(30, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    source, given = tmp_path / f"x.{kind}", {"tensor": "emb.weight"} if kind in ("pt", "safetensors") else {}
    if kind == "pt":
        torch.save({"emb.weight": weight}, source)
    elif kind == "safetensors":
        save_file({"emb.weight": weight}, source)
    elif kind == "npy":
        np.save(source, weight.to(torch.float16).numpy())  # NumPy has no bfloat16
        weight = weight.to(torch.float16)
    rows: Any = {"tensor": weight, "module": nn.Embedding.from_pretrained(weight)}.get(kind, source)
    import_snapshot(tmp_path / "rows", "dense", rows, **given)
    with make(options("host", tmp_path), tables=1) as embedding:
        embedding.load_snapshot("dense")
        assert torch.equal(embedding.get(range(30)), weight.float())


def test_numpy_arrays_and_their_files(tmp_path: Path) -> None:
    keys = np.array([-5, 2**40, -5, 0])
    tables = np.array([0, 1, 0, 1], np.uint8)
    about = description_for("users", [2, 3], tables=[make_constant_initializer(0.0)] * 2)
    wanted = {(0, -5): VALUES[2].tolist(), (1, 2**40): VALUES[1].tolist(), (1, 0): VALUES[3].tolist()}
    arguments: dict[str, Any] = {"keys": keys, "table_ids": tables, "description": about}
    assert imported(tmp_path / "a", VALUES[:4], **arguments) == wanted
    assert Snapshot.open(tmp_path / "a" / "snapshots" / "s").description == about
    np.save(tmp_path / "values.npy", VALUES[:4])
    np.save(tmp_path / "keys.npy", keys)
    np.save(tmp_path / "tables.npy", tables)
    files = {"keys": tmp_path / "keys.npy", "table_ids": str(tmp_path / "tables.npy"), "description": about}
    assert imported(tmp_path / "b", str(tmp_path / "values.npy"), **files) == wanted
    tensors = {"keys": torch.from_numpy(keys), "table_ids": torch.from_numpy(tables), "description": about}
    assert imported(tmp_path / "c", torch.from_numpy(VALUES[:4]), **tensors) == wanted
    one_table = {(1, key): row for (_, key), row in dense(VALUES[:4]).items()}
    assert imported(tmp_path / "d", VALUES[:4], table_ids=1, description=about) == one_table


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
    with pytest.raises(InputError, match=f"tensor='other' does not exist; there are .*{names[0]}"):
        import_snapshot(tmp_path / "three", "s", path, tensor="other")
    with pytest.raises(InputError, match=r"holds .*bias, .*; 'key' and 'embedding' are needed, or .* tensor="):
        import_snapshot(tmp_path / "three", "s", path)
    with pytest.raises(InputError, match=r"bias is float64 \(3,\); rows are \(n, dim\) of float32, float16, bfloat16"):
        import_snapshot(tmp_path / "three", "s", path, tensor=f"{outer}bias")


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
    about = description_for("rows", DIM, tables=[make_constant_initializer(0.0)], optimizer=rows, step=1)
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
    with pytest.raises(InputError, match="has rows of 4 floats, but the table has 5"):
        import_snapshot(path, "s", VALUES[:, :4])
    with pytest.raises(InputError, match="has keys of uint64, and the table of int64: convert them"):
        import_snapshot(path, "s", VALUES, keys=np.arange(40, dtype=np.uint64))


def test_the_row_of_padding(tmp_path: Path) -> None:
    about = description_for("t", DIM, padding_idx=3)
    with pytest.raises(InputError, match="row 3 is padding_idx, which lookups return as zeros"):
        import_snapshot(tmp_path / "t", "s", VALUES, description=about)
    zeroed = VALUES.copy()
    zeroed[3] = 0
    assert imported(tmp_path / "t", zeroed, description=about).keys() == dense().keys() - {(0, 3)}
    with pytest.raises(InputError, match="padding_idx=3, which is never a row"):
        import_snapshot(tmp_path / "u", "s", zeroed, keys=np.arange(40), description=about)
    with pytest.raises(InputError, match="has padding_idx=2, and the table 3: give both the same"):
        import_snapshot(tmp_path / "u", "s", nn.Embedding(9, DIM, padding_idx=2), description=about)


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


def test_empty_tables(tmp_path: Path) -> None:
    assert imported(tmp_path / "a", VALUES[:0]) == {}
    assert imported(tmp_path / "b", VALUES[:0], keys=np.arange(0)) == {}
    for format in FILES:
        write_columns(tmp_path / f"x.{format}", columns_of(0))
    assert imported(tmp_path / "c", tmp_path / "x.npz") == {}
    assert imported(tmp_path / "d", tmp_path / "x.safetensors") == {}


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest works."""
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    import_snapshot(tmp_path / "store", "s", np.zeros((3, 2), np.float32))
    with pytest.raises(OptionError, match=r"pip install 'tierbed\[parquet\]'"):
        import_snapshot(tmp_path / "store", "t", tmp_path / "x.parquet")


@pytest.mark.parametrize("kind", ["arrays", "npy", "file", "tables"])
def test_states_of_a_dense_table_come_with_its_rows(kind: str, tmp_path: Path) -> None:
    weights, sums, scales = torch.rand(20, DIM), torch.rand(20, DIM), torch.rand(20)
    optimizers: dict[str, Any] = {
        "sum": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
        "scale": lambda parameters: RowWiseAdagrad(parameters, lr=0.1),
    }
    for name, made in optimizers.items():
        shadow = [nn.Parameter(torch.zeros(1))]
        optimizer = made(shadow)
        tables = [make_table_options(make_constant_initializer(0.0))] * (1 + (kind == "tables"))
        about = description_for(
            name, DIM, tables=tables, optimizer=row_optimizer(optimizer, optimizer.param_groups[0]), step=3
        )
        state = sums if name == "sum" else scales
        file, npy = tmp_path / f"{name}.pt", tmp_path / f"{name}.npy"
        torch.save({"w": weights, "nested": {"s": state}}, file)
        np.save(npy, state.numpy())
        store = tmp_path / kind / name
        if kind == "tables":
            both: Any = {"tensor": ["w", "w"], "states": {"sum": ["nested.s", "nested.s"]}}
            import_snapshot(store, "s", file, **both, description=about)
        elif kind == "file":
            import_snapshot(store, "s", file, tensor="w", states={"sum": "nested.s"}, description=about)
        else:
            given = state if kind == "arrays" else npy
            import_snapshot(store, "s", weights, states={"sum": given}, description=about)
        options = make_host_mem_store_options(persistent_path=tmp_path / kind)
        with MultiTableEmbedding(name, DIM, torch.float32, torch.int64, tables, options) as rows:
            kept = EagerOptimizer(made(rows.parameters()), rows)
            rows.load_snapshot("s")
            table = rows.table_handle().local_table
            assert rows.size() == 20 * len(tables)
            assert table.step == 3
            for _, chunk in table.scan():
                found = torch.from_numpy(table.form.numbers(chunk, "sum").copy())
                assert torch.equal(found, state[chunk["key"].astype("i8")].view(len(chunk), -1))
                assert torch.equal(
                    torch.from_numpy(table.form.numbers(chunk, "embedding").copy()), weights[chunk["key"].astype("i8")]
                )
            del kept
        with pytest.raises(InputError, match="states: 'other' is not in the description, which has"):
            import_snapshot(store, "t", weights, states={"other": state}, description=description_for(name, DIM))
    with pytest.raises(InputError, match=r"states\['sum'\]=float: give an array"):
        import_snapshot(tmp_path / "x", "s", weights, states={"sum": 1.0}, description=about)
    with pytest.raises(
        InputError, match=r"states\['sum'\]=\['a', 'b'\]: give the name of a tensor for each of \['w'\]"
    ):
        import_snapshot(tmp_path / "x", "s", file, tensor="w", states={"sum": ["a", "b"]}, description=about)


def test_states_without_their_step_and_beyond_float32_are_refused(tmp_path: Path) -> None:
    shadow = [nn.Parameter(torch.zeros(1))]
    weights, state = torch.rand(20, DIM), torch.rand(20, DIM, dtype=torch.float64)

    def about(optimizer: torch.optim.Optimizer, step: int) -> Any:
        rows = row_optimizer(optimizer, optimizer.param_groups[0])
        return description_for("rows", DIM, optimizer=rows, step=step)

    states = {"exp_avg": state, "exp_avg_sq": state}
    with pytest.raises(InputError, match="states: adam counts steps, and the description has step=0; give step="):
        import_snapshot(tmp_path, "s", weights, states=states, description=about(torch.optim.Adam(shadow), 0))
    import_snapshot(tmp_path, "s", weights, states=states, description=about(torch.optim.Adam(shadow), 9))
    import_snapshot(tmp_path, "t", weights, description=about(torch.optim.Adam(shadow), 0))  # without states
    for wrong in (state * 1e39, torch.ones(20, DIM, dtype=torch.int64), torch.ones(20, DIM, dtype=torch.bool)):
        with pytest.raises(InputError, match=r"states\['sum'\]: it is .*, or overflows float32"):
            import_snapshot(
                tmp_path, "u", weights, states={"sum": wrong}, description=about(torch.optim.Adagrad(shadow), 0)
            )
