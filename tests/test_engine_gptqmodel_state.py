"""A gptqmodel run that is killed after a layer continues there, and writes what an uninterrupted one writes."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from quantlab.core.errors import QuantlabError
from quantlab.core.result import Notice
from quantlab.quantize import torch_markers
from quantlab.quantize.torch_model import read_probe
from quantlab.quantize.torch_work import EngineDone, EngineJob
from quantlab.runtime.worker import Channel, run_in_child
from tests.conftest import ROOT
from tests.engine_runs import divergence, job
from tests.hf_folders import write_folder

# Not imported here: it patches transformers.
if importlib.util.find_spec("gptqmodel") is None:
    pytest.skip("gptqmodel is not installed", allow_module_level=True)

LAYERS, KILLED_AFTER = 4, 2
# In a layer that is finished then, and in one that is not.
KEPT = ["model.layers.0.mlp.down_proj", "model.layers.2.self_attn.q_proj"]
# By name: method, family, what is asked.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gptq": ("gptq", "llama", {"keep": KEPT, "sym": False}),
    "awq": ("awq", "qwen2", {}),
}


class Case(msgspec.Struct):
    """A job for one child: killed after so many layers, told that the disk is full then, or given a damaged state."""

    job: EngineJob
    killed_after: int = 0
    full_after: int = 0
    damaged: bool = False


def work(spec: Any, channel: Channel) -> dict[str, EngineDone]:
    """Some jobs in one child."""
    # The kernels of gptqmodel compile at their first product, ten seconds each.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from quantlab.quantize.engines import gptqmodel

    write, done = torch_markers.write, {}
    for name, case in msgspec.convert(spec, dict[str, Case]).items():
        torch_markers.write = _interrupting(case, write)
        if case.damaged:
            done[name] = _refused(gptqmodel, case.job, channel)
        else:
            done[name] = gptqmodel.work(msgspec.to_builtins(case.job), channel)
    return done


def _refused(engine: Any, job: EngineJob, channel: Channel) -> EngineDone:
    """What is said of a layer that lacks a tensor."""
    assert job.state is not None
    file = Path(job.state) / "layer-1.safetensors"
    with safe_open(file, "numpy") as stored:
        about = stored.metadata()
    tensors = load_file(file)
    del tensors["self_attn.q_proj.qweight"]
    save_file(tensors, file, about)
    try:
        engine.work(msgspec.to_builtins(job), channel)
    except QuantlabError as error:
        return EngineDone(0.0, [], notices=[Notice("error", error.message, error.hint)])
    raise AssertionError("it was taken")


def _interrupting(case: Case, write: Any) -> Any:
    def written(folder: Path, finished: torch_markers.Finished) -> None:
        if finished.layers == case.full_after:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, finished)
        if finished.layers == case.killed_after:
            os.kill(os.getpid(), signal.SIGKILL)

    return written


class Runs:
    """All runs: whole, killed and continued, and on a full disk."""

    def __init__(self, base: Path) -> None:
        self.base = base
        for _, family, _ in KINDS.values():
            write_folder(
                base / family, family, kind="F16", torch_dtype="float16", model_type=family, num_hidden_layers=LAYERS
            )
        self.stages: list[tuple[str, float, float]] = []
        self.done = self.child({f"{kind}-whole": Case(self.job(kind, "whole")) for kind in KINDS})
        for kind in KINDS:
            with pytest.raises(QuantlabError, match="SIGKILL"):
                self.child({"killed": Case(self.job(kind, "continued"), killed_after=KILLED_AFTER)})
        self.kept = {kind: sorted(path.name for path in (base / f"{kind}-continued.state").iterdir()) for kind in KINDS}
        self.stages.clear()
        self.done |= self.child(
            {
                **{f"{kind}-continued": Case(self.job(kind, "continued")) for kind in KINDS},
                # Nothing is left to do but to save.
                **{f"{kind}-again": Case(self.job(kind, "continued", out="again")) for kind in KINDS},
                "full": Case(self.job("gptq", "full"), full_after=2),
                "damaged": Case(self.job("awq", "continued", out="damaged"), damaged=True),
            }
        )

    def child(self, cases: dict[str, Case]) -> dict[str, EngineDone]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("PYTHONPATH", str(ROOT))
            found = run_in_child(
                "tests.test_engine_gptqmodel_state:work",
                msgspec.to_builtins(cases),
                lambda *stage: self.stages.append(stage),
            )
        return msgspec.convert(found, dict[str, EngineDone])

    def job(self, kind: str, state: str, out: str | None = None) -> EngineJob:
        method, family, options = KINDS[kind]
        places = self.base / f"{kind}-{out or state}", self.base / f"{kind}-{state}.state"
        for place in places:
            place.mkdir(exist_ok=True)
        made = job(self.base / family, places[0], method, **dict(options))
        return msgspec.structs.replace(made, state=None if state == "whole" else str(places[1]))

    def bytes_of(self, name: str) -> tuple[bytes, bytes]:
        out = self.base / name
        return (out / "model.safetensors").read_bytes(), (out / "config.json").read_bytes()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("state"))


@pytest.mark.parametrize("kind", KINDS)
def test_it_writes_what_an_uninterrupted_run_writes(runs: Runs, kind: str) -> None:
    whole = runs.bytes_of(f"{kind}-whole")
    assert runs.bytes_of(f"{kind}-continued") == whole
    assert runs.bytes_of(f"{kind}-again") == whole


@pytest.mark.parametrize("kind", KINDS)
def test_it_says_what_an_uninterrupted_run_says(runs: Runs, kind: str) -> None:
    whole = runs.done[f"{kind}-whole"]
    for name, layers in (("continued", KILLED_AFTER), ("again", LAYERS)):
        done = runs.done[f"{kind}-{name}"]
        assert done.continued_after == layers
        assert (done.layers, done.losses) == (whole.layers, whole.losses)
        assert (done.calibration, done.notices) == (whole.calibration, whole.notices)
    assert whole.continued_after == 0


def test_finished_layers_are_not_done_again(runs: Runs) -> None:
    left = LAYERS - KILLED_AFTER
    told = [stage for stage in runs.stages if "continues" in stage[0]]
    assert told == [
        (f"{method} layer (continues at layer {KILLED_AFTER + 1} of {LAYERS})", done, left)
        for method in KINDS
        for done in range(left + 1)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_needed_is_kept(runs: Runs, kind: str) -> None:
    kept = [name for name in runs.kept[kind] if name.endswith(".safetensors")]
    layers = [f"layer-{i}.safetensors" for i in range(KILLED_AFTER)]
    # The kill came before the inputs of the layer before were removed.
    assert kept == [f"inputs-{KILLED_AFTER - 1}.safetensors", f"inputs-{KILLED_AFTER}.safetensors", *layers]
    state = runs.base / f"{kind}-continued.state"
    assert f"inputs-{KILLED_AFTER}.safetensors" not in {path.name for path in state.iterdir()}
    assert sum(path.stat().st_size for path in state.glob("layer-*")) < 1.2 * (
        (runs.base / f"{kind}-whole" / "model.safetensors").stat().st_size
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_packed_computes_what_the_engine_computed(runs: Runs, kind: str) -> None:
    _, whole = read_probe(runs.base / f"{kind}-whole.probe")
    for name in ("continued", "again"):
        _, logits = read_probe(runs.base / f"{kind}-{name}.probe")
        # Scales are stored in float16.
        assert 0 < np.abs(logits - whole).max() < 5e-3
        assert divergence(whole, logits) < 1e-6


def test_a_full_disk_ends_the_keeping_and_not_the_run(runs: Runs) -> None:
    assert runs.bytes_of("gptq-full") == runs.bytes_of("gptq-whole")
    (notice,) = runs.done["full"].notices
    assert notice.code == "layers-not-kept"
    assert "No space left" in notice.message
    assert not list((runs.base / "gptq-full.state").glob("*.safetensors"))


def test_what_the_files_hold_must_fit_the_model(runs: Runs) -> None:
    """The last line of defence: files that are what was written, and yet no layer of this model."""
    (notice,) = runs.done["damaged"].notices
    assert "is damaged" in notice.message
    assert "qweight" in notice.message
    assert "--force" in notice.hint
