"""`quantlab batching` from the spec to the table: on a tiny model, in virtual time, through recipes and the command."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from statistics import fmean
from typing import Any

import gguf
import msgspec
import pytest

from quantlab.bench.batching import opening, serve
from quantlab.bench.batching.bench import run
from quantlab.bench.batching.load import Asked
from quantlab.bench.batching.serve import Cell
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.bench.batching.target import opened_engine
from quantlab.core.artifact import content_sha256
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.model import ModelFile
from quantlab.core.result import Outcome
from tests.tiny_gguf import write_gguf

NAMES = {"ttft", "tpot", "queue_delay", "predicted_queue_delay", "utilization", "goodput", "rejected", "preempted"}
# Steps of about 10 ms with these numbers, whatever the tiny model really takes.
ROOFLINE: dict[str, Any] = {"simulate": True, "bandwidth_bytes_per_s": 1e7, "flops_per_s": 3e7}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, kind=gguf.GGMLQuantizationType.F32)
    return ModelFile(str(path), "tiny", str(path), content_sha256(path))


def spec(model: ModelFile, **options: Any) -> BatchingSpec:
    small = {
        "prompt_tokens": 8,
        "new_tokens": 4,
        "requests": 20,
        "max_num_seqs": 4,
        "batch": [1, 2],
        "repeats": 2,
        "threads": 1,
    }
    return BatchingSpec(model, **{**small, **options})


def by_part(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    parts: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        parts.setdefault(outcome.details["part"], []).append(outcome)
    return parts


@pytest.fixture(scope="module")
def real(tiny: ModelFile) -> dict[str, list[Outcome]]:
    """Every part on the real model; a limit that everything meets, so that the search is short."""
    return by_part(list(run(spec(tiny, utilization=[0.3, 0.6], ttft_slo_s=9, tpot_slo_s=9))))


@pytest.fixture(scope="module")
def virtual(tiny: ModelFile) -> dict[str, list[Outcome]]:
    """Every part from a roofline; limits that some loads meet."""
    options = {"new_tokens": 8, "requests": 800, "ttft_slo_s": 0.4, "tpot_slo_s": 0.1, "max_num_seqs": 4}
    return by_part(list(run(spec(tiny, **ROOFLINE, **options))))


def test_every_part_gives_its_rows_and_the_contracts_names(real: dict[str, list[Outcome]]) -> None:
    assert {part: len(rows) for part, rows in real.items()} == {
        "batch": 2, "capacity": 1, "load": 2, "sla": 1, "answer": 1, "mixed": 4,
    }  # fmt: skip
    everything = [outcome for rows in real.values() for outcome in rows]
    assert len({outcome.details["session"] for outcome in everything}) == 1
    assert [o.details["row"] for o in everything] == list(range(1, 12))
    assert [o.details.get("complete") for o in everything] == [False] * 10 + [True]
    for row in real["load"]:
        found = row.measurements
        assert found.keys() >= NAMES
        assert len(found["ttft"].samples) == len(found["tpot"].samples) == len(found["queue_delay"].samples) == 16
        assert len(found["rejected"].samples) == len(found["preempted"].samples) == 16
        assert row.details["requests_finished"] == 20
        assert all(
            later >= wait >= 0 for wait, later in zip(found["queue_delay"].samples, found["ttft"].samples, strict=True)
        )
    for row in real["mixed"]:
        assert row.measurements.keys() >= NAMES - {"predicted_queue_delay"}
    assert all(o.runtime is not None and o.runtime.name == "llamacpp" for o in everything)
    assert all(msgspec.json.decode(msgspec.json.encode(o), type=Outcome) == o for o in everything)


def test_loads_are_shares_of_the_measured_capacity(real: dict[str, list[Outcome]]) -> None:
    (capacity,) = real["capacity"]
    mu = capacity.measurements["capacity"].samples[0]
    assert [row.details["rate"] for row in real["load"]] == pytest.approx([0.3 * mu, 0.6 * mu])
    assert capacity.details["requests_finished"] == 20
    assert capacity.details["overhead_share"] > 0
    (answer,) = real["answer"]
    assert answer.measurements["sla_capacity"].samples[0] == pytest.approx(0.98 * mu)


def test_each_batch_has_a_sample_a_repetition(real: dict[str, list[Outcome]]) -> None:
    for batch, row in zip((1, 2), real["batch"], strict=True):
        tpot, rate = row.measurements["tpot"].samples, row.measurements["decode_throughput"].samples
        assert len(tpot) == 2
        assert rate == pytest.approx([batch / step for step in tpot])
        assert row.details["batch"] == batch
        # A tiny model of random weights, whose sums are the same whatever the batch.
        assert row.measurements["output_identity"].samples == [1.0] * batch
        assert row.details["new_tokens"] == 32
        # These weights are in the cache.
        assert "tpot_floor" not in row.measurements


def test_few_requests_are_said_to_be_few(real: dict[str, list[Outcome]]) -> None:
    for row in real["load"]:
        (said,) = [notice for notice in row.warnings if notice.code == "few-requests"]
        assert "16 measured requests" in said.message
        assert "85%" in said.message
        # All parts run, and of mixed traffic half are interactive.
        assert "--requests 750" in said.hint


def test_the_child_serves_what_it_is_asked(tiny: ModelFile) -> None:
    """Arrivals are kept, prompts have their length, and the records are in the order of the requests."""
    asked = [Asked(5, 3, 0.05, "batch"), Asked(2, 6, 0.0), Asked(1, 1, 0.01)]
    with opened_engine(spec(tiny), 64, 4) as target:
        records = target.run(Cell(asked, 2, 16, None, "guarded", 1.0)).records
        assert [(r.id, r.prompt_tokens, r.new_tokens, r.priority, r.status) for r in records] == [
            (0, 5, 3, "batch", "finished"), (1, 2, 6, "interactive", "finished"), (2, 1, 1, "interactive", "finished"),
        ]  # fmt: skip
        assert [len(r.times_s) for r in records] == [3, 6, 1]
        assert all(not r.tokens for r in records)
    with pytest.raises(UsageError, match="KV budget is 6"), opened_engine(spec(tiny), 64, 4) as target:
        target.run(Cell(asked, 2, 16, 6))


def test_a_request_beyond_the_context_is_refused_before_anything_is_measured(tiny: ModelFile) -> None:
    with pytest.raises(UsageError, match="the context of `tiny` holds") as caught:
        list(run(spec(tiny, prompt_tokens=100_000)))
    assert "--prompt-tokens" in caught.value.hint


def test_a_request_beyond_the_kv_budget_is_refused_before_anything_is_loaded(tiny: ModelFile) -> None:
    with pytest.raises(UsageError, match="the KV budget is 10 in all"):
        list(run(spec(tiny, kv_budget_tokens=10)))


def test_prompts_differ_between_requests_and_not_between_runs(tiny: ModelFile) -> None:
    from quantlab.runtime.backend import Capacity
    from quantlab.runtime.loading import opened

    with opened(Path(tiny.path), Capacity(64), threads=1) as backend:
        prompts = serve._Prompts(backend, 0)
        assert [len(prompts(i, 12)) for i in range(20)] == [12] * 20
        # Longer than the text, which is repeated.
        assert len(prompts(0, 300_000)) == 300_000
        assert len({prompts(i, 12).tobytes() for i in range(20)}) > 15
        assert prompts(3, 12).tobytes() == serve._Prompts(backend, 0)(3, 12).tobytes()


def test_an_answer_that_another_batch_changes_is_counted(tiny: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantlab.bench.batching.target import EngineTarget

    plain = EngineTarget.run

    def turning(self: EngineTarget, cell: Cell) -> serve.Run:
        done = plain(self, cell)
        assert all(len(record.tokens) == 32 for record in done.records)
        if cell.max_num_seqs == 3:
            done.records[1].tokens[-1] += 1
        return done

    monkeypatch.setattr(EngineTarget, "run", turning)
    rows = list(run(spec(tiny, parts=["batch"], batch=[1, 3], repeats=1, warmup=0)))
    assert [row.measurements["output_identity"].samples for row in rows] == [[1.0], [1.0, 0.0, 1.0]]


# virtual time


def test_delay_grows_with_load_and_theory_stands_beside_it(virtual: dict[str, list[Outcome]]) -> None:
    rows = virtual["load"]
    assert [row.details["rho"] for row in rows] == pytest.approx([0.5, 0.7, 0.8, 0.9])
    delays = [row.details["queue_delay_interval_s"][0] for row in rows]
    predicted = [row.details["mg1_queue_delay_s"] for row in rows]
    assert delays == sorted(delays)
    assert predicted == sorted(predicted)
    for row in rows:
        d = row.details
        assert d["mg1_queue_delay_s"] == pytest.approx(
            d["mm1_queue_delay_s"] * (1 + d["service_squared_variation"]) / 2
        )
        assert row.measurements["predicted_queue_delay"].samples == [d["mg1_queue_delay_s"]]
        # Four at a time wait less than one server's queue would, and the row says why.
        assert d["mg1_holds"] is False
        assert any("one request at a time" in broken for broken in d["mg1_broken"])
        assert "simulated" in {notice.code for notice in row.warnings}
        assert row.runtime is not None
        assert row.runtime.name == "simulated"


def test_one_at_a_time_agrees_with_m_g_1(tiny: ModelFile) -> None:
    options = {"requests": 4000, "max_num_seqs": 1, "parts": ["load"], "utilization": [0.5, 0.7]}
    rows = by_part(list(run(spec(tiny, **ROOFLINE, **options))))["load"]
    for row in rows:
        d = row.details
        assert d["in_service"] == pytest.approx(1.0)
        assert row.measurements["utilization"].samples[0] == pytest.approx(d["rho"], rel=0.03)
        assert d["queue_delay_interval_s"][0] == pytest.approx(d["mg1_queue_delay_s"], rel=0.15)
        assert d["mg1_broken"] == []
        assert any("exponential service" in broken for broken in d["mm1_broken"])


def test_the_search_ends_between_what_meets_and_what_fails(virtual: dict[str, list[Outcome]]) -> None:
    (answer,) = virtual["answer"]
    d = answer.details
    rows = {row.details["rate"]: row.details for row in (*virtual["load"], *virtual["sla"])}
    assert rows[d["highest_rate"]]["within"]
    assert d["highest_rate"] < d["lowest_failing_rate"]
    assert not any(row["within"] for rate, row in rows.items() if rate > d["highest_rate"])
    assert rows[d["decided_rate"]]["verdict"] == "meets"
    assert rows[d["lowest_failing_rate"]]["verdict"] == "fails"
    assert d["decided_rate"] <= d["highest_rate"]
    assert answer.measurements["goodput"].samples[0] == pytest.approx(d["highest_rate"], rel=0.02)


def test_a_limit_that_nothing_meets_is_an_honest_none(tiny: ModelFile) -> None:
    parts = by_part(list(run(spec(tiny, **ROOFLINE, parts=["sla"], ttft_slo_s=1e-4, requests=200))))
    (answer,) = parts["answer"]
    assert answer.details["highest_rate"] is None
    assert answer.measurements == {}
    (said,) = [notice for notice in answer.warnings if notice.code == "slo-not-met"]
    assert "nothing can meet the limits: for requests that are alone TTFT P99 is" in said.message
    assert "0.100 ms are allowed" in said.message
    alone = parts["sla"][-1]
    assert (alone.details["rate"], alone.details["requests"]) == (0.0, 20)
    # Nobody waits, nobody shares a step: prompt and first token in one step.
    assert max(alone.measurements["queue_delay"].samples) == pytest.approx(0.0, abs=1e-9)
    assert alone.measurements["utilization"].samples == [pytest.approx(1.0)]
    # They come when the one before has gone: no rate, so no goodput.
    assert "goodput" not in alone.measurements
    assert alone.details["goodput_interval"] is None


def test_guards_hold_the_limit_that_fcfs_breaks_at_one_load(virtual: dict[str, list[Outcome]]) -> None:
    rows = {row.details["policy"]: row for row in virtual["mixed"]}
    assert list(rows) == ["fcfs", "priority", "preemption", "guarded"]
    p99 = {policy: row.details["ttft_p99_interval_s"][0] for policy, row in rows.items()}
    assert p99["fcfs"] > 0.4 > p99["guarded"]
    assert p99["priority"] < p99["fcfs"]
    assert len({row.details["rate"] for row in rows.values()}) == 1
    assert rows["fcfs"].details["rho"] == pytest.approx(0.95)
    for row in rows.values():
        assert row.details["longest_batch_wait_s"] <= row.details["batch_wait_bound_s"] + 1e-9
    # Host time is no share of virtual time.
    assert virtual["capacity"][0].details["overhead_share"] is None
    assert sum(rows["preemption"].measurements["preempted"].samples) > 0
    assert sum(rows["fcfs"].measurements["preempted"].samples) == 0


def test_overload_is_said_and_predicts_nothing(tiny: ModelFile) -> None:
    (capacity, row) = run(spec(tiny, **ROOFLINE, parts=["load"], rate=[1e4], requests=100))
    assert capacity.details["part"] == "capacity"
    assert {notice.code for notice in row.warnings} >= {"overload", "simulated"}
    assert row.details["mm1_queue_delay_s"] is None
    assert "predicted_queue_delay" not in row.measurements
    assert any("load below 1" in broken for broken in row.details["mg1_broken"])


def test_a_fitted_simulation_says_so_in_every_row(tiny: ModelFile) -> None:
    outcomes = list(run(spec(tiny, simulate=True, parts=["load"], requests=60, utilization=[0.5])))
    for outcome in outcomes:
        assert outcome.runtime is not None
        assert outcome.runtime.name == "simulated"
        (said,) = [notice for notice in outcome.warnings if notice.code == "simulated"]
        assert "steps of `tiny` on this machine" in said.message


def test_a_trace_and_a_policy_reach_the_engine(tiny: ModelFile, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f"2023-11-16 18:15:{i:02d}.0000000,{100 + 10 * (i % 5)},{20 + i % 3}" for i in range(40)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    options = {
        "parts": ["load"],
        "trace": str(path),
        "policy": "admission",
        "ttft_slo_s": 0.2,
        "requests": 60,
        "rate": [30.0],
    }
    capacity, row = run(spec(tiny, **ROOFLINE, **options))
    assert "short-trace" in {notice.code for notice in capacity.warnings}
    assert row.details["requests"] == 40
    assert row.details["requests_rejected"] > 0
    assert sum(row.measurements["rejected"].samples) > 0
    assert max(row.measurements["ttft"].samples) < 0.4
    assert any("Poisson arrivals" in broken for broken in row.details["mm1_broken"])


def test_a_fleet_has_the_capacity_of_its_replicas_and_shorter_queues(tiny: ModelFile) -> None:
    options = {**ROOFLINE, "requests": 800, "utilization": [0.9], "ttft_slo_s": 0.4}
    found = {n: by_part(list(run(spec(tiny, **options, parts=["load", "mixed"], replicas=n)))) for n in (1, 8)}
    turns = by_part(list(run(spec(tiny, **options, parts=["load"], replicas=8, router="round-robin"))))
    mu = {n: rows["capacity"][0].measurements["capacity"].samples[0] for n, rows in found.items()}
    assert mu[8] == pytest.approx(8 * mu[1])
    waits = {n: rows["load"][0].details["queue_delay_interval_s"][0] for n, rows in found.items()}
    # Eight queues of which the shortest is chosen, or in turn, which services of nearly one length like best.
    assert waits[8] < 0.5 * waits[1]
    assert turns["load"][0].details["queue_delay_interval_s"][0] < 0.5 * waits[1]
    for rows in (found[1], found[8], turns):
        (load,) = rows["load"]
        assert load.details["requests_finished"] == 800
        # At 90% of the capacity the fleet serves what comes, in tokens too: four for each request on average.
        rate = load.measurements["output_throughput"].samples[0]
        assert rate == pytest.approx(4 * load.details["rate"], rel=0.06)
    for rows in found.values():
        first = rows["mixed"][0]
        assert [row.details["policy"] for row in rows["mixed"]] == ["fcfs", "priority", "preemption", "guarded"]
        assert first.details["batch_throughput"] == pytest.approx(16 * first.details["rate"] / 2, rel=0.1)


def test_no_batch_request_of_a_fleet_waits_beyond_its_bound(tiny: ModelFile) -> None:
    """Queues in turn are long where others are empty: the bound is that of the replica's own queue."""
    options = {**ROOFLINE, "requests": 600, "parts": ["mixed"], "replicas": 4, "router": "round-robin"}
    rows = list(run(spec(tiny, **options)))
    assert len(rows) == 4
    assert all(row.details["longest_batch_wait_s"] <= row.details["batch_wait_bound_s"] + 1e-9 for row in rows)


