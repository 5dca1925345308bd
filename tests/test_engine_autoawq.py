"""AutoAWQ, where its own environment is installed (`quantlab engines add autoawq`): never in CI."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from quantlab.core.corpus import Corpus
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.progress import silent
from quantlab.quantize.engines import ENGINES
from quantlab.quantize.engines.environment import state
from quantlab.quantize.torch_work import EngineDone, EngineJob, Samples, Weights
from quantlab.runtime.worker import run_in_child
from tests.hf_folders import change_config, write_folder

TEXT = "the river rises in the hills and the wind turns the mill; the kettle sings. 12 345\n" * 400
KEPT = "model.layers.0.mlp.down_proj"
ENGINE = ENGINES["autoawq"]


def job(folder: Path, weights: Weights) -> EngineJob:
    out = folder.with_name("out")
    out.mkdir()
    return EngineJob(
        method="awq",
        folder=str(folder),
        out=str(out),
        probe=str(folder.with_name("probe")),
        keep=[KEPT],
        device="cpu",
        dtype="float32",
        threads=1,
        seed=0,
        weights=weights,
        calibration=Samples([(Corpus("mill", "0", False, [TEXT]), 1.0)], 4, 64, 0),
    )


def run(made: EngineJob, python: Path | None) -> EngineDone:
    return msgspec.convert(run_in_child(ENGINE.call, msgspec.to_builtins(made), silent, python=python), EngineDone)


@pytest.fixture
def python() -> Path:
    found = state(ENGINE)
    if found.python is None:
        pytest.skip(f"{found.reason}: {found.hint}")
    return Path(found.python)


def write_model(folder: Path) -> Path:
    """A tiny llama whose sizes AutoAWQ's clipping takes (multiples of 64), with an untied head."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=373, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    # The class that transformers 5 names in every tokenizer that it saves.
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "TokenizersBackend"}
    write_folder(folder.with_name("words"), "llama", tokenizer_config=tokens)
    transformers.LlamaForCausalLM(config).half().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder.with_name("words") / name, folder / name)
    change_config(folder, remove=["rope_parameters"], rope_theta=5000.0)
    return folder


def test_artifact_computes_in_transformers_what_the_engine_computed(tmp_path: Path, python: Path) -> None:
    pytest.importorskip("gptqmodel")
    import torch
    import transformers
    from safetensors.numpy import load_file

    parent = write_model(tmp_path / "parent")
    done = run(job(parent, Weights(4, 32, False)), python)
    out = tmp_path / "out"
    kept = load_file(tmp_path / "probe")
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(kept["ids"].astype(np.int64))[None]).logits[0].numpy()
    # The engine computes in float16.
    assert np.abs(logits - kept["logits"]).max() < 0.01
    assert len(done.layers) == 13
    assert KEPT not in done.layers
    config = json.loads((out / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((parent / "config.json").read_text())
    assert quantization["modules_to_not_convert"] == [KEPT]
    assert quantization["version"] == "gemm"
    tensors = load_file(out / "model.safetensors")
    assert tensors[f"{KEPT}.weight"].dtype == tensors["model.embed_tokens.weight"].dtype == np.float16
    assert str(tmp_path) not in "".join(path.read_text() for path in out.glob("*.json"))


def test_what_its_transformers_cannot_read_is_refused(tmp_path: Path, python: Path) -> None:
    write_folder(tmp_path / "parent", "llama", model_type="llama")
    change_config(tmp_path / "parent", remove=["rope_theta"], rope_parameters={"rope_theta": 5.0})
    with pytest.raises(QuantlabError, match="rope_parameters"):
        run(job(tmp_path / "parent", Weights(4, 32, False)), python)


@pytest.mark.parametrize("weights", [Weights(4, 32, True), Weights(4, -1, False), Weights(8, 32, False)])
def test_what_it_does_not_write_is_refused(tmp_path: Path, weights: Weights) -> None:
    with pytest.raises(UsageError, match="zero points"):
        run(job(tmp_path / "parent", weights), None)
