"""The curves of `quantlab batching` as tables, one for each part of one session."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from quantlab.core import units
from quantlab.core.result import Result
from quantlab.core.statistics import median
from quantlab.core.text import printable
from quantlab.report import batching_entries as show
from quantlab.report.table import Entry, Head, Table

_WORDS = {"meets": "yes", "fails": "no"}


def tabulate_batching(results: Sequence[Result]) -> list[Table]:
    """The tables of batching Results: of each session one for each of its parts, in order."""
    sessions: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: (result.started_at, int(result.details["row"]))):
        sessions.setdefault(result.details["session"], []).append(result)
    return [table for rows in sessions.values() for table in _session(rows)]


def _session(rows: list[Result]) -> list[Table]:
    parts = {part: [r for r in rows if r.details["part"] == part] for part in _TABLES}
    answers = [r for r in rows if r.details["part"] == "answer"]
    if parts["sla"] or answers:
        # Loads were judged too.
        parts["sla"] = [*parts["load"], *parts["sla"], *answers]
    tables = [_TABLES[part](of_part) for part, of_part in parts.items() if of_part]
    if not tables:
        tables = [Table(_title(rows[0], "capacity"), [Head("capacity")], [[Entry(_capacity(rows) or "?")]])]
    elif capacity := _capacity(rows):
        index = [part for part in _TABLES if parts[part]].index("load") if parts["load"] else 0
        tables[index].notes.insert(0, capacity)
    tables[-1].notes.extend(_warnings(rows))
    return tables


def _batch(rows: list[Result]) -> Table:
    heads = ["batch", "TPOT", "decode tok/s", "doubling gains", "floor share", "binds", "same answers"]
    body = []
    for result in rows:
        details, floor = result.details, result.measurements.get("tpot_floor")
        gain = details["gain_of_doubling"]
        share = floor.samples[0] / median(result.measurements["tpot"].samples) if floor else None
        body.append(
            [
                Entry(str(details["batch"])),
                Entry(show.interval(details["tpot_interval_s"], units.milliseconds)),
                Entry(show.interval(details["throughput_interval"], units.measured)),
                Entry("" if gain is None else units.change(1 + gain)),
                Entry("" if share is None else units.percent(share, digits=2)),
                Entry(details["binds"] or "?"),
                Entry(show.identity(result)),
            ]
        )
    last, largest = rows[0].details, rows[-1].details["batch"]
    said = [
        f"knee: batch {last['knee']}, no doubling beyond it gains 10%"
        if last["knee"] is not None
        else f"no knee up to batch {largest}: the last doubling still gains 10%"
    ]
    if last["compute_binds_from"] is not None:
        said.append(f"compute binds from batch {last['compute_binds_from']} on: a larger one takes as much longer")
    label, spec = printable(rows[0].label), rows[0].spec
    notes = [f"{spec['prompt_tokens']} prompt tokens and {last['new_tokens']} new ones for each of the batch"]
    if any(show.identity(result) for result in rows):
        notes.append(
            "same answers: greedy answers that are those of the same prompts alone; kernels sum in another order for "
            "another batch"
        )
    return _table(rows, "batch size", heads, body, verdicts=[(label, "; ".join(said))], notes=notes)


def _load(rows: list[Result]) -> Table:
    heads = [
        "rate", "load", "utilization", "served at once", "queue delay", "M/M/1", "M/G/1", "TTFT P50", "TTFT P99",
        "TPOT", "goodput", "prompt cached", "rejected", "lost",
    ]  # fmt: skip
    body, verdicts = [], []
    for result in rows:
        d = result.details
        body.append(
            [
                *show.rate_entries(result),
                Entry(show.measured_share(result, "utilization")),
                Entry(show.number(d.get("in_service"), 2)),
                Entry(show.interval(d.get("queue_delay_interval_s"), units.milliseconds)),
                show.prediction_entry(d, "mm1"),
                show.prediction_entry(d, "mg1"),
                *show.latency_entries(d),
                Entry(show.goodput(d)),
                Entry(units.percent(d["share_cached"], digits=3) if d.get("share_cached") else ""),
                *show.unserved_entries(d),
            ]
        )
        if said := _theory(d):
            verdicts.append((f"load {d['rho']:.2f}", said))
    queue = "queue delay from arrival to the first step, ± the 95% interval of its mean by batch means; "
    notes = [
        "load is the rate as a share of the capacity; utilization the share of time with a request in the system"
        f"{', the mean of the replicas' if rows[0].spec['replicas'] > 1 else ''}; "
        f"{queue if any('queue_delay' in r.measurements for r in rows) else ''}goodput counts requests within both "
        "limits"
    ]
    return _table(rows, "load", heads, body, verdicts=verdicts, notes=notes)


def _theory(d: dict[str, Any]) -> str:
    """Which predictions lie within the interval, and what the others assume that is not so."""
    if "mm1_holds" in d and d["mm1_holds"] is None:
        return "too few requests to compare their mean delay with theory"
    broken = {words: d.get(f"{model}_broken", []) for model, words in (("mm1", "M/M/1"), ("mg1", "M/G/1"))}
    within = [words for model, words in (("mm1", "M/M/1"), ("mg1", "M/G/1")) if d.get(f"{model}_holds")]
    said = [f"{' and '.join(within)} within the interval"] if within else []
    beyond = [words for words, assumptions in broken.items() if assumptions]
    unexplained = [words for words, model in (("M/M/1", "mm1"), ("M/G/1", "mg1"))
                   if d.get(f"{model}_holds") is False and not broken[words]]  # fmt: skip
    if unexplained:
        said.append(
            f"{' and '.join(unexplained)} beyond the interval without a broken assumption (by chance one in 20 is)"
        )
    if beyond:
        assumptions = dict.fromkeys(assumption for words in beyond for assumption in broken[words])
        said.append(f"{' and '.join(beyond)} beyond it. Broken: {'; '.join(assumptions)}")
    return ", ".join(said)


def _sla(rows: list[Result]) -> Table:
    heads = ["rate", "load", "TTFT P50", "TTFT P99", "TPOT", "goodput", "rejected", "lost", "meets the limits"]
    by_rate = sorted((r for r in rows if "rate" in r.details), key=lambda result: float(result.details["rate"]))
    body = [
        [
            *show.rate_entries(result),
            *show.latency_entries(result.details),
            Entry(show.goodput(result.details)),
            *show.unserved_entries(result.details),
            Entry(_verdict(result.details)),
        ]
        for result in by_rate
    ]
    verdicts = [(printable(r.label), _answer(r.details)) for r in rows if r.details["part"] == "answer"]
    notes = [
        "a rate meets the limits where at most one request in a hundred is late (rejected and lost ones are) and the "
        "mean TPOT is within its limit, with 95% confidence for all rates together; not decided: what was seen is "
        "within or beyond"
    ]
    return _table(rows, "limits", heads, body, verdicts=verdicts, notes=notes)


def _answer(answer: dict[str, Any]) -> str:
    limits = (
        f"TTFT {answer['ttft_at']} within {units.milliseconds(answer['ttft_slo_s'])} and {answer['tpot_at']} TPOT "
        f"within {units.milliseconds(answer['tpot_slo_s'])}"
    )
    highest, decided, fails = (answer[f"{name}_rate"] for name in ("highest", "decided", "lowest_failing"))
    if highest is None:
        return f"none: nothing was seen to meet {limits}{_decided(decided, fails)}"
    if highest == 0:
        return f"no rate was seen to meet {limits}, only requests that are alone{_decided(decided, fails)}"
    binds = ", as far as capacity goes: the limits do not bind before it" if answer["capacity_binds"] else ""
    return (
        f"{highest:.3g} requests per second meet {limits} as it was seen{binds}; goodput there "
        f"{answer['goodput']:.3g} per second{_decided(decided, fails)}"
    )


def _decided(meets: float | None, fails: float | None) -> str:
    """The interval of the answer: what is known at 95% confidence of rates below and above it."""
    low = "no rate is known to meet them" if not meets else f"{meets:.3g} per second meet them"
    high = (
        "none is known to fail" if fails is None else f"{fails:.3g} fail" if fails else "requests that are alone fail"
    )
    return f"; with 95% confidence {low}, {high}"


def _verdict(d: dict[str, Any]) -> str:
    seen = "within" if d["within"] else "beyond"
    return _WORDS.get(d["verdict"], f"not decided ({seen})")


def _mixed(rows: list[Result]) -> Table:
    heads = [
        "policy", "load", "TTFT P50", "TTFT P99", "TPOT", "limits met", "rejected", "preempted", "batch tok/s",
        "longest batch wait", "its bound", "lost",
    ]  # fmt: skip
    base = rows[0].details["batch_throughput"]
    body, verdicts = [], []
    for result in rows:
        d = result.details
        rejected, lost = show.unserved_entries(d)
        preempted = result.measurements["preempted"].samples
        cost = d["batch_throughput"] / base if base else math.nan
        body.append(
            [
                Entry(d["policy"]),
                Entry(f"{d['rho']:.2f}"),
                *show.latency_entries(d),
                Entry(_verdict(d)),
                rejected,
                Entry(f"{sum(preempted):.0f}"),
                Entry(show.number(d["batch_throughput"], 3), "" if result is rows[0] else units.change(cost)),
                Entry(show.seconds(d["longest_batch_wait_s"])),
                Entry(show.seconds(d["batch_wait_bound_s"])),
                lost,
            ]
        )
        verdicts.append((d["policy"], _held(result)))
    notes = [
        "TTFT, TPOT and the limits are those of the interactive requests; one of every two requests is a batch request "
        "with an answer four times as long; batch tok/s is what those get, against fcfs; a batch request waits at most "
        "for the service times of what comes before it or within the ageing time and goes before it"
    ]
    return _table(rows, "mixed traffic", heads, body, verdicts=verdicts, notes=notes)


def _held(result: Result) -> str:
    """Whether the limits hold, and which does not."""
    d, spec = result.details, result.spec
    parts = []
    tpot = d["tpot_mean_interval_s"]
    tpot_sure = bool(tpot) and tpot[2] is not None and (tpot[2] <= spec["tpot_slo_s"] or tpot[1] > spec["tpot_slo_s"])
    for name, interval, limit, sure in (
        ("TTFT P99", d["ttft_p99_interval_s"], spec["ttft_slo_s"], d["ttft_verdict"] != "undecided"),
        ("TPOT", tpot, spec["tpot_slo_s"], tpot_sure),
    ):
        if interval is None:
            continue
        value = interval[0]
        verb = "is within" if value <= limit else "is beyond"
        parts.append(
            f"{name} {units.milliseconds(value)} {verb} {units.milliseconds(limit)}{'' if sure else ' (not decided)'}"
        )
    if d["share_unserved"]:
        parts.append(
            f"{units.percent(d['share_unserved'], digits=2)} of the interactive requests are rejected or lost, and "
            "count in neither"
        )
    parts += [f"{one['requests']} interactive requests went to `{printable(one['model'])}`{_answers(one)}"
              for one in d.get("answered_by", [])]  # fmt: skip
    return f"at a load of {d['rho']:.2f} " + "; ".join(parts)


def _answers(one: dict[str, Any]) -> str:
    """How fast one of two models answered."""
    ttft, tpot = one["ttft_p99_interval_s"], one["tpot_mean_interval_s"]
    said = [f"TTFT P99 {units.milliseconds(ttft[0])}"] if ttft else []
    said += [f"TPOT {units.milliseconds(tpot[0])}"] if tpot else []
    return f" ({', '.join(said)})" if said else ""


_TABLES: dict[str, Callable[[list[Result]], Table]] = {"batch": _batch, "load": _load, "sla": _sla, "mixed": _mixed}


def _table(
    rows: list[Result],
    what: str,
    heads: list[str],
    body: list[list[Entry]],
    *,
    verdicts: list[tuple[str, str]],
    notes: list[str] | None = None,
) -> Table:
    """A table without the columns that no row fills."""
    filled = [i for i in range(len(heads)) if any(str(row[i]) for row in body)]
    return Table(
        title=_title(rows[0], what),
        heads=[Head(heads[i], "right" if i else "left") for i in filled],
        rows=[[row[i] for i in filled] for row in body],
        verdicts=verdicts,
        notes=[*(notes or [])],
    )


def _title(result: Result, what: str) -> str:
    runtime = result.runtime
    way = "" if runtime is None else f", {runtime.name}" if runtime.name != "simulated" else ", simulated"
    return f"{printable(result.label)}: {what}{way}"


def _capacity(rows: list[Result]) -> str | None:
    for result in rows:
        if result.details["part"] == "capacity":
            mu, most = result.measurements["capacity"].samples[0], result.details["max_num_seqs"]
            server = result.model.format == "endpoint"
            told = f"taken to serve {most} at once, `--max-num-seqs`" if server else f"up to {most} sequences at once"
            if (replicas := result.details.get("replicas", 1)) > 1:
                told += f" on each of {replicas} replicas, {result.spec['router']}"
            host = result.details.get("overhead_share")
            own = f"; the engine's own work takes {units.percent(host, digits=2)} of the device's time" if host else ""
            return (
                f"capacity {mu:.3g} requests per second ({told}): all requests at once, until the queue is empty{own}"
            )
    return None


def _warnings(rows: list[Result]) -> list[str]:
    """What the rows warned of, each once."""
    said: dict[str, str] = {}
    for result in rows:
        for warning in result.warnings:
            # Of the machine the last one tells of the whole bench.
            key = warning.code if warning.code == "busy-machine" else warning.message
            said[key] = f"{warning.message}: {warning.hint}" if warning.hint else warning.message
    return [printable(text) for text in said.values()]
