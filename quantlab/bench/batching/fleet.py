"""Replicas behind a router in virtual time: `--simulate`, with `--replicas 16` or one alone.

Each replica is the engine's scheduler on the same step times (engine/replica.py); no token is computed, and within one
answer tokens are taken to come evenly. Not simulated: what the network and the router themselves take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quantlab.bench.batching.policy import policy
from quantlab.bench.batching.serve import Cell, Run
from quantlab.engine import (
    Costs,
    Fleet,
    LeastLoaded,
    Limits,
    PrefixAware,
    PrefixBlocks,
    Replica,
    Request,
    RequestRecord,
    RoundRobin,
    Router,
)
from quantlab.engine.routing import Target
from quantlab.runtime.step_model import StepTime

_ROUTERS: dict[str, Callable[[], Router]] = {
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "prefix-aware": PrefixAware,
}


class _Noted:
    """A router, and what it chose."""

    def __init__(self, router: Router) -> None:
        self.router, self.chosen = router, list[int]()

    def choose(self, request: Request, replicas: Sequence[Target]) -> int:
        """See `Router`."""
        self.chosen.append(self.router.choose(request, replicas))
        return self.chosen[-1]


def serve_fleet(cell: Cell, limits: Limits, step_time: StepTime, costs: Costs, swap_token_s: float) -> Run:
    """Serve a cell on `cell.replicas` replicas, each with these limits, a policy and a prefix cache of its own."""
    replicas = []
    for _ in range(cell.replicas):
        order, admission, preemption = policy(cell.policy, costs, cell.ageing_s)
        cached = cell.prefix_cache_tokens
        replicas.append(
            Replica(
                limits,
                step_time,
                order=order,
                admission=admission,
                preemption=preemption,
                swap_token_s=swap_token_s,
                prefix=None if cached is None else PrefixBlocks(cached, cell.block_tokens),
            )
        )
    records: list[RequestRecord] = []
    requests = (
        Request(
            i,
            range(asked.prompt_tokens),
            asked.new_tokens,
            asked.arrival_s,
            priority=asked.priority,
            ttft_slo_s=asked.ttft_slo_s,
            prefix=asked.prefix,
        )
        for i, asked in enumerate(cell.requests)
    )
    router = _Noted(_ROUTERS[cell.router]())
    run = Fleet(replicas, router).run(requests, records.append)
    for record in records:
        record.times_s = _evenly(record)
    in_order = sorted(records, key=lambda record: record.id)
    return Run(in_order, n_steps=sum(run.n_steps), replicas=cell.replicas, served_by=router.chosen)


def _evenly(record: RequestRecord) -> list[float]:
    first, last, n = record.first_token_s, record.finished_s, record.new_tokens
    if record.status != "finished" or first is None or last is None:
        return []
    return [first + (last - first) * i / max(1, n - 1) for i in range(n)]
