"""What serves a load: the engine on a model in a child process, the engine in virtual time, or a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from quantlab.bench.batching.fleet import serve_fleet
from quantlab.bench.batching.serve import Calibrated, Cell, Job, Run, serve, zeros
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.bench.contention import Contention
from quantlab.core.errors import QuantlabError
from quantlab.core.result import Notice, RuntimeInfo
from quantlab.engine import KnownCosts
from quantlab.runtime.backend import Capacity, Loaded
from quantlab.runtime.clock import VirtualClock
from quantlab.runtime.simulated import SimulatedBackend
from quantlab.runtime.step_model import StepTime
from quantlab.runtime.worker import Worker

_CHILD = "quantlab.bench.batching.serve:work"
# Nothing is computed: a step may be as large as is asked for.
_ANY_BATCH = 2**24


class Target(Protocol):
    """Serves loads; `loaded` is what is known of the model in memory."""

    runtime: RuntimeInfo
    loaded: Loaded | None

    def run(self, cell: Cell) -> Run:
        """Serve one load to its end."""

    def notices(self) -> list[Notice]:
        """What of the machine a reader must know."""


class EngineTarget:
    """The engine on a real backend, in a child process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._contention = Contention()
        self.loaded: Loaded | None = msgspec.convert(worker.receive(), Loaded)
        self.runtime = self.loaded.runtime

    def run(self, cell: Cell) -> Run:
        """See `Target`."""
        self._contention.begin()
        self._worker.send(msgspec.to_builtins(cell))
        run = msgspec.convert(self._worker.receive(), Run)
        self._contention.end(run.cpu_s)
        return run

    def calibrated(self) -> Calibrated:
        """The step model of everything that was run."""
        self._worker.send("calibrate")
        return msgspec.convert(self._worker.receive(), Calibrated)

    def notices(self) -> list[Notice]:
        """See `Target`: other processes that took CPU time."""
        return self._contention.notices(self.runtime.threads) if self.runtime.device == "cpu" else []


@contextlib.contextmanager
def opened_engine(spec: BatchingSpec, n_ctx: int, n_seq: int) -> Iterator[EngineTarget]:
    """The model in a child process, opened for `n_seq` sequences of `n_ctx` tokens."""
    # Arrivals are drawn here; JSON has no infinity for those that are even.
    job = Job(msgspec.structs.replace(spec, burstiness=1.0), n_ctx, n_seq)
    with Worker(_CHILD, msgspec.to_builtins(job)) as worker:
        target = EngineTarget(worker)
        yield target
        worker.send(None)
        worker.result()


class SimulatedTarget:
    """Virtual time, the steps of `step_time`; those of the smaller model are `fallback`'s.

    A load is served by replicas that compute no tokens (fleet.py), which takes a tenth of the engine's own time. What
    they do not tell, the times of single tokens and two models on one device, the engine does on simulated backends.
    """

    def __init__(
        self,
        step_time: StepTime,
        n_ctx: int,
        n_seq: int,
        *,
        swap_token_s: float = 0.0,
        fallback: StepTime | None = None,
        fallback_swap_token_s: float = 0.0,
    ) -> None:
        self._clock = VirtualClock()
        capacity = Capacity(n_ctx=n_ctx, n_seq=n_seq, n_batch=_ANY_BATCH, n_outputs=n_seq)
        self._backend = SimulatedBackend(capacity, step_time, self._clock, swap_token_s=swap_token_s)
        self._fallback = (
            None
            if fallback is None
            else SimulatedBackend(capacity, fallback, self._clock, swap_token_s=fallback_swap_token_s)
        )
        self._costs = KnownCosts(step_time, swap_token_s)
        self._step_time, self._swap_token_s = step_time, swap_token_s
        self.loaded: Loaded | None = None
        self.runtime = self._backend.describe().runtime

    def run(self, cell: Cell) -> Run:
        """See `Target`."""
        small = self._fallback if cell.policy == "fallback" else None
        if small is None and not cell.keep_tokens:
            limits = cell.limits(self._backend)
            return serve_fleet(cell, limits, self._step_time, self._costs, self._swap_token_s)
        return serve(cell, self._backend, self._clock, costs=self._costs, prompt=zeros, fallback=small)[0]

    def notices(self) -> list[Notice]:
        """See `Target`: virtual time is disturbed by nothing."""
        return []


def lost(runs: Sequence[Run]) -> dict[str, int]:
    """Requests that failed, counted by what befell them."""
    counts: dict[str, int] = {}
    for run in runs:
        for record in run.records:
            if record.status == "failed":
                what = record.reason.partition(":")[0] or "failed"
                counts[what] = counts.get(what, 0) + 1
    return counts


def lost_error(counts: dict[str, int], total: int) -> QuantlabError:
    """The error that ends a bench which lost requests: what was finished is kept."""
    told = ", ".join(f"{n} {what}" for what, n in counts.items())
    return QuantlabError(
        f"{sum(counts.values())} of {total} requests were lost ({told})",
        "see the log of what served them; the results of finished cells are kept",
    )
