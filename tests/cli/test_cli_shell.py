"""The command line as a shell has it: help, completion, progress, Ctrl-C, closed pipes, watching."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command

from support import shell
from support.places import DOCS
from support.refusals import check_refusal
from support.scripts import run_python
from support.shell import Cli
from support.small_snapshots import save
from tierbed import MetricsCollector, OptionError, prometheus_text
from tierbed.cli import COMMANDS as GROUPS
from tierbed.cli import app, output
from tierbed.cli.watch import find_changes, poll
from tierbed.snapshots.store.folder import StoreFolder

COMMAND = str(Path(sys.executable).with_name("tierbed"))
COMMANDS = [f"{group} {one.__name__.rstrip('_')}" for group, commands in GROUPS.items() for one in commands] + [
    "doctor"
]


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """On a store with snapshots "a", "an-old-one" and "b"."""
    for name in ("a", "an-old-one", "b"):
        save(tmp_path / "users" / "snapshots" / name)
    return Cli(tmp_path / "users", capsys)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_json(command: str) -> None:
    found: Any = get_command(app)
    for word in command.split():
        found = found.commands[word]
    assert f"Example: tierbed {command} " in found.help
    assert any("--json" in parameter.opts for parameter in found.params)


def test_help_of_load_says_that_all_rows_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.command("snapshot", "load", "--help") == 0
    out = " ".join(re.sub("[│|]", " ", capsys.readouterr().out).split())
    assert "All live rows are replaced, so other tables' rows are lost" in out


def test_the_page_of_the_command_line_lists_every_command() -> None:
    page = (DOCS / "cli.md").read_text()
    assert sorted(re.findall(r"^    tierbed ((?:(?:snapshot|checkpoint|store|serve) )?\w+) ", page, re.M)) == sorted(
        COMMANDS
    )


def test_shells_complete_the_names_of_snapshots(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_TIERBED_COMPLETE", "complete_bash")
    for typed, names in {
        "snapshot load {} a": ["a", "an-old-one"],
        "snapshot verify {} b an": ["an-old-one"],
        "snapshot diff {} a b": ["b"],
        "store get {} 5 --snapshot a": ["a", "an-old-one"],
        "snapshot load {}/nowhere a": [],
        "snapshot load " + "a" * 300 + " a": [],
        "snapshot p": ["prune"],
    }.items():
        words = f"tierbed {typed}".format(cli.store)
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        assert (shell.command(), capsys.readouterr().out.split()) == (0, names)


def test_help_and_completion_import_no_more_than_they_need_and_snapshots_no_command_line() -> None:
    script = """
