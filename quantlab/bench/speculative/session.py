"""All runs of one draft, in its child process: batch by batch, group by group, every length in turns.

Who begins changes from group to group, so that drift of the machine meets all alike and a group's runs can be compared
in pairs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from quantlab.bench.contention import Contention
from quantlab.bench.speculative.cell import ADAPTIVE, Gap, Job, Part, Ran, Ready, Run
from quantlab.bench.speculative.points import Group, identical
from quantlab.bench.speculative.spec import SpeculativeSpec
from quantlab.runtime.worker import Worker

_CHILD = "quantlab.bench.speculative.cell:work"
# Of answers that part, so many are looked at.
_MOST_GAPS = 16


class Divergence(msgspec.Struct, frozen=True):
    """Greedy answers that are not those of plain decoding, and what that is worth.

    `natural` is the share of the plain `answers` that change when every step has the shape of a verify, without any
    draft that stands; `same_shape` the share of those with drafts that are equal to what is said then. `widest_gap`:
    where answers part, the distance of the two tokens' logits under plain decoding, in standard deviations of all
    logits; `moved`: the most that a logit changes there with the shape of the steps alone.
    """

    answers: int
    natural: float
    same_shape: float
    widest_gap: float
    moved: float


class Session:
    """One draft with its target, loaded."""

    def __init__(self, spec: SpeculativeSpec, worker: Worker) -> None:
        self.spec, self._worker = spec, worker
        self.contention = Contention()
        self.ready = msgspec.convert(worker.receive(), Ready)
        # Runs of fillers by their length and prompts: other lengths ask for the same.
        self._filled: dict[tuple[int, ...], Ran] = {}

    def lengths(self) -> list[int]:
        """`k` of every run of a group: plain first."""
        return [0, *sorted(set(self.spec.k)), *([ADAPTIVE] if self.spec.adaptive else [])]

    def warm_up(self, batch: int) -> None:
        """Before `measure`: decode a little in every way."""
        self._ask(batch)

    def measure(self, batch: int) -> Iterator[Group]:
        """Every group of prompts, decoded in every way."""
        for turn, (category, prompts) in enumerate(groups_of(self.ready.categories, batch)):
            order, runs = self.lengths(), dict[int, Ran]()
            first = turn % len(order)
            for k in order[first:] + order[:first]:
                self.contention.begin()
                runs[k] = msgspec.convert(self._ask(Run(prompts, k)), Ran)
                self.contention.end(runs[k].cpu_s)
            yield Group(category, prompts, runs)

    def divergence(self, groups: Sequence[Group], k: int, advance: Callable[[float], None]) -> Divergence | None:
        """What the answers of `k` that differ from plain decoding are worth; None where none does."""
        if all(all(identical(group, k).values()) for group in groups):
            return None
        shape = max(self.spec.k) if k == ADAPTIVE else k
        # A prompt may be in several places of the batches.
        natural: list[bool] = []
        alike: list[bool] = []
        gaps: list[Gap] = []
        for done, group in enumerate(groups):
            advance(done / len(groups))
            filled = self._filler(shape, group.prompts)
            plain, fast = group.runs[0].answers, group.runs[k].answers
            for prompt, a, b, c in zip(group.prompts, plain, fast, filled.answers, strict=True):
                natural.append(a.tokens != c.tokens)
                alike.append(b.tokens == c.tokens)
                if a.tokens != b.tokens and len(gaps) < _MOST_GAPS:
                    gaps.append(msgspec.convert(self._ask(_parting(prompt, a.tokens, b.tokens)), Gap))
        n, widest, moved = len(natural), max(gap.deviations for gap in gaps), max(gap.moved for gap in gaps)
        return Divergence(n, sum(natural) / n, sum(alike) / n, widest, moved)

    def _filler(self, k: int, prompts: list[int]) -> Ran:
        key = (k, *prompts)
        if key not in self._filled:
            self._filled[key] = msgspec.convert(self._ask(Run(prompts, k, filler=True)), Ran)
        return self._filled[key]

    def _ask(self, message: Any) -> Any:
        self._worker.send(msgspec.to_builtins(message))
        return self._worker.receive()


@contextlib.contextmanager
def opened_session(spec: SpeculativeSpec, draft: int) -> Iterator[Session]:
    """The draft number `draft` of the spec, loaded beside its target in a child process."""
    with Worker(_CHILD, msgspec.to_builtins(Job(spec, draft))) as worker:
        yield Session(spec, worker)
        worker.send(None)
        worker.result()


def groups_of(categories: Sequence[str], batch: int) -> list[tuple[str, list[int]]]:
    """Prompts by number in groups of `batch` of one category; the last one of a category begins again at its first."""
    groups = []
    for category in dict.fromkeys(categories):
        numbers = [i for i, of in enumerate(categories) if of == category]
        starts = range(0, len(numbers), batch)
        groups += [(category, [numbers[(at + i) % len(numbers)] for i in range(batch)]) for at in starts]
    return groups


def _parting(prompt: int, plain: list[int], fast: list[int]) -> Part:
    """Where two answers part: before they do, neither ends without the other."""
    at = next(i for i, (a, b) in enumerate(zip(plain, fast, strict=False)) if a != b)
    return Part(prompt, plain[:at], (plain[at], fast[at]))
