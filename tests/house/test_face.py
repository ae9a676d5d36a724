"""One import has all names, and what needs no tensors loads no torch."""

from __future__ import annotations

import ast
import pickle
import re
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path

import pytest

import tierbed
from support.embeddings import make, train
from support.places import PACKAGE, ROOT
from support.stores import options
from tierbed import errors

FACES = {
    "tierbed": ROOT / "src" / "tierbed",
    "tierbed.distributed": ROOT / "distributed",
    "tierbed.engine.optim": ROOT / "engine" / "optim",
    "tierbed.jagged": ROOT / "jagged",
    "tierbed.snapshots": ROOT / "snapshots",
    "tierbed.snapshots.exchange": ROOT / "snapshots" / "exchange",
}
HEAVY = {"torch", "cupy", "matplotlib"}
COMMANDS = f"""
import sys
from tierbed.cli import main

def run(commands):
    for arguments in commands:
        try:
            main(arguments)
        except SystemExit as end:
            assert not end.code, arguments
        assert not {HEAVY!r} & sys.modules.keys(), arguments
"""


def loaded(code: str) -> set[str]:
    """The heavy packages that a new Python has after running `code`."""
    reports = f"{code}\nimport sys\nprint('loaded:', *({HEAVY!r} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", reports], capture_output=True, text=True, check=True)
    return set(ran.stdout.rpartition("loaded:")[2].split())


def test_messages_name_what_users_import_by_its_shortest_name() -> None:
    public = set(dir(import_module("tierbed")))
    longer = re.compile(r"\b(?:tierbed\.)?(?:engine|embedding|graph|snapshots)\.(\w+)")
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {match.group()}"
        for folder in PACKAGE
        for file in sorted((ROOT / folder).rglob("*.py"))
        for error in ast.walk(ast.parse(file.read_text()))
        if isinstance(error, ast.Raise)
        for node in ast.walk(error)
        if isinstance(node, ast.Constant)
        for match in longer.finditer(str(node.value))
        if match.group(1) in public
    ]
    assert not found


@pytest.mark.parametrize("name", FACES)
def test_each_name_of_a_face_is_there_and_typed(name: str) -> None:
    module = import_module(name)
    stub = ast.parse((FACES[name] / "__init__.pyi").read_text())
    typed = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == set(module.__all__) <= set(dir(module))
    for known in sorted(module.__all__):
        assert getattr(module, known) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


def test_optim_is_a_module_to_import_from() -> None:
    from tierbed import optim
    from tierbed.engine import optim as ours

    assert import_module("tierbed.optim") is optim
    assert {name: getattr(optim, name) for name in ours.__all__} == {
        name: getattr(ours, name) for name in optim.__all__
    }


def test_one_import_has_what_the_parts_have() -> None:
    import tierbed

    for part in ("distributed", "snapshots"):
        assert set(import_module(f"tierbed.{part}").__all__) <= set(tierbed.__all__)


@pytest.mark.parametrize("name", [*FACES, "tierbed.one_embedding", "tierbed.cli"])
def test_importing_a_package_loads_no_torch(name: str) -> None:
    assert loaded(f"import {name}") == set()


def test_looking_at_snapshots_loads_no_torch(tmp_path: Path) -> None:
    with make(options("host", tmp_path), "adagrad") as rows:
        train(rows, range(5))
        rows.save_snapshot("one")
    folder = str(tmp_path / "rows")
    manifest = f"Snapshot.open({folder + '/snapshots/one'!r}).manifest"
    assert loaded(f"from tierbed.snapshots import Snapshot\nassert {manifest}.rows == 5") == set()
    every = [["snapshot", "list"], ["snapshot", "inspect", "one"], ["snapshot", "verify", "one"], ["store", "stat"]]
    given = [[group, command, folder, *names] for group, command, *names in every]
    assert loaded(f"{COMMANDS}\nrun({given!r})") == set()


def test_a_graph_loads_torch_and_no_cupy() -> None:
    assert loaded("import tierbed, tierbed.engine\ntierbed.Graph") == {"torch"}


def test_tracebacks_and_pickles_have_the_public_names_of_errors() -> None:
    for name, kind in vars(errors).items():
        if name.endswith("Error"):
            assert getattr(tierbed, name) is kind
            assert pickle.loads(pickle.dumps(kind)) is kind
            (line,) = traceback.format_exception_only(kind("why"))
            assert line == f"tierbed.{name}: why\n"
