"""Which replica of a fleet gets an arrival: small classes with one decision each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quantlab.core.errors import UsageError
from quantlab.engine.request import Request


class Target(Protocol):
    """What a router sees of a replica."""

    @property
    def load(self) -> int:
        """Requests that wait or run."""

    def cached_tokens(self, request: Request) -> int:
        """How much of the prompt its prefix cache holds."""


class Router(Protocol):
    """Chooses by what is known at the arrival."""

    def choose(self, request: Request, replicas: Sequence[Target]) -> int:
        """The index of a replica."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: Request, replicas: Sequence[Target]) -> int:
        """The next."""
        self._last = (self._last + 1) % len(replicas)
        return self._last


class LeastLoaded:
    """The one with the fewest requests; of equals the first."""

    def choose(self, request: Request, replicas: Sequence[Target]) -> int:
        """The least loaded."""
        loads = [replica.load for replica in replicas]
        return loads.index(min(loads))


class PrefixAware:
    """The one that holds most of the prompt, unless it is too busy; then the least loaded.

    Too busy is more than `slack` requests above the least loaded one: a hot prefix must not queue on one replica
    while others idle.
    """

    def __init__(self, slack: int = 4) -> None:
        if slack < 0:
            raise UsageError(f"a slack of {slack} requests", "give 0 or more")
        self._slack = slack

    def choose(self, request: Request, replicas: Sequence[Target]) -> int:
        """The longest prefix among those that are not too busy; of equals the least loaded."""
        loads = [replica.load for replica in replicas]
        most = min(loads) + self._slack
        free = (i for i, load in enumerate(loads) if load <= most)
        return max(free, key=lambda i: (replicas[i].cached_tokens(request), -loads[i], -i))
