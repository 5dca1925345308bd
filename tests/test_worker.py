"""A child's crash, error, noise and progress, as the parent sees them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from quantlab.core.errors import QuantlabError
from quantlab.runtime.worker import Channel, Worker, run_in_child


def echo(spec: object, channel: Channel) -> object:
    channel.progress("echo", 1, 2)
    os.write(1, b"a library prints to stdout\n")
    return {"got": spec}


def refuse(spec: object, channel: Channel) -> object:
    raise QuantlabError("no such thing", "try another")


def die(spec: int, channel: Channel) -> object:
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), spec)
    return None


def crash(spec: object, channel: Channel) -> object:
    raise ZeroDivisionError("a bug")


def double(spec: object, channel: Channel) -> object:
    while (value := channel.receive()) is not None:
        channel.send("value", 2 * value)
    return "end"


def sleep(spec: object, channel: Channel) -> object:
    channel.send("value", os.getpid())
    time.sleep(600)
    return None


HERE = "tests.test_worker"


def test_result_and_progress_come_back_and_prints_do_not() -> None:
    seen: list[tuple[str, float, float]] = []
    assert run_in_child(f"{HERE}:echo", [1, "ü"], lambda *p: seen.append(p)) == {"got": [1, "ü"]}
    assert seen == [("echo", 1, 2)]


def test_an_error_of_the_child_is_raised_with_its_hint() -> None:
    with pytest.raises(QuantlabError, match="no such thing") as caught:
        run_in_child(f"{HERE}:refuse", None)
    assert caught.value.hint == "try another"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_killed_child_is_an_error_that_names_the_signal(number: signal.Signals) -> None:
    with pytest.raises(QuantlabError, match=f"{number.name}.*last words"):
        run_in_child(f"{HERE}:die", number)


def test_a_bug_in_the_child_is_an_error_with_its_last_lines() -> None:
    with pytest.raises(QuantlabError, match=r"ended with code 1; it said: .*ZeroDivisionError: a bug$"):
        run_in_child(f"{HERE}:crash", None)


def test_a_conversation() -> None:
    with Worker(f"{HERE}:double", None) as worker:
        for value in (1, 2, 3):
            worker.send(value)
            assert worker.receive() == 2 * value
        worker.send(None)
        assert worker.result() == "end"


def test_leaving_the_block_ends_the_child() -> None:
    with Worker(f"{HERE}:sleep", None) as worker:
        pid = worker.receive()
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_a_killed_parent_takes_its_child_along(tmp_path: Path) -> None:
    script = (
        "from quantlab.runtime.worker import Worker\n"
        f"worker = Worker('{HERE}:sleep', None)\nprint(worker.receive(), flush=True)\nworker.receive()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        if not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child outlived its parent by 10 s")


def test_a_parent_killed_in_the_middle_of_a_message_takes_its_child_along() -> None:
    command = [sys.executable, "-m", "quantlab.runtime.worker", f"{HERE}:echo"]
    child = subprocess.run(command, input=b'{"text": "half a mess', capture_output=True, timeout=30, check=False)
    assert child.returncode == 1
