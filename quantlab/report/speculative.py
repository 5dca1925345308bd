"""The Results of `quantlab speculative` as tables: every draft, batch size and length; and by category of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quantlab.core import units
from quantlab.core.result import Measurement, Result
from quantlab.core.text import printable
from quantlab.report.table import Entry, Head, Table

Details = dict[str, Any]
_WORDS = ("draft", "category", "heads", "method")
_LEGEND = (
    "acceptance is that of the draft tokens decided on, by position in the draft; in theory is what the formula "
    "(1 - a^(K+1)) / (1 - a) makes of it; draft cost and verify cost are of one draft token and one verify, in plain "
    "steps of the target; predicted is tokens per verify / (K x draft cost + verify cost); speed-up is of the time per "
    "token after the first, with its 95% interval over groups of prompts"
)


def tabulate_speculative(results: Sequence[Result]) -> list[Table]:
    """The tables of speculative Results: of each session one of all lengths and one by category."""
    sessions: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: (result.started_at, int(result.details["row"]))):
        sessions.setdefault(result.details["session"], []).append(result)
    return [table for rows in sessions.values() for table in _session(rows)]


def newest_speculative(results: Iterable[Result]) -> list[Result]:
    """Of each step the rows of the newest session that came to its end, or of the newest where none did."""
    newest: dict[str, tuple[bool, str]] = {}
    ordered = sorted(results, key=lambda result: result.started_at)
    complete = {result.details["session"] for result in ordered if result.details.get("complete")}
    for result in ordered:
        candidate = (result.details["session"] in complete, result.details["session"])
        if result.fingerprint not in newest or candidate[0] >= newest[result.fingerprint][0]:
            newest[result.fingerprint] = candidate
    return [result for result in ordered if result.details["session"] == newest[result.fingerprint][1]]


def _session(rows: list[Result]) -> list[Table]:
    if rows[0].details["part"] == "train":
        return [_trained(rows)]
    if rows[0].details["part"] == "server":
        return [_served(rows)]
    lengths = [row for row in rows if row.details["part"] == "k"]
    answers = [row for row in rows if row.details["part"] == "answer"]
    tables = [_lengths(rows, lengths, answers)]
    if len({name for row in lengths for name in row.details["categories"]}) > 1:
        tables.append(_categories(rows, lengths))
    tables[-1].notes.extend(_warnings(rows))
    return tables


def _trained(rows: list[Result]) -> Table:
    """The heads of one training."""
    heads = ["heads", "method", "size", "drafts", "learnt from", "agreement by position", "time"]
    body = []
    for row in rows:
        d, found = row.details, row.measurements
        body.append(
            [
                Entry(printable(d["out"])),
                Entry(printable(d["method"])),
                Entry(units.size(found["size_bytes"].samples[0])),
                Entry(f"{d['draft_ids']} ids"),
                Entry(f"{d['tokens']} tokens"),
                Entry(" ".join(f"{share:.2f}" for share in found["agreement"].samples)),
                Entry(f"{found['duration'].samples[0]:.0f} s"),
            ]
        )
    notes = [
        "agreement is the share of places in greedy answers held out where the draft is the target's own choice, while "
        "all before it was",
        *_warnings(rows),
    ]
    return _table("heads trained", heads, body, keys=1, verdicts=[], notes=notes)


def _served(rows: list[Result]) -> Table:
    """What a server counted of its own drafts."""
    heads = [
        "batch",
        "drafted",
        "acceptance",
        "by position",
        "accepted of drafted",
        "tokens/verify",
        "in theory",
        "TPOT",
    ]
    body = []
    for row in rows:
        d, mean = row.details, {name: sum(m.samples) / len(m.samples) for name, m in row.measurements.items()}
        by_position = row.measurements.get("acceptance_rate_per_position")
        body.append(
            [
                Entry(str(d["batch"])),
                Entry("" if d["draft_length"] is None else f"{d['draft_length']:.2f} tokens"),
                Entry(_number(mean.get("acceptance_rate"))),
                Entry(_by_position(by_position)),
                Entry(_number(d["accepted_of_drafted"])),
                Entry(_number(mean.get("mean_tokens_per_verify"))),
                Entry(_number(d["expected_tokens_per_verify"])),
                Entry(units.milliseconds(mean["tpot"]) if "tpot" in mean else ""),
            ]
        )
    notes = [
        "acceptance is that of the draft tokens decided on, of all drafted counts those after a rejected one as "
        "rejected, as vLLM does; in theory is what (1 - a^(K+1)) / (1 - a) makes of the acceptance",
        *_warnings(rows),
    ]
    title = f"{printable(rows[0].label)}: the server's own drafts{_way(rows[0])}"
    return _table(title, heads, body, keys=1, verdicts=[], notes=notes)


def _by_position(measured: Measurement | None) -> str:
    return " ".join(f"{share:.2f}" for share in measured.samples[:8]) if measured else ""


def _lengths(rows: list[Result], lengths: list[Result], answers: list[Result]) -> Table:
    heads = [
        "draft", "batch", "K", "acceptance", "by position", "drafted", "tokens/verify", "in theory", "draft cost",
        "verify cost", "predicted", "speed-up", "pays", "same output", "TPOT",
    ]  # fmt: skip
    return _table(
        f"{printable(rows[0].label)}: speculative decoding{_way(rows[0])}",
        heads,
        [_length(row) for row in lengths],
        keys=3,
        verdicts=[verdict for answer in answers for verdict in _verdicts(answer)],
        notes=[_LEGEND, *_plain(lengths), *_memory(rows)],
    )


def _length(row: Result) -> list[Entry]:
    d, mean = row.details, {name: sum(m.samples) / len(m.samples) for name, m in row.measurements.items()}
    by_position = row.measurements.get("acceptance_rate_per_position")
    pooled = d["accepted"] / d["tested"] if d["tested"] else None
    return [
        Entry(printable(d["draft"])),
        Entry(str(d["batch"])),
        Entry(_k(d["k"])),
        Entry(_number(pooled)),
        Entry(_by_position(by_position)),
        Entry("" if d["coverage"] > 0.995 else units.percent(d["coverage"], digits=2)),
        Entry(_number(mean.get("mean_tokens_per_verify"))),
        Entry(_number(d["expected_tokens_per_verify"])),
        Entry(_number(mean.get("draft_cost_ratio"))),
        Entry(_number(mean.get("verify_cost_ratio"))),
        Entry(_ratio([mean.get("predicted_speedup"), None, None])),
        Entry(_ratio(d["speedup_interval"])),
        Entry({True: "yes", False: "no", None: "not decided"}[d["pays"]]),
        Entry(units.percent(mean["output_identity"], digits=3) if "output_identity" in mean else ""),
        Entry(units.milliseconds(mean["tpot"]) if "tpot" in mean else ""),
    ]


def _verdicts(answer: Result) -> list[tuple[str, str]]:
    """What to do at each batch size."""
    name = printable(answer.details["draft"])
    said = [(f"{name}, batch {batch['batch']}", _verdict(batch)) for batch in answer.details["batches"]]
    off = answer.details["switch_off_batch"]
    sizes = [batch["batch"] for batch in answer.details["batches"]]
    if off is not None:
        more = "at every batch size measured" if off == min(sizes) else f"from batch {off} on"
        said.append((name, f"switch it off {more}: no length was seen to pay there"))
    return said


def _verdict(batch: Details) -> str:
    if batch["speedup_interval"][0] is None:
        return "no answer has a second token: nothing to measure"
    theory = "theory expects no K to pay"
    if batch["theory_best_k"]:
        theory = f"theory expects K {batch['theory_best_k']} with {batch['theory_speedup']:.2f}x"
    best = f"{_named(batch['best_k'])} is best with {_ratio(batch['speedup_interval'])}; {theory}"
    if batch["pays"]:
        return f"pays: {best}"
    what = "does not pay" if batch["pays"] is False else "is not seen to pay"
    reason = batch["reason"]
    return f"{what}: {best}. {reason['dimension']}: {reason['text']}" if reason else f"{what}: {best}"


def _categories(rows: list[Result], lengths: list[Result]) -> Table:
    """For each draft and batch size the fastest length, category by category."""
    best: dict[tuple[str, int], Result] = {}
    for row in lengths:
        key = row.details["draft"], row.details["batch"]
        if row.details["speedup_interval"][0] is None:
            continue
        if key not in best or row.details["speedup_interval"][0] > best[key].details["speedup_interval"][0]:
            best[key] = row
    body = [
        [
            Entry(printable(row.details["draft"])),
            Entry(str(row.details["batch"])),
            Entry(_k(row.details["k"])),
            Entry(printable(name)),
            Entry(str(of["prompts"])),
            Entry(_number(of["acceptance_rate"])),
            Entry("" if of["coverage"] > 0.995 else units.percent(of["coverage"], digits=2)),
            Entry(_number(of["tokens_per_verify"])),
            Entry(_ratio(of["speedup_interval"])),
        ]
        for row in best.values()
        for name, of in row.details["categories"].items()
    ]
    heads = ["draft", "batch", "K", "category", "prompts", "acceptance", "drafted", "tokens/verify", "speed-up"]
    title = f"{printable(rows[0].label)}: the fastest length by category{_way(rows[0])}"
    drafted = heads.index("drafted")
    notes = ["drafted is the share of rounds that have a draft"] if any(str(row[drafted]) for row in body) else []
    return _table(title, heads, body, keys=4, verdicts=[], notes=notes)


def _plain(lengths: list[Result]) -> list[str]:
    """What plain decoding takes, beside which each draft was measured."""
    said = {
        (row.details["draft"], row.details["batch"]): units.milliseconds(sum(plain.samples) / len(plain.samples))
        for row in lengths
        if (plain := row.measurements.get("tpot_plain"))
    }
    told = ", ".join(f"{tpot} at batch {batch} beside {printable(draft)}" for (draft, batch), tpot in said.items())
    return [f"TPOT of plain decoding: {told}"] if told else []


def _memory(rows: list[Result]) -> list[str]:
    """What each draft adds to the memory, once."""
    sizes = {r.details["draft"]: (r.details["draft_bytes"], r.details["target_weight_bytes"]) for r in rows}
    return [
        f"`{printable(name)}` takes {units.size(size)} for weights and KV, beside {units.size(target)} of the target's "
        "weights"
        for name, (size, target) in sizes.items()
        if size
    ]


def _warnings(rows: list[Result]) -> list[str]:
    """What the rows warned of, each once."""
    said: dict[str, str] = {}
    for row in rows:
        for warning in row.warnings:
            # Of the machine the last one tells of the whole bench.
            key = warning.code if warning.code == "busy-machine" else warning.message
            said[key] = f"{warning.message}: {warning.hint}" if warning.hint else warning.message
    return [printable(text) for text in said.values()]


def _table(
    title: str,
    heads: list[str],
    body: list[list[Entry]],
    *,
    keys: int,
    verdicts: list[tuple[str, str]],
    notes: list[str],
) -> Table:
    """A table without the columns that no row fills."""
    filled = [i for i in range(len(heads)) if i < keys or any(str(row[i]) for row in body)]
    return Table(
        title=title,
        heads=[Head(heads[i], "left" if heads[i] in _WORDS else "right") for i in filled],
        rows=[[row[i] for i in filled] for row in body],
        keys=keys,
        verdicts=verdicts,
        notes=notes,
    )


def _way(result: Result) -> str:
    return "" if result.runtime is None else f", {printable(result.runtime.name)}"


def _k(k: int | None) -> str:
    return "adaptive" if k is None else str(k)


def _named(k: int | None) -> str:
    return "the adaptive length" if k is None else f"K {k}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _ratio(interval: list[float | None]) -> str:
    value, low, high = interval
    if value is None:
        return ""
    return f"{value:.2f}x" if low is None or high is None else f"{value:.2f}x ({low:.2f}-{high:.2f})"
