"""gptqmodel's artifacts load in transformers and compute what the engine's model computed."""

from __future__ import annotations

import importlib.util
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.engine_runs import FAMILIES, SECRET, TEMPLATE, divergence, job, rounded_logits, run_all, write_model
from tests.hf_folders import HIDDEN

# Not imported here: it patches transformers.
if importlib.util.find_spec("gptqmodel") is None:
    pytest.skip("gptqmodel is not installed", allow_module_level=True)
torch = pytest.importorskip("torch")

IRREGULAR = ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"]
# All that a norm feeds.
FED = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
DOWN = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq-2-desc_act": ("gptq", {"bits": 2, "desc_act": True}),
    "gptq-3-asym": ("gptq", {"bits": 3, "sym": False}),
    "gptq-8": ("gptq", {"bits": 8}),
    "gptq-irregular": ("gptq", {"keep": IRREGULAR}),
    "gptq-down": ("gptq", {"keep": DOWN, "sym": False}),
    "awq-fed": ("awq", {"keep": FED}),
    "awq-sym": ("awq", {"sym": True}),
}


class Made:
    def __init__(self, base: Path) -> None:
        self.base = base
        self.weights = {family: write_model(base / family, family) for family in FAMILIES}
        plain = {f"{method}-{family}": (method, family, {}) for method in ("gptq", "awq") for family in FAMILIES}
        varied = {name: (method, "llama", options) for name, (method, options) in VARIANTS.items()}
        self.jobs = {
            name: job(base / family, base / f"{name}.out", method, **options)
            for name, (method, family, options) in (plain | varied).items()
        }
        self.runs = run_all("gptqmodel", self.jobs)

    def out(self, name: str) -> Path:
        return Path(self.jobs[name].out)

    def config(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out(name) / "config.json").read_text())
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("gptqmodel"))


def bits_of(made: Made, name: str) -> int:
    weights = made.jobs[name].weights
    assert weights is not None
    return weights.bits


ALL = [f"{method}-{family}" for method in ("gptq", "awq") for family in FAMILIES] + list(VARIANTS)


@pytest.mark.parametrize("name", ALL)
def test_the_artifact_computes_what_the_engine_computed(made: Made, name: str) -> None:
    run = made.runs[name]
    assert np.isfinite(run.loaded).all()
    # transformers' kernel for a CPU rounds activations to bfloat16.
    assert divergence(run.memory, run.loaded) < 1e-4
    assert divergence(run.parent, run.loaded) < {2: 0.2, 3: 0.05, 8: 1e-4}.get(bits_of(made, name), 0.03)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_it_is_nearer_its_parent_than_rounding(made: Made, method: str) -> None:
    ratios = []
    for family in FAMILIES:
        run = made.runs[f"{method}-{family}"]
        rounded = rounded_logits(family, made.weights[family], run.ids, sym=method == "gptq")
        ratios.append(divergence(run.parent, run.memory) / divergence(run.parent, rounded))
    # No channel of a random model stands out, which is what awq lives by: one of five may be unlucky.
    assert max(ratios) < (1 if method == "gptq" else 1.5)
    assert statistics.median(ratios) < 1


@pytest.mark.parametrize("name", ALL)
def test_every_linear_but_the_head_and_what_is_kept_is_packed(made: Made, name: str) -> None:
    run, job_ = made.runs[name], made.jobs[name]
    stored = load_file(made.out(name) / "model.safetensors")
    family = Path(job_.folder).name
    linears = {key.removesuffix(".weight") for key in made.weights[family] if key.endswith("_proj.weight")}
    assert set(run.done.layers) == linears - set(job_.keep)
    assert {key.removesuffix(".qweight") for key in stored if key.endswith(".qweight")} == set(run.done.layers)
    assert all(run.types[layer].startswith("Torch") for layer in run.done.layers)
    for layer in job_.keep:
        assert run.types[layer] == "Linear"
        assert stored[f"{layer}.weight"].dtype == np.float16
    assert not {key for key, values in stored.items() if values.dtype == np.float32}
    assert ("lm_head.weight" in stored) == (family not in ("qwen2", "gemma3"))
    assert not run.done.notices


