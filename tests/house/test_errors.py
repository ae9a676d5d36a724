"""All errors of the sources have one form: what happened and the value, then what to do, without a full stop."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

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
    for folder in PACKAGE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES:
                    text = _text(node.args[0]) if node.args else None
                    if text is not None:
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def _text(node: ast.expr) -> str | None:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@pytest.fixture(scope="module")
def all_texts() -> list[tuple[str, str]]:
    return list(texts())


def test_no_error_begins_or_ends_as_a_sentence_does(all_texts: list[tuple[str, str]]) -> None:
    assert len(all_texts) > 500
    assert [one for one in all_texts if one[1].rstrip().endswith(".")] == []
    assert [one for one in all_texts if one[1][:1].isupper() and not one[1].startswith(PROPER)] == []


def test_every_error_has_a_value_and_then_what_to_do(all_texts: list[tuple[str, str]]) -> None:
    alone = [one for one in all_texts if not {";", ":"} & set(one[1]) and ". " not in one[1]]
    assert [one for one in alone if not one[1].startswith(COMPLETED)] == []
