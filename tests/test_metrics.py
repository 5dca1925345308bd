"""Speeds from time stamps: worked examples, identities that hold for all generations, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantlab.bench import metrics
from quantlab.core.result import RuntimeInfo
from quantlab.runtime.backend import Capacity, Generation, Loaded


def generation(start: float, times: list[float], reason: str = "length") -> Generation:
    return Generation(start, list(range(len(times))), times, reason)  # type: ignore[arg-type]


@st.composite
def batches(draw: st.DrawFn, least: int = 1) -> list[Generation]:
    """Requests of one start; gaps of a microsecond to ten seconds."""
    gap = st.floats(1e-6, 10)
    start = draw(st.floats(0, 1e5))
    found = []
    for gaps in draw(st.lists(st.lists(gap, min_size=least, max_size=20), min_size=1, max_size=4)):
        times, now = [], start
        for step in gaps:
            now += step
            times.append(now)
        found.append(generation(start, times))
    return found


def test_one_request_worked_out() -> None:
    g = generation(10.0, [12.0, 12.5, 13.5, 14.0])
    assert metrics.ttft(g) == 2.0
    assert metrics.tpot(g) == pytest.approx(2.0 / 3)
    assert metrics.itl(g) == [0.5, 1.0, 0.5]
    assert metrics.e2el(g) == 4.0
    assert metrics.prefill_throughput([g], 100) == 50.0
    assert metrics.output_throughput([g]) == 1.0
    assert metrics.decode_throughput([g]) == pytest.approx(1.5)


def test_a_batch_with_staggered_prefills_worked_out() -> None:
    """The tokens that a request decodes while another is in its prefill count in no decode rate."""
    first = generation(0.0, [1.0, 1.5, 4.0, 5.0, 6.0])
    second = generation(0.0, [3.0, 4.0, 5.0])
    assert metrics.prefill_throughput([first, second], 60) == 20.0
    assert metrics.output_throughput([first, second]) == pytest.approx(8 / 6)
    # After 3.0 s: 4.0, 5.0, 6.0 of the first, 4.0, 5.0 of the second.
    assert metrics.decode_throughput([first, second]) == pytest.approx(5 / 3)


def test_a_static_batch_decodes_all_but_the_first_tokens() -> None:
    g = [generation(0.0, [2.0, 3.0, 4.0]), generation(0.0, [2.0, 3.0])]
    assert metrics.decode_throughput(g) == pytest.approx((2 + 1) / 2)


@given(batches(least=2))
def test_identities_of_a_request(batch: list[Generation]) -> None:
    for g in batch:
        n, span = len(g.times_s), g.times_s[-1] - g.times_s[0]
        assert math.isclose(sum(metrics.itl(g)), span, rel_tol=1e-9, abs_tol=1e-9)
        assert len(metrics.itl(g)) == n - 1
        assert math.isclose(metrics.tpot(g) * (n - 1), span, rel_tol=1e-12)
        assert math.isclose(metrics.ttft(g) + span, metrics.e2el(g), rel_tol=1e-9, abs_tol=1e-9)
        assert min(metrics.itl(g)) <= metrics.tpot(g) * (1 + 1e-9)
        assert metrics.tpot(g) <= max(metrics.itl(g)) * (1 + 1e-9)
        assert math.isclose(metrics.decode_throughput([g]) * metrics.tpot(g), 1, rel_tol=1e-9)


@given(batches(least=1), st.integers(1, 10_000))
def test_identities_of_a_batch(batch: list[Generation], prompt_tokens: int) -> None:
    tokens = sum(len(g.tokens) for g in batch)
    assert math.isclose(metrics.output_throughput(batch) * max(map(metrics.e2el, batch)), tokens, rel_tol=1e-9)
    last_first = max(map(metrics.ttft, batch))
    assert math.isclose(metrics.prefill_throughput(batch, prompt_tokens) * last_first, prompt_tokens, rel_tol=1e-9)


@given(batches(least=2), st.floats(-1e4, 1e4))
def test_no_metric_depends_on_when_the_run_began(batch: list[Generation], shift: float) -> None:
    moved = [generation(g.start_s + shift, [t + shift for t in g.times_s]) for g in batch]
    before, after = metrics.measurements([batch], 7), metrics.measurements([moved], 7)
    assert before.keys() == after.keys()
    for name in ("ttft", "e2el", "tpot", "output_throughput"):
        assert after[name].samples == pytest.approx(before[name].samples, rel=1e-3, abs=1e-9)


@given(st.lists(batches(least=1), min_size=1, max_size=3), st.integers(1, 100))
def test_samples_are_one_a_request_or_one_a_batch(repetitions: list[list[Generation]], prompt_tokens: int) -> None:
    size = min(len(batch) for batch in repetitions)
    repetitions = [batch[:size] for batch in repetitions]
    found = metrics.measurements(repetitions, prompt_tokens)
    for name in ("ttft", "e2el"):
        assert len(found[name].samples) == size * len(repetitions)
        assert len(found[name].repetitions()) == len(repetitions)
    for name in ("prefill_throughput", "output_throughput"):
        assert len(found[name].samples) == len(repetitions)
        assert found[name].better == "higher"
    complete = all(len(g.tokens) >= 2 for batch in repetitions for g in batch)
    assert ("tpot" in found) == ("itl" in found) == ("decode_throughput" in found) == complete
    if complete:
        assert found["tpot"].samples == [metrics.tpot(g) for batch in repetitions for g in batch]
        assert found["tpot"].samples_per_repetition == size


def test_gaps_are_grouped_only_where_every_repetition_has_as_many() -> None:
    three, two = [generation(0, [1.0, 2.0, 3.0])], [generation(0, [1.0, 2.0])]
    assert metrics.measurements([three, three], 1)["itl"].samples_per_repetition == 2
    uneven = metrics.measurements([three, two], 1)["itl"]
    assert (len(uneven.samples), uneven.samples_per_repetition) == (3, 1)


def test_rates_count_the_tokens_that_were_generated() -> None:
    stopped = generation(0.0, [1.0 + 0.01 * i for i in range(88)], "stop")
    assert metrics.output_throughput([stopped]) == pytest.approx(88 / 1.87)
    assert metrics.tpot(stopped) == pytest.approx(0.01)


@pytest.mark.parametrize("times", [[], [1.0]])
def test_tpot_of_fewer_than_two_tokens_is_refused(times: list[float]) -> None:
    with pytest.raises(ValueError, match="two tokens"):
        metrics.tpot(generation(0.0, times))


def test_decode_rate_without_a_decoded_token_is_refused() -> None:
    with pytest.raises(ValueError, match="no token"):
        metrics.decode_throughput([generation(0.0, [1.0]), generation(0.0, [2.0])])


def test_one_answer_of_one_token_takes_tpot_from_the_cell() -> None:
    whole, single = [generation(0, [1.0, 2.0])], [generation(0, [1.0], "stop")]
    assert "tpot" not in metrics.measurements([whole, single], 1)


def test_floor_worked_out() -> None:
    loaded = Loaded(
        RuntimeInfo("x", "1", "cpu", "F16", {}, 1), Capacity(), 10, 10, 1200, 1000, 20, None, frozenset(), False, None
    )
    assert metrics.tpot_floor(loaded, 1, 50, 2000.0) == 1.0
    # Weights are read once for all sequences of a step, each sequence has a KV of its own.
    assert metrics.tpot_floor(loaded, 4, 50, 2000.0) == 2.5
    # A layer that holds 15 of the 20 bytes looks 10 tokens back.
    windowed = dataclasses.replace(loaded, windowed_kv=((10, 15),))
    assert metrics.tpot_floor(windowed, 4, 50, 2000.0) == (1000 + 4 * (50 * 5 + 10 * 15)) / 2000
    assert metrics.tpot_floor(windowed, 4, 10, 2000.0) == metrics.tpot_floor(loaded, 4, 10, 2000.0)
    repetitions = [[generation(0, [1.0, 2.0, 3.0, 4.0])], [generation(0, [1.0, 2.0])]]
    # Steps of the first attend to 11, 12, 13 tokens, their mean is within half a token of 10 + 4 / 2.
    assert metrics.mean_depth(repetitions, 10) == 11.5
