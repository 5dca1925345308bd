"""Theory against simulation: tokens per verify and speed-up at known acceptance and costs; the adaptive length."""

from __future__ import annotations

import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from quantlab.core.errors import UsageError
from quantlab.engine import Request
from quantlab.engine.speculative import (
    AdaptiveLength,
    DraftLength,
    FixedLength,
    RoundCosts,
    Speculated,
    SpeculativeDecoder,
    theory,
)
from quantlab.runtime.clock import VirtualClock
from quantlab.runtime.step_model import StepModel
from tests.synthetic_draft import SyntheticDraft, simulated

STEP_S, DRAFT_S, TOKEN_S = 0.010, 0.002, 0.0005
# Of rounds of up to 8 draft tokens.
COSTS = RoundCosts(tuple(k * DRAFT_S for k in range(9)), (STEP_S, *(STEP_S + (k + 1) * TOKEN_S for k in range(1, 9))))


def run(acceptance: float, length: DraftLength, new_tokens: int, *, n_seq: int = 1) -> list[Speculated]:
    """A target whose step takes 10 ms and 0.5 ms a token of a verify, a draft whose step takes 2 ms."""
    clock = VirtualClock()
    target = simulated(clock, StepModel(STEP_S, prefill_token_s=TOKEN_S), n_seq=n_seq)
    draft = SyntheticDraft(simulated(clock, StepModel(DRAFT_S), n_seq=n_seq), acceptance)
    requests = [Request(i, np.array([i + 1, 2, 3], np.int32), new_tokens) for i in range(n_seq)]
    return SpeculativeDecoder(target, draft, length, clock).generate(requests)


def tpot_s(sequence: Speculated) -> float:
    return (sequence.times_s[-1] - sequence.times_s[0]) / (len(sequence.tokens) - 1)


@pytest.mark.parametrize(("a", "k"), [*itertools.product([0.5, 0.6, 0.7, 0.8, 0.9], range(1, 9))])
def test_tokens_per_verify_and_speedup_are_those_of_theory(a: float, k: int) -> None:
    (sequence,) = run(a, FixedLength(k), 1500)
    rounds = [round_ for round_ in sequence.rounds if round_.drafted == k]
    assert len(rounds) > len(sequence.rounds) - 10
    expected = sum(a**i for i in range(k + 1))
    assert theory.expected_tokens(a, k) == pytest.approx(expected)
    assert np.mean([round_.emitted for round_ in rounds]) == pytest.approx(expected, rel=0.01)
    tested, accepted = (sum(getattr(r, name) for r in rounds) for name in ("tested", "accepted"))
    assert accepted / tested == pytest.approx(a, rel=0.01)
    # In the batch of one a decode step takes STEP_S; a verify is a chunk of k + 1 tokens.
    c, v = DRAFT_S / STEP_S, (STEP_S + (k + 1) * TOKEN_S) / STEP_S
    predicted = expected / (k * c + v)
    assert theory.speedup(a, k, c, v) == pytest.approx(predicted)
    (plain,) = run(a, FixedLength(0), 50)
    assert tpot_s(plain) == pytest.approx(STEP_S)
    assert tpot_s(plain) / tpot_s(sequence) == pytest.approx(predicted, rel=0.02)


def test_what_is_decoded_is_what_plain_decoding_gives() -> None:
    for a, k in ((0.5, 3), (0.9, 8), (1.0, 4)):
        assert [s.tokens for s in run(a, FixedLength(k), 60, n_seq=3)] == [
            s.tokens for s in run(a, FixedLength(0), 60, n_seq=3)
        ]


# The adaptive length


@pytest.mark.parametrize("a", [0.2, 0.6, 0.8, 0.95])
def test_the_adaptive_length_is_as_good_as_the_best_fixed_one(a: float) -> None:
    fixed = [tpot_s(run(a, FixedLength(k), 1000)[0]) for k in range(9)]
    best = int(np.argmin(fixed))
    # Beside the best one lie others that are as good.
    assert abs(theory.best_k(a, COSTS.steps, 8)[0] - best) <= 1
    (adaptive,) = run(a, AdaptiveLength(8, COSTS), 3000)
    assert tpot_s(adaptive) < 1.04 * fixed[best]
    assert best == 0 or tpot_s(adaptive) < 0.97 * fixed[0]


