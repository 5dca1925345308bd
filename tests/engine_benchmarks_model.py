"""What the engine does on a real model: decoding against llama-batched-bench, mixed load, simulated against real.

Called by engine_benchmarks.py. Rounds are interleaved and go on until `minutes` are over; printed are medians with
[least, most] over the rounds. What is measured against the tool has its file, threads, context and separate KV of each
sequence; the tool's tokens are random and ours greedy, which costs us the choice of each.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from quantlab.bench.batching import mixed, open_loop
from quantlab.bench.batching.batch_sizes import decode_step_s
from quantlab.bench.batching.calibration import calibrate
from quantlab.bench.batching.load import BATCH_LENGTH, Lengths, lengths
from quantlab.bench.batching.opening import needed_context
from quantlab.bench.batching.serve import N_BATCH, N_UBATCH, Run
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.bench.batching.target import EngineTarget, SimulatedTarget, opened_engine
from quantlab.bench.batching.window import Window
from quantlab.core.model import ModelFile
from quantlab.core.statistics import percentile
from quantlab.engine import Engine, Request, limits_of
from quantlab.runtime.backend import Backend, Capacity
from quantlab.runtime.llamacpp import LlamaCppBackend
from tests.benchmarks import run

BATCHES = (1, 2, 4, 8, 16)
PROMPT, NEW = 32, 64
# Loads of the simulation's check, each with arrivals and lengths of a seed of its own.
LOADS = (0.5, 0.8)
_LEAST_ROUNDS = 3
_AGEING_S = 5.0
# What a bound on waiting may be missed by: the steps that were running, and a device that was busy for a moment.
_GRACE_S = 1.0


class Options(NamedTuple):
    """What is run, on which threads, for how long; `oracle` is the folder of llama.cpp's tools."""

    models: list[Path]
    threads: int
    minutes: float
    oracle: str | None
    load: float
    ttft_slo_s: float
    tpot_slo_s: float


def rounds(minutes: float) -> Iterator[int]:
    """Rounds until the time is over, and some at least."""
    began, number = time.perf_counter(), 0
    while number < _LEAST_ROUNDS or time.perf_counter() - began < 60 * minutes:
        yield number
        number += 1


def _spec(path: Path, options: Options, *, requests: int) -> BatchingSpec:
    return BatchingSpec(
        ModelFile(str(path), path.stem, str(path), "0"),
        parts=["load", "mixed"],
        requests=requests,
        threads=options.threads,
        ttft_slo_s=options.ttft_slo_s,
        tpot_slo_s=options.tpot_slo_s,
        ageing_s=_AGEING_S,
        device="cpu",
    )


@contextlib.contextmanager
def _engine(spec: BatchingSpec) -> Iterator[tuple[EngineTarget, Lengths, int]]:
    """The model in a child process as the bench opens it, requests of seed 0, and the context that any seed needs."""
    drawn = lengths(spec)
    longest = math.floor((1 + spec.random_range_ratio) * spec.new_tokens) * BATCH_LENGTH
    n_ctx = max(needed_context(spec, drawn), math.floor((1 + spec.random_range_ratio) * spec.prompt_tokens) + longest)
    with opened_engine(spec, n_ctx, spec.max_num_seqs) as engine:
        yield engine, drawn, n_ctx


