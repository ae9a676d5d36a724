"""One import has all names, and what needs no tensors loads no torch."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
import traceback
from importlib import import_module
from pathlib import Path

import pytest

import tierbed
from support.embeddings import make, train
from support.places import ROOT
from support.scripts import run_script
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
LOADS_NO_TORCH = f"""
import sys
from importlib import import_module
from pathlib import Path

folder, commands = sys.argv[1], {{"list": [], "inspect": ["one"], "verify": ["one"]}}

def check(what):
    assert not {{"torch", "cupy", "matplotlib"}} & sys.modules.keys(), what

for name in {[*FACES, "tierbed.one_embedding", "tierbed.cli"]}:
    import_module(name)
    check(name)
from tierbed.cli import main
from tierbed.snapshots import Snapshot
assert Snapshot.open(Path(folder, "snapshots", "one")).manifest.rows == 5
for words in (["store", "stat", folder], *(["snapshot", name, folder, *more] for name, more in commands.items())):
    try:
        main(words)
    except SystemExit as end:
        assert not end.code, words
    check(words)
"""


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


def test_one_import_has_what_the_parts_have() -> None:
    for part in ("distributed", "snapshots"):
        assert set(import_module(f"tierbed.{part}").__all__) <= set(tierbed.__all__)
    from tierbed import optim
    from tierbed.engine import optim as ours

    assert import_module("tierbed.optim") is optim
    assert {name: getattr(optim, name) for name in optim.__all__} == {
        name: getattr(ours, name) for name in ours.__all__
    }


def test_imports_and_looking_at_snapshots_load_no_torch(tmp_path: Path) -> None:
    with make(options("host", tmp_path), "adagrad") as rows:
        train(rows, range(5))
        rows.save_snapshot("one")
    command = [sys.executable, "-c", LOADS_NO_TORCH, tmp_path / "rows"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def test_a_graph_loads_no_cupy() -> None:
    done = run_script("import sys, tierbed\ntierbed.Graph\nassert 'cupy' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_tracebacks_and_pickles_have_the_public_names_of_errors() -> None:
    for name, kind in vars(errors).items():
        if name.endswith("Error"):
            assert getattr(tierbed, name) is kind
            assert pickle.loads(pickle.dumps(kind)) is kind
            (line,) = traceback.format_exception_only(kind("why"))
            assert line == f"tierbed.{name}: why\n"
