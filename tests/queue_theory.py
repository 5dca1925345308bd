"""M/M/1 waiting times without the engine: Lindley's recursion, and how many customers a mean needs."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_CHUNK = 1_000_000


def lindley(gaps: Floats, services: Floats, first_wait: float = 0.0) -> Floats:
    """The waits of customers: W(n+1) = max(0, W(n) + S(n) - A(n+1)) (Lindley 1952), as a running minimum.

    `gaps[n]` lies before customer n; the first gap does not matter.
    """
    walk = np.concatenate([[0.0], np.cumsum(services[:-1] - gaps[1:])])
    return walk - np.minimum(np.minimum.accumulate(walk), -first_wait)


def mean_wait(rng: np.random.Generator, rho: float, n: int) -> float:
    """The mean wait of `n` customers with service of mean 1, in chunks."""
    total, wait, service, left = 0.0, 0.0, 0.0, n
    while left:
        size = min(left, _CHUNK)
        gaps, services = rng.exponential(1.0, (2, size))
        gaps /= rho
        first = max(0.0, wait + service - gaps[0]) if left < n else 0.0
        waits = lindley(gaps, services, first)
        total += float(waits.sum())
        wait, service, left = float(waits[-1]), float(services[-1]), left - size
    return total / n


def asymptotic_variance(rho: float) -> float:
    """n times the variance of the mean wait of n customers, service 1 (Daley 1968; Whitt 1989, Planning queueing
    simulations): the waits of neighbours are alike, the more the higher the load.
    """
    return rho * (2 + 5 * rho - 4 * rho**2 + rho**3) / (1 - rho) ** 4


def needed_customers(rho: float, *, relative_error: float, standard_errors: float) -> int:
    """So many that `standard_errors` standard errors of the mean wait are `relative_error` of it."""
    mean = rho / (1 - rho)
    return math.ceil(asymptotic_variance(rho) * (standard_errors / (relative_error * mean)) ** 2)
