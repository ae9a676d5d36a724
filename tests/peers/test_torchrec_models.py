"""Models of TorchRec over our collections, in a graph, train as they do over TorchRec's in a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchrec
from torch import Tensor, nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM

from support.graphs import compiled_steps, graph_of
from tierbed.jagged import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor

KEYS, ROWS, DIM, BATCH = ["a", "b"], 20, 8, 5
STEPS = range(4)


class Sequences(nn.Module):
    """A model of unpooled rows, as TorchRec's sequence models are."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows, self.gru = rows, nn.GRU(DIM, 3, batch_first=True)

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        found = self.rows(features)
        total = torch.stack([found[key].values().sum() for key in KEYS])
        return self.gru(found["a"].to_padded_dense(4))[0].sum((1, 2)) + total.sum() / 10


MODELS: dict[str, Any] = {
    "DLRM": lambda bags: DLRM(bags, dense_in_features=3, dense_arch_layer_sizes=[4, DIM], over_arch_layer_sizes=[4, 1]),
    "SimpleDeepFMNN": lambda bags: SimpleDeepFMNN(3, bags, hidden_layer_size=6, deep_fm_dimension=4),
    "EmbeddingCollection": Sequences,
}


def batches(kind: Any) -> list[tuple[Tensor, Any]]:
    random = torch.Generator().manual_seed(7)
    found = []
    for _ in STEPS:
        lengths = torch.randint(0, 5, (2 * BATCH,), generator=random)
        ids = torch.randint(ROWS, (int(lengths.sum()),), generator=random)
        found.append((torch.rand(BATCH, 3, generator=random), kind(KEYS, ids, lengths=lengths)))
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_a_graph_has_the_numbers_of_torchrec(name: str) -> None:
    unpooled = name == "EmbeddingCollection"
    config = torchrec.EmbeddingConfig if unpooled else torchrec.EmbeddingBagConfig
    tables = [config(name=f"t_{key}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[key]) for key in KEYS]
    theirs = (torchrec.EmbeddingCollection if unpooled else torchrec.EmbeddingBagCollection)(tables=tables)
    ours = (EmbeddingCollection if unpooled else EmbeddingBagCollection)(tables=tables)
    ours.load_state_dict(theirs.state_dict())
    torch.manual_seed(3)
    plain = MODELS[name](theirs)
    torch.manual_seed(3)
    model = MODELS[name](ours)

    def build(graph: Any, dense: Tensor, features: Any) -> Tensor:
        out: Tensor = graph.model(dense, features)
        out.square().mean().backward()
        return out

    graph = graph_of(build, torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    found = list(graph.run(batches(KeyedJaggedTensor), ahead=2))
    for out, (dense, features) in zip(found, batches(torchrec.KeyedJaggedTensor), strict=True):
        optimizer.zero_grad()
        expected = plain(dense, features)
        expected.square().mean().backward()
        optimizer.step()
        torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-6)
    assert compiled_steps(graph) == 1
    torch.testing.assert_close(ours.to_torchrec_state_dict(), dict(theirs.state_dict()), rtol=1e-5, atol=1e-6)
