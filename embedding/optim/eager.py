"""`EagerOptimizer`: trains rows in a plain PyTorch loop.

backward() through a lookup keeps the gradient, and `step()` applies all of an embedding's gradients in one row update.
The optimizer holds the embedding's shadow parameter. The row optimizer inside the store uses the learning rate and
other settings from that parameter's param group. With several ranks, `step()` first checks that all ranks can make the
step, then sends each gradient to the rank that owns its row.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from ...distributed.world import World, try_call
from ...engine.checks import as_number, validate_arguments
from ...engine.errors import GraphError, OptimizerError
from ...engine.ops.embedding_base import EmbeddingBase
from ...engine.ops.exact_sum import sum_squares
from ...engine.optim.base import MAX_VALUE, MIN_VALUE
from ...engine.optim.row_optimizer import RowOptimizer, check_has_param_groups, warn_if_lazy
from ...engine.signals import defer_signals
from ...engine.table.row_step import run_row_step
from ..autograd.gradients import RowGradients, ShadowGrad, check_not_traced, get_gradients, set_grad, trainers
from ..autograd.lookup_op import find_embeddings
from ..state_dict.model_snapshots import ModelSnapshots
from ..state_dict.saved_rows import SnapshotEmbedding
from ..tables.names import check_distinct, name_embeddings
from ..tables.training_group import TrainingGroup, train_together
from .ddp_guard import check_eager_world
from .resumed_rows import ResumedRowsCheck, remember_versions, warn_if_optimizer_lacks_state

log = logging.getLogger("tierbed")

MAX_SHARED_EMBEDDINGS = 62  # largest number of embeddings with a world; a handshake sends one bit for each
STEP_OP = "step() of an EagerOptimizer"
IN_BACKWARD = "_in_backward_optimizers"  # torch's attribute that lists optimizers to step in backward()


def _make_wrapped_attribute(name: str) -> Any:
    """Return a property that reads the wrapped optimizer's attribute and cannot be set."""

    def refuse(_: EagerOptimizer, value: Any) -> None:
        raise OptimizerError(
            f"{name} of an EagerOptimizer cannot be set: rows would not use the new value. Change settings in place, "
            "as in optimizer.param_groups[0]['lr'] = 0.01. To start without state, call model.load_state_dict("
            "tierbed.to_dense_state_dict(model)), and make another optimizer"
        )

    return property(lambda self: getattr(self.optimizer, name), refuse)


