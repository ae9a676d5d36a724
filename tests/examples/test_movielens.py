"""The main job: MovieLens and its readers, through every store, against plain PyTorch, and as the script of users.

Runs on the real log where `TIERBED_DATA` names a folder that holds `ml-100k`, and on the synthetic log elsewhere.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from support import scripts
from support.places import EXAMPLES
from support.refusals import check_refusal
from tierbed import make_device_mem_store_options

sys.path.insert(0, str(EXAMPLES))
import movielens
from movielens_data import FIELDS, GENRE, GENRES, PADDING, Log, auc, key, read_log, split
from movielens_synthetic import synthetic_log

DATA = Path(os.environ["TIERBED_DATA"]) / "ml-100k" if "TIERBED_DATA" in os.environ else None
DIM, LR, BATCH = 16, 0.08, 512
STEPS = 15  # of an epoch where bits are compared
CACHE_MB = 0.1  # about 700 rows: fewer than the table has, and fewer than a batch


@pytest.fixture(scope="module")
def log() -> Log:
    return read_log(DATA) if DATA else synthetic_log()


class Outcome(NamedTuple):
    """losses: of all steps. aucs, rows: after each epoch."""

    losses: list[float]
    aucs: list[float]
    rows: list[int]
    metrics: dict[str, dict[str, float]]


def train(log: Log, options: Any, epochs: int, steps: int | None = None) -> Outcome:
    """steps: of each epoch, if not all."""
    torch.manual_seed(0)
    train_rows, _, test_rows = split(len(log.labels))
    test_rows = test_rows[: steps and 1000]
    model = movielens.DeepFM(DIM)
    with movielens.make_embedding(options, DIM) as embedding:
        graph = movielens.TrainGraph(embedding, model, LR)
        score = movielens.ScoreGraph(embedding, model)
        losses, aucs, rows = list[float](), list[float](), list[int]()
        for _ in range(epochs):
            rows_of_epoch = train_rows[torch.randperm(len(train_rows))][: steps and steps * BATCH]
            losses += movielens.train_epoch(graph, log, rows_of_epoch, BATCH)
            aucs.append(movielens.evaluate(score, log, test_rows))
            rows.append(embedding.size())
        return Outcome(losses, aucs, rows, embedding.metrics())


@pytest.fixture(scope="module")
def on_device(log: Log, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(log, movielens.STORES["device"](str(tmp_path_factory.mktemp("device")), CACHE_MB), 2, STEPS)


@pytest.mark.parametrize("store", ["host", "cached_host", "ssd"])
def test_every_store_gives_the_same_bits(store: str, log: Log, on_device: Outcome, tmp_path: Path) -> None:
    outcome = train(log, movielens.STORES[store](str(tmp_path), CACHE_MB), 2, STEPS)
    assert outcome[:3] == on_device[:3]
    assert len(outcome.losses) == 2 * STEPS
    if store in ("cached_host", "ssd"):
        evicted = sum(tier.get("evictions_dirty", 0) for tier in outcome.metrics.values())
        assert evicted > outcome.rows[-1], "the cache was to be too small for the table"


@pytest.mark.slow
def test_the_model_learns_more_than_means(log: Log) -> None:
    aucs = train(log, make_device_mem_store_options(), 2).aucs
    assert aucs[-1] >= 0.76
    assert aucs[-1] > auc_of_means(log) + 0.01


def auc_of_means(log: Log) -> float:
    """Scores without a model: how often the item, and how often the user, was rated 4 or above in training."""
    train_rows, _, test_rows = split(len(log.labels))
    labels = log.labels.numpy()
    scores = np.zeros(len(labels))
    for field in ("user", "item"):
        _, index = np.unique(log.ids[:, FIELDS.index(field)].numpy(), return_inverse=True)
        positive = np.bincount(index[train_rows], labels[train_rows], index.max() + 1)
        count = np.bincount(index[train_rows], minlength=index.max() + 1)
        scores += ((positive + 5 * labels.mean()) / (count + 5))[index]
    return auc(labels[test_rows], scores[test_rows])


def test_training_equals_plain_pytorch(log: Log, tmp_path: Path) -> None:
    """Without dropout, whose random stream a graph need not share with eager mode."""
    torch.manual_seed(0)
    used = split(len(log.labels))[0][: 30 * 256]
    ids, labels = log.ids[used], log.labels[used]
    tables = log.table_ids.expand_as(ids)
    pairs, places = torch.stack([tables.flatten(), ids.flatten()], 1).unique(dim=0, return_inverse=True)
    places = places.view(ids.shape)
    has_row = pairs[:, 1] != PADDING
    dense, plain_dense = (movielens.DeepFM(DIM, dropout=0.0) for _ in range(2))
    plain_dense.load_state_dict(dense.state_dict())
    with movielens.make_embedding(make_device_mem_store_options(persistent_path=str(tmp_path)), DIM) as embedding:
        graph = movielens.TrainGraph(embedding, dense, LR)
        rows = torch.zeros(len(pairs), DIM)
        rows[has_row] = embedding.get(pairs[has_row, 1], pairs[has_row, 0])
        plain = nn.Embedding.from_pretrained(rows, freeze=False)
        optimizers = [
            torch.optim.Adagrad(plain.parameters(), lr=LR, initial_accumulator_value=1e-5),
            torch.optim.Adam(plain_dense.parameters(), lr=1e-3),
        ]
        for part in torch.arange(len(used)).split(256):
            loss = graph(ids[part], log.table_ids, labels[part])
            present = (ids[part] != PADDING).unsqueeze(2)
            logits = plain_dense(plain(places[part]) * present, ids[part])
            expected = nn.functional.binary_cross_entropy_with_logits(logits, labels[part])
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected.backward()
            for optimizer in optimizers:
                optimizer.step()
            assert abs(loss.item() - expected.item()) < 1e-5
        trained = embedding.get(pairs[has_row, 1], pairs[has_row, 0])
        torch.testing.assert_close(trained, plain.weight.detach()[has_row], rtol=0, atol=1e-5)


def run_script(*arguments: str) -> list[str]:
    data = ["--data", str(DATA)] if DATA else []
    done = scripts.run_script(Path(movielens.__file__), *data, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_script_trains_on_ssd_and_a_fresh_process_agrees() -> None:
    first, *rest, same, last = run_script("--store", "ssd", "--cache-mb", str(CACHE_MB), "--epochs", "1")
    assert ("synthetic" in first) == (DATA is None)
    assert "ratings/s" in "".join(rest)
    assert "evicted" in "".join(rest)
    assert "a fresh process scores snapshot" in same
    assert last.startswith("test AUC ")
    assert float(last.split()[-1]) >= 0.76


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_starts_over(tmp_path: Path) -> None:
    config = tmp_path / "deploy.toml"
    config.write_text(f'[movielens]\nstore = "host_mem"\npersistent_path = "{tmp_path / "store"}"\n')
    arguments = ["--config", str(config), "--out", str(tmp_path / "out"), "--epochs", "1", "--steps", "20"]
    first, second = run_script(*arguments), run_script(*arguments)
    assert second[-1] == first[-1]


FLAGS = {name: "|".join(str(int(genre in genres)) for genre in GENRES) for name, genres in {
    "toy": ("Animation", "Children's", "Comedy"), "kull": (), "run": ("Crime",)
}.items()}  # fmt: skip

LAYOUTS = {
    "u.data": {
        "u.data": "1\t10\t5\t881250949\n2\t10\t3\t891717742\n1\t11\t4\t881250949\n3\t12\t1\t881250949\n",
        "u.user": "1|24|M|technician|85711\n2|53|F|other|T8H1N\n",
        "u.item": f"10|Toy Story (1995)|01-Jan-1995||http://us.imdb.com|{FLAGS['toy']}\n"
        f"11|unknown||||1{FLAGS['kull'][1:]}\n12|Märchen (1997)|14-Feb-1997|||{FLAGS['run']}\n",
    },
    "ratings.dat": {
        "ratings.dat": "1::10::5::881250949\n2::10::3::891717742\n1::11::4::881250949\n3::12::1::881250949\n",
        "users.dat": "1::M::24::technician::85711\n2::F::53::other::T8H1N\n",
        "movies.dat": "10::Toy Story (1995)::Animation|Children's|Comedy\n11::unknown::(no genres listed)\n"
        "12::Märchen, 2001 (1997)::Crime\n",
    },
    "atomic": {
        "ml.inter": "user_id:token\titem_id:token\trating:float\n1\t10\t5\n2\t10\t3\n1\t11\t4\n3\t12\t1\n",
        "ml.user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
        "1\t24\tM\ttechnician\t85711\n2\t53\tF\tother\tT8H1N\n",
        "ml.item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        "10\tToy Story\t1995\tAnimation Children's Comedy\n11\tunknown\tunkonwn\tunknown\n12\tMärchen\t1997\tCrime\n",
    },
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text, encoding="latin-1")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_layouts_of_one_log_give_the_same_keys(layout: str, tmp_path: Path) -> None:
    _, *others = LAYOUTS[layout]
    log = read_log(write(tmp_path, LAYOUTS[layout]))
    toy, kull = ["10", "1995", "Animation", "Children's", "Comedy"], ["11", "", "", "", ""]
    first, second = ["1", "24", "M", "technician", "85711"], ["2", "53", "F", "other", "T8H1N"]
    words = [first + toy, second + toy, first + kull, ["3", *[""] * 4, "12", "1997", "Crime", "", ""]]
    assert log.ids.tolist() == [[key(word) for word in row] for row in words]
    assert log.ids.dtype == torch.int64
    assert log.labels.tolist() == [1, 0, 1, 0]
    assert log.table_ids.tolist() == [*range(GENRE), GENRE, GENRE, GENRE]
    assert "4 ratings, 3 users, 3 items, 50.0% positive" in str(log)
    assert "missing values: age 1, gender 1, occupation 1, zip 1, year 1, genre 1" in str(log)
    for name in others:  # without users and items their fields are empty
        (tmp_path / name).unlink()
    assert read_log(tmp_path).ids[0].tolist() == [key("1"), *[PADDING] * 4, key("10"), PADDING, PADDING]


def test_a_missing_cell_is_padding_and_never_a_key(tmp_path: Path) -> None:
    files = LAYOUTS["u.data"] | {"u.user": "1||M||85711\r\n"}
    age, gender, occupation = read_log(write(tmp_path, files)).ids[0, 1:4].tolist()
    assert (age, gender, occupation) == (PADDING, key("M"), PADDING)


@pytest.mark.parametrize(
    ("files", "error", "named"),
    [
        ({}, FileNotFoundError, ["holds none of u.data, ratings.dat, *.inter"]),
        ({"u.data": ""}, ValueError, ["holds no ratings"]),
        ({"a.inter": "", "b.inter": ""}, ValueError, ["holds 2 *.inter files"]),
        ({"u.data": "1\t2\t3\n1\t2\n"}, ValueError, ["u.data:2", "2 cells"]),
        ({"u.data": "1\t2\tnan\n"}, ValueError, ["u.data:1", "'nan'"]),
        ({"ratings.dat": "1::2::good\n"}, ValueError, ["ratings.dat:1", "'good'"]),
        ({"a.inter": "user_id:token\titem_id:token\trating:float\n1\t2\n"}, ValueError, ["a.inter:2", "2 cells"]),
        ({"a.inter": "user\titem_id\trating\n1\t2\t3\n"}, ValueError, ["needs user_id"]),
    ],
)
def test_a_folder_that_is_not_movielens_names_what_is_wrong(
    files: dict[str, str], error: type[Exception], named: list[str], tmp_path: Path
) -> None:
    check_refusal((lambda: read_log(write(tmp_path, files)), error, *named))
    check_refusal((lambda: read_log(tmp_path / "nowhere"), FileNotFoundError, "nowhere' does not exist"))


def test_keys_do_not_change_between_runs() -> None:
    assert [key(""), key("1"), key("Sci-Fi")] == [PADDING, 8518482412311870710, 2668419067930236758]


def test_the_synthetic_log_has_the_shape_and_the_gaps_of_the_real_one() -> None:
    log = synthetic_log()
    assert log.ids.shape[0] == 100_000
    assert 0.4 < log.labels.mean() < 0.6
    for name in ("zip", "year", "genre"):
        assert 0 < (log.ids[:, FIELDS.index(name)] == PADDING).float().mean() < 0.3
    assert "synthetic" in log.source


def test_the_split_covers_every_row_once_and_never_moves() -> None:
    parts = split(1003)
    assert [len(part) for part in parts] == [802, 100, 101]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1003))
    assert split(10)[0].tolist() == [2, 8, 4, 9, 1, 6, 7, 3]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=30))
def test_auc_counts_ordered_pairs_and_half_of_ties(pairs: list[tuple[bool, int]]) -> None:
    labels, scores = np.array([label for label, _ in pairs]), np.array([float(score) for _, score in pairs])
    up, down = scores[labels], scores[~labels]
    if not len(up) or not len(down):
        check_refusal((lambda: auc(labels, scores), ValueError, "needs both classes"))
        return
    wins = (up[:, None] > down).sum() + (up[:, None] == down).sum() / 2
    assert auc(labels, scores) == pytest.approx(wins / (len(up) * len(down)), abs=1e-12)
    scores[0] = np.nan
    check_refusal((lambda: auc(labels, scores), ValueError, "NaN"))
