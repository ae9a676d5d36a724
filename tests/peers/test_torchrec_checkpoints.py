"""A checkpoint of TorchRec does not become rows, as docs/torchrec.md says that it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torchrec import EmbeddingBagCollection as TheirBags
from torchrec import EmbeddingCollection as TheirCollection
from torchrec.modules import embedding_configs as theirs

from tierbed import import_snapshot, make_host_mem_store_options
from tierbed.jagged import EmbeddingBagCollection, EmbeddingCollection

TABLES = [("t1", 100, 8), ("t2", 50, 4), ("t3", 70, 8)]


def bags(path: Path) -> tuple[Any, Any, str]:
    configs = [theirs.EmbeddingBagConfig(num_embeddings=n, embedding_dim=dim, name=name) for name, n, dim in TABLES]
    ours = EmbeddingBagCollection(configs, make_host_mem_store_options(path))
    return TheirBags(tables=configs), ours, "embedding_bags"


def sequences(path: Path) -> tuple[Any, Any, str]:
    configs = [theirs.EmbeddingConfig(num_embeddings=n, embedding_dim=8, name=name) for name, n, _ in TABLES]
    ours = EmbeddingCollection(configs, make_host_mem_store_options(path))
    return TheirCollection(tables=configs), ours, "embeddings"


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("make", [bags, sequences])
def test_tables_of_a_checkpoint_become_rows(make: Any, suffix: str, tmp_path: Path) -> None:
    other, ours, prefix = make(tmp_path / "store")
    file = tmp_path / f"checkpoint.{suffix}"
    {"pt": torch.save, "safetensors": save_file}[suffix](torch.nn.ModuleDict({"model": other}).state_dict(), file)
    with ours:
        for name, embedding in ours.embeddings.items():
            tables = [config.name for config in ours.configs if ours.embedding_of(config.name) is embedding]
            weights = [f"model.{prefix}.{table}.weight" for table in tables]
            import_snapshot(tmp_path / "store" / name, "from-torchrec", file, tensor=weights)
            embedding.load_snapshot("from-torchrec")
        for table, rows, _ in TABLES:
            assert torch.equal(
                ours.embedding_of(table).get(torch.arange(rows), table), getattr(other, prefix)[table].weight
            )
        assert sum(embedding.size() for embedding in ours.embeddings.values()) == sum(rows for _, rows, _ in TABLES)
