"""Graphs whose steps run as CUDA graphs, and the pair of a recorded and a plain one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from support.embeddings import DIM, contents, make
from support.optimizers import OPTIMIZERS
from support.stores import options
from tierbed import Graph, MultiTableEmbedding
from tierbed.embedding.state_dict.saved_rows import exclude_rows

PADDING = 3
CAPTURED = "# captured as a CUDA graph"
Batch = tuple[Tensor, ...]


class Model(Graph):
    """Two embeddings, one of them pooled with weights that are trained, before an MLP; all learning rates decay."""

    def __init__(self, optimizer: str, path: Path | None = None, capacity: int = 500) -> None:
        super().__init__()
        self.rows = make(options("device", path, capacity=capacity), name="rows", padding_idx=PADDING)
        self.bags = make(options("device", capacity=500), name="bags", tables=1)
        self.mlp = nn.Sequential(nn.Linear(3 * DIM, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.weights = nn.Parameter(torch.ones(2))
        kind, settings = OPTIMIZERS[optimizer]
        of_rows = kind([*self.rows.parameters(), *self.bags.parameters()], **settings)  # type: ignore[arg-type]
        of_rest = torch.optim.AdamW([self.weights, *self.mlp.parameters()], lr=0.01)
        for one in (of_rows, of_rest):
            self.add_optimizer(one, ExponentialLR(one, 0.9))

    def build(self, ids: Tensor, tables: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.rows(ids, tables)
        bags = self.bags(ids, 0, pooling="mean", weights=self.weights.expand(ids.shape).contiguous())
        found = torch.cat([rows.flatten(1), bags], 1)
        loss = (self.mlp(found).squeeze(1) - y).square().mean()
        loss.backward()
        return loss, rows


def batches(count: int, size: int = 6, ids: int = 60, seed: int = 0) -> list[Batch]:
    draw = torch.Generator().manual_seed(seed)
    sizes = ids, 3
    return [
        (*(torch.randint(0, most, (size, 2), generator=draw) for most in sizes), torch.rand(size, generator=draw))
        for _ in range(count)
    ]


def counts(rows: MultiTableEmbedding) -> dict[str, dict[str, float]]:
    """Its metrics, but for batches made ahead, which a captured step has none of."""
    metrics = rows.metrics()
    metrics["table"] = {name: value for name, value in metrics["table"].items() if not name.startswith("prefetch")}
    return metrics


class Pair:
    """A plain graph and one whose steps are recorded, to which the same happens."""

    def __init__(self, place: torch.device, make_graph: Callable[[str], Graph]) -> None:
        self.place = place
        self.graphs: list[Any] = [make_graph(name).to(place) for name in ("plain", "recorded")]
        for graph in self.graphs:
            torch.manual_seed(3)
            for module in graph.modules():
                if isinstance(module, nn.Linear):
                    module.reset_parameters()
        self.graphs[1].cuda_graph()

    def steps(self, given: list[Batch], errors: tuple[type[Exception], ...] = ()) -> list[str]:
        """The errors that the steps raised, alike on both sides, as are all that they returned and what they left."""
        seen: list[list[Any]] = []
        for graph in self.graphs:
            torch.manual_seed(4)
            seen.append([])
            for batch in given:
                try:
                    out = graph(*(tensor.to(self.place) for tensor in batch))
                    seen[-1] += [tensor.cpu() for tensor in (out if isinstance(out, tuple) else (out,))]
                except errors as error:
                    seen[-1].append(str(error))
                if self.place.type == "cuda":
                    torch.cuda.synchronize()  # so that what the step found has arrived
        for one, other in zip(*seen, strict=True):
            assert bits(one) == bits(other)
        self.check()
        return [one for one in seen[0] if isinstance(one, str)]

    def check(self) -> None:
        plain, recorded = ([m for m in graph.children() if hasattr(m, "chunks")] for graph in self.graphs)
        for one, other in zip(plain, recorded, strict=True):
            assert contents(one).tobytes() == contents(other).tobytes()
            assert counts(one) == counts(other)
        with exclude_rows():
            states = [graph.state_dict() for graph in self.graphs]
        for (name, one), other in zip(states[0].items(), states[1].values(), strict=True):
            if isinstance(one, Tensor) and not name.endswith("._extra_state"):  # which has the version of either store
                assert bits(one) == bits(other), name

    def each(self, act: Callable[[Any], object]) -> list[Any]:
        return [act(graph) for graph in self.graphs]

    @property
    def is_captured(self) -> bool:
        assert CAPTURED not in repr(self.graphs[0])
        return CAPTURED in repr(self.graphs[1])


def bits(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.numel():
        return value
    return value.cpu().reshape(-1).view(torch.uint8).tolist()
