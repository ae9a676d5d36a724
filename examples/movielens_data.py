"""MovieLens as a click log: readers for its three layouts, the train/test split, and AUC.

Hashing a value's text gives its 64-bit key, so no vocabulary is needed. Training and serving processes get the same
keys, and an unseen value is simply a new key.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike

FIELDS = ("user", "age", "gender", "occupation", "zip", "item", "year", "genre")
GENRE = FIELDS.index("genre")  # the last field, and the only one with several values
PADDING = -1  # a missing value
LAYOUTS = ("u.data", "ratings.dat", "*.inter")
UNKNOWN = {"", "unknown", "(no genres listed)"}

# u.item has a 0/1 column for each genre, in this order
GENRES = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"),
    *("Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)

Users = dict[str, tuple[str, str, str, str]]  # {user: (age, gender, occupation, zip)}
Items = dict[str, tuple[str, list[str]]]  # {item: (year, genres)}
Ratings = list[tuple[str, str, float]]  # (user, item, rating)


@dataclass(frozen=True)
class Log:
    """Ratings as click examples."""

    source: str
    ids: torch.Tensor  # int64 [rows, width]: a key per single-valued field, then the genres; `PADDING` if missing
    table_ids: torch.Tensor  # int64 [width], each column's field
    labels: torch.Tensor  # float32 [rows], 1 for a rating of 4 or more

    def __str__(self) -> str:
        users, items = (len(self.ids[:, FIELDS.index(name)].unique()) for name in ("user", "item"))
        missing = (self.ids[:, : GENRE + 1] == PADDING).sum(0).tolist()
        gaps = ", ".join(f"{name} {count:,}" for name, count in zip(FIELDS, missing, strict=True) if count)
        return (
            f"{self.source}: {len(self.labels):,} ratings, {users:,} users, {items:,} items, "
            f"{self.labels.mean():.1%} positive; missing values: {gaps or 'none'}"
        )


def key(word: str) -> int:
    """Return a value's 64-bit key; `PADDING` for an empty value."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little", signed=True) if word else -1


def read_log(folder: Path) -> Log:
    """Read a folder with `u.data`, `ratings.dat` or one `*.inter` file, and the users and items files beside it.

    If a users or items file is missing, its fields stay empty. Raises FileNotFoundError if the folder has none of the
    three layouts, and ValueError with file and line if a line does not fit.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"data folder {str(folder)!r} does not exist")
    atomic = sorted(folder.glob("*.inter"))
    if (folder / "u.data").is_file():
        ratings, users, items = _read_100k(folder)
    elif (folder / "ratings.dat").is_file():
        ratings, users, items = _read_1m(folder)
    elif len(atomic) == 1:
        ratings, users, items = _read_atomic(atomic[0])
    elif atomic:
        raise ValueError(f"data folder {str(folder)!r} holds {len(atomic)} *.inter files: keep one")
    else:
        raise FileNotFoundError(f"data folder {str(folder)!r} holds none of {', '.join(LAYOUTS)}")
    if not ratings:
        raise ValueError(f"data folder {str(folder)!r} holds no ratings")
    return build_log(str(folder), ratings, users, items)


def build_log(source: str, ratings: Ratings, users: Users, items: Items) -> Log:
    """Join ratings with their users and items, and hash every value."""
    rating_users, rating_items, stars = zip(*ratings, strict=True)
    max_genres = max([len(genres) for _, genres in items.values()], default=0) or 1

    def user_keys(user: str) -> list[int]:
        return [key(word) for word in (user, *users.get(user, [""] * 4))]

    def item_keys(item: str) -> list[int]:
        year, genres = items.get(item, ("", []))
        return [key(word) for word in (item, year, *genres, *[""] * (max_genres - len(genres)))]

    ids = torch.cat([_per_value(user_keys, rating_users), _per_value(item_keys, rating_items)], 1)
    table_ids = torch.tensor([*range(GENRE), *[GENRE] * max_genres])
    return Log(source, ids, table_ids, (torch.tensor(stars) >= 4).float())


def _per_value(make_keys: Callable[[str], list[int]], column: Sequence[str]) -> torch.Tensor:
    """Make keys once per distinct value, and return them for the whole column: int64 [len(column), keys]."""
    index = {value: number for number, value in enumerate(dict.fromkeys(column))}
    return torch.tensor([make_keys(value) for value in index])[[index[value] for value in column]]


def _read_100k(folder: Path) -> tuple[Ratings, Users, Items]:
    """Read MovieLens 100K: `u.data` with tabs, `u.user` and `u.item` with bars. `u.item` has a flag per genre."""
    ratings = [_rating(row, where) for row, where in _rows(folder / "u.data", "\t", 3)]
    users: Users = {r[0]: (r[1], r[2], r[3], r[4]) for r, _ in _rows(folder / "u.user", "|", 5)}
    items: Items = {}
    for row, _ in _rows(folder / "u.item", "|", 5 + len(GENRES)):
        items[row[0]] = _year(row[2]), _genres(g for g, flag in zip(GENRES, row[5:], strict=False) if flag == "1")
    return ratings, users, items


def _read_1m(folder: Path) -> tuple[Ratings, Users, Items]:
    """Read MovieLens 1M or 10M. The 10M data lacks users. `::` separates cells. A movie's title ends in a year."""
    ratings = [_rating(row, where) for row, where in _rows(folder / "ratings.dat", "::", 3)]
    users: Users = {r[0]: (r[2], r[1], r[3], r[4]) for r, _ in _rows(folder / "users.dat", "::", 5)}
    items: Items = {}
    for row, _ in _rows(folder / "movies.dat", "::", 3):
        tail = re.search(r"\(\d{4}\)\s*$", row[1])
        items[row[0]] = _year(tail[0] if tail else ""), _genres(row[2].split("|"))
    return ratings, users, items


