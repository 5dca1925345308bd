"""One load on one engine, and the child process that holds the model for it.

The child loads the model once; then it serves every Cell that the parent sends, an engine of its own for each, and
answers with the records. What step times it has learnt it keeps from cell to cell, so that admission can predict from
the first request on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from quantlab.bench import workloads
from quantlab.bench.batching.load import Asked, Lengths
from quantlab.bench.batching.policy import policy
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.core.corpus import load_text
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.model import ModelFile
from quantlab.engine import Costs, Engine, Limits, MeasuredCosts, Request, RequestRecord, limits_of
from quantlab.runtime.backend import Backend, Capacity, Loaded, Tokens
from quantlab.runtime.clock import Clock, WallClock
from quantlab.runtime.step_model import MeasuredStep, StepModel, fit
from quantlab.runtime.worker import Channel

# As `bench` has it: prompts of a batch are computed in steps of this size.
N_BATCH, N_UBATCH = 2048, 512
# No two seeds share the prompt of a request, as long as there are fewer requests.
SEEDS = 1_000_003


class Cell(msgspec.Struct, frozen=True):
    """One load: its requests, and the engine that serves them."""

    requests: list[Asked]
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_budget_tokens: int | None = None
    policy: str = "fcfs"
    ageing_s: float = 0.0
    # In virtual time: so many engines, and who gets an arrival.
    replicas: int = 1
    router: str = "least-loaded"
    # Of each replica, and how its blocks are cut; None: it has no prefix cache.
    prefix_cache_tokens: int | None = None
    block_tokens: float = 0.0
    # Whether the records keep the ids of what was generated.
    keep_tokens: bool = False

    def limits(self, backend: Backend) -> Limits:
        """Of an engine on this backend."""
        return limits_of(
            backend,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_budget_tokens=self.kv_budget_tokens,
        )


def cell_of(spec: BatchingSpec, drawn: Lengths, requests: list[Asked], policy: str) -> Cell:
    """A load on the engines of a spec."""
    return Cell(
        requests,
        spec.max_num_seqs,
        spec.max_num_batched_tokens,
        spec.kv_budget_tokens,
        policy,
        spec.ageing_s,
        spec.replicas,
        spec.router,
        spec.prefix_cache_tokens,
        drawn.block_tokens,
    )


class Run(msgspec.Struct, frozen=True):
    """What became of the requests, in their order; CPU seconds of the process that computed; steps and their overhead.

    `overhead_s` is what the scheduler, arrays and sampling took in all; it is 0 in virtual time and of a server.
    """

    records: list[RequestRecord]
    cpu_s: float = 0.0
    n_steps: int = 0
    forward_s: float = 0.0
    overhead_s: float = 0.0
    # Whether requests wait in a queue that the records tell apart from being served.
    knows_queue: bool = True
    # Of a fleet: its replicas, and which of them served each record.
    replicas: int = 1
    served_by: list[int] = []

    def of_replicas(self) -> list[list[RequestRecord]]:
        """The records of each replica: each has a queue of its own."""
        parts: list[list[RequestRecord]] = [[] for _ in range(self.replicas)]
        for record, replica in zip(self.records, self.served_by or [0] * len(self.records), strict=True):
            parts[replica].append(record)
        return parts


class Job(msgspec.Struct, frozen=True):
    """What the child opens: `n_ctx` tokens for each of `n_seq` sequences."""

    spec: BatchingSpec
    n_ctx: int
    n_seq: int


class Calibrated(msgspec.Struct, frozen=True):
    """A step model of what ran, how far the steps lie from it, and the seconds that a token's KV takes to be moved."""

    model: StepModel
    n_steps: int
    mean_relative_error: float
    p95_relative_error: float
    swap_token_s: float


def serve(
    cell: Cell,
    backend: Backend,
    clock: Clock,
    *,
    costs: Costs,
    prompt: Callable[[int, int], Tokens],
    fallback: Backend | None = None,
) -> tuple[Run, list[MeasuredStep]]:
    """Serve a cell; policies predict by `costs`, which learn from what runs where they are measured ones.

    `prompt` makes the prompt of a request from its number and its length. `fallback` holds the smaller model of the
    policy of that name, and takes turns with `backend`. Returns the steps too, for a fit.
    """
    requests = [
        Request(
            i,
            prompt(i, asked.prompt_tokens),
            asked.new_tokens,
            asked.arrival_s,
            priority=asked.priority,
            ttft_slo_s=asked.ttft_slo_s,
        )
        for i, asked in enumerate(cell.requests)
    ]
    opened = [backend] if fallback is None else [backend, fallback]
    for one in opened:
        one.reset()
    chosen = policy(cell.policy, costs, cell.ageing_s)
    engine = Engine(
        backend,
        cell.limits(backend),
        clock=clock,
        order=chosen.order,
        admission=chosen.admission,
        preemption=chosen.preemption,
        costs=costs if isinstance(costs, MeasuredCosts) else None,
    )
    small = None if fallback is None else Engine(fallback, cell.limits(fallback), clock=clock)
    before = time.process_time()
    records = engine.run(requests, small)
    for record in records if not cell.keep_tokens else ():
        record.tokens = []
    # Host time beside virtual steps is no share of anything.
    every = [*engine.steps, *(small.steps if small else ())]
    overhead = sum(step.overhead_s for step in every) if isinstance(clock, WallClock) else 0.0
    forward = sum(step.forward_s for step in every)
    run = Run(records, time.process_time() - before, len(every), forward, overhead)
    return run, [step.measured for step in engine.steps]


