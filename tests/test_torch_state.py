"""What an interrupted torch quantization leaves: continued by the same one, refused to another, never a stranger's."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from quantlab.core.errors import QuantlabError
from quantlab.core.model import ModelRef
from quantlab.core.progress import silent
from quantlab.core.result import Outcome
from quantlab.lab.models import resolve
from quantlab.quantize import methods, torch_markers, torch_method, torch_state
from quantlab.quantize.engines import ENGINES
from quantlab.quantize.torch_state import Identity
from tests import fake_engine
from tests.conftest import ROOT
from tests.test_torch_method import FAKE, left, patch, run, spec_of, write_model

RESUMES = msgspec.structs.replace(FAKE, resumes=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    patch(monkeypatch)
    monkeypatch.setitem(ENGINES, "gptqmodel", RESUMES)
    monkeypatch.chdir(tmp_path)
    return write_model(tmp_path / "model")


def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state that a run leaves whose engine is killed after a layer. What kills it is no part of the identity."""
    with monkeypatch.context() as patched:
        patched.setenv("KILLED", "1")
        with pytest.raises(QuantlabError, match="SIGKILL") as caught:
            run(folder)
    kept = f"the finished layers are kept in `{folder.parent / 'out' / 'a.b.partial'}`: the same command"
    assert caught.value.hint.endswith(f"; {kept} continues there, with `--force` it begins again")
    assert left(folder) == ["a.b.partial"]
    return folder.parent / "out" / "a.b.partial"


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def codes(outcome: Outcome) -> list[str]:
    return [notice.code for notice in outcome.warnings]


def test_the_same_quantization_continues_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(folder, monkeypatch)
    interrupted(folder, monkeypatch)
    outcome = run(folder, threads=1)
    assert outcome.details["continued_after_layers"] == 2
    assert codes(outcome)[0] == "continued"
    assert "2 layers" in outcome.warnings[0].message
    # Nobody takes the time of the rest for the whole.
    assert not {"duration", "engine_duration"} & outcome.measurements.keys()
    assert outcome.measurements["engine_duration_of_rest"].samples == [0.5]
    assert left(folder) == ["a.b"]
    whole = run(folder, out=str(folder.parent / "out" / "whole"))
    assert "continued" not in codes(whole)
    assert "duration" in whole.measurements
    assert left(folder) == ["a.b", "whole"]


_CLI = """\
import sys
sys.path.insert(0, sys.argv.pop(1))
import pytest
from quantlab.cli.app import main
from quantlab.quantize.engines import ENGINES
from tests.test_torch_state import RESUMES, patch
patch(pytest.MonkeyPatch())
ENGINES["gptqmodel"] = RESUMES
main()
"""


_AGAIN = "with `--force` it begins again"


