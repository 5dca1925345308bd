"""What the streams are measured on: a model in a child process, or the simulated backend in virtual time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from quantlab.bench.batching.serve import Calibrated
from quantlab.bench.contention import Contention
from quantlab.bench.prefix_cache import notices
from quantlab.bench.prefix_cache.rows import Row
from quantlab.bench.prefix_cache.serve import capacity, longest_request, measure
from quantlab.bench.prefix_cache.spec import PrefixCacheSpec
from quantlab.bench.roofline import kv_bytes, notice, roofline
from quantlab.core.progress import Progress
from quantlab.core.result import ModelInfo, Notice, RuntimeInfo
from quantlab.runtime.backend import Loaded
from quantlab.runtime.clock import VirtualClock
from quantlab.runtime.simulated import SimulatedBackend
from quantlab.runtime.step_model import StepTime
from quantlab.runtime.worker import Worker, run_in_child

_MEASURE = "quantlab.bench.prefix_cache.serve:work"
_CALIBRATE = "quantlab.bench.prefix_cache.serve:calibrate"


class Target(Protocol):
    """Measures the rows of a spec."""

    runtime: RuntimeInfo

    def rows(self) -> Iterator[Row]:
        """Every row, in order."""

    def notices(self) -> list[Notice]:
        """What of the machine a reader must know, as of the last row."""


class _Model:
    """A model in a child process."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._contention = worker, Contention()
        self.runtime = msgspec.convert(worker.receive(), Loaded).runtime

    def rows(self) -> Iterator[Row]:
        """See `Target`."""
        self._contention.begin()
        while (message := self._worker.receive()) is not None:
            row = msgspec.convert(message, Row)
            self._contention.end(row.cpu_s)
            # The next one is measured while this one is written.
            self._contention.begin()
            yield row
        self._worker.result()

    def notices(self) -> list[Notice]:
        """See `Target`: other processes that took CPU time."""
        return self._contention.notices(self.runtime.threads) if self.runtime.device == "cpu" else []


@contextlib.contextmanager
def opened_model(spec: PrefixCacheSpec, progress: Progress) -> Iterator[Target]:
    """The model of the spec in a child process."""
    with Worker(_MEASURE, msgspec.to_builtins(spec), progress) as worker:
        yield _Model(worker)


class _Virtual:
    """The same measurement on the simulated backend."""

    def __init__(self, spec: PrefixCacheSpec, backend: SimulatedBackend, progress: Progress, said: Notice) -> None:
        self._spec, self._backend, self._progress, self._said = spec, backend, progress, said
        self.runtime = backend.describe().runtime

    def rows(self) -> Iterator[Row]:
        """See `Target`."""
        return measure(self._spec, self._backend, self._backend.clock, self._progress)

    def notices(self) -> list[Notice]:
        """See `Target`: where the times come from."""
        return [self._said]


def simulated(spec: PrefixCacheSpec, info: ModelInfo, progress: Progress) -> Target:
    """Virtual time, with step times of a short run of the model or of a roofline."""
    path = Path(spec.model.path)
    step_time: StepTime
    if spec.bandwidth_bytes_per_s is not None and spec.flops_per_s is not None:
        device = roofline(path, info, spec.bandwidth_bytes_per_s, spec.flops_per_s)
        step_time, said = device, notice(device)
    else:
        found = msgspec.convert(run_in_child(_CALIBRATE, msgspec.to_builtins(spec), progress), Calibrated)
        step_time, said = found.model, notices.of_calibration(found, spec.model.label)
    backend = SimulatedBackend(
        capacity(spec, longest_request(spec)), step_time, VirtualClock(), kv_bytes_per_token=kv_bytes(path)
    )
    return _Virtual(spec, backend, progress, said)
