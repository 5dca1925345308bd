"""From runs to numbers: acceptance, tokens per verify, costs, speed-up, beside what theory expects of them.

For the prompts of one group, decoded plainly and with drafts in turns:

    acceptance_rate          accepted / tested draft tokens: of those decided on, not of those after a rejected one
    mean_tokens_per_verify   tokens handed out / rounds, of rounds that the end of an answer did not shorten
    draft_cost_ratio c       seconds of a draft token / seconds of a plain step
    verify_cost_ratio v      seconds of a verify / seconds of a plain step
    predicted_speedup        mean of (1 - a^(n+1)) / (1 - a) over mean of n c + v(n), n the tokens of each draft
    speedup                  plain seconds a token / speculative seconds a token, both after the first token

Steps in which some sequences were done already count in the speed-up, not in the costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from quantlab.bench.speculative.cell import Answer, Ran
from quantlab.bench.speculative.costs import VerifyTimes
from quantlab.core.statistics import Interval, median, paired_ratio
from quantlab.engine.speculative import Round
from quantlab.engine.speculative.theory import expected_tokens


class Group(NamedTuple):
    """The prompts of one run (by number), of one category; the runs by `k` of their Run."""

    category: str
    prompts: list[int]
    runs: dict[int, Ran]


class Pooled(NamedTuple):
    """Rounds of several answers."""

    rounds: list[Round]

    @property
    def tested(self) -> int:
        """Draft tokens decided on."""
        return sum(r.tested for r in self.rounds)

    @property
    def accepted(self) -> int:
        """Draft tokens accepted."""
        return sum(r.accepted for r in self.rounds)

    @property
    def drafted(self) -> int:
        """Draft tokens."""
        return sum(r.drafted for r in self.rounds)

    @property
    def acceptance(self) -> float | None:
        """Accepted of tested; None where nothing was tested."""
        return self.accepted / self.tested if self.tested else None

    @property
    def coverage(self) -> float:
        """The share of rounds with a draft."""
        return sum(r.drafted > 0 for r in self.rounds) / len(self.rounds) if self.rounds else 0.0

    @property
    def draft_length(self) -> float:
        """Tokens of a draft, of the rounds that have one."""
        drafts = [r.drafted for r in self.rounds if r.drafted]
        return sum(drafts) / len(drafts) if drafts else 0.0

    @property
    def tokens_per_verify(self) -> float | None:
        """Tokens handed out by a round; None without rounds."""
        return sum(r.emitted for r in self.rounds) / len(self.rounds) if self.rounds else None

    def acceptance_by_position(self) -> list[float]:
        """Of each position the share accepted where it was tested, as far as any was."""
        found: list[float] = []
        while tested := sum(r.tested > len(found) for r in self.rounds):
            found.append(sum(r.accepted > len(found) for r in self.rounds) / tested)
        return found


class Costs(NamedTuple):
    """Of one batch size: times of its verifies, and seconds of a draft token."""

    batch: int
    verify: VerifyTimes
    draft_s: float

    @property
    def c(self) -> float:
        """A draft token in plain steps."""
        return self.draft_s / self.verify.seconds(1)

    def v(self, k: float) -> float:
        """A verify of `k` draft tokens in plain steps."""
        return self.verify.ratio(1 + k)


def costs_of(groups: Sequence[Group], batch: int) -> Costs:
    """The costs of a batch size from everything that ran with it."""
    times, draft_s = VerifyTimes(), []
    for group in groups:
        for k, ran in group.runs.items():
            for step in ran.steps:
                if step.sequences != batch:
                    continue
                times.add(step.rows / step.sequences, step.verify_s)
                if k and step.longest_draft:
                    draft_s.append(step.draft_s / step.longest_draft)
    return Costs(batch, times, median(draft_s) if draft_s else 0.0)


def pooled(groups: Sequence[Group], k: int, *, whole: int | None = None) -> Pooled:
    """The rounds of all runs of `k`; with `whole` (the most new tokens) only those that no end shortened."""
    rounds: list[Round] = []
    for group in groups:
        for answer in group.runs[k].answers:
            rounds += answer.rounds if whole is None else _unbounded(answer, k, whole)
    return Pooled(rounds)


def _unbounded(answer: Answer, k: int, new_tokens: int) -> Iterator[Round]:
    """The rounds before the end of the answer came into reach of a draft, and the answer did not end in them."""
    left = new_tokens - 1
    for round_ in answer.rounds:
        if left > max(k, round_.drafted) and not round_.ended:
            yield round_
        left -= round_.emitted


def predicted(rounds: Pooled, costs: Costs) -> float | None:
    """The speed-up that acceptance and costs let expect; None where nothing was drafted."""
    a = rounds.acceptance
    if a is None:
        return None
    tokens = np.mean([expected_tokens(a, r.drafted) for r in rounds.rounds])
    cost = np.mean([r.drafted * costs.c + costs.v(r.drafted) for r in rounds.rounds])
    return float(tokens / cost)


def expected_tokens_per_verify(rounds: Pooled) -> float | None:
    """Tokens per verify by the formula at the rounds' acceptance and lengths."""
    a = rounds.acceptance
    return None if a is None else float(np.mean([expected_tokens(a, r.drafted) for r in rounds.rounds]))


def seconds_a_token(ran: Ran) -> float | None:
    """Seconds a token after the first ones; None where every answer has one token."""
    tokens = sum(len(answer.tokens) - 1 for answer in ran.answers)
    if not tokens:
        return None
    return (max(a.last_s for a in ran.answers) - min(a.first_s for a in ran.answers)) / tokens


def tpot_s(ran: Ran) -> float | None:
    """The mean TPOT of the answers that have two tokens; None where none has."""
    tpots = [(a.last_s - a.first_s) / (len(a.tokens) - 1) for a in ran.answers if len(a.tokens) > 1]
    return sum(tpots) / len(tpots) if tpots else None


def ttft_s(ran: Ran) -> float:
    """Seconds to the first tokens, the draft's prefill included."""
    return min(answer.first_s for answer in ran.answers)


def pairs(groups: Sequence[Group], k: int) -> list[tuple[float, float]]:
    """(plain, speculative) seconds a token of each group that has some."""
    found = []
    for group in groups:
        plain, fast = seconds_a_token(group.runs[0]), seconds_a_token(group.runs[k])
        if plain and fast:
            found.append((plain, fast))
    return found


def speedup(groups: Sequence[Group], k: int) -> Interval | None:
    """The geometric mean over groups; None where no answer has a second token."""
    found = pairs(groups, k)
    return paired_ratio([plain for plain, _ in found], [fast for _, fast in found]) if found else None


def end_to_end_speedup(groups: Sequence[Group], k: int) -> Interval:
    """Of whole answers, prefills included, for each token of theirs."""
    ratio = [
        [max(a.last_s for a in ran.answers) / sum(len(a.tokens) for a in ran.answers) for ran in runs]
        for runs in ((group.runs[0] for group in groups), (group.runs[k] for group in groups))
    ]
    return paired_ratio(ratio[0], ratio[1])


def identical(group: Group, k: int) -> dict[int, bool]:
    """For each prompt of a group whether its answer is that of plain decoding."""
    runs = zip(group.prompts, group.runs[0].answers, group.runs[k].answers, strict=True)
    same: dict[int, bool] = {}
    for prompt, plain, fast in runs:
        same[prompt] = same.get(prompt, True) and plain.tokens == fast.tokens
    return same
