"""What the curves say: the knee, what binds, the bisection under limits, the bound on starvation."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from quantlab.bench.batching.batch_sizes import BatchPoint, binds, compute_binds_from, decode_step_s, gains, knee
from quantlab.bench.batching.load import Asked, at_rate, lengths, mixed
from quantlab.bench.batching.mixed import waits_and_bounds
from quantlab.bench.batching.notices import enough_requests
from quantlab.bench.batching.serve import Cell, Run
from quantlab.bench.batching.sla import Judged, Search, _against, _late, judge, judged_together, steps_at_most
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.bench.batching.target import SimulatedTarget
from quantlab.bench.batching.theory import saturated
from quantlab.bench.batching.window import Window
from quantlab.core.errors import QuantlabError
from quantlab.core.model import ModelFile
from quantlab.core.statistics import Interval
from quantlab.engine import RequestRecord
from quantlab.runtime.step_model import StepModel

FILE = ModelFile("m.gguf", "m", "m.gguf", "0")


def spec(**options: Any) -> BatchingSpec:
    return BatchingSpec(FILE, **options)


def points(steps: dict[int, float], floor_s: float | None = None) -> list[BatchPoint]:
    return [BatchPoint(batch, [step, step], floor_s) for batch, step in steps.items()]


# throughput against batch size


def test_what_binds_follows_the_roofline() -> None:
    """A step is the larger of 10 ms to read and 2 ms a sequence to compute: they meet at 5."""
    curve = points({b: max(0.010, 0.002 * b) for b in (1, 2, 4, 8, 16)}, floor_s=0.010)
    assert gains(curve) == pytest.approx([2, 2, 1.25, 1])
    assert binds(curve) == ["memory", "memory", "memory", "memory", "compute"]
    assert knee(curve) == 8
    assert compute_binds_from(curve) == 16


def test_compute_binds_low_bits_early_and_overhead_is_neither() -> None:
    """llama-batched-bench of Q4_K_M on two cores: 69, 80, 114, 123, 153 tokens a second."""
    curve = points({b: b / rate for b, rate in zip((1, 2, 4, 8, 16), (69, 80, 114, 123, 153), strict=True)}, 0.003)
    assert binds(curve) == ["compute", "overhead", "compute", "compute", "compute"]
    assert compute_binds_from(curve) == 4
    # 4 to 8 gains 8%, 8 to 16 again 24%.
    assert knee(curve) is None
    flat = points({1: 0.02, 2: 0.0201, 4: 0.0202}, floor_s=0.001)
    assert binds(flat) == ["overhead"] * 3


def test_without_a_floor_only_compute_is_told() -> None:
    assert binds(points({1: 0.01, 2: 0.011, 4: 0.021})) == [None, "compute", "compute"]
    # Faster than the floor: weights that come from the cache.
    assert binds(points({1: 0.01, 2: 0.0101}, floor_s=0.02)) == [None, None]


def test_gains_are_those_of_a_doubling_whatever_the_batches() -> None:
    assert gains(points({1: 0.01, 8: 0.01, 12: 0.015})) == pytest.approx([2.0, 1.0])
    (alone,) = points({4: 0.01})
    assert (knee([alone]), binds([alone]), gains([alone])) == (None, [None], [])


def test_a_decode_step_is_timed_while_all_decode() -> None:
    """Two prompts that are computed one after the other: 0.5 s apart."""
    records = [
        RequestRecord(i, "interactive", "finished", 4, 0.0, times_s=[0.5 * i + 0.1 * k for k in range(11)])
        for i in (0, 1)
    ]
    assert decode_step_s(Run(records)) == pytest.approx(0.1)
    records[1].times_s = [at + 5 for at in records[1].times_s]
    with pytest.raises(QuantlabError, match="first answer ends before the last one begins"):
        decode_step_s(Run(records))
    records[1].status, records[1].reason = "failed", "device lost"
    with pytest.raises(QuantlabError, match="device lost"):
        decode_step_s(Run(records))


# the search under limits


def told(rate: float, verdict: Any) -> Judged:
    none = Interval(rate, None, None)
    return Judged(rate, verdict == "meets", verdict, None, None, none, none, 0.0, 0.95, None)


def searched(threshold: float, mu: float = 1.0, width: float = 0.0, known: list[Judged] | None = None) -> Search:
    """A search where rates up to `threshold` meet, those beyond `threshold` + `width` fail."""
    search = Search(mu, known or [])
    n = 0
    for rate in search.rates():
        n += 1
        verdict = "meets" if rate <= threshold else "fails" if rate > threshold + width else "undecided"
        search.tell(told(rate, verdict))
    assert n <= steps_at_most()
    return search


@pytest.mark.parametrize("threshold", [0.25, 0.5, 0.77, 0.97])
def test_bisection_finds_the_threshold(threshold: float) -> None:
    highest, _, failing = searched(threshold).answer()
    assert highest is not None
    assert failing is not None
    assert highest.rate <= threshold < failing.rate
    assert failing.rate - highest.rate <= 0.06


@pytest.mark.parametrize("beyond", [1.2, 5.0, 100.0])
def test_a_load_beyond_the_capacity_does_not_stretch_the_search(beyond: float) -> None:
    """`searched` counts the rates: the confidence is split over no more of them."""
    search = searched(0.5, known=[told(0.3, "meets"), told(beyond, "fails")])
    highest, _, failing = search.answer()
    assert highest is not None and 0.44 <= highest.rate <= 0.5
    assert failing is not None and 0.5 < failing.rate <= 0.6
    assert all(judged.rate <= 1 for judged in search.judged[2:])


def test_the_answer_is_what_was_seen_and_what_is_decided_about_it() -> None:
    """Seen within up to 0.55; decided to meet up to 0.45, to fail from 0.7 on."""
    search = Search(1.0)
    for rate in search.rates():
        verdict: Any = "meets" if rate <= 0.45 else "fails" if rate >= 0.7 else "undecided"
        search.tell(told(rate, verdict)._replace(within=rate <= 0.55))
    highest, decided, failing = search.answer()
    assert highest is not None
    assert decided is not None
    assert failing is not None
    assert 0.55 - 0.06 <= highest.rate <= 0.55
    # Two more rates for either side.
    assert 0.45 - 0.06 <= decided.rate <= 0.45 < highest.rate < 0.7 <= failing.rate <= 0.7 + 0.09
    assert len(search.judged) <= steps_at_most()
    nothing = Search(1.0, [told(0.5, "undecided")._replace(within=True), told(0.53, "undecided")])
    assert list(nothing.rates()) == []
    highest, decided, failing = nothing.answer()
    assert highest is not None
    assert (highest.rate, decided, failing) == (0.5, None, None)


def test_no_rate_may_meet_and_every_rate_may() -> None:
    nothing = searched(-1.0)
    assert nothing.answer().highest is None
    assert [judged.rate for judged in nothing.judged] == pytest.approx([0.98, 0.2, 0.0])
    alone = searched(0.01)
    assert [judged.rate for judged in alone.judged] == pytest.approx([0.98, 0.2, 0.0, 0.1, 0.05])
    highest, _, failing = alone.answer()
    assert highest is not None
    assert failing is not None
    assert (highest.rate, failing.rate) == (0.0, pytest.approx(0.05))
    everything = searched(9.0).answer()
    assert everything.highest is not None
    assert everything.highest.rate == pytest.approx(0.98)
    assert everything.lowest_failing is None


def test_a_load_of_one_or_more_never_meets() -> None:
    """A short run ends before its queue has grown beyond the limits."""
    highest, _, failing = searched(9.0, known=[told(0.9, "meets"), told(1.2, "meets")]).answer()
    assert highest is not None
    assert (highest.rate, failing) == (pytest.approx(0.98), None)


def test_loads_that_are_known_are_not_measured_again() -> None:
    known = [told(0.5, "meets"), told(0.7, "meets"), told(0.8, "undecided"), told(0.9, "fails")]
    search = searched(0.74, known=known)
    assert [j.rate for j in search.judged[4:]] == pytest.approx([0.75])
    highest, _, failing = search.answer()
    assert highest is not None
    assert failing is not None
    assert (highest.rate, failing.rate) == (0.7, pytest.approx(0.75))


def test_a_rate_that_meets_above_one_that_does_not_is_no_answer() -> None:
    highest, *_ = searched(0.3, known=[told(0.5, "fails"), told(0.8, "meets")]).answer()
    assert highest is not None
    assert highest.rate <= 0.3


def answered(ttft: list[float], tpot: float = 0.01, **changes: Any) -> Window:
    records = [
        RequestRecord(
            i, "interactive", "finished", 4, i * 0.1, new_tokens=2, admitted_s=i * 0.1,
            first_token_s=i * 0.1 + wait, finished_s=i * 0.1 + wait + tpot, **changes,
        )
        for i, wait in enumerate(ttft)
    ]  # fmt: skip
    return Window(Run(records))


def test_a_rate_meets_fails_or_is_not_decided() -> None:
    options = spec(ttft_slo_s=0.5, tpot_slo_s=0.05)
    rng = random.Random(0)
    good = [rng.uniform(0.1, 0.3) for _ in range(200)]
    # 299 are measured, and with one fewer more than one in a hundred may be late.
    plenty = [rng.uniform(0.1, 0.3) for _ in range(375)]
    assert judge(options, 10.0, answered(plenty)).verdict == "meets"
    assert judge(options, 10.0, answered(plenty)).late.high == pytest.approx(1 - 0.05 ** (1 / 299))
    few = judge(options, 10.0, answered(plenty[:-1]))
    assert (few.verdict, few.within) == ("undecided", True)
    assert judge(options, 10.0, answered(good, tpot=0.06)).verdict == "fails"
    assert judge(options, 10.0, answered([w + 0.5 for w in good])).verdict == "fails"
    # Two late ones of 160: the 99th percentile lies at their edge.
    edge = [*good[:100], 0.9, 0.9, *good[102:]]
    judged = judge(options, 10.0, answered(edge))
    assert (judged.verdict, judged.within) == ("undecided", False)
    assert judge(options, 10.0, answered(good[:1])).verdict == "undecided"
    judged = judge(options, 10.0, answered(good))
    assert judged.goodput.estimate == pytest.approx(200 / 19.9)


def test_rejections_fail_a_rate_that_would_meet() -> None:
    window = answered([0.1] * 500)
    turned_away = window.run.records[60::20]
    for record in turned_away:
        record.status, record.first_token_s = "rejected", None
    judged = judge(spec(), 10.0, window)
    assert (judged.verdict, judged.within, judged.unserved) == ("fails", False, pytest.approx(0.05))
    others = judge(spec(), 10.0, window, rejections=False)
    assert (others.verdict, others.within) == ("meets", True)
    for record in turned_away:
        record.status = "failed"
    judged = judge(spec(), 10.0, window, rejections=False)
    assert (judged.verdict, judged.within) == ("fails", False)


def test_as_many_requests_as_are_advised_decide_for_all_rates_together() -> None:
    for options in ({"parts": ["sla"]}, {"parts": ["load"]}, {"parts": ["load", "sla"]}):
        asked = spec(ttft_slo_s=0.5, **options)
        together = judged_together(asked)
        n = enough_requests(asked)
        assert judge(asked, 1.0, answered([0.1] * n), together=together).verdict == "meets"
        assert judge(asked, 1.0, answered([0.1] * (n - 1)), together=together).verdict == "undecided"
    assert [judged_together(spec(parts=parts)) for parts in (["sla"], ["load"], ["load", "sla"], ["mixed"])] == [
        steps_at_most(), 4, 4 + steps_at_most(), 0,
    ]  # fmt: skip
    # Of mixed traffic half are interactive, and each policy is judged for itself.
    assert enough_requests(spec(parts=["mixed"])) == 750


def _wrong(seed: int, share: float, together: int) -> bool:
    """Whether a search decides any rate wrongly, where all up to 0.6 have this share of late requests."""
    rng, search = np.random.default_rng(seed), Search(1.0)
    for rate in search.rates():
        late = (rng.random(1320) < (share if rate < 0.6 else 0.05)).tolist()
        verdict = _against(_late(late, 1 - 0.05 / together), 0.01)
        search.tell(told(rate, verdict)._replace(within=sum(late) <= 13))
    return any(one.verdict == ("meets" if share > 0.01 else "fails") for one in search.judged if one.rate < 0.6)


def test_the_confidence_holds_for_the_whole_search() -> None:
    """At the edge of either verdict, where most of them are wrong by chance: in one search in twenty at most."""
    together = judged_together(spec(parts=["sla"]))
    for share in (0.0101, 0.0099):
        assert sum(_wrong(seed, share, together) for seed in range(80)) <= 6
    # Each rate for itself is no confidence in a search.
    assert sum(_wrong(seed, share, 1) for seed in range(80) for share in (0.0101, 0.0099)) > 12


def test_a_rate_is_decided_as_often_wrongly_as_it_is_said() -> None:
    """Requests that are late independently of one another, one in a hundred: the edge of both decisions."""
    rng = random.Random(7)
    shares = [_late([rng.random() < 0.01 for _ in range(1000)]) for _ in range(120)]
    assert sum(share.high <= 0.01 for share in shares if share.high is not None) / 120 < 0.09
    assert sum(share.low > 0.01 for share in shares if share.low is not None) / 120 < 0.09


# mixed traffic


@pytest.mark.parametrize("policy", ["priority", "preemption", "guarded"])
@pytest.mark.parametrize("ageing_s", [0.0, 1.0, 1e6])
def test_no_batch_request_waits_beyond_its_bound(policy: str, ageing_s: float) -> None:
    drawn = lengths(spec(requests=300, prompt_tokens=20, new_tokens=10))
    steps = StepModel(0.02, 1e-3, 0.0, 4e-3)
    target = SimulatedTarget(steps, 4096, 4, swap_token_s=1e-5)
    mu = saturated(target.run(Cell(mixed(at_rate(drawn, math.inf), ttft_slo_s=0.5, seed=0), 4, 64)).records, 4).mu
    run = target.run(Cell(mixed(at_rate(drawn, 1.2 * mu), ttft_slo_s=0.5, seed=0), 4, 64, None, policy, ageing_s))
    found = waits_and_bounds(run.records, ageing_s)
    assert len(found) == 150
    assert all(wait <= bound + 1e-9 for wait, bound in found)
    # The bound is no number that holds for anything.
    assert any(wait > bound / 2 for wait, bound in found)


def test_ageing_bounds_the_wait() -> None:
    """Interactive traffic beyond capacity for a long time, and one batch request in it."""
    steps, seqs = StepModel(0.05), 4
    live = [Asked(1, 10, i / 9.0) for i in range(600)]
    requests = sorted([*live, Asked(1, 10, 5.0, "batch")], key=lambda asked: asked.arrival_s)
    waits = {}
    for ageing_s in (1e6, 2.0):
        cell = Cell(requests, seqs, 64, None, "priority", ageing_s)
        ((wait, bound),) = waits_and_bounds(SimulatedTarget(steps, 64, seqs).run(cell).records, ageing_s)
        assert wait <= bound + 1e-9
        waits[ageing_s] = wait
    assert waits[2.0] < 4 < 20 < waits[1e6]
