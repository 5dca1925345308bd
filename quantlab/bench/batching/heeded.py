"""Which options the chosen parts heed: one that was given and that nothing heeds is wrong use, not silence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from quantlab.bench.batching.spec import BatchingSpec
from quantlab.core.errors import UsageError

# The parts that send requests at a rate.
_LOADING = ("load", "sla", "mixed")


class _Rule(NamedTuple):
    """Whether an option is heeded, and by what."""

    holds: Callable[[BatchingSpec], bool]
    by: str


def check_heeded(spec: BatchingSpec, given: Iterable[str]) -> None:
    """Raise UsageError for the first option of `given`, as the command has it, that changes nothing in this spec."""
    for name in given:
        rule = _RULES.get(name)
        if rule is not None and not rule.holds(spec):
            raise UsageError(
                f"`--{name.replace('_', '-')}` changes nothing here: only {rule.by} heeds it",
                f"leave it out; the parts that run: {', '.join(spec.chosen())}",
            )


def _runs(spec: BatchingSpec, *parts: str) -> bool:
    return any(part in spec.chosen() for part in parts)


def _fits(spec: BatchingSpec) -> bool:
    """Whether step times are fitted to a run of the model."""
    return spec.simulate and spec.bandwidth_bytes_per_s is None


def _loads_model(spec: BatchingSpec) -> bool:
    return not spec.endpoint and spec.bandwidth_bytes_per_s is None


def _draws(spec: BatchingSpec) -> bool:
    return spec.trace is None and _runs(spec, *_LOADING)


def _sizes(spec: BatchingSpec) -> bool:
    """Whether lengths follow the means that were asked for, and not a recording alone."""
    return spec.length_scale is None or _runs(spec, "batch") or _fits(spec)


def _schedules(spec: BatchingSpec) -> bool:
    """Whether loads run on the engine."""
    return not spec.endpoint and (_runs(spec, *_LOADING) or _fits(spec))


_OF_LOADS = _Rule(lambda spec: _runs(spec, *_LOADING), "a load (load, sla, mixed)")
_OF_DRAWS = _Rule(_draws, "a load without `--trace`")
_OF_LENGTHS = _Rule(_sizes, "a run without `--length-scale`")
_OF_THE_ENGINE = _Rule(_schedules, "a load on the engine")
_OF_A_LOADED_MODEL = _Rule(_loads_model, "a model that is loaded here")
_RULES = {
    "batch": _Rule(lambda spec: _runs(spec, "batch"), "the part batch"),
    "warmup": _Rule(lambda spec: _runs(spec, "batch"), "the part batch"),
    "repeats": _Rule(lambda spec: _runs(spec, "batch") or _fits(spec), "the part batch"),
    "rate": _Rule(lambda spec: _runs(spec, "load"), "the part load"),
    "utilization": _Rule(lambda spec: _runs(spec, "load") and spec.rate is None, "the part load without `--rate`"),
    "mixed_utilization": _Rule(lambda spec: _runs(spec, "mixed"), "the part mixed"),
    "policy": _Rule(lambda spec: _runs(spec, "load", "sla"), "one of the parts load and sla (mixed runs several)"),
    "fallback": _Rule(lambda spec: _runs(spec, "mixed"), "the part mixed"),
    "ageing": _Rule(lambda spec: _runs(spec, "mixed"), "the part mixed"),
    "requests": _OF_LOADS,
    "trace": _OF_LOADS,
    "length_scale": _OF_LOADS,
    "ttft_slo": _OF_LOADS,
    "tpot_slo": _OF_LOADS,
    "burstiness": _OF_DRAWS,
    "random_range_ratio": _OF_DRAWS,
    "prompt_tokens": _OF_LENGTHS,
    "new_tokens": _OF_LENGTHS,
    "max_num_seqs": _Rule(lambda spec: _runs(spec, *_LOADING) or _fits(spec), "a load (load, sla, mixed)"),
    "max_num_batched_tokens": _OF_THE_ENGINE,
    "kv_budget_tokens": _Rule(lambda spec: not spec.endpoint and _runs(spec, *_LOADING), "a load on the engine"),
    "replicas": _OF_LOADS,
    "prefix_cache_tokens": _OF_LOADS,
    "router": _Rule(lambda spec: spec.replicas > 1 and _runs(spec, *_LOADING), "a load with `--replicas`"),
    "runtime": _OF_A_LOADED_MODEL,
    "device": _OF_A_LOADED_MODEL,
    "dtype": _OF_A_LOADED_MODEL,
    "threads": _OF_A_LOADED_MODEL,
}