def _read_atomic(log: Path) -> tuple[Ratings, Users, Items]:
    """Read tab-separated "atomic" files. A header cell is `name:type`. Spaces separate several values in one cell.
    Only the columns user_id, item_id and rating are required."""
    ratings = [_rating(row, where) for row, where in _columns(log, "user_id", "item_id", "rating")]
    users: Users = {}
    for row, _ in _columns(log.with_suffix(".user"), "user_id", "age", "gender", "occupation", "zip_code"):
        users[row[0]] = row[1], row[2], row[3], row[4]
    items: Items = {}
    for row, _ in _columns(log.with_suffix(".item"), "item_id", "release_year", "class|genre|genres"):
        items[row[0]] = _year(row[1]), _genres(row[2].split())
    return ratings, users, items


def _rows(path: Path, separator: str, min_cells: int) -> Iterator[tuple[list[str], str]]:
    """Yield (stripped cells, "file:line") for each line. Yields nothing if the file does not exist."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:  # titles may be latin-1, but are not used
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            cells = [cell.strip() for cell in line.rstrip("\n").split(separator)]
            if len(cells) < min_cells:
                raise ValueError(f"{path}:{number}: {len(cells)} cells separated by {separator!r}, needs {min_cells}")
            yield cells, f"{path}:{number}"


def _columns(path: Path, *names: str) -> Iterator[tuple[list[str], str]]:
    """Yield named columns of an atomic file. "a|b" selects a, or else b. Only the first column must exist."""
    rows = _rows(path, "\t", 1)
    header = [cell.split(":")[0] for cell in next(rows, ([], ""))[0]]
    columns = [next((header.index(name) for name in choice.split("|") if name in header), None) for choice in names]
    for cells, where in rows:
        if len(cells) != len(header) or columns[0] is None:
            raise ValueError(f"{where}: {len(cells)} cells. The header {header} needs {names[0]} and as many columns")
        yield ["" if column is None else cells[column] for column in columns], where


def _rating(row: Sequence[str], where: str) -> tuple[str, str, float]:
    try:
        rating = float(row[2])
    except ValueError:
        rating = math.nan
    if not math.isfinite(rating):
        raise ValueError(f"{where}: rating {row[2]!r} is not a number")
    return row[0], row[1], rating


def _year(text: str) -> str:
    match = re.search(r"\d{4}", text)
    return match[0] if match else ""


def _genres(words: Iterable[str]) -> list[str]:
    return [word for word in words if word not in UNKNOWN]


def split(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random row numbers for training (80 %), validation (10 %) and test (10 %), equal on every machine."""
    order = torch.from_numpy(np.random.RandomState(0).permutation(rows))
    return order[: rows * 8 // 10], order[rows * 8 // 10 : rows * 9 // 10], order[rows * 9 // 10 :]


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Return the area under the ROC curve: the probability that a positive scores above a negative; ties count half.

    labels: [n], each 0 or 1. scores: [n]. Raises ValueError if a class is empty or a score is NaN.
    """
    labels, scores = np.asarray(labels) > 0, np.asarray(scores)
    positives, negatives = int(labels.sum()), int((~labels).sum())
    if not positives or not negatives:
        raise ValueError(f"AUC needs both classes: {positives} positives, {negatives} negatives")
    if np.isnan(scores).any():
        raise ValueError("a score is NaN: the training diverged, try a smaller learning rate")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # ties get their mean rank
    return float((ranks[labels].sum() - positives * (positives + 1) / 2) / (positives * negatives))