def told(samples: Sequence[float], digits: int = 3) -> str:
    """The median and [least, most]."""
    values = (statistics.median(samples), min(samples), max(samples))
    middle, low, high = (f"{value:.{digits}g}" for value in values)
    return f"{middle} [{low}, {high}]"


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns as wide as they must be."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    print(f"\n{title}")
    for row in (heads, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(flush=True)


# decoding, and what the engine takes of a step


class Decoded(NamedTuple):
    """One run of a batch: tokens a second while all decode, and the engine's share of those steps."""

    tokens_per_s: float
    overhead_share: float


def decode(options: Options) -> None:
    """Tokens a second of each batch and file against the tool, and the engine's own share of a step."""
    for path in options.models:
        ours: dict[int, list[Decoded]] = {batch: [] for batch in BATCHES}
        theirs: dict[int, list[float]] = {batch: [] for batch in BATCHES}
        n_seq = max(BATCHES)
        capacity = Capacity(PROMPT + NEW, n_seq, N_BATCH, N_UBATCH, n_seq, shared=False)
        backend = LlamaCppBackend(path, capacity, device="cpu", threads=options.threads)
        try:
            _decode(backend, n_seq)
            for number in rounds(options.minutes / len(options.models)):
                if number % 2:
                    _ours(backend, ours)
                if options.oracle is not None:
                    _theirs(options, path, theirs)
                if not number % 2:
                    _ours(backend, ours)
        finally:
            backend.close()
        _print_decode(path, options, ours, theirs)


def _ours(backend: Backend, found: dict[int, list[Decoded]]) -> None:
    for batch in BATCHES:
        found[batch].append(_decode(backend, batch))


def _decode(backend: Backend, batch: int) -> Decoded:
    backend.reset()
    rng = np.random.default_rng(batch)
    n_vocab = backend.describe().n_vocab
    engine = Engine(backend, limits_of(backend))
    records = engine.run([Request(i, rng.integers(n_vocab, size=PROMPT, dtype=np.int32), NEW) for i in range(batch)])
    full = [step for step in engine.steps if step.shape.decode_seqs == batch and not step.shape.prefill_tokens]
    overhead = sum(step.overhead_s for step in full)
    return Decoded(batch / decode_step_s(Run(records)), overhead / (overhead + sum(step.forward_s for step in full)))


def _theirs(options: Options, path: Path, found: dict[int, list[float]]) -> None:
    n_seq, threads = max(BATCHES), str(options.threads)
    command: list[str | Path] = [
        Path(options.oracle or "") / "llama-batched-bench",
        "-m",
        path,
        "-c",
        str(n_seq * (PROMPT + NEW)),
    ]
    command += ["-b", str(N_BATCH), "-ub", str(N_UBATCH), "-t", threads, "-tb", threads, "-ngl", "0", "--no-kv-unified"]
    command += ["-npp", str(PROMPT), "-ntg", str(NEW), "-npl", ",".join(map(str, BATCHES)), "--output-format", "jsonl"]
    for line in run(command).out.splitlines():
        if '"speed_tg"' in line:
            row = json.loads(line[line.index("{") :])
            found[row["pl"]].append(row["speed_tg"])


def _print_decode(path: Path, options: Options, ours: dict[int, list[Decoded]], theirs: dict[int, list[float]]) -> None:
    rows = []
    for batch in BATCHES:
        rates = [found.tokens_per_s for found in ours[batch]]
        share = told([100 * found.overhead_share for found in ours[batch]], 2)
        pair: list[str] = []
        if options.oracle is not None:
            pair = [told(theirs[batch]), told([a / b for a, b in zip(rates, theirs[batch], strict=True)])]
        rows.append([str(batch), told(rates), *pair, share])
    compared = ["llama-batched-bench tok/s", "ratio (aim >= 0.95)"] if options.oracle is not None else []
    heads = ["batch", "engine tok/s", *compared, "engine's share of the step, % (aim < 2 at 8)"]
    n = len(ours[1])
    table(f"decode: {path.name}, {options.threads} threads, {PROMPT}+{NEW} tokens, {n} rounds", heads, rows)
    if options.oracle is None:
        print("set QUANTLAB_ORACLE to a folder with llama-batched-bench to compare")


# mixed load


def mixed_load(options: Options) -> None:
    """The last model: first come, first served and guarded at one offered load, arrivals of a new seed each round."""
    names = ("fcfs", "guarded")
    path = options.models[-1]
    spec = _spec(path, options, requests=60)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    with _engine(spec) as (engine, drawn, _):
        engine.run(mixed.cell(spec, Lengths(drawn.prompt[:16], drawn.new[:16], drawn.gaps[:16]), float("inf"), "fcfs"))
        mu = open_loop.capacity(spec, engine.run(mixed.cell(spec, drawn, float("inf"), "fcfs"))).mu
        for number in rounds(options.minutes):
            again = lengths(msgspec.structs.replace(spec, seed=number))
            for name in names[:: -1 if number % 2 else 1]:
                runs[name].append(engine.run(mixed.cell(spec, again, options.load * mu, name)))
    _print_mixed(path, options, mu, runs)


def _print_mixed(path: Path, options: Options, mu: float, runs: dict[str, list[Run]]) -> None:
    rows, pooled = [], []
    for name, done in runs.items():
        windows = [Window(one, "interactive") for one in done]
        ttft = [w.samples(lambda r: r.ttft_s if r.status == "finished" else None) for w in windows]
        tpot = [statistics.fmean(w.samples(lambda r: r.tpot_s)) for w in windows]
        rejected = [100 * statistics.fmean(r.status == "rejected" for r in w.records) for w in windows]
        moved = [float(sum(r.swapped + r.recomputed for r in one.records)) for one in done]
        waits = [max(mixed.waits_and_bounds(one.records, 0 if name == "fcfs" else _AGEING_S)) for one in done]
        assert all(wait <= bound + _GRACE_S for wait, bound in waits), "a batch request starved"
        everyone = [wait for one in ttft for wait in one]
        pooled.append(f"{name}: P99 {1e3 * percentile(everyone, 99):.0f} ms of {len(everyone)} requests of all rounds")
        rows.append([
            name,
            told([1e3 * percentile(one, 50) for one in ttft]),
            told([1e3 * percentile(one, 99) for one in ttft]),
            told([1e3 * value for value in tpot]),
            told([Window(one, "batch").token_rate() for one in done]),
            told(rejected),
            told(moved),
            told([wait for wait, _ in waits]),
            told([bound for _, bound in waits]),
        ])  # fmt: skip
    heads = ["policy", "TTFT P50 ms", "TTFT P99 ms", "TPOT ms", "batch tok/s", "rejected %", "preempted",
             "longest batch wait s", "its bound s"]  # fmt: skip
    title = f"mixed load {options.load:g} of {mu:.3g} requests/s: {path.name}, {options.threads} threads, "
    title += f"{len(runs['fcfs'])} rounds; limits TTFT {1e3 * options.ttft_slo_s:g} ms, TPOT "
    table(f"{title}{1e3 * options.tpot_slo_s:g} ms", heads, rows)
    print("; ".join(pooled))


# simulated against real


def simulated(options: Options) -> None:
    """The last model: percentiles of real runs and of their simulation, step times fitted before on another load."""
    path = options.models[-1]
    spec = _spec(path, options, requests=60)
    found: dict[tuple[float, str], list[tuple[float, float]]] = {}
    with _engine(spec) as (engine, drawn, n_ctx):
        fitted = calibrate(spec, drawn, engine, lambda *_: None)
        twin = SimulatedTarget(fitted.model, n_ctx, spec.max_num_seqs, swap_token_s=fitted.swap_token_s)
        mu = open_loop.capacity(spec, twin.run(open_loop.saturate(spec, drawn))).mu
        for number in rounds(options.minutes):
            for load in LOADS:
                others = lengths(msgspec.structs.replace(spec, seed=1 + number))
                cell = open_loop.cell(spec, others, load * mu)
                for name, value in _percentiles(engine.run(cell)).items():
                    found.setdefault((load, name), []).append((value, 0.0))
                for name, value in _percentiles(twin.run(cell)).items():
                    found[load, name][-1] = (found[load, name][-1][0], value)
    rows = [
        [
            f"{load:g}",
            name,
            told([1e3 * real for real, _ in pairs]),
            told([1e3 * virtual for _, virtual in pairs]),
            told([virtual / real for real, virtual in pairs]),
        ]
        for (load, name), pairs in found.items()
    ]
    n = len(found[LOADS[0], "TPOT P50"])
    title = f"simulated against real: {path.name}, {options.threads} threads, {n} rounds of other seeds; fitted to "
    title += f"{fitted.n_steps} steps, mean error {fitted.mean_relative_error:.1%}"
    table(title, ["load", "", "real ms", "simulated ms", "simulated / real (aim 0.9 to 1.1)"], rows)


def _percentiles(run: Run) -> dict[str, float]:
    ttft = [r.ttft_s for r in run.records if r.ttft_s is not None]
    tpot = [r.tpot_s for r in run.records if r.tpot_s is not None]
    return {
        f"{name} P{percent}": percentile(samples, percent)
        for name, samples in (("TTFT", ttft), ("TPOT", tpot))
        for percent in (50, 90, 99)
    }
