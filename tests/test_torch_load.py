"""What the torch backend opens and what it refuses: devices, broken folders, other architectures, quantized weights."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402
from safetensors.torch import save_file as save_torch  # noqa: E402

from quantlab.core.errors import QuantlabError, UsageError  # noqa: E402
from quantlab.runtime.backend import Batch, Capacity  # noqa: E402
from quantlab.runtime.loading import opened  # noqa: E402
from quantlab.runtime.torch import load  # noqa: E402
from quantlab.runtime.torch.backend import TorchBackend  # noqa: E402
from quantlab.runtime.torch.vocabulary import load_tokenizer  # noqa: E402
from tests import hf_folders  # noqa: E402
from tests.backend_contract import distance  # noqa: E402
from tests.test_torch_backend import folders, write_folder  # noqa: E402
from tests.torch_artifacts import write_artifact  # noqa: E402

__all__ = ["folders"]


# loading


def test_devices_dtypes_and_threads(stories: Path, folders: Path) -> None:
    for wrong, what in (
        ({"device": "tpu"}, "tpu"), ({"dtype": "float64"}, "float64"), ({"threads": 0}, "0 threads"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=what):
            TorchBackend(stories, Capacity(n_ctx=8), **wrong)
    for device, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())):
        if not there:
            with pytest.raises(QuantlabError, match=f"no `{device}` here"):
                TorchBackend(stories, Capacity(n_ctx=8), device=device)
    hf_folders.change_config(folders / "qwen2", dtype="bfloat16")
    with opened(folders / "qwen2", Capacity(n_ctx=8), device="cpu", threads=1) as backend:
        assert (backend.describe().runtime.dtype, backend.describe().runtime.threads) == ("float32", 1)


def test_a_gguf_file_has_the_types_it_has(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match=r"--dtype float16.*`a\.gguf`"),
        opened(tmp_path / "a.gguf", Capacity(), dtype="float16"),
    ):
        pass


def _without(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _as_pickle(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    torch.save({k: torch.from_numpy(v) for k, v in tensors.items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _remote(folder: Path) -> None:
    (folder / "modeling_new.py").write_text("raise SystemExit('remote code ran')")
    names = {"AutoConfig": "modeling_new.C", "AutoModelForCausalLM": "modeling_new.M"}
    hf_folders.change_config(folder, model_type="new", auto_map=names)


BROKEN = {
    "lacks 1 tensors.*layers.1.mlp.up_proj": lambda f: _without(f, "model.layers.1.mlp.up_proj.weight"),
    "no .*safetensors": _as_pickle,
    "config.json": _remote,
    r"config\.json.*validation": lambda f: hf_folders.change_config(f, model_type="gpt_neo"),
    "no decoder-only": lambda f: hf_folders.change_config(f, model_type="vit", architectures=["ViTModel"]),
    r"another shape.*\(64, 96\)": lambda f: hf_folders.change_config(f, intermediate_size=100),
    "tokenizer": lambda f: (f / "tokenizer.json").write_text("{}"),
    "truncated|damaged": lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
}


@pytest.mark.parametrize("message", BROKEN)
def test_folders_that_do_not_load_are_errors(tmp_path: Path, message: str) -> None:
    write_folder(tmp_path / "m", "qwen2")
    BROKEN[message](tmp_path / "m")
    with pytest.raises(QuantlabError, match=message):
        TorchBackend(tmp_path / "m", Capacity(n_ctx=8), device="cpu", threads=1)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("CUDA error: no kernel image is available"),
        OSError(5, "Input/output error"),
    ],
    ids=["python", "torch", "cuda", "system"],
)
def test_a_machine_that_cannot_load_is_no_fault_of_the_folder(
    folders: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    config = load.load_config(folders / "llama")
    for library in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        monkeypatch.setattr(library, "from_pretrained", fail)
    for broken in (
        lambda: load.load_model(folders / "llama", config, torch.float32, torch.device("cpu"), strict=True),
        lambda: load_tokenizer(folders / "llama"),
    ):
        with pytest.raises(QuantlabError, match=r"memory|CUDA error|Input/output") as caught:
            broken()
        assert not isinstance(caught.value, load.FolderError)
        assert "tokenizer" not in caught.value.message


def test_a_fault_of_the_folder_does_not_name_it_where_it_may_be_renamed(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(f"no file found in {folders / 'llama'}")

    config = load.load_config(folders / "llama")
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    call = functools.partial(load.load_model, folders / "llama", config, torch.float32, torch.device("cpu"))
    with pytest.raises(load.FolderError) as caught:
        call(strict=True)
    assert caught.value.message == "transformers does not load it: no file found in the folder"
    with pytest.raises(QuantlabError, match="llama`: transformers does not load it"):
        call()


def test_attention_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    """gemma2 bends its scores by a tanh: left out, the answer would only look like one."""
    config = transformers.Gemma2Config(
        vocab_size=373, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    write_folder(tmp_path / "m", "llama")
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path / "m")
    with pytest.raises(QuantlabError, match=r"Gemma2Attention.*softcap"):
        TorchBackend(tmp_path / "m", Capacity(n_ctx=8), device="cpu", threads=1)


def test_other_state_than_keys_is_refused(tmp_path: Path) -> None:
    config = transformers.Lfm2Config(
        vocab_size=373, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    write_folder(tmp_path / "m", "llama")
    transformers.Lfm2ForCausalLM(config).save_pretrained(tmp_path / "m")
    with pytest.raises(QuantlabError, match="1 of 2 layers attend"):
        TorchBackend(tmp_path / "m", Capacity(n_ctx=8), device="cpu", threads=1)


@pytest.mark.parametrize("family", ["falcon", "gptj", "gpt_neo", "mpt", "mamba"])
def test_attention_that_cannot_be_replaced_is_told(tmp_path: Path, family: str) -> None:
    write_folder(tmp_path / "m", "llama")
    layers = {"attention_types": [[["global"], 3]]} if family == "gpt_neo" else {}
    hf_folders.change_config(tmp_path / "m", model_type=family, **layers)
    with pytest.raises(QuantlabError, match="no attention that can be replaced") as caught:
        TorchBackend(tmp_path / "m", Capacity(n_ctx=8), device="cpu", threads=1)
    assert "GGUF" in caught.value.hint


# quantized folders

# What is stored quantized and held wide; int8 rounds its activations too.
WIDE = {"gptq": {"I32": 21}, "awq": {"I32": 21}, "compressed": {"I32": 21}, "int8": {"I8": 21}, "fp8": {"F8_E4M3": 21}}
TOLERANCE = {"int8": 0.1}


def _write_eight_bits(out: Path, parent: Path, form: str) -> dict[str, np.ndarray]:
    """A folder of compressed-tensors with a scale for each row; returns what its weights mean."""
    shutil.copytree(parent, out)
    stored, means = {}, {}
    for name, weight in load_file(parent / "model.safetensors").items():
        means[name], stored[name] = weight, torch.from_numpy(weight)
        if weight.ndim == 2 and ".layers." in name:
            scale = np.abs(weight).max(1, keepdims=True) / (127 if form == "int8" else 448)
            scaled = torch.from_numpy(weight / scale)
            code = scaled.round().to(torch.int8) if form == "int8" else scaled.to(torch.float8_e4m3fn)
            stored |= {name: code, f"{name}_scale": torch.from_numpy(scale)}
            means[name] = code.float().numpy() * scale
    save_torch(stored, out / "model.safetensors", {"format": "pt"})
    kind = {"num_bits": 8, "type": "int" if form == "int8" else "float", "symmetric": True}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {**kind, "strategy": "channel"}}
    if form == "int8":
        group["input_activations"] = {**kind, "strategy": "token", "dynamic": True}
    hf_folders.change_config(
        out,
        quantization_config={
            "quant_method": "compressed-tensors", "format": f"{kind['type']}-quantized",
            "quantization_status": "compressed", "ignore": ["lm_head"], "config_groups": {"group_0": group},
        },
    )  # fmt: skip
    return means


@pytest.mark.parametrize("form", ["gptq", "awq", "compressed", "int8", "fp8"])
def test_quantized_weights_compute_what_they_mean(tmp_path: Path, folders: Path, form: str) -> None:
    pytest.importorskip("gptqmodel" if form in ("gptq", "awq") else "compressed_tensors")
    quantized, plain, parent = tmp_path / "quantized", tmp_path / "plain", folders / "qwen3"
    if form in ("int8", "fp8"):
        means = _write_eight_bits(quantized, parent, form)
    else:
        means = write_artifact(quantized, parent, form, sym=False)
    shutil.copytree(parent, plain)
    save_file(means, plain / "model.safetensors", {"format": "pt"})
    tokens = np.arange(10, 50, dtype=np.int32)
    logits, loaded = {}, {}
    for folder in (quantized, plain):
        with opened(folder, Capacity(n_ctx=64), device="cpu", threads=1, exact=True) as backend:
            logits[folder] = backend.forward(Batch.of(0, tokens, 0, logits="all"))
            loaded[folder] = backend.describe()
    assert distance(logits[quantized], logits[plain]) < TOLERANCE.get(form, 1e-4)
    assert loaded[quantized].runtime.kernels == {"attention Linear": 12, "mlp Linear": 9, "lm_head Linear": 1}
    assert loaded[quantized].decompressed == WIDE[form]
    # Held wide, a token reads the wide bytes, whatever the file holds.
    assert loaded[quantized].bytes_read_per_token >= loaded[plain].bytes_read_per_token