class EagerOptimizer(ModelSnapshots, torch.optim.Optimizer):
    """Wraps a torch optimizer so that `step()` also updates embeddings' rows, outside a `Graph`.

    Rows follow the wrapped optimizer's param groups; docs/optimizers.md lists the supported optimizers. Learning rate
    schedulers take this object or the wrapped optimizer, `optimizer.optimizer`.

    While this object exists, backward() through a lookup keeps the gradient for `step()`. If a newer EagerOptimizer
    takes an embedding over, `step()` of the older EagerOptimizer raises OptimizerError.

    With a world, all ranks must call `step()`, and rows train with the ranks' mean gradient. Gradients of dense
    parameters are not exchanged: wrap the dense modules in a DistributedDataParallel.

    Args:
        optimizer: A torch.optim optimizer. It must hold the parameters of all unfrozen embeddings in `module`.
        module: The model. If None, snapshots and recovery cover only the embeddings whose parameters `optimizer` holds.

    Raises:
        OptimizerError: If `optimizer` is unsupported, or lacks an embedding of `module`. Also raised if an older
            EagerOptimizer has unapplied gradients, or if ranks share `module`, but not the embeddings' rows.

    Example:

        >>> optimizer = EagerOptimizer(torch.optim.Adam(model.parameters()), model)
        >>> for batch in loader:
        >>>     loss(model(batch)).backward()
        >>>     optimizer.step()
        >>>     optimizer.zero_grad()
    """

    state, param_groups = _make_wrapped_attribute("state"), _make_wrapped_attribute("param_groups")
    _warns_of_lazy_rows = True
    _step_supports_amp_scaling = False  # GradScaler unscales the gradients; the wrapped optimizer must not do it

    @validate_arguments("module")
    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module | None = None) -> None:
        # super().__init__ is not called: groups, state, defaults and hooks belong to the wrapped optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptimizerError(
                f"optimizer={type(optimizer).__name__}: give a torch.optim optimizer, such as torch.optim.SGD"
            )
        check_has_param_groups(optimizer)
        self.optimizer = optimizer
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        root = nn.ParameterList(self._list_parameters()) if module is None else module
        candidates = find_embeddings(groups) if module is None else module.modules()
        modules = [candidate for candidate in candidates if isinstance(candidate, EmbeddingBase)]
        embeddings = [module for module in modules if module.shadow.requires_grad]
        self._world = check_eager_world(root, embeddings) or World.single()
        self._partial_update = ""  # the error of this rank, if its row updates failed while other ranks made theirs
        if self._world.size > 1 and len(embeddings) > MAX_SHARED_EMBEDDINGS:
            raise OptimizerError(
                f"ranks share {len(embeddings)} embeddings; give each EagerOptimizer at most {MAX_SHARED_EMBEDDINGS}"
            )
        for embedding in embeddings:
            if id(embedding.shadow) not in groups:
                paths = (path for path, one in root.named_modules() if one is embedding and one.name_source == "path")
                raise OptimizerError(
                    f"{type(optimizer).__name__} does not hold embedding {next(paths, embedding.name)!r}; give it the "
                    "embedding's parameters(), freeze the embedding by requires_grad_(False), or give EagerOptimizer a "
                    "module without this embedding"
                )
            self._check_can_train(embedding)
        if module is None:
            check_distinct({f"parameter {index}": e for index, e in enumerate(embeddings)}, OptimizerError)
        else:
            name_embeddings(module, OptimizerError)
        train_together(modules)
        self._module = None if module is None else ref(module)
        self._lost_embedding = ""  # the name of an embedding that a newer EagerOptimizer has taken over
        self._has_checked_resumed_rows = False  # True once a step checked that parameters and rows belong together
        # True until optimizer state is loaded. Adagrad's constructor makes state too, but with step 0
        self._has_new_state = not any(state.get("step", True) for state in optimizer.state.values())
        self._retrained_embeddings = [embedding for embedding in embeddings if embedding.row_optimizer is not None]
        remember_versions(self._list_dense_parameters(embeddings) or ())
        self._pairs = [(e, e.attach(optimizer, groups[id(e.shadow)])) for e in embeddings]
        self._warns_of_zeros = any(row_optimizer.states for _, row_optimizer in self._pairs)
        if self._warns_of_lazy_rows:
            warn_if_lazy(self.row_optimizers())
        for embedding in embeddings:
            if (older := trainers.get(embedding.embedding_id)) is not None:
                older._lost_embedding = embedding.name
            trainers[embedding.embedding_id] = self

    def _check_can_train(self, embedding: EmbeddingBase) -> None:
        """Raise OptimizerError if backward() trains the embedding, or an older optimizer would lose gradients."""
        if hasattr(embedding.shadow, IN_BACKWARD):
            raise OptimizerError(
                f"embedding {embedding.name!r}: apply_optimizer_in_backward gave it an optimizer, so backward() "
                "trains its rows; leave the embedding out of the EagerOptimizer, or make the embedding again"
            )
        grad = embedding.shadow.grad
        if embedding.embedding_id in trainers and isinstance(grad, ShadowGrad) and grad.row_gradients.has_pending_grads:
            raise OptimizerError(
                f"another EagerOptimizer has gradients of embedding {embedding.name!r} that it has not applied; call "
                "its step(), or drop them by zero_grad() of the model, before you make a new optimizer"
            )

    def _find_embeddings(self) -> list[SnapshotEmbedding]:
        module = None if self._module is None else self._module()
        modules = [e for e, _ in self._pairs] if self._module is None else [] if module is None else module.modules()
        return [module for module in modules if isinstance(module, SnapshotEmbedding)]

    def row_optimizers(self) -> list[RowOptimizer]:
        """Return the optimizers that update the rows, one for each embedding."""
        return [row_optimizer for _, row_optimizer in self._pairs]

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped optimizer's attribute, if this object lacks it."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        raise OptimizerError(
            "an EagerOptimizer cannot be copied or pickled, since its embeddings cannot; make another one over their "
            "model, and carry its state over by state_dict()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group with dense parameters to the wrapped optimizer. Embeddings cannot be added later."""
        self.optimizer.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all rows that backward() reached since `zero_grad()`, then step the wrapped optimizer.

        Each of these rows is updated once. Embeddings that backward() did not reach keep their rows and step counts.

        Args:
            closure: Runs forward() and backward() and returns the loss. Called first, as in torch's optimizers. With a
                world, an exception in one rank's closure is raised on all ranks.

        Returns:
            The result of `closure`, or None.

        Raises:
            StoreError, CapacityError, InputError: If rows cannot be fetched. In this case, no row has changed.
            GraphError: If the call is in `build` of a graph, or another thread trains the rows.
            OptimizerError: If a newer EagerOptimizer trains an embedding, or an earlier step raised during one rank's
                updates. After such a step, load the rows, and call `load_state_dict()`.
        """
        if detect_fake_mode() is not None:
            raise GraphError(
                "build calls step() of an EagerOptimizer; leave it out, and give the wrapped optimizer to add_optimizer"
            )
        if self._lost_embedding:
            raise OptimizerError(
                f"a newer EagerOptimizer has taken over embedding {self._lost_embedding!r}; call step() of the newer "
                "one, or make this one again"
            )
        for embedding, _ in self._pairs:
            check_not_traced(embedding)
        loss = None
        if closure is not None:
            try:
                with torch.enable_grad():
                    loss = closure()
            except BaseException as error:
                if self._world.must_report(error):
                    self._world.handshake(STEP_OP, error)  # the other ranks wait for this rank, and raise as well
                raise
        with defer_signals():
            with torch.no_grad():
                reached = self._collect_gradients()
                trained = [(embedding, rows) for embedding, rows, _ in reached]
                run_row_step(trained, "an EagerOptimizer", self._update_rows, [gradients for *_, gradients in reached])
            grads = [(embedding, set_grad(embedding, None)) for embedding, _ in self._pairs]
            with self._track_partial_update():
                self.optimizer.step()  # if this raises, rows are already updated, and their gradients are gone
            for embedding, grad in grads:
                set_grad(embedding, grad)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients.

        Args:
            set_to_none: As in torch, for dense parameters. The gradients of rows are always dropped.
        """
        if not set_to_none and self._warns_of_zeros:
            self._warns_of_zeros = False
            log.warning(
                "after zero_grad(set_to_none=False), momentum still changes dense parameters that get no gradient. "
                "Rows that get no gradient do not change. To treat both alike, call zero_grad() without set_to_none"
            )
        for embedding, _ in self._pairs:
            check_not_traced(embedding)
            set_grad(embedding, None)
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float | Tensor) -> Tensor:
        """Clip the total L2 norm of all gradients of `parameters`, as torch.nn.utils.clip_grad_norm_ does.

        Call it between backward() and `step()`. An embedding's parameter stands for its rows. A row that occurs several
        times counts once, with its summed gradient, as in `Graph.clip_grad_norm`.

        Args:
            parameters: Dense parameters, and parameters of this optimizer's embeddings.
            max_norm: The largest allowed norm, a number or a 0-d tensor. `inf` only measures the norm.

        Returns:
            The norm before scaling, a float32 scalar on the CPU.

        Raises:
            OptimizerError: If `max_norm` is neither inf nor a positive float32; the rows belong to another
                EagerOptimizer; or ranks share the rows.
            InputError: If a gradient was changed in place.
        """
        limit = as_number(max_norm.item() if isinstance(max_norm, Tensor) and max_norm.dim() == 0 else max_norm)
        if limit is None or not (MIN_VALUE <= limit < MAX_VALUE or limit == math.inf):
            raise OptimizerError(
                f"max_norm={max_norm!r}: give a number from {MIN_VALUE:.3g} to {MAX_VALUE:.3g}, or inf to only measure"
            )
        distinct = dict.fromkeys([parameters] if isinstance(parameters, Tensor) else parameters)
        grads = [parameter.grad for parameter in distinct if parameter.grad is not None]
        rows = [grad.row_gradients for grad in grads if isinstance(grad, ShadowGrad)]
        dense = [grad for grad in grads if not isinstance(grad, ShadowGrad)]
        if any(grad.layout != torch.strided for grad in dense):
            raise OptimizerError(
                "clip_grad_norm_ got a sparse gradient, as nn.Embedding(sparse=True) makes; leave its parameter out, "
                "or make the module with sparse=False"
            )
        embeddings = [gradients.embedding for gradients in rows]
        if others := [embedding.name for embedding in embeddings if trainers.get(embedding.embedding_id) is not self]:
            raise OptimizerError(f"another EagerOptimizer trains embedding {others[0]!r}; call its clip_grad_norm_")
        if self._world.size > 1 and any(id(embedding.shadow) in map(id, distinct) for embedding, _ in self._pairs):
            raise OptimizerError(
                "clip_grad_norm_ cannot clip rows that ranks share, because step() sums the ranks' gradients later. "
                "Pass only dense parameters here. To clip rows, set clip_grad_row_norm in the embeddings' param group, "
                "or train by a Graph with clip_grad_norm"
            )
        norm = math.sqrt(sum_squares(dense) + sum(gradients.compute_squared_norm() for gradients in rows))
        scale = limit / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        if limit != math.inf and not scale > 1.0:
            with defer_signals():
                if dense:
                    torch._foreach_mul_(dense, scale)
                for gradients in rows:
                    gradients.multiply(scale)
        return torch.tensor(norm, dtype=torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state_dict. Rows' optimizer state is saved with the rows."""
        state = self.optimizer.state_dict()
        # `state` is empty before the first step and for stateless optimizers; TorchRec's optimizers use names as keys
        if all(isinstance(key, int) for key in state["state"] or [""]):
            for index in self._index_embeddings():
                state["state"].setdefault(index, {})  # torch's get_state_dict expects an entry for each parameter
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Load a copy of a state_dict into the wrapped optimizer. The tensors in `state_dict` stay as they are.

        Raises:
            OptimizerError: If the state_dict contains state for dense rows; give it to the embedding's `load_dense`.
        """
        for index, embedding in self._index_embeddings().items():
            for name, value in state_dict.get("state", {}).get(index, {}).items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    raise OptimizerError(
                        f"state_dict: {name!r} {list(value.shape)} is state for rows of embedding {embedding.name!r}. "
                        "Rows store their own state: pass this tensor to the embedding's load_dense(), not to this call"
                    )
        self.optimizer.load_state_dict(copy.deepcopy(state_dict))
        self._has_new_state, self._partial_update = False, ""

    def _list_parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _index_embeddings(self) -> dict[int, EmbeddingBase]:
        """Return {index: embedding}. The index is the position of the embedding's parameter in a state_dict."""
        indices = {id(parameter): index for index, parameter in enumerate(self._list_parameters())}
        return {indices[id(e.shadow)]: e for e, _ in self._pairs if id(e.shadow) in indices}

    def _collect_gradients(self) -> list[tuple[EmbeddingBase, RowOptimizer, RowGradients]]:
        """Return the embeddings that backward() reached on any rank. An error on one rank is raised on all ranks."""
        trained_pairs = self._pairs
        if self._world.size == 1:
            own_gradients = self._check_gradients(trained_pairs)
            pairs_and_gradients = zip(trained_pairs, own_gradients, strict=True)
            return [(e, optimizer, grads) for (e, optimizer), grads in pairs_and_gradients if grads is not None]
        own_gradients, error = try_call(lambda: self._check_gradients(trained_pairs))
        payload = sum(1 << index for index, gradients in enumerate(own_gradients or ()) if gradients is not None)
        payloads = self._world.handshake(STEP_OP, error, payload=payload).payloads
        return [
            (embedding, optimizer, gradients or RowGradients(embedding))
            for index, ((embedding, optimizer), gradients) in enumerate(zip(trained_pairs, own_gradients, strict=True))
            if any(payload >> index & 1 for payload in payloads)
        ]

    def _check_gradients(self, trained: list[tuple[EmbeddingBase, RowOptimizer]]) -> list[RowGradients | None]:
        """Return each embedding's gradients on this rank, or None. Raises OptimizerError, InputError."""
        if self._partial_update:
            raise OptimizerError(
                f"a step of an EagerOptimizer raised {self._partial_update} during its updates. Other ranks made their "
                "updates, so rows are at different steps. On all ranks, load a snapshot of every embedding, then the "
                "dense parameters from the same step, then call EagerOptimizer.load_state_dict()"
            )
        row_gradients = [get_gradients(embedding) for embedding, _ in trained]
        return [gradients if gradients is not None and gradients.check() else None for gradients in row_gradients]

    def _update_rows(self, reached: list[RowGradients]) -> None:
        pinned = [(gradients, gradients.pin()) for gradients in reached]
        self._on_pinned()
        if self._world.size > 1:
            exchange_gradients(self._world, pinned)
        error: BaseException | None = None
        with self._track_partial_update():
            for gradients, batch in pinned:
                try:
                    gradients.update(batch)
                except BaseException as failure:
                    if self._world.size == 1:
                        raise
                    error = error or failure  # other ranks update all embeddings, so continue
            if error is not None:
                raise error

    def _list_dense_parameters(self, embeddings: Iterable[EmbeddingBase]) -> list[Tensor] | None:
        """Return the dense parameters of the module and the optimizer; None if the parameters are unknown."""
        module = None if self._module is None else self._module()
        shadows = {id(embedding.shadow) for embedding in embeddings}
        parameters = [*([] if module is None else module.parameters()), *self._list_parameters()]
        return [parameter for parameter in dict.fromkeys(parameters) if id(parameter) not in shadows]

    def _on_pinned(self) -> None:
        """Called in a step when all its rows are pinned, before the first row changes."""
        if not self._has_checked_resumed_rows:
            self._has_checked_resumed_rows = True
            embeddings = [embedding for embedding, _ in self._pairs]
            dense = self._list_dense_parameters(embeddings)
            owner = f"the EagerOptimizer of {type(self.optimizer).__name__}"
            check = ResumedRowsCheck(owner, dense, self.optimizer.state)
            for embedding in embeddings:
                if isinstance(embedding, SnapshotEmbedding):
                    embedding.call_when_open(partial(check.warn_if_mismatched, embedding))
                    was_trained = embedding.has_loaded_state_dict or embedding in self._retrained_embeddings
                    if self._has_new_state and dense is not None and was_trained:
                        self._has_new_state = not warn_if_optimizer_lacks_state(embedding)
            self._retrained_embeddings.clear()

    @contextmanager
    def _track_partial_update(self) -> Iterator[None]:
        """Run updates that all ranks make. If an update raises on this rank, later steps raise on all ranks."""
        try:
            yield
        except BaseException as error:
            if self._world.size > 1:
                self._partial_update = self._partial_update or repr(error)
            raise


class InBackwardOptimizer(EagerOptimizer):
    """The optimizer that `apply_optimizer_in_backward` gave an embedding. Torch steps it in backward().

    Torch keeps this optimizer until the process ends, so the optimizer holds only a weak reference to the embedding.
    """

    _warns_of_lazy_rows = False

    def _check_can_train(self, embedding: EmbeddingBase) -> None:
        if embedding.embedding_id in trainers:
            raise OptimizerError(
                f"embedding {embedding.name!r} has an EagerOptimizer, so apply_optimizer_in_backward cannot add "
                "one. Delete that EagerOptimizer, or leave the embedding out of apply_optimizer_in_backward"
            )

    def _list_dense_parameters(self, embeddings: Iterable[EmbeddingBase]) -> None:
        return None

    @property
    def _pairs(self) -> list[tuple[EmbeddingBase, RowOptimizer]]:
        embedding = self._embedding()
        return [] if embedding is None else [(embedding, self._row_optimizer)]

    @_pairs.setter
    def _pairs(self, trained: list[tuple[EmbeddingBase, RowOptimizer]]) -> None:
        [(embedding, self._row_optimizer)] = trained
        self._embedding = ref(embedding)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        groups = self._list_groups()
        try:
            return super().step(closure)
        except BaseException:
            for group in groups:
                group.mark_backward_failed()
            self.zero_grad()  # otherwise the next step would apply the gradients of this failed step
            raise

    def _on_pinned(self) -> None:
        super()._on_pinned()
        for group in self._list_groups():
            group.begin_backward()

    def _list_groups(self) -> list[TrainingGroup]:
        return [embedding.group for embedding, _ in self._pairs if embedding.group is not None]


def follow_in_backward(embedding: EmbeddingBase) -> None:
    """Make rows follow the optimizer that `apply_optimizer_in_backward` gave the embedding, if any."""
    optimizers = getattr(embedding.shadow, IN_BACKWARD, None)
    if optimizers is None or not embedding.shadow.requires_grad:
        return
    if len(optimizers) != 1:
        raise OptimizerError(
            f"embedding {embedding.name!r}: apply_optimizer_in_backward gave it {len(optimizers)} optimizers; give it "
            "one"
        )
    if not isinstance(optimizers[0], InBackwardOptimizer):
        optimizers[0] = InBackwardOptimizer(optimizers[0], embedding)


def exchange_gradients(world: World, pinned: list[tuple[RowGradients, Any]]) -> None:
    """Send each gradient to the rank that owns the row. An error on one rank is raised on all ranks."""
    error: BaseException | None = None
    for gradients, batch in pinned:
        try:
            batch.send(*gradients.list_grads())
        except BaseException as failure:
            if not world.must_report(failure):
                raise
            batch.send_nothing()
            error = error or failure
    for _, batch in pinned:
        batch.wait_for_gradients()
    world.handshake("gradients of an EagerOptimizer", error)
