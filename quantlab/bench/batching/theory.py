"""A batching server as a queue: the definitions, what queueing theory predicts from them, and where it does not hold.

Definitions, in one place. A request arrives, waits, is put into a step for the first time (`admitted`), and leaves with
its last token (`finished`); at a time t there are n(t) requests between the two.

- queueing delay W_q: admitted - arrival. What a request waits for the others' tokens once it is in the batch is no
  queueing delay: it is in TTFT and TPOT.
- service time S_i: its share of the server, the integral of dt / n(t) from admitted to finished. The shares of all
  requests add up to the time in which the server was busy, whatever it batched. A request that failed on the way has a
  share and no service time; one that was rejected has neither. Both are counted beside.
- mu, the capacity: requests finished per second while more wait than fit. Then the mean share is 1 / mu.
- rho, the load: arrivals per second / mu. At 1 and above the queue grows as long as the arrivals last.
- utilization: the share of time with a request in the system. A batching server is busy at low loads already, with
  small batches that are slower per request: its utilization is above rho. That of a fleet is the mean of its replicas;
  all else takes a fleet for one server.

With one sequence at a time (`max_num_seqs` 1) n(t) is 1: S is the time of service, mu is 1 / E[S], the utilization is
rho, and the server is a queue of one server in the order of arrival, M/G/1 for Poisson arrivals:

    M/M/1  W_q = rho / (mu (1 - rho))                          exponential service
    M/G/1  W_q = rho / (mu (1 - rho)) x (1 + c2) / 2           Pollaczek-Khinchine; c2 = Var[S] / E[S]^2

E[S] and c2 are those of the saturated server, so that a prediction needs no run at its own load. (Kleinrock, L. (1975),
Queueing Systems I.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quantlab.core.errors import QuantlabError
from quantlab.core.statistics import Interval
from quantlab.engine import RequestRecord

Floats = npt.NDArray[np.float64]

# From where on a number is called another than the one that a formula assumes.
_VARIATION_OFF, _SERVICE_OFF, _BATCHED = 0.25, 0.10, 1.05
# A run forgets its empty start after some relaxation times.
_RELAXATIONS = 5


class Server(NamedTuple):
    """A saturated server: requests per second, and the squared variation of their service times."""

    mu: float
    squared_variation: float
    n_requests: int


def begins(record: RequestRecord) -> float | None:
    """When it begins to be served: its first step, its arrival at a server that tells no steps; None: never."""
    if record.admitted_s is None and record.status == "finished":
        return record.arrival_s
    return record.admitted_s


def service_times(records: Sequence[RequestRecord]) -> list[float | None]:
    """S_i of each request, None for one that was not served to its end."""
    pairs = zip(records, shares_s(records), strict=True)
    return [share if record.status == "finished" else None for record, share in pairs]


def in_service(records: Sequence[RequestRecord]) -> float:
    """The mean of n(t) over the time in which any request is served, whatever becomes of it; NaN where none was."""
    spans = [(begin, r.finished_s) for r in records if (begin := begins(r)) is not None and r.finished_s is not None]
    busy = sum(share for share in shares_s(records) if share is not None)
    return sum(end - begin for begin, end in spans) / busy if busy else math.nan


def shares_s(records: Sequence[RequestRecord]) -> list[float | None]:
    """What each request took of the server, also where it failed on the way; None for one that never began."""
    spans = [(i, begin, r.finished_s) for i, r in enumerate(records) if (begin := begins(r)) is not None]
    times = sorted({at for _, *span in spans for at in span if at is not None})
    if not times:
        return [None] * len(records)
    change = dict.fromkeys(times, 0)
    for _, begin, end in spans:
        if end is not None:
            change[begin] += 1
            change[end] -= 1
    inside = np.cumsum([change[at] for at in times])[:-1]
    shares = np.diff(times) / np.maximum(inside, 1) * (inside > 0)
    so_far = dict(zip(times, np.concatenate([[0.0], np.cumsum(shares)]).tolist(), strict=True))
    found: list[float | None] = [None] * len(records)
    for i, begin, end in spans:
        if end is not None:
            found[i] = so_far[end] - so_far[begin]
    return found


def saturated(records: Sequence[RequestRecord], max_num_seqs: int) -> Server:
    """Capacity and c2 from a run whose requests all arrive at once.

    Counted until the queue is empty: when all but `max_num_seqs` have finished, those count that have, and of the
    others the part of their tokens that is there. Raises QuantlabError where too few finished to tell.
    """
    done = sorted(r.finished_s for r in records if r.status == "finished" and r.finished_s is not None)
    if len(done) < 2:
        raise QuantlabError(
            f"{len(done)} of {len(records)} requests finished: the capacity is not known", "see what failed, and why"
        )
    end = done[max(len(done) - max_num_seqs, (len(done) + 1) // 2) - 1]
    finished = [r for r in records if r.status == "finished"]
    work = sum(_part_done(r, end) for r in finished)
    shares = [
        s for r, s in zip(records, service_times(records), strict=True)
        if s is not None and r.finished_s is not None and r.finished_s <= end
    ]  # fmt: skip
    mean = sum(shares) / len(shares) if shares else 0.0
    variance = sum((s - mean) ** 2 for s in shares) / len(shares) if shares else 0.0
    return Server(work / end, variance / mean**2 if mean else math.nan, len(finished))


def _part_done(record: RequestRecord, at_s: float) -> float:
    assert record.finished_s is not None
    if record.finished_s <= at_s:
        return 1.0
    return sum(time <= at_s for time in record.times_s) / max(1, record.new_tokens)


def busy_s(records: Sequence[RequestRecord], begin_s: float, end_s: float) -> float:
    """Seconds from `begin_s` to `end_s` with an accepted request in the system."""
    spans = sorted((r.arrival_s, r.finished_s) for r in records if r.status != "rejected" and r.finished_s is not None)
    busy, until = 0.0, begin_s
    for arrival, finished in spans:
        start, end = max(arrival, until), min(finished, end_s)
        if end > start:
            busy += end - start
        until = max(until, finished)
    return busy


def mm1_wait_s(rho: float, mu: float) -> float | None:
    """The mean queueing delay of M/M/1; None at a load without a steady state."""
    return rho / (mu * (1 - rho)) if rho < 1 else None


def mg1_wait_s(rho: float, mu: float, squared_variation: float) -> float | None:
    """The mean queueing delay of M/G/1 (Pollaczek-Khinchine); None at a load without a steady state."""
    waits = mm1_wait_s(rho, mu)
    return None if waits is None else waits * (1 + squared_variation) / 2


def relaxation_s(rho: float, mu: float, squared_variation: float) -> float:
    """The time constant with which a queue of Poisson arrivals forgets how it began.

    That of M/M/1, 1 / (mu (1 - sqrt(rho))^2) (Cohen, J. W. (1982), The Single Server Queue), times (1 + c2) / 2 as its
    diffusion limit has it.
    """
    if rho >= 1:
        return math.inf
    return (1 + squared_variation) / 2 / (mu * (1 - math.sqrt(rho)) ** 2)


class Facts(NamedTuple):
    """What the formulas assume, as it was in one run."""

    rho: float
    server: Server
    # Requests in service while any is, on average; 1 where they are not batched.
    in_service: float
    mean_service_s: float
    gaps_squared_variation: float
    poisson: bool
    duration_s: float
    # Of the measured requests: those that were rejected or failed, whose service is in no mean.
    unserved: float = 0.0


def broken_assumptions(facts: Facts, *, exponential: bool) -> Iterator[str]:
    """The assumptions of M/M/1 (`exponential`) or M/G/1 that do not hold, each with its number."""
    if facts.rho >= 1:
        yield f"load below 1: rho is {facts.rho:.2f}, so the delay grows with the length of the run"
    if facts.in_service > _BATCHED:
        yield f"one request at a time: {facts.in_service:.1f} are served together"
    if facts.unserved:
        yield f"every request is served: {facts.unserved:.1%} are rejected or fail"
    variation = facts.server.squared_variation
    if exponential and abs(variation - 1) > _VARIATION_OFF:
        yield f"exponential service: its squared variation is {variation:.2f}, not 1"
    ratio = facts.mean_service_s * facts.server.mu
    if abs(ratio - 1) > _SERVICE_OFF:
        yield f"service does not depend on load: a request takes {ratio:.2f} times its share of the capacity"
    if not facts.poisson:
        yield f"Poisson arrivals: the squared variation of the gaps is {facts.gaps_squared_variation:.2f}, not 1"
    relaxation = relaxation_s(facts.rho, facts.server.mu, variation)
    if facts.duration_s < _RELAXATIONS * relaxation and facts.rho < 1:
        yield f"steady state: the run has {facts.duration_s / relaxation:.1f} relaxation times"


def agrees(measured: Interval, predicted: float | None) -> bool:
    """Whether a prediction lies within the interval of what was measured; never without an interval."""
    if predicted is None or measured.low is None or measured.high is None:
        return False
    return measured.low <= predicted <= measured.high
