"""Wall time and virtual time behind one interface: seconds since the clock was made.

With the virtual clock a simulated backend advances time by what a step would take, so that the same engine replays
hours of traffic in seconds.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the start of the run."""

    def now(self) -> float:
        """Seconds since the start."""

    def wait_until(self, at_s: float) -> None:
        """Return at `at_s`, or at once where that has passed."""

    def restart(self) -> None:
        """Let time zero be now."""


class WallClock:
    """Real time (perf_counter), from the moment the clock is made or restarted."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def wait_until(self, at_s: float) -> None:
        """Sleep until `at_s`."""
        time.sleep(max(0.0, at_s - self.now()))

    def restart(self) -> None:
        """Let time zero be now."""
        self._start = time.perf_counter()


class VirtualClock:
    """Time that moves only when it is told to."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    def wait_until(self, at_s: float) -> None:
        """Jump to `at_s`."""
        self._now = max(self._now, at_s)

    def restart(self) -> None:
        """Let time zero be now."""
        self._now = 0.0

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self._now += seconds