def test_kept_modules_of_gptq_are_stored_as_the_parent_has_them(made: Made) -> None:
    stored = load_file(made.out("gptq-irregular") / "model.safetensors")
    for layer in IRREGULAR:
        assert np.array_equal(stored[f"{layer}.weight"], made.weights["llama"][f"{layer}.weight"].astype(np.float16))
    assert np.array_equal(stored["lm_head.weight"], made.weights["llama"]["lm_head.weight"].astype(np.float16))


def test_a_norm_is_divided_only_for_what_it_feeds(made: Made) -> None:
    """With q, k and v kept, the engine by itself divides their norm for o_proj."""
    stored = load_file(made.out("awq-fed") / "model.safetensors")
    name = "model.layers.0.input_layernorm.weight"
    assert np.array_equal(stored[name], made.weights["llama"][name].astype(np.float16))
    smoothed = load_file(made.out("awq-llama") / "model.safetensors")[name]
    assert not np.array_equal(smoothed, stored[name])


@pytest.mark.parametrize("name", ALL)
def test_the_config_is_the_parents_and_says_what_was_done(made: Made, name: str) -> None:
    config, job_ = made.config(name), made.jobs[name]
    quantization = config.pop("quantization_config")
    assert config == json.loads((Path(job_.folder) / "config.json").read_text())
    assert job_.weights is not None
    assert (quantization["quant_method"], quantization["bits"], quantization["group_size"]) == (
        job_.method, job_.weights.bits, 32,
    )  # fmt: skip
    if job_.method == "gptq":
        assert (quantization["sym"], quantization["desc_act"]) == (job_.weights.sym, job_.weights.desc_act)
        assert quantization["checkpoint_format"] == "gptq"
        assert set(quantization.get("dynamic", {})) == {
            f"-:^{layer.replace('.', chr(92) + '.')}$" for layer in job_.keep
        }
    else:
        assert (quantization["zero_point"], quantization["version"]) == (not job_.weights.sym, "gemm")
        assert (quantization["modules_to_not_convert"] or []) == job_.keep


