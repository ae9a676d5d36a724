"""Tables behind a cache, without pooling, and by position in FBGEMM's order."""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType as OptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CacheAlgorithm,
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

tbe = SplitTableBatchedEmbeddingBagsCodegen(
    [(50, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)] * 2,
    None,
    CacheAlgorithm.LFU,
    0.2,
    optimizer=OptimType.EXACT_ADAGRAD,
    learning_rate=0.1,
    pooling_mode=PoolingMode.NONE,
    bounds_check_mode=BoundsCheckMode.FATAL,
    use_experimental_tbe=False,
)
tbe.init_embedding_weights_uniform(0.0, 0.0)
torch.manual_seed(8)
numbers = []
for _ in range(4):
    indices, offsets = torch.randint(0, 50, (9,)), torch.tensor([0, 3, 4, 4, 9])
    out = tbe(indices, offsets)
    (out * torch.rand(out.shape)).sum().backward()
    numbers.append(out.detach())
[[first], [second]] = tbe.split_optimizer_states()
numbers += [*tbe.split_embedding_weights(), first, second]
