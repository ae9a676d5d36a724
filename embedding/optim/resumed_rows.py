"""Warns if freshly initialized dense parameters are about to train with an earlier run's rows.

Every store draws a random run id when it starts empty. Snapshots, checkpoints and clean markers contain the run id, so
copies keep it. For each dense parameter, this module remembers the run ids of the rows that this process trained
together with the parameter. A parameter without run ids is fresh if its value has not changed since its optimizer was
made, and it has no optimizer state. Imported rows get a run id when opened.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from ..state_dict.saved_rows import SnapshotEmbedding

log = logging.getLogger("tierbed")
_run_ids: Any = WeakTensorKeyDictionary()  # by dense parameter: run ids of the rows trained with it
_versions: Any = WeakTensorKeyDictionary()  # by dense parameter: torch's version number when the optimizer was made
_trained_run_ids: set[str] = set()  # the ids of runs that this process trained


def remember_versions(parameters: Iterable[Tensor]) -> None:
    """Remember the parameters' versions, to detect a later load."""
    for parameter in parameters:
        if parameter.requires_grad and not is_lazy(parameter):
            _versions.setdefault(parameter, parameter._version)


def remember_run_ids(parameters: Iterable[Tensor], embeddings: Iterable[SnapshotEmbedding]) -> None:
    """Remember that these parameters and the embeddings' rows belong together, because one load restored both."""
    run_ids = {embedding.table_handle().open_table.run_id for embedding in embeddings if embedding.is_open}
    for parameter in parameters:
        _run_ids.setdefault(parameter, set()).update(run_ids)


def warn_if_optimizer_lacks_state(embedding: SnapshotEmbedding) -> bool:
    """Warn if rows have optimizer state, but a new optimizer has none for dense parameters. True if it warned."""
    handle: Any = embedding.table_handle()
    table = handle.open_table
    has_state = bool(table.step and table.state.names and not handle.local.persistence.resumed_step)
    if has_state:
        log.warning(
            "embedding %r keeps the optimizer state of its %d steps, but the new optimizer has no state for dense "
            "parameters. To continue training, call optimizer.load_state_dict(saved). To start without state, call "
            "model.load_state_dict(tierbed.to_dense_state_dict(model)) before the first step",
            embedding.name,
            table.step,
        )
    return has_state


class ResumedRowsCheck:
    """Checks before the first training step that rows and dense parameters belong together.

    owner: names the graph or optimizer in messages. parameters: None if unknown. states: optimizer state by parameter.
    """

    def __init__(self, owner: str, parameters: Iterable[Tensor] | None, states: Mapping[Any, Any]) -> None:
        self._owner, self._has_warned = owner, False
        trained = [parameter for parameter in parameters or () if parameter.requires_grad and parameter.numel()]
        written_ids = {id(p) for p in trained if _versions.get(p, p._version) != p._version or states.get(p)}
        self._entries = [(p, {*_run_ids.get(p, ())}, id(p) in written_ids) for p in trained]
        self._has_parameters = parameters is not None

    def warn_if_mismatched(self, embedding: SnapshotEmbedding) -> None:
        """Warn if an open embedding resumed rows that were not trained with these parameters. Remembers the run id."""
        handle: Any = embedding.table_handle()
        run_id, step = handle.open_table.run_id, handle.local.persistence.resumed_step
        num_fresh = sum(run_id not in ids if ids else not was_written for _, ids, was_written in self._entries)
        is_mismatched = num_fresh > 0 if self._has_parameters else run_id not in _trained_run_ids
        is_intended = embedding.has_chosen_rows or embedding.store_options.open == "pretrained"
        is_first_rank = embedding.world is None or embedding.world.rank == 0
        if step and is_mismatched and not is_intended and not self._has_warned and is_first_rank:
            self._has_warned = True
            count = f" ({num_fresh} of its {len(self._entries)} parameters)" if self._has_parameters else ""
            log.warning(
                "%s mixes old and new parts: embedding %r has rows of step %d, but the dense part begins at step 0%s. "
                'To load both parts, use graph.load or load_checkpoint. To start over, set open="fresh" in the store '
                'options. If the new dense part is intended, set open="pretrained", or call keep_rows()',
                self._owner,
                embedding.name,
                step,
                count,
            )
        _trained_run_ids.add(run_id)
        for parameter, *_ in self._entries:
            _run_ids.setdefault(parameter, set()).add(run_id)
