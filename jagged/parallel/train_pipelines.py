"""TorchRec's train pipelines. `progress` runs one step and prefetches the rows of later batches."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import reduce
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.errors import InputError, OptionError
from ..collections.embedding_collections import EmbeddingBagCollection, EmbeddingCollection
from .model_parallel import get_unwrapped_module

log = logging.getLogger("tierbed")
AccessPath = tuple[Callable[[Any], Any], ...]  # attribute and item accesses that lead from a batch to a part of it


class TrainPipelineBase:
    """Trains a model that returns (losses, output) for a batch. In eval mode, the pipeline only calls the model.

    Args:
        model: The model.
        optimizer: An EagerOptimizer. If `apply_optimizer_in_backward` or a TableBatchedEmbeddingBags trains the rows,
            give an optimizer for the dense part only. None if the model is never trained.
        device: The device for batches. Each batch is moved by `batch.to(device, non_blocking=True)`.
        custom_model_fwd: Called instead of the model.

    Raises:
        OptionError: If an argument is invalid.
    """

    _num_batches_ahead = 0  # number of later batches that are loaded before a step runs

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
        self._batches: deque[tuple[Iterator[Any], Any]] = deque()  # (loader, batch) waiting to be trained
        self._feature_paths: dict[nn.Module, AccessPath | None] = {}  # where a collection's features are in a batch
        self._execute_all_batches = True
        self._loader: Iterator[Any] | None = None  # the last training step's loader
        self._loader_error: Exception | None = None  # the loader's exception, raised after its batches are trained

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Run a step with the next batch.

        In training mode, batches that were already loaded from another loader come first, so that each batch is trained
        once. In eval mode, the model runs only this loader's batches; other loaders' batches wait for training mode. If
        a step raises, its batch is dropped, as in a plain loop, and the next call continues with the next batch.

        Args:
            dataloader_iter: The loader's iterator.

        Returns:
            The model's output.

        Raises:
            StopIteration: After the loader's last batch. If the loader raises another exception, the batches
                loaded before it are trained first.
            InputError, OptionError: If the model's result or the optimizer is unsuitable.
        """
        if not hasattr(dataloader_iter, "__next__"):
            raise InputError(f"dataloader_iter={type(dataloader_iter).__name__}: give an iterator, iter(loader)")
        is_training = self._model.training
        if is_training and self._optimizer is None:
            raise OptionError("optimizer=None: give the optimizer that trains the model, or call the model's eval()")
        batch = self._pop_batch(dataloader_iter)
        if is_training:
            self._optimizer.zero_grad()
        with _record_paths(self._find_collections(), self._feature_paths, batch):
            result = self._forward(batch)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            result_type = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a {type(result).__name__}"
            raise InputError(f"the model returned {result_type}; a pipeline's model returns a pair, (losses, output)")
        losses, output = result
        if is_training:
            torch.sum(losses, dim=0).backward()
            self._optimizer.step()
        return output

    def reset(self) -> None:
        """Drop the batches that were loaded but not trained."""
        self._batches.clear()
        self._loader = self._loader_error = None
        self._forget_announced()

    def _pop_batch(self, loader: Iterator[Any]) -> Any:
        is_training = self._model.training
        if is_training:
            self._fill_queue(loader)
        index = next((n for n, (source, _) in enumerate(self._batches) if is_training or source is loader), None)
        must_wait = is_training and isinstance(self._loader_error, StopIteration) and not self._execute_all_batches
        if self._loader_error is not None and loader is self._loader and (index is None or must_wait):
            if not self._batches:
                self._forget_announced()
            error, self._loader_error = self._loader_error, None
            try:
                raise error
            finally:
                del error  # the traceback references this frame, which would keep the model alive
        if index is None:
            return self._load_batch(loader)
        _, batch = self._batches[index]
        del self._batches[index]
        return batch

    def _fill_queue(self, loader: Iterator[Any]) -> None:
        if loader is not self._loader:
            self._loader, self._loader_error = loader, None
        while self._loader_error is None and len(self._batches) <= self._num_batches_ahead:
            try:
                batch = self._load_batch(loader)
            except Exception as error:
                self._loader_error = error.with_traceback(None) if isinstance(error, StopIteration) else error
                return
            self._batches.append((loader, batch))
            if len(self._batches) > 1:
                self._announce(batch)

    def _load_batch(self, loader: Iterator[Any]) -> Any:
        batch = next(loader)
        return batch.to(self._device, non_blocking=True) if hasattr(batch, "to") else batch

    def _forget_announced(self) -> None:
        for embedding in (embedding for collection in self._find_collections() for embedding in collection.each()):
            embedding.forget_announced()

    def _announce(self, batch: Any) -> None:
        """Prefetch a batch's rows, if its features are where the first batch had them. Otherwise no rank prefetches."""
        for collection in self._find_collections():
            features, embeddings = _get_part(batch, self._feature_paths.get(collection)), [*collection.each()]
            is_sharded = collection in self._feature_paths and any(embedding.world for embedding in embeddings)
            is_trained = all(embedding.row_optimizer and embedding.shadow.requires_grad for embedding in embeddings)
            if is_trained and (features is not None or is_sharded):
                with suppress(Exception):  # the step itself will raise the error
                    collection.prefetch(features)

    def _find_collections(self) -> list[EmbeddingBagCollection | EmbeddingCollection]:
        modules = get_unwrapped_module(self._model).modules()
        return [module for module in modules if isinstance(module, EmbeddingBagCollection | EmbeddingCollection)]


