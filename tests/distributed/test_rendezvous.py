"""The ranks of a restarted job meet each other, and nothing of those before them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store, TCPStore

from tierbed import GroupError
from tierbed.distributed.world import store_of_this_start

RANKS = 3
LONG = timedelta(seconds=60)


def clients() -> list[Store]:
    """A store that several processes would have, as each of them has it."""
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [first, *(TCPStore("127.0.0.1", first.port, is_master=False) for _ in range(1, RANKS))]


def reports(store: Store) -> list[bytes]:
    """What ranks have sent under the name of the last start."""
    start = store.get("tierbed/start").decode()
    return [store.get(f"{start}/{rank}") for rank in range(1, RANKS)]


@pytest.mark.parametrize("last", range(RANKS))
def test_a_rank_that_is_early_waits_for_those_of_its_start(last: int) -> None:
    stores = clients()
    with ThreadPoolExecutor(RANKS) as ranks:

        def begin(rank: int) -> Future[Store]:
            return ranks.submit(store_of_this_start, stores[rank], rank, RANKS, LONG)

        for number in range(3):
            before = reports(stores[last]) if number else []
            early = {rank: begin(rank) for rank in range(RANKS) if rank != last}
            while number and last == 0 and any(map(bytes.__eq__, before, reports(stores[0]))):
                pass  # until they have met the start before
            assert not any(one.done() for one in early.values())
            found = {rank: one.result() for rank, one in (early | {last: begin(last)}).items()}
            assert not any(store.check(["address"]) for store in found.values())
            found[0].set("address", str(number))
            assert {store.get("address") for store in found.values()} == {str(number).encode()}


def test_a_start_without_rank_0_ends() -> None:
    store = HashStore()
    store.set("tierbed/start", "tierbed/start/old")
    with pytest.raises(GroupError, match="rank 0 did not answer"):
        store_of_this_start(store, 1, 2, timedelta(seconds=0.2))
