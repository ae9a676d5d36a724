"""Names of embeddings. An embedding made without a name gets its path in the first model that contains it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from itertools import count

from torch import nn

from ...engine.errors import OptionError, TierbedError
from ...engine.ops.embedding_base import EmbeddingBase

# maps a wrapper class's name to the attribute that holds the wrapped module
WRAPPERS = {
    "DistributedModelParallel": "_wrapped", "DistributedDataParallel": "module", "DataParallel": "module",
    "OptimizedModule": "_orig_mod", "_FabricModule": "_forward_module",
}  # fmt: skip
# Each process counts its unnamed embeddings, so that every run of a script uses the same names and seeds. Embeddings
# that ranks share use a separate counter, because a rank may also have unshared embeddings.
_name_counters, _seed_counters = {False: count(1), True: count(1)}, {False: count(1), True: count(1)}


def strip_wrappers(name: str) -> str:
    """Return a module's path without the names that wrappers add, so that wrapping changes no name."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS.values())


def make_provisional_name(is_shared: bool) -> str:
    """Return a name for messages about an embedding without a name."""
    return f"unnamed-{'shared-' * is_shared}{next(_name_counters[is_shared])}"


def make_next_seed(is_shared: bool) -> int:
    """Return the seed of the next embedding without a name. is_shared: True for rows that ranks share."""
    return zlib.crc32(f"{'shared ' * is_shared}embedding {next(_seed_counters[is_shared])}".encode())


def make_path_name(path: str) -> str:
    """Return the name of an unnamed embedding with this path in a model."""
    return re.sub(r"[^\w.-]", "-", strip_wrappers(path))[-200:].strip(".") or "embedding"


def name_embeddings(root: nn.Module, error: type[TierbedError] = OptionError, model_path: str = "") -> None:
    """Name each unnamed embedding under `root` after its path. Raises `error` if two embeddings share a name.

    A collection's default name is kept, unless another embedding has the same name. model_path: names omit this path.
    """
    embeddings = {path: module for path, module in root.named_modules() if isinstance(module, EmbeddingBase)}
    bare_paths = {path: path.removeprefix(f"{model_path}.") for path in embeddings}
    names = [embedding.name for embedding in embeddings.values()]
    for path, embedding in embeddings.items():
        if embedding.name_source == "path" or (embedding.name_source == "default" and names.count(embedding.name) > 1):
            embedding.set_name(make_path_name(bare_paths[path]))
    check_distinct(embeddings, error)


def check_distinct(embeddings: Mapping[str, EmbeddingBase], error: type[TierbedError]) -> None:
    """Raise `error` if two embeddings share a name. embeddings: by path in the model."""
    paths: dict[str, str] = {}
    for path, embedding in embeddings.items():
        if paths.setdefault(embedding.name, path) != path:
            raise error(
                f"{paths[embedding.name]} and {path} are two embeddings named {embedding.name!r}; use one embedding "
                "for both, or give each its own name=. Without name=, an embedding is named after its path in the "
                "first model that was trained or saved: make both again in this model, and load "
                "tierbed.to_dense_state_dict of the earlier ones"
            )
