"""Nothing that a program starts outlives the process that asked for it, however that one ends."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from quantlab.runtime.process import Process

ROOT = Path(__file__).resolve().parents[1]
# A program whose child sleeps, and whose child's child sleeps too; none of them gives way to a signal that can be held.
FAMILY = """\
import signal, subprocess, sys, time
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
depth = int(sys.argv[1])
if depth:
    subprocess.Popen([sys.executable, "-I", "-S", __file__, str(depth - 1)])
open(f"up-{depth}", "w").close()
time.sleep(600)
"""
PARENT = """\
import signal, subprocess, sys
from quantlab.runtime.process import Process
# A shell's background job ignores these, and its children with it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
command = [sys.executable, "-I", "-S", *sys.argv[1:]]
with Process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
    with Process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as second:
        second.wait()
"""


def start_parent(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A process in `folder` that runs `python ARGUMENTS` twice, through Process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", PARENT, *arguments], cwd=folder, env=env)


def alive(folder: Path) -> list[psutil.Process]:
    """The processes whose working directory is `folder`, without zombies."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_nothing_left(folder: Path) -> None:
    until = time.monotonic() + 10
    while left := alive(folder):
        if time.monotonic() > until:
            said = [(process.pid, process.cmdline()[:6], process.status()) for process in left]
            for process in left:
                process.kill()
            pytest.fail(f"left after 10 s: {said}")
        time.sleep(0.01)


def wait_for(*paths: Path) -> None:
    until = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.fixture
def family(tmp_path: Path) -> Path:
    folder = tmp_path.resolve()
    (folder / "family.py").write_text(FAMILY)
    return folder


def test_a_parent_killed_at_random_moments_leaves_nothing(family: Path) -> None:
    """From before the first child exists to after the last grandchild began to sleep."""
    began = time.monotonic()
    parent = start_parent(family, "family.py", "2")
    wait_for(*(family / f"up-{depth}" for depth in range(3)))
    whole = time.monotonic() - began
    parent.kill()
    parent.wait()
    assert_nothing_left(family)
    moments = random.Random(0)
    for _ in range(20):
        parent = start_parent(family, "family.py", "2")
        time.sleep(moments.uniform(0, 1.2 * whole))
        parent.kill()
        parent.wait()
        assert_nothing_left(family)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGABRT])
def test_other_ends_leave_nothing_either(family: Path, number: signal.Signals) -> None:
    parent = start_parent(family, "family.py", "1")
    wait_for(family / "up-1", family / "up-0")
    parent.send_signal(number)
    assert parent.wait(timeout=30) != 0
    assert_nothing_left(family)


# The signal that stops one process, or the whole group with its guard; the parent is then killed.
@pytest.mark.parametrize("group", [False, True], ids=["child", "group"])
def test_a_stopped_child_ends_with_its_parent(family: Path, group: bool) -> None:
    parent = start_parent(family, "family.py", "1")
    wait_for(family / "up-1", family / "up-0")
    children = psutil.Process(parent.pid).children()
    for child in children:
        (os.killpg if group else os.kill)(child.pid, signal.SIGSTOP)
    stopped = [*children, *(below for child in children if group for below in child.children(recursive=True))]
    until = time.monotonic() + 30
    # A group that is not wholly stopped yet gets no SIGCONT from the system when its parent dies.
    while any(process.status() != psutil.STATUS_STOPPED for process in stopped):
        assert time.monotonic() < until
        time.sleep(0.005)
    parent.kill()
    parent.wait()
    assert_nothing_left(family)


def test_ctrl_z_stops_the_children_and_fg_continues_them(family: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ready = "from quantlab.runtime.process import pause_together\nsignal.signal(signal.SIGTSTP, signal.SIG_DFL)\n"
    script = PARENT.replace("command =", ready + "pause_together()\ncommand =")
    parent = subprocess.Popen([sys.executable, "-c", script, "family.py", "1"], cwd=family, env=env)
    wait_for(family / "up-1", family / "up-0")
    until = time.monotonic() + 30
    # Two programs, each with a child and a guard.
    while len(everyone := psutil.Process(parent.pid).children(recursive=True)) < 6:
        assert time.monotonic() < until
        time.sleep(0.005)
    for number, stopped in ((signal.SIGTSTP, True), (signal.SIGCONT, False), (signal.SIGTSTP, True)):
        parent.send_signal(number)
        until = time.monotonic() + 30
        while any((process.status() == psutil.STATUS_STOPPED) is not stopped for process in everyone):
            assert time.monotonic() < until
            time.sleep(0.005)
    parent.kill()
    parent.wait()
    assert_nothing_left(family)


def test_a_child_that_never_gives_up_pythons_lock_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text(
        "import ctypes, signal\n"
        "for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)\n"
        "open('up', 'w').close()\n"
        "ctypes.PyDLL(None).sleep(600)\n"
    )
    parent = start_parent(tmp_path, "hang.py")
    wait_for(tmp_path / "up")
    parent.kill()
    parent.wait()
    assert_nothing_left(tmp_path.resolve())


def test_the_end_of_the_block_ends_the_whole_group(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(family)
    command = [sys.executable, "-I", "-S", "family.py", "1"]
    with Process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(family / "up-1", family / "up-0")
        assert process.poll() is None
    assert process.poll() == -signal.SIGKILL
    monkeypatch.chdir("/")
    assert_nothing_left(family)


@pytest.mark.parametrize("end", ["sys.exit(7)", "os.kill(os.getpid(), 9)"])
def test_what_a_finished_program_left_behind_holds_nothing_open(
    family: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.chdir(family)
    script = f"import os, sys, time\nif os.fork() == 0:\n time.sleep(600)\n{end}"
    command = [sys.executable, "-I", "-c", script]
    with Process(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b""
        assert process.wait() == (7 if "exit" in end else -9)
        monkeypatch.chdir("/")
        assert_nothing_left(family)


def test_streams_arguments_and_environment_reach_the_program_and_nothing_else_does() -> None:
    script = (
        "import os, sys\n"
        "print(sys.argv[1:], os.environ['COLOUR'], sys.stdin.read(), sorted(map(int, os.listdir('/dev/fd')))[:4])"
    )
    kept = os.open(os.devnull, os.O_RDONLY)
    with Process(
        [sys.executable, "-c", script, "a b", "--c"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"COLOUR": "red"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"typed")
        process.stdin.close()
        said = process.stdout.read().decode()
    os.close(kept)
    # 3 is the listing's own descriptor.
    assert said == "['a b', '--c'] red typed [0, 1, 2, 3]\n"


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, Process([tmp_path / "none"], stdout=log, stderr=log) as process:
        assert process.wait() == 1
    assert (tmp_path / "log").read_text() == f"{tmp_path / 'none'}: No such file or directory\n"


def test_every_program_is_started_here() -> None:
    """But for the short questions to the system (nvidia-smi, git) that core/hardware.py asks with a time limit."""
    starts = re.compile(
        r"subprocess\.(run|Popen|call|check_\w+)\(|os\.(fork|system|popen|spawn\w+|posix_spawn)\(|Pool\("
    )
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "quantlab").rglob("*.py")
        if starts.search(path.read_text("utf-8"))
    }
    assert found == {"quantlab/runtime/process.py", "quantlab/core/hardware.py"}
