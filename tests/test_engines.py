"""The table of engines, where each is said to run, and environments of their own, from wheels made here."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import msgspec
import pytest

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.quantize.engines import DEFAULT_ENGINE, ENGINES, Engine, choose
from quantlab.quantize.engines import environment as env
from quantlab.quantize.spec import METHODS
from quantlab.quantize.torch_child import failures_of
from quantlab.runtime.worker import run_in_child
from tests.test_process import assert_nothing_left

ROOT = Path(__file__).resolve().parents[1]
# Named as a module of ours that imports no engine, since each engine has such a module.
TOY = Engine("environment", "toy_engine", ("awq",), {"toy-engine": "1.0", "toy-torch": "2.6.0"}, "a toy", alone=True)


def test_every_torch_method_has_a_default_engine_that_does_it() -> None:
    assert set(DEFAULT_ENGINE) == set(METHODS) - {"gguf"}
    for method, name in DEFAULT_ENGINE.items():
        assert choose(method, None) is ENGINES[name]
        assert method in ENGINES[name].methods
    assert {method for engine in ENGINES.values() for method in engine.methods} == set(DEFAULT_ENGINE)


def test_every_engine_has_its_file() -> None:
    for engine in ENGINES.values():
        module, _, function = engine.call.partition(":")
        source = (ROOT / Path(*module.split(".")).with_suffix(".py")).read_text()
        assert f"def {function}(" in source


@pytest.mark.parametrize(
    ("method", "name", "message", "hint"),
    [
        ("awq", "autoawk", "unknown engine `autoawk`", "did you mean `autoawq`?"),
        ("fp8", "gptqmodel", "the engine `gptqmodel` does not do `fp8`", "`fp8` is done by `llmcompressor`"),
        ("gptq", "autoawq", "`autoawq` does not do `gptq`", "by `gptqmodel`, `llmcompressor`, `optimum`"),
    ],
)
def test_an_engine_that_is_unknown_or_does_something_else_is_wrong_use(
    method: str, name: str, message: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        choose(method, name)
    assert hint in caught.value.hint


def test_the_extras_hold_exactly_the_tested_versions() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = {line for name in ("torch", "engines") for line in extras[name] if "==" in line}
    table = {line for engine in ENGINES.values() if not engine.alone for line in engine.requirements}
    assert pinned == table
    # Engines that live in one environment agree on every version.
    assert len({line.partition("==")[0] for line in table}) == len(table)


def wheel(index: Path, name: str, version: str, files: dict[str, bytes], requires: str = "") -> None:
    """A wheel that pip installs."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    content = {
        **files,
        f"{info}/METADATA": (metadata + (f"Requires-Dist: {requires}\n" if requires else "")).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {path: base64.urlsafe_b64encode(hashlib.sha256(data).digest()) for path, data in content.items()}
    record = [f"{path},sha256={digests[path].rstrip(b'=').decode()},{len(data)}" for path, data in content.items()]
    content[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]).encode()
    with zipfile.ZipFile(index / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, data in content.items():
            archive.writestr(path, data)


def as_installed(name: str) -> dict[str, bytes]:
    """The files of a package that is installed here."""
    distribution = importlib.metadata.distribution(name)
    assert distribution.files is not None
    inside = [file for file in distribution.files if file.parts[0] == name and file.suffix != ".pyc"]
    return {str(file): Path(str(file.locate())).read_bytes() for file in inside}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for all there is, with the toy engine in it; the cache folder is beside it."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("msgspec", "psutil"):
        wheel(folder, name, "99", as_installed(name))
    wheel(folder, "numpy", "99", {"numpy.py": b""})
    wheel(folder, "toy-torch", "2.6.0+cpu", {"toy_torch.py": b""})
    wheel(folder, "toy-torch", "2.7.0", {"toy_torch.py": b""})
    wheel(folder, "toy-engine", "1.0", {"toy_engine.py": b"import toy_torch"}, requires="toy-torch>=2")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("QUANTLAB_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with pip, which takes seconds to make."""
    folder = tmp_path_factory.mktemp("template") / "env"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder


@pytest.fixture
def quick(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments are copies of the template: all that is used of them is their Python."""
    monkeypatch.setattr(env, "_venv_command", lambda folder: ["/bin/cp", "-R", str(template), str(folder)])


def folder_of_toy(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "engines" / TOY.name


def test_an_engine_gets_an_environment_of_its_own(index: Path, tmp_path: Path) -> None:
    missing = env.state(TOY)
    assert (missing.where, missing.python, missing.hint) == ("missing", None, "`quantlab engines add environment`")
    assert missing.reason == "in this environment toy-engine is not installed, toy-torch is not installed"
    with pytest.raises(QuantlabError, match="the engine `environment` is missing: in this environment toy-engine"):
        env.interpreter(TOY)
    stages: list[tuple[str, float, float]] = []
    python = env.add(TOY, progress=lambda *step: stages.append(step))
    names = [f"{doing} the environment of environment" for doing in ("creating", "installing", "checking")]
    assert stages == [(name, 0, 0) for name in names]
    assert env.state(TOY) == env.State("own environment", str(python))
    assert env.interpreter(TOY) == python == folder_of_toy(tmp_path) / "bin" / "python"
    # It works as a worker's interpreter, and sees the toy alone.
    assert run_in_child(env._CHECK, ["toy_engine:", "toy_torch"], python=python) is None
    with pytest.raises(QuantlabError, match="`typer` does not load"):
        run_in_child(env._CHECK, ["toy_engine:", "typer"], python=python)
    kept = folder_of_toy(tmp_path).stat().st_ino
    assert env.add(TOY) == python
    assert folder_of_toy(tmp_path).stat().st_ino == kept, "what is whole is kept"
    _break_and_see(python, tmp_path)


def _break_and_see(python: Path, tmp_path: Path) -> None:
    """Each thing that can break an environment is named, and stops `interpreter`."""
    folder = folder_of_toy(tmp_path)
    [site] = folder.glob("lib/python*/site-packages")
    whole = site / "toy_torch-2.6.0+cpu.dist-info"
    other = site / "toy_torch-2.5.0.dist-info"
    shutil.copytree(whole, other)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-torch\nVersion: 2.5.0\n")
    whole.rename(tmp_path / "aside")
    assert_broken(folder, "toy-torch is 2.5.0, tested is 2.6.0")
    shutil.rmtree(other)
    assert_broken(folder, "toy-torch is not installed")
    (tmp_path / "aside").rename(whole)
    assert env.state(TOY).where == "own environment"
    target = python.readlink()
    python.unlink()
    python.symlink_to("/nowhere/python3")
    assert_broken(folder, "its Python is gone")
    python.unlink()
    python.symlink_to(target)
    assert env.state(TOY).where == "own environment"
    (folder / "quantlab-engine.json").unlink()
    assert_broken(folder, "it is half installed")


def assert_broken(folder: Path, fault: str) -> None:
    found = env.state(TOY)
    assert (found.where, found.python) == ("broken", None)
    assert found.reason == f"in `{folder}` {fault}"
    assert found.hint == "`quantlab engines add environment` builds it again"
    with pytest.raises(QuantlabError, match="is broken"):
        env.interpreter(TOY)


def test_what_pip_cannot_get_is_an_error_that_leaves_nothing(quick: None, index: Path, tmp_path: Path) -> None:
    absent = msgspec.structs.replace(TOY, pins={"toy-engine": "2.0"})
    with pytest.raises(QuantlabError, match=r"cannot be installed: ERROR: No matching distribution.*toy-engine==2\.0$"):
        env.add(absent)
    assert not folder_of_toy(tmp_path).exists()
    assert env.state(TOY).where == "missing"


def test_without_a_network_the_index_is_said_not_to_answer(
    quick: None, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    absent = msgspec.structs.replace(TOY, pins={"toy-engine": "2.0"})
    said = "`environment` cannot be installed: the package index that pip uses does not answer: .*Connection refused"
    with pytest.raises(QuantlabError, match=said) as caught:
        env.add(absent)
    assert "object at" not in caught.value.message
    assert caught.value.hint == "check the network, then run again"
    assert entries(tmp_path) == ["environment.lock"]


def entries(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "engines").iterdir())


def test_a_whole_environment_outlives_a_new_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network, on a full disk, or killed on its way."""
    monkeypatch.setenv("QUANTLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(env, "_differs", lambda engine, path: "nothing is here" if path is sys.path else "")
    folder, sound = folder_of_toy(tmp_path), True

    def build(engine: Engine, folder: Path, progress: object) -> None:
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").symlink_to(sys.executable)
        if not sound:
            raise QuantlabError("no network", "")
        (folder / "quantlab-engine.json").touch()

    monkeypatch.setattr(env, "_build", build)
    python = env.add(TOY)
    (folder / "old").touch()
    sound = False
    with pytest.raises(QuantlabError, match="no network"):
        env.add(TOY, force=True)
    assert (folder / "old").exists()
    assert entries(tmp_path) == ["environment", "environment.lock"]
    folder.rename(folder.with_name("environment.before"))
    (folder / "bin").mkdir(parents=True)
    assert env.add(TOY) == python
    assert (folder / "old").exists()
    sound = True
    env.add(TOY, force=True)
    assert not (folder / "old").exists()
    assert entries(tmp_path) == ["environment", "environment.lock"]
    (folder / "quantlab-engine.json").unlink()
    sound = False
    with pytest.raises(QuantlabError, match="no network"):
        env.add(TOY)
    assert entries(tmp_path) == ["environment.lock"]


def test_none_is_built_for_an_engine_that_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTLAB_CACHE", str(tmp_path))
    here = msgspec.structs.replace(TOY, pins={"msgspec": importlib.metadata.version("msgspec")})
    for force in (False, True):
        assert env.add(here, force=force) == env.interpreter(here) == Path(sys.executable)
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_does_not_load_leaves_nothing(quick: None, index: Path, tmp_path: Path) -> None:
    wheel(index, "toy-engine", "1.0", {"toy_engine.py": b"raise OSError('libcuda.so.1 is missing')"})
    with pytest.raises(QuantlabError, match=r"`toy_engine` does not load in its new environment: libcuda\.so\.1"):
        env.add(TOY)
    assert not folder_of_toy(tmp_path).exists()


def test_offline_downloads_nothing() -> None:
    with pytest.raises(UsageError, match="downloads packages"):
        env.add(TOY, offline=True)


def test_a_build_that_is_killed_is_never_taken_for_whole(
    quick: None, template: Path, index: Path, tmp_path: Path
) -> None:
    """Killed three times on its way, in a folder by which its processes are found; the next build clears it."""
    folder = folder_of_toy(tmp_path)
    script = (
        "from tests.test_engines import TOY, env\n"
        f"env._venv_command = lambda folder: ['/bin/cp', '-R', {str(template)!r}, str(folder)]\n"
        "env.add(TOY)"
    )
    here = tmp_path.resolve() / "here"
    here.mkdir()
    moments = random.Random(1)
    for begin in ("bin/python", "lib/python*/site-packages/pip", "lib/python*/site-packages/toy_torch.py"):
        parent = subprocess.Popen([sys.executable, "-c", script], cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)})
        until = time.monotonic() + 60
        while not list(folder.glob(begin)):
            assert time.monotonic() < until
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.05))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert_nothing_left(here)
        # Missing where it was killed while it cleared what the one before had left.
        assert env.state(TOY).where in ("broken", "missing")
        with pytest.raises(QuantlabError, match=r"half installed|in this environment"):
            env.interpreter(TOY)
    env.add(TOY)
    assert env.state(TOY).where == "own environment"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_interrupts_a_build_leaves_nothing(index: Path, tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "cache" / "engines" / "autoawq"
    here = tmp_path.resolve() / "here"
    here.mkdir()
    command = [sys.executable, "-m", "quantlab", "engines", "add", "autoawq"]
    # A shell without a terminal starts its jobs deaf to Ctrl-C, and children inherit that.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=here, env=env, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, handler)
    until = time.monotonic() + 60
    while not (folder / "bin").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert said.splitlines()[-1] == "interrupted; nothing of it is kept"
    assert not folder.exists()
    assert_nothing_left(here)


def test_the_table_is_printed_with_state_and_what_to_do(tmp_path: Path) -> None:
    process_env = {**os.environ, "QUANTLAB_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "quantlab", "engines"]
    done = subprocess.run(command, capture_output=True, text=True, env=process_env, check=True)
    for engine in ENGINES.values():
        assert f"\n{engine.name} " in f"\n{done.stdout}"
        assert ", ".join(f"{name} {version}" for name, version in engine.pins.items()) in done.stdout
    listed = json.loads(subprocess.run([*command, "--json"], capture_output=True, env=process_env, check=True).stdout)
    assert [row["name"] for row in listed] == list(ENGINES)
    assert all((row["python"] is None) == bool(row["hint"]) for row in listed)
    for arguments, said in (
        (["foo"], "unknown engine `foo`"),
        (["autoawq", "--offline"], "downloads packages"),
    ):
        done = subprocess.run(
            [*command, "add", *arguments], capture_output=True, text=True, env=process_env, check=False
        )
        assert done.returncode == 2
        assert said in done.stderr


def test_what_an_engine_raises_is_told_with_a_hint_and_memory_that_is_short_stays_what_it_is() -> None:
    with pytest.raises(QuantlabError, match="gptqmodel: KeyError: 'q_zeros'") as told, failures_of("gptqmodel"):
        raise KeyError("q_zeros")
    assert "--engine" in told.value.hint
    own = QuantlabError("known", "do this")
    with pytest.raises(QuantlabError) as kept, failures_of("gptqmodel"):
        raise own
    assert kept.value is own
    short = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    for error in (MemoryError(), short):
        with pytest.raises(type(error)) as raised, failures_of("gptqmodel"):
            raise error
        assert raised.value is error
