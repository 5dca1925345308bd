"""Part (a): throughput and TPOT against the number of sequences that decode together, the knee, and what binds.

For each batch that many equal requests arrive at once; measured is the time in which all of them decode, from the last
first token to the first last one. Repetitions are interleaved over the batches, and who begins changes from round to
round; the first ones are discarded.

The knee is the smallest batch from which on no doubling gains KNEE_GAIN more throughput. What binds at a batch:

- `memory`: reading weights and KV once at the measured bandwidth is half of the step or more
- `compute`: it is less than half, and doubling the batch adds half of the step or more (throughput gains a third or
  less)
- `overhead`: neither; launches and the host's own work

`output_identity` is measured, not assumed: greedy answers are compared with those of the same prompts alone. Kernels
that sum in another order for another batch may turn a token.

Without a known bandwidth, or with weights that fit in the cache, the time to read is no floor: then what binds is
`compute`, or is not told. (Williams, S., et al. (2009), Roofline, CACM 52(4).)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from quantlab.bench import bandwidth, metrics
from quantlab.bench.batching.load import Asked
from quantlab.bench.batching.serve import N_BATCH, Cell, Run
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.bench.batching.target import Target
from quantlab.bench.notices import FEW_REPEATS
from quantlab.core import hardware
from quantlab.core.errors import QuantlabError
from quantlab.core.result import Measurement
from quantlab.core.statistics import geometric_mean_interval, median, paired_ratio
from quantlab.runtime.backend import Loaded
from quantlab.runtime.worker import run_in_child

KNEE_GAIN = 0.10
_HALF = 0.5
# Enough steps to time, also where the loads have short answers.
_LEAST_NEW_TOKENS = 32


# Answers of so many prompts are compared with those of the prompts alone.
_COMPARED = 8


class BatchPoint(NamedTuple):
    """One batch: seconds a step of each repetition, and the seconds that reading its bytes takes (None: no floor).

    `same`: for each compared prompt whether its answer is that of the prompt alone.
    """

    batch: int
    tpot_s: list[float]
    floor_s: float | None
    same: list[bool] = []  # noqa: RUF012

    @property
    def throughput(self) -> list[float]:
        """Tokens per second of each repetition."""
        return [self.batch / step for step in self.tpot_s]


def new_tokens(spec: BatchingSpec) -> int:
    """Tokens of each answer of this part."""
    return max(spec.new_tokens, _LEAST_NEW_TOKENS)


def measure(spec: BatchingSpec, target: Target, advance: Callable[[str], None]) -> list[BatchPoint]:
    """Every batch of the spec, smallest first."""
    batches = sorted(set(spec.batch))
    steps: dict[int, list[float]] = {batch: [] for batch in batches}
    alone = _alone(spec, target, batches[-1], advance) if compares(target) else []
    same: dict[int, list[bool]] = {}
    for round_ in range(spec.warmup + spec.repeats):
        first = round_ % len(batches)
        for batch in batches[first:] + batches[:first]:
            run = target.run(_cell(spec, batch, batch))
            if round_ >= spec.warmup:
                steps[batch].append(decode_step_s(run))
            same[batch] = [record.tokens == answer for record, answer in zip(run.records, alone, strict=False)]
            advance(f"batch {batch}")
    bytes_per_s = _bandwidth(target.loaded)
    return [
        BatchPoint(batch, steps[batch], _floor_s(spec, target.loaded, batch, bytes_per_s), same[batch])
        for batch in batches
    ]


def compares(target: Target) -> bool:
    """Whether the answers are a model's: those of a simulation say nothing."""
    return target.loaded is not None


def _cell(spec: BatchingSpec, requests: int, at_once: int) -> Cell:
    asked = [Asked(spec.prompt_tokens, new_tokens(spec), 0.0)] * requests
    return Cell(asked, at_once, max(N_BATCH, at_once), keep_tokens=True)


def _alone(spec: BatchingSpec, target: Target, largest: int, advance: Callable[[str], None]) -> list[list[int]]:
    """The greedy answers of the first prompts, one after the other."""
    run = target.run(_cell(spec, min(_COMPARED, largest), 1))
    advance("answers alone")
    return [record.tokens for record in run.records]


