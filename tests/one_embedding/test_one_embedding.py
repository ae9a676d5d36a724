"""`tierbed.one_embedding` has OneFlow's names and arguments, and refuses what it cannot do."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tierbed
from support.one_embedding_calls import document
from support.refusals import check_refusal
from tierbed import (
    Graph,
    InputError,
    OptimizerError,
    OptionError,
    StoreError,
    one_embedding,
)
from tierbed.engine.optim import CatchUpAdam

EMBEDDING = (
    "name, embedding_dim, dtype, key_type, tables, store_options, default_initializer=None, padding_idx=None, seed=0"
)
SNAPSHOT = "paths, snapshot_name, key_type, value_type, storage_dim, physical_block_size=4096"
SIGNATURES = {  # ... stands for a default that tierbed finds out by itself
    "Embedding": EMBEDDING,
    "Ftrl": "params, lr=0.001, weight_decay=0.0, lr_power=-0.5, initial_accumulator_value=0.1, lambda1=0.0, "
    "lambda2=0.0, beta=0.0",
    "FusedMLP": "in_features, hidden_features, out_features, hidden_dropout_rates=None, out_dropout_rate=0.0, "
    "skip_final_activation=False",
    "MultiTableEmbedding": EMBEDDING,
    "MultiTableMultiColumnEmbedding": EMBEDDING,
    "Optimizer": "optimizer, embeddings",
    "SmartDecayAdam": "params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0, amsgrad=False, "
    "do_bias_correction=True, contiguous_params=False, fused=False",
    "make_cached_host_mem_store_options": "cache_budget_mb, persistent_path, capacity, size_factor=..., "
    "storage_dim=..., physical_block_size=4096",
    "make_cached_ssd_store_options": "cache_budget_mb, persistent_path, capacity=None, size_factor=..., "
    "storage_dim=..., physical_block_size=4096, host_cache_budget_mb=0",
    "make_column_options": "initializer",
    "make_constant_initializer": "value",
    "make_device_mem_store_options": "persistent_path, capacity, size_factor=..., storage_dim=..., "
    "physical_block_size=4096",
    "make_normal_initializer": "mean=0.0, std=1.0",
    "make_persistent_table_reader": SNAPSHOT,
    "make_persistent_table_writer": SNAPSHOT,
    "make_table": "param",
    "make_table_options": "param",
    "make_trunc_normal_initializer": "mean=0.0, std=1.0, a=-2.0, b=2.0",
    "make_uniform_initializer": "low=0.0, high=1.0",
}
DIM = 4
KINDS = torch.int64, torch.float


def make(path: Path | None = None, name: str = "rows", tables: int = 1) -> tierbed.MultiTableEmbedding:
    table = one_embedding.make_table_options(one_embedding.make_uniform_initializer(-0.5, 0.5))
    options = one_embedding.make_device_mem_store_options(path)
    return one_embedding.MultiTableEmbedding(name, DIM, torch.float, torch.int64, [table] * tables, options)


def parameters(signature: str) -> dict[str, Any]:
    """The names of parameters in their order, each with its default."""
    (function,) = ast.parse(f"def f({signature}): pass").body
    assert isinstance(function, ast.FunctionDef)
    names = [argument.arg for argument in function.args.args]
    defaults = [ast.literal_eval(default) for default in function.args.defaults]
    return dict(zip(names, [inspect.Parameter.empty] * (len(names) - len(defaults)) + defaults, strict=True))


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_name_takes_oneflows_arguments(name: str) -> None:
    given = parameters(SIGNATURES[name])
    found = inspect.signature(getattr(one_embedding, name)).parameters
    positional = [p for p in found.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional[: len(given)]] == list(given)
    assert all(p.default is not inspect.Parameter.empty for p in positional[len(given) :])
    for parameter, default in zip(positional, given.values(), strict=False):
        if default is not inspect.Parameter.empty and parameter.name != "seed":  # ours is that of the name
            assert parameter.default == (None if default is ... else default), parameter.name


def test_every_name_is_there_and_no_other() -> None:
    assert sorted(one_embedding.__all__) == sorted([*SIGNATURES, "FTRL"]) == sorted(dir(one_embedding))
    assert one_embedding.FTRL is one_embedding.Ftrl is tierbed.optim.Ftrl
    assert issubclass(one_embedding.MultiTableEmbedding, one_embedding.Embedding)
    with pytest.raises(AttributeError, match="has no attribute 'make_table_option'"):
        one_embedding.make_table_option  # noqa: B018


@pytest.mark.skipif(document() is None, reason="TIERBED_SEEDS names no folder with OneEmbedding's documentation")
def test_the_documents_names_and_signatures_are_these() -> None:
    text = document() or ""
    written = re.findall(r"^(?:class )?oneflow\.one_embedding\.(\w+)\((.*)\)$", text, re.M)
    assert len(written) == 5
    for name, signature in written:
        assert parameters(signature) == parameters(SIGNATURES[name])
    named = {one or other for one, other in re.findall(r"\b(make_\w+)\b|one_embedding\.(\w+)", text)}
    assert len(named) > 10
    assert named <= set(one_embedding.__all__)


def test_a_fused_mlp_is_torchs_linear_layers_and_relu() -> None:
    x = torch.rand(5, 3)
    for skips in (False, True):
        torch.manual_seed(0)
        made = one_embedding.FusedMLP(3, [4, 2], 1, skip_final_activation=skips)
        torch.manual_seed(0)
        layers = [nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1), nn.ReLU()]
        assert torch.equal(made(x), nn.Sequential(*layers[: 6 - skips])(x))
        assert sorted(made.state_dict()) == [f"{part}_{layer}" for part in ("bias", "weight") for layer in range(3)]
    dropped = one_embedding.FusedMLP(3, [4], 1, hidden_dropout_rates=[1.0], skip_final_activation=True)
    nn.init.ones_(dropped.weight_0)
    nn.init.ones_(dropped.weight_1)
    assert torch.equal(dropped(x), dropped.bias_1.expand(5, 1))
    assert not torch.equal(dropped.eval()(x), dropped.bias_1.expand(5, 1))
    wrong = partial(one_embedding.FusedMLP, 3, [4, 2], 1, [0.5])
    check_refusal((wrong, OptionError, "hidden_dropout_rates=", "[0.5]", "2 rates"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_move_to_a_gpu_that_is_missing_names_the_remedy() -> None:
    check_refusal((partial(make().to, "cuda"), OptionError, "'rows'", 'call .to("cpu")'))


def test_importing_it_and_listing_its_names_loads_no_torch() -> None:
    code = "import sys; from tierbed import one_embedding; dir(one_embedding); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("listed", [True, False])
def test_rows_are_written_read_and_loaded_with_oneflows_paths(tmp_path: Path, listed: bool) -> None:
    paths: Any = [str(tmp_path / "rows")] if listed else tmp_path / "rows"
    keys, values = np.arange(10), np.random.default_rng(0).normal(size=(10, DIM)).astype(np.float32)
    with one_embedding.make_persistent_table_writer(paths, "s", *KINDS, DIM, 512) as writer:
        writer.write(keys, values)
    with make(tmp_path) as embedding:
        embedding.load_snapshot("s")
        assert np.array_equal(embedding.get(keys).numpy(), values)
    with one_embedding.make_persistent_table_reader(paths, "s", *KINDS, DIM, 512) as reader:
        read = [np.concatenate(part) for part in zip(*reader, strict=True)]
    order = np.argsort(read[0])
    assert np.array_equal(read[0][order], keys)
    assert np.array_equal(read[1][order], values)


def test_tables_are_told_apart_as_oneflow_does_not(tmp_path: Path) -> None:
    with make(tmp_path, tables=2) as embedding:
        embedding.put([7, 7], torch.stack([torch.zeros(DIM), torch.ones(DIM)]), [0, 1])
        embedding.save_snapshot("s")
    read = partial(one_embedding.make_persistent_table_reader, [tmp_path / "rows"], "s", *KINDS, DIM)
    check_refusal((read, InputError, "2 tables", "table_ids=True"))
    with read(table_ids=True) as reader:
        rows = [row for chunk in reader for row in zip(*(part.tolist() for part in chunk), strict=True)]
    assert sorted(rows) == [(7, [0.0] * DIM, 0), (7, [1.0] * DIM, 1)]


def test_paths_of_several_ranks_are_refused_and_no_folder_is_made(tmp_path: Path) -> None:
    reader, writer = one_embedding.make_persistent_table_reader, one_embedding.make_persistent_table_writer
    for paths, *named in (
        *[(given, "<persistent_path>/") for given in ([tmp_path / "0-2", tmp_path / "1-2"], [], [7], None)],
        ([str(tmp_path / "0-1")], "no folder '0-1'", "for each rank"),
    ):
        for maker in (reader, writer):
            check_refusal((partial(maker, paths, "s", *KINDS, DIM), OptionError, "paths=", *named))
    assert list(tmp_path.iterdir()) == []
    check_refusal((partial(reader, [tmp_path / "rows"], "s", *KINDS, DIM), StoreError, "rows", "<persistent_path>/"))


def test_a_store_that_is_called_like_a_rank_is_read(tmp_path: Path) -> None:
    with make(tmp_path, "0-1") as embedding:
        embedding.put([1], torch.ones(1, DIM))
        embedding.save_snapshot("s")
    with one_embedding.make_persistent_table_reader([tmp_path / "0-1"], "s", *KINDS, DIM) as reader:
        assert [keys.tolist() for keys, _ in reader] == [[1]]


def test_arguments_that_oneflow_alone_takes_are_refused(tmp_path: Path) -> None:
    tables = [one_embedding.make_table_options(one_embedding.make_constant_initializer(0))]
    options = one_embedding.make_device_mem_store_options(None, 100)
    given = {"name": "rows", "embedding_dim": DIM, "dtype": torch.float, "key_type": torch.int64, "tables": tables}
    made = partial(one_embedding.MultiTableEmbedding, **given, store_options=options)
    for call, *named in (
        (partial(made, key_type=torch.uint32), "key_type=", "torch.uint32"),
        (partial(made, dtype=torch.float64), "dtype=", "torch.float64"),
        (partial(made, default_initializer={"type": "constant", "value": 1}), "default_initializer", "tables=None"),
        (partial(one_embedding.make_device_mem_store_options, ["a", "b"], 100), "persistent_path=", "['a', 'b']"),
        (partial(one_embedding.make_cached_ssd_store_options, 0, tmp_path, None), "cache_budget_mb=", "0"),
    ):
        check_refusal((call, OptionError, *named))


def test_what_is_no_list_of_its_embeddings_is_refused() -> None:
    with make() as embedding, make(name="other") as other:
        sgd = torch.optim.SGD(embedding.parameters(), 0.1)
        for wrong in (embedding, [], [nn.Linear(1, 1)], None):
            check_refusal((partial(one_embedding.Optimizer, sgd, wrong), OptimizerError, "embeddings="))
        check_refusal((partial(one_embedding.Optimizer, sgd, [embedding, other]), OptimizerError, "SGD", "'other'"))
        made = one_embedding.Optimizer(sgd, [embedding])
        check_refusal((partial(Graph().add_optimizer, made), OptimizerError, "EagerOptimizer"))


def test_smart_decay_adam_is_catch_up_adam_without_what_that_refuses() -> None:
    parameter = [nn.Parameter(torch.zeros(1))]
    made = one_embedding.SmartDecayAdam(parameter, 0.1, (0.8, 0.9), 1e-6, contiguous_params=True, fused=True)
    assert type(made) is CatchUpAdam
    assert made.defaults == CatchUpAdam(parameter, 0.1, (0.8, 0.9), 1e-6).defaults
    for name, value in {"weight_decay": 0.1, "amsgrad": True, "do_bias_correction": False}.items():
        call = partial(one_embedding.SmartDecayAdam, parameter, **{name: value})
        check_refusal((call, OptimizerError, f"SmartDecayAdam: {name}={value}"))


def oneflows_ftrl(w: np.ndarray, grads: list[np.ndarray], lr: float, power: float, z: float) -> np.ndarray:
    """Rows after the steps of FtrlUpdateFunctor of OneFlow, where lambda1, lambda2, beta and decays are 0."""
    total, z = np.full_like(w, 0.1), np.full_like(w, z)
    for g in grads:
        sigma = ((total + g * g) ** power - total**power) / lr
        total, z = total + g * g, z + g - sigma * w
        w = -z / (total**power / lr)
    return w


def test_ftrl_is_that_of_oneflows_graphs_by_its_sign_of_the_power() -> None:
    """docs/oneflow.md: with lr_power itself as the power, and where z begins at 0, not at the accumulator's value."""
    assert one_embedding.Ftrl([nn.Parameter(torch.zeros(1))]).support_sparse is False
    for sign, power in (("lr_power", -0.5), ("-lr_power", 0.5)):
        with make() as embedding:
            ftrl = one_embedding.Ftrl(embedding.parameters(), lr=0.1, power_sign=sign)
            optimizer = one_embedding.Optimizer(ftrl, [embedding])
            before = embedding.get([1]).double().numpy()
            grads = []
            for step in range(3):
                grads.append(np.cos(np.arange(DIM) + step)[None])
                (embedding(torch.tensor([1])) * torch.tensor(grads[-1], dtype=torch.float)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            after = embedding.get([1]).numpy()
        assert after == pytest.approx(oneflows_ftrl(before, grads, 0.1, power, 0.0), rel=1e-4)
        assert after != pytest.approx(oneflows_ftrl(before, grads, 0.1, -power, 0.0), rel=1e-2)
        assert after != pytest.approx(oneflows_ftrl(before, grads, 0.1, power, 0.1), rel=1e-2)
