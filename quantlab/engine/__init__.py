"""The engine: continuous batching with policies that can be switched, on any backend, in real or virtual time.

One real backend, step by step (`Engine`):

    with opened(path, Capacity(n_ctx=2048, n_seq=8)) as backend:
        costs = MeasuredCosts()
        engine = Engine(
            backend,
            limits_of(backend, max_num_batched_tokens=256),
            order=PriorityOrder(ageing_s=10),
            admission=PredictedDelay(costs),
            preemption=Cheaper(costs),
            costs=costs,
        )
        records = engine.run(requests)  # RequestRecord: ttft_s, tpot_s, queue_delay_s, e2el_s, status
        engine.steps, engine.events  # StepRecord (shape, forward_s, overhead_s), Event
        costs.fit()  # the StepModel of what ran, with its residuals

The same on a simulated backend (`runtime.simulated.SimulatedBackend(capacity, step_model, clock)`) with
`clock=clock`: virtual time. Many replicas and millions of requests, no tokens computed:

    columns = Columns()  # ttft_s, tpot_s, queue_delay_s, e2el_s, finished, rejected: arrays
    fleet = Fleet([Replica(limits, step_model) for _ in range(16)], LeastLoaded())
    fleet.run(requests, columns.append)  # requests may be a generator; prompts may be `range(n)`
"""

from quantlab.engine.admission import AcceptAll, Admission, Decision, PredictedDelay
from quantlab.engine.columns import Columns
from quantlab.engine.costs import Costs, KnownCosts, MeasuredCosts
from quantlab.engine.engine import Engine, StepRecord
from quantlab.engine.fleet import Fleet, FleetRun
from quantlab.engine.limits import Limits, check_request, limits_of
from quantlab.engine.policies import Cheaper, Fcfs, Order, Preemption, PriorityOrder, Recompute, Swap
from quantlab.engine.prefix import PrefixBlocks
from quantlab.engine.replica import Replica
from quantlab.engine.request import Event, Priority, Request, RequestRecord, Sampling
from quantlab.engine.routing import LeastLoaded, PrefixAware, RoundRobin, Router

__all__ = [
    "AcceptAll", "Admission", "Cheaper", "Columns", "Costs", "Decision", "Engine", "Event", "Fcfs", "Fleet", "FleetRun",
    "KnownCosts", "LeastLoaded", "Limits", "MeasuredCosts", "Order", "PredictedDelay", "Preemption", "PrefixAware",
    "PrefixBlocks", "Priority", "PriorityOrder", "Recompute", "Replica", "Request", "RequestRecord", "RoundRobin",
    "Router", "Sampling", "StepRecord", "Swap", "check_request", "limits_of",
]  # fmt: skip