import sys, tierbed.snapshots
before = {*sys.modules}
import tierbed.cli
print(before & {"typer", "tierbed.cli"}, sys.modules.keys() & {"torch", "rich.progress"})
"""
    assert run_python(script) == "set() set()\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("terminal", "after"), [(True, 0.0), (False, 0.0), (True, 60.0)])
def test_a_bar_is_shown_on_a_terminal_of_what_takes_a_while(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, after: float
) -> None:
    stream, shown = Terminal() if terminal else io.StringIO(), terminal and after == 0
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(output, "BAR_DELAY", after)
    monkeypatch.setattr(sys, "stderr", stream)
    with output.show_progress("saving", 4000) as advance:
        for _ in range(4):
            advance(1000)
            time.sleep(0.15 * shown)
    text = stream.getvalue()
    assert [part in text for part in ("saving", "4,000 of 4,000 rows", "/s")] == [shown] * 3
    assert shown or text == ""


def test_sizes_spans_values_and_columns_read_well() -> None:
    sizes = {0: "0 B", 999: "999 B", 1000: "1 kB", 12_345: "12.3 kB", 999_999: "1 MB", 136_400_000: "136 MB"}
    assert [output.format_size(number) for number in (*sizes, 5 * 10**12)] == [*sizes.values(), "5 TB"]
    spans = {0: "0.0 s", 0.26: "0.3 s", 42: "42 s", 600: "10 min", 7200: "2 h", 260_000: "3 d"}
    assert [output.format_seconds(seconds) for seconds in spans] == [*spans.values()]
    assert output.format_value({"a": None, "b": [1, 0.1]}) == '{"a": null, "b": [1, 0.1]}'
    assert output.format_value({"min": 1, "max": 0.25}) == "min: 1, max: 0.25"
    assert output.format_value([]) == ""
    lines = output.align([["表", "1"], ["ab", "22"], ["\x1b[2J", "3"]], right_columns={1})
    assert len({Console().measure(line).maximum for line in lines}) == 1
    assert "\x1b" not in "".join(lines)


def test_ctrl_c_ends_with_130_and_its_document_and_leaves_no_half_snapshot(cli: Cli) -> None:
    save(cli.store / "snapshots" / "large", dict.fromkeys(range(64), 1500))
    cli.json("load", "large")
    before = sorted(cli.store.iterdir())
    snapshots = cli.store / "snapshots"
    kept = set(snapshots.iterdir())
    for command, name, place, more in (
        ("save", "new", snapshots / ".tmp-new", []),
        ("load", "large", cli.store / ".tmp-incoming", ["--json"]),
    ):
        arguments = [COMMAND, "snapshot", command, str(cli.store), name, *more]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and not place.exists():
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
        assert (process.returncode, err) == (130, "")
        assert (json.loads(out) if more else out) == ({"error": "interrupted"} if more else "")
        assert sorted(cli.store.iterdir()) == before
        assert set(snapshots.iterdir()) == kept
    cli.json("save", "again")


@pytest.mark.parametrize(("module", "more"), [("typer", ["--json"]), ("tierbed.cli.watch", [])], ids=["json", "text"])
def test_ctrl_c_while_the_command_is_imported_gives_no_traceback(module: str, more: list[str]) -> None:
    script = f"""
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from tierbed.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script, "doctor", *more], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")
    assert (json.loads(done.stdout) if more else done.stdout) == ({"error": "interrupted"} if more else "")


def test_a_closed_pipe_gives_no_traceback(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert shell.command("snapshot", "inspect", cli.store, "a", "--rows", "30") == 1
    assert capsys.readouterr().err == ""


def test_a_letter_that_the_encoding_of_the_terminal_lacks_is_an_escape(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(cli.store / "snapshots" / "für-表")
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "ascii"))
    assert shell.command("snapshot", "list", cli.store) == 0
    assert rb"f\xfcr-\u8868" in printed.getvalue()


def test_a_full_disk_under_stdout_is_an_error_in_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "tierbed: stdout: No space left on device\n"
    with open("/dev/full", "w") as full:
        line = [COMMAND, "snapshot", "list", str(cli.store / "typo"), "--json"]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert re.fullmatch(rf"tierbed: .*is not a store folder.*\n{said}", done.stderr), done.stderr
    with open("/dev/full", "w", buffering=1) as full, monkeypatch.context() as patch:  # which fails amid the lines
        patch.setattr(sys, "stdout", full)
        assert shell.command("snapshot", "list", cli.store, "--json") == 1
    assert capsys.readouterr().err == said


def test_watch_tells_what_changed_between_two_looks(cli: Cli) -> None:
    first = poll(cli.store)
    events = list(find_changes(None, first))
    assert [event["event"] for event in events] == ["store", "saved", "saved", "saved"]
    assert [event.get("name") for event in events[1:]] == ["a", "an-old-one", "b"]
    assert list(find_changes(first, poll(cli.store))) == []
    with StoreFolder(cli.store) as store:
        store.store_step(7)
        second = poll(cli.store)
        assert [*find_changes(first, second)] == [{"event": "store", "state": "open", "holder": os.getpid(), "step": 7}]
    (cli.store / "snapshots" / "a").rename(cli.store / "gone")
    (cli.store / "snapshots" / "b" / "manifest.msgpack").write_bytes(b"")
    save(cli.store / "snapshots" / "c")
    found = {event["event"]: event for event in find_changes(second, poll(cli.store))}
    assert found.keys() == {"store", "removed", "saved", "damaged"}
    assert (found["removed"]["name"], found["saved"]["name"], found["damaged"]["name"]) == ("a", "c", "b")


