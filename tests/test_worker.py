"""A child's crash, error, noise and progress, as the parent sees them."""

from __future__ import annotations

import errno
import importlib.util
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from quantlab.core.errors import QuantlabError
from quantlab.runtime import worker as module
from quantlab.runtime.worker import Channel, Worker, run_in_child
from tests.full_disk import limited_files

HERE = "tests.test_worker"
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is not searched by children; these tests are."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


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


def die_in_a_message(spec: object, channel: Channel) -> object:
    channel._output.write(b'{"kind": "result", "va')
    channel._output.flush()
    return die(signal.SIGKILL, channel)


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


def where(spec: str, channel: Channel) -> object:
    """The interpreter, its search path, and where a module lies (None: not to be found)."""
    found = importlib.util.find_spec(spec)
    return [sys.executable, sys.path, found and found.origin]


def hoard(spec: object, channel: Channel) -> object:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    return len(bytearray(1 << 33))


def allocate_in_torch(spec: object, channel: Channel) -> object:
    import torch

    return torch.empty(1 << 50).shape


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


def test_a_child_killed_in_the_middle_of_a_message_is_the_same_error() -> None:
    with pytest.raises(QuantlabError, match=r"SIGKILL.*last words"):
        run_in_child(f"{HERE}:die_in_a_message", None)


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
    command = [sys.executable, "-c", module._BOOT, str(module._INIT), f"{HERE}:echo"]
    child = subprocess.run(command, input=b'{"text": "half a mess', capture_output=True, timeout=30, check=False)
    assert child.returncode == 1


def test_a_module_in_the_working_directory_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
    (tmp_path / "quantlab.py").write_text("raise SystemExit('the wrong quantlab')")
    monkeypatch.chdir(tmp_path)
    executable, path, numpy = run_in_child(f"{HERE}:where", "numpy")
    assert executable == sys.executable
    assert not {"", ".", str(tmp_path)} & set(path)
    assert Path(numpy).name == "__init__.py"


@pytest.fixture
def other_python(tmp_path: Path) -> Path:
    """An environment without packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    return tmp_path / "env" / "bin" / "python"


def give(python: Path, *names: str) -> None:
    """Let another environment see these packages of ours, and no others."""
    [site] = python.parents[1].glob("lib/python*/site-packages")
    for name in names:
        package = importlib.util.find_spec(name)
        assert package is not None
        assert package.origin is not None
        (site / name).symlink_to(Path(package.origin).parent)


def test_another_interpreter_runs_quantlab_but_sees_none_of_our_packages(other_python: Path) -> None:
    give(other_python, "msgspec", "psutil")
    [site] = other_python.parents[1].glob("lib/python*/site-packages")
    (site / "beside.py").write_text(
        "import importlib.util, sys\nimport quantlab\n"
        "def work(spec, channel):\n"
        "    return [sys.prefix, quantlab.__file__, [n for n in spec if importlib.util.find_spec(n)]]\n"
    )
    said = run_in_child("beside:work", ["msgspec", "typer", "rich", "tests", "numpy"], python=other_python)
    assert said == [str(other_python.parents[1]), str(ROOT / "quantlab" / "__init__.py"), ["msgspec"]]


def test_an_environment_that_cannot_run_quantlab_is_named(other_python: Path) -> None:
    with pytest.raises(
        QuantlabError, match=r"env/bin/python` cannot run quantlab: No module named 'msgspec'$"
    ) as caught:
        # More than a pipe holds: the child is gone before it was read.
        run_in_child("beside:work", "x" * 1_000_000, python=other_python)
    assert "quantlab engines" in caught.value.hint


def test_an_interpreter_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(QuantlabError, match="none/python: No such file or directory"):
        run_in_child("beside:work", "x" * 1_000_000, python=tmp_path / "none" / "python")


def test_a_child_without_memory_says_so() -> None:
    with pytest.raises(QuantlabError, match=r"^out of memory") as caught:
        run_in_child(f"{HERE}:hoard", None)
    assert "smaller model" in caught.value.hint


def test_torch_without_memory_says_so() -> None:
    pytest.importorskip("torch")
    with pytest.raises(QuantlabError, match=r"^out of memory: .*you tried to allocate"):
        run_in_child(f"{HERE}:allocate_in_torch", None)


def fill(spec: str, channel: Channel) -> None:
    if spec == "write":
        with (Path(tempfile.gettempdir()) / "quantlab-full").open("wb") as file:
            Path(file.name).unlink()
            file.write(bytes(1 << 20))
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(1 << 18, np.float32)}, Path(tempfile.gettempdir()) / "quantlab-full.safetensors")


@pytest.mark.parametrize("spec", ["write", "safetensors"])
def test_a_full_disk_is_told_as_one(spec: str) -> None:
    with limited_files(1 << 16), pytest.raises(QuantlabError, match=r"out of room on a disk: .*too large") as caught:
        run_in_child(f"{HERE}:fill", spec)
    assert caught.value.hint.startswith("free some room")


@pytest.mark.parametrize("errno_", [errno.ENOSPC, errno.EDQUOT])
def test_what_says_that_a_disk_is_full(errno_: int) -> None:
    assert module.out_of_room(OSError(errno_, os.strerror(errno_)))
    assert module.out_of_room(Exception(f"I/O error: {os.strerror(errno_)} (os error {errno_})"))
    assert not module.out_of_room(OSError(errno.ENOENT, "No such file"))


def test_an_interpreter_that_lacks_what_the_work_imports_is_told() -> None:
    with pytest.raises(QuantlabError, match=r"cannot run `tests\.nothing_here`: No module named") as caught:
        run_in_child("tests.nothing_here:work", None)
    assert "quantlab engines" in caught.value.hint
