"""Statistics derived from raw samples: one definition each, with its uncertainty.

Intervals are Student-t on the mean; ratios are formed on logarithms, so that A/B and B/A agree. Samples that follow one
another in time, as the requests of a queue, are alike: `batch_means_interval` and `bootstrap_interval` allow for it.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CONFIDENCE = 0.95
# Two samples have one degree of freedom: their interval is 12.7 standard errors wide and says nothing.
FEWEST_SAMPLES = 3
_RESAMPLES = 500
# Draws beyond either limit of an interval, at least.
_IN_A_TAIL = 25
# Blocks that are drawn at once: what bounds the memory.
_AT_ONCE = 2**20


class Interval(NamedTuple):
    """An estimate and its 95% confidence limits; the limits are None where there are too few samples for them."""

    estimate: float
    low: float | None
    high: float | None

    def excludes(self, value: float) -> bool:
        """Whether the interval is known and `value` lies outside it."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


def median(samples: Sequence[float]) -> float:
    """The middle sample (mean of the two middle ones for an even count)."""
    return statistics.median(samples)


def percentile(samples: Sequence[float], percent: float) -> float:
    """The percentile by linear interpolation between closest ranks (numpy's default)."""
    if not samples:
        raise ValueError("no samples")
    if not 0 <= percent <= 100:
        raise ValueError(f"{percent} is no percentage")
    ordered = sorted(samples)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def relative_spread(samples: Sequence[float]) -> float:
    """The interquartile range as a share of the median: robust against one slow repetition."""
    return (percentile(samples, 75) - percentile(samples, 25)) / median(samples)


def mean_interval(samples: Sequence[float]) -> Interval:
    """The mean with its Student-t interval; without limits for fewer than FEWEST_SAMPLES."""
    mean = statistics.fmean(samples)
    if len(samples) < FEWEST_SAMPLES:
        return Interval(mean, None, None)
    half = _t_quantile(len(samples) - 1) * statistics.stdev(samples) / math.sqrt(len(samples))
    return Interval(mean, mean - half, mean + half)


def batch_means_interval(samples: Sequence[float], batches: int = 10) -> Interval:
    """The mean of samples in their order of time, with the Student-t interval of the means of `batches` equal parts.

    What does not divide evenly goes to the last part. Without limits for fewer than two samples a part (Conway 1963).
    """
    size = len(samples) // batches
    mean = statistics.fmean(samples)
    if size < 2:
        return Interval(mean, None, None)
    starts = [i * size for i in range(batches)] + [len(samples)]
    means = [statistics.fmean(samples[a:b]) for a, b in itertools.pairwise(starts)]
    half = _t_quantile(batches - 1) * statistics.stdev(means) / math.sqrt(batches)
    return Interval(mean, mean - half, mean + half)


def bootstrap_interval(
    samples: Sequence[float], percent: float | None = None, *, seed: int = 0, confidence: float = CONFIDENCE
) -> Interval:
    """A percentile (None: the mean) of samples in their order of time, with its bootstrap percentile interval.

    Blocks of neighbours are drawn, around the end, so that what is alike in time stays together (Politis and Romano
    1992). No limit can lie beyond the largest sample: a P99 of fewer than 300 samples has an upper one that is too low.
    Without limits for fewer than two samples.
    """
    import numpy as np

    n = len(samples)
    estimate = statistics.fmean(samples) if percent is None else percentile(samples, percent)
    if n < 2:
        return Interval(estimate, None, None)
    length = max(1, round(n ** (1 / 3)))
    rng = np.random.default_rng(seed)
    values = np.asarray(samples, np.float64)
    # A thinner tail needs more draws to be found.
    left, n_blocks, drawn = max(_RESAMPLES, round(_IN_A_TAIL / (1 - confidence))), -(-n // length), list[float]()
    while left:
        rows = min(left, max(1, _AT_ONCE // n_blocks))
        starts = rng.integers(0, n, (rows, n_blocks))
        drawn += _block_means(values, starts, length) if percent is None else [
            float(np.percentile(values[((row[:, None] + np.arange(length)) % n).ravel()[:n]], percent))
            for row in starts
        ]  # fmt: skip
        left -= rows
    tail = 50 * (1 - confidence)
    return Interval(estimate, percentile(drawn, tail), percentile(drawn, 100 - tail))


def _block_means(values: npt.NDArray[np.float64], starts: npt.NDArray[np.int64], length: int) -> list[float]:
    """The mean of each row of blocks, the last of which is cut so that a row has as many samples as `values`."""
    import numpy as np

    n = len(values)
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([values, values[:length]]))])
    last = n - (starts.shape[1] - 1) * length
    whole, cut = sums[length:] - sums[:-length], sums[last:] - sums[:-last]
    means: list[float] = ((whole[starts[:, :-1]].sum(axis=1) + cut[starts[:, -1]]) / n).tolist()
    return means


def share_interval(hits: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """A share of `n` independent trials with its exact limits (Clopper and Pearson 1934), each at `confidence`.

    With no hit in 299 trials the upper one is just below 1%.
    """
    from scipy.special import betaincinv

    low = float(betaincinv(hits, n - hits + 1, 1 - confidence)) if hits else 0.0
    high = float(betaincinv(hits + 1, n - hits, confidence)) if hits < n else 1.0
    return Interval(hits / n, low, high)


def geometric_mean_interval(samples: Sequence[float]) -> Interval:
    """The geometric mean of positive samples with its interval; two of them stand in the ratio estimated below."""
    return exp_interval(mean_interval([math.log(sample) for sample in samples]))


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """The geometric mean ratio of interleaved repetitions: pair i was taken in round i of one session."""
    if len(numerator) != len(denominator):
        raise ValueError(f"{len(numerator)} and {len(denominator)} samples are not pairs")
    return exp_interval(mean_interval([math.log(a) - math.log(b) for a, b in zip(numerator, denominator, strict=True)]))


def unpaired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """The geometric mean ratio of independent runs (Welch's interval on logarithms).

    Welch, B. L. (1947), Biometrika 34, with the Welch-Satterthwaite degrees of freedom. Without limits where one of the
    two has fewer than FEWEST_SAMPLES.
    """
    a, b = [math.log(x) for x in numerator], [math.log(x) for x in denominator]
    difference = statistics.fmean(a) - statistics.fmean(b)
    if min(len(a), len(b)) < FEWEST_SAMPLES:
        return exp_interval(Interval(difference, None, None))
    va, vb = statistics.variance(a) / len(a), statistics.variance(b) / len(b)
    half = 0.0
    if va + vb > 0:
        freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
        half = _t_quantile(freedom) * math.sqrt(va + vb)
    return exp_interval(Interval(difference, difference - half, difference + half))


def exp_interval(interval: Interval) -> Interval:
    """The interval of exp(x) from that of x: of a ratio from a difference of logarithms. Infinity past any float."""
    estimate, low, high = interval
    return Interval(_exp(estimate), None if low is None else _exp(low), None if high is None else _exp(high))


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


@functools.cache
def _t_quantile(freedom: float) -> float:
    """The two-sided Student-t quantile at CONFIDENCE; scipy is imported only where an interval is wanted."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.5 + CONFIDENCE / 2))
