"""The blocks that random models are made of: each takes hidden [B, WIDTH] and gives the same, for any batch size B."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 6
TABLES, IDS = 2, 30
Rows = Callable[..., Tensor]


class Batch(NamedTuple):
    """x: [B, WIDTH]. ids: [B, 3]. flat, offsets: B bags of some ids. y: [B]."""

    x: Tensor
    ids: Tensor
    flat: Tensor
    offsets: Tensor
    y: Tensor


BLOCKS: dict[str, type[Block]] = {}


class Block(nn.Module):
    one_size = False  # torch takes a size for a number here, so that no step serves other sizes

    def __init_subclass__(cls) -> None:
        BLOCKS[cls.__name__] = cls

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        raise NotImplementedError


class Linear(Block):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        return self.net(h)


class Checkpointed(Linear):
    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        return checkpoint(self.net, h, use_reentrant=False)


class Shared(Linear):
    """One weight, used by two layers and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH, bias=False)
        self.third.weight = self.again.weight

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        return F.linear(self.again(h).tanh() + self.third(h), self.again.weight.t())


class Convolution(Block):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Conv1d(1, 3, 3, padding=1), nn.Conv2d(3, 2, (2, 3), padding=(0, 1))

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        found = self.wide(h.unsqueeze(1)).relu()
        return self.deep(found.reshape(-1, 3, 2, 3)).flatten(1)


class Recurrent(Block):
    layer: nn.Module
    make: Callable[[], nn.Module] = staticmethod(lambda: nn.RNN(3, 3, batch_first=True))

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.make()

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        return self.layer(h.view(-1, 2, 3))[0].flatten(1)


class Gru(Recurrent):
    one_size, make = True, staticmethod(lambda: nn.GRU(3, 3, batch_first=True))


class Lstm(Recurrent):
    one_size, make = True, staticmethod(lambda: nn.LSTM(3, 3, num_layers=2))


class Attention(Block):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        tokens = torch.stack([h, h.flip(1), batch.x], 1)
        return self.layer(tokens, tokens, tokens, need_weights=False)[0].mean(1)


class OverBatch(Block):
    """Attention of the samples of a batch to each other."""

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        q = h.view(1, -1, 2, 3).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q * 0.5, q, is_causal=True).transpose(1, 2).reshape(-1, WIDTH)


class Norms(Block):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.GroupNorm(2, WIDTH)

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        return self.second(self.first(h).tanh())


class BatchNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, eps=0.1)

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        return self.norm(h)


class Dropout(Block):
    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        return F.dropout(h, 0.2, self.training) + F.feature_alpha_dropout(h, 0.1, self.training)


class Noise(Block):
    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        return h + torch.randn_like(h) * 0.1 + torch.rand(h.shape[0], 1)[torch.randperm(h.shape[0])]


class PlainRows(Block):
    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        first = rows(batch.ids[:, 0], 1)
        return h * first + rows(batch.ids, 0).sum(1) + rows(batch.ids[:, 0], 1)


class Bags(Block):
    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        return h + rows(batch.flat, 0, batch.offsets, pooling="mean") - rows(batch.ids, 1, pooling="sum")


