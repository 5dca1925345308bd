"""Why speculation does not pay, and what would have to change, with the numbers.

Four dimensions can be to blame: acceptance, the draft's cost, K, the batch (what a verify costs: it is free only while
memory binds). Where another K or a smaller batch pays, that is it. Else it is the one that, made ideal alone, would
gain most: every token accepted, a draft that costs nothing, a verify that costs one step. What the formula does not
know, work around the two models, is told where it is what tips the scale.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from quantlab.engine.speculative import theory

Dimension = Literal["acceptance", "draft cost", "K", "batch", "overhead"]
# A share of rounds with a draft that is not worth a word.
_MOST = 0.95


class Point(msgspec.Struct, frozen=True):
    """One length at one batch size; `k` None adapts.

    `coverage` is the share of rounds with a draft, and of those `draft_length` the tokens drafted, on average, and
    `verify_cost` that of such a verify. `acceptance` None: nothing was drafted. `low` and `high` are the 95% limits of
    `speedup`, where there are some.
    """

    batch: int
    k: int | None
    draft_length: float
    coverage: float
    acceptance: float | None
    draft_cost: float
    verify_cost: float
    predicted: float | None
    speedup: float
    low: float | None
    high: float | None

    @property
    def pays(self) -> bool | None:
        """Whether the speed-up is above 1; None where its interval does not say."""
        if self.low is not None and self.low > 1:
            return True
        return False if self.high is not None and self.high < 1 else None


class Reason(msgspec.Struct, frozen=True):
    """What is to blame, the number that shows it, and what would have to change."""

    dimension: Dimension
    text: str


def best_of(points: list[Point]) -> Point:
    """The fastest of one batch size."""
    return max(points, key=lambda point: point.speedup)


def switch_off_batch(points: list[Point]) -> int | None:
    """The smallest batch from which on no length pays for sure; None where one does at the largest."""
    last = None
    for batch in sorted({point.batch for point in points}, reverse=True):
        if any(p.pays for p in points if p.batch == batch):
            break
        last = batch
    return last


def diagnose(point: Point, points: list[Point]) -> Reason | None:
    """Why `point` (of `points`, all of one draft) does not pay; None where it does."""
    if point.pays:
        return None
    same_batch = best_of([p for p in points if p.batch == point.batch])
    if same_batch.pays:
        name = "the adaptive length" if same_batch.k is None else f"K {same_batch.k}"
        return Reason("K", f"{_times(point.speedup)}; {name} pays here: {_times(same_batch.speedup)}")
    smaller = [p for p in points if p.batch < point.batch and p.k == point.k and p.pays]
    if smaller:
        largest = max(smaller, key=lambda p: p.batch)
        return Reason(
            "batch",
            f"a verify takes {point.verify_cost:.2f} steps at batch {point.batch} and {largest.verify_cost:.2f} at "
            f"batch {largest.batch}, where it pays ({_times(largest.speedup)}): switch it off beyond that",
        )
    return _by_numbers(point)


def _by_numbers(point: Point) -> Reason:
    """Which number is to blame where no other point pays."""
    a, c, v, k = point.acceptance, point.draft_cost, point.verify_cost, round(point.draft_length)
    if a is None or k < 1:
        why = "no n-gram of the text stood earlier in it, or the draft's context is full"
        return Reason("acceptance", f"nothing was drafted: {why}")
    expected = theory.speedup(a, k, c, v)
    if expected >= 1:
        return Reason(
            "overhead",
            f"acceptance {a:.2f} and these costs let {_times(expected)} be expected of a draft of {k}, measured is "
            f"{_times(point.speedup)}{_where(point)}: the rest is work around the two models, or noise",
        )
    ideal = {
        "acceptance": theory.speedup(1.0, k, c, v),
        "draft cost": theory.speedup(a, k, 0.0, v),
        "batch": theory.speedup(a, k, c, 1.0),
    }
    blamed = max(ideal, key=lambda name: ideal[name])
    return {"acceptance": _acceptance, "draft cost": _draft_cost, "batch": _verify_cost}[blamed](point, k, a)


def _where(point: Point) -> str:
    return "" if point.coverage > _MOST else f", with a draft in {point.coverage:.0%} of the rounds"


def _acceptance(point: Point, k: int, a: float) -> Reason:
    even = theory.break_even_acceptance(k, point.draft_cost, point.verify_cost)
    if even is None:
        whole = theory.speedup(1.0, k, point.draft_cost, point.verify_cost)
        return Reason(
            "acceptance",
            f"no acceptance pays at this cost: {_times(whole)} if every token were accepted; measured "
            f"{a:.2f}{_where(point)}",
        )
    return Reason("acceptance", f"break-even acceptance at this cost is {even:.2f}; measured {a:.2f}{_where(point)}")


def _draft_cost(point: Point, k: int, a: float) -> Reason:
    even = theory.break_even_draft_cost(a, k, point.verify_cost)
    text = f"a draft token costs {point.draft_cost:.2f} steps of the target"
    if even is None:
        return Reason("draft cost", f"{text}; at acceptance {a:.2f} even a free draft would not pay")
    return Reason("draft cost", f"{text}; at acceptance {a:.2f} it pays up to {even:.2f}")


def _verify_cost(point: Point, k: int, a: float) -> Reason:
    even = theory.break_even_verify_cost(a, k, point.draft_cost)
    text = f"verifying {k + 1} tokens takes {point.verify_cost:.2f} steps of one: compute binds at batch {point.batch}"
    if even < 1:
        return Reason("batch", f"{text}; at acceptance {a:.2f} even a verify for one step would not pay")
    return Reason("batch", f"{text}; at acceptance {a:.2f} it pays up to {even:.2f}")


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"
