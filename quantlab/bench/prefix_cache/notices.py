"""What a reader must know before believing a row of the prefix-cache bench."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quantlab.bench.batching.serve import Calibrated
from quantlab.bench.notices import FEW_REPEATS
from quantlab.bench.prefix_cache.rows import Row
from quantlab.bench.prefix_cache.scenarios import lengths
from quantlab.bench.prefix_cache.serve import longest_request
from quantlab.bench.prefix_cache.spec import PrefixCacheSpec
from quantlab.bench.traces import MOONCAKE_BLOCK_TOKENS
from quantlab.core import units
from quantlab.core.result import Notice
from quantlab.runtime.server_kind import ServerInfo

# Logits of a prompt computed in other steps differ by rounding; by more than this the kernels themselves differ.
_ROUNDING = 0.05
# A cache without limits that finds less than theory has a fault, or too few sequences to hold what it may.
_SHORT_OF_THEORY = 0.005
# A BOS or a short template is found always; more than this share of a cold prompt should not be.
_COLD = 0.05
_TELLS = {
    "vllm": "start it with `--enable-prompt-tokens-details`",
    "sglang": "start it with `--enable-cache-report`, or `--enable-metrics`",
    "llama_cpp.server": "llama-server tells it",
}


def of_calibration(found: Calibrated, label: str) -> Notice:
    """Where the times of a simulation come from."""
    return Notice(
        "simulated",
        f"simulated in virtual time with a step model fitted to {found.n_steps} steps of `{label}` on this machine "
        f"(mean error {units.percent(found.mean_relative_error, digits=2)})",
    )


def of_row(spec: PrefixCacheSpec, row: Row) -> Iterator[Notice]:
    """Conditions of one row."""
    yield from few_repeats(spec)
    if row.part == "scenario":
        yield from _of_trace(spec)
        yield from _of_answers(row)
        yield from _of_theory(spec, row)


def few_repeats(spec: PrefixCacheSpec) -> Iterator[Notice]:
    """That there is no interval."""
    if spec.repeats < FEW_REPEATS and not spec.simulate:
        yield Notice(
            "few-repeats",
            f"repetitions: {spec.repeats}, too few for an interval",
            f"use `--repeats {FEW_REPEATS}` or more",
        )


def of_server(info: ServerInfo, details: dict[str, Any], rates: list[float]) -> Iterator[Notice]:
    """What is not known of a server's cache, or not as it should be; `rates` are its hit rates."""
    yield Notice(
        "cache-not-reset",
        "the server's cache was not emptied: each cold request, and each warm pass, has first tokens of its own",
        "what it held before takes room of its cache; start it anew to be sure",
    )
    if not rates:
        yield Notice(
            "no-cached-counts",
            "the server tells neither with its answers nor in its metrics what it had cached: only TTFT is measured",
            _TELLS.get(info.kind, "ask its documentation for cached tokens in `usage`"),
        )
    elif details["counted_by"] == "metrics":
        yield Notice(
            "cached-of-all", "hits are those of the server's metrics: other traffic is counted with them",
            _TELLS.get(info.kind, ""),
        )  # fmt: skip
    if (details["cold_hit_rate"] or 0) > _COLD:
        yield Notice(
            "not-cold",
            f"{details['scenario']}: the server found {units.percent(details['cold_hit_rate'], digits=2)} of the cold "
            "requests' tokens: its TTFT cold is not that of an empty cache",
            "a chat template that begins every prompt is found each time, and so is other traffic",
        )
    if rates and max(rates) <= _COLD < details["expected_hit_rate"]:
        yield Notice(
            "finds-nothing",
            f"{details['scenario']}: the server found {units.percent(max(rates), digits=2)} of the tokens, "
            f"{units.percent(details['expected_hit_rate'], digits=2)} were sent before",
            "start it with its prefix cache",
        )


def _of_trace(spec: PrefixCacheSpec) -> Iterator[Notice]:
    """How the prompts differ from the recorded ones."""
    if spec.trace is None:
        return
    if (shorter := MOONCAKE_BLOCK_TOKENS / spec.block_tokens) != 1:
        yield Notice(
            "scaled-trace",
            f"{MOONCAKE_BLOCK_TOKENS} recorded tokens are one block of {spec.block_tokens}: the same share is found, "
            f"of prompts that are {units.significant(shorter, 3)} times as short, and TTFT is theirs",
        )
    longest = longest_request(spec) - spec.new_tokens
    recorded = lengths(spec)
    if cut := sum(length > longest for length in recorded):
        yield Notice("cut-prompts", f"{cut} of {len(recorded)} recorded prompts were cut to {longest} tokens")


def _of_answers(row: Row) -> Iterator[Notice]:
    name, agreement = row.details["scenario"], row.details["agreement"]
    if agreement["same_steps"] > _ROUNDING:
        yield Notice(
            "other-logits",
            f"{name}: the logits of a cached prompt differ by {agreement['same_steps']:.2g} standard deviations from "
            "those of the same steps without the cache",
            "this is a fault: file a bug with the model's name",
        )
    if different := row.details["answers"] - row.details["same_answers"]:
        yield Notice(
            "other-answers",
            f"{name}: {different} of {row.details['answers']} warm answers differ from the cold ones; a prompt that is "
            f"computed in other steps has logits that differ by {agreement['one_step']:.2g} standard deviations",
            "batching changes greedy answers in the same way",
        )


def _of_theory(spec: PrefixCacheSpec, row: Row) -> Iterator[Notice]:
    measured = row.measurements["hit_rate"].samples[0]
    expected = row.details["expected_hit_rate"]
    if spec.budget_bytes is None and expected - measured > _SHORT_OF_THEORY:
        yield Notice(
            "short-of-theory",
            f"{row.details['scenario']}: a cache without limits would find {units.percent(expected)}, this one found "
            f"{units.percent(measured)}: it has no more sequences to hold what it should",
            "use fewer `--requests`",
        )
