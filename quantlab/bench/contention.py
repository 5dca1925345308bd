"""CPU time that other processes take while repetitions run: what makes two runs of one model differ.

The load average cannot tell: it lags by a minute and counts our own work.
"""

from __future__ import annotations

import os
import time

import psutil

from quantlab.core.result import Notice
from quantlab.core.text import printable

# Others' CPU time, as a share of what the bench's own threads can take, from which a run is called disturbed.
BUSY_SHARE = 0.10
# A process that used less of the others' time is not named.
_STANDS_OUT = 0.25
# The system counts CPU time in ticks of 10 ms: less than this is not judged.
_LEAST_WALL_S = 1.0


class Contention:
    """Adds up CPU time of the whole machine around repetitions, less that of the bench itself."""

    def __init__(self) -> None:
        self._others_s = self._wall_s = 0.0
        self._processes = _process_times()
        self._begin = (0.0, 0.0)

    def begin(self) -> None:
        """A repetition begins."""
        self._begin = (time.perf_counter(), machine_busy_s() - time.process_time())

    def end(self, child_cpu_s: float) -> None:
        """It has ended; the child that ran it used `child_cpu_s` of CPU time."""
        others_s = machine_busy_s() - time.process_time() - child_cpu_s - self._begin[1]
        self._others_s += others_s
        self._wall_s += time.perf_counter() - self._begin[0]

    def cores(self) -> float:
        """Cores that other processes kept busy, on average."""
        return max(0.0, self._others_s / self._wall_s) if self._wall_s else 0.0

    def notices(self, threads: int) -> list[Notice]:
        """A warning where others took more than BUSY_SHARE of what `threads` threads can."""
        cores = self.cores()
        if self._wall_s < _LEAST_WALL_S or cores < BUSY_SHARE * threads:
            return []
        message = f"other processes used {cores:.2f} cores while {threads} threads were measured{self._busiest()}"
        return [Notice("busy-machine", message, "end them, or measure again later")]

    def _busiest(self) -> str:
        """The process outside the bench that used most CPU time, where one stands out (others may have ended)."""
        own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        now = _process_times()
        used = {
            pid: (spent - self._processes.get(pid, ("", 0.0))[1], name)
            for pid, (name, spent) in now.items()
            if pid not in own
        }
        if not used:
            return ""
        pid = max(used, key=lambda pid: used[pid][0])
        spent, name = used[pid]
        if spent < _STANDS_OUT * self._others_s:
            return ""
        return f", most of all `{printable(name)}`"


def machine_busy_s() -> float:
    """CPU seconds that all cores have been busy since boot, those taken by other guests of the host included."""
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")))


def _process_times() -> dict[int, tuple[str, float]]:
    """Name and CPU seconds of every process that may be seen."""
    found = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        if (times := process.info["cpu_times"]) is not None:
            found[process.pid] = (process.info["name"] or "?", times.user + times.system)
    return found
