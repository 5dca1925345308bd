"""Definitions against numpy and published tables, symmetry by property, coverage by a seeded simulation."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantlab.core import statistics
from quantlab.core.statistics import (
    Interval,
    exp_interval,
    geometric_mean_interval,
    mean_interval,
    paired_ratio,
    percentile,
    unpaired_ratio,
)

NUMBERS = st.floats(-1e6, 1e6)
TIMES = st.floats(1e-6, 1e6)


@given(st.lists(NUMBERS, min_size=1, max_size=60), st.floats(0, 100))
def test_percentile_is_numpys(samples, percent):
    assert percentile(samples, percent) == pytest.approx(np.percentile(samples, percent), rel=1e-9, abs=1e-9)


@given(st.lists(NUMBERS, min_size=1, max_size=60))
def test_median_is_numpys_and_the_50th_percentile(samples):
    assert statistics.median(samples) == pytest.approx(np.median(samples), rel=1e-12, abs=1e-9)
    assert statistics.median(samples) == pytest.approx(percentile(samples, 50), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("samples", "percent"), [([], 50), ([1.0], -1), ([1.0], 100.1)])
def test_percentile_refuses_what_has_none(samples, percent):
    with pytest.raises(ValueError, match=r"no samples|no percentage"):
        percentile(samples, percent)


def test_relative_spread_ignores_one_slow_repetition():
    assert statistics.relative_spread([1.0, 1.0, 1.0, 1.0, 9.0]) == 0
    assert statistics.relative_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)


# Student's t, two-sided 95%: the table of Abramowitz and Stegun (26.10), and scipy.special.stdtrit for the fractions.
QUANTILES = {1: 12.7062047, 1.5: 6.0166631, 2: 4.3026527, 3: 3.1824463, 4: 2.7764451, 4.7: 2.6207261, 5: 2.5705818,
             7: 2.3646243, 10: 2.2281389, 20: 2.0859634, 30: 2.0422725, 99.5: 1.9840936, 120: 1.9799304,
             100000: 1.9599877}  # fmt: skip


@pytest.mark.parametrize(("freedom", "quantile"), QUANTILES.items())
def test_mean_interval_uses_the_tables_quantile(freedom, quantile):
    assert statistics._t_quantile(freedom) == pytest.approx(quantile, rel=3e-6)


def test_quantile_falls_towards_the_normal_one():
    quantiles = [statistics._t_quantile(1 + i / 7) for i in range(700)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert statistics._t_quantile(1e7) == pytest.approx(1.959964, abs=1e-6)


def test_mean_interval_by_hand():
    # Mean 3, standard deviation sqrt(2.5), five samples: half width 2.776 * 1.5811 / 2.2361.
    estimate, low, high = mean_interval([1, 2, 3, 4, 5])
    assert (estimate, low, high) == pytest.approx((3, 3 - 1.96324, 3 + 1.96324), abs=1e-4)


@given(st.lists(TIMES, min_size=2, max_size=20), st.lists(TIMES, min_size=2, max_size=20))
def test_geometric_means_stand_in_the_ratio(a, b):
    ratio = geometric_mean_interval(a).estimate / geometric_mean_interval(b).estimate
    assert ratio == pytest.approx(unpaired_ratio(a, b).estimate, rel=1e-9)


def test_geometric_mean_by_hand():
    # Logarithms 0, 1, 2: mean 1, half width 4.3027 / sqrt(3).
    found = geometric_mean_interval([math.exp(x) for x in (0, 1, 2)])
    assert [math.log(x) for x in found] == pytest.approx([1, 1 - 2.48414, 1 + 2.48414], abs=1e-4)


def test_unpaired_ratio_by_hand():
    # Logarithms 0, 1, 2 and 0, 2, 4, 6: difference -2, squared standard errors 1/3 and 5/3, 4.0755 degrees of freedom.
    found = unpaired_ratio([math.exp(x) for x in (0, 1, 2)], [math.exp(x) for x in (0, 2, 4, 6)])
    assert [math.log(x) for x in found] == pytest.approx([-2, -2 - 3.89798, -2 + 3.89798], abs=1e-4)


@pytest.mark.parametrize("few", [[2.0], [2.0, 2.1]])
def test_few_samples_have_no_interval(few):
    """Of two the interval would be 12.7 standard errors: of logarithms that spread, numbers of twenty digits."""
    assert mean_interval(few) == Interval(sum(few) / len(few), None, None)
    assert geometric_mean_interval(few)[1:] == (None, None)
    assert paired_ratio(few, [1.0] * len(few))[1:] == (None, None)
    assert unpaired_ratio(few, [1.0, 1.1, 1.2])[1:] == unpaired_ratio([1.0, 1.1, 1.2], few)[1:] == (None, None)
    assert not mean_interval(few).excludes(5.0)
    assert None not in mean_interval([*few, 2.2, 2.3])


def test_pairs_are_of_one_length():
    with pytest.raises(ValueError, match="2 and 1 samples are not pairs"):
        paired_ratio([1.0, 2.0], [1.0])


def assert_reciprocal(forth: Interval, back: Interval):
    assert forth.estimate * back.estimate == pytest.approx(1, rel=1e-9)
    if forth.low is None:
        assert (forth.high, back.low, back.high) == (None, None, None)
        return
    for one, other in ((forth.low, back.high), (forth.high, back.low)):
        # Very wide intervals end at 0 and infinity.
        assert one * other == pytest.approx(1, rel=1e-6) or {one, other} == {0.0, math.inf}


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=20))
def test_paired_ratio_agrees_with_its_inverse(pairs):
    a, b = zip(*pairs, strict=True)
    assert_reciprocal(paired_ratio(a, b), paired_ratio(b, a))


@given(st.lists(TIMES, min_size=1, max_size=20), st.lists(TIMES, min_size=1, max_size=20))
def test_unpaired_ratio_agrees_with_its_inverse(a, b):
    assert_reciprocal(unpaired_ratio(a, b), unpaired_ratio(b, a))


@given(st.lists(TIMES, min_size=3, max_size=20), st.floats(1e-3, 1e3))
def test_ratio_to_a_scaled_copy_is_the_scale(samples, scale):
    estimate, low, high = paired_ratio([scale * x for x in samples], samples)
    assert estimate == pytest.approx(scale, rel=1e-9)
    assert low == pytest.approx(high, rel=1e-6)


def test_equal_samples_leave_no_width():
    assert unpaired_ratio([2.0] * 3, [1.0] * 3) == pytest.approx((2, 2, 2))


def test_what_no_float_holds_is_infinite():
    assert exp_interval(Interval(1.0, -1e5, 1e5)) == (math.e, 0.0, math.inf)


ROUNDS = 2000
# Four standard deviations of a binomial share at 0.95: one seed in 16,000 would fail by chance.
MARGIN = 4 * math.sqrt(0.05 * 0.95 / ROUNDS)


def coverage(draw, truth: float) -> float:
    """How often the interval of `draw` holds `truth`."""
    return sum(not draw().excludes(truth) for _ in range(ROUNDS)) / ROUNDS


@pytest.mark.parametrize("n", [3, 5, 12])
def test_mean_interval_covers_at_its_level(n):
    noise = random.Random(n)
    share = coverage(lambda: mean_interval([noise.gauss(7, 2) for _ in range(n)]), 7)
    assert share == pytest.approx(0.95, abs=MARGIN)


@pytest.mark.parametrize("n", [3, 5, 12])
def test_paired_ratio_covers_under_drift(n):
    noise = random.Random(10 + n)

    def draw():
        drift = [math.exp(noise.gauss(0, 0.5)) for _ in range(n)]
        a = [1.3 * slow * math.exp(noise.gauss(0, 0.05)) for slow in drift]
        b = [slow * math.exp(noise.gauss(0, 0.05)) for slow in drift]
        return paired_ratio(a, b)

    assert coverage(draw, 1.3) == pytest.approx(0.95, abs=MARGIN)


@pytest.mark.parametrize(("n", "spread"), [(5, 0.05), (5, 0.2), (10, 0.01)])
def test_unpaired_ratio_covers_with_unlike_variances(n, spread):
    noise = random.Random(20 + n)

    def draw():
        a = [0.8 * math.exp(noise.gauss(0, 0.05)) for _ in range(n)]
        b = [math.exp(noise.gauss(0, spread)) for _ in range(n + 3)]
        return unpaired_ratio(a, b)

    # Welch's interval is approximate: within a point of its level at these sizes.
    assert coverage(draw, 0.8) == pytest.approx(0.95, abs=MARGIN + 0.01)
