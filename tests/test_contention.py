"""Other processes that load the machine while a bench runs."""

from __future__ import annotations

import os

import psutil
import pytest

from quantlab.bench import contention
from quantlab.bench.contention import Contention


class Clock:
    """A machine whose times are set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall = self.busy = self.own = 0.0
        self.processes = {1: ("init", 5.0), 77: ("co\x1bmpiler", 10.0), os.getpid(): ("bench", 0.0)}
        monkeypatch.setattr(contention.time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(contention.time, "process_time", lambda: self.own)
        monkeypatch.setattr(contention, "machine_busy_s", lambda: self.busy)
        monkeypatch.setattr(contention, "_process_times", lambda: dict(self.processes))

    def run(self, watched: Contention, wall: float, child: float, own: float, others: float) -> None:
        watched.begin()
        self.wall, self.own, self.busy = self.wall + wall, self.own + own, self.busy + child + own + others
        watched.end(child)


def test_only_the_time_of_others_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watched = Contention()
    clock.run(watched, wall=4, child=8, own=0.5, others=0)
    assert watched.cores() == 0
    assert watched.notices(2) == []
    clock.busy += 100  # between repetitions nobody is disturbed
    clock.processes |= {77: ("co\x1bmpiler", 14.0), os.getpid(): ("bench", 99.0)}
    clock.run(watched, wall=4, child=4, own=0.1, others=4)
    assert watched.cores() == pytest.approx(0.5)
    (notice,) = watched.notices(2)
    assert notice.code == "busy-machine"
    assert "0.50 cores" in notice.message
    assert "compiler" not in notice.message
    assert r"co\x1bmpiler" in notice.message
    assert watched.notices(6) == [], "a twelfth of what six threads can take"
    clock.processes[77] = ("co\x1bmpiler", 10.5)
    assert "mpiler" not in watched.notices(2)[0].message, "it used an eighth of the others' time"


def test_too_short_a_run_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    watched = Contention()
    assert watched.cores() == 0
    clock.run(watched, wall=0.5, child=0.5, own=0, others=0.5)
    assert watched.notices(1) == []
    clock.run(watched, wall=0.6, child=0.6, own=0, others=0.5)
    assert watched.notices(1)


def test_the_machine_is_really_looked_at() -> None:
    before = contention.machine_busy_s()
    assert before > 0
    sum(i * i for i in range(2_000_000))
    assert contention.machine_busy_s() >= before
    assert psutil.Process().pid in contention._process_times()