def decode_step_s(run: Run) -> float:
    """Mean seconds between tokens while every sequence decodes; raises QuantlabError where that is never."""
    if failed := [record for record in run.records if record.status != "finished"]:
        raise QuantlabError(
            f"a request of the batch {failed[0].status}: {failed[0].reason}", "see what failed, and why"
        )
    begin = max(record.times_s[0] for record in run.records)
    end = min(record.times_s[-1] for record in run.records)
    inside = sum(begin < at <= end for at in run.records[0].times_s)
    if inside < 1:
        raise QuantlabError(
            f"{len(run.records)} prompts take so many steps that the first answer ends before the last one begins",
            "raise `--new-tokens`, or lower `--prompt-tokens` or `--batch`",
        )
    return (end - begin) / inside


def _bandwidth(loaded: Loaded | None) -> float | None:
    """Bytes per second of the memory that holds the weights, where it can be measured."""
    if loaded is None:
        return None
    if loaded.runtime.device == "cpu":
        where = bandwidth.Where(loaded.runtime.threads)
    elif loaded.runtime.device in ("cuda", "gpu") and hardware.nvidia()[0] is not None:
        where = bandwidth.Where(1, "cuda")
    else:
        return None
    samples = run_in_child("quantlab.bench.bandwidth:work", msgspec.to_builtins(where))
    return bandwidth.best(samples) if samples else None


def _floor_s(spec: BatchingSpec, loaded: Loaded | None, batch: int, bytes_per_s: float | None) -> float | None:
    if loaded is None or bytes_per_s is None:
        return None
    if loaded.runtime.device == "cpu" and loaded.weight_bytes <= hardware.last_level_cache_bytes():
        return None
    return metrics.tpot_floor(loaded, batch, spec.prompt_tokens + new_tokens(spec) / 2, bytes_per_s)


def gains(points: list[BatchPoint]) -> list[float]:
    """From each batch to the next: the factor of throughput that a doubling of the batch brings."""
    found = []
    for small, large in itertools.pairwise(points):
        ratio = paired_ratio(large.throughput, small.throughput).estimate
        found.append(ratio ** (1 / math.log2(large.batch / small.batch)))
    return found


def knee(points: list[BatchPoint]) -> int | None:
    """The smallest batch from which on no doubling gains KNEE_GAIN; None where the largest one still was a gain."""
    last = None
    for point, gain in reversed(list(zip(points, gains(points), strict=False))):
        if gain - 1 >= KNEE_GAIN:
            break
        last = point.batch
    return last


def binds(points: list[BatchPoint]) -> list[str | None]:
    """What binds at each batch (see above); None where it cannot be told."""
    # Doubling takes 2 / gain times the step; the largest batch has the growth that led to it.
    growth = [2 / gain for gain in gains(points)]
    growth = [*growth, *growth[-1:]] or [math.nan]
    found: list[str | None] = []
    for point, grown in zip(points, growth, strict=True):
        share = None if point.floor_s is None else point.floor_s / median(point.tpot_s)
        if share is not None and _HALF <= share <= 1:
            found.append("memory")
        elif grown - 1 >= _HALF:
            found.append("compute")
        else:
            found.append(None if share is None or share > 1 or math.isnan(grown) else "overhead")
    return found


def compute_binds_from(points: list[BatchPoint]) -> int | None:
    """The batch from which on compute binds, whatever is larger; None where it does not at the largest."""
    last = None
    for point, bound in reversed(list(zip(points, binds(points), strict=True))):
        if bound != "compute":
            break
        last = point.batch
    return last


def _interval(samples: list[float]) -> list[float | None]:
    """The geometric mean and its limits, where there are enough repetitions for some."""
    estimate, low, high = geometric_mean_interval(samples)
    return [estimate, low, high] if len(samples) >= FEW_REPEATS else [estimate, None, None]


def row(spec: BatchingSpec, points: list[BatchPoint], index: int) -> tuple[dict[str, Measurement], dict[str, Any]]:
    """The measurements and details of one batch, with what the whole curve says."""
    point, bound = points[index], binds(points)[index]
    found = {
        "tpot": Measurement("s", "lower", point.tpot_s),
        "decode_throughput": Measurement("tokens/s", "higher", point.throughput),
    }
    if point.same:
        found["output_identity"] = Measurement("share", "higher", [float(same) for same in point.same])
    if point.floor_s is not None:
        found["tpot_floor"] = Measurement("s", "lower", [point.floor_s])
    details = {
        "batch": point.batch,
        "new_tokens": new_tokens(spec),
        "tpot_interval_s": _interval(point.tpot_s),
        "throughput_interval": _interval(point.throughput),
        "gain_of_doubling": gains(points)[index] - 1 if index < len(points) - 1 else None,
        "binds": bound,
        "knee": knee(points),
        "compute_binds_from": compute_binds_from(points),
    }
    return found, details
