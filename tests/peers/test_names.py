"""docs/torchrec-names.md has each public name of the peers' modules once, and what it says of them is so."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import pytest
from torch import nn

import tierbed.jagged
from support.places import DOCS

MODULES = {
    "torchrec.modules": (
        "activation crossnet deepfm embedding_configs embedding_modules embedding_tower feature_processor "
        "feature_processor_ fp_embedding_modules lazy_extension mc_embedding_modules mc_modules mlp regroup utils"
    ),
    "torchrec.sparse": "jagged_tensor",
    "torchrec.optim": "apply_optimizer_in_backward clipping fused keyed optimizers rowwise_adagrad semi_sync warmup",
    "torchrec.models": "deepfm dlrm",
    "torchrec.inference": "modules state_dict_transform",
    "torchrec.distributed": (
        "collective_utils comm comm_ops dist_data embedding embedding_lookup embedding_sharding embedding_types "
        "embeddingbag grouped_position_weighted model_parallel quant_embeddingbag types"
    ),
    "torchrec.distributed.train_pipeline": "train_pipelines",
    "fbgemm_gpu": "split_table_batched_embeddings_ops_training",
}
EXPORTS = ["torchrec", "torchrec.optim", "torchrec.distributed", "torchrec.distributed.train_pipeline"]
SAME, ABSENT = "same", "not in 1.8"
ANSWERS = {SAME, "works", "refused", "none", ABSENT}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # TorchRec gives them


class Row(NamedTuple):
    owner: str  # a module, or a class
    names: list[str]  # each of them may be a pattern
    answer: str

    def has(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names)


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def rows_of(page: str) -> Iterator[Row]:
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `"):
            assert len(cells) in (3, 4), line
            (owner,) = quoted(cells[0])
            yield Row(owner, quoted(cells[1]), cells[2])


ROWS = list(rows_of((DOCS / "torchrec-names.md").read_text()))


def resolved(path: str) -> Any:
    """A module, or what is in one, by its dotted name."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


def is_public(name: str, value: Any) -> bool:
    return not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))


def matches(owner: Any, pattern: str) -> list[str]:
    return [name for name in dir(owner) if fnmatchcase(name, pattern)] if "*" in pattern else [pattern]


def ours(name: str) -> Any:
    return resolved(name if "." in name else f"tierbed.jagged.{name}")


@pytest.mark.parametrize(
    "module", [f"{package}.{module}" for package, modules in MODULES.items() for module in modules.split()]
)
def test_each_name_of_a_module_has_one_answer(module: str) -> None:
    members = vars(resolved(module)).items()
    names = [name for name, value in members if is_public(name, value) and value.__module__ == module]
    assert names
    of_module = [row for row in ROWS if row.owner == module]
    answers = {name: [row.answer for row in of_module if row.has(name)] for name in names}
    assert {name: found for name, found in answers.items() if len(found) != 1} == {}


@pytest.mark.parametrize("package", EXPORTS)
def test_each_name_that_a_package_exports_has_one_answer_there_or_in_its_module(package: str) -> None:
    exported = {name: value for name, value in vars(resolved(package)).items() if is_public(name, value)}
    assert exported
    answers = {
        name: {row.answer for row in ROWS if row.owner in (package, value.__module__) and row.has(name)}
        for name, value in exported.items()
    }
    assert {name: found for name, found in answers.items() if len(found) != 1} == {}


def test_each_answer_is_one_of_those_of_the_page_or_names_that_tierbed_has() -> None:
    for row in ROWS:
        if row.answer == SAME:
            for name in row.names:
                assert name in tierbed.jagged.__all__, row
        elif row.answer not in ANSWERS:
            names = quoted(row.answer)
            assert ", ".join(f"`{name}`" for name in names) == row.answer, row
            for name in names:
                assert "." in name or name in tierbed.jagged.__all__, row
                assert ours(name) is not None


def test_each_name_and_pattern_is_of_the_installed_peers() -> None:
    for row in ROWS:
        owner = resolved(row.owner)
        for pattern in row.names:
            found = [name for name in matches(owner, pattern) if hasattr(owner, name)]
            assert bool(found) == (row.answer != ABSENT), (row.owner, pattern)


def public(kind: type[Any]) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")} - set(dir(nn.Module))


def test_each_method_that_a_class_of_ours_lacks_is_in_the_table_of_methods_and_no_other() -> None:
    of_classes = {row.owner: [other for other in ROWS if other.owner == row.owner] for row in ROWS}
    lacked: dict[str, set[str]] = {}
    peers = [getattr(resolved(row.owner), name) for row in ROWS if row.answer == SAME for name in row.names]
    for theirs in filter(inspect.isclass, peers):
        owners = [f"{base.__module__}.{base.__name__}" for base in theirs.__mro__]
        rows = [row for owner in owners for row in of_classes.get(owner, [])]
        missing = public(theirs) - public(ours(theirs.__name__))
        unsaid = {one for one in missing if not any(row.has(one) for row in rows)}
        assert not unsaid, (theirs, unsaid)
        for row in rows:
            lacked.setdefault(row.owner, set()).update(missing)
    for owner, missing in lacked.items():
        for row in of_classes[owner]:
            for pattern in row.names:
                assert any(fnmatchcase(one, pattern) for one in missing), (owner, pattern)
