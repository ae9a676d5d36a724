"""What opens a database compiles for every RocksDB: it gets a `DB*` before 9.11, a `unique_ptr<DB>` from 11.0 on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from support.places import ROOT

SOURCES = [ROOT / "engine/store/native/rocksdb_tier.cpp", ROOT / "benchmarks/rocksdb_bare.cpp"]
RAW, OWNED = "DB** dbptr", "std::unique_ptr<DB>* dbptr"
KINDS = {"9.10": {"": RAW}, "10": {"[[deprecated]] ": RAW, "": OWNED}, "11": {"": OWNED}}


def installed() -> str:
    """The header of the installed RocksDB."""
    command = ["g++", "-M", "-x", "c++", "-"]
    needs = subprocess.run(command, input="#include <rocksdb/db.h>", capture_output=True, text=True, check=True).stdout
    return Path(next(word for word in needs.split() if word.endswith("/rocksdb/db.h"))).read_text()


def declared(header: str, kind: dict[str, str]) -> str:
    """The header, with the functions that open a database as another RocksDB declares them."""
    known = set()

    def declarations(match: re.Match[str]) -> str:
        lines = [f"{start}{match[0].replace(RAW, given).replace(OWNED, given)}" for start, given in kind.items()]
        new = [line for line in lines if " ".join(line.split()) not in known]  # the header may have both
        known.update(" ".join(line.split()) for line in new)
        return "\n".join(new)

    changed, count = re.subn(r"static Status Open\w*\([^;]*dbptr[^;]*;", declarations, header)
    assert count >= 4
    return changed


@pytest.mark.slow
@pytest.mark.parametrize(("version", "source"), [*((version, SOURCES[0]) for version in KINDS), ("11", SOURCES[1])])
def test_sources_compile_with_what_opens_a_database_in(version: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "rocksdb").mkdir()
    (tmp_path / "rocksdb" / "db.h").write_text(declared(installed(), KINDS[version]))
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{tmp_path}", f"-I{ROOT / 'engine'}"]
    done = subprocess.run(["g++", *flags, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_source_that_opens_a_database_is_left_out() -> None:
    files = [*ROOT.glob("engine/*/native/*"), *ROOT.glob("benchmarks/*.cpp")]
    assert sorted(path for path in files if "DB::Open" in path.read_text()) == sorted(SOURCES)
