"""A table-batched embedding in a training loop."""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType as OptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

tbe = SplitTableBatchedEmbeddingBagsCodegen(
    [(60, 8, EmbeddingLocation.HOST, ComputeDevice.CPU), (40, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)],
    feature_table_map=[0, 1, 1],
    optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
    learning_rate=0.1,
    eps=1e-8,
    pooling_mode=PoolingMode.SUM,
)
tbe.init_embedding_weights_uniform(0.0, 0.0)
torch.manual_seed(7)
numbers = []
for step in range(5):
    lengths = torch.randint(0, 4, (3 * 4,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    indices = torch.randint(0, 40, (int(lengths.sum()),))
    out = tbe(indices, offsets, torch.rand(len(indices)))
    out.backward(torch.rand(out.shape))
    numbers.append(out.detach())
    if step == 2:
        tbe.set_learning_rate(0.05)
tbe.flush()
numbers += [*tbe.split_embedding_weights(), *(state["sum"] for state in tbe.get_optimizer_state()), tbe.iter.float()]
