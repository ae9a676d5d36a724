"""TorchRec's DLRM and its train module."""

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

tables = [
    EmbeddingBagConfig(name=f"t_{key}", embedding_dim=8, num_embeddings=20, feature_names=[key]) for key in ("a", "b")
]
ebc = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
torch.manual_seed(2)
ebc.load_state_dict({f"embedding_bags.t_{key}.weight": torch.randn(20, 8) for key in ("a", "b")})
model = DLRMTrain(DLRM(ebc, dense_in_features=4, dense_arch_layer_sizes=[6, 8], over_arch_layer_sizes=[5, 1]))
apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
dense = torch.optim.Adagrad([one for _, one in in_backward_optimizer_filter(model.named_parameters())], lr=0.1)


class Batch:
    def __init__(self) -> None:
        self.dense_features, self.labels = torch.rand(7, 4), torch.randint(0, 2, (7,))
        lengths = torch.randint(0, 3, (14,))
        ids = torch.randint(0, 20, (int(lengths.sum()),))
        self.sparse_features = KeyedJaggedTensor.from_lengths_sync(["a", "b"], ids, lengths)


numbers = []
for _ in range(5):
    loss, (_, logits, _) = model(Batch())
    dense.zero_grad()
    loss.backward()
    dense.step()
    numbers += [loss.detach(), logits]
