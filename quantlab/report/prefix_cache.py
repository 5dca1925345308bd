"""The rows of `quantlab prefix-cache` as tables: streams, the hit rate over budgets, tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quantlab.core import units
from quantlab.core.result import Measurement, Result
from quantlab.core.statistics import geometric_mean_interval, mean_interval, median
from quantlab.core.text import printable
from quantlab.report.prefix_lint import lint_table
from quantlab.report.table import Entry, Head, Table

_SHOWN_CHARACTERS = 60
_COUNTED = "the hit rate is as the server counts it; a server does not tell its KV bytes"


def tabulate_prefix_cache(results: Sequence[Result]) -> list[Table]:
    """The tables of each session, in order."""
    sessions: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: (result.started_at, int(result.details["row"]))):
        sessions.setdefault(result.details["session"], []).append(result)
    return [table for rows in sessions.values() for table in _session(rows)]


def _session(rows: list[Result]) -> list[Table]:
    if rows[0].details["part"] == "lint":
        return [lint_table(rows[-1])]
    streams = [row for row in rows if row.details["part"] == "scenario"]
    tiers = [row for row in rows if row.details["part"] == "tiers"]
    tables = [*([_streams(streams), _budgets(streams)] if streams else []), *([_tiers(tiers)] if tiers else [])]
    tables[-1].notes.extend(_warnings(rows))
    return tables


def _streams(rows: list[Result]) -> Table:
    heads = [
        "stream", "requests", "prompt tokens", "hit rate", "in theory", "TTFT cold", "TTFT warm", "warm / cold",
        "prefill tokens saved", "KV saved by sharing", "same answers",
    ]  # fmt: skip
    body, verdicts = [], []
    for row in rows:
        d, m = row.details, row.measurements
        body.append(
            [
                Entry(printable(d["scenario"])),
                Entry(str(d["requests"])),
                Entry(f"{d['prompt_tokens_mean']:.0f}"),
                Entry(_share(m["hit_rate"]) if "hit_rate" in m else "not told"),
                Entry(units.percent(d["expected_hit_rate"])),
                Entry(_milliseconds(m["ttft_cold"])),
                Entry(_milliseconds(m["ttft_warm"])),
                Entry(_ratio(d["ttft_ratio_interval"])),
                Entry(f"{median(saved.samples):.0f}" if (saved := m.get("prefill_tokens_saved")) else ""),
                Entry(units.size(kv.samples[0]) if (kv := m.get("kv_bytes_saved")) else ""),
                Entry(f"{d['same_answers']} of {d['answers']}" if "answers" in d else ""),
            ]
        )
        verdicts.append((printable(d["scenario"]), "; ".join([_time(row), *map(_miss, d["misses"][:3])])))
    notes = [
        "hit rate is tokens found / tokens asked, of the measured requests, after the first ones have filled the cache",
        "in theory: what the prompts themselves allow, with a cache of any size",
        "TTFT of requests that come one by one, geometric means of the repetitions; cold: the cache is emptied before "
        "each request",
    ]
    notes.append(_sharing(rows) if "sharing" in rows[0].details else _COUNTED)
    return _table(rows[0], "prefix cache", heads, body, verdicts=verdicts, notes=notes)


def _sharing(rows: list[Result]) -> str:
    return (
        f"KV saved by sharing: of {max(row.details['sharing']['prompts'] for row in rows)} prompts held at once; a "
        f"shared token has {_bytes_a_token(rows, 'kv_bytes')} bytes, and sharing it added "
        f"{_bytes_a_token(rows, 'added_bytes')}"
    )


def _bytes_a_token(rows: list[Result], name: str) -> str:
    """As it was measured when prompts were shared."""
    tokens = sum(row.details["agreement"]["cached_tokens"] for row in rows)
    return f"{sum(row.details['agreement'][name] for row in rows) / tokens:.3g}" if tokens else "no"


def _time(row: Result) -> str:
    """What hits save of TTFT, as far as repetitions tell it apart from nothing."""
    d = row.details
    saved, low, high = d["ttft_saved_interval_s"]
    if low is None or high is None:
        said = f"TTFT saved {units.milliseconds(saved)}"
        if row.runtime is not None and row.runtime.name != "simulated":
            said += ", from too few repetitions to tell it from noise"
    elif low <= 0 <= high:
        said = f"TTFT saved is not distinguishable from none: {units.milliseconds(saved, (high - low) / 2)}"
    else:
        said = f"TTFT saved {units.milliseconds(saved, (high - low) / 2)}"
    if (predicted := d["ttft_saved_predicted_s"]) is not None:
        said += f"; its tokens at the prefill rate would save {units.milliseconds(predicted)}"
    return said


def _miss(miss: dict[str, Any]) -> str:
    before, earlier, now = (_quoted(miss[name]) for name in ("before", "earlier", "now"))
    return (
        f"{miss['lost_share']:.0%} of the prompt tokens are computed again because of token {miss['at_token']} (block "
        f"{miss['block']}): after {before} comes {earlier}, then {now}"
    )


def _quoted(text: str) -> str:
    shown = printable(" ".join(text.split()))
    return f"“{shown[:_SHOWN_CHARACTERS]}”"


def _budgets(rows: list[Result]) -> Table:
    """Hit rates over the tokens that the cache may hold; a column for each stream."""
    sizes = sorted({size for row in rows for size, _ in row.details["budget_curve"]})
    heads = ["cache", *(printable(row.details["scenario"]) for row in rows)]
    curves = [dict(row.details["budget_curve"]) for row in rows]
    body = []
    for size in sizes:
        # A stream that needs no more than it has reached stays there.
        reached = [max((s for s in curve if s <= size), default=None) for curve in curves]
        shown = [
            Entry("" if at is None else units.percent(curve[at], digits=3))
            for curve, at in zip(curves, reached, strict=True)
        ]
        body.append([Entry(f"{size} tokens"), *shown])
    notes = ["hit rate over the tokens that the cache may hold: replayed, least recently used blocks out first"]
    return _table(rows[0], "budget", heads, body, verdicts=[], notes=notes)


def _tiers(rows: list[Result]) -> Table:
    heads = ["tokens", "KV", "computing", "saving", "from RAM", "from disk"]
    body = []
    for row in rows:
        times = [row.measurements[f"tier_{name}"] for name in ("recompute", "save", "ram", "disk")]
        body.append(
            [
                Entry(str(row.details["tokens"])),
                Entry(units.size(row.details["kv_bytes"])),
                *(Entry(_milliseconds(time)) for time in times),
            ]
        )
    last = rows[-1].details
    said = [
        f"{name} takes {_times(last['against_computing'][tier])} of computing {last['tokens']} tokens, "
        + (f"and less from {at} tokens on" if (at := last["break_even_tokens"][tier]) is not None else "and never less")
        for tier, name in (("ram", "RAM"), ("disk", "disk"))
    ]
    notes = ["the disk's pages may still be in the system's memory: a cold disk adds its own time"]
    return _table(rows[0], "tiers", heads, body, verdicts=[("tiers", "; ".join(said))], notes=notes)


def _times(ratio: float) -> str:
    return f"{units.significant(ratio, 2)}x"


def _milliseconds(measurement: Measurement) -> str:
    estimate, low, high = geometric_mean_interval(measurement.repetitions())
    return units.milliseconds(estimate, None if low is None or high is None else (high - low) / 2)


def _share(measurement: Measurement) -> str:
    estimate, low, high = mean_interval(measurement.samples)
    return units.percent(estimate, None if low is None or high is None else (high - low) / 2)


def _ratio(interval: list[float | None]) -> str:
    estimate, low, high = interval
    assert estimate is not None
    half = None if low is None or high is None else (high - low) / 2
    return units.measured(estimate, half, 3)


def _table(
    row: Result,
    what: str,
    heads: list[str],
    body: list[list[Entry]],
    *,
    verdicts: list[tuple[str, str]],
    notes: list[str],
) -> Table:
    runtime = row.runtime
    way = "" if runtime is None else f", {runtime.name}" if runtime.name != "simulated" else ", simulated"
    return Table(
        title=f"{printable(row.label)}: {what}{way}",
        heads=[Head(title, "right" if i else "left") for i, title in enumerate(heads)],
        rows=body,
        verdicts=verdicts,
        notes=notes,
    )


def _warnings(rows: list[Result]) -> list[str]:
    """What the rows warned of, each once."""
    said: dict[str, str] = {}
    for row in rows:
        for warning in row.warnings:
            # Of the machine the last one tells of the whole bench.
            key = warning.code if warning.code == "busy-machine" else warning.message
            said[key] = f"{warning.message}: {warning.hint}" if warning.hint else warning.message
    return [printable(text) for text in said.values()]
