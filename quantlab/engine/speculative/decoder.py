"""Speculative decoding on any backend: draft, verify in one step, roll back what was not accepted.

A round is one step of the target for all sequences, each with a draft of its own length. Tokens after the end of an
answer are neither handed out nor counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quantlab.core.errors import UsageError
from quantlab.engine.limits import check_request, limits_of
from quantlab.engine.request import Request
from quantlab.engine.sampling import choose
from quantlab.engine.speculative.draft import NO_DRAFT, Ask, Chance, Draft, Proposer, Round
from quantlab.engine.speculative.feeding import feed
from quantlab.engine.speculative.length import DraftLength
from quantlab.engine.speculative.verify import Verdict, verify
from quantlab.runtime.backend import Backend, Batch, Logits
from quantlab.runtime.clock import Clock, WallClock


class StepTimes(NamedTuple):
    """One round of all sequences: how many, the tokens of its verify, the longest draft, and seconds of its parts."""

    sequences: int
    rows: int
    longest_draft: int
    draft_s: float
    verify_s: float
    total_s: float


class Speculated:
    """A request while it is decoded, and what came of it. `tokens` are the new ones, `times_s` when each was there."""

    def __init__(self, request: Request, slot: int) -> None:
        self.request, self.slot = request, slot
        self.context = [int(token) for token in request.prompt]
        self.tokens: list[int] = []
        self.times_s: list[float] = []
        self.rounds: list[Round] = []
        self.stopped = False
        self.chance = Chance(request.sampling.seed, request.id)

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return self.stopped or len(self.tokens) >= self.request.max_new_tokens

    def take(self, tokens: Sequence[int], eos: frozenset[int], now_s: float) -> int:
        """Hand out tokens as far as the answer goes; returns how many."""
        taken = 0
        for token in tokens:
            if self.done:
                break
            self.context.append(token)
            self.tokens.append(token)
            self.times_s.append(now_s)
            self.stopped = token in eos and not self.request.ignore_eos
            taken += 1
        return taken


class SpeculativeDecoder:
    """Decodes with drafts of `proposer` (None: plainly, one token a step) on `target`.

    The output is the target's: greedy the same tokens as far as the backend's kernels for one token and for several
    agree, sampled the same distribution. `step` advances any sequences that have a first token; `generate` does all.
    """

    def __init__(
        self, target: Backend, proposer: Proposer | None, length: DraftLength, clock: Clock | None = None
    ) -> None:
        self._target, self._proposer, self._length = target, proposer, length
        self._clock = clock or WallClock()
        loaded = target.describe()
        self._eos, self._n_vocab = loaded.eos, loaded.n_vocab
        self.steps: list[StepTimes] = []
        # When the last `generate` began, on the clock.
        self.start_s = 0.0

    def generate(self, requests: Sequence[Request]) -> list[Speculated]:
        """Decode all requests together, prompts first; their arrival times do not count.

        Raises UsageError for requests that do not fit, before any is begun; the sequences are free at the end.
        """
        self._check(requests)
        sequences = [Speculated(request, slot) for slot, request in enumerate(requests)]
        self.start_s = self._clock.now()
        try:
            self._begin(sequences)
            while running := [sequence for sequence in sequences if not sequence.done]:
                self.step(running)
        finally:
            for sequence in sequences:
                self._release(sequence.slot)
        return sequences

    def _check(self, requests: Sequence[Request]) -> None:
        limits, capacity = limits_of(self._target), self._target.describe().capacity
        rows = len(requests) * (1 + self._length.most)
        most = min(capacity.n_batch, capacity.n_outputs or capacity.n_batch)
        if len(requests) > limits.max_num_seqs or rows > most:
            raise UsageError(
                f"{len(requests)} sequences with drafts of {self._length.most} tokens; this backend was opened for "
                f"{limits.max_num_seqs} sequences and {most} rows of logits",
                "open it larger, or draft less",
            )
        for request in requests:
            check_request(request, limits, self._n_vocab)

    def _begin(self, sequences: list[Speculated]) -> None:
        """Compute the prompts, and with them the first token of each."""
        prompts = {sequence.slot: sequence.context for sequence in sequences}
        if self._proposer is not None:
            self._proposer.begin(prompts)
        rows = feed(self._target, list(prompts.items()), self._proposer.watch if self._proposer else None)
        tokens = choose(rows, [(s.request.sampling, s.request.id, 0) for s in sequences])
        now = self._clock.now()
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.take([token], self._eos, now)

    def step(self, sequences: Sequence[Speculated]) -> None:
        """One round: every sequence gets at least one token. All have a first token, none is done."""
        began = self._clock.now()
        drafts = self._drafts(sequences)
        drafted = self._clock.now()
        batch = _batch(sequences, drafts)
        rows = self._target.forward(batch)
        verified = self._clock.now()
        if self._proposer is not None:
            self._proposer.watch(batch)
        verdicts = self._judge(sequences, drafts, rows)
        now = self._clock.now()
        for sequence, draft, verdict in zip(sequences, drafts, verdicts, strict=True):
            self._settle(sequence, draft, verdict, now)
        longest = max(len(draft.tokens) for draft in drafts)
        times = drafted - began, verified - drafted, self._clock.now() - began
        self.steps.append(StepTimes(len(sequences), len(batch.tokens), longest, *times))

    def _drafts(self, sequences: Sequence[Speculated]) -> list[Draft]:
        if self._proposer is None:
            return [NO_DRAFT] * len(sequences)
        asks = [self._ask(sequence, self._proposer.chained) for sequence in sequences]
        wanted = [ask for ask in asks if ask.limit > 0]
        drafts = iter(self._proposer.propose(wanted) if wanted else ())
        return [next(drafts) if ask.limit > 0 else NO_DRAFT for ask in asks]

    def _ask(self, sequence: Speculated, chained: bool) -> Ask:
        """What the sequence may be drafted: one token of its answer is the target's own."""
        slot, length = sequence.slot, self._length
        left = sequence.request.max_new_tokens - len(sequence.tokens)
        return Ask(
            slot,
            sequence.context,
            len(sequence.tokens),
            min(length.limit(slot, chained=chained), left - 1),
            sequence.request.sampling,
            sequence.chance,
            (lambda confidences: length.goes_on(slot, confidences)) if length.adapts and chained else None,
        )

    def _judge(self, sequences: Sequence[Speculated], drafts: Sequence[Draft], rows: Logits) -> list[Verdict]:
        verdicts, at = [], 0
        for sequence, draft in zip(sequences, drafts, strict=True):
            end = at + 1 + len(draft.tokens)
            sampling, index = sequence.request.sampling, len(sequence.tokens)
            verdicts.append(verify(rows[at:end], draft, sampling, sequence.chance, index))
            at = end
        return verdicts

    def _settle(self, sequence: Speculated, draft: Draft, verdict: Verdict, now_s: float) -> None:
        before = len(sequence.context)
        taken = sequence.take([*draft.tokens[: verdict.accepted], verdict.token], self._eos, now_s)
        accepted = min(verdict.accepted, taken)
        # The last token of the text is never in the cache: the next step computes it.
        self._target.truncate(sequence.slot, before + accepted)
        round_ = Round(len(draft.tokens), accepted, taken, ended=taken == accepted)
        sequence.rounds.append(round_)
        self._length.observe(sequence.slot, draft, round_)
        if self._proposer is not None:
            self._proposer.settle(sequence.slot, before + accepted)

    def _release(self, slot: int) -> None:
        self._target.release(slot)
        self._length.release(slot)
        if self._proposer is not None:
            self._proposer.release(slot)


def _batch(sequences: Sequence[Speculated], drafts: Sequence[Draft]) -> Batch:
    """Of each sequence its last token and its draft, with logits for all."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    for sequence, draft in zip(sequences, drafts, strict=True):
        n, at = 1 + len(draft.tokens), len(sequence.context) - 1
        tokens += [sequence.context[-1], *draft.tokens]
        positions += range(at, at + n)
        slots += [sequence.slot] * n
    return Batch(
        np.array(tokens, np.int32), np.array(positions, np.int32), np.array(slots, np.int32), np.ones(len(tokens), bool)
    )