def test_watch_prints_a_line_a_change_until_ctrl_c(cli: Cli) -> None:
    command = [COMMAND, "snapshot", "watch", str(cli.store), "--interval", "0.05", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [json.loads(process.stdout.readline()) for _ in range(4)]
    assert [line["event"] for line in lines] == ["store", "saved", "saved", "saved"]
    save(cli.store / "snapshots" / "c", step=99)
    line = json.loads(process.stdout.readline())
    assert (line["event"], line["name"], line["step"]) == ("saved", "c", 99)
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "")
    assert process.returncode == 0


def test_doctor_tells_what_is_there_and_how_to_get_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.command("doctor", tmp_path / "not" / "there", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in found["checks"]}
    assert found["works"]
    assert checks.keys() >= {"tierbed", "python", "torch", "numpy", "core", "rocksdb", "parquet", "plot", "metrics"}
    assert checks.keys() >= {"open files", "free space", "fsync", "rename", "locks", "hard links", "sockets"}
    assert all(check["ok"] or check["remedy"] for check in checks.values())
    assert checks["folder"]["value"].endswith(f"does not exist yet, so {tmp_path} was checked")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    shell.command("doctor", tmp_path / "file")
    assert f"{tmp_path / 'file'} is not a folder" in capsys.readouterr().out
    shell.command("doctor")
    lines = [line for line in capsys.readouterr().out.splitlines() if "->" not in line]
    assert {line.split()[0] for line in lines} <= {"ok", "optional", "missing"}
    assert "torch" in {line.split()[1] for line in lines}


def without(folder: Path, package: str, error: str, *command: str) -> subprocess.CompletedProcess[str]:
    """A command where the import of `package` raises an error, and those of the packages before it."""
    (folder / f"{package}.py").write_text(f"raise {error}")
    environment = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr or command[0] == sys.executable
    return done


def test_where_a_package_is_missing_doctor_names_it_and_all_else_says_so(tmp_path: Path) -> None:
    doctor, missing = (COMMAND, "doctor", "--json"), "ModuleNotFoundError({!r})"
    line = COMMAND, "snapshot", "import", str(tmp_path / "store"), "one", str(tmp_path / "rows.npz")  # by torch
    assert "tierbed doctor" in without(tmp_path, "torch", "ImportError('libtorch is of another world')", *line).stderr
    lacks = missing.format("No module named 'lazy_loader'")
    done = without(tmp_path, "lazy_loader", lacks, *doctor)
    found = json.loads(done.stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert (done.stderr, found["works"], checks["torch"]["ok"]) == ("", False, False)
    assert "of another world" in checks["torch"]["value"]
    assert "lazy_loader" in checks["lazy-loader"]["value"]
    assert checks["lazy-loader"]["remedy"].endswith("pip install --force-reinstall lazy-loader")
    (tmp_path / "torch.py").unlink()
    done = without(tmp_path, "lazy_loader", lacks, sys.executable, "-c", "from tierbed import Graph")
    assert "ImportError: tierbed needs the package lazy-loader" in done.stderr
    assert "pip install --force-reinstall lazy-loader" in done.stderr
    for package in ("typer", "rich"):
        done = without(tmp_path, package, missing.format(f"No module named {package!r}"), *doctor)
        assert done.stderr.startswith(f"tierbed: No module named '{package}'; the command line needs it: pip install")
        assert json.loads(done.stdout)["error"] in done.stderr
        (tmp_path / f"{package}.py").unlink()


def test_a_command_that_needs_an_extra_names_it(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.parquet").touch()
    for package, extra, line in (
        ("matplotlib.figure", "plot", "inspect a --plot a.png"),
        ("pyarrow", "parquet", "export a new.parquet"),
        ("pyarrow", "parquet", "import new a.parquet"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        assert f"pip install 'tierbed[{extra}]'" in cli.fails(*line.split())


@pytest.mark.parametrize("gives", [prometheus_text, MetricsCollector])
def test_what_gives_metrics_names_its_extra(gives: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in {"prometheus_client", *(name for name in sys.modules if name.startswith("prometheus_client."))}:
        monkeypatch.setitem(sys.modules, module, None)
    check_refusal((gives, OptionError, "prometheus_client", "pip install 'tierbed[metrics]'"))
