"""The parent's side of a torch quantization: what is left, kept, replaced and recorded, whatever the children do."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from quantlab.core.artifact import content_sha256, read_record, write_record
from quantlab.core.corpus import load_text
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.model import ModelFile
from quantlab.core.progress import silent
from quantlab.core.result import Outcome
from quantlab.evaluate.perplexity import calibrated_on
from quantlab.lab.recipe import read_recipe
from quantlab.quantize import methods, torch_facts, torch_method
from quantlab.quantize.calibration import build
from quantlab.quantize.engines import ENGINES, Engine
from quantlab.quantize.spec import QuantizeSpec
from tests import fake_engine
from tests.conftest import ROOT
from tests.hf_folders import write_folder


class FakeEngine(Engine):
    """An engine of the tests, which every interpreter can run."""

    @property
    def call(self) -> str:
        return "tests.fake_engine:work"


FAKE = FakeEngine(name="gptqmodel", methods=("gptq", "awq"), pins={"gptqmodel": "0.0"}, note="fake", package="msgspec")


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setitem(ENGINES, "gptqmodel", FAKE)
    # This one: its child must see PYTHONPATH, as this process does.
    monkeypatch.setattr(torch_method, "interpreter", lambda engine: Path(sys.executable))
    monkeypatch.setattr(torch_method, "_CHECK", "tests.fake_engine:check")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    patch(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return write_model(tmp_path / "model")


def write_model(path: Path) -> Path:
    write_folder(path, "llama", model_type="llama")
    return path


def spec_of(folder: Path, **options: Any) -> QuantizeSpec:
    model = ModelFile(str(folder), folder.name, str(folder), content_sha256(folder))
    given = {"out": str(folder.parent / "out" / "a.b"), "method": "gptq", "group_size": 32, "calib": ["builtin_en"]}
    return QuantizeSpec(model, **{**given, **options})


def run(folder: Path, **options: Any) -> Outcome:
    return methods.run(spec_of(folder, **options), silent)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder.parent / "out").glob("*")) + sorted(
        path.name for path in (folder.parent / "out").glob(".*")
    )


def test_an_artifact_is_recorded_and_made_again_from_its_recipe(folder: Path) -> None:
    outcome = run(folder, skip=[r"layers\.0\..*down_proj"], calib=["builtin_en:2", "builtin_zh"])
    out = folder.parent / "out" / "a.b"
    assert outcome.label == "a.b"
    assert outcome.model.method == "gptq"
    assert outcome.measurements["engine_duration"].samples == [0.5]
    assert outcome.measurements["check_kld_rounding"].samples == [0.02]
    record = read_record(out)
    assert record is not None
    assert record.asked["bits"] == 4
    assert record.got == {
        "quantized_layers": 2, "layers_in_16_bits": ["model.layers.0.mlp.down_proj"], "losses": {"a": 0.1},
        "device": "cpu", "dtype": "float32", "engine_packages": {"gptqmodel": "0.0"},
    }  # fmt: skip
    assert "dtype" not in record.asked
    assert record.sha256 == content_sha256(out) == outcome.model.sha256
    assert record.parent_sha256 == content_sha256(folder)
    recipe = read_recipe(out / "recipe.yaml")
    assert recipe.quantize[0]["calib"] == ["builtin_en:2", "builtin_zh"]
    again = {**recipe.quantize[0], "out": ""}
    model = spec_of(folder).model
    made = QuantizeSpec(model, **again)
    assert methods.check_spec(made) == methods.check_spec(
        spec_of(folder, skip=[r"layers\.0\..*down_proj"], calib=["builtin_en:2", "builtin_zh"], out="")
    )
    card = (out / "README.md").read_text(encoding="utf-8")
    head = yaml.safe_load(card.split("---")[1])
    assert head["base_model"] == "model"
    assert "kld_rounding: 0.02" in card


def test_no_path_of_this_machine_is_written(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "secret-text.txt"
    text.write_text("the words of a private text\n" * 4000, encoding="utf-8")
    run(folder, calib=[f"{text}:1"])
    for file in (folder.parent / "out" / "a.b").iterdir():
        if file.suffix != ".safetensors":
            content = file.read_text(encoding="utf-8")
            assert str(tmp_path) not in content
            assert "private text" not in content


def test_measuring_on_the_own_text_that_calibrated_is_told(folder: Path, tmp_path: Path) -> None:
    for name in ("mine", "other"):
        (tmp_path / f"{name}.txt").write_text(f"the {name} words of a text\n" * 4000, encoding="utf-8")
    run(folder)
    out = folder.parent / "out" / "a.b"
    texts = {name: load_text(str(tmp_path / f"{name}.txt"), "evaluation") for name in ("mine", "other")}
    drawn = build([(texts["mine"], 1.0)], lambda text, _: list(range(999)), samples=4, length=64, seed=0, bos=None,
                  template=None)  # fmt: skip
    record = read_record(out)
    write_record(out, msgspec.structs.replace(record, calibration=drawn.record))
    model = ModelFile(str(out), "a.b", str(out), content_sha256(out))
    assert [note.code for note in calibrated_on(model, texts["mine"])] == ["calibration-text"]
    assert calibrated_on(model, texts["other"]) == []
    assert calibrated_on(spec_of(folder).model, texts["mine"]) == []


def test_a_dry_run_looks_at_the_texts(folder: Path) -> None:
    with pytest.raises(QuantlabError, match="does not exist"):
        methods.dry_run(spec_of(folder, calib=["nofile.txt"]), silent)
    assert methods.dry_run(spec_of(folder), silent).size_bytes > 0


def test_a_plan_says_that_its_engine_is_missing_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(engine: object) -> Path:
        raise QuantlabError("the engine `gptqmodel` is missing", "quantlab engines add gptqmodel")

    assert not [n for n in methods.dry_run(spec_of(folder), silent).warnings if n.code == "engine-missing"]
    monkeypatch.setattr("quantlab.quantize.torch_method.interpreter", missing)
    (said,) = [n for n in methods.dry_run(spec_of(folder), silent).warnings if n.code == "engine-missing"]
    assert said.hint == "quantlab engines add gptqmodel"


@pytest.mark.parametrize(
    ("length", "said"),
    [(fake_engine.CRASHES, "SIGKILL"), (fake_engine.FAILS, "singular matrix")],
    ids=["crash", "error"],
)
def test_what_an_engine_does_wrong_leaves_nothing(folder: Path, length: int, said: str) -> None:
    with pytest.raises(QuantlabError, match=said):
        run(folder, calib_length=length)
    assert left(folder) == []


def umask() -> int:
    found = os.umask(0o22)
    os.umask(found)
    return found


def modes(folder: Path) -> set[int]:
    return {file.stat().st_mode & 0o777 for file in folder.iterdir()}


def test_an_artifact_that_fails_its_check_is_kept_apart(folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(QuantlabError, match="scales are shuffled") as caught:
            run(folder, calib_length=fake_engine.GARBAGE)
        assert "a.b.rejected" in caught.value.hint
        assert left(folder) == ["a.b.rejected"]
    rejected = folder.parent / "out" / "a.b.rejected"
    assert "shuffled" in (rejected / "REASON.txt").read_text(encoding="utf-8")
    assert not (rejected / "quantlab.json").exists()
    run(folder)
    assert modes(rejected) == modes(folder.parent / "out" / "a.b") == {0o666 & ~umask()}


def test_an_artifact_that_could_not_be_checked_is_kept_and_only_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise QuantlabError("out of memory", "use less")

    with monkeypatch.context() as patched:
        patched.setattr(torch_method, "_check", fails)
        with pytest.raises(QuantlabError, match="could not be checked and recorded: out of memory") as caught:
            run(folder)
    assert left(folder) == ["a.b.partial"]
    kept = folder.parent / "out" / "a.b.partial"
    how = "the same command only checks it, with `--force` it begins again"
    assert caught.value.hint == f"use less; the quantized model is kept in `{kept}`, not yet checked: {how}"
    # An engine that ran again would be.
    monkeypatch.setenv("KILLED", "1")
    outcome = run(folder)
    assert outcome.warnings[0].code == "continued"
    assert outcome.measurements["engine_duration"].samples == [0.5]
    assert left(folder) == ["a.b"]
    assert modes(folder.parent / "out" / "a.b") == {0o666 & ~umask()}


def test_a_path_in_what_quantlab_itself_writes_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = torch_method.facts.write_card

    def careless(out: Path, made: Any) -> None:
        write(out, made)
        with (out / "README.md").open("a", encoding="utf-8") as card:
            card.write("calibrated on /home/someone/notes.txt\n")

    monkeypatch.setattr(torch_method.facts, "write_card", careless)
    with pytest.raises(QuantlabError, match=r"its README.md holds the path `/home/someone/notes.txt`"):
        run(folder)
    assert left(folder) == ["a.b.rejected"]


def test_a_rejected_artifact_replaces_its_like_and_nothing_else(folder: Path) -> None:
    precious = folder.parent / "out" / "a.b.rejected"
    precious.mkdir(parents=True)
    (precious / "thesis.txt").touch()
    with pytest.raises(QuantlabError, match="scales are shuffled") as caught:
        run(folder, calib_length=fake_engine.GARBAGE)
    assert [file.name for file in precious.iterdir()] == ["thesis.txt"]
    assert f"a.b.rejected.{os.getpid()}" in caught.value.hint
    assert (precious.with_name(f"a.b.rejected.{os.getpid()}") / "REASON.txt").is_file()


def test_the_check_runs_where_the_format_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_method, "interpreter", lambda engine: Path("/own") / engine.name)
    for installed, where in (
        (("gptqmodel",), {"gptqmodel": None, "autoawq": None, "llmcompressor": "llmcompressor"}),
        ((), {"gptqmodel": "gptqmodel", "optimum": "optimum", "autoawq": "gptqmodel"}),
        (("compressed_tensors",), {"llmcompressor": None, "gptqmodel": "gptqmodel"}),
    ):
        there = ("torch", "transformers", *installed)
        monkeypatch.setattr(torch_method.importlib.util, "find_spec", lambda name, there=there: name in there or None)
        for engine, python in where.items():
            assert torch_method._checker(ENGINES[engine]) == (python and Path("/own") / python)


def test_force_replaces_an_artifact_and_nothing_else(folder: Path) -> None:
    run(folder)
    out = folder.parent / "out" / "a.b"
    with pytest.raises(QuantlabError, match="exists"):
        run(folder)
    (out / "stale").touch()
    with pytest.raises(QuantlabError, match="singular"):
        run(folder, force=True, calib_length=fake_engine.FAILS)
    assert (out / "stale").exists()
    run(folder, force=True)
    assert not (out / "stale").exists()
    (out / "quantlab.json").unlink()
    with pytest.raises(QuantlabError, match="no artifact of quantlab"):
        run(folder, force=True)
    with pytest.raises(UsageError, match="is the input itself"):
        run(folder, force=True, out=str(folder))
    (folder.parent / "quantlab.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="holds the input itself"):
        run(folder, force=True, out=str(folder.parent))
    assert left(folder) == ["a.b"]


def test_what_was_asked_makes_it_again(folder: Path) -> None:
    """What a record leaves out, its recipe would do otherwise."""
    spec = methods.check_spec(spec_of(folder, dtype="bfloat16", allow_requantize=True))
    asked = torch_facts.asked(spec)
    assert (asked["dtype"], asked["allow_requantize"]) == ("bfloat16", True)
    hub = ModelFile(str(folder), "model", "org/model", "0" * 64, revision="c0ffee")
    assert torch_facts._pinned(hub) == "org/model@c0ffee"
    assert torch_facts._pinned(msgspec.structs.replace(hub, source="org/model@main")) == "org/model@c0ffee"
    assert torch_facts._pinned(spec.model) == "model"
    assert torch_facts._pinned(msgspec.structs.replace(hub, source="demo")) == "demo"


_RUN = """\
import json, sys
import pytest
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.test_torch_method import patch, run
patch(pytest.MonkeyPatch())
run(Path(sys.argv[2]), calib_length=int(sys.argv[3]))
"""


def test_a_kill_at_any_moment_leaves_nothing_that_looks_finished(folder: Path) -> None:
    """20 random moments; the next run clears what a killed one left, and no child outlives it."""
    psutil = pytest.importorskip("psutil")
    out, draw = folder.parent / "out", random.Random(3)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _RUN, str(ROOT), str(folder)]
    started = time.perf_counter()
    subprocess.run([*command, "512"], env=environment, check=True)
    whole_s = time.perf_counter() - started
    assert left(folder) == ["a.b"]
    for i in range(20):
        if (out / "a.b").exists():
            (out / "a.b").rename(out / "gone")
            for file in (out / "gone").iterdir():
                file.unlink()
            (out / "gone").rmdir()
        process = subprocess.Popen([*command, str(fake_engine.HANGS if i % 2 else 512)], env=environment)
        time.sleep(draw.uniform(0, whole_s))
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGKILL)
        process.wait()
        finished = (out / "a.b").exists()
        assert {name for name in left(folder) if not name.startswith(".")} - {"a.b.partial"} == (
            {"a.b"} if finished else set()
        )
        if finished:
            record = json.loads((out / "a.b" / "quantlab.json").read_text(encoding="utf-8"))
            assert record["sha256"] == content_sha256(out / "a.b")
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive
    run(folder, force=True)
    assert left(folder) == ["a.b"]
