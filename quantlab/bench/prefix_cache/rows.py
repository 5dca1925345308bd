"""A stream that was measured, as a row: measurements, what theory says of them, and why tokens were not found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from quantlab.bench.prefix_cache.measure import Agreement, Bed, Served, Sharing
from quantlab.bench.prefix_cache.scenarios import Stream
from quantlab.bench.prefix_cache.theory import budget_curve, hit_rate, reusable_tokens, saved_s
from quantlab.bench.prefix_cache.tiers import TierPoint, break_even
from quantlab.bench.prefix_cache.why import Miss, misses
from quantlab.core.result import Measurement, Notice
from quantlab.core.statistics import mean_interval, median, paired_ratio
from quantlab.runtime.backend import Tokens

Decode = Callable[[Sequence[int]], str]
# A difference that costs less than this share of the prompts is not worth telling.
_WORTH_TELLING = 0.05
_SHOWN_TOKENS = 12


class Row(msgspec.Struct, frozen=True):
    """One row on its way to the parent process; CPU seconds of the process that measured it; `last`: none follows."""

    part: str
    measurements: dict[str, Measurement]
    details: dict[str, Any]
    warnings: list[Notice] = []
    cpu_s: float = 0.0
    last: bool = False


class Passes(msgspec.Struct):
    """Repetitions of one stream, cold and warm in turn: the measured requests, and what filled the cache before."""

    cold: list[list[Served]]
    warm: list[list[Served]]
    primed: list[Served]


def stream_row(
    stream: Stream,
    passes: Passes,
    bed: Bed,
    decode: Decode,
    *,
    block_tokens: int,
    sharing: Sharing,
    agreement: Agreement,
) -> Row:
    """The row of a scenario or a trace."""
    measured = stream.prompts[stream.prime :]
    size = len(measured)
    kv_bytes = bed.backend.describe().kv_bytes_per_token
    cold, warm = ([s.ttft_s for served in of for s in served] for of in (passes.cold, passes.warm))
    found = [[s.cached_tokens for s in served] for served in passes.warm]
    measurements = {
        "hit_rate": Measurement("share", "higher", [hit_rate(hits, measured) for hits in found]),
        "ttft_cold": Measurement("s", "lower", cold, size),
        "ttft_warm": Measurement("s", "lower", warm, size),
        "prefill_tokens_saved": Measurement("tokens", "higher", [float(sum(hits)) for hits in found]),
        "kv_bytes_saved": Measurement("bytes", "higher", [float(sharing.saved_tokens * kv_bytes)]),
    }
    served = [*passes.primed, *passes.warm[0]]
    left = [np.append(p, s.tokens[:-1]).astype(np.int32) for p, s in zip(stream.prompts, served, strict=True)]
    details = {
        **stream_details(stream, left, passes, decode, block_tokens=block_tokens),
        "cached_tokens": found[0],
        "same_answers": sum(
            a.tokens == b.tokens
            for c, w in zip(passes.cold, passes.warm, strict=True)
            for a, b in zip(c, w, strict=True)
        ),
        "answers": size * len(passes.cold),
        "agreement": msgspec.to_builtins(agreement),
        "sharing": msgspec.to_builtins(sharing),
    }
    return Row("scenario", measurements, details)


def stream_details(
    stream: Stream, left: list[Tokens], passes: Passes, decode: Decode, *, block_tokens: int
) -> dict[str, Any]:
    """What can be told of a stream on any target.

    Hit rate without a limit, over budgets, the TTFT that hits should save beside what they save, and the misses.
    `left` is what each request leaves in a cache.
    """
    measured = stream.prompts[stream.prime :]
    size = len(measured)
    expected = reusable_tokens(stream.prompts, left, block_tokens)[stream.prime :]
    # Of each repetition, so that a pair has one machine.
    saved, predicted, ratio_cold, ratio_warm = ([] for _ in range(4))
    for cold, warm in zip(passes.cold, passes.warm, strict=True):
        cold_s, warm_s = [s.ttft_s for s in cold], [s.ttft_s for s in warm]
        saved.append((sum(cold_s) - sum(warm_s)) / size)
        predicted.append(sum(saved_s([s.cached_tokens for s in warm], measured, cold_s)) / size)
        ratio_cold.append(sum(cold_s) / size)
        ratio_warm.append(sum(warm_s) / size)
    return {
        "scenario": stream.name,
        "requests": size,
        "prompt_tokens_mean": sum(map(len, measured)) / size,
        "expected_hit_rate": hit_rate(expected, measured),
        "expected_cached_tokens": expected,
        "budget_curve": budget_curve(stream.prompts, left, block_tokens, prime=stream.prime),
        "ttft_ratio_interval": list(paired_ratio(ratio_warm, ratio_cold)),
        "ttft_saved_interval_s": list(mean_interval(saved)),
        "ttft_saved_predicted_s": sum(predicted) / len(predicted),
        "misses": _told(stream.prompts, decode, block_tokens),
    }


def _told(prompts: list[Tokens], decode: Decode, block_tokens: int) -> list[dict[str, Any]]:
    """The differences that cost most, each kind of place once, with their text."""
    lists = [prompt.tolist() for prompt in prompts]
    total = sum(map(len, lists))
    by_place: dict[int, list[Miss]] = {}
    for miss in misses(lists, block_tokens):
        if miss.lost:
            by_place.setdefault(miss.block, []).append(miss)
    told = []
    for block, found in sorted(by_place.items(), key=lambda item: -sum(miss.lost for miss in item[1])):
        lost = sum(miss.lost for miss in found)
        if lost < _WORTH_TELLING * total:
            break
        worst = max(found, key=lambda miss: miss.lost)
        texts = [decode(lists[i][worst.at : worst.at + _SHOWN_TOKENS]) for i in (worst.against, worst.request)]
        before = decode(lists[worst.request][max(0, worst.at - _SHOWN_TOKENS) : worst.at])
        told.append(
            {
                "block": block,
                "at_token": worst.at,
                "requests": len(found),
                "lost_tokens": lost,
                "lost_share": lost / total,
                "before": before,
                "earlier": texts[0],
                "now": texts[1],
            }
        )
    return told


def tier_rows(points: list[TierPoint]) -> Iterator[Row]:
    """A row for each length; the last one has the lengths from which on a tier beats computing."""
    for point in points:
        measurements = {
            name: Measurement("s", "lower", getattr(point, name))
            for name in ("recompute_s", "save_s", "ram_s", "disk_s")
        }
        measurements = {f"tier_{name.removesuffix('_s')}": found for name, found in measurements.items()}
        details: dict[str, Any] = {"tokens": point.n_tokens, "kv_bytes": point.bytes}
        if point is points[-1]:
            details["break_even_tokens"] = {tier: break_even(points, tier) for tier in ("ram", "disk")}
            details["against_computing"] = {
                tier: median(getattr(point, f"{tier}_s")) / median(point.recompute_s) for tier in ("ram", "disk")
            }
        yield Row("tiers", measurements, details, last=point is points[-1])