class WeightedBags(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        weights = self.gate(h).softmax(1)
        return h + rows(batch.ids, 1, pooling="sum", weights=weights) + rows(batch.ids, 0, pooling="mean")


class RowsOfRows(Block):
    """Ids that are made of rows."""

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        found = rows(batch.ids[:, 1], 0)
        ids = (found.detach()[:, 0] > 0).long() * 3 + batch.ids[:, 2] % 7
        return h + rows(ids, 1) * found


class InPlace(Block):
    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        found = h.clone().add_(batch.x, alpha=0.5).mul_(0.7)
        found[:, 0] = batch.x[:, 1]
        found[1:, 2].add_(1.0)
        found.masked_fill_(batch.x > 1, 0.3)
        return found.sub_(0.1).relu_()


class Views(Block):
    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        left, right = h.chunk(2, 1)
        turned = h.view(h.shape[0], 2, 3).permute(2, 0, 1).contiguous().view(3, -1).t().reshape(-1, WIDTH)
        strided = h.contiguous().as_strided((h.shape[0], 3), (WIDTH, 2))
        return turned + torch.cat([right.tanh(), left], 1) + strided.repeat(1, 2) + h.narrow(1, 0, 1).expand_as(h)


class Indexed(Block):
    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        order = torch.arange(h.shape[0] - 1, -1, -1)
        picked = h.gather(1, batch.ids % WIDTH)
        return h[order] + h[:, [5, 4, 3, 2, 1, 0]] + picked.repeat(1, 2) + h.roll(1, 0).flip(0) + h[-1] + h[:1]


class Joined(Block):
    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        tall = torch.cat([h, batch.x, h[:1]])
        first, second, _ = tall.split([h.shape[0], batch.x.shape[0], 1])
        return torch.stack([first, second.tanh(), h], 2).mean(2) + tall.mean(0)


class Masked(Block):
    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        mask = torch.tril(torch.ones(h.shape[0], h.shape[0], dtype=torch.bool))
        scores = (h @ h.t()).masked_fill(~mask, -1e4).softmax(1)
        return torch.where(batch.x > 0, scores @ h, h.clamp(-0.5, 0.5))


class Einsum(Block):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 3) * 0.3)

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        heads = torch.einsum("bhi,hij->bhj", h.view(-1, 2, 3), self.weight)
        outer = torch.bmm(h.unsqueeze(2), batch.x.unsqueeze(1))
        return heads.flatten(1) + outer.mean(2) + torch.einsum("bi,ci->bc", h, h).mean(1, keepdim=True)


class Sizes(Block):
    """Numbers made of sizes."""

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        count = h.shape[0]
        places = torch.arange(count, dtype=h.dtype) / count
        padded = torch.cat([h[:1], h, h.new_zeros(count, WIDTH)])[1 : count + 1]
        filler = h.new_full((2 * count + 1, 1), 0.1)[count:-1]
        return padded / (h.numel() / WIDTH) + places[:, None] * h + filler + h.sum() / (count * (count + 1) // 2)


class Padded(Block):
    one_size = True

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        return F.pad(h, (0, 0, 1, h.shape[0] - 1))[1 : h.shape[0] + 1]


class Reduced(Block):
    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        found = h.cumsum(0) / torch.arange(1, h.shape[0] + 1)[:, None] + h.logsumexp(0) - h.amax(1, keepdim=True)
        return found + h.std(0, unbiased=False) + h.softmax(0) + h.norm(dim=1, keepdim=True)


class Sorted(Block):
    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        values, order = batch.x[:, 0].sort()
        top = (h + batch.x * 3).topk(2, 1).values
        return h[order] * values[:, None] + top.repeat(1, 3)


class Scattered(Block):
    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        groups = batch.ids[:, 0] % 4
        sums = torch.zeros(4, WIDTH).index_add(0, groups, h)
        counts = torch.zeros(h.shape[0] + 4).scatter_add(0, groups, torch.ones(h.shape[0]))[:4]
        return (sums / (counts + 1)[:, None])[groups] + h.repeat_interleave(2, 0).view(-1, 2 * WIDTH)[:, 3:9]


class DenseTable(Block):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(IDS, WIDTH), nn.EmbeddingBag(IDS, WIDTH, mode="sum")

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        return h + self.table(batch.ids).mean(1) + self.bag(batch.ids)


class Averages(Block):
    """A buffer that each training step writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average.lerp_(h.detach().mean(0), 0.2)
        return h - self.average.clone()


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x * 2 + x.shape[0]

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return grads[0] * 2 + x / x.shape[0]


class Function(Block):
    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        return _Twice.apply(h) / 3


class Penalty(Block):
    """A gradient inside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, h: Tensor, batch: Batch, rows: Rows) -> Tensor:
        x = batch.x.detach()
        if not torch.is_grad_enabled():
            return h + (1 - self.layer(x).tanh() ** 2) * self.layer.weight
        (grad,) = torch.autograd.grad(self.layer(x.requires_grad_()).tanh().sum(), x, create_graph=True)
        return h + grad
