"""A deep and cross network: CrossNet over regrouped keyed tensors."""

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.modules.crossnet import CrossNet
from torchrec.modules.mlp import MLP
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

tables = [EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=25, feature_names=[name]) for name in "abc"]
ebc = EmbeddingBagCollection(tables)
torch.manual_seed(4)
ebc.load_state_dict({f"embedding_bags.{name}.weight": torch.randn(25, 4) for name in "abc"})
apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.2, "eps": 1e-8})
cross, deep, over = CrossNet(12, num_layers=2), MLP(8, [6, 4]), nn.Linear(16, 1)
dense = torch.optim.Adam([*cross.parameters(), *deep.parameters(), *over.parameters()], lr=0.01)
numbers = []
for _ in range(4):
    lengths = torch.randint(0, 4, (15,))
    features = KeyedJaggedTensor(["a", "b", "c"], torch.randint(0, 25, (int(lengths.sum()),)), lengths=lengths)
    pooled = ebc(features)
    crossed, regrouped = KeyedTensor.regroup([pooled], [["c", "a", "b"], ["b", "a"]])
    out = over(torch.cat([cross(crossed), deep(regrouped)], dim=1)).sigmoid()
    dense.zero_grad()
    out.mean().backward()
    dense.step()
    numbers.append(out.detach())
