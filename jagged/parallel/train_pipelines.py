"""TorchRec's training loops: `progress` makes one step, and announces the rows of later batches to the embeddings."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import reduce
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.errors import InputError, OptionError
from ..collections.embedding_collections import EmbeddingBagCollection, EmbeddingCollection
from .model_parallel import get_unwrapped_module

log = logging.getLogger("tierbed")
Path = tuple[Callable[[Any], Any], ...]  # from a batch to one of its parts


class TrainPipelineBase:
    """Steps of a model that returns (losses, output) for a batch: forward, backward, and the optimizer's step.

    model: in eval mode it is only called. optimizer: an EagerOptimizer for rows, or one of the dense part where
    `apply_optimizer_in_backward` or a TableBatchedEmbeddingBags trains the rows; None if the model is never trained.
    device: where batches are moved by their `to(device, non_blocking=)`. custom_model_fwd: called instead of the model.
    Raises OptionError.
    """

    _ahead = 0  # batches that it holds besides that of its step

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device | str,
        custom_model_fwd: Callable[[Any], tuple[Tensor, Any]] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"model={type(model).__name__}: give an nn.Module that returns (losses, output)")
        if optimizer is not None and not (hasattr(optimizer, "step") and hasattr(optimizer, "zero_grad")):
            raise OptionError(f"optimizer={type(optimizer).__name__}: give an EagerOptimizer, or one of torch.optim")
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._forward = custom_model_fwd or model
        self._batches: deque[tuple[Iterator[Any], Any]] = deque()  # to be trained, each with its loader
        self._paths: dict[nn.Module, Path | None] = {}  # where in a batch a collection's features are
        self._execute_all_batches = True
        self._loader: Iterator[Any] | None = None  # of the last training step
        self._end: Exception | None = None  # what that loader raised, until the batches before it are trained

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Make a step with the next batch, and return the model's output.

        StopIteration after the loader's last batch. Any other exception of the loader is raised in its turn as well.
        An exception of a step uses up the step's batch, as in a plain loop: the next call goes on with the next batch.

        In training mode, batches that were drawn from another loader come first, so each batch is trained once. In eval
        mode, only batches of this loader are scored; batches of others stay for the next step in training mode.
        Raises InputError, OptionError.
        """
        if not hasattr(dataloader_iter, "__next__"):
            raise InputError(f"dataloader_iter={type(dataloader_iter).__name__}: give an iterator, iter(loader)")
        is_training = self._model.training
        if is_training and self._optimizer is None:
            raise OptionError("optimizer=None: give the optimizer that trains the model, or call the model's eval()")
        batch = self._next(dataloader_iter)
        if is_training:
            self._optimizer.zero_grad()
        with _observed(self._collections(), self._paths, batch):
            result = self._forward(batch)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            what = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a {type(result).__name__}"
            raise InputError(f"the model returned {what}; a pipeline's model returns a pair, (losses, output)")
        losses, output = result
        if is_training:
            torch.sum(losses, dim=0).backward()
            self._optimizer.step()
        return output

    def reset(self) -> None:
        """Forget the batches that were taken and not trained."""
        self._batches.clear()
        self._loader = self._end = None
        self._forget_announced()

    def _next(self, loader: Iterator[Any]) -> Any:
        is_training = self._model.training
        if is_training:
            self._fill(loader)
        number = next((n for n, (source, _) in enumerate(self._batches) if is_training or source is loader), None)
        leaves_rest = is_training and isinstance(self._end, StopIteration) and not self._execute_all_batches
        if self._end is not None and loader is self._loader and (number is None or leaves_rest):
            if not self._batches:
                self._forget_announced()
            end, self._end = self._end, None
            try:
                raise end
            finally:
                del end  # or this frame would keep the model through the traceback
        if number is None:
            return self._draw(loader)
        batch = self._batches[number][1]
        del self._batches[number]
        return batch

    def _fill(self, loader: Iterator[Any]) -> None:
        if loader is not self._loader:
            self._loader, self._end = loader, None
        while self._end is None and len(self._batches) <= self._ahead:
            try:
                batch = self._draw(loader)
            except Exception as end:
                self._end = end.with_traceback(None) if isinstance(end, StopIteration) else end
                return
            self._batches.append((loader, batch))
            if len(self._batches) > 1:
                self._announce(batch)

    def _draw(self, loader: Iterator[Any]) -> Any:
        batch = next(loader)
        return batch.to(self._device, non_blocking=True) if hasattr(batch, "to") else batch

    def _forget_announced(self) -> None:
        for embedding in (embedding for collection in self._collections() for embedding in collection.each()):
            embedding.forget_announced()

    def _announce(self, batch: Any) -> None:
        """Announce a batch that is built like the first one. Any other one is not prefetched, on no rank."""
        for collection in self._collections():
            features = _part(batch, self._paths.get(collection))
            is_known = features is not None or any(one.world and collection in self._paths for one in collection.each())
            if is_known and all(one.row_optimizer and one.shadow.requires_grad for one in collection.each()):
                with suppress(Exception):  # the step itself raises what is wrong
                    collection.prefetch(features)

    def _collections(self) -> list[EmbeddingBagCollection | EmbeddingCollection]:
        modules = get_unwrapped_module(self._model).modules()
        return [one for one in modules if isinstance(one, EmbeddingBagCollection | EmbeddingCollection)]


class TrainPipelineSparseDist(TrainPipelineBase):
    """As TrainPipelineBase, which holds two batches more, whose rows are prefetched while a step runs.

    A collection's rows are prefetched if its features are a part of the batch, as `batch.sparse_features` is; the first
    step finds it. execute_all_batches: whether the batches that are held when the loader ends are trained before
    StopIteration; if not, they are trained before those of the next loader. Its other arguments are of TorchRec's
    streams, and change nothing here.
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
    inner: list[tuple[Callable[[Any], Any], Any]]
    if isinstance(whole, Mapping):
        inner = [(itemgetter(key), value) for key, value in whole.items()]
    elif isinstance(whole, (list, tuple)):
        inner = [(itemgetter(at), value) for at, value in enumerate(whole)]
    else:
        slots = [one.name for one in dataclasses.fields(whole)] if dataclasses.is_dataclass(whole) else ()
        inner = [(attrgetter(name), getattr(whole, name, None)) for name in getattr(whole, "__dict__", slots)]
    for step, value in inner:
        found = _path_to(value, part, depth - 1)
        if found is not None:
            return (step, *found)
    return None


def _part(whole: Any, path: Path | None) -> Any:
    """The part of a batch at a path; None if it has none there, or the path is None."""
    try:
        return None if path is None else reduce(lambda part, step: step(part), path, whole)
    except Exception:  # whatever a batch of another structure raises
        return None
