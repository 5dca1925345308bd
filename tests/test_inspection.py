"""inspect: what is stored, against labels and promises."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from quantlab.core.errors import QuantlabError
from quantlab.core.progress import silent
from quantlab.core.result import Outcome
from quantlab.quantize import inspection, methods
from quantlab.quantize.inspection import label_type
from quantlab.quantize.llama_model import lib
from quantlab.quantize.spec import TYPES, InspectSpec, QuantizeSpec
from tests.tiny_gguf import model_file, stored_tensors, write_wide


def inspect(path: Path) -> Outcome:
    return inspection.run(InspectSpec(model_file(path)), silent)


def codes(outcome: Outcome) -> set[str]:
    return {notice.code for notice in outcome.warnings}


def quantized(path: Path, kind: str) -> Path:
    out = path.with_name(f"{path.stem}-{kind}.gguf")
    methods.run(QuantizeSpec(model_file(path), str(out), threads=1, type=kind), silent)
    return out


def test_a_sound_file(tmp_path: Path) -> None:
    write_wide(tmp_path / "m.gguf", metadata={"tokenizer.ggml.add_bos_token": False})
    outcome = inspect(quantized(tmp_path / "m.gguf", "Q4_K_M"))
    assert codes(outcome) == set()
    details = outcome.details
    assert details["scheme"] == "Q4_K_M" and details["head"] == "tied" and details["chat_template"]
    assert details["record"]["quantlab.parent"] == "m"
    assert details["tokenizer"]["tokens"] == details["tokenizer"]["embedding_rows"]
    assert details["tokenizer"]["pre"] == "smollm"
    assert details["sizes"]["tensors_bytes"] + details["sizes"]["metadata_bytes"] == outcome.model.size_bytes
    assert details["kernels"]["Q4_K"].startswith("CPU_REPACK") and "decided at load" in details["kernels"]["Q4_K"]
    assert outcome.measurements["bits_per_weight"].samples == [outcome.model.bits_per_weight]


def test_a_label_that_most_weights_do_not_carry_is_told(tmp_path: Path) -> None:
    write_wide(tmp_path / "m.gguf", hidden=64, ffn=96)
    path = quantized(tmp_path / "m.gguf", "Q4_K_M")
    [notice] = [notice for notice in inspect(path).warnings if notice.code == "label-content"]
    n = sum(1 for kind, _ in stored_tensors(path).values() if kind == "Q5_0")
    assert f"Q4_K_M: {n} of 20 tensors stored as Q5_0, because 64 and 96 are not" in notice.message
    assert "label-content" not in codes(inspect(quantized(tmp_path / "m.gguf", "Q8_0")))


def test_label_types_are_those_of_the_library() -> None:
    default_type = lib._lib["_Z28llama_ftype_get_default_type11llama_ftype"]
    name = lib._lib["ggml_type_name"]
    name.restype = ctypes.c_char_p
    for label, number in TYPES.items():
        assert label_type(label) == name(default_type(number)).decode().upper(), label


def test_heads(tmp_path: Path) -> None:
    weights = write_wide(tmp_path / "tied.gguf")
    write_wide(tmp_path / "own.gguf", tied=False)
    write_wide(tmp_path / "twice.gguf", tied=False, replace={"output.weight": weights["token_embd.weight"]})
    found = {name: inspect(tmp_path / f"{name}.gguf") for name in ("tied", "own", "twice")}
    assert [found[name].details["head"] for name in found] == ["tied", "separate", "duplicated"]
    assert "tied-head-duplicated" in codes(found["twice"])


@pytest.mark.parametrize("same", [True, False])
def test_a_head_in_another_file_than_the_embedding(same: bool, tmp_path: Path) -> None:
    embedding = np.arange(4096, dtype=np.float32).reshape(64, 64)
    for i, (name, values) in enumerate(
        [("token_embd.weight", embedding), ("output.weight", embedding if same else embedding + 1)], 1
    ):
        out = gguf.GGUFWriter(tmp_path / f"m-0000{i}-of-00002.gguf", "llama")
        out.add_tensor(name, values)
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()
    outcome = inspect(tmp_path / "m-00001-of-00002.gguf")
    assert outcome.details["head"] == ("duplicated" if same else "separate")


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ({"tokenizer.ggml.bos_token_id": 99_999}, "special-token"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": "{{ bos_token }}hi"}, "double-bos"),
    ],
)
def test_tokenizer_faults(metadata: dict[str, Any], code: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_wide(path, metadata=metadata)
    assert code in codes(inspect(path))


def test_a_file_changed_after_it_was_written_is_told(tmp_path: Path) -> None:
    write_wide(tmp_path / "m.gguf")
    path = quantized(tmp_path / "m.gguf", "Q8_0")
    assert "record-differs" not in codes(inspect(path))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "record-differs" in codes(inspect(path))


def folder(path: Path, config: dict[str, Any] | None = None, *, head: bool = False) -> Path:
    path.mkdir()
    tensors = {"model.embed_tokens.weight": np.zeros((10, 4), np.float16), "model.norm.weight": np.ones(4, np.float32)}
    if head:
        tensors["lm_head.weight"] = np.zeros((10, 4), np.float16)
    save_file(tensors, path / "model.safetensors")
    base = {"architectures": ["LlamaForCausalLM"], "vocab_size": 10, "tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(base | (config or {})))
    vocab = {"model": {"vocab": {chr(97 + i): i for i in range(10)}}}
    (path / "tokenizer.json").write_text(json.dumps(vocab))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return path


def test_a_sound_folder(tmp_path: Path) -> None:
    outcome = inspect(folder(tmp_path / "m"))
    assert codes(outcome) == set()
    assert outcome.details["scheme"] == "F16" and outcome.details["head"] == "tied"
    assert outcome.details["tokenizer"]["tokens"] == 10
    assert outcome.model.tensor_types["F16"].params == 40


def test_a_real_folder(stories: Path) -> None:
    outcome = inspect(stories)
    assert outcome.details["scheme"] == "F32"
    assert outcome.details["tokenizer"]["embedding_rows"] == 512


def test_faults_of_a_folder(tmp_path: Path) -> None:
    assert "tied-head-duplicated" in codes(inspect(folder(tmp_path / "a", head=True)))
    untied = inspect(folder(tmp_path / "b", {"tie_word_embeddings": False}, head=True))
    assert untied.details["head"] == "separate" and codes(untied) == set()
    assert "vocabulary-size" in codes(inspect(folder(tmp_path / "c", {"vocab_size": 12})))
    bare = folder(tmp_path / "d")
    (bare / "tokenizer.json").unlink()
    (bare / "tokenizer_config.json").unlink()
    assert codes(inspect(bare)) == {"no-tokenizer", "no-chat-template"}
    moved = folder(tmp_path / "e")
    (moved / "tokenizer_config.json").write_text("{}")
    (moved / "chat_template.jinja").write_text("{{ messages }}")
    assert codes(inspect(moved)) == {"chat-template-file"}


@pytest.mark.parametrize("content", [None, "not json", "[]"])
def test_a_broken_configuration_is_an_error(content: str | None, tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    if content is None:
        (path / "config.json").unlink()
    else:
        (path / "config.json").write_text(content)
    with pytest.raises(QuantlabError, match=r"config\.json"):
        inspect(path)


def test_a_broken_tokenizer_is_an_error(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    (path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(QuantlabError, match=r"tokenizer\.json"):
        inspect(path)


@settings(deadline=3000, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 4000), new=st.binary(min_size=1, max_size=12))
def test_a_hostile_file_is_shown_or_refused(at: int, new: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    if not path.exists():
        write_wide(path, hidden=32, ffn=32, layers=1)
        (tmp_path / "sound").write_bytes(path.read_bytes())
    data = bytearray((tmp_path / "sound").read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(data)
    try:
        outcome = inspect(path)
    except QuantlabError:
        return
    assert msgspec.json.encode(outcome)