def prefixes(path: Path, *, told: bool = True) -> str:
    """Forty conversations of five turns: each prompt is the last one and 1,024 tokens more."""
    lines = []
    for turn in range(5):
        for talk in range(40):
            ids = [1000 * talk + block for block in range(2 * (turn + 1))]
            row = {"timestamp": 100 * len(lines), "input_length": 512 * len(ids), "output_length": 16}
            lines.append(json.dumps(row | ({"hash_ids": ids} if told else {})))
    path.write_text("\n".join(lines))
    return str(path)


def test_a_router_that_knows_prefixes_finds_more_of_them_in_the_caches(tiny: ModelFile, tmp_path: Path) -> None:
    options: dict[str, Any] = {"simulate": True, "bandwidth_bytes_per_s": 1e7, "flops_per_s": 1e9, "parts": ["load"]}
    options |= {"requests": 200, "max_num_batched_tokens": 1024, "length_scale": 0.1, "replicas": 3}
    options |= {"trace": prefixes(tmp_path / "t.jsonl"), "rate": [20.0]}
    found = {}
    for router in ("prefix-aware", "round-robin"):
        found[router] = list(run(spec(tiny, **options, router=router, prefix_cache_tokens=40_000)))[-1]
    plain = list(run(spec(tiny, **options, router="round-robin")))[-1]
    cached = {router: row.details["share_cached"] for router, row in found.items()}
    # Each turn after the first finds all but its last 1,024 tokens, where it goes to its own replica.
    assert plain.details["share_cached"] == 0
    assert 0.5 < cached["prefix-aware"] < 0.75
    assert 0 < cached["round-robin"] < 0.8 * cached["prefix-aware"]
    ttft = [fmean(row.measurements["ttft"].samples) for row in (*found.values(), plain)]
    assert ttft[0] < ttft[1] < ttft[2]
    alone = list(run(spec(tiny, **options | {"replicas": 1}, prefix_cache_tokens=40_000)))[-1]
    assert alone.details["share_cached"] > 0.5
    options["trace"] = prefixes(tmp_path / "u.jsonl", told=False)
    with pytest.raises(UsageError, match="tells no shared prefixes"):
        list(run(spec(tiny, **options, prefix_cache_tokens=40_000)))


