"""What goes to the terminal: data to stdout, progress and warnings to stderr, nothing that could drive a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quantlab.core.errors import QuantlabError
from quantlab.core.progress import Progress
from quantlab.core.text import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from quantlab.core.result import Notice

_LINE_EVERY_S = 15.0


def say(text: str = "") -> None:
    """Print one line of data to stdout."""
    print(printable(text))


def warn(text: str) -> None:
    """Print one line to stderr."""
    print(printable(text), file=sys.stderr)


def print_error(error: QuantlabError) -> None:
    """Print an error and its hint."""
    warn(f"error: {error.message}")
    if error.hint:
        warn(f"hint: {error.hint}")


def print_notices(notices: Sequence[tuple[str, Notice]]) -> None:
    """Print warnings, each once, with the labels it was given for."""
    from quantlab.core.notices import folded

    for labels, notice in folded(notices):
        warn(f"warning ({', '.join(labels)}): {notice.message}")
        if notice.hint:
            warn(f"  hint: {notice.hint}")


@contextmanager
def progress_display() -> Iterator[Progress]:
    """Bars with the time left on a terminal; elsewhere a line when a stage begins and at times."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        yield _Bar(bars)


class _Bar:
    """One bar: the stage that is under way."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._stage: str | None = None
        self._task: TaskID | None = None

    def __call__(self, stage: str, done: float, total: float) -> None:
        if stage != self._stage:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._stage = stage
            self._task = self._bars.add_task(printable(stage), total=total or None)
        assert self._task is not None
        self._bars.update(self._task, completed=done, total=total or None)


class _Lines:
    """A line for each stage, and one every few seconds with the time left."""

    def __init__(self) -> None:
        self._stage: str | None = None
        self._began = self._said = 0.0

    def __call__(self, stage: str, done: float, total: float) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._said = stage, now, now
            warn(f"{stage} ...")
        elif now - self._said >= _LINE_EVERY_S and 0 < done < total:
            self._said = now
            left = (now - self._began) / done * (total - done)
            warn(f"{stage}: {done / total:.0%}, about {left:.0f} s left")
