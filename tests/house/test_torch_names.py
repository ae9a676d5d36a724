"""The table of docs/torch.md has the private names of torch that the sources use, each with its files."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

from support.places import DOCS, PACKAGE, ROOT

PRIVATE = re.compile(r"_[A-Za-z]\w*")
UNDOCUMENTED = re.compile(  # without an underscore, but torch does not document them
    r"torch\.(distributed\.distributed_c10d|distributed\.rendezvous|fx\.experimental|fx\.passes|fx\.proxy"
    r"|nn\.parameter\.is_lazy|optim\.optimizer\.ParamsT|utils\.weak)\b"
)
OTHERS = {"_asdict", "_exit", "_getframe", "_is_owned", "_limbo", "_replace"}  # of Python
OTHERS |= {"_clock", "_seconds_max", "_seconds_p"}  # texts of ours
OTHERS |= {"_clipping", "_optims", "_save_param_groups", "_stride_per_key_per_rank"}  # of TorchRec
OTHERS |= {"_FabricModule", "_forward_module"}  # of Lightning


def table() -> dict[str, set[str]]:
    """The names of the table, each with its files."""
    found: dict[str, set[str]] = {}
    for line in (DOCS / "torch.md").read_text().splitlines():
        if line.startswith("| `"):
            names, files = (re.findall(r"`([^`]+)`", cell) for cell in line.split(" | ")[:2])
            assert not found.keys() & set(names), line
            found |= {name: set(files) for name in names}
    return found


def own_names(trees: Iterable[ast.Module]) -> set[str]:
    """The names that the sources define."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_self(node):
            found.add(node.attr)
    return found


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def chain(node: ast.Attribute) -> tuple[str | None, str]:
    """The name that a chain of attributes begins with, None if it is no name, and the attributes."""
    base, path = node.value, node.attr
    while isinstance(base, ast.Attribute):
        base, path = base.value, f"{base.attr}.{path}"
    return base.id if isinstance(base, ast.Name) else None, path


def private_part(path: str) -> str | None:
    """A path of torch as the table writes it, up to what follows its first private part; None if it is public."""
    parts = path.split(".")
    first = next((i for i, part in enumerate(parts) if PRIVATE.fullmatch(part)), None)
    if first is not None:
        return ".".join(parts[: first + 2])
    return path if UNDOCUMENTED.match(path) else None


def private_names(tree: ast.Module, own: set[str], listed: Iterable[str]) -> Iterator[str]:
    """The private names of torch in a file: `torch.a._b`, `._attribute`, `_keyword=`.

    An attribute, or a text that is the name of one, is torch's if the table has it, or the sources do not define it.
    """
    bound: dict[str, str] = {}  # names of the file, and what they are in torch
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            of_torch = [name for name in node.names if name.name.split(".")[0] == "torch"]
            bound |= {name.asname or "torch": name.name if name.asname else "torch" for name in of_torch}
            yield from (path for name in of_torch if (path := private_part(name.name)))
        elif isinstance(node, ast.ImportFrom) and not node.level and str(node.module).split(".")[0] == "torch":
            paths = {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
            bound |= paths
            yield from filter(private_part, paths.values())
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Attribute):
            base, path = chain(node)
            if base not in bound:
                name = None if is_of_self(node) else node.attr
            elif id(node) not in inner and private_part(bound[base]) is None:
                yield from filter(None, [private_part(f"{bound[base]}.{path}")])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
            if re.fullmatch(r"torch(\.\w+)+", name) and private_part(name):
                yield name
        elif isinstance(node, ast.keyword) and PRIVATE.fullmatch(node.arg or "") and node.arg not in own:
            yield f"{node.arg}="
        if name and PRIVATE.fullmatch(name) and name not in OTHERS and (f".{name}" in listed or name not in own):
            yield f".{name}"


def test_the_table_has_each_private_name_of_torch_with_its_files_and_no_other() -> None:
    paths = [path for folder in (*PACKAGE, "src") for path in sorted((ROOT / folder).rglob("*.py"))]
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}
    own, listed = own_names(trees.values()), table()
    used = defaultdict(set)
    for file, tree in trees.items():
        for name in private_names(tree, own, listed):
            used[name].add(file)
    assert listed == used


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch\ntorch._C._new()\ntorch.nn.Linear(1, 1)", ["torch._C._new"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("import torch.distributed as dist\ndist.world._members.add", ["torch.distributed.world._members.add"]),
        ("from torch.utils import _pytree as trees\ntrees.tree_map", ["torch.utils._pytree"]),
        ("def late():\n    from torch.fx.passes import one", ["torch.fx.passes.one"]),
        ("from torch import fx\nfx.proxy.Tracer(graph)", ["torch.fx.proxy.Tracer"]),
        ("getattr(tensor, '_hooks'), tensor._hooks, self._hooks", ["._hooks", "._hooks"]),
        ("class A:\n    def __init__(self): self._own = 1\none._own, one._listed", ["._listed"]),
        ("class A:\n    def _listed(self): super()._listed()", ["._listed"]),
        ("make_fx(step, _new=True, public=1)", ["_new="]),
        ("logging.getLogger('torch._new.logs')", ["torch._new.logs"]),
    ],
)
def test_a_private_name_is_found(source: str, names: list[str]) -> None:
    tree = ast.parse(source)
    assert sorted(private_names(tree, own_names([tree]), {"._listed"})) == names
