"""What a verify costs, from the steps that ran: seconds against tokens of each sequence."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from quantlab.core.statistics import median

# Fewer steps of one shape are no time.
_LEAST_STEPS = 3


class VerifyTimes:
    """Times of steps by the tokens that each sequence had in them, on average."""

    def __init__(self) -> None:
        self._times: dict[float, list[float]] = defaultdict(list)

    def add(self, tokens: float, seconds: float) -> None:
        """One step."""
        self._times[round(tokens, 2)].append(seconds)

    def count(self, tokens: float) -> int:
        """Steps of this shape."""
        return len(self._times.get(round(tokens, 2), ()))

    def seconds(self, tokens: float) -> float:
        """The median of such steps, linear between the shapes that ran; the nearest beyond them.

        Raises ValueError where no step ran.
        """
        often = {n: times for n, times in self._times.items() if len(times) >= _LEAST_STEPS} or self._times
        if not often:
            raise ValueError("no step ran")
        known = sorted(often)
        return float(np.interp(tokens, known, [median(often[n]) for n in known]))

    def ratio(self, tokens: float) -> float:
        """In steps of one token."""
        return self.seconds(tokens) / self.seconds(1)
