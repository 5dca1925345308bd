"""Part (b): open-loop load on one engine or server: delay against load, and what queueing theory says of it.

First the capacity: all requests at once. Then one run for each rate, whose arrivals never wait for completions, so that
no delay can hide (coordinated omission). Beside the measured mean queueing delay stand M/M/1 and M/G/1 (theory.py);
where a prediction lies outside the interval, the assumptions that do not hold are named with their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from quantlab.bench.batching.load import Lengths, at_rate, squared_variation_of_gaps
from quantlab.bench.batching.serve import Cell, Run, cell_of
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.bench.batching.theory import (
    Facts,
    Server,
    agrees,
    broken_assumptions,
    mg1_wait_s,
    mm1_wait_s,
    relaxation_s,
    saturated,
)
from quantlab.bench.batching.window import Window, tpot_mean, ttft_p99
from quantlab.core.result import Measurement
from quantlab.core.statistics import Interval, batch_means_interval, percentile


def cell(spec: BatchingSpec, drawn: Lengths, rate: float, *, policy: str | None = None) -> Cell:
    """The requests at `rate`, served by the spec's engine; with deadlines where the policy may reject."""
    chosen = policy or spec.policy
    deadline = spec.ttft_slo_s if chosen == "admission" else None
    return cell_of(spec, drawn, at_rate(drawn, rate, ttft_slo_s=deadline), chosen)


def saturate(spec: BatchingSpec, drawn: Lengths) -> Cell:
    """All requests at once on one engine, none rejected: what the capacity is measured with."""
    return alone(cell(spec, drawn, math.inf, policy="fcfs"))


def alone(cell: Cell) -> Cell:
    """The same load on one replica."""
    return msgspec.structs.replace(cell, replicas=1)


def capacity(spec: BatchingSpec, run: Run) -> Server:
    """The capacity that a run of all requests at once on one engine shows, times the replicas."""
    server = saturated(run.records, spec.max_num_seqs)
    return server._replace(mu=server.mu * spec.replicas)


def capacity_row(server: Server, run: Run, spec: BatchingSpec) -> tuple[dict[str, Measurement], dict[str, Any]]:
    """The measurements and details of the saturated run."""
    found = {"capacity": Measurement("requests/s", "higher", [server.mu])}
    details = {
        "requests": len(run.records),
        "requests_finished": server.n_requests,
        "requests_lost": sum(record.status == "failed" for record in run.records),
        "service_squared_variation": server.squared_variation,
        "max_num_seqs": spec.max_num_seqs,
        "replicas": spec.replicas,
        "steps": run.n_steps,
        # What the engine takes on the host, of the time that the device takes.
        "overhead_share": run.overhead_s / run.forward_s if run.overhead_s else None,
    }
    return found, details


def row(
    spec: BatchingSpec, drawn: Lengths, server: Server, rate: float, run: Run
) -> tuple[dict[str, Measurement], dict[str, Any]]:
    """The measurements and details of one load."""
    window = Window(run)
    found = window.measurements(spec.ttft_slo_s, spec.tpot_slo_s)
    rho = rate / server.mu
    details: dict[str, Any] = {"rate": rate, "rho": rho, **shares(window), **latencies(window)}
    found["rho"] = Measurement("share", "none", [rho])
    if run.knows_queue and "queue_delay" in found:
        facts = _facts(spec, drawn, server, rho, window)
        details |= _against_theory(facts, batch_means_interval(found["queue_delay"].samples))
        if (mg1 := details["mg1_queue_delay_s"]) is not None:
            found["predicted_queue_delay"] = Measurement("s", "lower", [mg1])
    return found, details


def in_turn(runs: Sequence[Run]) -> Run:
    """Runs of one request each as one run: each arrives when the one before has finished."""
    records, at = [], 0.0
    for number, run in enumerate(runs):
        for record in run.records:
            moved = {
                name: None if (time := getattr(record, name)) is None else time + at
                for name in ("admitted_s", "first_token_s", "finished_s")
            }
            times = [time + at for time in record.times_s]
            records.append(msgspec.structs.replace(record, id=number, arrival_s=at, times_s=times, **moved))
        at = records[-1].finished_s or at
    return Run(records, sum(run.cpu_s for run in runs), knows_queue=all(run.knows_queue for run in runs))


def alone_row(spec: BatchingSpec, run: Run) -> tuple[dict[str, Measurement], dict[str, Any]]:
    """The measurements and details of requests that were alone (`in_turn`): no load, so nothing to predict."""
    window = Window(run)
    found = window.measurements(spec.ttft_slo_s, spec.tpot_slo_s)
    del found["goodput"]
    return found, {
        "rate": 0.0,
        "rho": 0.0,
        **shares(window),
        **latencies(window),
    }


def shares(window: Window) -> dict[str, Any]:
    """How many requests were measured and what became of them."""
    every = window.run.records
    return {
        "requests": len(every),
        "requests_measured": len(window.records),
        "requests_finished": sum(record.status == "finished" for record in every),
        "requests_rejected": sum(record.status == "rejected" for record in every),
        "requests_lost": sum(record.status == "failed" for record in every),
        # Of the prompt tokens of the measured requests: what a prefix cache had of them.
        "share_cached": sum(r.cached_tokens for r in window.records) / sum(r.prompt_tokens for r in window.records),
        "arrival_rate": window.arrival_rate,
        "duration_s": max((r.finished_s or 0.0 for r in every), default=0.0),
    }


def latencies(window: Window) -> dict[str, Any]:
    """TTFT at several percentiles and mean TPOT, with their intervals."""
    ttft = window.samples(lambda r: r.ttft_s if r.status == "finished" else None)
    p99, tpot = ttft_p99(window), tpot_mean(window)
    return {
        "ttft_p50_s": percentile(ttft, 50) if ttft else None,
        "ttft_p99_interval_s": list(p99) if p99 else None,
        "tpot_mean_interval_s": list(tpot) if tpot else None,
    }


def _facts(spec: BatchingSpec, drawn: Lengths, server: Server, rho: float, window: Window) -> Facts:
    services = window.services_s
    return Facts(
        rho=rho,
        server=server,
        in_service=window.in_service,
        mean_service_s=sum(services) / len(services) if services else math.nan,
        gaps_squared_variation=squared_variation_of_gaps(drawn),
        poisson=spec.trace is None and spec.burstiness == 1.0,
        duration_s=window.end_s,
        unserved=window.unserved,
    )


def _against_theory(facts: Facts, measured: Interval) -> dict[str, Any]:
    """Both predictions, whether the interval of the measured mean holds them, and what is broken where it does not."""
    rho, server = facts.rho, facts.server
    details: dict[str, Any] = {
        "queue_delay_interval_s": list(measured),
        "in_service": facts.in_service,
        # Of those that finished; the others are counted beside.
        "mean_service_s": facts.mean_service_s,
        "share_without_service": facts.unserved,
        "service_squared_variation": server.squared_variation,
        "relaxation_s": relaxation_s(rho, server.mu, server.squared_variation) if rho < 1 else None,
    }
    for name, predicted, exponential in (
        ("mm1", mm1_wait_s(rho, server.mu), True),
        ("mg1", mg1_wait_s(rho, server.mu, server.squared_variation), False),
    ):
        holds = agrees(measured, predicted)
        details[f"{name}_queue_delay_s"] = predicted
        # Without an interval it is not known whether they part.
        known = measured.low is not None
        broken = list(broken_assumptions(facts, exponential=exponential)) if known and not holds else []
        details |= {f"{name}_holds": holds if known else None, f"{name}_broken": broken}
    return details
