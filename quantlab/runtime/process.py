"""Programs that end with us: no process that quantlab starts outlives it, whatever ends it.

Nor does what such a program starts, as long as it stays in its group; what leaves it (setsid, setpgid: a daemon) is
not followed and lives on.

A program runs in a process group of its own. A second member of that group, the guard, does nothing but wait for the
end of a pipe whose other end this process holds; the system closes it when this process is gone, and the guard kills
the group. It does so too when the program is gone: what it left could hold its pipes open for ever. So it needs no
cooperation of the program, which may hang, hold Python's lock or be stopped, and no race is left: the guard exists
before the program.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import IO

# Forks the guard and becomes the program. A guard that was stopped with its group gets SIGHUP and SIGCONT when this
# process dies, as every orphaned group with stopped members.
_GUARD = """\
import os, select, signal, sys
lifeline, program = int(sys.argv[1]), os.getpid()
if os.fork() == 0:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    while os.getppid() == program and not select.select([lifeline], [], [], 0.5)[0]:
        pass
    os.killpg(0, signal.SIGKILL)
os.set_inheritable(lifeline, False)
try:
    os.execv(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""

Stream = int | IO[bytes]
_running: set[int] = set()


class Process:
    """`with Process(command, ...) as process: process.wait()`: at the end of the block the whole group is killed.

    `command[0]` is a path; `stdin`, `stdout`, `stderr` and `env` are those of subprocess.Popen.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream,
        stderr: Stream,
        env: Mapping[str, str] | None = None,
    ) -> None:
        read_end, self._lifeline = os.pipe()
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARD, str(read_end), *command],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=env,
                process_group=0,
                pass_fds=(read_end,),
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)
        self.pid, self.stdin, self.stdout = self._popen.pid, self._popen.stdin, self._popen.stdout
        self.poll, self.wait = self._popen.poll, self._popen.wait
        _running.add(self.pid)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.end()

    def end(self) -> None:
        """Kill the program and all that is in its group; returns when the program is gone."""
        _running.discard(self.pid)
        # Once waited for, the program's id may be another's; the guard kills what it left.
        if self._popen.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def pause_together() -> None:
    """Let Ctrl-Z stop the programs with this process, and `fg` continue them: their groups are not the terminal's."""

    def stop(number: int, frame: FrameType | None) -> None:
        _signal_all(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        _signal_all(signal.SIGCONT)

    # Where Ctrl-Z is ignored it stays so.
    if signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, stop)


def _signal_all(number: signal.Signals) -> None:
    for pid in _running:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