@pytest.mark.parametrize(
    ("number", "force", "there", "how"),
    [
        (signal.SIGINT, False, False, f" continues there, {_AGAIN}"),
        (signal.SIGTERM, True, False, f" without `--force` continues there, {_AGAIN}"),
        (signal.SIGHUP, True, True, f" without `--force` continues there once `out/a.b` is moved away, {_AGAIN}"),
    ],
)
def test_what_interrupts_says_how_to_go_on(
    folder: Path, number: signal.Signals, *, force: bool, there: bool, how: str
) -> None:
    command = [sys.executable, "-c", _CLI, str(ROOT), "quantize", str(folder), "--method", "gptq", "--group-size", "32"]
    command += ["--calib", "builtin_en", "--calib-length", str(fake_engine.HANGS), "--out", "out/a.b", "--offline"]
    if there:
        run(folder)
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGHUP)}
    process = subprocess.Popen([*command, *(["--force"] if force else [])], stderr=subprocess.PIPE, text=True)
    for each, handler in before.items():
        signal.signal(each, handler)
    while not (folder.parent / "out" / "a.b.partial" / "finished.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    # `timeout` sends it twice.
    process.send_signal(number)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == 128 + number
    assert children
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert said.splitlines()[-1] == f"the finished layers are kept in `out/a.b.partial`: the same command{how}"
    assert left(folder) == (["a.b", "a.b.partial"] if there else ["a.b.partial"])


@pytest.mark.parametrize("engine", ["FAKE", "RESUMES"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_ends_a_check_costs_the_check_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, engine: str
) -> None:
    monkeypatch.setitem(ENGINES, "gptqmodel", {"FAKE": FAKE, "RESUMES": RESUMES}[engine])
    command = [sys.executable, "-c", _CLI.replace("RESUMES", engine), str(ROOT), "quantize", str(folder), "-m", "gptq"]
    command += ["--group-size", "32", "--calib", "builtin_en", "--out", "out/a.b", "--offline"]
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    environment = {**os.environ, "CHECK_HANGS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    signal.signal(signal.SIGINT, before)
    state = folder.parent / "out" / "a.b.partial"
    while not list(state.glob("whole/*/0.safetensors")):
        assert process.poll() is None
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, said = process.communicate()
    assert psutil.wait_procs(children, timeout=10)[1] == []
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        kept = "the quantized model is kept in `out/a.b.partial`, not yet checked: the same command only checks it"
        assert said.splitlines()[-1] == f"{kept}, {_AGAIN}"
        # Logits are gigabytes.
        assert sorted(path.name for path in (state / "whole").iterdir()) == ["artifact", "probe.safetensors"]
    assert [name for name in left(folder) if name[0] != "."] == ["a.b.partial"]
    with pytest.raises(QuantlabError, match="other calibration"):
        run(folder, seed=1)
    methods.check(spec_of(folder))
    before_kill = torch_markers.read_quantized(state)
    assert before_kill is not None
    # An engine that ran again would be.
    monkeypatch.setenv("KILLED", "1")
    outcome = run(folder, threads=1)
    assert codes(outcome)[0] == "continued"
    assert "duration is that of both" in outcome.warnings[0].message
    assert outcome.measurements["duration"].samples[0] > before_kill.duration_s > 0
    assert left(folder) == ["a.b"]
    with pytest.raises(QuantlabError, match="SIGKILL"):
        run(folder, force=True)


def quantized(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state that a run leaves whose check could not be made."""

    def fails(*_: Any, **__: Any) -> None:
        raise QuantlabError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(torch_method, "_check", fails)
        with pytest.raises(QuantlabError, match="out of memory"):
            run(folder)
    return folder.parent / "out" / "a.b.partial"


@pytest.mark.parametrize("name", ["quantized.json", "whole/artifact/model.safetensors", "whole/probe.safetensors"])
def test_a_damaged_artifact_is_not_checked(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    state = quantized(folder, monkeypatch)
    with (state / name).open("ab") as file:
        file.write(b" ")
    before = content(state)
    if name == "quantized.json":
        (state / name).write_bytes((state / name).read_bytes().replace(b'"engine_s":0.5', b'"engine_s":0.4'))
        before = content(state)
    with pytest.raises(QuantlabError, match=re.escape(f"is damaged: `{name}` is not what was written")):
        run(folder)
    assert content(state) == before
    assert "continued" not in codes(run(folder, force=True))


def test_without_its_artifact_a_run_continues_at_the_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = quantized(folder, monkeypatch)
    # As a kill leaves it after the rename that gives the artifact its name, which was moved away since.
    (state / "whole" / "artifact").rename(folder.parent / "elsewhere")
    outcome = run(folder)
    assert outcome.details["continued_after_layers"] == 1
    assert left(folder) == ["a.b"]


@pytest.mark.parametrize("what", ["ctrl-c", "out appears"])
def test_a_checked_artifact_is_kept_until_it_has_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    out, state = folder.parent / "out" / "a.b", folder.parent / "out" / "a.b.partial"

    def fails(made: Path) -> None:
        # What a kill would leave here.
        assert torch_markers.is_quantized(state)
        assert left(folder) == ["a.b.partial"]
        if what == "ctrl-c":
            raise KeyboardInterrupt
        (out / "other").mkdir(parents=True)

    with monkeypatch.context() as patched:
        patched.setattr("quantlab.core.files.flush_folder", fails)
        with pytest.raises((KeyboardInterrupt, QuantlabError)) as caught:
            run(folder)
    said = "".join(getattr(caught.value, "__notes__", [getattr(caught.value, "hint", "")]))
    assert f"the quantized model is kept in `{state}`" in said
    shutil.rmtree(out, ignore_errors=True)
    # An engine that ran again would be.
    monkeypatch.setenv("KILLED", "1")
    assert codes(run(folder))[0] == "continued"
    assert left(folder) == ["a.b"]


def test_an_error_of_the_system_says_what_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = interrupted(folder, monkeypatch)

    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error", "model.safetensors")

    monkeypatch.setattr(torch_method, "prepare", fails)
    with pytest.raises(QuantlabError, match=r"`model.safetensors`: Input/output error") as caught:
        run(folder)
    assert f"the finished layers are kept in `{state}`: the same command continues there" in caught.value.hint


def other_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    weights = bytearray((folder / "model.safetensors").read_bytes())
    # The last bit of a float32.
    weights[-4] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    return {}


def other_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"calib": ["builtin_zh"]}


def other_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(ENGINES, "gptqmodel", msgspec.structs.replace(RESUMES, pins={"gptqmodel": "0.1"}))
    return {}


def other_quantlab(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    path = folder.parent / "out" / "a.b.partial" / "identity.json"
    identity = msgspec.json.decode(path.read_bytes(), type=Identity)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(identity, quantlab="0.0.9")))
    return {}


STALE: list[tuple[Any, str]] = [
    (other_model, "another model"),
    (other_text, "other calibration"),
    ({"seed": 1}, "other calibration"),
    ({"calib_samples": 5}, "other calibration"),
    ({"group_size": 64, "skip": ["down_proj"]}, r"other settings \(group_size, layers_in_16_bits\)"),
    ({"bits": 8}, r"other settings \(bits\)"),
    ({"method": "awq", "seed": 1}, r"other calibration and other settings \(method, sym\)"),
    (other_engine, "other versions of the engine"),
    (other_quantlab, "another version of quantlab"),
]


@pytest.mark.parametrize(("change", "said"), STALE, ids=[said for _, said in STALE])
def test_what_belongs_to_something_else_is_refused_and_untouched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Any, said: str
) -> None:
    state = interrupted(folder, monkeypatch)
    options = change(folder, monkeypatch) if callable(change) else change
    before = content(state)
    for work in (run, lambda folder, **options: methods.check(spec_of(folder, **options))):
        with pytest.raises(QuantlabError, match=f"interrupted quantization with {said}$") as caught:
            work(folder, **options)
        assert caught.value.hint == f"remove `{state}`, or use `--force`: both begin again"
    assert content(state) == before


@pytest.mark.parametrize("options", [{}, {"seed": 1}], ids=["same", "other"])
def test_force_begins_again(folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    interrupted(folder, monkeypatch)
    methods.check(spec_of(folder, force=True, **options))
    assert "continued" not in codes(run(folder, force=True, **options))
    assert left(folder) == ["a.b"]


def truncate(state: Path) -> str:
    path = state / "layer-0"
    path.write_bytes(path.read_bytes()[:-1])
    return "`layer-0` is not what was written"


def remove(state: Path) -> str:
    (state / "layer-0").unlink()
    return "`layer-0` is not what was written"


def garbage(state: Path) -> str:
    (state / "finished.json").write_bytes(os.urandom(64))
    return "`finished.json`"


def one_more(state: Path) -> str:
    path = state / "finished.json"
    path.write_bytes(path.read_bytes().replace(b'"layers":1', b'"layers":2'))
    return "`finished.json` is not what was written"


def half(state: Path) -> str:
    path = state / "identity.json"
    path.write_bytes(path.read_bytes()[:40])
    return "`identity.json`"


@pytest.mark.parametrize("damage", [truncate, remove, garbage, one_more, half])
def test_what_is_damaged_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], str]
) -> None:
    state = interrupted(folder, monkeypatch)
    said = damage(state)
    before = content(state)
    with pytest.raises(QuantlabError, match=re.escape(f"is damaged: {said}")):
        run(folder)
    assert content(state) == before
    assert "continued" not in codes(run(folder, force=True))


def test_without_a_finished_layer_nothing_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_state, "FINISHED", "never.json")
    with pytest.raises(QuantlabError, match="singular matrix"):
        run(folder, calib_length=fake_engine.FAILS)
    assert left(folder) == []


@pytest.mark.parametrize(
    "names",
    [["lock", ".identity.json.123.partial"], ["lock", "engine.lock"], ["lock", "identity.json", "layer-0"]],
    ids=["begun", "nearly-removed", "no-layer-yet"],
)
def test_what_a_kill_left_without_a_finished_layer_is_no_state(folder: Path, names: list[str]) -> None:
    state = folder.parent / "out" / "a.b.partial"
    state.mkdir(parents=True)
    for name in names:
        (state / name).touch()
    assert "continued" not in codes(run(folder))
    assert left(folder) == ["a.b"]


def test_a_rejected_artifact_is_not_continued(folder: Path) -> None:
    with pytest.raises(QuantlabError, match="scales are shuffled"):
        run(folder, calib_length=fake_engine.GARBAGE)
    assert left(folder) == ["a.b.rejected"]


@pytest.mark.parametrize("force", [False, True])
def test_the_folder_of_somebody_else_stays(folder: Path, force: bool) -> None:
    precious = folder.parent / "out" / "a.b.partial"
    precious.mkdir(parents=True)
    (precious / "thesis.txt").touch()
    with pytest.raises(QuantlabError, match="and is none"):
        run(folder, force=force)
    assert [path.name for path in precious.iterdir()] == ["thesis.txt"]


def test_two_at_once_are_refused(folder: Path) -> None:
    out = folder.parent / "out" / "a.b"
    wanted = Identity("model", {}, {}, {})
    with torch_state.kept(out, wanted, replace=False), pytest.raises(QuantlabError, match="another quantlab"):
        run(folder, force=True)
    run(folder)
    assert left(folder) == ["a.b"]


def test_a_run_that_begins_while_another_removes_its_folder_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, opened, listed = folder.parent / "out" / "a.b.partial", Path.open, Path.iterdir
    gone: list[str] = []

    def remove(path: Path, what: str) -> None:
        if state in (path, path.parent) and path.name in ("lock", state.name) and what not in gone:
            gone.append(what)
            shutil.rmtree(state)

    def late_open(path: Path, *given: Any, **options: Any) -> Any:
        remove(path, "open")
        return opened(path, *given, **options)

    def late_list(path: Path) -> Any:
        remove(path, "list")
        return listed(path)

    state.mkdir(parents=True)
    (state / "lock").touch()
    monkeypatch.setattr(Path, "open", late_open)
    monkeypatch.setattr(Path, "iterdir", late_list)
    with torch_state.kept(folder.parent / "out" / "a.b", Identity("model", {}, {}, {}), replace=False) as kept:
        assert kept == state and (state / "identity.json").is_file()
    assert gone == ["list", "open"]
    assert left(folder) == []


def test_it_is_taken_for_no_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = interrupted(folder, monkeypatch)
    with pytest.raises(QuantlabError):
        resolve(ModelRef.parse(str(state)), offline=True, progress=silent)


def test_other_engines_begin_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "gptqmodel", FAKE)
    monkeypatch.setenv("KILLED", "1")
    with pytest.raises(QuantlabError, match="SIGKILL"):
        run(folder)
    assert left(folder) == []
    assert [name for name, engine in ENGINES.items() if engine.resumes] == []
