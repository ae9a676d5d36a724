"""A C program without Python or torch looks up the same rows, and follows the publisher."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from support.embeddings import make, train
from support.served_rows import snapshot_of
from support.stores import options
from tierbed.engine import _core
from tierbed.serving import open_served, publish

IDS = [1, 2, 3, -1, 50, 7]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`lookup.c`, compiled with the library that is installed with the package."""
    library = Path(_core.__file__).parent.parent / "serving"
    path = tmp_path_factory.mktemp("program") / "lookup"
    source = Path(__file__).with_name("lookup.c")
    link = [f"-I{library}", f"-L{library}", f"-Wl,-rpath,{library}", "-ltierbed_serving"]
    subprocess.run(["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", source, "-o", path, *link], check=True)
    return path


def run(program: Path, folder: Path, name: str, input: str = "") -> list[str]:
    done = subprocess.run([program, folder, name, *map(str, IDS)], input=input, capture_output=True, text=True)
    return done.stdout.splitlines()


def expected(folder: Path) -> str:
    with open_served(folder) as served:
        offsets = torch.tensor([0, 3, 6])
        rows = served["rows"](torch.tensor(IDS), torch.tensor([0, 1]), offsets=offsets, pooling="sum")
        bits = rows.flatten().view(torch.int32).tolist()
        return f"{served.version} {rows.shape[1]} " + " ".join(f"{number % 2**32:08x}" for number in bits)


def test_a_c_program_looks_up_rows_and_refreshes(tmp_path: Path, program: Path) -> None:
    served = tmp_path / "served"
    with make(options("device", tmp_path), "adagrad", tables=2) as embedding:
        train(embedding, range(8))
        embedding.save_snapshot("s0", "full")
        publish(served, snapshot_of(embedding, tmp_path, "s0"), tensors={'"}]': torch.ones(1)})
        line = expected(served)
        assert run(program, served, "rows", "\n") == [line, "a table id is out of range", line]
        arguments = [str(program), str(served), "rows", *map(str, IDS)]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin
            assert process.stdout
            assert process.stdout.readline().strip() == line
            process.stdout.readline()
            train(embedding, range(3))
            embedding.save_snapshot("s1", "incremental")
            version = publish(served, snapshot_of(embedding, tmp_path, "s1"), tensors={})
            assert version.embeddings[0].tables[0].delta
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline().strip() == expected(served) != line
            current = (served / "CURRENT").read_bytes()
            for damaged, problem in (
                (current[:-3], "is damaged, its checksum does not match"),
                (b"", "publish a version first"),
                (current.replace(b"2", b"3"), "is damaged, its checksum does not match"),
            ):
                (served / "CURRENT").write_bytes(damaged)
                process.stdin.write("\n")
                process.stdin.flush()
                assert problem in process.stdout.readline()
            (served / "CURRENT").write_bytes(current)
    assert run(program, served, "items") == [f"{served} has no embedding items"]
    assert "cannot read" in run(program, tmp_path, "rows")[0]