def work(job_json: object, channel: Channel) -> None:
    """Send the Loaded; then answer each Cell with its Run, and "calibrate" with Calibrated; end at None."""
    from quantlab.runtime.loading import import_runtime

    job = msgspec.convert(job_json, Job)
    spec = job.spec
    import_runtime(Path(spec.model.path))
    with contextlib.ExitStack() as stack:
        backend = _opened(job, spec.model, stack)
        fallback = None if spec.fallback is None else _opened(job, spec.fallback, stack)
        if fallback is not None:
            _check_same_tokens(backend, fallback, spec)
        prompts, costs = _Prompts(backend, spec.seed), MeasuredCosts()
        channel.send("loaded", msgspec.to_builtins(backend.describe()))
        steps: list[MeasuredStep] = []
        warm = False
        while (message := channel.receive()) is not None:
            if message == "calibrate":
                channel.send("calibrated", msgspec.to_builtins(_calibrated(steps, backend, prompts)))
                continue
            cell = msgspec.convert(message, Cell)
            small = fallback if cell.policy == "fallback" else None
            run, ran = serve(cell, backend, WallClock(), costs=costs, prompt=prompts, fallback=small)
            # The first load warms up: its steps fit no model.
            steps += ran if warm else []
            warm = True
            channel.send("run", msgspec.to_builtins(run))


def _opened(job: Job, model: ModelFile, stack: contextlib.ExitStack) -> Backend:
    """One of the models, as the job wants it; refused where its context is too short."""
    from quantlab.runtime.loading import opened

    spec, path = job.spec, Path(model.path)
    capacity = Capacity(
        n_ctx=job.n_ctx,
        n_seq=job.n_seq,
        n_batch=max(N_BATCH, job.n_seq, spec.max_num_batched_tokens),
        n_ubatch=N_UBATCH,
        n_outputs=job.n_seq,
        shared=False,
    )
    # A GGUF file's types are its own.
    dtype = spec.dtype if path.is_dir() else "auto"
    backend = stack.enter_context(opened(path, capacity, device=spec.device, dtype=dtype, threads=spec.threads))
    loaded = backend.describe()
    if loaded.beyond_training(job.n_ctx):
        raise UsageError(
            f"requests of up to {job.n_ctx} tokens, the context of `{model.label}` holds {loaded.n_ctx_train}",
            "lower `--prompt-tokens`, `--new-tokens` or `--length-scale`",
        )
    return backend


def _check_same_tokens(backend: Backend, fallback: Backend, spec: BatchingSpec) -> None:
    """Raise UsageError where a prompt of one model has other tokens in the other: their loads would differ."""
    assert spec.fallback is not None
    text = load_text(workloads.BUILTIN[0]).raw
    if not np.array_equal(backend.encode(text), fallback.encode(text)):
        raise UsageError(
            f"`--fallback {spec.fallback.source}` cuts text into other tokens than `{spec.model.label}`",
            "give a smaller model with the same tokenizer",
        )


class _Prompts:
    """Prompts from built-in text, each request's its own."""

    def __init__(self, backend: Backend, seed: int) -> None:
        loaded: Loaded = backend.describe()
        self._ids = backend.encode("\n\n".join(load_text(name).raw for name in workloads.BUILTIN))
        self._bos = loaded.bos if loaded.adds_bos else None
        self._seed = seed

    def __call__(self, number: int, length: int) -> Tokens:
        return slice_of(self._ids, self._bos, length, self._seed * SEEDS + number)


def slice_of(ids: Tokens, bos: int | None, length: int, seed: int) -> Tokens:
    """A prompt of `length` tokens from a text, which is repeated where it is too short; BOS has place from 2 on."""
    if length == 1:
        return ids[[seed % len(ids)]]
    return workloads.slices(np.resize(ids, max(len(ids), length)), bos, length, 1, seed)[0]


def _calibrated(steps: list[MeasuredStep], backend: Backend, prompts: _Prompts) -> Calibrated:
    found = fit([step for step in steps if step.duration_s > 0])
    return Calibrated(
        found.model,
        found.n_steps,
        found.mean_relative_error,
        found.p95_relative_error,
        _swap_token_s(backend, prompts),
    )


def _swap_token_s(backend: Backend, prompts: _Prompts) -> float:
    """Seconds a token that its KV takes out of the device or into it; 0 where the backend cannot move it."""
    from quantlab.runtime.backend import Batch

    n = min(64, backend.describe().capacity.n_ctx)
    backend.reset()
    backend.forward(Batch.of(0, prompts(0, n), 0, logits="last"))
    began = time.perf_counter()
    try:
        blob = backend.save(0)
        backend.release(0)
        backend.restore(0, blob)
    except QuantlabError:
        return 0.0
    finally:
        backend.reset()
    return (time.perf_counter() - began) / 2 / n


def zeros(number: int, length: int) -> Tokens:
    """The prompt of a simulated request: only its length counts."""
    return np.zeros(length, np.int32)
