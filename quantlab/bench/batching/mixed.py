"""Part (d): interactive and batch traffic at one offered load, served by policies of growing care.

One of every two requests is a batch request: an answer BATCH_LENGTH times as long and no deadline. All policies get the
same requests at the same times, at a share of the capacity for this very mix:

- fcfs                  in the order of arrival
- priority              interactive first; a batch request counts as if it had come `ageing` later, so that it is
                        overtaken only by what arrives within that time
- preemption            and an interactive request that finds no place takes that of a batch request
- guarded               and one whose first token is predicted to be late is rejected, like a server's 429
- fallback              and one that would be rejected is answered by a smaller model (`--fallback`), which takes turns
                        with the other on the same device: degraded service in place of none. Both cut text into
                        the same tokens, which is checked where both are loaded and taken so in a simulation

The bound on starvation: no batch request waits for a request that comes more than `ageing` after it. So it waits at
most for the shares of the server (theory.py) of what is not finished when it comes, or comes within `ageing`, and goes
before it. Of a fleet that is so for each replica. With a fallback there is no such bound: its steps are in between.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantlab.bench.batching.load import Lengths, at_rate, mixed
from quantlab.bench.batching.open_loop import latencies, shares
from quantlab.bench.batching.serve import Cell, Run, cell_of
from quantlab.bench.batching.sla import details, judge
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.bench.batching.theory import shares_s
from quantlab.bench.batching.window import Window
from quantlab.core.result import Measurement
from quantlab.engine import RequestRecord


def policies(spec: BatchingSpec) -> tuple[str, ...]:
    """The policies of the rows, in their order."""
    return ("fcfs", "priority", "preemption", "guarded", *(("fallback",) if spec.fallback else ()))


def cell(spec: BatchingSpec, drawn: Lengths, rate: float, policy: str) -> Cell:
    """Mixed requests at `rate`, served by a policy."""
    requests = mixed(at_rate(drawn, rate), ttft_slo_s=spec.ttft_slo_s, seed=spec.seed)
    return cell_of(spec, drawn, requests, policy)


def row(
    spec: BatchingSpec, rate: float, mu: float, policy: str, run: Run
) -> tuple[dict[str, Measurement], dict[str, Any]]:
    """The measurements of the interactive requests, and what they cost the batch requests."""
    window, batch = Window(run, "interactive"), Window(run, "batch")
    judged = judge(spec, rate, window, rejections=False)
    found = window.measurements(spec.ttft_slo_s, spec.tpot_slo_s)
    found["preempted"] = Measurement("times", "lower", [float(r.swapped + r.recomputed) for r in Window(run).records])
    found["batch_throughput"] = Measurement("tokens/s", "higher", [batch.token_rate()])
    waits = batch.samples(lambda r: r.queue_delay_s)
    if waits:
        found["batch_queue_delay"] = Measurement("s", "lower", waits)
    ageing_s = 0.0 if policy == "fcfs" else spec.ageing_s
    bounded = [pair for records in run.of_replicas() for pair in waits_and_bounds(records, ageing_s)]
    longest, bound = max(bounded, default=(None, None))
    small = spec.fallback if policy == "fallback" else None
    if small:
        found["degraded"] = Measurement("requests", "lower", [float(r.degraded) for r in window.records])
    told = {
        "policy": policy,
        "rate": rate,
        "rho": rate / mu,
        **shares(Window(run)),
        **latencies(window),
        **details(judged),
        "batch_throughput": batch.token_rate(),
        "longest_batch_wait_s": longest,
        # Of the one that waited longest.
        "batch_wait_bound_s": None if small else bound,
        **({"answered_by": answered_by(spec.model.label, small.label, run)} if small else {}),
        "ageing_s": ageing_s,
    }
    return found, told


def answered_by(model: str, fallback: str, run: Run) -> list[dict[str, Any]]:
    """Of each model the interactive requests that it was given, and how fast it answered those that finished."""
    found = []
    for label, degraded in ((model, False), (fallback, True)):
        window = Window(run, "interactive", degraded)
        finished = sum(record.status == "finished" for record in window.records)
        found.append({"model": label, "requests": len(window.records), "finished": finished, **latencies(window)})
    return found


def waits_and_bounds(records: list[RequestRecord], ageing_s: float) -> list[tuple[float, float]]:
    """Of each batch request that one server served its wait, and the bound on it (see above)."""
    services = np.array([found or 0.0 for found in shares_s(records)])
    arrivals = np.array([record.arrival_s for record in records])
    finished = np.array([record.finished_s or 0.0 for record in records])
    is_batch = np.array([record.priority == "batch" for record in records])
    keys = arrivals + ageing_s * is_batch
    found = []
    for i, record in enumerate(records):
        if is_batch[i] and record.queue_delay_s is not None:
            ahead = (finished > arrivals[i]) & (keys <= keys[i])
            ahead[i] = False
            found.append((record.queue_delay_s, float(services[ahead].sum())))
    return found
