"""How the numbers of a batching row are written into its table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from quantlab.core import units
from quantlab.core.result import Result
from quantlab.report.table import Entry


def rate_entries(result: Result) -> list[Entry]:
    """The rate, and the load that it is."""
    if result.details["rate"] == 0:
        return [Entry("alone"), Entry()]
    return [Entry(f"{result.details['rate']:.3g}/s"), Entry(f"{result.details['rho']:.2f}")]


def latency_entries(d: dict[str, Any]) -> list[Entry]:
    """TTFT at P50 and P99, and the mean TPOT."""
    return [
        Entry("" if d["ttft_p50_s"] is None else units.milliseconds(d["ttft_p50_s"])),
        Entry(limits(d["ttft_p99_interval_s"])),
        Entry(interval(d["tpot_mean_interval_s"], units.milliseconds)),
    ]


def unserved_entries(d: dict[str, Any]) -> list[Entry]:
    """Rejected and lost requests; empty where there are none."""
    return [
        Entry(f"{d[name]} of {d['requests']}" if d[name] else "") for name in ("requests_rejected", "requests_lost")
    ]


def goodput(d: dict[str, Any]) -> str:
    """Requests per second within the limits, with half of its interval; empty for requests that were alone."""
    return interval(d["goodput_interval"], lambda value, half: f"{units.measured(value, half, 3)}/s")


def prediction_entry(d: dict[str, Any], model: str) -> Entry:
    """What theory says of the mean queueing delay; ∞ at a load without a steady state."""
    if f"{model}_queue_delay_s" not in d:
        return Entry()
    value = d[f"{model}_queue_delay_s"]
    return Entry("∞" if value is None else units.milliseconds(value))


def measured_share(result: Result, name: str) -> str:
    """A measured share in percent."""
    found = result.measurements.get(name)
    return units.percent(found.samples[0], digits=3) if found else ""


def identity(result: Result) -> str:
    """How many answers of a batch are those of the prompts alone; empty where it was not compared."""
    found = result.measurements.get("output_identity")
    return f"{sum(found.samples):.0f} of {len(found.samples)}" if found else ""


def number(value: float | None, digits: int) -> str:
    """A number with so many significant digits."""
    return "" if value is None or math.isnan(value) else units.significant(value, digits)


def seconds(value: float | None) -> str:
    """Seconds."""
    return "" if value is None else f"{units.significant(value, 3)} s"


def limits(interval: list[Any] | None) -> str:
    """An interval that is not symmetric: `420 (380-510) ms`."""
    if interval is None or interval[0] is None:
        return ""
    value, low, high = interval
    if low is None or high is None:
        return units.milliseconds(value)
    ends = "-".join(units.significant(1000 * end, 3) for end in (low, high))
    return f"{units.significant(1000 * value, 3)} ({ends}) ms"


def interval(interval: list[Any] | None, show: Callable[[float, float | None], str]) -> str:
    """An estimate with half the width of its interval."""
    if interval is None or interval[0] is None:
        return ""
    value, low, high = interval
    return show(value, None if low is None or high is None else (high - low) / 2)
