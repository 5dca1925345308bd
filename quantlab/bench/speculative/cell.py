"""The child process of one draft: it holds target and draft, and decodes whatever the parent asks for.

`k` of a run: how many tokens to draft; 0 decodes plainly, ADAPTIVE lets the length adapt. A run of fillers drafts
tokens that are hardly ever right: plain decoding through steps of the shape of a verify.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from quantlab.bench.speculative.costs import costs_of
from quantlab.bench.speculative.drafters import Drafter, capacity, opened_drafter
from quantlab.bench.speculative.prompts import Encoded, encode, read_prompts
from quantlab.bench.speculative.spec import SpeculativeSpec
from quantlab.bench.workloads import ids_sha256
from quantlab.core.errors import UsageError
from quantlab.engine import Request, Sampling
from quantlab.engine.speculative import (
    AdaptiveLength,
    Ask,
    Draft,
    DraftLength,
    FixedLength,
    Proposer,
    Round,
    RoundCosts,
    Speculated,
    SpeculativeDecoder,
    StepTimes,
)
from quantlab.engine.speculative.feeding import feed
from quantlab.runtime.backend import Backend, Batch, Loaded, Tokens
from quantlab.runtime.worker import Channel

ADAPTIVE = -1
# Rounds that warm up each length, and teach the adaptive one what a round costs.
_WARM_TOKENS = 24


class Job(msgspec.Struct, frozen=True):
    """The draft number `draft` of `spec`."""

    spec: SpeculativeSpec
    draft: int


class Ready(msgspec.Struct, frozen=True):
    """What loaded, and the prompts.

    `draft_bytes`: weights of the draft, and KV of all sequences at full length; `chained`: it drafts token after
    token; `most_draft`: the most tokens that it drafts, where it has a limit of its own.
    """

    target: Loaded
    drafter: Loaded | None
    categories: list[str]
    prompt_tokens: list[int]
    prompt_sha256: str
    too_long: int
    draft_bytes: int
    chained: bool
    most_draft: int | None = None


class Run(msgspec.Struct, frozen=True):
    """Decode these prompts (by number) together."""

    prompts: list[int]
    k: int
    filler: bool = False


class Answer(msgspec.Struct, frozen=True):
    """One sequence: its new tokens, when the first and the last were there (seconds from the start), its rounds."""

    tokens: list[int]
    first_s: float
    last_s: float
    rounds: list[Round]


class Ran(msgspec.Struct, frozen=True):
    """One run."""

    answers: list[Answer]
    steps: list[StepTimes]
    cpu_s: float


class Part(msgspec.Struct, frozen=True):
    """Where two greedy answers to a prompt part: what they agree on, and the two tokens that follow."""

    prompt: int
    agreed: list[int]
    tokens: tuple[int, int]


class Gap(msgspec.Struct, frozen=True):
    """How far apart the logits of two tokens are in steps of one token, in standard deviations of all.

    `moved` is the most that a logit changes, in the same unit, where the text is computed at once instead.
    """

    deviations: float
    moved: float


def work(job_json: object, channel: Channel) -> None:
    """Send Ready; then answer each message: a batch size (warm up for it), a Run or a Part; end at None."""
    from quantlab.runtime.loading import import_runtime, opened

    job = msgspec.convert(job_json, Job)
    spec, source = job.spec, job.spec.draft[job.draft]
    prompts = read_prompts(spec.prompts, spec.categories, spec.prompts_per_category)
    path = Path(spec.model.path)
    import_runtime(path)
    dtype = spec.dtype if path.is_dir() else "auto"
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(
            opened(
                path,
                capacity(spec, path),
                device=spec.device,
                dtype=dtype,
                threads=spec.threads,
                hidden=source.kind in ("medusa", "eagle"),
            )
        )
        drafter = stack.enter_context(opened_drafter(spec, source, target))
        encoded = encode(prompts, target, _context(spec, target.describe()) - spec.new_tokens)
        channel.send("ready", msgspec.to_builtins(_ready(target, drafter, encoded)))
        cell = _Cell(spec, target, drafter, encoded.ids)
        while (message := channel.receive()) is not None:
            if isinstance(message, int):
                cell.warm_up(message)
                channel.send("warm", None)
            elif "agreed" in message:
                channel.send("gap", msgspec.to_builtins(cell.gap(msgspec.convert(message, Part))))
            else:
                channel.send("ran", msgspec.to_builtins(cell.run(msgspec.convert(message, Run))))


def _context(spec: SpeculativeSpec, loaded: Loaded) -> int:
    """Tokens that a sequence may have; UsageError where the spec's answers and drafts do not fit."""
    n_ctx = min(spec.n_ctx, loaded.n_ctx_train or spec.n_ctx)
    if max(spec.new_tokens, *spec.k) >= n_ctx:
        raise UsageError(
            f"answers of {spec.new_tokens} tokens with drafts of up to {max(spec.k)}: the context of "
            f"`{spec.model.label}` holds {n_ctx}",
            "lower `--new-tokens` and `-k`",
        )
    return n_ctx


