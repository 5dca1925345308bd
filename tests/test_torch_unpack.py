"""Layers of gptq and awq that are unpacked at load: the weights that the codes mean, and those of the kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gptqmodel")

from safetensors.numpy import load_file, save_file  # noqa: E402

from quantlab.runtime.torch import load  # noqa: E402
from quantlab.runtime.torch.weights import kernels  # noqa: E402
from tests import hf_folders  # noqa: E402
from tests.torch_artifacts import codes, dequantized, pack, quantization_config, write_artifact  # noqa: E402


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with biases, of one layer."""
    folder = tmp_path_factory.mktemp("parent") / "llama"
    hf_folders.write_folder(folder, "llama", model_type="llama", num_hidden_layers=1)
    return folder


def write_gptq(
    out: Path, parent: Path, *, bits: int, group: int, sym: bool, version: int, desc_act: bool
) -> dict[str, np.ndarray]:
    """An artifact, and the weight of each module; with `desc_act` a group's columns lie anywhere."""
    out.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((parent / name).read_bytes())
    draw = np.random.default_rng(bits)
    stored, means = {}, {}
    for name, value in load_file(parent / "model.safetensors").items():
        if value.ndim < 2 or ".layers." not in name:
            stored[name] = value.astype(np.float16)
            continue
        columns = value.shape[1]
        order = draw.permutation(columns) if desc_act else np.arange(columns)
        found, scales, zeros = codes(value[:, order], bits, group, sym)
        module, back = name.removesuffix(".weight"), np.argsort(order)
        means[module] = dequantized(found, scales, zeros)[:, back]
        size = columns if group == -1 else group
        stored |= {
            f"{module}.qweight": pack(found[:, back].T, bits, 0),
            f"{module}.qzeros": pack(zeros.T - (version == 1) & 2**bits - 1, bits, 1),
            f"{module}.scales": np.ascontiguousarray(scales.T),
            f"{module}.g_idx": (np.arange(columns) // size).astype(np.int32)[back],
        }
    save_file(stored, out / "model.safetensors", {"format": "pt"})
    settings = quantization_config("gptq", bits, group, sym, [])
    settings |= {"desc_act": desc_act, "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    config = json.loads((parent / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float16", "quantization_config": settings}))
    return means


def loaded(folder: Path, *, exact: bool) -> Any:
    config = load.load_config(folder)
    if not exact:
        config.quantization_config["backend"] = "gptq_torch"
    return load.load_model(folder, config, torch.float32, torch.device("cpu"), exact=exact)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("bits", "group", "sym", "desc_act"),
    [
        (2, 32, True, False),
        (3, 32, False, True),
        (3, -1, True, False),
        (4, 32, False, True),
        (4, 32, True, False),
        (4, -1, False, False),
        (8, 32, True, True),
        (8, -1, False, False),
    ],
)
def test_gptq_is_what_its_codes_mean_and_what_its_kernel_computes(
    tmp_path: Path, parent: Path, *, bits: int, group: int, sym: bool, desc_act: bool, version: int
) -> None:
    options = {"bits": bits, "group": group, "sym": sym, "desc_act": desc_act, "version": version}
    means = write_gptq(tmp_path / "a", parent, **options)
    unpacked, packed = loaded(tmp_path / "a", exact=True), loaded(tmp_path / "a", exact=False)
    assert kernels(unpacked) == {"attention Linear": 4, "mlp Linear": 3, "lm_head Linear": 1}
    assert kernels(packed) == {"attention TorchLinear": 4, "mlp TorchLinear": 3, "lm_head Linear": 1}
    for name, weight in means.items():
        own, kernel = unpacked.get_submodule(name), packed.get_submodule(name)
        assert own.weight.dtype == torch.float32
        np.testing.assert_array_equal(own.weight.numpy(), weight)
        # The kernel rounds the product to the type of its scales.
        vars(kernel).pop("dequantize_weight", None)
        kernel.scales = kernel.scales.float()
        assert torch.equal(own.weight, kernel.dequantize_weight().T)
        assert torch.equal(own.bias, kernel.bias.float())
        assert not own.weight.requires_grad


def test_awq_is_what_its_codes_mean(tmp_path: Path, parent: Path) -> None:
    means = write_artifact(tmp_path / "a", parent, "awq", sym=False)
    model = loaded(tmp_path / "a", exact=True)
    assert kernels(model) == {"attention Linear": 4, "mlp Linear": 3, "lm_head Linear": 1}
    held = dict(model.named_parameters())
    for name, weight in means.items():
        np.testing.assert_array_equal(held[name].detach().numpy(), weight, err_msg=name)
