"""TorchRec's SimpleDeepFMNN."""

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

ebc = EmbeddingBagCollection(
    tables=[
        EmbeddingBagConfig(name="t1", embedding_dim=8, num_embeddings=100, feature_names=["f1", "f3"]),
        EmbeddingBagConfig(name="t2", embedding_dim=8, num_embeddings=100, feature_names=["f2"]),
    ]
)
torch.manual_seed(3)
ebc.load_state_dict({f"embedding_bags.{name}.weight": torch.randn(100, 8) for name in ("t1", "t2")})
apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
model = SimpleDeepFMNN(num_dense_features=10, embedding_bag_collection=ebc, hidden_layer_size=20, deep_fm_dimension=5)
dense = torch.optim.SGD([one for name, one in model.named_parameters() if "embedding" not in name], lr=0.1)
numbers = []
for _ in range(4):
    features = KeyedJaggedTensor.from_offsets_sync(
        keys=["f1", "f3", "f2"], values=torch.randint(0, 100, (8,)), offsets=torch.tensor([0, 2, 4, 5, 5, 7, 8])
    )
    logits = model(dense_features=torch.rand(2, 10), sparse_features=features)
    dense.zero_grad()
    logits.square().sum().backward()
    dense.step()
    numbers.append(logits.detach())
