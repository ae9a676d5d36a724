"""What the text of the sources shows: private names of torch that docs/torch.md lists, and the form of errors."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache

import tierbed
from support.places import DOCS, PACKAGE, ROOT
from tierbed.engine import errors

CLASSES = {name for name in vars(errors) if name.endswith("Error")}
PROPER = ("MARK", "Parquet", "Prometheus", "RocksDB", "SmartDecayAdam", "TableBatchedEmbeddingBags")  # may begin a text
COMPLETED = (  # by what raises them again, or by what surrounds them
    "unpin of a batch that is not pinned",
    "RocksDB in {} was closed",
    "this world is closed",
    "the embedding was closed before",
    "the table was closed, or its rows were replaced",
    "there are rows",
    "bucket {} has {} {} instead of",
    "build changes the shape of an argument",
    "its parent {} is damaged",
    "rows of {} cannot be loaded as rows of",
    "process {} runs another version",
)


PRIVATE = re.compile(r"_[A-Za-z]\w*")
UNDOCUMENTED = re.compile(  # without an underscore, but torch does not document them
    r"torch\.(distributed\.distributed_c10d|distributed\.rendezvous|fx\.experimental|fx\.passes|fx\.proxy"
    r"|nn\.parameter\.is_lazy|optim\.optimizer\.ParamsT|utils\.weak)\b"
)
OTHERS = {"_asdict", "_exit", "_fields", "_getframe", "_is_owned", "_limbo", "_replace"}  # of Python
OTHERS |= {"_clock", "_core", "_initializer", "_padding", "_seconds_max", "_seconds_p", "_store_options"}
OTHERS |= {"_clipping", "_optims", "_save_param_groups", "_stride_per_key_per_rank"}  # of TorchRec
OTHERS |= {"_FabricModule", "_forward_module"}  # of Lightning


@cache
def trees() -> dict[str, ast.Module]:
    paths = (path for folder in (*PACKAGE, "src") for path in sorted((ROOT / folder).rglob("*.py")))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def table() -> dict[str, set[str]]:
    """The names of the table, each with its files."""
    lines = (line for line in (DOCS / "torch.md").read_text().splitlines() if line.startswith("| `"))
    rows = [[re.findall(r"`([^`]+)`", cell) for cell in line.split(" | ")[:2]] for line in lines]
    return {name: set(files) for names, files in rows for name in names}


def own_names() -> set[str]:
    """The names that the sources define."""
    found = set()
    for node in (node for tree in trees().values() for node in ast.walk(tree)):
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
                base = node.value
                while isinstance(base, ast.Attribute):
                    base = base.value
                known = bound.get(base.id) if isinstance(base, ast.Name) else None
                if known is None:
                    name = None if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else node.attr
                elif id(node) not in inner and private_part(known) is None:
                    yield private_part(f"{known}.{ast.unparse(node).partition('.')[2]}")
            case ast.Constant(value=str(name)):
                yield private_part(name) if re.fullmatch(r"torch(\.\w+)+", name) else None
            case ast.keyword(arg=str(keyword)) if PRIVATE.fullmatch(keyword) and keyword not in own:
                yield f"{keyword}="
        if name and PRIVATE.fullmatch(name) and name not in OTHERS and (f".{name}" in listed or name not in own):
            yield f".{name}"


def test_the_table_has_each_private_name_of_torch_with_its_files_and_no_other() -> None:
    own, listed = own_names(), table()
    used = defaultdict(set)
    for file, tree in trees().items():
        for name in filter(None, private_names(tree, own, listed)):
            used[name].add(file)
    assert listed == used


def texts() -> Iterator[tuple[str, str]]:
    """Where each error is made, and its text with {} for values."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id=name), args=[ast.JoinedStr() | ast.Constant() as text, *_]):
                    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                    said = (part.value if isinstance(part, ast.Constant) else "{}" for part in parts)
                    if name in CLASSES:
                        yield f"{file}:{node.lineno}", "".join(map(str, said))


def test_every_error_has_a_value_and_then_what_to_do() -> None:
    found = list(texts())
    assert len(found) > 500
    assert [one for one in found if one[1].rstrip().endswith(".")] == []
    assert [one for one in found if one[1][:1].isupper() and not one[1].startswith(PROPER)] == []
    alone = [one for one in found if not {";", ":"} & set(one[1]) and ". " not in one[1]]
    assert [one for one in alone if not one[1].startswith(COMPLETED)] == []


def test_messages_name_what_users_import_by_its_shortest_name() -> None:
    longer = re.compile(r"\b(?:tierbed\.)?(?:engine|embedding|graph|snapshots)\.(\w+)")
    found = [
        f"{file}:{node.lineno}: {match.group()}"
        for file, tree in trees().items()
        for error in ast.walk(tree)
        if isinstance(error, ast.Raise)
        for node in ast.walk(error)
        if isinstance(node, ast.Constant)
        for match in longer.finditer(str(node.value))
        if match.group(1) in dir(tierbed)
    ]
    assert not found
