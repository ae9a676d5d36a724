"""A synthetic click log shaped like MovieLens 100K, with a signal that a factor model can learn."""

from __future__ import annotations

import numpy as np
from movielens_data import GENRES, Log, build_log

USERS, ITEMS, RATINGS, FACTORS = 943, 1682, 100_000, 4


def synthetic_log(seed: int = 0) -> Log:
    """Make users and items with attributes and hidden factors. A click is likelier if the user and the item match.

    The click probability is the logistic of a sum: a user's generosity, an item's quality, hidden tastes, and each
    gender's preference for genres. A few zips, years and genres are missing. The log is the same on every machine.
    """
    rng = np.random.RandomState(seed)
    users = np.column_stack(
        [rng.randint(15, 70, USERS), rng.choice(["F", "M"], USERS, p=[0.3, 0.7]), rng.randint(21, size=USERS)]
    )
    zips = np.where(rng.rand(USERS) < 0.02, "", rng.randint(10_000, 10_800, USERS).astype(str))
    years = np.where(rng.rand(ITEMS) < 0.02, "", (1999 - rng.geometric(0.15, ITEMS)).astype(str))
    genres = rng.rand(ITEMS, len(GENRES)) < 0.09

    activity = rng.lognormal(sigma=1.0, size=USERS)
    popularity = rng.lognormal(sigma=1.2, size=ITEMS)
    user = rng.choice(USERS, RATINGS, p=activity / activity.sum())
    item = rng.choice(ITEMS, RATINGS, p=popularity / popularity.sum())

    taste, character = rng.randn(USERS, FACTORS), rng.randn(ITEMS, FACTORS)
    likes = {gender: rng.randn(len(GENRES)) * 0.6 for gender in "FM"}
    opinion = np.stack([genres @ likes[gender] for gender in users[:, 1]])  # [user, item]
    generous, good = rng.randn(USERS) * 0.6, rng.randn(ITEMS) * 0.8
    match = generous[user] + good[item] + 0.6 * (taste[user] * character[item]).sum(1) + opinion[user, item]
    clicked = rng.rand(RATINGS) < 1 / (1 + np.exp(-3 * match))

    return build_log(
        "synthetic click log (no --data was given)",
        [(f"{u}", f"{i}", 5.0 if click else 1.0) for u, i, click in zip(user, item, clicked, strict=True)],
        {f"{u}": (*map(str, users[u]), zips[u]) for u in range(USERS)},
        {f"{i}": (years[i], [GENRES[genre] for genre in np.flatnonzero(genres[i])]) for i in range(ITEMS)},
    )
