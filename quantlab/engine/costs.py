"""What the policies predict with: step times and the cost of swapping, known or measured while the engine runs."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from quantlab.core.errors import UsageError
from quantlab.runtime.step_model import Fit, MeasuredStep, StepModel, StepShape, StepTime, chunk_pairs, fit

# Steps remembered of each kind (with prefill, decode only), and new ones before the model is fitted again.
_WINDOW = 256
_REFIT_EVERY = 64
# Fewer than these predict nothing.
_LEAST_STEPS = 8
# The last steps, which tell how the device does now, long before a fit forgets how it did.
_RECENT = 16


class Costs(Protocol):
    """Predictions; None where nothing is known yet."""

    def steps(self) -> StepTime | None:
        """The step times."""

    def swap_s(self, n_tokens: int) -> float | None:
        """Moving the KV of `n_tokens` out of the device, and later back."""


def recompute_s(costs: Costs, n_tokens: int, start: int = 0) -> float | None:
    """Computing the KV of `n_tokens` from position `start` on again: what they add to steps that run anyway."""
    steps = costs.steps()
    if steps is None:
        return None
    with_them = steps.seconds(StepShape(n_tokens, chunk_pairs(start, n_tokens), 0, 0, groups=2))
    return with_them - steps.seconds(StepShape(0, 0, 0, 0))


class KnownCosts:
    """The costs of a simulation."""

    def __init__(self, step_time: StepTime, swap_token_s: float = 0.0) -> None:
        if swap_token_s < 0:
            raise UsageError(f"swapping a token in {swap_token_s} s", "give seconds from 0 on")
        self._steps, self._swap_token_s = step_time, swap_token_s

    def steps(self) -> StepTime | None:
        """See `Costs`."""
        return self._steps

    def swap_s(self, n_tokens: int) -> float | None:
        """See `Costs`."""
        return 2 * self._swap_token_s * n_tokens


class MeasuredCosts:
    """Costs learnt from the steps and swaps that ran.

    The last steps with prefill and the last without are kept apart, so that a long quiet stretch of decoding does
    not forget what prefill costs. What is predicted is what was fitted times the slowdown of the last few steps:
    another process that takes the CPU slows every kind of step at once.
    """

    def __init__(self) -> None:
        # What `fit` needs, before the first request: importing it in mid-run would delay whoever waits, 0.2 s.
        import scipy.optimize  # noqa: F401

        self._prefill: deque[MeasuredStep] = deque(maxlen=_WINDOW)
        self._decode: deque[MeasuredStep] = deque(maxlen=_WINDOW)
        self._swaps: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._recent: deque[MeasuredStep] = deque(maxlen=_RECENT)
        self._fit: Fit | None = None
        self._new = 0

    def observe_step(self, step: MeasuredStep) -> None:
        """A step ran; one that took no time teaches nothing."""
        if step.duration_s <= 0:
            return
        (self._prefill if step.shape.prefill_tokens else self._decode).append(step)
        self._recent.append(step)
        self._new += 1

    def observe_swap(self, n_tokens: int, seconds: float) -> None:
        """The KV of a sequence was moved, in or out."""
        self._swaps.append((n_tokens, seconds))

    def fit(self) -> Fit | None:
        """The step model of the last steps."""
        seen = len(self._prefill) + len(self._decode)
        due = _LEAST_STEPS if self._fit is None else _REFIT_EVERY
        if self._new >= due and seen >= _LEAST_STEPS:
            self._new = 0
            self._fit = fit([*self._prefill, *self._decode])
        return self._fit

    def steps(self) -> StepTime | None:
        """See `Costs`."""
        fitted = self.fit()
        return fitted.model.slower(self._slowdown(fitted.model)) if fitted else None

    def _slowdown(self, model: StepModel) -> float:
        """The last steps' time over what the model has for them."""
        measured = sum(step.duration_s for step in self._recent)
        predicted = sum(model.seconds(step.shape) for step in self._recent)
        return measured / predicted if predicted > 0 else 1.0

    def swap_s(self, n_tokens: int) -> float | None:
        """See `Costs`."""
        if not self._swaps:
            return None
        moved = sum(n for n, _ in self._swaps)
        return 2 * n_tokens * sum(seconds for _, seconds in self._swaps) / max(moved, 1)
