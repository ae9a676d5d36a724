"""Names of embeddings: one that was made without a name takes its path in the model in which it is first seen."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from itertools import count

from torch import nn

from ...engine.errors import OptionError, TierbedError
from ...engine.ops.rows_contract import EmbeddingBase

# classes whose modules wrap one other, and what they call it
WRAPPERS = {
    "DistributedModelParallel": "_wrapped", "DistributedDataParallel": "module", "DataParallel": "module",
    "OptimizedModule": "_orig_mod", "_FabricModule": "_forward_module",
}  # fmt: skip
# of this process, so that equal scripts have equal names and rows; ranks make others besides those that they share
_unnamed, _seeded = {False: count(1), True: count(1)}, {False: count(1), True: count(1)}


def bare_name(name: str) -> str:
    """A path without any name that a wrapper gives: equal for all ways to wrap."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS.values())


def provisional_name(is_shared: bool) -> str:
    """What messages call an embedding that has no name yet."""
    return f"unnamed-{'shared-' * is_shared}{next(_unnamed[is_shared])}"


def next_seed(is_shared: bool) -> int:
    """The seed of the next embedding without a name. is_shared: True for rows that are spread over ranks."""
    return zlib.crc32(f"{'shared ' * is_shared}embedding {next(_seeded[is_shared])}".encode())


def name_embeddings(root: nn.Module, error: type[TierbedError] = OptionError, model: str = "") -> None:
    """Name each unnamed embedding under `root` by its path. Raises `error` for two embeddings of one name.

    model: the path of the model under `root` in which the paths of names begin.

    Embeddings of a collection that was made without a name keep the name that it gave them, unless two meet.
    """
    found = {path: one for path, one in root.named_modules() if isinstance(one, EmbeddingBase)}
    bare = {path: bare_name(path.removeprefix(f"{model}.")) for path in found}
    paths = {path: re.sub(r"[^\w.-]", "-", name)[-200:].strip(".") or "embedding" for path, name in bare.items()}
    names = [one.name for one in found.values()]
    for path, one in found.items():
        if one.naming == "path" or (one.naming == "default" and names.count(one.name) > 1):
            one.take_name(paths[path])
    check_distinct(found, error)


def check_distinct(embeddings: Mapping[str, EmbeddingBase], error: type[TierbedError]) -> None:
    """Raises `error` if two embeddings have one name. embeddings: by their paths in the model."""
    first: dict[str, str] = {}
    for path, one in embeddings.items():
        if first.setdefault(one.name, path) != path:
            raise error(
                f"{first[one.name]} and {path} are two embeddings named {one.name!r}; use one embedding for both, or "
                "give each its own name=. Without name=, its place in the first model that was trained or saved names "
                "an embedding: make both again in this model, and load tierbed.to_dense_state_dict of the earlier ones"
            )
