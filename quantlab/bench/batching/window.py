"""Which requests of a load are measured, and what they say.

The first tenth of the requests meets a queue that is still filling, and the last tenth one that drains: both are load
and are not measured. Utilization is that of the time between the first and the last measured arrival. A request that
was rejected or lost counts in shares and in goodput, and has no latency.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from quantlab.bench.batching.serve import Run
from quantlab.bench.batching.theory import busy_s, in_service, service_times
from quantlab.core.result import Measurement
from quantlab.core.statistics import CONFIDENCE, Interval, bootstrap_interval
from quantlab.engine import Priority, RequestRecord

WARMUP_SHARE = 0.1
# Of TTFT the share of requests that must be within its limit; TPOT is judged by its mean.
SLO_PERCENTILE = 99.0


def left_out(n: int) -> int:
    """Requests at either end of `n` that are load alone."""
    return math.ceil(WARMUP_SHARE * n) if n > 2 else 0


@dataclass(frozen=True)
class Window:
    """The measured part of one run; `priority` and `degraded` narrow the requests to some of them, not the time."""

    run: Run
    priority: Priority | None = None
    # Those that the smaller model answered, or the others.
    degraded: bool | None = None

    @cached_property
    def _of_time(self) -> list[int]:
        n = len(self.run.records)
        order = sorted(range(n), key=lambda i: self.run.records[i].arrival_s)
        return order[left_out(n) : n - left_out(n)]

    @cached_property
    def _measured(self) -> list[int]:
        records = self.run.records
        return [i for i in self._of_time if self._counts(records[i])]

    def _counts(self, record: RequestRecord) -> bool:
        return self.priority in (None, record.priority) and self.degraded in (None, record.degraded)

    @property
    def records(self) -> list[RequestRecord]:
        """The measured requests, by arrival."""
        return [self.run.records[i] for i in self._measured]

    @property
    def begin_s(self) -> float:
        """The first measured arrival."""
        return self.run.records[self._of_time[0]].arrival_s

    @property
    def end_s(self) -> float:
        """The last measured arrival."""
        return self.run.records[self._of_time[-1]].arrival_s

    def samples(self, value: Callable[[RequestRecord], float | None]) -> list[float]:
        """A number of each measured request that has it, by arrival."""
        return [found for record in self.records if (found := value(record)) is not None]

    @property
    def arrival_rate(self) -> float:
        """Arrivals per second of the measured class, as they were asked for."""
        last = max(record.arrival_s for record in self.run.records)
        share = len(self._measured) / len(self._of_time)
        return share * len(self.run.records) / last if last > 0 else math.nan

    @cached_property
    def utilization(self) -> float:
        """The share of time with a request in the system (theory.py); of a fleet the mean of its replicas."""
        span, parts = self.end_s - self.begin_s, self.run.of_replicas()
        busy = sum(busy_s(part, self.begin_s, self.end_s) for part in parts)
        return busy / len(parts) / span if span > 0 else math.nan

    @cached_property
    def services_s(self) -> list[float]:
        """The service times (theory.py)."""
        every = service_times(self.run.records)
        return [found for i in self._measured if (found := every[i]) is not None]

    @property
    def in_service(self) -> float:
        """Requests that are served together, on average over the time in which any is."""
        return in_service(self.run.records)

    @property
    def unserved(self) -> float:
        """The share of the measured requests that did not finish."""
        return sum(r.status != "finished" for r in self.records) / len(self.records) if self.records else 1.0

    def met(self, ttft_slo_s: float, tpot_slo_s: float) -> list[float]:
        """1 for each measured request that finished with its own TTFT and TPOT within the limits, else 0."""
        return [
            float(r.status == "finished" and (r.ttft_s or 0.0) <= ttft_slo_s and (r.tpot_s or 0.0) <= tpot_slo_s)
            for r in self.records
        ]

    def goodput(self, ttft_slo_s: float, tpot_slo_s: float) -> float:
        """Requests per second that finished within the limits."""
        met = self.met(ttft_slo_s, tpot_slo_s)
        return self.arrival_rate * sum(met) / len(met) if met else 0.0

    def token_rate(self) -> float:
        """New tokens per second within the measured time, of every request of the class."""
        tokens = sum(self.begin_s <= at <= self.end_s for r in self.run.records for at in r.times_s
                     if self._counts(r))  # fmt: skip
        return tokens / (self.end_s - self.begin_s) if self.end_s > self.begin_s else math.nan

    def measurements(self, ttft_slo_s: float, tpot_slo_s: float) -> dict[str, Measurement]:
        """The contract's names; `rejected` and `preempted` have one number a request, in the order of arrival."""
        found = {
            "ttft": Measurement("s", "lower", self.samples(lambda r: r.ttft_s if r.status == "finished" else None)),
            "tpot": Measurement("s", "lower", self.samples(lambda r: r.tpot_s)),
            "rejected": Measurement("requests", "lower", [float(r.status == "rejected") for r in self.records]),
            "goodput": Measurement("requests/s", "higher", [self.goodput(ttft_slo_s, tpot_slo_s)]),
        }
        if self.end_s > self.begin_s:
            found["utilization"] = Measurement("share", "none", [self.utilization])
            found["output_throughput"] = Measurement("tokens/s", "higher", [self.token_rate()])
        if self.run.knows_queue:
            found["queue_delay"] = Measurement("s", "lower", self.samples(lambda r: r.queue_delay_s))
            found["preempted"] = Measurement("times", "lower", [float(r.swapped + r.recomputed) for r in self.records])
        return {name: measured for name, measured in found.items() if measured.samples}


def ttft_p99(window: Window) -> Interval | None:
    """TTFT at SLO_PERCENTILE with its bootstrap interval over the measured requests."""
    samples = window.samples(lambda r: r.ttft_s if r.status == "finished" else None)
    return bootstrap_interval(samples, SLO_PERCENTILE) if samples else None


def tpot_mean(window: Window, confidence: float = CONFIDENCE) -> Interval | None:
    """The mean TPOT of the requests with its bootstrap interval."""
    samples = window.samples(lambda r: r.tpot_s)
    return bootstrap_interval(samples, confidence=confidence) if samples else None
