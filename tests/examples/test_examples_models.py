"""DLRM, DeepFM and DCNv2 of the examples: against their papers' formulas, against plain PyTorch, and as commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from support.places import EXAMPLES, environment
from support.scripts import run_script
from tierbed import MultiTableMultiColumnEmbedding, make_device_mem_store_options

sys.path.insert(0, str(EXAMPLES))
import ctr
from ctr_data import DENSE, FIELDS, read_clicks, synthetic_clicks
from ctr_models import DLRM, DCNv2, DeepFM
from movielens_data import GENRES, PADDING, key

DATA = Path(os.environ["TIERBED_DATA"]) / "ml-100k" if "TIERBED_DATA" in os.environ else None
STEPS, BATCH, DIM, LR = 20, 64, 4, 0.05


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pairs_of(vectors: Tensor) -> list[Tensor]:
    """The product of each vector [n, vectors, dim] with each one before it."""
    return [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(vectors.shape[1]) for j in range(i)]


def test_dlrm_feeds_the_bottom_and_all_pairs_to_the_top() -> None:
    model, rows, dense = DLRM(3, DIM, 2), torch.randn(2, 3, DIM), torch.randn(2, 2)
    bottom = model.bottom(dense)
    pairs = pairs_of(torch.cat([bottom.unsqueeze(1), rows], 1))
    torch.testing.assert_close(model(rows, dense), model.top(torch.cat([bottom, torch.stack(pairs, 1)], 1)).squeeze(1))


def test_deepfm_is_the_sum_of_both_orders_and_the_deep_part() -> None:
    model, rows, dense = DeepFM(3, DIM, 2), torch.randn(2, 3, DIM + 1), torch.randn(2, 2)
    for parameter in (model.weights, model.factors, model.bias):
        nn.init.normal_(parameter)
    # x_i w_i and x_i v_i, where x_i of a categorical value is 1
    first = torch.cat([rows[:, :, DIM], dense * model.weights], 1).sum(1)
    factors = torch.cat([rows[:, :, :DIM], dense.unsqueeze(2) * model.factors], 1)
    deep = model.deep(factors.flatten(1)).squeeze(1)
    expected = model.bias + first + torch.stack(pairs_of(factors)).sum(0) + deep
    torch.testing.assert_close(model(rows, dense), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "parallel"])
@pytest.mark.parametrize("rank", [None, 2])
def test_dcnv2_crosses_its_input_with_every_layer(rank: int | None, stacked: bool) -> None:
    model = DCNv2(3, DIM, 2, layers=3, rank=rank, stacked=stacked)
    rows, dense = torch.randn(2, 3, DIM), torch.randn(2, 2)
    x = x0 = torch.cat([rows.flatten(1), dense], 1)
    for layer in model.cross:
        down, up = (None, layer.linear) if rank is None else layer.linear
        weight = up.weight if down is None else up.weight @ down.weight
        x = x0 * (x @ weight.T + up.bias) + x
    last = model.deep(x) if stacked else torch.cat([x, model.deep(x0)], 1)
    torch.testing.assert_close(model(rows, dense), model.last(last).squeeze(1), rtol=0, atol=1e-5)


class Tables(nn.Module):
    """Dense tables with the initial rows of an embedding, over the values that `ids` [n, fields] has."""

    def __init__(self, embedding: MultiTableMultiColumnEmbedding, ids: Tensor) -> None:
        super().__init__()
        self.values = [column.unique() for column in ids.T]
        self.tables = nn.ModuleList(
            nn.Embedding.from_pretrained(embedding.get(values, field), freeze=False)
            for field, values in enumerate(self.values)
        )

    def forward(self, ids: Tensor) -> Tensor:
        fields = zip(self.tables, self.values, ids.T.contiguous(), strict=True)
        rows = torch.stack([table(torch.searchsorted(values, column)) for table, values, column in fields], 1)
        return rows * (ids != PADDING).unsqueeze(2)


MODELS = {
    "dlrm": lambda: DLRM(FIELDS, DIM, DENSE),
    "deepfm": lambda: DeepFM(FIELDS, DIM, DENSE),
    "dcnv2": lambda: DCNv2(FIELDS, DIM, DENSE),
    "dcnv2 low rank, parallel": lambda: DCNv2(FIELDS, DIM, DENSE, rank=4, stacked=False),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_through_a_graph_equals_plain_pytorch(name: str) -> None:
    clicks = synthetic_clicks(STEPS * BATCH)
    model, plain = MODELS[name](), MODELS[name]()
    plain.load_state_dict(model.state_dict())
    with ctr.make_embedding(model.columns, FIELDS, make_device_mem_store_options()) as embedding:
        graph = ctr.TrainGraph(embedding, model, LR)
        tables = Tables(embedding, clicks.ids)
        optimizers = [
            torch.optim.Adagrad(tables.parameters(), lr=LR, initial_accumulator_value=1e-5),
            torch.optim.Adam(plain.parameters(), lr=1e-3),
        ]
        batches = list(ctr.loader(clicks, torch.arange(STEPS * BATCH), BATCH))
        losses = ctr.train_epoch(graph, batches, "").tolist()
        assert len(losses) == STEPS
        for (ids, dense, labels), loss in zip(batches, losses, strict=True):
            expected = nn.functional.binary_cross_entropy_with_logits(plain(tables(ids), dense), labels)
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected.backward()
            for optimizer in optimizers:
                optimizer.step()
            assert abs(loss - expected.item()) < 1e-5
        for field, (table, values) in enumerate(zip(tables.tables, tables.values, strict=True)):
            rows, present = embedding.get(values, field), values != PADDING
            torch.testing.assert_close(rows[present], table.weight.detach()[present], rtol=0, atol=1e-4)
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-4)


def lines_of(output: str) -> list[str]:
    """What the script said of losses and AUC."""
    return [line for line in output.splitlines() if "AUC" in line]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the script in this process, and gives what it printed."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [ctr.__file__, *arguments])
        ctr.main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("model", "store", "dtype"),
    [
        ("dcnv2", "ssd", "bfloat16"),
        pytest.param("dlrm", "cached_host", "float32", marks=pytest.mark.slow),
        pytest.param("deepfm", "ssd", "float16", marks=pytest.mark.slow),
    ],
)
def test_every_store_prints_the_same(model: str, store: str, dtype: str, command: Callable[..., str]) -> None:
    arguments = f"--model {model} --rows 1500 --epochs 2 --batch-size 120 --cache-mb 0.2 --dtype {dtype}".split()
    expected = lines_of(command(*arguments))
    first, second = (float(line.split()[3].rstrip(",")) for line in expected[:2])
    assert second < first
    output = command(*arguments, "--store", store)
    assert lines_of(output) == expected
    assert f"snapshot {model}-" in output
    assert "evicted" in output


def test_the_script_runs_from_the_shell() -> None:
    arguments = "--model dcnv2 --rows 500 --store ssd --epochs 1"
    done = run_script(Path(ctr.__file__), *arguments.split())
    assert done.returncode == 0, done.stderr
    *_, same, last = done.stdout.splitlines()
    assert same.endswith("scores the same")
    assert last.startswith("test AUC 0.")


@pytest.mark.skipif(DATA is None, reason="TIERBED_DATA names no folder with ml-100k")
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=() if name == "dlrm" else pytest.mark.slow) for name in ctr.MODELS]
)
def test_a_model_learns_more_of_movielens_than_means(model: str, command: Callable[..., str]) -> None:
    output = command("--model", model, "--data", str(DATA), "--store", "cached_host")
    assert float(output.split()[-1]) > 0.7613 + 0.005  # what means of users and items reach: test_movielens.py


def test_movielens_fields_are_ids_and_its_genres_flags(tmp_path: Path) -> None:
    (tmp_path / "tiny.inter").write_text("user_id:token\titem_id:token\trating:float\nu\ti\t5\nu\tj\t3\n")
    (tmp_path / "tiny.item").write_text("item_id:token\tclass:token_seq\ni\tWestern Action\n")
    clicks = read_clicks(tmp_path, 1)
    assert clicks.labels.tolist() == [1, 0]
    assert clicks.ids.tolist() == [[key("u"), *[PADDING] * 4, key(item), PADDING] for item in "ij"]
    assert [GENRES[1:][flag] for flag in clicks.dense[0].nonzero().flatten()] == ["Action", "Western"]
    assert not clicks.dense[1].any()


def test_a_criteo_line_is_a_label_logarithms_and_hex_values(tmp_path: Path) -> None:
    file = tmp_path / "train.txt"
    lines = [["1", *["7"] * 12, "", *["68fd1e64"] * 25, ""], ["0", *["-2"] * 13, *["ffffffff"] * 26]]
    file.write_text("".join("\t".join(cells) + "\n" for cells in lines))
    clicks = read_clicks(file, 10)
    assert clicks.labels.tolist() == [1, 0]
    assert clicks.ids.tolist() == [[0x68FD1E64] * 25 + [PADDING], [0xFFFFFFFF] * 26]
    assert torch.equal(clicks.dense, torch.tensor([[8.0] * 12 + [1.0], [1.0] * 13]).log())
    assert len(read_clicks(file, 1).labels) == 1
    file.write_text("\t".join(lines[0]) + "\n0\t1\n")
    with pytest.raises(ValueError, match=r"train\.txt:2: expected a label"):
        read_clicks(file, 10)


def test_the_command_names_what_it_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ctr.py", "--data", str(tmp_path / "absent")])
    with pytest.raises(SystemExit, match="absent"):
        ctr.main()


def printed(folder: Path, *arguments: str) -> list[str]:
    """What 2 ranks print of losses and AUC."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    script = [str(EXAMPLES / "ctr.py"), "--out", str(folder), *arguments]
    done = subprocess.run([*command, *script], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "AUC" in line]


