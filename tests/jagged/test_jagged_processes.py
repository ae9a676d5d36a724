"""Jagged tensors do not come through the workers of a loader, or the package needs TorchRec to be installed."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset

from support.scripts import run_cold
from tierbed.jagged import JaggedTensor, KeyedJaggedTensor

WITHOUT = """
import sys

for name in ("torchrec", "fbgemm_gpu"):
    sys.modules[name] = None  # importing it raises ImportError
import torch
import tierbed.jagged

for name in tierbed.jagged.__all__:
    getattr(tierbed.jagged, name)
features = tierbed.jagged.KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=torch.tensor([2, 1, 0, 2]))
assert features["b"].to_padded_dense().tolist() == [[0, 0], [3, 4]]
assert features.permute([1, 0]).values().tolist() == [3, 4, 0, 1, 2]
assert not hasattr(torch.ops.fbgemm, "permute_multi_embedding")
"""


class Samples(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


def collate(samples: list[int]) -> tuple[KeyedJaggedTensor, dict[str, JaggedTensor]]:
    """Of sample n, feature a has n values n, and b has one."""
    lengths = torch.tensor([*samples, *[1] * len(samples)])
    values = torch.tensor([*samples, *samples]).repeat_interleave(lengths)
    made = KeyedJaggedTensor(["a", "b"], values, values.float(), lengths)
    return made, made.to_dict()


def test_workers_of_a_loader_send_what_they_make() -> None:
    loader = DataLoader(Samples(), 4, collate_fn=collate, num_workers=2)
    batches = list(loader)
    assert len(batches) == 3
    for number, (made, apart) in enumerate(batches):
        samples = [*range(10)][4 * number : 4 * number + 4]
        made.validate()
        assert [bag.tolist() for bag in made["a"].to_dense()] == [[n] * n for n in samples]
        assert apart["b"].values().tolist() == samples
        assert torch.equal(made.weights(), made.values().float())


def test_it_needs_neither_torchrec_nor_fbgemm() -> None:
    done = run_cold(WITHOUT)
    assert done.returncode == 0, done.stderr
