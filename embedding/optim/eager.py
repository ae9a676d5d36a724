"""Training in a plain PyTorch loop."""

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

from ...distributed.world import World, catch
from ...engine.checks import as_number, checked_arguments
from ...engine.errors import GraphError, OptimizerError
from ...engine.ops.exact_sum import sum_of_squares
from ...engine.ops.rows_contract import EmbeddingBase
from ...engine.optim.base import LARGEST, SMALLEST
from ...engine.optim.row_optimizer import RowOptimizer, check_is_optimizer, note_lazy
from ...engine.signals import uninterrupted
from ...engine.table.row_step import row_step
from ..autograd.gradients import RowGradients, ShadowGrad, check_not_traced, holders, kept_gradients, set_grad
from ..autograd.lookup_op import embeddings_of
from ..state_dict.model_snapshots import ModelSnapshots
from ..state_dict.saved_rows import SavedRows
from ..tables.names import check_distinct, name_embeddings
from ..tables.training_group import TrainingGroup, train_together
from .ddp_guard import refuse_eager_ranks
from .dense_part import DensePart, note_versions, warn_of_state

log = logging.getLogger("tierbed")

MAX_SHARED = 62  # embeddings over ranks, each a bit of a note
STEP = "step() of an EagerOptimizer"
IN_BACKWARD = "_in_backward_optimizers"  # the attribute of a parameter by which torch's hook finds what it steps


def _of_wrapped(name: str) -> Any:
    """An attribute that is the wrapped optimizer's, and cannot be set."""

    def refuse(_: EagerOptimizer, value: Any) -> None:
        raise OptimizerError(
            f"{name} = of an EagerOptimizer: no row would follow it. Change settings in place, as in "
            "optimizer.param_groups[0]['lr'] = 0.01; to begin without state, call model.load_state_dict("
            "tierbed.to_dense_state_dict(model)) and make another optimizer"
        )

    return property(lambda self: getattr(self.optimizer, name), refuse)