def _ready(target: Backend, drafter: Drafter, encoded: Encoded) -> Ready:
    return Ready(
        target=target.describe(),
        drafter=drafter.loaded,
        categories=encoded.categories,
        prompt_tokens=[len(ids) for ids in encoded.ids],
        prompt_sha256=ids_sha256(encoded.ids),
        too_long=encoded.too_long,
        draft_bytes=drafter.size_bytes,
        chained=drafter.proposer.chained,
        most_draft=drafter.most,
    )


class _Filler:
    """Drafts the last token over and over."""

    name, chained = "filler", False

    def begin(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Nothing is read."""

    def watch(self, batch: Batch) -> None:
        """Nothing is learnt."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft([ask.context[-1]] * ask.limit) for ask in asks]

    def settle(self, slot: int, length: int) -> None:
        """Nothing is kept."""

    def release(self, slot: int) -> None:
        """Nothing is kept."""


class _Cell:
    """Runs on one target with one draft."""

    def __init__(self, spec: SpeculativeSpec, target: Backend, drafter: Drafter, prompts: list[Tokens]) -> None:
        self._spec, self._target, self._proposer, self._prompts = spec, target, drafter.proposer, prompts
        self._most = spec.longest_draft(drafter.most)
        self._adaptive: DraftLength = FixedLength(max(spec.k))

    def warm_up(self, batch: int) -> None:
        """Decode a little in every way that will be measured, and learn what a round of `batch` sequences costs."""
        group = [i % len(self._prompts) for i in range(batch)]
        plain: list[StepTimes] = []
        drafted: list[StepTimes] = []
        for k in (0, *sorted(set(self._spec.k))):
            for proposer, steps in ((_Filler(), plain), (self._proposer, drafted)):
                new_tokens = min(_WARM_TOKENS + k, self._spec.new_tokens)
                # An answer that ends at once would teach nothing.
                steps.extend(self._decode(group, FixedLength(k), proposer, new_tokens, ignore_eos=True)[0].steps)
        costs = costs_of(batch, plain, drafted, chained=self._proposer.chained)
        lengths = range(self._most + 1)
        known = RoundCosts(tuple(map(costs.draft_s, lengths)), tuple(map(costs.verify_s, lengths)))
        self._adaptive = AdaptiveLength(self._most, known)

    def run(self, run: Run) -> Ran:
        """One run, alone on the machine as far as it can know."""
        length = self._adaptive if run.k == ADAPTIVE else FixedLength(run.k)
        proposer = _Filler() if run.filler else self._proposer
        before = time.process_time()
        spec = self._spec
        decoder, sequences = self._decode(run.prompts, length, proposer, spec.new_tokens, ignore_eos=spec.ignore_eos)
        cpu_s = time.process_time() - before
        start = decoder.start_s
        answers = [Answer(s.tokens, s.times_s[0] - start, s.times_s[-1] - start, s.rounds) for s in sequences]
        return Ran(answers, decoder.steps, cpu_s)

    def _decode(
        self, group: list[int], length: DraftLength, proposer: Proposer, new_tokens: int, *, ignore_eos: bool
    ) -> tuple[SpeculativeDecoder, list[Speculated]]:
        spec = self._spec
        sampling = Sampling(temperature=spec.temperature, seed=spec.seed)
        requests = [
            # Every way of decoding a group draws the same; a prompt that is in it twice draws twice.
            Request(i * 1_000_003 + number, self._prompts[number], new_tokens, ignore_eos=ignore_eos, sampling=sampling)
            for i, number in enumerate(group)
        ]
        decoder = SpeculativeDecoder(self._target, proposer if length.most else None, length)
        return decoder, decoder.generate(requests)

    def gap(self, part: Part) -> Gap:
        """How near two answers were where they part."""
        prompt = self._prompts[part.prompt].tolist()
        rows = []
        for pieces in ([prompt, *([token] for token in part.agreed)], [[*prompt, *part.agreed]]):
            try:
                for piece in pieces:
                    row = feed(self._target, [(0, piece)])[0]
                rows.append(row.astype(np.float64))
            finally:
                self._target.release(0)
        plain, at_once = (row - row.mean() for row in rows)
        one, other = part.tokens
        apart, moved = abs(plain[one] - plain[other]), np.abs(plain - at_once).max()
        return Gap(float(apart / plain.std()), float(moved / plain.std()))
