"""How long work reports itself. The library calls; cli draws on stderr; a worker sends it to its parent."""

from __future__ import annotations

from collections.abc import Callable

# (what is being done, units done, units in all). A stage ends when another begins.
Progress = Callable[[str, float, float], None]


def silent(stage: str, done: float, total: float) -> None:
    """Report to nobody."""