class EagerOptimizer(ModelSnapshots, torch.optim.Optimizer):
    """An ordinary torch optimizer, whose `step()` updates the rows of embeddings as well, outside a `Graph`.

        optimizer = EagerOptimizer(torch.optim.Adam(model.parameters()), model)
        for batch in loader:
            loss(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    Learning rate schedulers may be made over the `EagerOptimizer`, or over the wrapped optimizer,
    `optimizer.optimizer`: the param groups are the same.

    optimizer: holds the parameters of all trained embeddings under `module`, and any others. Rows follow its param
    groups; docs/optimizers.md says which kinds of optimizers they can follow.
    module: the model. With None the embeddings are those whose parameters `optimizer` holds: `save_snapshot` and
    recovery leave out others.

    From here until this object is gone, backward() through a lookup keeps the lookup's gradient for `step()`. A newer
    EagerOptimizer over an embedding takes over, and `step()` of the older one raises OptimizerError. The constructor
    raises it for an optimizer that rows cannot follow, an embedding of `module` that `optimizer` does not hold,
    gradients that the older EagerOptimizer has not applied, and a module that ranks share with an embedding that they
    do not. Embeddings with a world train by the mean over its ranks, which all call `step()`; dense parameters are left
    to a DistributedDataParallel beside them.
    """

    state, param_groups = _of_wrapped("state"), _of_wrapped("param_groups")
    _warns_of_lazy_rows = True
    _step_supports_amp_scaling = False  # a GradScaler unscales gradients itself, also where the wrapped one could

    @checked_arguments("module")
    def __init__(self, optimizer: torch.optim.Optimizer, module: nn.Module | None = None) -> None:
        # not super().__init__: groups, state, defaults and hooks are the wrapped optimizer's
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptimizerError(
                f"optimizer={type(optimizer).__name__}: give a torch.optim optimizer, such as torch.optim.SGD"
            )
        check_is_optimizer(optimizer)
        self.optimizer = optimizer
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        root = nn.ParameterList(self._parameters()) if module is None else module
        found = embeddings_of(groups) if module is None else module.modules()
        modules = [one for one in found if isinstance(one, EmbeddingBase)]
        embeddings = [one for one in modules if one.shadow.requires_grad]
        self._world = refuse_eager_ranks(root, embeddings) or World.of_one()
        self._partial_update = ""  # what this rank alone raised during the updates of a step
        if self._world.size > 1 and len(embeddings) > MAX_SHARED:
            raise OptimizerError(
                f"{len(embeddings)} embeddings over ranks; give each EagerOptimizer {MAX_SHARED} or fewer"
            )
        for embedding in embeddings:
            if id(embedding.shadow) not in groups:
                places = (path for path, one in root.named_modules() if one is embedding and one.naming == "path")
                raise OptimizerError(
                    f"{type(optimizer).__name__} does not hold embedding {next(places, embedding.name)!r}; give it the "
                    "embedding's parameters(), freeze it by requires_grad_(False), or give EagerOptimizer a module "
                    "without it"
                )
            self._check_can_take(embedding)
        if module is None:
            check_distinct({f"parameter {at}": one for at, one in enumerate(embeddings)}, OptimizerError)
        else:
            name_embeddings(module, OptimizerError)
        train_together(modules)
        self._module = None if module is None else ref(module)
        self._lost_embedding = ""  # the name of an embedding that a newer one has taken
        self._has_met = False  # whether it looked at the dense part, at its first step
        # with optimizer state of its own, which Adagrad makes at once; False once it has loaded some
        self._begins = not any(state.get("step", True) for state in optimizer.state.values())
        self._taken_over = [one for one in embeddings if one.row_optimizer is not None]
        note_versions(self._dense(embeddings) or ())
        self._rows = [(e, e.attach(optimizer, groups[id(e.shadow)])) for e in embeddings]
        self._warns_of_zeros = any(rows.states for _, rows in self._rows)
        if self._warns_of_lazy_rows:
            note_lazy(self.row_optimizers())
        for embedding in embeddings:
            if (older := holders.get(embedding.handle)) is not None:
                older.give_up(embedding)
            holders[embedding.handle] = self

    def give_up(self, embedding: EmbeddingBase) -> None:
        """Called when a newer EagerOptimizer takes the embedding over."""
        self._lost_embedding = embedding.name

    def _check_can_take(self, embedding: EmbeddingBase) -> None:
        """OptimizerError if an optimizer in backward has the embedding, or another that would lose its gradients."""
        if hasattr(embedding.shadow, IN_BACKWARD):
            raise OptimizerError(
                f"embedding {embedding.name!r}: apply_optimizer_in_backward gave its parameter an optimizer, which "
                "trains its rows in backward(); leave the embedding out of this one, or make it again"
            )
        grad = embedding.shadow.grad
        if embedding.handle in holders and isinstance(grad, ShadowGrad) and grad.rows.is_waiting:
            raise OptimizerError(
                f"another EagerOptimizer has gradients of embedding {embedding.name!r} that it has not applied; call "
                "its step(), or drop them by zero_grad() of the model, before you make a new one"
            )

    def _snapshot_embeddings(self) -> list[SavedRows]:
        module = None if self._module is None else self._module()
        found = [one for one, _ in self._rows] if self._module is None else [] if module is None else module.modules()
        return [one for one in found if isinstance(one, SavedRows)]

    def row_optimizers(self) -> list[RowOptimizer]:
        """Those of its embeddings."""
        return [rows for _, rows in self._rows]

    def __getattr__(self, name: str) -> Any:
        """An attribute of the wrapped optimizer, such as param groups and hooks, where this object lacks it."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        raise OptimizerError(
            "an EagerOptimizer cannot be copied or pickled, as its embeddings cannot; make another over their model, "
            "and carry its state over by state_dict()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group of dense parameters to the wrapped optimizer. Embeddings cannot be added later."""
        self.optimizer.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all rows that backward() reached since `zero_grad()`, each once, then step the wrapped optimizer.

        closure: called first, as torch's optimizers do. It runs forward() and backward(); its result is returned.

        Embeddings that no backward() reached are unchanged, their step counts too. Raises StoreError, CapacityError
        and InputError before any row changed if rows cannot be fetched, GraphError in `build` of a graph and while
        another thread trains the rows. Over ranks, what the closure raises on one of them is raised on all; and
        OptimizerError after a step in which one raised during its updates, until `load_state_dict()`.
        """
        if detect_fake_mode() is not None:
            raise GraphError(
                "build calls step() of an EagerOptimizer; leave it out, and give the wrapped optimizer to add_optimizer"
            )
        if self._lost_embedding:
            raise OptimizerError(
                f"a newer EagerOptimizer has taken over embedding {self._lost_embedding!r}; call step() of that one, "
                "or make this one again"
            )
        for embedding, _ in self._rows:
            check_not_traced(embedding)
        loss = None
        if closure is not None:
            try:
                with torch.enable_grad():
                    loss = closure()
            except BaseException as error:
                if self._world.must_report(error):
                    self._world.handshake(STEP, error)  # the other ranks wait for this one
                raise
        with uninterrupted():
            with torch.no_grad():
                reached = self._reached()
                trained = [(embedding, rows) for embedding, rows, _ in reached]
                row_step(trained, "an EagerOptimizer", self._update_rows, [gradients for *_, gradients in reached])
            grads = [(embedding, set_grad(embedding, None)) for embedding, _ in self._rows]
            with self._amid_updates():
                self.optimizer.step()  # if this raises, rows have moved, and their gradients are gone
            for embedding, grad in grads:
                set_grad(embedding, grad)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients. Gradients of rows are dropped whatever `set_to_none` is, with a warning for False."""
        if not set_to_none and self._warns_of_zeros:
            self._warns_of_zeros = False
            log.warning(
                "zero_grad(set_to_none=False): torch's step then moves a parameter that no backward() reached by its "
                "momentum, and a table's rows stay; leave set_to_none out"
            )
        for embedding, _ in self._rows:
            check_not_traced(embedding)
            set_grad(embedding, None)
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float | Tensor) -> Tensor:
        """Scale the gradients of `parameters` so that their L2 norm together is at most `max_norm`. Returns that norm.

        As torch.nn.utils.clip_grad_norm_, between backward() and step(), with the rows of this optimizer's embeddings,
        whose parameters stand for them: a row counts once, with the sum of the gradients of its occurrences, as in
        `Graph.clip_grad_norm`. The norm, a float32 scalar on the CPU, is that before the scaling.
        max_norm: a number or a 0-d tensor; `inf` measures the norm and scales nothing.

        Raises OptimizerError for a `max_norm` that is neither inf nor a number above 0 that float32 holds, for rows
        that ranks share, and for those of another EagerOptimizer; InputError for a gradient that was changed in place.
        """
        limit = as_number(max_norm.item() if isinstance(max_norm, Tensor) and max_norm.dim() == 0 else max_norm)
        if limit is None or not (SMALLEST <= limit < LARGEST or limit == math.inf):
            raise OptimizerError(
                f"max_norm={max_norm!r}: give a number from {SMALLEST:.3g} to {LARGEST:.3g}, or inf to measure alone"
            )
        distinct = dict.fromkeys([parameters] if isinstance(parameters, Tensor) else parameters)
        grads = [parameter.grad for parameter in distinct if parameter.grad is not None]
        rows = [grad.rows for grad in grads if isinstance(grad, ShadowGrad)]
        dense = [grad for grad in grads if not isinstance(grad, ShadowGrad)]
        if any(grad.layout != torch.strided for grad in dense):
            raise OptimizerError(
                "clip_grad_norm_ of a sparse gradient, as of nn.Embedding(sparse=True); leave its parameter out, or "
                "make the module with sparse=False"
            )
        for name in (one.embedding.name for one in rows if holders.get(one.embedding.handle) is not self):
            raise OptimizerError(f"embedding {name!r} is of another EagerOptimizer; clip by that one")
        if self._world.size > 1 and any(id(embedding.shadow) in map(id, distinct) for embedding, _ in self._rows):
            raise OptimizerError(
                "clip_grad_norm_ of rows that ranks share: their gradients meet in step(); leave the embeddings' "
                "parameters out and clip rows by clip_grad_row_norm in their param group, or train by a Graph with "
                "clip_grad_norm"
            )
        norm = math.sqrt(sum_of_squares(dense) + sum(gradients.square_gradients() for gradients in rows))
        share = limit / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        if limit != math.inf and not share > 1.0:
            with uninterrupted():
                if dense:
                    torch._foreach_mul_(dense, share)
                for gradients in rows:
                    gradients.multiply(share)
        return torch.tensor(norm, dtype=torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """The state_dict of the wrapped optimizer. The state of rows is with the rows."""
        state = self.optimizer.state_dict()
        # empty before the first step, and of optimizers without state; by names of TorchRec's
        if all(isinstance(number, int) for number in state["state"] or [""]):
            for number in self._row_numbers():
                state["state"].setdefault(number, {})  # get_state_dict of torch wants one of each parameter
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Load a copy of a state_dict into the wrapped optimizer, which trains the tensors that it is given.

        OptimizerError for the state of dense rows, which `load_dense` of their embedding takes.
        """
        for number, embedding in self._row_numbers().items():
            for name, value in state_dict.get("state", {}).get(number, {}).items():
                if isinstance(value, Tensor) and value.numel() > 1:
                    raise OptimizerError(
                        f"state_dict: {name!r} {list(value.shape)} is of the rows of embedding {embedding.name!r}, "
                        "whose state is with them; give it to load_dense of the embedding, and leave it out here"
                    )
        self.optimizer.load_state_dict(copy.deepcopy(state_dict))
        self._begins, self._partial_update = False, ""

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _row_numbers(self) -> dict[int, EmbeddingBase]:
        """The embeddings by the numbers that their parameters have in a state_dict."""
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters())}
        return {numbers[id(e.shadow)]: e for e, _ in self._rows if id(e.shadow) in numbers}

    def _reached(self) -> list[tuple[EmbeddingBase, RowOptimizer, RowGradients]]:
        """The embeddings that a backward() of some rank reached. What is wrong on one rank is raised on all."""
        trained = self._rows
        if self._world.size == 1:
            found = self._checked_gradients(trained)
            return [(e, rows, own) for (e, rows), own in zip(trained, found, strict=True) if own is not None]
        found, error = catch(lambda: self._checked_gradients(trained))
        note = sum(1 << number for number, gradients in enumerate(found or ()) if gradients is not None)
        notes = self._world.handshake(STEP, error, note=note).notes
        return [
            (embedding, rows, gradients or RowGradients(embedding))
            for number, ((embedding, rows), gradients) in enumerate(zip(trained, found, strict=True))
            if any(note >> number & 1 for note in notes)
        ]

    def _checked_gradients(self, trained: list[tuple[EmbeddingBase, RowOptimizer]]) -> list[RowGradients | None]:
        """The gradients of each embedding's lookups here, None for none. OptimizerError, InputError."""
        if self._partial_update:
            raise OptimizerError(
                f"a step of an EagerOptimizer raised {self._partial_update} during its updates, and other ranks "
                "applied theirs, so rows differ; on all ranks load a snapshot of every embedding and the dense "
                "parameters of its step, and restore the optimizer by EagerOptimizer.load_state_dict()"
            )
        found = [kept_gradients(embedding) for embedding, _ in trained]
        return [gradients if gradients is not None and gradients.check() else None for gradients in found]

    def _update_rows(self, reached: list[RowGradients]) -> None:
        pinned = [(gradients, gradients.pin()) for gradients in reached]
        self._pinned()
        if self._world.size > 1:
            exchange(self._world, pinned)
        error: BaseException | None = None
        with self._amid_updates():
            for gradients, batch in pinned:
                try:
                    gradients.update(batch)
                except BaseException as wrong:
                    if self._world.size == 1:
                        raise
                    error = error or wrong  # the others as well: other ranks update them all
            if error is not None:
                raise error

    def _dense(self, embeddings: Iterable[EmbeddingBase]) -> list[Tensor] | None:
        """The parameters of the module and the optimizer that are no rows; None if they are not known."""
        module = None if self._module is None else self._module()
        shadows = {id(embedding.shadow) for embedding in embeddings}
        found = [*([] if module is None else module.parameters()), *self._parameters()]
        return [one for one in dict.fromkeys(found) if id(one) not in shadows]

    def _pinned(self) -> None:
        """Called when all rows of a step are pinned, before the first changes."""
        if not self._has_met:
            self._has_met = True
            embeddings = [embedding for embedding, _ in self._rows]
            dense = self._dense(embeddings)
            part = DensePart(f"the EagerOptimizer of {type(self.optimizer).__name__}", dense, self.optimizer.state)
            for embedding in embeddings:
                if isinstance(embedding, SavedRows):
                    embedding.when_open(partial(part.meet, embedding))
                    if self._begins and dense is not None and (embedding.was_loaded or embedding in self._taken_over):
                        self._begins = not warn_of_state(embedding)
            self._taken_over.clear()

    @contextmanager
    def _amid_updates(self) -> Iterator[None]:
        """A block of updates, which other ranks make as well: where it raises on this one, no rank steps any more."""
        try:
            yield
        except BaseException as error:
            if self._world.size > 1:
                self._partial_update = self._partial_update or repr(error)
            raise


class InBackwardOptimizer(EagerOptimizer):
    """The optimizer that `apply_optimizer_in_backward` gave an embedding; torch steps it in backward().

    Torch keeps it as long as the process lives, so it must not keep the embedding.
    """

    _warns_of_lazy_rows = False

    def _check_can_take(self, embedding: EmbeddingBase) -> None:
        if embedding.handle in holders:
            raise OptimizerError(
                f"another EagerOptimizer has embedding {embedding.name!r}, and apply_optimizer_in_backward gave its "
                "parameter an optimizer too; drop the first by del, or leave the embedding out of the second"
            )

    def _dense(self, embeddings: Iterable[EmbeddingBase]) -> None:
        return None

    @property
    def _rows(self) -> list[tuple[EmbeddingBase, RowOptimizer]]:
        embedding = self._embedding()
        return [] if embedding is None else [(embedding, self._row_optimizer)]

    @_rows.setter
    def _rows(self, rows: list[tuple[EmbeddingBase, RowOptimizer]]) -> None:
        [(embedding, self._row_optimizer)] = rows
        self._embedding = ref(embedding)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        groups = self._groups()
        try:
            return super().step(closure)
        except BaseException:
            for group in groups:
                group.fail_pass()
            self.zero_grad()  # or the next step would take what this one did not
            raise

    def _pinned(self) -> None:
        super()._pinned()
        for group in self._groups():
            group.begin_pass()

    def _groups(self) -> list[TrainingGroup]:
        return [embedding.group for embedding, _ in self._rows if embedding.group is not None]


def follow_in_backward(embedding: EmbeddingBase) -> None:
    """Let the rows follow the optimizer that `apply_optimizer_in_backward` gave the embedding, if there is one."""
    given = getattr(embedding.shadow, IN_BACKWARD, None)
    if given is None or not embedding.shadow.requires_grad:
        return
    if len(given) != 1:
        raise OptimizerError(
            f"embedding {embedding.name!r}: apply_optimizer_in_backward gave it {len(given)} optimizers; give it one"
        )
    if not isinstance(given[0], InBackwardOptimizer):
        given[0] = InBackwardOptimizer(given[0], embedding)


def exchange(world: World, pinned: list[tuple[RowGradients, Any]]) -> None:
    """Let all gradients be at the ranks that have the rows. What fails on one rank is raised on all."""
    error: BaseException | None = None
    for gradients, batch in pinned:
        try:
            batch.send(*gradients.grads())
        except BaseException as wrong:
            if not world.must_report(wrong):
                raise
            batch.send_nothing()
            error = error or wrong
    for _, batch in pinned:
        batch.receive()
    world.handshake("gradients of an EagerOptimizer", error)
