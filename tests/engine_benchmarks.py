"""What the engine itself costs, and what it does on a real model: `make bench`, or by hand with some of the parts.

Without a model: `overhead` of a step, `fleet` (a million requests), `queue` (M/M/1 in the long run; minutes): CPU time
is printed, as other work on the machine does not change it much. On a model (engine_benchmarks_model.py; `--model`, or
the demo model as F16 and Q4_K_M), some minutes each on an idle machine: `decode` against llama-batched-bench, in the
folder that QUANTLAB_ORACLE or `--oracle` names, every file; `mixed` load with the guard on and off, and `simulated`
against real, the last file.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quantlab.engine import Columns, Engine, Fleet, LeastLoaded, Limits, Replica, Request, RoundRobin
from quantlab.runtime.backend import Capacity
from quantlab.runtime.clock import VirtualClock
from quantlab.runtime.simulated import SimulatedBackend
from quantlab.runtime.step_model import ExponentialSteps, StepModel
from tests import engine_benchmarks_model as on_model
from tests.benchmarks import ORACLE, quantlab
from tests.queue_theory import asymptotic_variance, needed_customers

GPU = StepModel(0.008, 5e-5, 1e-9, 1e-4, 1e-8)


def queue() -> None:
    """Every customer served by the scheduler, so many that three standard errors are 3% of the mean wait."""
    for rho in (0.5, 0.7, 0.8, 0.9):
        n = needed_customers(rho, relative_error=0.03, standard_errors=3)
        total, began = 0.0, time.process_time()

        def add(record: Any) -> None:
            nonlocal total
            total += record.admitted_s - record.arrival_s

        def arrivals(rho: float = rho, n: int = n) -> Iterator[Request]:
            rng, at, prompt = random.Random(11), 0.0, range(1)
            for i in range(n):
                at += rng.expovariate(1.0) / rho
                yield Request(i, prompt, 1, at)

        run = Fleet([Replica(Limits(1, 1, 1, 2), ExponentialSteps(1.0, 12))]).run(arrivals(), add)
        wait, theory = total / n, rho / (1 - rho)
        error = (asymptotic_variance(rho) / n) ** 0.5 / theory
        print(
            f"rho {rho}: W_q {wait:.4f} of {theory:.4f} ({wait / theory - 1:+.2%}, standard error {error:.2%}), "
            f"utilization {run.utilization[0]:.4f}, {n} customers, {time.process_time() - began:.1f} s CPU"
        )


def fleet() -> None:
    """A million requests of lognormal prompts (mean 665) and exponential answers (mean 150)."""
    n = 1_000_000
    for replicas, rate, router in ((16, 180.0, RoundRobin()), (64, 800.0, LeastLoaded())):

        def requests(rate: float = rate) -> Iterator[Request]:
            rng, at = random.Random(1), 0.0
            for i in range(n):
                at += rng.expovariate(rate)
                prompt = range(int(min(4000, rng.lognormvariate(6, 1))) + 1)
                yield Request(i, prompt, int(min(1000, rng.expovariate(1 / 150))) + 1, at)

        columns, began = Columns(), time.process_time()
        servers = [Replica(Limits(64, 2048, 400_000, 8192), GPU) for _ in range(replicas)]
        run = Fleet(servers, router).run(requests(), columns.append)
        spent = time.process_time() - began
        p50, p99 = np.percentile(columns.ttft_s, [50, 99])
        print(
            f"{n} requests on {replicas} replicas, {type(router).__name__}: {spent:.1f} s CPU, "
            f"{sum(run.n_steps)} steps, {run.duration_s:.0f} s simulated, utilization "
            f"{statistics.fmean(run.utilization):.2f}, TTFT p50 {p50:.3f} s p99 {p99:.3f} s"
        )


def overhead() -> None:
    """Host time of a decode step around the forward, with every place taken."""
    for seqs in (1, 8, 64, 256):
        clock = VirtualClock()
        backend = SimulatedBackend(Capacity(n_ctx=512, n_seq=seqs, n_batch=2048), GPU, clock)
        engine = Engine(backend, Limits(seqs, 2048, 512 * seqs, 512), clock=clock)
        engine.run([Request(i, range(16), 300) for i in range(seqs)])
        full = [step.overhead_s for step in engine.steps if step.shape.decode_seqs == seqs]
        print(
            f"simulated, batch {seqs}: {1e3 * statistics.median(full):.3f} ms of overhead a step in the median of "
            f"{len(full)} (aim 1 at 256)"
        )


def models(given: list[Path], work: Path) -> list[Path]:
    """The files that were given, or the demo model in two types."""
    if given:
        return given
    made = []
    for kind in ("F16", "Q4_K_M"):
        made.append(work / f"demo-{kind}.gguf")
        quantlab("quantize", "demo", "-m", "gguf", "--type", kind, "-o", made[-1], "--no-save")
    return made


def main() -> None:
    """Run the parts that were asked for."""
    alone: dict[str, Callable[[], None]] = {"overhead": overhead, "fleet": fleet, "queue": queue}
    on_models = {"decode": on_model.decode, "mixed": on_model.mixed_load, "simulated": on_model.simulated}
    every = [*alone, *on_models]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*every, []], help=f"some of {', '.join(every)}; default all")
    parser.add_argument("--model", type=Path, action="append", default=[], help="a GGUF file; repeatable")
    parser.add_argument("--oracle", default=ORACLE, help="folder of llama-batched-bench [default: QUANTLAB_ORACLE]")
    parser.add_argument("--minutes", type=float, default=3.0, help="for each part on a model; three rounds at least")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--load", type=float, default=0.95, help="of mixed load, as a share of the capacity")
    parser.add_argument("--ttft-slo", type=float, default=0.5, help="seconds")
    parser.add_argument("--tpot-slo", type=float, default=0.05, help="seconds")
    asked = parser.parse_args()
    parts = asked.parts or every
    print(f"load average {os.getloadavg()[0]:.2f}, {asked.threads} threads")
    for name in parts:
        if name in alone:
            alone[name]()
    if chosen := [name for name in parts if name in on_models]:
        with tempfile.TemporaryDirectory() as folder:
            options = on_model.Options(
                models(asked.model, Path(folder)), asked.threads, asked.minutes, asked.oracle, asked.load,
                asked.ttft_slo, asked.tpot_slo,
            )  # fmt: skip
            for name in chosen:
                on_models[name](options)


if __name__ == "__main__":
    main()
