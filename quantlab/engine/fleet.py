"""A fleet in virtual time: replicas behind a router, a million requests in less than a minute on one core."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple

from quantlab.core.errors import UsageError
from quantlab.engine.limits import check_request
from quantlab.engine.replica import Replica
from quantlab.engine.request import Request, RequestRecord
from quantlab.engine.routing import LeastLoaded, RoundRobin, Router


class FleetRun(NamedTuple):
    """The end of a simulation: virtual seconds, and for each replica its utilization and its steps."""

    duration_s: float
    utilization: list[float]
    n_steps: list[int]


class Fleet:
    """Replicas behind a router; `fallback` replicas (of a smaller model) serve what admission degrades."""

    def __init__(
        self, replicas: Iterable[Replica], router: Router | None = None, fallback: Iterable[Replica] = ()
    ) -> None:
        self._replicas, self._fallback = list(replicas), list(fallback)
        if not self._replicas:
            raise UsageError("a fleet of no replicas", "give one or more")
        self._router = router or RoundRobin()
        self._ends: list[tuple[float, int, Replica]] = []
        self._pushed = 0

    def run(self, requests: Iterable[Request], sink: Callable[[RequestRecord], None]) -> FleetRun:
        """Serve requests in the order of their arrival; each record goes to `sink` as soon as it is known.

        `requests` may be a generator: no more of it is held than waits and runs. A request that a replica could never
        serve, or one out of order, ends the run with UsageError.
        """
        everyone = self._replicas + self._fallback
        for replica in everyone:
            replica.sink = sink
        if self._fallback:
            for replica in self._replicas:
                replica.degrade = self._degrade
        before = [(replica.busy_s, replica.n_steps) for replica in everyone]
        limits, at, ends = list({replica.limits for replica in everyone}), 0.0, self._ends
        for request in requests:
            for limit in limits:
                check_request(request, limit)
            if request.arrival_s < at:
                raise UsageError(
                    f"request {request.id} arrives at {request.arrival_s} s, after one at {at} s", "sort them"
                )
            at = request.arrival_s
            while ends and ends[0][0] < at:
                self._end()
            self._put(self._replicas[self._router.choose(request, self._replicas)], request, at)
        while ends:
            at = max(at, ends[0][0])
            self._end()
        busy = [(replica.busy_s - was[0]) / at if at else 0.0 for replica, was in zip(everyone, before, strict=True)]
        n_steps = [replica.n_steps - was[1] for replica, was in zip(everyone, before, strict=True)]
        return FleetRun(at, busy, n_steps)

    def _put(self, replica: Replica, request: Request, now_s: float, *, degraded: bool = False) -> None:
        before = replica.ends_s
        replica.put(request, now_s, degraded=degraded)
        if replica.ends_s != before:
            self._push(replica)

    def _end(self) -> None:
        """The next steps to end. An entry that a later arrival cut short is stale."""
        at, _, replica = heapq.heappop(self._ends)
        if replica.ends_s == at:
            replica.end()
            self._push(replica)

    def _push(self, replica: Replica) -> None:
        if replica.ends_s is not None:
            self._pushed += 1
            heapq.heappush(self._ends, (replica.ends_s, self._pushed, replica))

    def _degrade(self, request: Request, now_s: float) -> None:
        small = self._fallback
        self._put(small[LeastLoaded().choose(request, small)], request, now_s, degraded=True)
