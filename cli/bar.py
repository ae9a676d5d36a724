"""The progress bar."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text


class Bar:
    """Rows done, of `rows` where that is known, their rate and the time left, on stderr; gone when it is closed."""

    def __init__(self, title: str, rows: int | None, done: int) -> None:
        count = "{task.completed:,.0f}" + ("" if rows is None else " of {task.total:,.0f}") + " rows"
        left = TimeElapsedColumn() if rows is None else TimeRemainingColumn(compact=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(count), _Rate(), left)
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(title, total=rows, completed=done)
        self._progress.start()

    def show(self, done: int) -> None:
        """Show how many rows are done so far."""
        self._progress.update(self._task, completed=done)

    def close(self) -> None:
        """Take the bar off the terminal."""
        self._progress.stop()


class _Rate(ProgressColumn):
    """Rows a second, of late."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f}/s" if task.speed else "")
