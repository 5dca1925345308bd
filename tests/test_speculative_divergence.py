"""Answers that are not those of plain decoding: how they are judged, by steps of the same shape and by logits."""

from __future__ import annotations

from typing import Any

import msgspec

from quantlab.bench.speculative import notices
from quantlab.bench.speculative.cell import ADAPTIVE, Answer, Ran, Ready
from quantlab.bench.speculative.points import Group
from quantlab.bench.speculative.session import Divergence, Session
from quantlab.bench.speculative.spec import DraftSource, SpeculativeSpec
from quantlab.core.model import ModelFile
from quantlab.core.result import RuntimeInfo
from quantlab.runtime.backend import Capacity, Loaded

SPEC = SpeculativeSpec(ModelFile("m", "m", "m", "0"), draft=[DraftSource("ngram", "ngram")], k=[2, 3])
LOADED = Loaded(
    RuntimeInfo("x", "1", "cpu", "F16", {}, 1), Capacity(), 9, 2048, 100, 100, 2, None, frozenset(), False, None
)


def silent(done: float) -> None:
    assert 0 <= done < 1


def ran(*answers: list[int]) -> Ran:
    return Ran([Answer(tokens, 0.0, 1.0, []) for tokens in answers], [], 0.0)


class Child:
    """Answers fillers with the given runs, one after the other, and every gap with the next of `gaps`."""

    def __init__(self, fillers: list[Ran], gaps: list[float]) -> None:
        self.fillers, self.gaps = iter(fillers), iter(gaps)
        self.asked: list[Any] = [Ready(LOADED, None, ["a"] * 3, [4] * 3, "sha", 0, 0, chained=True)]
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if "agreed" in message:
            self.asked.append({"deviations": next(self.gaps), "moved": 0.02})
        else:
            assert message["filler"]
            self.asked.append(next(self.fillers))

    def receive(self) -> Any:
        return msgspec.to_builtins(self.asked.pop())


def test_equal_answers_ask_nothing() -> None:
    child = Child([], [])
    groups = [Group("a", [0, 1], {0: ran([1, 2], [3]), 2: ran([1, 2], [3])})]
    assert Session(SPEC, child).divergence(groups, 2, silent) is None
    assert not child.sent


def test_a_divergence_is_held_against_steps_of_its_shape_and_the_logits_where_it_begins() -> None:
    """Three prompts: one equal, one that a filler run changes too, one that it does not."""
    plain, fast = ran([1, 2, 3], [1, 5, 6], [7, 8, 9]), ran([1, 2, 3], [1, 6, 6], [7, 4])
    child = Child([ran([1, 2, 3], [1, 6, 6], [7, 8, 9])], [0.01, 0.3])
    found = Session(SPEC, child).divergence([Group("a", [0, 1, 2], {0: plain, 3: fast})], 3, silent)
    assert found == Divergence(3, natural=1 / 3, same_shape=2 / 3, widest_gap=0.3, moved=0.02)
    assert child.sent[0] == {"prompts": [0, 1, 2], "k": 3, "filler": True}
    assert [(m["prompt"], m["agreed"], m["tokens"]) for m in child.sent[1:]] == [(1, [1], (5, 6)), (2, [7], (8, 4))]


def test_the_adaptive_length_is_held_against_its_longest_draft() -> None:
    child = Child([ran([2])], [0.0])
    Session(SPEC, child).divergence([Group("a", [0], {0: ran([1]), ADAPTIVE: ran([2])})], ADAPTIVE, silent)
    assert child.sent[0]["k"] == 3


def test_a_prompt_that_is_in_two_batches_counts_in_both_and_fillers_of_a_shape_run_once() -> None:
    """A prompt that begins a category again: its answer changed in the first batch, and not in the second."""
    child = Child([ran([1, 2], [3, 4]), ran([5, 6], [1, 2])], [0.01, 0.01])
    groups = [
        Group("a", [0, 1], {0: ran([1, 2], [3, 4]), 3: ran([1, 9], [3, 4]), ADAPTIVE: ran([1, 9], [3, 4])}),
        Group("a", [2, 0], {0: ran([5, 6], [1, 2]), 3: ran([5, 6], [1, 2]), ADAPTIVE: ran([5, 6], [1, 2])}),
    ]
    session = Session(SPEC, child)
    expected = Divergence(4, natural=0.0, same_shape=3 / 4, widest_gap=0.01, moved=0.02)
    assert session.divergence(groups, 3, silent) == expected == session.divergence(groups, ADAPTIVE, silent)
    assert len([m for m in child.sent if "filler" in m]) == 2


def test_rounding_is_told_from_a_fault() -> None:
    (near,) = notices.of_divergence(Divergence(9, 0.2, 0.9, 0.004, 0.001), 3)
    (far,) = notices.of_divergence(Divergence(9, 0.0, 0.5, 1.2, 0.5), 3)
    assert (near.code, far.code) == ("not-bit-stable", "output-differs")
    assert "20.0% of the plain answers" in near.message and "90.0% of the answers with 3 draft tokens" in near.message
    # Equal to plain decoding in steps of the same shape: whatever the logits of another shape say.
    (same,) = notices.of_divergence(Divergence(9, 0.2, 1.0, 1.2, 0.1), 3)
    # Kernels that move logits this far explain it.
    (coarse,) = notices.of_divergence(Divergence(9, 0.2, 0.9, 0.3, 0.2), 3)
    assert same.code == coarse.code == "not-bit-stable"
    assert not list(notices.of_divergence(None, 3))
