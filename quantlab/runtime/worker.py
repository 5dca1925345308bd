"""A child process that does one piece of work: its crash is an error here, its peak memory is its own.

The parent sends JSON lines on the child's stdin, the child answers on a private pipe; what libraries print goes to
a log. A child whose parent is gone ends at once, with what it started (runtime/process.py).
"""

from __future__ import annotations

import errno
import importlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.progress import Progress, silent
from quantlab.runtime.process import Process

# A piece of work: (spec, channel) -> what the parent receives. Named "package.module:function".
Work = Callable[[Any, "Channel"], Any]


class Channel:
    """The child's side of the pipe."""

    def __init__(self, output: int) -> None:
        self._output = os.fdopen(output, "wb")
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            for line in sys.stdin.buffer:
                self._inbox.put(msgspec.json.decode(line))
        finally:
            # Also where the parent was killed in the middle of a line, which then is no JSON.
            os._exit(1)

    def receive(self) -> Any:
        """The parent's next message; waits for it."""
        return self._inbox.get()

    def send(self, kind: str, value: Any) -> None:
        """Send one message to the parent."""
        self._output.write(msgspec.json.encode({"kind": kind, "value": value}) + b"\n")
        self._output.flush()

    def progress(self, stage: str, done: float, total: float) -> None:
        """Report progress to the parent (a `Progress`)."""
        self.send("progress", [stage, done, total])


_MEMORY_HINT = "end other programs, or use a smaller model, fewer or shorter samples, or another machine"
_ROOM_HINT = "free some room, of the output or of temporary files, and run again"

# Loads this very package from its folder: another interpreter must see it, but not the packages beside it.
_BOOT = """\
import importlib.util, json, sys
init, call = sys.argv[1:]
spec = importlib.util.spec_from_file_location("quantlab", init)
package = importlib.util.module_from_spec(spec)
sys.modules["quantlab"] = package
try:
    spec.loader.exec_module(package)
    from quantlab.runtime.worker import child
except Exception as error:
    said = f"`{sys.executable}` cannot run quantlab: {error}"
    hint = "`quantlab engines` shows the engines, `quantlab engines add NAME --force` builds an environment again"
    print(json.dumps({"kind": "error", "value": {"message": said, "hint": hint, "usage": False}}))
    sys.exit(1)
child(call)
"""
_INIT = Path(__file__).resolve().parents[1] / "__init__.py"


class Worker:
    """The parent's side: `with Worker(call, spec) as worker: worker.result()`.

    `python` is another interpreter to use. It needs msgspec, psutil and numpy beside what the work itself imports.
    """

    def __init__(self, call: str, spec: Any, progress: Progress = silent, python: Path | None = None) -> None:
        self._call, self._progress, self._foreign = call, progress, python is not None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        # The working directory is no place to import from; PYTHONPATH is not for another interpreter.
        interpreter = [sys.executable, "-P"] if python is None else [str(python), "-I"]
        self._process = Process(
            [*interpreter, "-c", _BOOT, str(_INIT), call],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        try:
            self.send(spec)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        self._process.end()
        self._log.close()

    def send(self, message: Any) -> None:
        """Send one message to the child."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # What it said before it went tells more; at the end `receive` raises.
            while True:
                self.receive()

    def receive(self) -> Any:
        """The child's next message or its result; progress is passed on, errors are raised."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith(b"\n"):
                # It was killed in the middle of a message.
                break
            message = msgspec.json.decode(line)
            kind, value = message["kind"], message["value"]
            if kind == "progress":
                self._progress(*value)
            elif kind == "error":
                raise (UsageError if value["usage"] else QuantlabError)(value["message"], value["hint"])
            else:
                return value
        raise self._died()

    result = receive

    def _died(self) -> QuantlabError:
        code = self._process.wait()
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 2000))
        tail = self._log.read().decode("utf-8", "replace").strip().splitlines()[-8:]
        what = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        hint = "run again with a smaller model or file a bug"
        if self._foreign:
            hint += "; `quantlab engines add NAME --force` builds the environment of an engine again"
        if code == -signal.SIGKILL:
            hint = f"the system may have run out of memory: {_MEMORY_HINT}"
        said = "; it said: " + " | ".join(tail) if tail else ""
        return QuantlabError(f"the process of `{self._call}` {what}{said}", hint)


def run_in_child(call: str, spec: Any, progress: Progress = silent, python: Path | None = None) -> Any:
    """Do one piece of work in a child process and return its result as plain JSON values."""
    with Worker(call, spec, progress, python) as worker:
        return worker.result()


def child(call: str) -> None:
    """Do the work that a Worker asks for, in its process; does not return."""
    # The parent alone decides what Ctrl-C means; it kills this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = os.dup(1)
    # Libraries print to stdout; the pipe is not for them.
    os.dup2(2, 1)
    channel = Channel(output)
    try:
        work = _imported(call)
        channel.send("result", msgspec.to_builtins(work(channel.receive(), channel)))
    except QuantlabError as error:
        usage = isinstance(error, UsageError)
        channel.send("error", {"message": error.message, "hint": error.hint, "usage": usage})
    except BaseException as error:
        said = None
        if out_of_memory(error):
            said = {"message": f"out of memory: {error or call}", "hint": _MEMORY_HINT}
        elif out_of_room(error):
            said = {"message": f"out of room on a disk: {error}", "hint": _ROOM_HINT}
        if said is not None:
            channel.send("error", said | {"usage": False})
            os._exit(0)
        # Python's own way out would wait for the thread that holds stdin, and end in an abort over the traceback.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    # The model's own destructors are not worth waiting for.
    os._exit(0)


def _imported(call: str) -> Work:
    module, _, function = call.partition(":")
    try:
        work: Work = getattr(importlib.import_module(module), function)
    except ImportError as error:
        hint = "install quantlab again with its extras; `quantlab engines` shows the engines and what to do"
        raise QuantlabError(f"`{sys.executable}` cannot run `{module}`: {error}", hint) from error
    return work


def out_of_room(error: BaseException) -> bool:
    """Whether a disk is full, a quota used up or a file as large as it may be; safetensors tells it in words alone."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    of_system = isinstance(error, OSError) and error.errno in codes
    return of_system or any(f"(os error {code})" in str(error) for code in codes)


def out_of_memory(error: BaseException) -> bool:
    """Whether Python, a library, or torch on a device or on the CPU, could not allocate."""
    of_torch = type(error).__name__ == "OutOfMemoryError" or "t allocate memory" in str(error)
    return isinstance(error, MemoryError) or of_torch
