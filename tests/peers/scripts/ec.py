"""Rows of sequences, of two features of one table and one of another."""

import torch
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

ec = EmbeddingCollection(
    device=torch.device("cpu"),
    tables=[
        EmbeddingConfig(
            num_embeddings=50,
            embedding_dim=6,
            name="item",
            feature_names=["clicked", "bought"],
            init_fn=nn.init.zeros_,
        ),
        EmbeddingConfig(num_embeddings=9, embedding_dim=6, name="shop", feature_names=["shop"]),
    ],
)
torch.manual_seed(1)
state = {"embeddings.item.weight": torch.randn(50, 6), "embeddings.shop.weight": torch.randn(9, 6)}
ec.load_state_dict(state)
apply_optimizer_in_backward(RowWiseAdagrad, ec.parameters(), {"lr": 0.1})
gru = nn.GRU(6, 5, batch_first=True)
dense = torch.optim.Adam(gru.parameters(), lr=0.01)
numbers = []
for _ in range(5):
    lengths = torch.randint(0, 5, (12,))
    sizes = lengths.view(3, 4).sum(1)
    ids = torch.cat([torch.randint(0, 50, (int(sizes[:2].sum()),)), torch.randint(0, 9, (int(sizes[2]),))])
    features = KeyedJaggedTensor(keys=["clicked", "bought", "shop"], values=ids, lengths=lengths)
    rows = ec(features)
    out, _ = gru(rows["clicked"].to_padded_dense(6))
    loss = out.square().mean() + sum(rows[key].values().sum() for key in ("bought", "shop")) / 20
    dense.zero_grad()
    loss.backward()
    dense.step()
    numbers += [loss.detach(), rows["shop"].lengths().float(), features["bought"].values().float()]
