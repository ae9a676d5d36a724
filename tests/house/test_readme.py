"""The README is short, its example does what the page says, and links of all pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.places import ROOT
from support.scripts import run_script
from tierbed.cli import app

README = (ROOT / "README.md").read_text()
(EXAMPLE,) = (  # a third of the page's steps
    code.replace("1000", "300").replace("% 100", "% 50") for code in re.findall(r"```python\n(.*?)```", README, re.S)
)


def test_the_example_learns_and_one_that_was_killed_ends_with_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = run_script(EXAMPLE, cwd=tmp_path / "whole", whole=True)
    assert whole.returncode == 0, whole.stderr
    printed = whole.stdout.splitlines()
    assert [line.split()[0] for line in printed] == ["50", "100", "150", "200", "250", "300"]
    assert float(printed[-1].split()[1]) < 0.1
    kill = EXAMPLE.replace(
        "ids = torch.randint", "if step == 220:\n        os.kill(os.getpid(), 9)\n    ids = torch.randint"
    )
    killed = run_script("import os\n" + kill, cwd=tmp_path / "killed", whole=True)
    assert killed.returncode == -9
    again = run_script(EXAMPLE, cwd=tmp_path / "killed", whole=True)
    assert again.returncode == 0, again.stderr
    assert 0 < len(again.stdout.splitlines()) < 4
    assert whole.stdout.endswith(again.stdout)
    (command,) = re.findall(r"`tierbed (checkpoint inspect .*?)`", README)
    monkeypatch.chdir(tmp_path / "killed")
    shown = CliRunner().invoke(app, command.split())
    assert shown.exit_code == 0, shown.output
    assert "clicks" in shown.output


def test_the_page_is_short() -> None:
    assert README.count("\n") <= 120


def test_links_lead_to_files_and_headings() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target, heading in re.findall(r"\]\(([^)#:]+)(?:#([^)]+))?\)", page.read_text()):
            other = page.parent / target
            assert other.is_file(), (page.name, target)
            headings = re.findall(r"^#+ (.*)$", other.read_text(), re.M)
            assert not heading or heading in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
