"""`--fallback MODEL`: what would be rejected is answered by a smaller model, and the row says by whom, and how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest

from quantlab.bench.batching.bench import run
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.core.artifact import content_sha256
from quantlab.core.errors import UsageError
from quantlab.core.model import ModelFile
from quantlab.core.result import Outcome
from quantlab.lab.execute import Lab, fingerprint
from quantlab.lab.recipe import read_recipe, run_recipe
from quantlab.lab.steps import batching_models, batching_step
from quantlab.lab.store import Store
from tests.tiny_gguf import write_gguf

SMALL: dict[str, Any] = {
    "prompt_tokens": 8, "new_tokens": 4, "requests": 60, "max_num_seqs": 4, "threads": 1, "parts": ["mixed"],
}  # fmt: skip
ROOFLINE: dict[str, Any] = {"simulate": True, "bandwidth_bytes_per_s": 1e7, "flops_per_s": 3e7}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFile, ModelFile]:
    """A model of six layers, and one of one."""
    folder, found = tmp_path_factory.mktemp("models"), []
    for name, layers in (("large", 6), ("small", 1)):
        path = folder / f"{name}.gguf"
        write_gguf(path, kind=gguf.GGMLQuantizationType.F32, layers=layers)
        found.append(ModelFile(str(path), name, str(path), content_sha256(path)))
    return found[0], found[1]


def rows(outcomes: list[Outcome]) -> dict[str, Outcome]:
    return {outcome.details["policy"]: outcome for outcome in outcomes}


def checked(row: Outcome) -> list[dict[str, Any]]:
    """What was answered by whom, after checking that no interactive request is counted twice or nowhere."""
    told: list[dict[str, Any]] = row.details["answered_by"]
    degraded = row.measurements["degraded"].samples
    assert [one["model"] for one in told] == ["large", "small"]
    assert [one["requests"] for one in told] == [degraded.count(0.0), degraded.count(1.0)]
    assert sum(one["finished"] for one in told) == len(row.measurements["ttft"].samples)
    # No batch request has a deadline to miss.
    assert row.details["requests_finished"] == row.details["requests"]
    assert row.details["requests_rejected"] == 0
    return told


def test_in_virtual_time_the_smaller_model_takes_what_would_be_rejected(models: tuple[ModelFile, ModelFile]) -> None:
    large, small = models
    options = {**SMALL, **ROOFLINE, "requests": 400, "ttft_slo_s": 0.6, "mixed_utilization": 1.3}
    outcomes = list(run(BatchingSpec(large, fallback=small, **options)))
    found = rows(outcomes)
    assert list(found) == ["fcfs", "priority", "preemption", "guarded", "fallback"]
    assert found["guarded"].details["requests_rejected"] > 0
    by_large, by_small = checked(found["fallback"])
    assert by_large["requests"] > 0
    assert by_small["requests"] > 0
    # No queue; but a step of the other model lies between any two of its own.
    assert by_small["ttft_p50_s"] < found["fcfs"].details["ttft_p50_s"]
    assert found["fallback"].details["batch_wait_bound_s"] is None
    assert "answered_by" not in found["guarded"].details
    assert [o.details["complete"] for o in outcomes] == [False] * 4 + [True]
    # A roofline is one device.
    assert [n.code for n in found["fallback"].warnings].count("simulated") == 1
    # What the other policies do is the same without it.
    plain = rows(list(run(BatchingSpec(large, **options))))
    assert plain["guarded"].measurements == found["guarded"].measurements


def test_two_models_are_loaded_and_take_turns(models: tuple[ModelFile, ModelFile]) -> None:
    large, small = models
    # A limit that no queue can meet, and more load than there is capacity.
    options = {**SMALL, "ttft_slo_s": 1e-5, "mixed_utilization": 3.0}
    row = rows(list(run(BatchingSpec(large, fallback=small, **options))))["fallback"]
    by_large, by_small = checked(row)
    assert by_small["requests"] > by_large["requests"]
    assert by_small["ttft_p50_s"] > 0
    assert row.runtime is not None
    assert row.runtime.name == "llamacpp"


def test_a_fitted_simulation_fits_both(models: tuple[ModelFile, ModelFile]) -> None:
    large, small = models
    options = {**SMALL, "simulate": True, "max_num_seqs": 2, "repeats": 1}
    row = list(run(BatchingSpec(large, fallback=small, **options)))[-1]
    told = [notice.message for notice in row.warnings if notice.code == "simulated"]
    assert len(told) == 2
    assert "steps of `large`" in told[0]
    assert "steps of `small`" in told[1]


def test_a_model_that_cuts_text_otherwise_is_no_fallback(models: tuple[ModelFile, ModelFile], tmp_path: Path) -> None:
    # This one keeps numbers together.
    path = tmp_path / "other.gguf"
    write_gguf(path, kind=gguf.GGMLQuantizationType.F32, pre="gpt-2")
    other = ModelFile(str(path), "other", str(path), content_sha256(path))
    with pytest.raises(UsageError, match="cuts text into other tokens than `large`"):
        list(run(BatchingSpec(models[0], fallback=other, **SMALL)))


def test_what_is_no_fallback_is_refused(models: tuple[ModelFile, ModelFile]) -> None:
    large, small = models
    with pytest.raises(UsageError, match="is the model itself"):
        BatchingSpec(large, fallback=large)
    with pytest.raises(UsageError, match="shares the device of one engine"):
        BatchingSpec(large, fallback=small, replicas=2, **ROOFLINE)
    with pytest.raises(UsageError, match="is an endpoint"):
        BatchingSpec(large, fallback=ModelFile("http://127.0.0.1:1/v1", "m", "m", "0"))
    with pytest.raises(UsageError, match="`--fallback` changes nothing here: only the part mixed"):
        batching_step(large, {"parts": "load", "fallback": small})
    lab = Lab(None)
    url = "http://127.0.0.1:1/v1"
    with pytest.raises(UsageError, match="`--fallback` changes nothing here"):
        batching_step(*batching_models(lab, url, {"fallback": small.path}))
    model, options = batching_models(lab, large.path, {"fallback": small.path})
    step = batching_step(model, options)
    assert step.spec.fallback.sha256 == small.sha256
    assert fingerprint(step) != fingerprint(batching_step(model, {}))


def test_the_command_says_who_answered(models: tuple[ModelFile, ModelFile], tmp_path: Path) -> None:
    large, small = models
    command = [sys.executable, "-m", "quantlab", "batching", large.path, "--fallback", small.path, "--simulate"]
    command += ["--bandwidth", "1e7", "--flops", "3e7", "--parts", "mixed", "-p", "8", "-n", "4", "--requests", "200"]
    command += ["--mixed-utilization", "1.3", "--ttft-slo", "600ms"]
    wide = {**os.environ, "COLUMNS": "300"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=wide)
    assert done.returncode == 0, done.stderr
    assert "interactive requests went to `small` (TTFT P99 " in done.stdout
    stored = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*.json")]
    (row,) = [r for r in stored if r["details"]["policy"] == "fallback"]
    assert row["spec"]["fallback"]["label"] == "small"


def test_a_recipe_names_it_as_it_names_a_parent(models: tuple[ModelFile, ModelFile], tmp_path: Path) -> None:
    large, small = models
    virtual = "parts: [mixed], requests: 60, simulate: true, bandwidth: 1e7, flops: 3e7"
    path = tmp_path / "r.yaml"
    path.write_text(
        f"name: r\nmodels: [{large.path}, {small.path}]\nbatching:\n  - {{{virtual}, fallback: {small.path}}}\n"
    )
    results = run_recipe(read_recipe(path), Lab(Store(tmp_path / "runs"), offline=True))
    # The small model has no fallback but itself.
    assert [result.label for result in results] == ["large"] * 5 + ["small"] * 4
    assert msgspec.to_builtins(results[0].spec)["fallback"]["label"] == "small"
    path.write_text(f"name: r\nmodels: [{large.path}]\nbatching:\n  - {{{virtual}, fallback: none.gguf}}\n")
    with pytest.raises(UsageError, match=r"`fallback: none\.gguf` is neither"):
        run_recipe(read_recipe(path), Lab(Store(tmp_path / "runs"), offline=True))
