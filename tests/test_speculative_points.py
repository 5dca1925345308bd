"""From runs to numbers to a diagnosis: rounds counted by hand, costs, groups, prompts from files, wrong specs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantlab.bench.speculative import points
from quantlab.bench.speculative.cell import ADAPTIVE, Answer, Ran
from quantlab.bench.speculative.costs import TimesByTokens
from quantlab.bench.speculative.diagnosis import Point, best_of, diagnose, switch_off_batch
from quantlab.bench.speculative.points import Group, Pooled
from quantlab.bench.speculative.prompts import encode, read_prompts
from quantlab.bench.speculative.session import groups_of
from quantlab.bench.speculative.spec import DraftSource, SpeculativeSpec
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.model import ModelFile
from quantlab.engine.speculative import Round, StepTimes
from tests.table_model import TableBackend

MODEL = ModelFile("m.gguf", "m", "m", "0")


def rounds(*numbers: tuple[int, int, int] | tuple[int, int, int, bool]) -> list[Round]:
    return [Round(*n, *([False] if len(n) == 3 else [])) for n in numbers]


def test_rounds_are_counted_by_hand() -> None:
    """Drafts of 3: all stand, the first falls, two stand; one of 2 that ends the answer; one round without a draft."""
    pooled = Pooled(rounds((3, 3, 4), (3, 0, 1), (3, 2, 3), (2, 2, 2, True), (0, 0, 1)))
    # Decided on: 3, then 1, then 3, then 2.
    assert (pooled.drafted, pooled.tested, pooled.accepted) == (11, 9, 7)
    assert pooled.acceptance == pytest.approx(7 / 9)
    assert pooled.coverage == pytest.approx(4 / 5)
    assert pooled.draft_length == pytest.approx(11 / 4)
    assert pooled.tokens_per_verify == pytest.approx(11 / 5)
    assert pooled.acceptance_by_position() == pytest.approx([3 / 4, 3 / 3, 1 / 2])
    nothing = Pooled([])
    assert (nothing.acceptance, nothing.tokens_per_verify, nothing.coverage) == (None, None, 0.0)
    assert nothing.acceptance_by_position() == []


def run(tokens: int, seconds: float, answered: list[Round], steps: list[StepTimes] = [], first: float = 1.0) -> Ran:  # noqa: B006
    return Ran([Answer(list(range(tokens)), first, first + seconds, answered)], steps, 0.0)


def test_rounds_that_the_end_of_an_answer_shortens_are_left_out_of_tokens_per_verify() -> None:
    # 11 tokens at most, 10 after the first: after 4 + 4 two are left, and a draft of 3 does not fit any more.
    found = rounds((3, 3, 4), (3, 3, 4), (1, 1, 2))
    group = Group("code", [0], {0: run(11, 1.0, []), 3: run(11, 0.5, found)})
    assert points.pooled([group], 3).rounds == found
    assert points.pooled([group], 3, whole=11).rounds == found[:2]
    ended = Group("code", [0], {3: run(7, 0.5, rounds((3, 3, 4), (3, 2, 2, True)))})
    assert points.pooled([ended], 3, whole=100).rounds == rounds((3, 3, 4))
    # One that adapts could have drafted as many as the longest: 10 are left, then 6, then 3.
    adapts = Group("code", [0], {ADAPTIVE: run(11, 0.5, rounds((3, 3, 4), (2, 2, 3), (2, 2, 3))), 3: run(1, 0, [])})
    assert points.pooled([adapts], ADAPTIVE, whole=11).rounds == rounds((3, 3, 4), (2, 2, 3))


def test_costs_are_medians_of_full_steps_and_the_prediction_follows() -> None:
    plain = [StepTimes(1, 1, 0, 0.0, s, s) for s in (0.010, 0.010, 0.011, 0.010)]
    drafted = [StepTimes(1, 4, 3, 0.006, s, 0.02) for s in (0.014, 0.014, 0.5)]
    half = [StepTimes(2, 2, 0, 0.0, 9.0, 9.0)]
    answered = rounds((3, 3, 4), (3, 0, 1), (3, 3, 4))
    group = Group("code", [0], {0: run(30, 0.29, [], plain), 3: run(30, 0.145, answered, drafted + half)})
    costs = points.costs_of_groups([group], 1, chained=True)
    assert costs.c(3) == pytest.approx(0.2)
    assert costs.v(3) == pytest.approx(1.4)
    # Between the shapes that ran it is linear.
    assert costs.v(1) == pytest.approx(1 + 0.4 / 3)
    a = 6 / 7
    expected = (1 - a**4) / (1 - a)
    assert points.expected_tokens_per_verify(Pooled(answered)) == pytest.approx(expected)
    assert points.predicted([group], 3, costs, 30) == pytest.approx(expected / (3 * 0.2 + 1.4))
    silent = Group("code", [0], {3: run(30, 0.1, rounds((0, 0, 1)), plain[:1])})
    assert points.predicted([silent], 3, costs, 30) is None
    # No step of a whole draft.
    assert points.predicted([group], 3, costs, 4) is None
    assert points.speedup([group], 3) == (pytest.approx(2.0), None, None)


def test_the_prediction_for_a_batch_is_of_its_steps() -> None:
    """Two sequences; in the second step only one has a draft: three rows at 12 ms, the draft is waited for by both."""
    plain = [StepTimes(2, 2, 0, 0.0, 0.010, 0.010)] * 3
    both, one = StepTimes(2, 4, 1, 0.002, 0.020, 0.03), StepTimes(2, 3, 1, 0.002, 0.012, 0.03)
    late = StepTimes(1, 2, 1, 9.0, 9.0, 9.0)
    answers = [
        Answer(list(range(9)), 1.0, 2.0, rounds((1, 1, 2), (1, 0, 1), (1, 1, 1, True))),
        Answer(list(range(9)), 1.0, 2.0, rounds((1, 1, 2), (0, 0, 1), (1, 1, 2), (1, 1, 2))),
    ]
    ran = Ran(answers, [both, one, both, late], 0.0)
    group = Group("code", [0, 1], {0: run(9, 0.1, [], plain), 1: ran})
    costs = points.costs_of_groups([group] * 3, 2, chained=True)
    # Accepted of tested in whole rounds: 1, 0, then 1, 1 and 1. The third step has a round that ended an answer.
    a = 4 / 5
    tokens = ((1 + a) + (1 + a) + (1 + a) + 1) / 4
    steps = ((2 + 20) / 10 + (2 + 12) / 10) / 2
    assert points.predicted([group], 1, costs, 99) == pytest.approx(tokens / steps)


def test_speed_is_of_the_tokens_after_the_first_and_of_whole_answers_apart() -> None:
    slow = Ran([Answer([1, 2, 3], 1.0, 2.0, []), Answer([1, 2], 1.0, 1.5, [])], [], 0.0)
    assert points.seconds_a_token(slow) == pytest.approx(1.0 / 3)
    assert points.tpot_s(slow) == pytest.approx((0.5 + 0.5) / 2)
    assert points.ttft_s(slow) == 1.0
    single = Ran([Answer([1], 1.0, 1.0, [])], [], 0.0)
    assert points.seconds_a_token(single) is None
    groups = [Group("a", [0], {0: slow, 2: single}), Group("a", [1], {0: slow, 2: slow})]
    assert points.pairs(groups, 2) == [(1 / 3, 1 / 3)]
    fast = Ran([Answer([1, 2, 3, 4, 5], 1.0, 1.25, [])], [], 0.0)
    other = Ran([Answer([1, 2, 3, 4, 5], 0.5, 2.5, [])], [], 0.0)
    assert points.end_to_end_speedup([Group("a", [0], {0: other, 1: fast})], 1).estimate == pytest.approx(2.0)


def test_identity_is_of_prompts() -> None:
    plain = Ran([Answer([1, 2], 0, 1, []), Answer([1, 3], 0, 1, []), Answer([1, 2], 0, 1, [])], [], 0.0)
    fast = Ran([Answer([1, 2], 0, 1, []), Answer([1, 4], 0, 1, []), Answer([1, 2], 0, 1, [])], [], 0.0)
    assert points.identical(Group("a", [7, 8, 7], {0: plain, 1: fast}), 1) == {7: True, 8: False}


def test_verify_times_take_shapes_that_ran_often() -> None:
    times = TimesByTokens()
    for tokens, seconds in ((1, 1.0), (1, 1.2), (1, 1.1), (3, 2.0), (3, 2.0), (3, 2.0), (2, 99.0)):
        times.add(tokens, seconds)
    assert times.seconds(2) == pytest.approx((1.1 + 2.0) / 2)
    assert times.seconds(9) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="no step"):
        TimesByTokens().seconds(1)


def test_a_draft_that_is_made_at_once_costs_the_same_at_every_length() -> None:
    """Heads take 6 ms for one token and for four, and no tokens take no time."""
    plain = [StepTimes(1, 1, 0, 0.0, 0.010, 0.010)] * 3
    short, long = [StepTimes(1, 2, 1, 0.006, 0.012, 0.02)] * 9, [StepTimes(1, 5, 4, 0.006, 0.014, 0.02)] * 3
    found = rounds((4, 4, 5), (4, 0, 1))
    group = Group("code", [0], {0: run(9, 0.1, [], plain), 1: run(9, 0.1, [], short), 4: run(9, 0.1, found, long)})
    costs = points.costs_of_groups([group], 1, chained=False)
    assert [costs.c(k) for k in (0, 1, 2, 4)] == pytest.approx([0, 0.6, 0.3, 0.15])
    assert (costs.steps(0), costs.steps(4)) == (1, pytest.approx(0.6 + 1.4))
    a = 4 / 5
    assert points.predicted([group], 4, costs, 99) == pytest.approx((1 - a**5) / (1 - a) / 2.0)
    # A draft that ran once has no other time.
    single = Group("code", [0], {0: run(9, 0.1, [], plain), 1: run(9, 0.1, [], short[:1])})
    assert points.costs_of_groups([single], 1, chained=False).c(1) == pytest.approx(0.6)


def test_below_the_shortest_draft_only_one_made_token_after_token_takes_less() -> None:
    """Drafts of four tokens alone ran, at 4 ms."""
    plain, drafted = [StepTimes(1, 1, 0, 0.0, 0.010, 0.010)] * 3, [StepTimes(1, 5, 4, 0.004, 0.012, 0.016)] * 3
    group = Group("code", [0], {0: run(9, 0.1, [], plain), 4: run(9, 0.1, [], drafted)})
    at_once, chained = (points.costs_of_groups([group], 1, chained=chained) for chained in (False, True))
    assert [at_once.draft_s(k) for k in (0, 0.5, 1, 2, 4)] == pytest.approx([0, 0.004, 0.004, 0.004, 0.004])
    assert [chained.draft_s(k) for k in (0, 1, 2, 4)] == pytest.approx([0, 0.001, 0.002, 0.004])
    # Nothing was found to draft.
    silent = Group("code", [0], {0: run(9, 0.1, [], plain), 4: run(9, 0.1, [], plain)})
    assert points.costs_of_groups([silent], 1, chained=False).draft_s(4) == 0


def test_groups_are_full_and_of_one_category() -> None:
    categories = ["code", "chat", "code", "code", "chat"]
    assert groups_of(categories, 1) == [("code", [0]), ("code", [2]), ("code", [3]), ("chat", [1]), ("chat", [4])]
    assert groups_of(categories, 2) == [("code", [0, 2]), ("code", [3, 0]), ("chat", [1, 4])]
    assert groups_of(categories, 4) == [("code", [0, 2, 3, 0]), ("chat", [1, 4, 1, 4])]


# Diagnosis


def point(speedup: float, **changed: Any) -> Point:
    known = {
        "batch": 1, "k": 4, "draft_length": 4.0, "coverage": 1.0, "acceptance": 0.6, "draft_cost": 0.1,
        "verify_cost": 1.2, "predicted": speedup, "low": speedup - 0.05, "high": speedup + 0.05,
    }  # fmt: skip
    return Point(speedup=speedup, **(known | changed))


def test_what_pays_has_no_reason_and_what_is_near_one_does_not_pay_for_sure() -> None:
    assert diagnose(point(1.4), [point(1.4)]) is None
    assert [point(s).pays for s in (1.2, 1.02, 0.8)] == [True, None, False]
    assert point(1.4, low=None, high=None).pays is None


def test_acceptance_is_told_with_its_break_even() -> None:
    # (1 - a^5) / (1 - a) = 4 x 0.4 + 1.6 = 3.2 at a = 0.7747; made perfect, acceptance gains most.
    bad = point(0.5, acceptance=0.2, draft_cost=0.4, verify_cost=1.6)
    reason = diagnose(bad, [bad])
    assert reason.dimension == "acceptance"
    assert reason.text == "break-even acceptance at this cost is 0.77; measured 0.20"
    rare = point(0.9, acceptance=0.05, coverage=0.3, draft_cost=0.0, verify_cost=1.6)
    assert diagnose(rare, [rare]).text.endswith("measured 0.05, with a draft in 30% of the rounds")


def test_a_dear_draft_is_told_with_what_it_may_cost() -> None:
    # (1 - 0.8^5) / 0.2 = 3.3616 tokens for 4 x 0.9 + 1.2 = 4.8 steps; (3.3616 - 1.2) / 4 = 0.54.
    bad = point(0.7, acceptance=0.8, draft_cost=0.9)
    reason = diagnose(bad, [bad])
    assert (reason.dimension, reason.text) == (
        "draft cost", "a draft token costs 0.90 steps of the target; at acceptance 0.80 it pays up to 0.54"
    )  # fmt: skip
    bad = point(0.2, acceptance=0.3, draft_cost=2.0, verify_cost=1.5)
    assert diagnose(bad, [bad]).text.endswith("even a free draft would not pay")


def test_a_dear_verify_is_told_as_the_batch_where_compute_binds() -> None:
    # The facts of this machine's kind: verifying 5 tokens takes as long as 3.6 steps.
    bad = point(0.9, acceptance=0.8, draft_cost=0.02, verify_cost=3.6)
    reason = diagnose(bad, [bad])
    assert reason.dimension == "batch"
    assert reason.text.startswith("verifying 5 tokens takes 3.60 steps of one: compute binds at batch 1")
    assert reason.text.endswith("at acceptance 0.80 it pays up to 3.28")


def test_another_k_and_a_smaller_batch_come_first() -> None:
    four, two = point(0.8), point(1.3, k=2)
    assert diagnose(four, [four, two]).text == "0.80x; K 2 pays here: 1.30x"
    adaptive = point(1.3, k=None)
    assert diagnose(four, [four, adaptive]).text == "0.80x; the adaptive length pays here: 1.30x"
    large = point(0.8, batch=8, verify_cost=3.0)
    reason = diagnose(large, [point(1.5), point(1.2, batch=4, verify_cost=1.7), large])
    assert reason.dimension == "batch"
    assert "3.00 steps at batch 8 and 1.70 at batch 4, where it pays (1.20x)" in reason.text


def test_work_around_the_models_and_no_draft_at_all() -> None:
    lost = point(0.9, acceptance=0.9, draft_cost=0.05)
    assert diagnose(lost, [lost]).dimension == "overhead"
    silent = point(1.0, acceptance=None, draft_length=0.0, coverage=0.0, predicted=None)
    assert "nothing was drafted" in diagnose(silent, [silent]).text


def test_the_batch_to_switch_off_from() -> None:
    curve = [point(1.5), point(0.9, k=8), point(1.2, batch=2), point(1.01, batch=4), point(0.7, batch=8)]
    assert switch_off_batch(curve) == 4
    assert switch_off_batch(curve[:3]) is None
    assert switch_off_batch([point(0.7)]) == 1
    assert best_of(curve[:2]).k == 4


# Prompts


def write_lines(path: Path, *lines: object) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_prompts_of_every_form_by_category(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "p.jsonl",
        {"question_id": 1, "category": "coding", "turns": ["first", "second"]},
        {"category": "rag", "turns": ["look"]},
        "",
        {"prompt": "def f():"},
        {"category": "coding", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        {"category": "coding", "turns": ["third"]},
    )
    prompts = read_prompts(file, None, 2)
    assert [(p.category, p.messages[-1]["content"]) for p in prompts] == [
        ("code", "first"), ("code", "u"), ("retrieval", "look"), ("prompts", "def f():")
    ]  # fmt: skip
    assert [p.category for p in read_prompts(file, ["retrieval"], 9)] == ["retrieval"]
    with pytest.raises(UsageError, match="unknown category `retreival`"):
        read_prompts(file, ["retreival"], 9)


def test_built_in_prompts_have_the_five_categories() -> None:
    prompts = read_prompts(None, None, 3)
    counts = {name: sum(p.category == name for p in prompts) for name in {p.category for p in prompts}}
    assert counts == dict.fromkeys(("code", "chat", "maths", "summarization", "retrieval"), 3)


def test_spec_bench_is_read(shared: Path) -> None:
    prompts = read_prompts(str(shared / "data" / "eval" / "spec_bench_question.jsonl"), None, 1000)
    assert len(prompts) == 480
    assert {p.category for p in prompts} == {
        "code", "chat", "summarization", "retrieval", "maths", "translation", "qa"
    }  # fmt: skip


def test_a_text_may_hold_any_character_and_the_file_a_mark_of_its_bytes_order(tmp_path: Path) -> None:
    lines = ('{"prompt": "one\u2028two\x85three"}', '{"prompt": "b"}')
    (tmp_path / "p").write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8", newline="")
    prompts = read_prompts(str(tmp_path / "p"), None, 4)
    assert [p.messages[0]["content"] for p in prompts] == ["one\u2028two\x85three", "b"]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "\\ud800"}',
        "{",
        "[]",
        '{"turns": []}',
        '{"turns": [1]}',
        '{"prompt": " "}',
        '{"messages": [{}]}',
        '{"messages": []}',
        "3",
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    file = write_lines(tmp_path / "p.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(QuantlabError, match=r"line 2: no prompt"):
        read_prompts(file, None, 4)


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path, says in ((tmp_path / "none", "No such file"), (tmp_path / "bytes", "not UTF-8")):
        with pytest.raises(QuantlabError, match=says):
            read_prompts(str(path), None, 4)
    with pytest.raises(QuantlabError, match="holds no prompt"):
        read_prompts(write_lines(tmp_path / "empty", ""), None, 4)


class Speaking(TableBackend):
    """Letters are tokens, and a template may be set."""

    template: str | None = None

    def describe(self) -> Any:
        loaded = super().describe()
        return type(loaded)(**(vars(loaded) | {"chat_template": self.template, "bos": 0, "adds_bos": True}))

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> Any:
        import numpy as np

        return np.array([ord(letter) % 5 for letter in text], np.int32)


def test_prompts_are_written_by_the_models_template_with_one_bos(tmp_path: Path) -> None:
    prompts = read_prompts(write_lines(tmp_path / "p", {"prompt": "bb"}, {"prompt": "b" * 50}), None, 4)
    backend = Speaking(0)
    found = encode(prompts, backend, 20)
    assert [ids.tolist() for ids in found.ids] == [[0, 3, 3]]
    assert found.too_long == 1
    backend.template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}d{% endif %}"
    )
    # The template's own BOS, which is the letter a (97 % 5 = 2), then ours before it.
    assert encode(prompts, backend, 20).ids[0].tolist() == [0, 2, 3, 3, 0]
    backend.template = "{{ raise_exception('no') }}"
    with pytest.raises(QuantlabError, match="does not render a prompt"):
        encode(prompts, backend, 20)
    backend.template = None
    with pytest.raises(QuantlabError, match="all 2 prompts have more than the 2 tokens"):
        encode(prompts, backend, 2)


# Specs

NGRAM = DraftSource("ngram", "ngram")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"k": [0]}, "`-k` 0"),
        ({"k": []}, "`-k` names no number"),
        ({"k": [65]}, "`-k` 65"),
        ({"batch": [0]}, "`--batch` 0"),
        ({"new_tokens": 1}, "`--new-tokens` 1"),
        ({"k": [63], "new_tokens": 64}, "`-k` 63 with answers of 64 tokens"),
        ({"new_tokens": 3000}, "in a context of 2048"),
        ({"temperature": -1.0}, "`--temperature` -1"),
        ({"prompt_lookup_max": 1, "prompt_lookup_min": 2}, "`--prompt-lookup-max` 1 is below"),
        ({"draft": []}, "nothing drafts"),
        ({"draft": [NGRAM, NGRAM]}, "given twice"),
        ({"served_model": "x"}, "of an endpoint"),
        ({"device": "gpu"}, "unknown device"),
        ({"seed": -1}, "`--seed` -1"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        SpeculativeSpec(**({"model": MODEL, "draft": [NGRAM]} | options))
    assert caught.value.hint


def test_the_longest_draft_that_fits_an_answer_is_taken() -> None:
    assert SpeculativeSpec(MODEL, draft=[NGRAM], k=[62], new_tokens=64).k == [62]


def test_a_server_drafts_by_itself() -> None:
    model = ModelFile("http://h/v1", "m", "m", "0")
    assert SpeculativeSpec(model).endpoint
    with pytest.raises(UsageError, match="a server drafts by itself"):
        SpeculativeSpec(model, draft=[NGRAM])


def test_adaptive_is_no_number_of_tokens() -> None:
    assert ADAPTIVE < 0
