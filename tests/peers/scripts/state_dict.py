"""A model's state, saved and resumed in the middle of its training."""

import io

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=20, feature_names=["f"])]
        self.ebc = EmbeddingBagCollection(tables=tables)
        self.over = nn.Linear(4, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features).values()).square().mean()


def train(model: Model, steps: int) -> None:
    dense = torch.optim.SGD(model.over.parameters(), lr=0.1)
    for _ in range(steps):
        lengths = torch.randint(0, 4, (5,))
        loss = model(KeyedJaggedTensor(["f"], torch.randint(0, 20, (int(lengths.sum()),)), lengths=lengths))
        dense.zero_grad()
        loss.backward()
        dense.step()
        numbers.append(loss.detach())


numbers: list[torch.Tensor] = []
first = Model()
torch.manual_seed(9)
first.ebc.load_state_dict({"embedding_bags.t.weight": torch.randn(20, 4)})
first.over.load_state_dict({"weight": torch.randn(1, 4), "bias": torch.zeros(1)})
apply_optimizer_in_backward(torch.optim.SGD, first.ebc.parameters(), {"lr": 0.1})
train(first, 3)
file = io.BytesIO()
torch.save(first.state_dict(), file)
file.seek(0)
second = Model()
apply_optimizer_in_backward(torch.optim.SGD, second.ebc.parameters(), {"lr": 0.1})
second.load_state_dict(torch.load(file))
torch.manual_seed(10)
train(second, 3)
