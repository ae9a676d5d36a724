"""All errors of the sources have one form: what happened and the value, then what to do, without a full stop."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from support.places import PACKAGE, ROOT
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


def texts() -> Iterator[tuple[str, str]]:
    """Where each error is made, and its text with {} for values."""
    for path in (path for folder in PACKAGE for path in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES and node.args:
                text = node.args[0]
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                if isinstance(text, ast.JoinedStr | ast.Constant):
                    said = (part.value if isinstance(part, ast.Constant) else "{}" for part in parts)
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", "".join(map(str, said))


def test_every_error_has_a_value_and_then_what_to_do() -> None:
    found = list(texts())
    assert len(found) > 500
    assert [one for one in found if one[1].rstrip().endswith(".")] == []
    assert [one for one in found if one[1][:1].isupper() and not one[1].startswith(PROPER)] == []
    alone = [one for one in found if not {";", ":"} & set(one[1]) and ". " not in one[1]]
    assert [one for one in alone if not one[1].startswith(COMPLETED)] == []