@pytest.mark.slow
def test_two_ranks_repeat_to_the_bit_on_any_store(tmp_path: Path) -> None:
    few = ["--rows", "6000", "--epochs", "1"]
    first = printed(tmp_path / "device", *few)
    assert first[-1].startswith("test AUC 0.")
    assert printed(tmp_path / "device", *few) == first
    assert printed(tmp_path / "ssd", *few, "--store", "ssd", "--cache-mb", "0.25") == first


@pytest.mark.slow
def test_a_wire_of_16_bits_moves_the_auc_by_less_than_a_thousandth(tmp_path: Path) -> None:
    wide, narrow = (float(printed(tmp_path, "--wire", bits)[-1].split()[-1]) for bits in ("32", "16"))
    assert wide > 0.8
    assert 0 < abs(wide - narrow) < 0.001


@pytest.mark.slow
def test_losses_of_killed_processes_are_those_of_one_that_was_not(tmp_path: Path) -> None:
    plot = tmp_path / "killed.svg"
    run = run_script(EXAMPLES / "killed.py", "--steps", 150, "--plot", plot, whole=True)
    assert run.returncode == 0, run.stderr
    *processes, last = run.stdout.splitlines()
    assert last.endswith(f"losses of {len(processes)} processes equal those of a run never killed")
    assert [line.split()[0] for line in processes[:4]] == ["ssd", "host", "cached_host", "device"]
    assert sum("killed" in line for line in processes) == len(processes) - 1
    assert plot.read_text().startswith("<?xml")
