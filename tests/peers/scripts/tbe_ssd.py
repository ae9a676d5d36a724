"""Tables on SSD, behind a cache that holds few of their rows. FOLDER is set by who runs the script."""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType as OptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.tbe.ssd import SSDTableBatchedEmbeddingBags

tbe = SSDTableBatchedEmbeddingBags(
    embedding_specs=[(3000, 8), (2000, 8)],
    feature_table_map=[0, 1],
    cache_sets=4,
    ssd_storage_directory=FOLDER,  # noqa: F821
    ssd_uniform_init_lower=0.0,
    ssd_uniform_init_upper=0.0,
    optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
    learning_rate=0.1,
    pooling_mode=PoolingMode.MEAN,
)
torch.manual_seed(11)
numbers = []
for _ in range(6):
    lengths = torch.randint(0, 9, (2 * 50,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    out = tbe(torch.randint(0, 2000, (int(lengths.sum()),)), offsets)
    (out * torch.rand(out.shape)).sum().backward()
    numbers.append(out.detach())
tbe.flush()
numbers += [weights.cpu() for weights in tbe.split_embedding_weights()]
