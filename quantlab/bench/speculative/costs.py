"""What a draft and a verify cost, from the steps that ran: seconds against tokens of each sequence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from quantlab.core.statistics import median
from quantlab.engine.speculative import StepTimes

# Fewer steps of one shape are no time.
_LEAST_STEPS = 3


class TimesByTokens:
    """Times of steps by the tokens that each sequence had in them, on average; `from_zero`: no tokens take no time."""

    def __init__(self, *, from_zero: bool = False) -> None:
        self._from_zero = from_zero
        self._times: dict[float, list[float]] = defaultdict(list)

    def add(self, tokens: float, seconds: float) -> None:
        """One step."""
        self._times[round(tokens, 2)].append(seconds)

    def __bool__(self) -> bool:
        """Whether any step ran."""
        return bool(self._times)

    def seconds(self, tokens: float) -> float:
        """The median of such steps, linear between the lengths that ran; the nearest beyond them.

        Raises ValueError where no step ran.
        """
        often = {n: times for n, times in self._times.items() if len(times) >= _LEAST_STEPS} or self._times
        known = [(n, median(often[n])) for n in sorted(often)]
        if self._from_zero:
            known.insert(0, (0.0, 0.0))
        if not known:
            raise ValueError("no step ran")
        return float(np.interp(tokens, [n for n, _ in known], [seconds for _, seconds in known]))


class Costs(NamedTuple):
    """Of one batch size: times of its drafts by their longest, and of its verifies by the tokens in them."""

    batch: int
    drafts: TimesByTokens
    verifies: TimesByTokens

    @property
    def known(self) -> bool:
        """Whether a step of all sequences ran: none does where one of each group ends at its first token."""
        return bool(self.verifies)

    def draft_s(self, k: float) -> float:
        """Seconds of a draft of `k` tokens; none take none."""
        return self.drafts.seconds(k) if k and self.drafts else 0.0

    def verify_s(self, k: float) -> float:
        """Seconds of a verify of `k` draft tokens."""
        return self.verifies.seconds(1 + k)

    def c(self, k: float) -> float:
        """A token of a draft of `k` in plain steps; 0 where nothing is drafted."""
        return self.draft_s(k) / k / self.verify_s(0) if k else 0.0

    def v(self, k: float) -> float:
        """A verify of `k` draft tokens in plain steps."""
        return self.verify_s(k) / self.verify_s(0)

    def steps(self, k: float) -> float:
        """A round of `k` draft tokens in plain steps."""
        return (self.draft_s(k) + self.verify_s(k)) / self.verify_s(0)

    def of_step(self, step: StepTimes) -> float:
        """What a step of sequences with drafts of several lengths takes, in plain steps: the longest is waited for."""
        verify_s = self.verifies.seconds(step.rows / step.sequences)
        return (self.draft_s(step.longest_draft) + verify_s) / self.verify_s(0)


def costs_of(batch: int, plain: Iterable[StepTimes], drafted: Iterable[StepTimes], *, chained: bool) -> Costs:
    """The costs of a batch size from its steps of plain decoding and those with drafts; others are passed over.

    `chained` drafts are made token after token: below the shortest that ran, time is in proportion to the tokens. Any
    other is made at once, and a shorter one takes as long.
    """
    costs = Costs(batch, TimesByTokens(from_zero=chained), TimesByTokens())
    for steps, drafts in ((plain, False), (drafted, True)):
        for step in steps:
            if step.sequences != batch:
                continue
            costs.verifies.add(step.rows / step.sequences, step.verify_s)
            if drafts and step.longest_draft:
                costs.drafts.add(step.longest_draft, step.draft_s)
    return costs
