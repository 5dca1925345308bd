"""Arrival times of open-loop load: they are drawn before the run and never wait for a completion.

The gaps are gamma distributed with the shape `burstiness`, as in vLLM's bench: 1 is a Poisson process, less is
bursty, infinity is a constant gap. Their coefficient of variation is 1 / sqrt(burstiness).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from quantlab.core.errors import UsageError


def arrival_times(rate_per_s: float, count: int, *, burstiness: float = 1.0, seed: int) -> npt.NDArray[np.float64]:
    """`count` ascending times in seconds; the first one is a gap after 0, so that n of them take n / rate on average.

    An infinite rate is a batch: all at 0. Raises UsageError for a rate or burstiness that is not positive.
    """
    for name, value in (("rate", rate_per_s), ("burstiness", burstiness), ("number of requests", count)):
        if not value > 0:
            raise UsageError(f"a {name} of {value}", "give a number above zero")
    if math.isinf(rate_per_s):
        return np.zeros(count)
    gaps: npt.NDArray[np.float64] = np.ones(count)
    if not math.isinf(burstiness):
        # The mean of a gamma distribution of scale 1 is its shape.
        gaps = np.random.default_rng(seed).gamma(burstiness, 1.0, count) / burstiness
    with np.errstate(over="ignore"):
        times = np.cumsum(gaps) / rate_per_s
    if not np.isfinite(times[-1]):
        raise UsageError(f"{count} requests at a rate of {rate_per_s} need for ever", "give a higher rate")
    return times
