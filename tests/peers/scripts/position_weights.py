"""Weights by position, learned with the rows that they weigh."""

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

positions = PositionWeightedModuleCollection(max_feature_lengths={"a": 5, "b": 4})
ebc = EmbeddingBagCollection(
    tables=[EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=20, feature_names=["a", "b", "c"])],
    is_weighted=True,
)
torch.manual_seed(6)
positions.load_state_dict({"position_weights.a": torch.rand(5), "position_weights.b": torch.rand(4)})
ebc.load_state_dict({"embedding_bags.t.weight": torch.randn(20, 4)})
apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
dense = torch.optim.SGD(positions.parameters(), lr=0.1)
numbers = []
for _ in range(4):
    lengths = torch.randint(0, 5, (9,))
    features = KeyedJaggedTensor(["a", "b", "c"], torch.randint(0, 20, (int(lengths.sum()),)), lengths=lengths)
    out = ebc(positions(features)).values()
    dense.zero_grad()
    out.square().sum().backward()
    dense.step()
    numbers += [out.detach(), *(weights.detach().clone() for weights in positions.parameters())]
