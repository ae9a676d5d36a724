"""The command line tool `tierbed`. Commands import the engine only when they run, which keeps `--help` fast."""

from __future__ import annotations

import sys

try:
    from importlib.metadata import version
    from typing import Annotated

    import rich  # noqa: F401  output imports rich's modules later
    import typer

    from ..engine.errors import ServingError, TierbedError
    from . import checkpoint, compare, doctor, export_import, options, serve, snapshot, store, watch
    from .output import EXIT_IN_USE, EXIT_INTERRUPTED, EXIT_PROBLEM, check_stdout, fail, print_interrupted
except KeyboardInterrupt:  # report Ctrl-C like `main`, without more imports
    if "--json" in sys.argv:
        print('{"error": "interrupted"}')
    raise SystemExit(130) from None
except ImportError as error:
    import json

    message = f"{error}; the command line needs it: pip install --force-reinstall typer rich"
    print(f"tierbed: {message}", file=sys.stderr)
    if "--json" in sys.argv:
        print(json.dumps({"error": message}))
    raise SystemExit(1) from None

app = typer.Typer(help="Tiered embedding tables for PyTorch.", no_args_is_help=True, pretty_exceptions_enable=False)
COMMANDS = {  # maps each command group to its commands, in the order that --help shows
    "snapshot": (
        *(snapshot.save, snapshot.load, snapshot.list_, snapshot.inspect, snapshot.verify, compare.diff),
        *(export_import.export, export_import.import_, snapshot.merge, snapshot.prune, watch.watch),
    ),
    "checkpoint": (checkpoint.list_, checkpoint.inspect, checkpoint.verify, checkpoint.prune),
    "store": (store.stat, store.compact, store.get, store.detach, options.options),
    "serve": (serve.publish, serve.list_, serve.verify, serve.rollback, serve.release, serve.prune, serve.pull),
}
HELP = {
    "snapshot": "Snapshots of a store folder.",
    "checkpoint": "Checkpoints of graphs and of plain loops.",
    "store": "Rows of a store folder.",
    "serve": "Versions of a serving folder.",
}
for name, commands in COMMANDS.items():
    group = typer.Typer(help=HELP[name], no_args_is_help=True)
    app.add_typer(group, name=name)
    for command in commands:
        settings = {"ignore_unknown_options": command is store.get}  # a negative KEY must not be read as an option
        group.command(command.__name__.rstrip("_"), context_settings=settings)(command)
app.command("doctor")(doctor.doctor)


def main(arguments: list[str] | None = None) -> None:
    """Run `tierbed`. Exit codes: 0 for success, 1 for a problem, 2 for wrong usage; docs/cli.md lists all."""
    as_json = "--json" in (sys.argv if arguments is None else arguments)
    with check_stdout():
        try:
            typer.main.get_command(app)(arguments, prog_name="tierbed")
        except SystemExit as end:
            if end.code == EXIT_INTERRUPTED:
                print_interrupted(as_json)
            raise
        except KeyboardInterrupt:  # Ctrl-C came before a command started
            print_interrupted(as_json)
            raise SystemExit(EXIT_INTERRUPTED) from None
        except Exception as error:
            remedy = "; `tierbed doctor` lists what this installation lacks" if isinstance(error, ImportError) else ""
            is_file_error = isinstance(error, OSError) and error.filename is not None  # stdout's OSErrors name no file
            if not (remedy or is_file_error or isinstance(error, TierbedError)):
                raise  # any other exception is a bug in tierbed
            fail(f"{error}{remedy}", _find_exit_code(error), as_json)


def _find_exit_code(error: Exception) -> int:
    if isinstance(error, ServingError):
        from ..serving.folder import LockedError

        if isinstance(error, LockedError):
            return EXIT_IN_USE
    return EXIT_PROBLEM


def _print_version(is_set: bool) -> None:
    if is_set:
        print(f"tierbed {version('tierbed')}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")]


@app.callback()
def _root(version: Version = False) -> None:
    pass
