"""What the batching bench is asked to measure, and how rates and limits of time are read."""

from __future__ import annotations

import math
import re

import msgspec

from quantlab.bench.roofline import check_device
from quantlab.core.errors import UsageError, unknown_name
from quantlab.core.model import ModelFile
from quantlab.core.result import DEVICES, DTYPES

# In the order in which they run; the later ones need the capacity that `load` measures.
PARTS = ("batch", "load", "sla", "mixed")
# A server schedules by itself: what it is asked is load.
SERVER_PARTS = ("load", "sla")
# Of load and sla, whose requests are of one class; what orders two classes is in `mixed`.
POLICIES = ("fcfs", "admission")
ROUTERS = ("least-loaded", "round-robin", "prefix-aware")

_REQUESTS, _SIMULATED_REQUESTS = 48, 2000
LEAST_REQUESTS = 10
# A bare number from here on may be meant in milliseconds.
_AMBIGUOUS_S = 10.0

# A run that takes longer is a slip of the rate.
_LONGEST_S = 86_400.0
# Beyond it a load teaches nothing more, and a percentage is more likely.
_LARGEST_LOAD = 5


class BatchingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model, and which parts of the bench run on it (all; of an endpoint those that load it).

    Lengths are drawn uniformly from `prompt_tokens` and `new_tokens`, each times 1 - `random_range_ratio` to 1 + it.
    With `trace` they and the arrivals are those of a recording, its lengths times `length_scale` (None: so that the
    mean prompt has `prompt_tokens`, and lengths beyond eight times the mean are cut). `rate` are arrivals per second;
    None takes `utilization`, shares of the capacity that is measured first. `requests` is how many one load has.

    `simulate` runs on the simulated backend: its step model is fitted to a short run of the model, or is the roofline
    of `bandwidth_bytes_per_s` and `flops_per_s`. Its loads may be those of a fleet: of `replicas`, each with these
    limits, behind `router`. With a trace that tells shared prefixes each replica may have a prefix cache, of
    `prefix_cache_tokens` beside its KV budget.

    `fallback` is a smaller model, loaded beside the other: the part mixed then has a policy more, that answers with it
    what `guarded` rejects. Both take turns on one device, each with these limits.
    """

    model: ModelFile
    # What an endpoint calls the model, where it serves several.
    served_model: str | None = None
    parts: list[str] | None = None
    batch: list[int] = msgspec.field(default_factory=lambda: [1, 2, 4, 8, 16])
    repeats: int = 3
    warmup: int = 1
    prompt_tokens: int = 32
    new_tokens: int = 16
    random_range_ratio: float = 0.5
    rate: list[float] | None = None
    utilization: list[float] = msgspec.field(default_factory=lambda: [0.5, 0.7, 0.8, 0.9])
    mixed_utilization: float = 0.95
    burstiness: float = 1.0
    trace: str | None = None
    length_scale: float | None = None
    requests: int | None = None
    policy: str = "fcfs"
    ttft_slo_s: float = 0.5
    tpot_slo_s: float = 0.05
    ageing_s: float = 5.0
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 128
    kv_budget_tokens: int | None = None
    simulate: bool = False
    replicas: int = 1
    router: str = "least-loaded"
    prefix_cache_tokens: int | None = None
    bandwidth_bytes_per_s: float | None = None
    flops_per_s: float | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    seed: int = 0
    fallback: ModelFile | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        self._check_sizes()
        self._check_numbers()
        for name, value, known in (
            ("policy", self.policy, POLICIES),
            ("router", self.router, ROUTERS),
            ("dtype", self.dtype, DTYPES),
            ("device", self.device, DEVICES),
            *(("part", part, PARTS) for part in self.parts or ()),
        ):
            if value not in known:
                raise unknown_name(name, value, known)
        if not 0 <= self.random_range_ratio < 1:
            raise UsageError(f"`--random-range-ratio` {self.random_range_ratio}", "give a share from 0 to below 1")
        self._check_roofline()
        if self.fallback is not None:
            self._check_fallback(self.fallback)
        if self.endpoint:
            self._check_endpoint()
        elif self.served_model is not None:
            raise UsageError("`--model` names a model of an endpoint", "leave it out for files")

    def _check_sizes(self) -> None:
        least = {"batch": self.batch, "parts": self.parts if self.parts is None else [len(self.parts)]}
        for name in ("repeats", "prompt_tokens", "new_tokens", "requests", "max_num_seqs", "max_num_batched_tokens",
                     "kv_budget_tokens", "threads", "replicas", "prefix_cache_tokens"):  # fmt: skip
            value = getattr(self, name)
            least[name] = None if value is None else [value]
        for name, values in least.items():
            if values is not None and (not values or min(values) < 1):
                raise UsageError(f"`--{name.replace('_', '-')}` {', '.join(map(str, values)) or 'of nothing'}",
                                 "give at least 1")  # fmt: skip
        if self.requests is not None and self.requests < LEAST_REQUESTS:
            raise UsageError(f"`--requests` {self.requests}: the first and the last tenth are not measured",
                             f"give at least {LEAST_REQUESTS}")  # fmt: skip
        for name in ("warmup", "seed"):
            if getattr(self, name) < 0:
                raise UsageError(f"`--{name}` {getattr(self, name)}", "give 0 or more")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"`--max-num-batched-tokens` {self.max_num_batched_tokens} is below `--max-num-seqs` "
                f"{self.max_num_seqs}",
                "each sequence decodes one token a step: raise the one or lower the other",
            )

    def _check_numbers(self) -> None:
        positive = {"rate": self.rate, "utilization": self.utilization}
        for name in ("mixed_utilization", "burstiness", "ttft_slo_s", "tpot_slo_s", "length_scale"):
            value = getattr(self, name)
            positive[name] = None if value is None else [value]
        for name, values in positive.items():
            for value in values or ():
                if not (value > 0 and (math.isfinite(value) or name == "burstiness")):
                    option = name.removesuffix("_s").replace("_", "-")
                    raise UsageError(f"`--{option}` {value:g}", "give a number above zero")
            if values == []:
                raise UsageError(f"`--{name}` names nothing", "give at least one number")
        for value in (*self.utilization, self.mixed_utilization):
            if value > _LARGEST_LOAD:
                raise UsageError(f"a load of {value:g} times the capacity", "loads are shares: 0.8 for 80%")
        slowest = min(self.rate or [math.inf])
        if not self.simulate and self.n_requests() / slowest > _LONGEST_S:
            raise UsageError(
                f"{self.n_requests()} requests at `--rate` {slowest:g} per second take more than a day",
                "give a higher rate, or `--simulate`",
            )
        if not (self.ageing_s >= 0 and math.isfinite(self.ageing_s)):
            raise UsageError(f"`--ageing` {self.ageing_s}", "give seconds from 0 on")

    def _check_roofline(self) -> None:
        check_device(self.bandwidth_bytes_per_s, self.flops_per_s, simulate=self.simulate)
        if self.replicas > 1 and not self.simulate:
            raise UsageError(f"`--replicas {self.replicas}` of a real model", "replicas are simulated: `--simulate`")
        if self.prefix_cache_tokens is not None and not (self.simulate and self.trace):
            raise UsageError(
                "`--prefix-cache-tokens` is of a simulation of a trace",
                "give `--simulate` and `--trace`, or leave it out",
            )
        if self.router == "prefix-aware" and self.prefix_cache_tokens is None:
            raise UsageError("`--router prefix-aware` without a prefix cache", "give `--prefix-cache-tokens`")
        if self.length_scale is not None and self.trace is None:
            raise UsageError("`--length-scale` is of a trace", "give `--trace FILE`, or leave it out")

    def _check_fallback(self, fallback: ModelFile) -> None:
        if fallback.path.startswith(("http://", "https://")):
            raise UsageError(f"`--fallback {fallback.path}` is an endpoint", "give a model's files")
        if fallback.sha256 and fallback.sha256 == self.model.sha256:
            raise UsageError(f"`--fallback {fallback.source}` is the model itself", "give a smaller one")
        if self.replicas > 1 or self.prefix_cache_tokens is not None:
            raise UsageError(
                "`--fallback` shares the device of one engine, without a prefix cache",
                "leave `--replicas` and `--prefix-cache-tokens` out",
            )

    def _check_endpoint(self) -> None:
        if self.simulate:
            raise UsageError("an endpoint is not simulated", "leave `--simulate` out, or give the model's files")
        if self.policy != "fcfs":
            raise UsageError(f"`--policy {self.policy}` for an endpoint", "a server schedules by itself: leave it out")
        if wrong := [part for part in self.parts or () if part not in SERVER_PARTS]:
            raise UsageError(
                f"the part `{wrong[0]}` needs the model's files", f"of an endpoint: {', '.join(SERVER_PARTS)}"
            )

    @property
    def endpoint(self) -> bool:
        """Whether the model is behind a URL."""
        return self.model.path.startswith(("http://", "https://"))

    def chosen(self) -> tuple[str, ...]:
        """The parts that run, in their order."""
        asked = self.parts or (SERVER_PARTS if self.endpoint else PARTS)
        return tuple(part for part in PARTS if part in asked)

    def n_requests(self) -> int:
        """Requests of one load: in virtual time there is time for many."""
        return self.requests or (_SIMULATED_REQUESTS if self.simulate else _REQUESTS)


def parse_numbers(text: str, option: str) -> list[float]:
    """The numbers of a comma list, `0.5,1,2`, each once; `option` is named in errors."""
    numbers = []
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError:
            number = math.nan
        if not (0 < number < math.inf):
            raise UsageError(
                f"`{option}` {text}: `{part.strip()}` is no number above zero", f"for example `{option} 0.5,1,2`"
            )
        numbers.append(number)
    return list(dict.fromkeys(numbers))


def parse_seconds(value: str | float, option: str) -> float:
    """Seconds of `500ms`, `0.5s` or 0.5; a bare number that may be meant in either unit is refused."""
    match = re.fullmatch(r"\s*([-+0-9.eE]+)\s*(ms|s)?\s*", str(value))
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or not math.isfinite(number):
        raise UsageError(f"`{option}` {value}: no time", f"for example `{option} 500ms` or `{option} 0.5s`")
    if match[2] is None and number >= _AMBIGUOUS_S:
        raise UsageError(
            f"`{option}` {value}: seconds or milliseconds?", f"write `{option} {number:g}ms` or `{option} {number:g}s`"
        )
    return number / 1000 if match[2] == "ms" else number
