"""Training over processes as TorchRec's documentation has it; torchrun starts it.

    torchrun --nproc_per_node 2 distributed_script.py FOLDER

Writes the losses of rank 0 to FOLDER/losses.json: five steps, a checkpoint, and five more of a model that loads it.
"""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.streamable import Pipelineable

KEYS = ["user", "item"]


class Batch(Pipelineable):
    def __init__(self, dense: torch.Tensor, sparse: KeyedJaggedTensor, labels: torch.Tensor) -> None:
        self.dense_features, self.sparse_features, self.labels = dense, sparse, labels

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return Batch(self.dense_features.to(device), self.sparse_features.to(device), self.labels.to(device))

    def record_stream(self, stream: torch.Stream) -> None:
        pass

    def pin_memory(self) -> "Batch":
        return self


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        given = {"embedding_dim": 8, "num_embeddings": 200_000, "init_fn": partial(nn.init.constant_, val=0.05)}
        tables = [EmbeddingBagConfig(name=f"t_{key}", feature_names=[key], **given) for key in KEYS]
        self.ebc = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
        torch.manual_seed(0)
        self.over = nn.Sequential(nn.Linear(2 * 8 + 3, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.ebc(batch.sparse_features).values()
        logits = self.over(torch.cat([pooled, batch.dense_features], dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, loss.detach()


def batches(first: int, last: int) -> Iterator[Batch]:
    for step in range(first, last):
        random = torch.Generator().manual_seed(100 * step + dist.get_rank())
        lengths = torch.randint(0, 4, (2 * 6,), generator=random)
        ids = torch.randint(40, (int(lengths.sum()),), generator=random)
        sparse = KeyedJaggedTensor(keys=KEYS, values=ids, lengths=lengths)
        yield Batch(torch.rand(6, 3, generator=random), sparse, torch.randint(2, (6,), generator=random).float())


def training() -> tuple[nn.Module, CombinedOptimizer, TrainPipelineSparseDist]:
    model = Model()
    apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.1})
    parallel = DistributedModelParallel(model, device=torch.device("cpu"))
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(parallel.named_parameters())), lambda given: torch.optim.Adam(given, lr=0.01)
    )
    optimizer = CombinedOptimizer([parallel.fused_optimizer, dense])
    return parallel, optimizer, TrainPipelineSparseDist(parallel, optimizer, torch.device("cpu"))


def train(pipeline: TrainPipelineSparseDist, given: Iterator[Batch]) -> None:
    while True:
        try:
            losses.append(float(pipeline.progress(given)))
        except StopIteration:
            return


dist.init_process_group("gloo")
folder, losses = Path(sys.argv[1]), []
model, optimizer, pipeline = training()
train(pipeline, batches(0, 5))
dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=str(folder / "checkpoint"))

model, optimizer, pipeline = training()
train(pipeline, batches(0, 1))  # so that the optimizer has state to load
losses.pop()
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
dcp.load(state, checkpoint_id=str(folder / "checkpoint"))
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
train(pipeline, batches(5, 10))
if dist.get_rank() == 0:
    (folder / "losses.json").write_text(json.dumps(losses))
dist.barrier()
dist.destroy_process_group()
