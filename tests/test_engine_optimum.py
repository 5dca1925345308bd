"""optimum's gptq artifacts load in transformers and compute what the engine's model computed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.engine_runs import SECRET, TEMPLATE, Run, divergence, job, rounded_logits, run_all, write_model

# Not imported here: gptqmodel patches transformers.
if any(importlib.util.find_spec(name) is None for name in ("torch", "gptqmodel", "optimum")):
    pytest.skip("optimum with gptqmodel is not installed", allow_module_level=True)

DOWN = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
FAMILIES = ("llama", "qwen2", "gemma3")
CASES = (*FAMILIES, "down")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("optimum")


@pytest.fixture(scope="module")
def weights(base: Path) -> dict[str, dict[str, np.ndarray]]:
    return {family: write_model(base / family, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def runs(base: Path, weights: dict[str, dict[str, np.ndarray]]) -> dict[str, Run]:
    jobs = {family: job(base / family, base / f"{family}.out", "gptq") for family in FAMILIES}
    jobs["down"] = job(base / "llama", base / "down.out", "gptq", keep=DOWN)
    return run_all("optimum", jobs)


@pytest.mark.parametrize("name", CASES)
def test_the_artifact_computes_what_the_engine_computed(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    assert np.isfinite(run.loaded).all()
    # transformers' kernel for a CPU rounds activations to bfloat16.
    assert divergence(run.memory, run.loaded) < 1e-4
    assert not run.done.notices


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_nearer_its_parent_than_rounding(
    runs: dict[str, Run], weights: dict[str, dict[str, np.ndarray]], family: str
) -> None:
    run = runs[family]
    rounded = rounded_logits(family, weights[family], run.ids, sym=True)
    assert divergence(run.parent, run.memory) < divergence(run.parent, rounded)


@pytest.mark.parametrize("name", CASES)
def test_the_config_names_the_format_of_the_zero_points(base: Path, runs: dict[str, Run], name: str) -> None:
    config = json.loads((base / f"{name}.out" / "config.json").read_text())["quantization_config"]
    assert config["checkpoint_format"] == "gptq"
    assert runs[name].done.layers
    stored = load_file(base / f"{name}.out" / "model.safetensors")
    # Symmetric 4 bits: zero point 8, stored less one.
    assert all((values == 0x77777777).all() for key, values in stored.items() if key.endswith("qzeros"))
    assert not {key for key, values in stored.items() if values.dtype == np.float32}


def test_kept_modules_stay_as_they_are(
    base: Path, runs: dict[str, Run], weights: dict[str, dict[str, np.ndarray]]
) -> None:
    stored = load_file(base / "down.out" / "model.safetensors")
    for layer in DOWN:
        assert runs["down"].types[layer] == "Linear"
        assert np.array_equal(stored[f"{layer}.weight"], weights["llama"][f"{layer}.weight"].astype(np.float16))
    config = json.loads((base / "down.out" / "config.json").read_text())["quantization_config"]
    assert "mlp.down_proj" not in config["modules_in_block_to_quantize"][0]
    assert len(config["modules_in_block_to_quantize"][0]) == 6


@pytest.mark.parametrize("name", CASES)
def test_no_path_and_no_calibration_text_is_left(base: Path, runs: dict[str, Run], name: str) -> None:
    assert runs[name].done.layers
    for path in (base / f"{name}.out").iterdir():
        data = path.read_bytes()
        assert SECRET.encode() not in data
        assert str(base).encode() not in data
    assert "dataset" not in (base / f"{name}.out" / "config.json").read_text()
    assert (base / f"{name}.out" / "chat_template.jinja").read_text() == TEMPLATE


def test_the_run_is_told(runs: dict[str, Run]) -> None:
    run = runs["llama"]
    assert len(run.done.layers) == 14
    assert set(run.done.losses) == set(run.done.layers)
    assert all(0 < loss < 1 for loss in run.done.losses.values())
    assert run.stages[:2] == [["gptq layer", 0, 2], ["gptq layer", 1, 2]]
    assert run.done.calibration is not None
    assert run.done.calibration["tokens"] == 8 * 64
    assert run.done.engine_s > 0
