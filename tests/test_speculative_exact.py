"""The verifier keeps the target's distribution, and the same test catches rules that do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy.stats import chisquare

from quantlab.engine import Request, Sampling
from quantlab.engine.speculative import (
    AdaptiveLength,
    DraftLength,
    DraftModel,
    FixedLength,
    NgramProposer,
    Proposer,
    RoundCosts,
    SpeculativeDecoder,
    decoder,
    verify,
)
from quantlab.engine.speculative.draft import Ask, Chance, Draft
from quantlab.engine.speculative.verify import Verdict, residual
from tests.table_model import TableBackend

N, TOKENS, SEQUENCES = 200_000, 4, 500
SAMPLING = Sampling(temperature=0.8)
PROMPT = [1, 2, 1, 2]
EOS = frozenset({3})


def p_value(proposer: Proposer, length: DraftLength, n: int = N, sampling: Sampling = SAMPLING) -> float:
    """Of the chi-square test of `n` continuations against the exact distribution of the target."""
    target = TableBackend(0, eos=EOS, n_seq=SEQUENCES, n_batch=SEQUENCES * (1 + length.most))
    exact = dict(target.continuations(PROMPT, TOKENS, sampling))
    assert sum(exact.values()) == pytest.approx(1)
    decode = SpeculativeDecoder(target, proposer, length)
    seen: Counter[tuple[int, ...]] = Counter()
    for first in range(0, n, SEQUENCES):
        requests = [Request(first + i, PROMPT, TOKENS, sampling=sampling, ignore_eos=False) for i in range(SEQUENCES)]
        seen.update(tuple(sequence.tokens) for sequence in decode.generate(requests))
    assert seen.keys() <= exact.keys()
    # A cell that is expected fewer than five times has no chi-square: those go together.
    common = [key for key, share in exact.items() if n * share >= 5]
    observed = [float(seen[key]) for key in common]
    expected = [n * exact[key] for key in common]
    rest = n - sum(observed), n - sum(expected)
    if rest[1] > 1e-6:
        observed, expected = [*observed, rest[0]], [*expected, rest[1]]
    return float(chisquare(observed, expected).pvalue)


def drafting(seed: int = 1) -> DraftModel:
    small = TableBackend(seed, n_seq=SEQUENCES)
    return DraftModel(small, name="small", n_shared=5, n_vocab=5)


def adaptive() -> AdaptiveLength:
    return AdaptiveLength(3, RoundCosts((0.0, 0.1, 0.2, 0.3), (1.0, 1.1, 1.2, 1.3)))


def test_200_000_continuations_have_the_targets_distribution() -> None:
    assert p_value(drafting(), FixedLength(2)) > 0.01


@pytest.mark.parametrize(
    ("proposer", "length"),
    [(drafting, adaptive), (lambda: NgramProposer(most=2), lambda: FixedLength(3))],
    ids=["adaptive", "ngram"],
)
def test_other_lengths_and_proposers_too(proposer: Callable[[], Proposer], length: Callable[[], DraftLength]) -> None:
    assert p_value(proposer(), length(), 30_000) > 0.01


@pytest.mark.parametrize("proposer", [drafting, lambda: NgramProposer(most=2)], ids=["drawn", "chosen"])
@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.8}, {"top_k": 4, "top_p": 0.9}], ids=str)
def test_what_top_k_and_top_p_cut_off_is_cut_off(proposer: Callable[[], Proposer], cut: dict[str, float]) -> None:
    """Draft and target cut off different tokens."""
    assert p_value(proposer(), FixedLength(2), 10_000, Sampling(temperature=1.2, **cut)) > 0.01


def accepts_the_likely(rows: np.ndarray, draft: Draft, sampling: Sampling, chance: Chance, index: int) -> Verdict:
    """Wrong: a draft token stands where the target finds it at least as likely as the draft model did."""
    found = verify.verify(rows, draft, sampling, chance, index)
    for i, token in enumerate(draft.tokens[: found.accepted]):
        p = verify.probabilities(rows[i], sampling)
        if p[token] < draft.drawn_from[i][token]:
            return Verdict(i, verify.picked(residual(p, draft.drawn_from[i], token), chance.residue(index + i)))
    return found


def draws_from_the_target(rows: np.ndarray, draft: Draft, sampling: Sampling, chance: Chance, index: int) -> Verdict:
    """Wrong: what takes a rejected token's place is drawn from the target's whole distribution."""
    found = verify.verify(rows, draft, sampling, chance, index)
    p = verify.probabilities(rows[found.accepted], sampling)
    return Verdict(found.accepted, verify.picked(p, chance.residue(index + found.accepted)))


@pytest.mark.parametrize("rule", [accepts_the_likely, draws_from_the_target])
def test_a_wrong_rule_is_caught(monkeypatch: pytest.MonkeyPatch, rule: Callable[..., Verdict]) -> None:
    monkeypatch.setattr(decoder, "verify", rule)
    assert p_value(drafting(), FixedLength(2), 8_000) < 1e-6


def test_a_length_that_looks_at_what_it_leaves_out_is_caught() -> None:
    """Why a draft may stop after a token but not before it: what is left out would be the unlikely."""

    class DropsUnlikely(DraftModel):
        def propose(self, asks: Sequence[Ask]) -> list[Draft]:
            return [
                Draft(d.tokens[:1], d.drawn_from[:1]) if d.tokens and d.confidences[0] > 0.4 else Draft(())
                for d in super().propose(asks)
            ]

    small = TableBackend(1, n_seq=SEQUENCES)
    assert p_value(DropsUnlikely(small, name="small", n_shared=5, n_vocab=5), FixedLength(2), 8_000) < 1e-6
