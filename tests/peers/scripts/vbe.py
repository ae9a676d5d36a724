"""Variable batch sizes: features of which several samples share a bag."""

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

ebc = EmbeddingBagCollection(
    tables=[
        EmbeddingBagConfig(name="t1", embedding_dim=4, num_embeddings=30, feature_names=["f1"]),
        EmbeddingBagConfig(name="t2", embedding_dim=4, num_embeddings=30, feature_names=["f2"]),
    ]
)
torch.manual_seed(5)
ebc.load_state_dict({"embedding_bags.t1.weight": torch.randn(30, 4), "embedding_bags.t2.weight": torch.randn(30, 4)})
apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
numbers = []
for _ in range(3):
    lengths = torch.randint(0, 4, (5,))
    features = KeyedJaggedTensor(
        keys=["f1", "f2"],
        values=torch.randint(0, 30, (int(lengths.sum()),)),
        lengths=lengths,
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=(["f1", "f2"], torch.tensor([[0, 1, 0, 1], [2, 0, 1, 1]])),
    )
    out = ebc(features).values()
    out.square().sum().backward()
    numbers += [out.detach(), torch.tensor(features.stride_per_key(), dtype=torch.float32)]
