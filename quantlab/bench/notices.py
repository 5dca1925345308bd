"""What a reader must know before believing a bench: each condition, its bound and the advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quantlab.bench.metrics import Repetition, decodes
from quantlab.bench.spec import BenchSpec
from quantlab.core import hardware, statistics, units
from quantlab.core.result import Measurement, Notice
from quantlab.runtime.backend import Loaded

# Interquartile range of the repetitions' TPOT, as a share of its median.
LARGE_SPREAD = 0.05
# With fewer, the 95% interval is wider than what one wants to see.
FEW_REPEATS = 3


def of_settings(spec: BenchSpec, threads: int) -> Iterator[Notice]:
    """Settings that make weak or slow measurements."""
    if spec.repeats < FEW_REPEATS:
        yield Notice(
            "few-repeats",
            f"{spec.repeats} repetitions: too few to tell a difference from chance",
            f"use `--repeats {FEW_REPEATS}` or more",
        )
    if threads > hardware.usable_cores():
        yield Notice(
            "threads-exceed-cores",
            f"{threads} threads on {hardware.usable_cores()} cores wait for each other",
            f"use `--threads {hardware.usable_cores()}`",
        )


def of_generations(repetitions: Sequence[Repetition], spec: BenchSpec) -> Iterator[Notice]:
    """Answers that ended before the limit."""
    counts = [len(g.tokens) for batch in repetitions for g in batch]
    if stopped := stopped_requests(repetitions):
        yield Notice(
            "stopped-early",
            f"{stopped} of {len(counts)} answers ended before {spec.new_tokens} tokens (the shortest has "
            f"{min(counts)}); rates count the tokens that were generated",
            "compare models on equal lengths with `--ignore-eos`",
        )
    if not decodes(repetitions):
        yield Notice(
            "no-tpot",
            f"no TPOT: {sum(n < 2 for n in counts)} of {len(counts)} answers have fewer than two tokens",
            "use `--new-tokens 2` or more, and `--ignore-eos`",
        )


def stopped_requests(repetitions: Sequence[Repetition]) -> int:
    """Requests that ended by themselves."""
    return sum(g.finish_reason == "stop" for batch in repetitions for g in batch)


def of_measurements(found: dict[str, Measurement], loaded: Loaded) -> Iterator[Notice]:
    """Noise, and a floor that does not hold."""
    if "tpot" not in found:
        return
    repetitions = found["tpot"].repetitions()
    if len(repetitions) >= FEW_REPEATS and (spread := statistics.relative_spread(repetitions)) > LARGE_SPREAD:
        yield Notice(
            "large-spread",
            f"TPOT varies by {units.percent(spread, digits=2)} between repetitions (bound {LARGE_SPREAD:.0%})",
            "end other work on the machine, or use more `--repeats`",
        )
    if "tpot_floor" not in found:
        yield Notice(
            "no-floor",
            f"no `tpot_floor`: the memory bandwidth of `{loaded.runtime.device}` is not measured",
            "measure with `--device cpu` to see it",
        )
        return
    cache = hardware.last_level_cache_bytes()
    share = found["tpot_floor"].samples[0] / statistics.median(repetitions)
    if loaded.weight_bytes <= cache or share > 1:
        yield Notice(
            "fits-in-cache",
            f"{units.size(loaded.weight_bytes)} of weights and a cache of {units.size(cache)}: weights come from the "
            "cache, so the time to read them from memory is no floor of TPOT",
            "read nothing from the share of the floor; larger models have one",
        )


def not_interleaved(models: int) -> Notice:
    """Models that had to be measured one after another."""
    return Notice(
        "not-interleaved",
        f"{models} models do not fit in memory together and were measured one after another: drift of the machine is "
        "part of their difference",
        "bench fewer models at a time, or smaller ones",
    )
