"""From runs to numbers: acceptance, tokens per verify, costs, speed-up, beside what theory expects of them.

For the prompts of one group, decoded plainly and with drafts in turns:

    acceptance_rate          accepted / tested draft tokens: of those decided on, not of those after a rejected one
    mean_tokens_per_verify   tokens handed out / rounds, of rounds that the end of an answer did not shorten
    draft_cost_ratio c       seconds of a draft / its tokens n / seconds of a plain step
    verify_cost_ratio v      seconds of a verify / seconds of a plain step
    predicted_speedup        mean of (1 - a^(n+1)) / (1 - a) over mean of m c(m) + v(n), n the tokens of each draft, m
                             those of the longest of a step
    speedup                  plain seconds a token / speculative seconds a token, both after the first token

Costs depend on n: heads and lookups make all tokens of a draft at once. Steps in which some sequences were done already
count in the speed-up, not in the costs (costs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quantlab.bench.speculative.cell import ADAPTIVE, Answer, Ran
from quantlab.bench.speculative.costs import Costs, costs_of
from quantlab.core.statistics import Interval, paired_ratio
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


def costs_of_groups(groups: Sequence[Group], batch: int, *, chained: bool) -> Costs:
    """The costs of a batch size from everything that ran with it; `chained` as in `costs_of`."""
    runs = [(k, step) for group in groups for k, ran in group.runs.items() for step in ran.steps]
    return costs_of(batch, [step for k, step in runs if k == 0], [step for k, step in runs if k], chained=chained)


def pooled(groups: Sequence[Group], k: int, *, whole: int | None = None) -> Pooled:
    """The rounds of all runs of `k`; with `whole` (the most new tokens) only those that no end shortened."""
    rounds: list[Round] = []
    for group in groups:
        for answer in group.runs[k].answers:
            rounds += answer.rounds if whole is None else _unbounded(answer, _longest(group, k), whole)
    return Pooled(rounds)


def _longest(group: Group, k: int) -> int:
    """The tokens that a draft of `k` may have: what adapts goes up to the longest fixed length."""
    return max(group.runs) if k == ADAPTIVE else k


def _unbounded(answer: Answer, longest: int, new_tokens: int) -> list[Round]:
    """The first rounds: before the end of the answer came into reach of a draft, and without that which ended it."""
    left = new_tokens - 1
    for i, round_ in enumerate(answer.rounds):
        if left <= longest or round_.ended:
            return answer.rounds[:i]
        left -= round_.emitted
    return answer.rounds


def predicted(groups: Sequence[Group], k: int, costs: Costs, new_tokens: int) -> float | None:
    """The speed-up that acceptance and costs let expect of steps of whole rounds of all sequences.

    None where there is no such step, nothing was drafted, or the costs are not known.
    """
    a, tokens, steps = pooled(groups, k, whole=new_tokens).acceptance, list[float](), list[float]()
    if a is None or not costs.known:
        return None
    for group in groups:
        ran = group.runs[k]
        # A step is one round of every sequence that is not done.
        whole = [_unbounded(answer, _longest(group, k), new_tokens) for answer in ran.answers]
        for step, *rounds in zip(ran.steps, *whole, strict=False):
            steps.append(costs.of_step(step))
            tokens += [expected_tokens(a, round_.drafted) for round_ in rounds]
    return float(np.mean(tokens) / np.mean(steps)) if steps else None


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