def test_a_trace_of_a_few_requests_is_refused(tiny: ModelFile, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f"2023-11-16 18:15:{i:02d}.0,100,20\n" for i in range(9)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    with pytest.raises(UsageError, match="the trace has 9 requests"):
        list(run(spec(tiny, **ROOFLINE, parts=["load"], trace=str(path))))


# lost requests


def test_lost_requests_are_counted_and_end_the_bench_with_an_error(
    tiny: ModelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantlab.bench.batching.target import SimulatedTarget

    plain = SimulatedTarget.run

    def losing(self: SimulatedTarget, cell: Cell) -> serve.Run:
        done = plain(self, cell)
        if cell.requests[-1].arrival_s > 0:
            for record in done.records[5:8]:
                record.status, record.reason = "failed", "device lost: somewhere"
        return done

    monkeypatch.setattr(SimulatedTarget, "run", losing)
    outcomes: list[Outcome] = []
    with pytest.raises(QuantlabError, match=r"6 of \d+ requests were lost \(6 device lost\)"):
        outcomes.extend(run(spec(tiny, **ROOFLINE, parts=["load"], utilization=[0.5, 0.7])))
    assert [outcome.details.get("requests_lost") for outcome in outcomes] == [0, 3, 3]
    assert outcomes[-1].details["complete"] is False
    assert "lost-requests" in {notice.code for notice in outcomes[-1].warnings}


def test_the_number_of_steps_is_what_progress_was_told(tiny: ModelFile) -> None:
    told: list[tuple[str, float, float]] = []
    list(run(spec(tiny, **ROOFLINE, utilization=[0.5]), lambda *stage: told.append(stage)))
    assert {total for _, _, total in told[1:]} == {told[-1][2]}
    assert told[-1][1] <= told[-1][2]
    assert opening.needed_sequences(spec(tiny, batch=[1, 16])) == 16


def test_a_crash_in_the_middle_loses_no_finished_row(tiny: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantlab.bench.batching.target import EngineTarget

    plain, loads = EngineTarget.run, 0

    def dying(self: EngineTarget, cell: Cell) -> serve.Run:
        nonlocal loads
        loads += cell.requests[-1].arrival_s > 0
        if loads == 2:
            os.kill(self._worker._process.pid, signal.SIGKILL)
        return plain(self, cell)

    monkeypatch.setattr(EngineTarget, "run", dying)
    outcomes: list[Outcome] = []
    with pytest.raises(QuantlabError, match="was ended by SIGKILL"):
        outcomes.extend(run(spec(tiny, parts=["load"], rate=[50.0, 60.0, 70.0])))
    assert [outcome.details["part"] for outcome in outcomes] == ["capacity", "load"]
