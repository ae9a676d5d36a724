"""A table-batched embedding on a GPU has other bits than on the CPU, or jagged tensors do not reach a GPU whole."""

from __future__ import annotations

import pytest
import torch

import tierbed
from support.cuda_tables import NO_GPU, on_one_device, tables_on
from support.tbe import MAP, batch
from tierbed.engine.errors import InputError
from tierbed.jagged import (
    BoundsCheckMode,
    ComputeDevice,
    EmbeddingLocation,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    OptimType,
    TableBatchedEmbeddingBags,
)

TABLES = [(200, 8), (30, 4), (90, 8)]
DEVICE, HOST = EmbeddingLocation.DEVICE, EmbeddingLocation.HOST
SLOW = [pytest.param(place, marks=pytest.mark.slow) for place in (DEVICE, HOST, None)]


def tbe_at(place: torch.device, location: EmbeddingLocation | None, path, **options) -> TableBatchedEmbeddingBags:
    compute = ComputeDevice[place.type.upper()]
    if location is None:
        options["store_options"] = tierbed.make_cached_ssd_store_options(0.2, path, shards=2)
    where = HOST if location is None else location
    specs = [(rows, dim, where, compute) for rows, dim in TABLES]
    options = {"optimizer": OptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, **options}
    return TableBatchedEmbeddingBags(specs, MAP, seed=0, **options)


def trained(place: torch.device, location: EmbeddingLocation | None, path) -> list[torch.Tensor]:
    torch.manual_seed(0)
    results = []
    with tbe_at(place, location, path) as tbe:
        tbe.init_embedding_weights_uniform(-1, 1)
        batches = [batch(TABLES, MAP, [6] * len(MAP), weighted=True) for _ in range(6)]
        for number, (indices, offsets, weights) in enumerate(batches):
            if number == 2:
                indices[0] = -1
            given = [given.to(place) for given in (indices, offsets, weights)]
            tbe.prefetch(*given[:2])
            output = tbe(*given[:2], given[2].requires_grad_())
            output.backward(output.detach().cpu().sin().to(place))  # a GPU's sine has other bits
            results += [output.detach().cpu(), given[2].grad.cpu()]
        assert sum(of["table"]["dropped"] for of in tbe.metrics().values()) > 0
        return [rows.cpu() for rows in (*results, *tbe.split_embedding_weights(), tbe.split_optimizer_states()[0][0])]


@on_one_device
@pytest.mark.parametrize("location", [EmbeddingLocation.MANAGED_CACHING, *SLOW])
def test_a_run_has_the_bits_of_the_cpu(device, location, tmp_path):
    here = trained(torch.device("cpu"), location, tmp_path / "here")
    with tables_on(device) as place:
        there = trained(place, location, tmp_path / "there")
    assert all(map(torch.equal, there, here))


@on_one_device
def test_fatal_is_raised_at_the_latest_by_the_next_call_that_waits(device, tmp_path):
    with tables_on(device) as place:
        options = {"bounds_check_mode": BoundsCheckMode.FATAL}
        with tbe_at(place, DEVICE, tmp_path, **options) as tbe:
            before = tbe.split_embedding_weights()
            indices, offsets = torch.tensor([1, 2, 3, 30, 4], device=place), torch.arange(6, device=place)

            def step() -> None:
                tbe(indices, offsets).sum().backward()
                tbe.metrics()

            with pytest.raises(InputError, match="one is no id of its table"):
                step()
            assert all(map(torch.equal, tbe.split_embedding_weights(), before))


@pytest.mark.gpu
@pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)
def test_a_batch_goes_to_a_gpu_by_another_stream() -> None:
    made = KeyedJaggedTensor(["a", "b"], torch.arange(6), torch.rand(6), lengths=torch.tensor([2, 1, 0, 3]))
    for one in (made, made["b"], KeyedTensor(["a"], [2], torch.rand(3, 2))):
        pinned = one.pin_memory()
        assert pinned.values().is_pinned()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            moved = pinned.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
        moved.record_stream(torch.cuda.current_stream())
        assert torch.equal(moved.values().cpu(), one.values())
        if isinstance(one, KeyedTensor):
            continue
        assert isinstance(moved, KeyedJaggedTensor | JaggedTensor)
        assert moved.offsets().tolist() == one.offsets().tolist()
        assert torch.equal(moved.weights().cpu(), one.weights())
    on_gpu = made.to("cuda")
    assert on_gpu["b"].to_padded_dense(2, -1).tolist() == [[-1, -1], [3, 4]]
    assert on_gpu.permute([1, 0]).values().tolist() == [3, 4, 5, 0, 1, 2]
