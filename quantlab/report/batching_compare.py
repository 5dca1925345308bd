"""Stored batching Results again: the tables of each session, and models beside one another where they were asked alike.

Of each step the newest session that came to its end counts; where none did, the newest one. Sessions are compared where
all but the model is equal: spec, machine and runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from quantlab.core import units
from quantlab.core.errors import unknown_name
from quantlab.core.result import Result
from quantlab.core.statistics import Interval, unpaired_ratio
from quantlab.core.text import printable
from quantlab.report import batching_entries as show
from quantlab.report.batching import tabulate_batching
from quantlab.report.metrics import Metric, sentence, verdict_of
from quantlab.report.table import Entry, Head, Table

_OF_MODEL = ("model", "served_model")
_TPOT, _THROUGHPUT = "tpot", "decode_throughput"


class Session(NamedTuple):
    """The Results of one run on one model."""

    label: str
    rows: list[Result]

    def batches(self) -> dict[int, Result]:
        """The points of the part batch."""
        return {int(r.details["batch"]): r for r in self.rows if r.details["part"] == "batch"}

    def sample(self, part: str, name: str) -> float | None:
        """The single number of one part."""
        found = [r.measurements[name] for r in self.rows if r.details["part"] == part and name in r.measurements]
        return found[0].samples[0] if found else None


def tabulate_stored(results: Iterable[Result], baseline: str | None = None) -> list[Table]:
    """The tables of what is stored; then those of models side by side, against `baseline` or their parent.

    Raises UsageError for a baseline that none of them is.
    """
    sessions = _current(results)
    labels = {session.label for session in sessions}
    if baseline is not None and printable(baseline) not in labels:
        raise unknown_name("baseline", baseline, labels)
    tables = [table for session in sessions for table in tabulate_batching(session.rows)]
    for group in _alike(sessions):
        base = _base(group, baseline)
        ordered = [base, *(session for session in group if session is not base)]
        tables += [table for table in (_batches(ordered), _loads(ordered)) if table.rows]
    return tables


def _current(results: Iterable[Result]) -> list[Session]:
    """One session of each step, in the order of their starts."""
    sessions: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: (result.started_at, int(result.details["row"]))):
        sessions.setdefault(result.details["session"], []).append(result)
    newest: dict[str, list[Result]] = {}
    for rows in sessions.values():
        kept = newest.get(rows[0].fingerprint)
        if kept is None or rows[-1].details["complete"] or not kept[-1].details["complete"]:
            newest[rows[0].fingerprint] = rows
    return [Session(printable(rows[0].label), rows) for rows in newest.values()]


def _alike(sessions: Sequence[Session]) -> list[list[Session]]:
    """Sessions of several models that differ in nothing else."""
    groups: dict[bytes, list[Session]] = {}
    for session in sessions:
        first = session.rows[0]
        runtime, env = first.runtime, first.env
        asked = {name: value for name, value in first.spec.items() if name not in _OF_MODEL}
        ran = (runtime.name, runtime.version, runtime.device, runtime.threads) if runtime else None
        key = (asked, ran, (env.cpu, env.gpu, env.driver, env.os))
        groups.setdefault(msgspec.json.encode(key, order="sorted"), []).append(session)
    return [group for group in groups.values() if len({s.rows[0].model.sha256 or s.label for s in group}) > 1]


def _base(group: list[Session], baseline: str | None) -> Session:
    """The one that was asked for, the parent of another, or the first."""
    parents = {session.rows[0].model.parent_sha256 for session in group}
    return min(
        group,
        key=lambda s: (
            baseline is None or s.label != printable(baseline),
            s.rows[0].model.sha256 is None or s.rows[0].model.sha256 not in parents,
        ),
    )


def _batches(ordered: list[Session]) -> Table:
    base, body, verdicts = ordered[0].batches(), [], []
    for session in ordered:
        said = []
        for batch, result in session.batches().items():
            other = None if session is ordered[0] else base.get(batch)
            entries = []
            for name, title, form in (
                (_TPOT, "TPOT", units.milliseconds),
                (_THROUGHPUT, "decode tok/s", units.measured),
            ):
                interval = result.details["tpot_interval_s" if name == _TPOT else "throughput_interval"]
                ratio = None if other is None else _ratio(result, other, name)
                entries.append(
                    Entry(show.interval(interval, form), "" if ratio is None else units.change(ratio.estimate))
                )
                if ratio is not None and name == _TPOT:
                    metric = Metric(name, f"{title} at batch {batch}", form, ("faster", "slower"))
                    said.append(sentence(metric, ratio, verdict_of(metric, ratio, "lower")))
            body.append([Entry(session.label), Entry(str(batch)), *entries])
        if said:
            verdicts.append((session.label, "; ".join(said)))
    heads = [Head("model", "left"), Head("batch"), Head("TPOT"), Head("decode tok/s")]
    return Table("batch sizes of several models", heads, body, 2, verdicts, [_note(ordered[0])] if body else [])


def _ratio(result: Result, other: Result, name: str) -> Interval:
    return unpaired_ratio(result.measurements[name].samples, other.measurements[name].samples)


def _loads(ordered: list[Session]) -> Table:
    body = []
    for session in ordered:
        answers = [r.details for r in session.rows if r.details["part"] == "answer"]
        if not answers and session.sample("capacity", "capacity") is None:
            continue
        entries = []
        for part, name in (("capacity", "capacity"), ("answer", "sla_capacity"), ("answer", "goodput")):
            own, theirs = session.sample(part, name), ordered[0].sample(part, name)
            change = "" if session is ordered[0] or not own or not theirs else units.change(own / theirs)
            entries.append(Entry("" if own is None else f"{own:.3g}/s", change))
        entries.insert(2, Entry(_decided(answers[0]) if answers else ""))
        body.append([Entry(session.label), *entries])
    heads = ["model", "capacity", "rate within the limits", "decided at 95%", "goodput there"]
    notes = [_note(ordered[0]), "capacity and rates are of one run each: their changes have no interval"]
    return Table(
        "load of several models", [Head(head, "right" if i else "left") for i, head in enumerate(heads)], body,
        notes=notes if body else [],
    )  # fmt: skip


def _decided(answer: dict[str, float | None]) -> str:
    """The rates that are decided to meet and to fail: `5.1-7.3/s`."""
    low, high = answer["decided_rate"], answer["lowest_failing_rate"]
    if low is None and high is None:
        return "none"
    return f"{'?' if low is None else f'{low:.3g}'}-{'?' if high is None else f'{high:.3g}'}/s"


def _note(base: Session) -> str:
    return (
        f"changes are against `{base.label}`, of sessions that were run one after the other: the machine's drift is in "
        "them"
    )
