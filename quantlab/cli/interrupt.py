"""What asks a command to end (Ctrl-C, SIGTERM, a closed terminal) ends it in order: it says what is kept."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from quantlab.cli.console import warn

# Beside SIGINT, which Python turns into a KeyboardInterrupt already.
_OTHERS = (signal.SIGTERM, signal.SIGHUP)


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

    before = [number for number in _OTHERS if signal.getsignal(number) == signal.SIG_DFL]
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
            signal.signal(number, signal.SIG_DFL)
