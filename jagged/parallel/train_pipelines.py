"""TorchRec's training loops: `progress` makes one step, and announces the rows of later batches to the embeddings."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.errors import OptionError
from ..collections.embedding_collections import EmbeddingBagCollection, EmbeddingCollection
from .model_parallel import get_unwrapped_module

log = logging.getLogger("tierbed")
Path = tuple[Any, ...]  # from a batch to one of its parts: attributes as (name,), keys and numbers as they are


class TrainPipelineBase:
    """Steps of a model that returns (losses, output) for a batch: forward, backward, and the optimizer's step.

    model: in eval mode it is only called. optimizer: an EagerOptimizer for rows, or one of the dense part where
    `apply_optimizer_in_backward` or a TableBatchedEmbeddingBags trains the rows. device: where batches are moved by
    their `to(device, non_blocking=)`. custom_model_fwd: called instead of the model.
    """

    _ahead = 0  # batches that it holds besides that of its step

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device | str,
        custom_model_fwd: Callable[[Any], tuple[Tensor, Any]] | None = None,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._forward = custom_model_fwd or model
        self._batches: deque[Any] = deque()  # the first is that of the next step
        self._paths: dict[nn.Module, Path | None] = {}  # where in a batch a collection's features are
        self._execute_all_batches, self._exhausted = True, False
        self._loader: Iterator[Any] | None = None

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Make a step with the next batch, and return the model's output. StopIteration after the last one."""
        if dataloader_iter is not self._loader:
            self._loader, self._exhausted = dataloader_iter, False
        self._fill(dataloader_iter)
        if not self._batches or (self._exhausted and not self._execute_all_batches):
            self.reset()
            raise StopIteration
        if self._model.training:
            self._optimizer.zero_grad()
        with _observed(self._collections(), self._paths, self._batches[0]):
            losses, output = self._forward(self._batches[0])
        self._batches.popleft()
        if self._model.training:
            torch.sum(losses, dim=0).backward()
            self._optimizer.step()
        return output

    def reset(self) -> None:
        """Forget the batches that were taken and not trained."""
        self._batches.clear()
        self._exhausted = False
        for embedding in (embedding for collection in self._collections() for embedding in collection.each()):
            embedding.forget_announced()

    def _fill(self, batches: Iterator[Any]) -> None:
        while not self._exhausted and len(self._batches) <= self._ahead:
            batch = next(batches, self)
            if batch is self:
                self._exhausted = True
                return
            batch = batch.to(self._device, non_blocking=True) if hasattr(batch, "to") else batch
            self._batches.append(batch)
            if self._model.training and len(self._batches) > 1:
                self._announce(batch)

    def _announce(self, batch: Any) -> None:
        for collection in self._collections():
            path = self._paths.get(collection)
            if path is not None and all(one.row_optimizer and one.shadow.requires_grad for one in collection.each()):
                collection.prefetch(_part(batch, path))

    def _collections(self) -> list[EmbeddingBagCollection | EmbeddingCollection]:
        modules = get_unwrapped_module(self._model).modules()
        return [one for one in modules if isinstance(one, EmbeddingBagCollection | EmbeddingCollection)]


class TrainPipelineSparseDist(TrainPipelineBase):
    """As TrainPipelineBase, which holds two batches more, whose rows are prefetched while a step runs.

    A collection's rows are prefetched if its features are a part of the batch, as `batch.sparse_features` is; the first
    step finds it. execute_all_batches: whether the batches that are held when the loader ends are trained.
    Its other arguments are of TorchRec's streams, and change nothing here.
    """

    _ahead = 2

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device | str,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: Any = None,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[Any], tuple[Tensor, Any]] | None = None,
        **unused: Any,
    ) -> None:
        if apply_jit:
            raise OptionError("apply_jit=True: TorchScript has no tables of tierbed; leave it out")
        super().__init__(model, optimizer, device, custom_model_fwd)
        self._execute_all_batches = execute_all_batches
        if unknown := unused.keys() - _OF_STREAMS:
            raise OptionError(f"{min(unknown)}={unused[min(unknown)]!r}: there is no such argument; leave it out")


PrefetchTrainPipelineSparseDist = TrainPipelineSparseDist  # which prefetches already
_OF_STREAMS = {
    "dmp_collection_sync_interval_batches", "enqueue_batch_after_forward", "enable_inplace_copy_batch",
    "free_features_storage_early", "clear_data_dist_inputs",
}  # fmt: skip


class TrainPipelineSemiSync:
    """Refused: its lookups read rows that lack the last step's update, so its numbers are of no plain loop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise OptionError(
            "a TrainPipelineSemiSync looks rows up one step early, without an update; use TrainPipelineSparseDist, "
            "whose numbers are those of a plain loop"
        )


@contextmanager
def _observed(collections: Iterable[nn.Module], paths: dict[nn.Module, Path | None], batch: Any) -> Iterator[None]:
    """A block of a forward in which collections are called, to find where in the batch their features are."""

    def note(collection: nn.Module, args: tuple[Any, ...]) -> None:
        path = _path_to(batch, args[0]) if args else None
        if path is None and collection not in paths:
            name = type(collection).__name__
            log.info("%s: its features are no part of the batch, so its rows are not prefetched", name)
        paths.setdefault(collection, path)

    hooks = [one.register_forward_pre_hook(note) for one in collections if one not in paths]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _path_to(whole: Any, part: Any, depth: int = 4) -> Path | None:
    """How to come from a batch to an object in it; None if the batch has it nowhere."""
    if whole is part:
        return ()
    if depth == 0 or isinstance(whole, (Tensor, str, bytes)):
        return None
    if isinstance(whole, Mapping):
        inner: list[tuple[Any, Any]] = [*whole.items()]
    elif isinstance(whole, (list, tuple)):
        inner = [*enumerate(whole)]
    elif dataclasses.is_dataclass(whole) or hasattr(whole, "__dict__"):
        inner = [((name,), value) for name, value in vars(whole).items()]
    else:
        return None
    for step, value in inner:
        found = _path_to(value, part, depth - 1)
        if found is not None:
            return (step, *found)
    return None


def _part(whole: Any, path: Path) -> Any:
    for step in path:
        whole = getattr(whole, step[0]) if isinstance(step, tuple) else whole[step]
    return whole