def test_modules_alike_in_all_layers_are_named_once(made: Made) -> None:
    (names,) = made.config("gptq-down")["quantization_config"]["modules_in_block_to_quantize"]
    assert sorted(names) == sorted(
        [*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.gate_proj", "mlp.up_proj"]
    )  # fmt: skip
    (names,) = made.config("gptq-irregular")["quantization_config"]["modules_in_block_to_quantize"]
    assert sorted(names) == sorted(made.runs["gptq-irregular"].done.layers)


@pytest.mark.parametrize("name", ALL)
def test_no_path_and_no_calibration_text_is_left(made: Made, name: str) -> None:
    for path in made.out(name).iterdir():
        data = path.read_bytes()
        assert SECRET.encode() not in data
        assert str(made.base).encode() not in data
        if path.suffix == ".json" and path.name != "tokenizer.json":
            assert b"/tmp" not in data
    assert not list(Path.cwd().glob("logs/*gptq_log*"))


@pytest.mark.parametrize("name", ["gptq-llama", "awq-qwen2"])
def test_the_parents_files_are_taken_over(made: Made, name: str) -> None:
    out, parent = made.out(name), Path(made.jobs[name].folder)
    assert {path.name for path in out.iterdir()} == {path.name for path in parent.iterdir()}
    for path in parent.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            assert (out / path.name).read_bytes() == path.read_bytes()
    assert (out / "chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.parametrize("name", ["gptq-mistral", "awq-mistral"])
def test_the_run_is_told(made: Made, name: str) -> None:
    run = made.runs[name]
    method = name.partition("-")[0]
    scaled = [layer for layer in run.done.layers if method == "gptq" or not layer.endswith("o_proj")]
    # With grouped queries no norm and no Linear can be divided for o_proj.
    assert set(run.done.losses) == set(scaled)
    assert all(0 < loss < 1 for loss in run.done.losses.values())
    assert [stage for stage in run.stages if stage[0] != "save"] == [[f"{method} layer", i, 2] for i in range(3)]
    assert run.done.calibration is not None
    assert run.done.calibration["tokens"] == 8 * 64
    assert run.done.engine_s > 0
    assert run.done.peak_process_bytes > 1e8


class Processor:
    """What best_scale uses of gptqmodel's processor: asymmetric, 4 bits, groups of 32."""

    class qcfg:  # noqa: N801 - the engine's name
        group_size = 32

    def _pseudo_quantize_tensor_into(self, source: Any, target: Any) -> None:
        x = source.reshape(-1, 32)
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        scale = (high - low).clamp(min=1e-5) / 15
        zero = (-torch.round(low / scale)).clamp(0, 15)
        target.copy_((((torch.round(x / scale) + zero).clamp(0, 15) - zero) * scale).reshape(source.shape))

    def _iter_module_forward_outputs(self, x: Any, module: Any, _: Any) -> Any:
        return (module(sample) for sample in x)


def test_scales_are_searched_from_unchanged_weights() -> None:
    """On a CPU the engine's own search kept no copy of float32 weights, and left them quantized."""
    from quantlab.quantize.engines.gptqmodel_awq import best_scale

    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(HIDDEN, 24, bias=False)
    linear.requires_grad_(False)
    # Two channels with large activations: what AWQ is for.
    x = torch.randn(3, 20, HIDDEN, generator=generator)
    x[..., [3, 40]] *= 30
    before, reference = linear.weight.clone(), [linear(sample) for sample in x]
    x_mean, w_mean = x.abs().mean((0, 1)), before.abs().mean(0)
    scales, error = best_scale(Processor(), x, w_mean, x_mean, linear, [linear], reference, {})
    assert torch.equal(linear.weight, before)

    def error_of(scales: Any) -> float:
        rounded = torch.empty_like(before)
        Processor()._pseudo_quantize_tensor_into(before * scales, rounded)
        return float((x @ (rounded / scales - before).T).square().mean())

    assert error == pytest.approx(error_of(scales), rel=1e-4)
    tried = [torch.ones(HIDDEN)]
    for step in range(10):
        with_weights = x_mean ** (step / 10) / (w_mean ** (1 - step / 10) + 1e-4)
        raws = (with_weights, x_mean ** ((step + 1) / 10))
        tried += [raw / (raw.max() * raw.min()).sqrt() for raw in raws]
    assert error == pytest.approx(min(error_of(each) for each in tried), rel=1e-4)
    assert error < 0.7 * error_of(torch.ones(HIDDEN))


def test_layers_that_attend_differently_get_their_own_inputs(tmp_path: Path) -> None:
    """gptqmodel runs every layer with the mask and the positions of the first."""
    from quantlab.quantize.engines.layer_types import give_own_inputs
    from quantlab.quantize.torch_model import load_model

    write_model(tmp_path / "gemma3", "gemma3")
    model = load_model(tmp_path / "gemma3", dtype=torch.float32, device="cpu")
    seen: dict[int, Any] = {}

    def keep(i: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any, output: Any) -> None:
            seen[i] = (args, kwargs, output)

        return hook

    handles = [layer.register_forward_hook(keep(i), with_kwargs=True) for i, layer in enumerate(model.model.layers)]
    with torch.inference_mode():
        model(input_ids=torch.arange(3, 43)[None], use_cache=False)
        for handle in handles:
            handle.remove()
        args, _, output = seen[1]
        replay = model.model.layers[1](*args, **seen[0][1])
        assert (replay - output).abs().max() > 1e-2
        give_own_inputs(model)
        replay = model.model.layers[1](*args, **seen[0][1])
    assert torch.allclose(replay, output, atol=1e-5)
