"""llm-compressor's artifacts load in transformers and compute what the engine's model computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quantlab.core.corpus import Corpus
from quantlab.core.errors import QuantlabError
from quantlab.quantize.torch_work import EngineDone, EngineJob, Samples, Weights
from quantlab.runtime.worker import run_in_child
from tests.hf_folders import change_config, write_folder

pytest.importorskip("llmcompressor")
pytestmark = pytest.mark.filterwarnings("ignore")

SECRET = "the kettle sings of the wind"
TEXT = f"the river rises in the hills and the wind turns the mill; {SECRET}. 12 345\n" * 400
CALL = "quantlab.quantize.engines.llmcompressor:work"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def quantize(folder: Path, out: Path, method: str, **options: Any) -> tuple[EngineDone, list[str]]:
    """Run the engine in a child; returns what it says and the stages it reported."""
    stages: list[str] = []
    out.mkdir()
    calibrates = method in ("awq", "gptq", "int8") or options.get("scheme") == "static"
    job = EngineJob(
        method=method,
        folder=str(folder),
        out=str(out),
        probe=str(out.with_suffix(".probe")),
        keep=options.pop("keep", []),
        device="cpu",
        dtype="float32",
        threads=1,
        seed=0,
        calibration=Samples([(Corpus("mill", "0", False, [TEXT]), 1.0)], 4, 64, 0) if calibrates else None,
        **options,
    )
    done = run_in_child(CALL, msgspec.to_builtins(job), lambda stage, *_: stages.append(stage))
    return msgspec.convert(done, EngineDone), stages


def write_model(folder: Path, family: str) -> Path:
    """A tiny random folder; its tokenizer has a chat template, which only a file of its own holds."""
    write_folder(folder, family, kind="F16")
    change_config(folder, model_type="gemma3_text" if family == "gemma3" else family)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    return folder


def divergence(first: np.ndarray, second: np.ndarray) -> float:
    """Mean KL divergence in nats of two arrays of logits (tokens, n_vocab), in float64."""
    p, q = (x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64), axis=-1)[:, None] for x in (first, second))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def loaded(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True).eval()


def logits(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    with torch.inference_mode():
        return np.asarray(model(input_ids=torch.tensor([ids])).logits[0])


def read_probe(path: Path) -> tuple[list[int], np.ndarray]:
    from safetensors.numpy import load_file

    kept = load_file(path)
    return kept["ids"].tolist(), kept["logits"]


def stored(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


CASES = [
    ("llama", "awq", {"weights": Weights(4, 32, False), "keep": ["model.layers.1.mlp.down_proj"]}, "pack-quantized"),
    ("qwen2", "gptq", {"weights": Weights(4, 32, True)}, "pack-quantized"),
    ("qwen3", "rtn", {"weights": Weights(8, -1, False)}, "pack-quantized"),
    ("gemma3", "int8", {"weights": Weights(8, -1, True)}, "int-quantized"),
    ("mistral", "fp8", {"scheme": "dynamic"}, "float-quantized"),
    ("llama", "fp8", {"scheme": "static"}, "float-quantized"),
]


@pytest.mark.parametrize(("family", "method", "options", "layout"), CASES, ids=[f"{f}-{m}" for f, m, *_ in CASES])
def test_artifact_computes_what_the_engine_computed(
    tmp_path: Path, family: str, method: str, options: dict[str, Any], layout: str
) -> None:
    parent = write_model(tmp_path / "parent", family)
    done, stages = quantize(parent, tmp_path / "out", method, **options)
    out = tmp_path / "out"
    probe = read_probe(tmp_path / "out.probe")
    model = loaded(out)
    assert divergence(probe[1], logits(model, probe[0])) < 1e-6
    assert 0 < divergence(logits(loaded(parent), probe[0]), probe[1]) < (0.1 if method in ("awq", "gptq") else 0.02)

    config = json.loads((out / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert quantization["format"] == layout
    assert config == {**json.loads((parent / "config.json").read_text()), "dtype": "float16"}
    written = "".join(path.read_text("utf-8", "replace") for path in out.glob("*.json"))
    assert str(tmp_path) not in written
    assert not any(words in path.read_bytes() for path in out.iterdir() for words in (SECRET.encode(), b"of_tokenizer"))
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                     "tokenizer_config.json", "chat_template.jinja"}  # fmt: skip
    assert (out / "chat_template.jinja").read_text() == TEMPLATE

    tensors = stored(out)
    tied = config["tie_word_embeddings"]
    assert ("lm_head.weight" in tensors) == (not tied)
    linear = {name.removesuffix(".weight") for name in stored(parent) if "_proj.weight" in name}
    assert set(done.layers) == linear - set(options.get("keep", []))
    for name in {"model.embed_tokens", *options.get("keep", []), *([] if tied else ["lm_head"])}:
        assert str(tensors[f"{name}.weight"].dtype) == "torch.float16"
    assert done.engine_s > 0
    assert done.peak_process_bytes > 0
    assert {"quantize", "save"} <= set(stages)
    calibrated = method in ("awq", "gptq", "int8") or options.get("scheme") == "static"
    assert (done.calibration is not None) == calibrated
    layers = config["num_hidden_layers"]
    assert not calibrated or stages.count("quantize") > layers
    assert set(done.losses) == (set(done.layers) if calibrated and method != "awq" else set())


def test_what_the_engine_cannot_do_is_named(tmp_path: Path) -> None:
    parent = write_model(tmp_path / "parent", "qwen2")
    with pytest.raises(QuantlabError, match=r"llmcompressor.*128.*64") as raised:
        quantize(parent, tmp_path / "out", "fp8", scheme="block")
    assert "--skip" in raised.value.hint
