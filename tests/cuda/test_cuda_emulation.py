"""The emulation itself: what CUDA promises holds, and what it does not promise goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from support.cuda_emulation import EmulatedDevice
from support.cuda_tables import on_devices
from tierbed.engine.ops.cuda.batch import recover_keys
from tierbed.engine.ops.cuda.device import THREADS, Device


class Text(NamedTuple):
    """A program of one kernel."""

    body: str

    def read_source(self) -> str:
        return f'extern "C" __global__ void kernel(unsigned* out) {{ {self.body} }}\n'

    def list_kernels(self) -> list[str]:
        return ["kernel"]


def run(body: str, seed: int = 0) -> np.ndarray:
    out = np.full(2 * THREADS, 0xFFFF, np.uint32)
    EmulatedDevice(seed).start(Text(body), "kernel", 2, [np.uint64(out.ctypes.data)])  # type: ignore[arg-type]
    return out


@on_devices
def test_what_is_recorded_runs_at_each_replay_and_not_before(device: Device) -> None:
    place = device.torch_device
    given, total = torch.ones(5, dtype=torch.int64, device=place), torch.zeros(5, dtype=torch.int64, device=place)
    hashes, tables = torch.arange(5, device=place), torch.zeros(5, dtype=torch.int32, device=place)
    recover_keys(device, hashes, tables)  # compiles

    def launches() -> tuple[torch.Tensor, torch.Tensor]:
        total.add_(given * 2)
        return recover_keys(device, hashes, tables), torch.cat([total, given]).view(2, 5).sum(0)

    replay, (keys, sums) = device.capture(launches)
    assert not total.any()
    for number in (1, 2):
        given.fill_(number)
        hashes += 7
        replay()
        assert torch.equal(keys, recover_keys(device, hashes, tables))
        assert torch.equal(sums, total + number)
    assert total.tolist() == [6] * 5


@on_devices
@pytest.mark.parametrize("wait", [Tensor.item, Tensor.tolist, bool, lambda t: t.expand(3)[t.expand(3) > 0]])
def test_a_recording_refuses_what_waits(device: Device, wait: Callable[[Tensor], object]) -> None:
    one = torch.ones(1, device=device.torch_device)
    with pytest.raises(RuntimeError, match="captur"):
        device.capture(lambda: wait(one))
    replay, doubled = device.capture(lambda: one * 2)  # nothing of it is left
    replay()
    assert doubled.item() == 2
    wait(one)


ALL = "const unsigned i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31;"


@pytest.mark.parametrize("seed", [0, 1])
def test_every_thread_runs_once_and_collectives_see_their_lanes(seed: int) -> None:
    threads = np.arange(2 * THREADS)
    assert (run(f"{ALL} out[i] = i;", seed) == threads).all()
    thirds = sum(1 << k for k in range(0, 32, 3))
    assert (run(f"{ALL} out[i] = __ballot_sync(~0u, lane % 3 == 0);", seed) == thirds).all()
    assert (run(f"{ALL} out[i] = __shfl_sync(~0u, i, 5);", seed) == threads // 32 * 32 + 5).all()
    down = np.where(threads % 32 < 16, threads + 16, threads)
    assert (run(f"{ALL} out[i] = __shfl_down_sync(~0u, i, 16);", seed) == down).all()
    parts = f"{ALL} unsigned votes = 0; const unsigned part = lane / 8, mask = 0xFFu << 8 * part;"  # that diverge
    vote = "for (unsigned k = 0; k <= part; ++k) votes = __ballot_sync(mask, lane % 8 == part); out[i] = votes;"
    assert (run(f"{parts} {vote}", seed) == 1 << (9 * (threads % 32 // 8))).all()


def test_a_collective_that_lanes_never_reach_is_an_error() -> None:
    with pytest.raises(AssertionError, match="never complete"):
        run(f"{ALL} if (lane != 7) __syncwarp(~0u);")
    with pytest.raises(AssertionError, match="never complete"):
        run(f"{ALL} __syncwarp(lane < 16 ? ~0u : 0xFFFF0000u);")


def test_a_seed_shows_what_depends_on_the_order_of_threads() -> None:
    count = f"{ALL} out[i] = atomicAdd(&out[0], 1u);"
    assert (run(count) == run(count)).all()
    assert (run(count, seed=1) == run(count, seed=1)).all()
    assert (run(count, seed=1) != run(count, seed=2)).any()
    racing = "const unsigned old = out[1]; atomicOr(&out[2], 0u); out[1] = old + 1;"
    lost = run(f"{ALL} if (lane == 0) out[1] = 0; __syncwarp(~0u); {racing}", seed=1)
    assert lost[1] < THREADS
