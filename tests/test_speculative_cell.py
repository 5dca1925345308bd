"""The child's side of the bench: warm-up, runs, and how near two answers are where they part."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from quantlab.bench.speculative.cell import ADAPTIVE, Answer, Part, Ran, Ready, Run, _Cell
from quantlab.bench.speculative.drafters import Drafter
from quantlab.bench.speculative.points import Group, costs_of_groups
from quantlab.bench.speculative.rows import best_in_theory, row
from quantlab.bench.speculative.spec import DraftSource, SpeculativeSpec
from quantlab.core.model import ModelFile
from quantlab.engine.speculative import AdaptiveLength, NgramProposer, Round, StepTimes
from tests.table_model import TableBackend

SPEC = SpeculativeSpec(
    ModelFile("m", "m", "m", "0"), draft=[DraftSource("ngram", "ngram")], k=[2, 3], new_tokens=12, batch=[2]
)
PROMPT = np.array([1, 2], np.int32)


def cell(target: TableBackend, most: int | None = None) -> _Cell:
    return _Cell(SPEC, target, Drafter(NgramProposer(), most=most), [PROMPT])


def test_answers_that_end_at_once_have_numbers_of_nothing() -> None:
    """The warm-up goes on past the end; in the runs no step is made, and no cost is known."""
    first = int(TableBackend(0).table[1, 2].argmax())
    child = cell(TableBackend(0, eos=frozenset({first})))
    child.warm_up(2)
    assert isinstance(child._adaptive, AdaptiveLength)
    runs = {k: child.run(Run([0, 0], k)) for k in (0, 2, 3, ADAPTIVE)}
    assert all(answer.tokens == [first] for ran in runs.values() for answer in ran.answers)
    groups = [Group("a", [0, 0], runs)]
    costs = costs_of_groups(groups, 2, chained=False)
    ready = Ready(child._target.describe(), None, ["a"], [2], "sha", 0, 0, chained=False)
    for k in (2, ADAPTIVE):
        found = row(SPEC, ready, groups, costs, k)
        assert found.point is None
        assert found.measurements.keys() == {"ttft", "ttft_plain", "draft_bytes", "output_identity"}
    assert best_in_theory(SPEC, ready, groups, costs) == {"theory_best_k": 0, "theory_speedup": None}


def test_theory_seeks_no_longer_draft_than_there_can_be() -> None:
    """Every draft token is accepted and hardly costs anything: the longest is the best."""
    plain = [StepTimes(1, 1, 0, 0.0, 0.010, 0.010)] * 9
    drafted = [StepTimes(1, 4, 3, 0.001, 0.011, 0.012)] * 9
    answer = Answer(list(range(12)), 0.0, 1.0, [Round(3, 3, 4, ended=False)] * 2)
    groups = [
        Group("a", [0], {0: Ran([answer], plain, 0.0), 2: Ran([answer], [], 0.0), 3: Ran([answer], drafted, 0.0)})
    ]
    costs, target = costs_of_groups(groups, 1, chained=True), TableBackend(0).describe()
    found = [
        best_in_theory(SPEC, Ready(target, None, ["a"], [2], "sha", 0, 0, True, most), groups, costs)
        for most in (None, 2)
    ]
    assert [details["theory_best_k"] for details in found] == [3, 2]
    assert found[0]["theory_speedup"] == pytest.approx(4 / 1.2)


def test_theory_knows_that_heads_draft_a_short_draft_no_faster() -> None:
    """Four tokens of a draft at once take 4 ms, a step 10, a verify 12; 0.6 of them are accepted."""
    spec = msgspec.structs.replace(SPEC, k=[4], batch=[1])
    plain, drafted = [StepTimes(1, 1, 0, 0.0, 0.010, 0.010)] * 9, [StepTimes(1, 5, 4, 0.004, 0.012, 0.016)] * 9
    rounds = [Round(4, 3, 4, ended=False), Round(4, 0, 1, ended=False)]
    answer = Answer(list(range(12)), 0.0, 1.0, rounds)
    groups = [Group("a", [0], {0: Ran([answer], plain, 0.0), 4: Ran([answer], drafted, 0.0)})]
    ready = Ready(TableBackend(0).describe(), None, ["a"], [2], "sha", 0, 0, chained=False)
    found = best_in_theory(spec, ready, groups, costs_of_groups(groups, 1, chained=False))
    assert found == {"theory_best_k": 4, "theory_speedup": pytest.approx((1 - 0.6**5) / 0.4 / 1.6)}


def test_the_adaptive_length_is_within_what_can_be_drafted() -> None:
    for most, longest in ((None, 3), (2, 2), (9, 3)):
        child = cell(TableBackend(0), most)
        child.warm_up(2)
        assert child._adaptive.most == longest


def test_the_gap_is_that_of_two_tokens_logits() -> None:
    target = TableBackend(0)
    child = cell(target)
    row = target.table[2, 4].astype(np.float64)
    found = child.gap(Part(0, [4], (1, 3)))
    assert found.deviations == pytest.approx(abs(row[1] - row[3]) / row.std(), rel=1e-5)
    assert found.moved == 0
    # A model whose longer steps round otherwise.
    exact = target.forward
    target.forward = lambda batch: exact(batch) * (1 + 0.01 * (len(batch.tokens) > 2))
    coarse = child.gap(Part(0, [4], (1, 3)))
    assert coarse.deviations == found.deviations
    assert coarse.moved == pytest.approx(0.01 * np.abs(row - row.mean()).max() / row.std(), rel=1e-3)
    assert target.length(0) == 0
