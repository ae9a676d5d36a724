"""The command line in this process: exit codes, stdout, stderr, JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tierbed.cli import main


class Cli:
    """Runs `tierbed GROUP COMMAND STORE ...` on one store."""

    def __init__(self, store: Path, capsys: pytest.CaptureFixture[str], group: str = "snapshot") -> None:
        self.store = store
        self.group = group
        self._capsys = capsys

    def run(self, command: str, *arguments: str) -> tuple[int, str, str]:
        group, _, name = command.rpartition(" ")
        with pytest.raises(SystemExit) as exit:
            main([group or self.group, name, str(self.store), *arguments])
        out, err = self._capsys.readouterr()
        return int(exit.value.code or 0), out, err

    def json(self, command: str, *arguments: str, code: int = 0) -> Any:
        """The document of a run that ends with a code, by default that of no problem."""
        found, out, err = self.run(command, *arguments, "--json")
        assert found == code, err
        assert (err == "") == (code == 0)
        return json.loads(out)

    def says(self, command: str, *arguments: str, code: int = 0) -> str:
        """What a run prints that ends with a code, with nothing on stderr."""
        found, out, err = self.run(command, *arguments)
        assert (found, err) == (code, "")
        return out

    def fails(self, command: str, *arguments: str, code: int = 1) -> str:
        """The message of a run that finds a problem and prints no result."""
        found, out, err = self.run(command, *arguments)
        assert (found, out) == (code, "")
        assert err.startswith("tierbed: ")
        assert err.count("\n") == 1
        return err


def command(*arguments: str | Path) -> int:
    try:
        main([*map(str, arguments)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0