class TrainPipelineSparseDist(TrainPipelineBase):
    """A TrainPipelineBase that loads two batches ahead and prefetches their rows while a step runs.

    A collection's rows are prefetched if its input is an attribute or item of the batch, for example
    `batch.sparse_features`. The first step finds this attribute or item.

    Args:
        model, optimizer, device, custom_model_fwd: As for TrainPipelineBase.
        execute_all_batches: When the loader ends, the pipeline still holds batches. True trains them before it raises
            StopIteration. False trains them before the next loader's batches.

    TorchRec's other arguments configure its streams and change nothing here.
    """

    _num_batches_ahead = 2

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
            raise OptionError("apply_jit=True: TorchScript does not support tierbed's tables; leave it out")
        super().__init__(model, optimizer, device, custom_model_fwd)
        self._execute_all_batches = execute_all_batches
        if unknown := unused.keys() - _STREAM_ARGUMENTS:
            raise OptionError(f"{min(unknown)}={unused[min(unknown)]!r}: there is no such argument; leave it out")


PrefetchTrainPipelineSparseDist = TrainPipelineSparseDist  # it already prefetches
_STREAM_ARGUMENTS = {
    "dmp_collection_sync_interval_batches", "enqueue_batch_after_forward", "enable_inplace_copy_batch",
    "free_features_storage_early", "clear_data_dist_inputs",
}  # fmt: skip


class TrainPipelineSemiSync:
    """Not supported: it looks rows up before the previous step's update, so results differ from a plain loop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise OptionError(
            "a TrainPipelineSemiSync looks rows up before the previous step updates them; use TrainPipelineSparseDist, "
            "because its results equal a plain loop's results"
        )


@contextmanager
def _record_paths(collections: Iterable[nn.Module], paths: dict[Any, AccessPath | None], batch: Any) -> Iterator[None]:
    """Context manager. While the model runs, records in `paths` where in the batch each collection's features are."""

    def record_path(collection: nn.Module, args: tuple[Any, ...]) -> None:
        path = _find_path(batch, args[0]) if args else None
        if path is None and collection not in paths:
            name = type(collection).__name__
            log.info("%s: its features are not a part of the batch, so its rows are not prefetched", name)
        paths.setdefault(collection, path)

    with ExitStack() as hooks:  # removes the hooks at the end
        for module in (module for module in collections if module not in paths):
            hooks.enter_context(module.register_forward_pre_hook(record_path))
        yield


def _find_path(container: Any, part: Any, depth: int = 4) -> AccessPath | None:
    """Return the path from a batch to an object inside it, or None if the batch does not contain it."""
    if container is part:
        return ()
    if depth == 0 or isinstance(container, (Tensor, str, bytes)):
        return None
    parts: list[tuple[Callable[[Any], Any], Any]]
    if isinstance(container, Mapping):
        parts = [(itemgetter(key), value) for key, value in container.items()]
    elif isinstance(container, (list, tuple)):
        parts = [(itemgetter(index), value) for index, value in enumerate(container)]
    else:
        names = [field.name for field in dataclasses.fields(container)] if dataclasses.is_dataclass(container) else ()
        parts = [(attrgetter(name), getattr(container, name, None)) for name in getattr(container, "__dict__", names)]
    for access, value in parts:
        if (inner_path := _find_path(value, part, depth - 1)) is not None:
            return (access, *inner_path)
    return None


def _get_part(batch: Any, path: AccessPath | None) -> Any:
    """Return the part of a batch at a path, or None if there is none or the path is None."""
    try:
        return None if path is None else reduce(lambda part, access: access(part), path, batch)
    except Exception:  # a batch with another structure may raise anything
        return None
