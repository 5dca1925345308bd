"""Which runtime computes the models of a command, and what a conversion has to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantlab.core import hardware
from quantlab.core.artifact import content_sha256
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.hf_config import kv_values_per_token, quantization
from quantlab.core.model import ModelFile
from quantlab.lab.execute import Lab
from quantlab.lab.runtimes import in_torch
from quantlab.lab.steps import bench_steps, ppl_step
from tests.hf_folders import TRAINING_TEXT, change_config, sentencepiece_protobuf, write_folder
from tests.tiny_gguf import write_gguf


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, and a cache of its own."""
    monkeypatch.setattr(hardware, "nvidia", lambda: (None, None))
    monkeypatch.setattr(hardware, "torch_cuda", lambda: "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("QUANTLAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def plain(tmp_path: Path) -> ModelFile:
    write_folder(tmp_path / "plain", "llama", model_type="llama")
    return model(tmp_path / "plain")


@pytest.fixture
def quantized(tmp_path: Path) -> ModelFile:
    """What config.json says is all that counts here."""
    write_folder(tmp_path / "quantized", "llama", quantization_config={"quant_method": "awq", "bits": 4})
    return model(tmp_path / "quantized")


@pytest.fixture
def gguf(tmp_path: Path) -> ModelFile:
    write_gguf(tmp_path / "tiny.gguf")
    return model(tmp_path / "tiny.gguf")


def model(path: Path) -> ModelFile:
    return ModelFile(str(path), path.stem, str(path), content_sha256(path))


def test_a_plain_folder_follows_its_company(plain: ModelFile, quantized: ModelFile, gguf: ModelFile) -> None:
    assert in_torch([plain], {}) == [False]
    assert in_torch([plain, gguf], {}) == [False, False]
    assert in_torch([quantized], {}) == [True]
    assert in_torch([plain, gguf, quantized], {}) == [True, False, True]
    assert in_torch([plain, gguf], {"dtype": "float16"}) == [True, False]


def test_cuda_takes_folders_where_torch_is(plain: ModelFile, gguf: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "nvidia", lambda: ("RTX 3060", "550.1"))
    assert in_torch([plain, gguf], {}) == [True, False]
    assert in_torch([plain], {"device": "cuda"}) == [True]
    assert in_torch([plain], {"device": "cpu"}) == [False]
    assert in_torch([plain], {"runtime": "llamacpp"}) == [False]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert in_torch([plain], {}) == [False]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert in_torch([plain], {}) == [True]
    # A build of torch for CPUs alone, or none.
    monkeypatch.setattr(hardware, "torch_cuda", lambda: None)
    assert in_torch([plain], {}) == [False]


def test_a_runtime_that_does_not_read_a_model_is_wrong_use(
    plain: ModelFile, quantized: ModelFile, gguf: ModelFile
) -> None:
    assert in_torch([plain, quantized], {"runtime": "torch"}) == [True, True]
    assert in_torch([plain, gguf], {"runtime": "llamacpp"}) == [False, False]
    with pytest.raises(UsageError, match=r"tiny.gguf` is a GGUF file, and torch reads none") as caught:
        in_torch([plain, gguf], {"runtime": "torch"})
    assert "give the folder" in caught.value.hint
    with pytest.raises(UsageError, match=r"quantized` is a folder quantized with awq, and llama.cpp reads none"):
        in_torch([plain, quantized], {"runtime": "llamacpp"})
    with pytest.raises(UsageError, match=r"unknown runtime `llama\.cpp`") as caught:
        in_torch([plain], {"runtime": "llama.cpp"})
    assert "llamacpp" in caught.value.hint
    with pytest.raises(UsageError, match="`--dtype float16` is torch's"):
        in_torch([gguf], {"dtype": "float16"})


def test_a_parent_runs_as_its_model_does(plain: ModelFile, quantized: ModelFile, gguf: ModelFile) -> None:
    lab = Lab(None, offline=True)
    assert lab.parent(plain, quantized, {}) == plain
    assert lab.parent(gguf, quantized, {}) == gguf
    assert lab.parent(quantized, gguf, {}) == quantized
    as_gguf = lab.parent(plain, gguf, {})
    assert (as_gguf.label, Path(as_gguf.path).suffix) == ("plain-F16", ".gguf")
    assert lab.runnables([plain, gguf], {}) == [as_gguf, gguf]
    assert lab.runnables([plain, quantized, gguf], {}) == [plain, quantized, gguf]
    with pytest.raises(UsageError, match="torch reads none"):
        lab.parent(gguf, plain, {"runtime": "torch"})


def test_specs_hold_what_the_runtime_heeds(plain: ModelFile, gguf: ModelFile) -> None:
    options = {"runtime": "auto", "dtype": "bfloat16"}
    assert ppl_step(plain, options).spec.dtype == "bfloat16"
    assert ppl_step(gguf, options).spec.dtype == "auto"
    assert ppl_step(gguf, {**options, "against": plain}).spec.dtype == "bfloat16"
    assert [step.spec.dtype for step in bench_steps([gguf, plain], options)] == ["bfloat16"]
    for step in (lambda options: ppl_step(plain, options), lambda options: list(bench_steps([plain], options))):
        with pytest.raises(UsageError, match="unknown dtype `float61`") as caught:
            step({"dtype": "float61"})
        assert "`float16`" in caught.value.hint
        with pytest.raises(UsageError, match="unknown runtime `torsh`"):
            step({"runtime": "torsh"})


def test_what_a_conversion_warned_of_is_in_every_result(tmp_path: Path) -> None:
    folder = tmp_path / "unchecked"
    write_folder(folder, "llama", model_type="llama")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(sentencepiece_protobuf())
    (tmp_path / "text.txt").write_text(TRAINING_TEXT)
    codes = []
    for _ in ("converted", "from the cache"):
        lab = Lab(None, offline=True)
        [file] = lab.runnables([str(folder)], {})
        step = ppl_step(file, {"data": str(tmp_path / "text.txt"), "n_ctx": 16, "limit": 1, "threads": 1})
        [result] = lab.execute(step)
        codes.append([notice.code for notice in result.warnings if notice.code.startswith("tokenizer")])
    assert codes == [["tokenizer-unchecked"]] * 2


def test_a_folder_that_gguf_cannot_hold_is_shown_the_other_way(tmp_path: Path) -> None:
    write_folder(tmp_path / "odd", "llama")
    change_config(tmp_path / "odd", architectures=["GPT2LMHeadModel"])
    with pytest.raises(QuantlabError, match="GPT2LMHeadModel") as caught:
        Lab(None, offline=True).runnables([str(tmp_path / "odd")], {})
    assert caught.value.hint.endswith("; or run the folder itself: `--runtime torch`")


def test_sizes_of_a_config(tmp_path: Path, quantized: ModelFile) -> None:
    folder = Path(quantized.path)
    assert quantization(folder) == {"quant_method": "awq", "bits": 4}
    # Two of four heads of 16, three layers.
    assert kv_values_per_token(folder) == 2 * 3 * 2 * 16
    change_config(folder, remove=["num_key_value_heads", "quantization_config"], head_dim=32)
    assert kv_values_per_token(folder) == 2 * 3 * 4 * 32
    assert quantization(folder) is None
    change_config(folder, text_config={"num_hidden_layers": 1, "quantization_config": {"quant_method": "fp8"}})
    assert kv_values_per_token(folder) == 2 * 1 * 4 * 32
    assert quantization(folder) == {"quant_method": "fp8"}
    for wrong in ({"num_hidden_layers": "many"}, {"num_hidden_layers": -1}):
        change_config(folder, text_config=wrong)
        with pytest.raises(QuantlabError, match="does not describe a language model"):
            kv_values_per_token(folder)
