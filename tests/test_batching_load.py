"""Specs and loads: what is refused, what is drawn, and what a trace becomes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantlab.bench.batching.load import at_rate, lengths, mixed, squared_variation_of_gaps
from quantlab.bench.batching.spec import BatchingSpec, parse_numbers, parse_seconds
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.model import ModelFile

FILE = ModelFile("m.gguf", "m", "m.gguf", "0")
URL = ModelFile("http://127.0.0.1:1/v1", "m", "http://127.0.0.1:1/v1", "0")


def spec(model: ModelFile = FILE, **options: Any) -> BatchingSpec:
    return BatchingSpec(model, **options)


@pytest.mark.parametrize(
    ("options", "says", "hint"),
    [
        ({"rate": [1.0, 0.0]}, "`--rate` 0", "above zero"),
        ({"rate": [-1.0]}, "`--rate` -1", "above zero"),
        ({"rate": [math.nan]}, "`--rate` nan", "above zero"),
        ({"rate": [math.inf]}, "`--rate` inf", "above zero"),
        ({"rate": []}, "`--rate` names nothing", "at least one"),
        ({"rate": [1e-9]}, "48 requests at `--rate` 1e-09 per second take more than a day", "--simulate"),
        ({"ttft_slo_s": 0.0}, "`--ttft-slo` 0", "above zero"),
        ({"tpot_slo_s": -1.0}, "`--tpot-slo` -1", "above zero"),
        ({"burstiness": 0.0}, "`--burstiness` 0", "above zero"),
        ({"utilization": [0.5, 80.0]}, "a load of 80 times the capacity", "0.8 for 80%"),
        ({"mixed_utilization": 95.0}, "a load of 95 times the capacity", "shares"),
        ({"utilization": [0.0]}, "`--utilization` 0", "above zero"),
        ({"replicas": 4}, "`--replicas 4` of a real model", "--simulate"),
        ({"replicas": 0}, "`--replicas` 0", "at least 1"),
        ({"router": "least"}, "unknown router `least`", "`least-loaded`"),
        ({"policy": "admision"}, "unknown policy `admision`", "`admission`"),
        # Requests of one class: there is nothing to put first.
        ({"policy": "priority"}, "unknown policy `priority`", "fcfs"),
        (
            {"simulate": True, "prefix_cache_tokens": 64},
            "`--prefix-cache-tokens` is of a simulation of a trace",
            "--trace",
        ),
        ({"trace": "t", "prefix_cache_tokens": 64}, "`--prefix-cache-tokens` is of a simulation", "--simulate"),
        ({"simulate": True, "router": "prefix-aware"}, "without a prefix cache", "--prefix-cache-tokens"),
        ({"parts": ["lod"]}, "unknown part `lod`", "`load`"),
        ({"parts": []}, "`--parts` 0", "at least 1"),
        ({"requests": 0}, "`--requests` 0", "at least 1"),
        ({"requests": 9}, "`--requests` 9", "at least 10"),
        ({"batch": [4, 0]}, "`--batch` 4, 0", "at least 1"),
        ({"max_num_seqs": 0}, "`--max-num-seqs` 0", "at least 1"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "`--max-num-batched-tokens` 4 is below", "one token a step"),
        ({"random_range_ratio": 1.0}, "`--random-range-ratio` 1.0", "below 1"),
        ({"ageing_s": -1.0}, "`--ageing` -1", "from 0 on"),
        ({"length_scale": 0.5}, "`--length-scale` is of a trace", "--trace"),
        ({"simulate": True, "flops_per_s": 1e12}, "a roofline needs", "all three"),
        ({"bandwidth_bytes_per_s": 1e12, "flops_per_s": 1e12}, "a roofline needs", "all three"),
        ({"simulate": True, "bandwidth_bytes_per_s": 1e-300, "flops_per_s": 1e12}, "bandwidth", "3.35e12"),
        ({"simulate": True, "bandwidth_bytes_per_s": 1e12, "flops_per_s": float("nan")}, "flops", "3.35e12"),
        ({"served_model": "x"}, "`--model` names a model of an endpoint", "leave it out"),
        ({"dtype": "float8"}, "unknown dtype", "float"),
    ],
)
def test_impossible_specs_are_refused(options: dict[str, Any], says: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec(**options)
    assert says in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"simulate": True}, "not simulated"),
        ({"policy": "admission"}, "--policy admission` for an endpoint"),
        ({"parts": ["mixed"]}, "needs the model's files"),
    ],
)
def test_what_a_server_cannot_be_asked(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        spec(URL, **options)


def test_parts_and_requests_by_default() -> None:
    assert spec().chosen() == ("batch", "load", "sla", "mixed")
    assert spec(URL).chosen() == ("load", "sla")
    assert spec(parts=["sla", "batch"]).chosen() == ("batch", "sla")
    assert spec(simulate=True).n_requests() > spec().n_requests()


def test_numbers_and_times_are_read() -> None:
    assert parse_numbers("0.5, 1,2,1", "--rate") == [0.5, 1.0, 2.0]
    for wrong in ("", "x", "1,,2", "0", "-1", "nan", "inf", "1;2"):
        with pytest.raises(UsageError, match="no number above zero"):
            parse_numbers(wrong, "--rate")
    assert [parse_seconds(text, "--ttft-slo") for text in ("500ms", "0.5s", "0.5", 0.5, " 30s ", "1e3 ms")] == [
        0.5, 0.5, 0.5, 0.5, 30.0, 1.0,
    ]  # fmt: skip
    for wrong in ("", "fast", "5m", "ms", "1..2s", "inf"):
        with pytest.raises(UsageError, match="no time"):
            parse_seconds(wrong, "--ttft-slo")


def test_a_time_that_may_be_meant_in_either_unit_is_refused() -> None:
    with pytest.raises(UsageError, match="seconds or milliseconds") as caught:
        parse_seconds("500", "--ttft-slo")
    assert "`--ttft-slo 500ms` or `--ttft-slo 500s`" in caught.value.hint


def test_lengths_are_within_their_range_and_have_their_mean() -> None:
    drawn = lengths(spec(prompt_tokens=40, new_tokens=20, random_range_ratio=0.5, requests=3000))
    assert (min(drawn.prompt), max(drawn.prompt)) == (20, 60)
    assert (min(drawn.new), max(drawn.new)) == (10, 30)
    assert np.mean(drawn.prompt) == pytest.approx(40, rel=0.03)
    assert np.mean(drawn.new) == pytest.approx(20, rel=0.03)
    same = lengths(spec(prompt_tokens=40, new_tokens=20, random_range_ratio=0.0, requests=10))
    assert set(same.prompt) == {40}
    assert set(same.new) == {20}
    assert lengths(spec(seed=1)) == lengths(spec(seed=1)) != lengths(spec(seed=2))


def test_every_rate_has_the_same_pattern_and_exactly_its_rate() -> None:
    drawn = lengths(spec(requests=50))
    slow, fast = at_rate(drawn, 2.0), at_rate(drawn, 8.0)
    assert slow[-1].arrival_s == pytest.approx(25.0)
    assert [a.arrival_s for a in slow] == pytest.approx([4 * a.arrival_s for a in fast])
    assert {a.arrival_s for a in at_rate(drawn, math.inf)} == {0.0}
    assert all(a.ttft_slo_s == 0.3 for a in at_rate(drawn, 1.0, ttft_slo_s=0.3))


def test_gaps_vary_as_the_burstiness_says() -> None:
    for burstiness in (0.25, 1.0, 4.0, math.inf):
        drawn = lengths(spec(requests=8000, burstiness=burstiness))
        assert squared_variation_of_gaps(drawn) == pytest.approx(1 / burstiness, rel=0.15, abs=1e-9)


def test_gaps_that_are_all_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="all requests arrive at one time"):
        lengths(spec(requests=20, burstiness=1e-9))


def test_mixed_traffic_is_the_same_traffic_with_longer_batch_answers() -> None:
    plain = at_rate(lengths(spec(requests=10)), 2.0)
    both = mixed(plain, ttft_slo_s=0.5, seed=0)
    assert [a.arrival_s for a in both] == [a.arrival_s for a in plain]
    assert all({a.priority, b.priority} == {"interactive", "batch"} for a, b in zip(both[::2], both[1::2], strict=True))
    # Not in turn, and the same at every rate.
    assert len({a.priority for a in both[::2]}) == 2
    faster = mixed(at_rate(lengths(spec(requests=10)), 9.0), ttft_slo_s=0.5, seed=0)
    assert [a.priority for a in both] == [a.priority for a in faster]
    # Which of them are batch requests is drawn with everything else.
    drawn = {tuple(a.priority for a in mixed(plain, ttft_slo_s=0.5, seed=seed)) for seed in range(6)}
    assert len(drawn) > 2
    for mine, was in zip(both, plain, strict=True):
        of_batch = mine.priority == "batch"
        assert mine.new_tokens == (4 if of_batch else 1) * was.new_tokens
        assert mine.ttft_slo_s == (None if of_batch else 0.5)


# traces


def trace(path: Path, rows: list[tuple[int, int, int]]) -> str:
    path.write_text(
        "".join(
            json.dumps({"timestamp": t, "input_length": p, "output_length": n, "hash_ids": list(range(-(-p // 512)))})
            + "\n"
            for t, p, n in rows
        )
    )
    return str(path)


def test_a_trace_gives_lengths_and_gaps_and_our_rate(tmp_path: Path) -> None:
    rows = [(0, 1000, 100), (1000, 3000, 300), (4000, 2000, 200), (5000, 2000, 200)]
    drawn = lengths(spec(trace=trace(tmp_path / "t.jsonl", rows), prompt_tokens=20, new_tokens=10, requests=10))
    assert drawn.prompt == [10, 30, 20, 20]
    assert drawn.new == [1, 3, 2, 2]
    arrivals = [a.arrival_s for a in at_rate(drawn, 2.0)]
    assert arrivals[-1] == pytest.approx(4 / 2.0)
    gaps = np.diff(arrivals)
    assert gaps / gaps[0] == pytest.approx([1, 3, 1])
    assert drawn.cut == 0


def test_a_length_scale_of_ours_cuts_the_longest_and_the_users_does_not(tmp_path: Path) -> None:
    rows = [(1000 * i, 100, 10) for i in range(30)] + [(40_000, 100_000, 10)]
    path = trace(tmp_path / "t.jsonl", rows)
    cut = lengths(spec(trace=path, prompt_tokens=20, new_tokens=5, requests=100))
    assert max(cut.prompt) == 8 * 20
    assert cut.cut == 1
    whole = lengths(spec(trace=path, prompt_tokens=20, new_tokens=5, requests=100, length_scale=0.5))
    assert (max(whole.prompt), whole.cut) == (50_000, 0)


@pytest.mark.parametrize(
    ("rows", "says"),
    [([], "is empty"), ([(0, 10, 10), (0, 10, 10)], "no rate to scale"), ([(5, 10, 10)], "no rate to scale")],
)
def test_a_trace_without_traffic_is_refused(tmp_path: Path, rows: list[tuple[int, int, int]], says: str) -> None:
    with pytest.raises(QuantlabError, match=says):
        lengths(spec(trace=trace(tmp_path / "t.jsonl", rows)))


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(QuantlabError, match="No such file"):
        lengths(spec(trace=str(tmp_path / "none.csv")))