def test_it_stops_drafting_where_nothing_is_accepted() -> None:
    (sequence,) = run(0.02, AdaptiveLength(8, COSTS), 1200)
    drafted = [round_.drafted for round_ in sequence.rounds]
    tries = [i for i, n in enumerate(drafted) if n and i > 20]
    # It still tries, and would find out if the text became easy; each time it waits twice as long.
    gaps = np.diff(tries)
    assert len(tries) >= 4
    assert all(later > 1.8 * earlier for earlier, later in itertools.pairwise(gaps))


def test_it_never_drafts_where_costs_forbid_it() -> None:
    """A draft as slow as the target: not even one without a fault pays, and nothing is worth a try."""
    dear = RoundCosts(tuple(STEP_S * k for k in range(5)), tuple(STEP_S * (1 + k) for k in range(5)))
    (sequence,) = run(1.0, AdaptiveLength(4, dear), 200)
    assert sum(round_.drafted for round_ in sequence.rounds) == 0


@pytest.mark.parametrize(
    "wrong", [lambda: FixedLength(-1), lambda: AdaptiveLength(0, COSTS), lambda: AdaptiveLength(9, COSTS)]
)
def test_impossible_lengths_are_refused(wrong: object) -> None:
    with pytest.raises(UsageError):
        wrong()


# Formulas

shares, costs = st.floats(0, 1), st.floats(0, 2)


@hypothesis.given(st.integers(1, 16), costs, st.floats(0.5, 20))
def test_the_break_even_acceptance_is_where_speedup_is_one(k: int, c: float, v: float) -> None:
    a = theory.break_even_acceptance(k, c, v)
    if a is None:
        assert (k + 1) / (k * c + v) < 1
        return
    assert theory.speedup(a, k, c, v) >= 1 - 1e-9
    if a > 1e-6:
        assert theory.speedup(a - 1e-6, k, c, v) <= 1


@hypothesis.given(shares, st.integers(1, 16), costs, st.floats(0.5, 20))
def test_the_other_break_evens_are_inverses_too(a: float, k: int, c: float, v: float) -> None:
    cost = theory.break_even_draft_cost(a, k, v)
    if cost is not None and cost + v > 0:
        assert theory.speedup(a, k, cost, v) == pytest.approx(1)
    else:
        assert cost is None and theory.speedup(a, k, 0, v) < 1
    verify = theory.break_even_verify_cost(a, k, c)
    if verify > 1e-3:
        assert theory.speedup(a, k, c, verify) == pytest.approx(1)


@hypothesis.given(shares, st.floats(0.001, 1), st.floats(0, 1))
def test_the_speedup_has_one_maximum_in_k(a: float, c: float, slope: float) -> None:
    """What the adaptive length stands on: with a verify that is linear in k, the first fall is the last rise."""
    gains = [theory.speedup(a, k, c, 1 + slope * k) for k in range(1, 30)]
    signs = [later > earlier + 1e-12 for earlier, later in itertools.pairwise(gains)]
    assert signs == sorted(signs, reverse=True)
    best, gain = theory.best_k(a, lambda k: k * c + 1 + slope * k, 29)
    assert gain == pytest.approx(max(1.0, *gains))
    assert best == (1 + int(np.argmax(gains)) if max(gains) > 1 else 0) or max(gains) == pytest.approx(1)


@hypothesis.given(shares, st.floats(0.001, 1), st.floats(0, 1), shares)
def test_rounds_without_a_draft_draw_the_speedup_towards_one(a: float, c: float, slope: float, coverage: float) -> None:
    def steps(k: int) -> float:
        return k * c + 1 + slope * k

    best, gain = theory.best_k(a, steps, 12, coverage)
    # Of 1000 rounds by hand.
    drafted = round(1000 * coverage, 6)
    gains = [
        (drafted * sum(a**i for i in range(k + 1)) + 1000 - drafted) / (drafted * steps(k) + 1000 - drafted)
        for k in range(1, 13)
    ]
    assert gain == pytest.approx(max(1.0, *gains))
    assert gain <= theory.best_k(a, steps, 12)[1] + 1e-9
    assert best == 0 or gains[best - 1] == pytest.approx(gain)
