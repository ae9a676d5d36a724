"""The examples of OneEmbedding's documentation: the document's where a copy of it is found, else those of this file.

The document is the file of `TIERBED_SEEDS`, or of `shared/seeds` beside the repository, that begins with its title. The
examples of this file are its calls (OneFlow, Apache-2.0) after `ported`, which does what docs/oneflow.md asks of a
script.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import torch

from support.places import ROOT

SEEDS = Path(os.environ.get("TIERBED_SEEDS", ROOT.parent / "shared" / "seeds"))
TITLE = "oneflow.one_embedding\n"
PORTED = {
    "import oneflow as flow": "import torch\nfrom tierbed import one_embedding\nfrom tierbed import Graph",
    "import oneflow.nn as nn": "from torch import nn",
    "flow.one_embedding.": "one_embedding.",
    "flow.nn.Graph": "Graph",
    "flow.nn.FusedMLP": "one_embedding.FusedMLP",
    "flow.": "torch.",
}
IMPORTS = """
import torch
from tierbed import one_embedding
from tierbed import Graph
"""
MODEL = """
embedding = one_embedding.{kind}(
    name="my_embedding",
    embedding_dim={size},
    dtype=torch.float,
    key_type=torch.int64,
    tables=tables,
    store_options=store_options,
)
embedding.to("cuda")
mlp = one_embedding.FusedMLP(
    in_features={width} * num_tables, hidden_features=[512, 256, 128], out_features=1, skip_final_activation=True
)
mlp.to("cuda")

class TrainGraph(Graph):
    def __init__(self):
        super().__init__()
        self.embedding_lookup = embedding
        self.mlp = mlp
        self.add_optimizer(torch.optim.SGD(self.embedding_lookup.parameters(), lr=0.1, momentum=0.0))
        self.add_optimizer(torch.optim.SGD(self.mlp.parameters(), lr=0.1, momentum=0.0))

    def build(self, ids):
        embedding = self.embedding_lookup(ids)
        loss = self.mlp(torch.reshape(embedding, (-1, num_tables * {width})))
        loss = loss.sum()
        loss.backward()
        return loss
"""
SEVERAL = """
import numpy as np
from torch import nn
table_size_array = [39884407, 39043, 17289]
vocab_size = sum(table_size_array)
num_tables = len(table_size_array)
scales = np.sqrt(1 / np.array(table_size_array))
store_options = one_embedding.make_cached_ssd_store_options(
    cache_budget_mb=8192, persistent_path="/your_path_to_ssd", capacity=vocab_size
)
"""
STEP = """
ids = np.random.randint(0, 1000, (100, num_tables), dtype=np.int64)
ids_tensor = torch.tensor(ids, requires_grad=False).to("cuda")
graph = TrainGraph()
loss = graph(ids_tensor)
print(loss)
"""
CALLS = {
    "embedding": f"""
import numpy as np
{IMPORTS}
indices = torch.tensor([[1, 2, 4, 5], [4, 3, 2, 9]], dtype=torch.int)
embedding = torch.nn.Embedding(10, 3)
y = embedding(indices)
""",
    "guide": f"""
{IMPORTS}
from torch import nn
import numpy as np

tables = [
    one_embedding.make_table_options(one_embedding.make_uniform_initializer(low=-0.1, high=0.1)),
    one_embedding.make_table_options(one_embedding.make_uniform_initializer(low=-0.05, high=0.05)),
    one_embedding.make_table_options(one_embedding.make_uniform_initializer(low=-0.15, high=0.15)),
]
store_options = one_embedding.make_cached_ssd_store_options(
    cache_budget_mb=8142,
    persistent_path="/your_path_to_ssd",
    capacity=40000000,
    size_factor=1,
    physical_block_size=4096,
)
embedding_size = 128
num_tables = 3
{MODEL.format(kind="MultiTableEmbedding", size="embedding_size", width="embedding_size")}
""",
    "table_options": f"""
{IMPORTS}
initializer = one_embedding.make_uniform_initializer(low=-scale, high=scale)
table1 = one_embedding.make_table_options(initializer)
table2 = one_embedding.make_table_options(initializer)
tables = [table1, table2]
""",
    "multi_table": f"""
{IMPORTS}
{SEVERAL}
embedding_size = 128
tables = [
    one_embedding.make_table_options(one_embedding.make_uniform_initializer(low=-scale, high=scale))
    for scale in scales
]
{MODEL.format(kind="MultiTableEmbedding", size="embedding_size", width="embedding_size")}
{STEP}
""",
    "multi_column": f"""
{IMPORTS}
{SEVERAL}
embedding_size_list = [10, 1]
tables = [
    one_embedding.make_table_options(
        [
            one_embedding.make_column_options(one_embedding.make_uniform_initializer(low=-scale, high=scale)),
            one_embedding.make_column_options(one_embedding.make_normal_initializer(mean=0, std=scale)),
        ]
    )
    for scale in scales
]
{MODEL.format(kind="MultiTableMultiColumnEmbedding", size="embedding_size_list", width="sum(embedding_size_list)")}
{STEP}
""",
    "ftrl": """
ftrl = one_embedding.FTRL(net.parameters(), lr=1e-3)

for epoch in range(epochs):
    # ...
    loss.backward()
    ftrl.step()
    ftrl.zero_grad()
""",
}


def document() -> str | None:
    """The documentation's text, where it is found."""
    texts = (path.read_text() for path in sorted(SEEDS.glob("*.txt")))
    return next((text for text in texts if text.startswith(TITLE)), None)


def examples() -> dict[str, str]:
    """Each example by its name in `CALLS`, without the statements that the document does not have."""
    text = document()
    if text is None:
        return CALLS
    there = _squeezed(ported(re.sub(r"^>>> ?", "", text, flags=re.M)))
    parts = {
        name: [ast.get_source_segment(code, part) for part in ast.parse(code).body] for name, code in CALLS.items()
    }
    return {name: "\n".join(part for part in of if part and _squeezed(part) in there) for name, of in parts.items()}


def _squeezed(code: str) -> str:
    """Without what differs between texts that are formatted in two ways."""
    return re.sub(r",(?=[])}])", "", re.sub(r"#.*|\s", "", code).replace('"', "'"))


def ported(example: str) -> str:
    """An example with torch for tensors and layers, and tierbed for `one_embedding` and `Graph`."""
    for theirs, ours in PORTED.items():
        example = example.replace(theirs, ours)
    return example


def run(name: str, folder: Path, **given: Any) -> dict[str, Any]:
    """What an example defines when it runs on a CPU with its store in `folder`, with the names `given` beforehand.

    Its cache gets 8 MiB instead of 8 GiB, which take seconds to fill.
    """
    text = examples()[name].replace("/your_path_to_ssd", str(folder)).replace('"cuda"', '"cpu"')
    text = re.sub(r"cache_budget_mb=\d+", "cache_budget_mb=8", text)
    if name == "ftrl":
        text = text.replace("# ...", "loss = compute_loss()")
    made: dict[str, Any] = {**given}
    torch.manual_seed(0)
    exec(compile(text, f"<{name}>", "exec"), made)
    return made
