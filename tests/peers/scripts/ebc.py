"""Pooled tables by two dims, trained in backward."""

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

ebc = EmbeddingBagCollection(
    device=torch.device("cpu"),
    tables=[
        EmbeddingBagConfig(num_embeddings=40, embedding_dim=8, name="user", feature_names=["user"]),
        EmbeddingBagConfig(
            num_embeddings=30, embedding_dim=4, name="item", feature_names=["item", "seen"], pooling=PoolingType.MEAN
        ),
    ],
)
torch.manual_seed(0)
ebc.load_state_dict(
    {"embedding_bags.user.weight": torch.randn(40, 8), "embedding_bags.item.weight": torch.randn(30, 4)}
)
apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1})
over = torch.nn.Linear(16, 1)
dense = torch.optim.SGD(over.parameters(), lr=0.05)
numbers = []
for _ in range(5):
    lengths = torch.randint(0, 4, (3 * 6,))
    ids = torch.randint(0, 30, (int(lengths.sum()),))
    features = KeyedJaggedTensor.from_lengths_sync(keys=["user", "item", "seen"], values=ids, lengths=lengths)
    pooled = ebc(features)
    loss = over(pooled.values()).square().mean() + pooled["seen"].sum() / 10
    dense.zero_grad()
    loss.backward()
    dense.step()
    numbers.append(loss.detach())
