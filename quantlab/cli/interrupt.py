"""What asks a command to end (Ctrl-C, SIGTERM, a closed terminal) ends it in order: it says what is kept."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

from quantlab.cli.console import warn

# What they do where nobody has set anything else.
_DEFAULTS: dict[signal.Signals, Callable[[int, FrameType | None], Any] | signal.Handlers] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


@contextmanager
def ending_in_order(said: str) -> Iterator[None]:
    """Let these signals leave the block as KeyboardInterrupt; then say `said` and the notes of what was interrupted.

    The exit code is the one that a shell expects of the signal: 130, 143, 129. What ignores it (nohup) goes on to.
    """
    received = signal.SIGINT

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = signal.Signals(number)
        # `timeout` sends it twice; the second one would cut short what the first one began, up to the exit code.
        while before:
            signal.signal(before.pop(), signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [number for number, default in _DEFAULTS.items() if signal.getsignal(number) == default]
    try:
        for number in before:
            signal.signal(number, end)
        yield
    except KeyboardInterrupt as interrupt:
        warn(said)
        # Of work that left something to be continued.
        for note in getattr(interrupt, "__notes__", []):
            warn(note)
        raise typer.Exit(128 + received) from None
    finally:
        for number in before:
            signal.signal(number, _DEFAULTS[number])
