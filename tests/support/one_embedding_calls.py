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
MLP = """
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
STEP = """
ids = np.random.randint(0, 1000, (100, num_tables), dtype=np.int64)
ids_tensor = torch.tensor(ids, requires_grad=False).to("cuda")
graph = TrainGraph()
loss = graph(ids_tensor)
print(loss)
"""
SIZES = """
import numpy as np
from torch import nn
table_size_array = [39884407, 39043, 17289]
vocab_size = sum(table_size_array)
num_tables = len(table_size_array)
"""
SSD = """
store_options = one_embedding.make_cached_ssd_store_options(
    cache_budget_mb=8192, persistent_path="/your_path_to_ssd", capacity=vocab_size
)
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
embedding = one_embedding.MultiTableEmbedding(
    name="my_embedding",
    embedding_dim=embedding_size,
    dtype=torch.float,
    key_type=torch.int64,
    tables=tables,
    store_options=store_options,
)
embedding.to("cuda")
num_tables = 3
{MLP.format(width="embedding_size")}
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
{SIZES}
embedding_size = 128
scales = np.sqrt(1 / np.array(table_size_array))
tables = [
    one_embedding.make_table_options(one_embedding.make_uniform_initializer(low=-scale, high=scale))
    for scale in scales
]
{SSD}
embedding = one_embedding.MultiTableEmbedding(
    name="my_embedding",
    embedding_dim=embedding_size,
    dtype=torch.float,
    key_type=torch.int64,
    tables=tables,
    store_options=store_options,
)
embedding.to("cuda")
{MLP.format(width="embedding_size")}
{STEP}
""",
    "multi_column": f"""
{IMPORTS}
{SIZES}
embedding_size_list = [10, 1]
scales = np.sqrt(1 / np.array(table_size_array))
tables = [
    one_embedding.make_table_options(
        [
            one_embedding.make_column_options(one_embedding.make_uniform_initializer(low=-scale, high=scale)),
            one_embedding.make_column_options(one_embedding.make_normal_initializer(mean=0, std=scale)),
        ]
    )
    for scale in scales
]
{SSD}
embedding = one_embedding.MultiTableMultiColumnEmbedding(
    name="my_embedding",
    embedding_dim=embedding_size_list,
    dtype=torch.float,
    key_type=torch.int64,
    tables=tables,
    store_options=store_options,
)
embedding.to("cuda")
{MLP.format(width="sum(embedding_size_list)")}
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
    """Each example by its name in `CALLS`."""
    text = document()
    if text is None:
        return CALLS
    first, tables, options, store, module, several, columns, graph, ftrl = map(ported, _blocks(text))
    guide = "\n".join([tables, store, module, graph])
    found = {"embedding": first, "guide": guide, "table_options": options, "multi_table": several}
    return {**found, "multi_column": columns, "ftrl": ftrl}


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


def _blocks(text: str) -> list[str]:
    """The code in a document: lines behind `>>>`, and else the longest runs that parse and define something."""
    lines = text.splitlines()
    found, at = [], 0
    while at < len(lines):
        end = at
        while end < len(lines) and lines[end].startswith(">>>"):
            end += 1
        if end > at:
            found.append("\n".join(line[4:] for line in lines[at:end]))
        elif re.match(r"import |class |# |\w+ = ", lines[at]):
            ends = range(min(at + 40, len(lines)), at, -1)
            end = next((at + length for e in ends if (length := _defining("\n".join(lines[at:e])))), at)
            if end > at:
                found.append("\n".join(lines[at:end]))
        at = max(end, at + 1)
    return found


def _defining(text: str) -> int:
    """How many lines of a text are code up to a heading, which is a bare name; 0 where it defines nothing."""
    try:
        statements = ast.parse(text).body
    except SyntaxError:
        return 0
    code = []
    for statement in statements:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Name):
            break
        code.append(statement)
    defines = any(not isinstance(statement, ast.Expr) for statement in code)
    return code[-1].end_lineno or 0 if defines else 0
