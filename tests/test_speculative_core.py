"""The decoder and the proposers by hand: rollback, ends of answers, full contexts, vocabularies, n-grams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.engine import Request, Sampling
from quantlab.engine.sampling import confidence, probabilities, sample
from quantlab.engine.speculative import (
    Ask,
    Chance,
    Draft,
    DraftModel,
    FixedLength,
    NgramProposer,
    Round,
    Speculated,
    SpeculativeDecoder,
    shared_vocabulary,
)
from quantlab.runtime.backend import Batch
from tests.table_model import TableBackend

GREEDY = Sampling()


class Scripted:
    """Proposes what follows in a known answer, wrong from the place `right` on, and notes what it is told."""

    name, chained = "scripted", False

    def __init__(self, answers: dict[int, list[int]], right: int, n: int = 4) -> None:
        self.answers, self.right, self.n = answers, right, n
        self.settled: list[tuple[int, int]] = []
        self.asked: list[list[Ask]] = []
        self.watched: list[Batch] = []
        self.released: list[int] = []

    def begin(self, prompts: Mapping[int, Sequence[int]]) -> None:
        self.prompts = {slot: len(prompt) for slot, prompt in prompts.items()}

    def watch(self, batch: Batch) -> None:
        self.watched.append(batch)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self.asked.append([ask._replace(context=list(ask.context)) for ask in asks])
        drafts = []
        for ask in asks:
            at = len(ask.context) - self.prompts[ask.slot]
            tokens = self.answers[ask.slot][at : at + min(self.n, ask.limit)]
            drafts.append(Draft([t if i < self.right else (t + 1) % 5 for i, t in enumerate(tokens)]))
        return drafts

    def settle(self, slot: int, length: int) -> None:
        self.settled.append((slot, length))

    def release(self, slot: int) -> None:
        self.released.append(slot)


def answers(prompts: Sequence[list[int]], n: int, **options: object) -> list[list[int]]:
    """Greedy, by looking into the table alone."""
    table = TableBackend(0, **options).table
    found = []
    for prompt in prompts:
        text = [0, 0, *prompt]
        for _ in range(n):
            text.append(int(table[text[-2], text[-1]].argmax()))
        found.append(text[2 + len(prompt) :])
    return found


PROMPTS = [[1, 2, 3], [4, 0], [2]]


def decode(
    proposer: object, *, n: int = 12, length: int = 4, prompts: Sequence[list[int]] = PROMPTS, **options: object
) -> tuple[list[Speculated], TableBackend]:
    target = TableBackend(0, **options)
    requests = [Request(i, prompt, n, ignore_eos=not target.eos) for i, prompt in enumerate(prompts)]
    return SpeculativeDecoder(target, proposer, FixedLength(length)).generate(requests), target


@pytest.mark.parametrize("right", range(5))
def test_greedy_output_is_the_targets_however_many_are_right(right: int) -> None:
    expected = answers(PROMPTS, 12)
    proposer = Scripted(dict(enumerate(expected)), right)
    sequences, target = decode(proposer)
    assert [s.tokens for s in sequences] == expected
    for s in sequences:
        assert sum(r.emitted for r in s.rounds) == 11
        assert all(r.emitted == r.accepted + 1 for r in s.rounds)
        assert all(r.accepted <= right for r in s.rounds)
        assert s.rounds[0] == Round(4, right, right + 1, ended=False)
        assert s.rounds[0].tested == min(4, right + 1)
        assert len(s.times_s) == 12
    assert all(not state for state in target.states)
    assert sorted(proposer.released) == [0, 1, 2]
    # The proposer saw every step: the prompts, then the rounds.
    assert [len(b.tokens) for b in proposer.watched] == [len(b.tokens) for b in target.steps]
    # After the first round 3 + 1 + right tokens of the first sequence stand.
    assert (0, 4 + right) in proposer.settled


def test_a_draft_leaves_the_last_token_to_the_target_and_never_overshoots() -> None:
    expected = answers(PROMPTS, 6)
    proposer = Scripted(dict(enumerate(expected)), 9, n=8)
    sequences, target = decode(proposer, n=6, length=8)
    assert [s.tokens for s in sequences] == expected
    assert [ask.limit for ask in proposer.asked[0]] == [4, 4, 4]
    assert [r for s in sequences for r in s.rounds] == [Round(4, 4, 5, ended=False)] * 3
    assert len(target.steps) == 2


def test_drafts_of_different_lengths_and_ends_in_one_batch() -> None:
    expected = answers(PROMPTS, 12)
    target = TableBackend(0)
    proposer = Scripted(dict(enumerate(expected)), 9)
    requests = [Request(i, prompt, n) for i, (prompt, n) in enumerate(zip(PROMPTS, (2, 12, 7), strict=True))]
    sequences = SpeculativeDecoder(target, proposer, FixedLength(4)).generate(requests)
    assert [s.tokens for s in sequences] == [expected[0][:2], expected[1], expected[2][:7]]
    # One is done after its second token, which needs no draft.
    assert [ask.slot for ask in proposer.asked[0]] == [1, 2]


# Ends of answers


def test_tokens_after_the_end_inside_a_draft_are_neither_handed_out_nor_counted() -> None:
    prompt, whole, at = next(
        ([i, j], whole, at)
        for i in range(5)
        for j in range(5)
        for whole in answers([[i, j]], 12)
        for at in [whole.index(whole[4])]
        if at > 1
    )
    end = whole[at]
    proposer = Scripted({0: whole}, 12, n=11)
    (sequence,), _ = decode(proposer, length=11, prompts=[prompt], eos=frozenset({end}))
    assert sequence.tokens == whole[: at + 1]
    assert sequence.stopped
    (round_,) = sequence.rounds
    # Ten were drafted, as many as the end of the answer lets count.
    assert round_ == Round(10, at, at, ended=True)
    assert round_.tested == at


def test_an_end_as_the_targets_own_token_and_as_the_first() -> None:
    (whole,) = answers([[1, 2]], 12)
    (sequence,), _ = decode(Scripted({0: whole}, 0), prompts=[[1, 2]], eos=frozenset({whole[1]}))
    assert sequence.tokens == whole[: whole.index(whole[1]) + 1]
    (sequence,), target = decode(Scripted({0: whole}, 4), prompts=[[1, 2]], eos=frozenset({whole[0]}))
    assert (sequence.tokens, sequence.rounds, len(target.steps)) == (whole[:1], [], 1)


# The draft model


def test_a_draft_model_keeps_in_step_with_the_target() -> None:
    """Whatever is accepted: its cache holds the text, and lacks no more than it must."""

    class Checked(DraftModel):
        def propose(self, asks: Sequence[Ask]) -> list[Draft]:
            for ask in asks:
                held = small.states[ask.slot]
                assert held == list(ask.context[: len(held)])
                # The last one is the target's own; one more where the whole draft was accepted.
                assert 1 <= len(ask.context) - len(held) <= 2
            return super().propose(asks)

    for seed in range(6):
        small = TableBackend(seed, n_seq=4)
        sequences, _ = decode(Checked(small, name="small", n_shared=5, n_vocab=5), n=40)
        assert [s.tokens for s in sequences] == answers(PROMPTS, 40)
        assert all(not state for state in small.states)


def test_the_same_model_as_draft_is_always_accepted() -> None:
    proposer = DraftModel(TableBackend(0), name="itself", n_shared=5, n_vocab=5)
    sequences, _ = decode(proposer, n=21, length=4)
    assert all(r == Round(4, 4, 5, ended=False) for s in sequences for r in s.rounds)
    sampling = Sampling(temperature=0.7, seed=3)
    requests = [Request(i, p, 21, sampling=sampling) for i, p in enumerate(PROMPTS)]
    sequences = SpeculativeDecoder(TableBackend(0), proposer, FixedLength(4)).generate(requests)
    assert all(r.accepted == 4 for s in sequences for r in s.rounds)


def test_a_draft_whose_context_is_full_stops_drafting_and_the_target_goes_on() -> None:
    small = TableBackend(0, n_ctx=10)
    proposer = DraftModel(small, name="small", n_shared=5, n_vocab=5)
    long = [1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]
    sequences, _ = decode(proposer, n=20, prompts=[[1, 2, 3], long], length=4)
    assert [s.tokens for s in sequences] == answers([[1, 2, 3], long], 20)
    first, second = ([r.drafted for r in s.rounds] for s in sequences)
    # 4 tokens of text: 4 drafted, of which 3 are computed; 9: two more fit, of which one; then none.
    assert first[:3] == [4, 2, 0]
    assert set(first[2:]) == set(second) == {0}


def test_a_padded_vocabulary_is_never_drafted_from_and_may_be_the_targets() -> None:
    sampling = Sampling(temperature=1.0)
    for ours, theirs in ((3, 0), (0, 3)):
        target, small = TableBackend(0, padding=ours), TableBackend(1, padding=theirs)
        small.table[:, :, 5:] = 30
        shared = shared_vocabulary(target, small)
        assert shared == 5
        proposer = DraftModel(small, name="small", n_shared=shared, n_vocab=5 + ours)
        requests = [Request(i, p, 30, sampling=sampling) for i, p in enumerate(PROMPTS)]
        sequences = SpeculativeDecoder(target, proposer, FixedLength(3)).generate(requests)
        assert sum(r.accepted for s in sequences for r in s.rounds) > 10


def test_the_first_difference_of_vocabularies_is_named() -> None:
    class Other(TableBackend):
        def piece_bytes(self, token: int) -> bytes:
            return {3: b"D", 4: b"E"}.get(token, super().piece_bytes(token))

    with pytest.raises(QuantlabError, match=r"token 3 is 'd' in the target and 'D' in the draft"):
        shared_vocabulary(TableBackend(0), Other(0))
    with pytest.raises(QuantlabError, match=r"the target has token 4, 'e', where the other one ends at 4"):
        shared_vocabulary(TableBackend(0), TableBackend(0, n_vocab=4))
    with pytest.raises(QuantlabError, match=r"the draft has token 4"):
        shared_vocabulary(TableBackend(0, n_vocab=4), TableBackend(0))


def test_control_tokens_are_told_apart_by_name() -> None:
    class Controlled(TableBackend):
        name = "<s>"

        def piece_bytes(self, token: int) -> bytes:
            return b"" if token == 2 else super().piece_bytes(token)

        def decode(self, tokens: Sequence[int]) -> str:
            return self.name if list(tokens) == [2] else super().decode(tokens)

    class Renamed(Controlled):
        name = "</s>"

    assert shared_vocabulary(Controlled(0), Controlled(1)) == 5
    with pytest.raises(QuantlabError, match="token 2 is '<s>' in the target and '</s>' in the draft"):
        shared_vocabulary(Controlled(0), Renamed(0))


# n-grams


def ngram(context: list[int], limit: int, **sizes: int) -> list[int]:
    proposer = NgramProposer(**sizes)
    proposer.begin({0: context})
    (draft,) = proposer.propose([Ask(0, context, 0, limit, GREEDY, Chance(0, 0))])
    assert draft.drawn_from is None
    return list(draft.tokens)


def test_ngrams_by_hand() -> None:
    assert ngram([1, 2, 3, 9, 8, 1, 2, 3], 3) == [9, 8, 1]
    # The longest match wins over a later shorter one, the latest over an earlier one.
    assert ngram([1, 2, 3, 7, 5, 3, 6, 1, 2, 3], 1) == [7]
    assert ngram([3, 6, 3, 7, 3], 1) == [7]
    assert ngram([3, 6, 3], 4, least=2) == []
    assert ngram([1, 2, 3], 4) == []
    # A text that repeats goes on repeating.
    assert ngram([5, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert ngram([4, 4], 3) == [4, 4, 4]


@hypothesis.given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 3), st.integers(1, 4))
def test_an_ngram_index_that_grows_finds_what_a_search_finds(text: list[int], least: int, more: int) -> None:
    most = least + more - 1
    proposer = NgramProposer(most=most, least=least)
    proposer.begin({0: text[:1]})
    for end in range(1, len(text) + 1):
        context = text[:end]
        (draft,) = proposer.propose([Ask(0, context, 0, 1, GREEDY, Chance(0, 0))])
        expected: list[int] = []
        for size in range(most, least - 1, -1):
            places = [i for i in range(size, end) if size < end and context[i - size : i] == context[-size:]]
            if places:
                expected = [context[places[-1]]]
                break
        assert list(draft.tokens) == expected


# What is refused


def test_what_does_not_fit_is_refused_before_it_begins() -> None:
    target = TableBackend(0, n_seq=2, n_batch=8, n_ctx=16)
    with pytest.raises(UsageError, match="2 sequences with drafts of 4 tokens"):
        SpeculativeDecoder(target, NgramProposer(), FixedLength(4)).generate([Request(i, [1], 2) for i in range(2)])
    decoder = SpeculativeDecoder(target, NgramProposer(), FixedLength(3))
    with pytest.raises(UsageError, match="the context holds 16"):
        decoder.generate([Request(0, [1] * 10, 7)])
    with pytest.raises(UsageError, match="outside the vocabulary"):
        decoder.generate([Request(0, [1, 5], 7)])
    assert not target.steps
    with pytest.raises(UsageError, match="n-grams of 3 to 2"):
        NgramProposer(most=2, least=3)


def test_logits_that_are_not_finite_are_an_error_and_leave_the_slots_free() -> None:
    target, small = TableBackend(0), TableBackend(1)
    for broken, sampling in ((target, GREEDY), (small, GREEDY), (target, Sampling(temperature=1.0))):
        kept = broken.table.copy()
        broken.table[:] = np.nan
        broken.table[1, 2] = kept[1, 2]
        decoder = SpeculativeDecoder(target, DraftModel(small, name="s", n_shared=5, n_vocab=5), FixedLength(2))
        with pytest.raises(QuantlabError, match="not finite"):
            decoder.generate([Request(0, [1, 2], 20, sampling=sampling)])
        assert not any(target.states) and not any(small.states)
        broken.table[:] = kept


@hypothesis.given(
    st.lists(st.floats(-5, 5), min_size=2, max_size=9), st.integers(0, 4), st.floats(0.1, 1), st.floats(0.2, 3)
)
def test_probabilities_are_what_sample_draws(logits: list[float], top_k: int, top_p: float, temperature: float) -> None:
    row = np.array(logits, np.float32)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    expected = probabilities(row, sampling)
    assert expected.sum() == pytest.approx(1)
    n = 500
    drawn = np.bincount([sample(row, sampling, (i + 0.5) / n) for i in range(n)], minlength=len(row)) / n
    assert np.abs(drawn - expected).max() <= 1.5 / n
    plain = probabilities(row, Sampling(temperature=1.0))
    assert confidence(row, int(row.argmax())) == pytest.approx(plain.max(), rel=1e-4)
