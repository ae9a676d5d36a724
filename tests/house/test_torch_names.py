"""The table of docs/torch.md has the private names of torch that the sources use, each with its files."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

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
    lines = (line for line in (DOCS / "torch.md").read_text().splitlines() if line.startswith("| `"))
    rows = [[re.findall(r"`([^`]+)`", cell) for cell in line.split(" | ")[:2]] for line in lines]
    return {name: set(files) for names, files in rows for name in names}


def own_names(trees: Iterable[ast.Module]) -> set[str]:
    """The names that the sources define."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                found.add(name)
    return found


def private_part(path: str) -> str | None:
    """A path of torch as the table writes it, up to what follows its first private part; None if it is public."""
    if found := re.match(r"torch(\.[A-Za-z]\w*)*?\._[A-Za-z]\w*(\.\w+)?", path):
        return found[0]
    return path if UNDOCUMENTED.match(path) else None


def private_names(tree: ast.Module, own: set[str], listed: Iterable[str]) -> Iterator[str | None]:
    """The private names of torch in a file: `torch.a._b`, `._attribute`, `_keyword=`.

    An attribute, or a text that is the name of one, is torch's if the table has it, or the sources do not define it.
    """
    bound: dict[str, str] = {}  # names of the file, and what they are in torch
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {one.asname or "torch": one.name if one.asname else "torch" for one in node.names}
            yield from (private_part(one.name) for one in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            paths = {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
            bound |= paths
            yield from filter(private_part, paths.values())
    bound = {name: path for name, path in bound.items() if path.split(".")[0] == "torch"}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        name = None
        match node:
            case ast.Attribute():
                base, _, path = ast.unparse(node).partition(".")
                if base not in bound:
                    name = None if isinstance(node.value, ast.Name) and base in ("self", "cls") else node.attr
                elif id(node) not in inner and private_part(bound[base]) is None:
                    yield private_part(f"{bound[base]}.{path}")
            case ast.Constant(value=str(name)):
                yield private_part(name) if re.fullmatch(r"torch(\.\w+)+", name) else None
            case ast.keyword(arg=str(keyword)) if PRIVATE.fullmatch(keyword) and keyword not in own:
                yield f"{keyword}="
        if name and PRIVATE.fullmatch(name) and name not in OTHERS and (f".{name}" in listed or name not in own):
            yield f".{name}"


def test_the_table_has_each_private_name_of_torch_with_its_files_and_no_other() -> None:
    paths = [path for folder in (*PACKAGE, "src") for path in sorted((ROOT / folder).rglob("*.py"))]
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}
    own, listed = own_names(trees.values()), table()
    used = defaultdict(set)
    for file, tree in trees.items():
        for name in filter(None, private_names(tree, own, listed)):
            used[name].add(file)
    assert listed == used
