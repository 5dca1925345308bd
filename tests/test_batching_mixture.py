"""Mixtures of experts: how many a step is expected to read, and what a roofline makes of the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from quantlab.bench.batching.bench import run
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.bench.roofline import experts, roofline
from quantlab.core.artifact import content_sha256, model_info
from quantlab.core.errors import UsageError
from quantlab.core.model import ModelFile
from quantlab.runtime.mixture import MixtureRoofline, experts_touched
from quantlab.runtime.step_model import Roofline, StepShape
from tests.hf_folders import write_safetensors
from tests.tiny_gguf import FFN, HIDDEN, LAYERS, write_gguf

DENSE = Roofline(1000.0, 10.0, 500.0, 1e3, 1e9)
# Reading binds: bandwidth is tiny.
MIXTURE = MixtureRoofline(DENSE, expert_bytes=8000.0, experts=8, used=2)


def test_experts_by_hand() -> None:
    assert experts_touched(8, 2, 0) == 0
    assert experts_touched(8, 2, 1) == pytest.approx(2)
    assert experts_touched(8, 2, 2) == pytest.approx(2 + 6 * 2 / 8)
    assert experts_touched(8, 8, 1) == 8
    assert experts_touched(128, 8, 10_000) == pytest.approx(128)


@pytest.mark.parametrize(("count", "used", "tokens"), [(8, 2, 3), (16, 4, 5), (64, 6, 12)])
def test_experts_against_routing_that_is_drawn(count: int, used: int, tokens: int) -> None:
    rng = np.random.default_rng(0)
    drawn = [len(np.unique([rng.choice(count, used, replace=False) for _ in range(tokens)])) for _ in range(3000)]
    assert np.mean(drawn) == pytest.approx(experts_touched(count, used, tokens), rel=0.01)


def test_a_step_reads_the_experts_of_its_tokens() -> None:
    """Decoding tokens and those of prefill alike; nothing else changes."""
    for shape, touched in ((StepShape(0, 0, 1, 4), 2.0), (StepShape(1, 1, 1, 4), 3.5), (StepShape(400, 1, 0, 0), 8.0)):
        expected = (1000 + 1000 * touched + 10 * shape.context_tokens) / 1e3
        assert MIXTURE.seconds(shape) == pytest.approx(expected)
    steps = [MIXTURE.seconds(StepShape(0, 0, 4, 40 + 4 * i)) for i in range(30)]
    assert MIXTURE.decode_s(4, 40, 30) == pytest.approx(sum(steps))
    assert MIXTURE.decode_steps(4, 40, sum(steps[:7]) - 1e-9, 30) == 7
    wrongs: tuple[dict[str, Any], ...] = ({"used": 0}, {"used": 9}, {"expert_bytes": -1.0})
    for wrong in wrongs:
        with pytest.raises(UsageError, match="experts"):
            MixtureRoofline(**{"dense": DENSE, "expert_bytes": 1.0, "experts": 8, "used": 2, **wrong})


def model(path: Path) -> ModelFile:
    return ModelFile(str(path), "m", str(path), content_sha256(path))


def test_experts_of_a_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "moe.gguf", kind=gguf.GGMLQuantizationType.F32, experts=4)
    write_gguf(tmp_path / "dense.gguf", kind=gguf.GGMLQuantizationType.F32)
    assert experts(tmp_path / "dense.gguf") is None
    found = experts(tmp_path / "moe.gguf")
    weights = LAYERS * 4 * 3 * HIDDEN * FFN
    assert found is not None
    assert found == (4, 2, 4 * weights, weights)
    info = model_info(model(tmp_path / "moe.gguf"))
    step = roofline(tmp_path / "moe.gguf", info, 1e6, 1e6)
    assert isinstance(step, MixtureRoofline)
    assert step.dense.weight_bytes + step.expert_bytes == info.size_bytes
    # A token computes with half of the experts.
    assert step.dense.params == pytest.approx(8 * info.size_bytes / info.bits_per_weight - weights / 2)
    dense = roofline(tmp_path / "dense.gguf", model_info(model(tmp_path / "dense.gguf")), 1e6, 1e6)
    assert isinstance(dense, Roofline)


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_experts_of_a_folder(tmp_path: Path, key: str) -> None:
    """Shared experts are read by every token."""
    config: dict[str, Any] = {key: 3, "num_experts_per_tok": 1, "num_hidden_layers": 1, "num_attention_heads": 1,
                              "hidden_size": 4}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    ones = np.ones((4, 4), np.float32)
    names = [f"model.layers.0.mlp.experts.{i}.up_proj.weight" for i in range(3)]
    names += ["model.layers.0.mlp.shared_experts.up_proj.weight", "model.layers.0.mlp.gate.weight"]
    write_safetensors(tmp_path / "model.safetensors", dict.fromkeys(names, ("F32", ones)))
    assert experts(tmp_path) == (3, 1, 3 * 64, 3 * 16)


def test_a_simulation_says_that_experts_are_chosen_uniformly(tmp_path: Path) -> None:
    path = tmp_path / "moe.gguf"
    write_gguf(path, kind=gguf.GGMLQuantizationType.F32, experts=4)
    options: dict[str, Any] = {"simulate": True, "bandwidth_bytes_per_s": 1e7, "flops_per_s": 1e9, "parts": ["batch"]}
    one, four = run(BatchingSpec(model(path), batch=[1, 4], repeats=1, warmup=0, **options))
    assert any("choose experts uniformly" in notice.message for notice in one.warnings)
    # Four tokens read 1 - 0.5^4 of the experts, one half of them.
    small, large = (row.measurements["tpot"].samples[0] for row in (one, four))
    routed, whole = 4 * LAYERS * 4 * 3 * HIDDEN * FFN, path.stat().st_size
    assert large - small > (0.9375 - 0.5) * routed / 1e7
    assert small < (whole - 0.45 * routed) / 1e7
