"""HF folder -> GGUF: every tensor at its place with its value, what llama.cpp computes from it, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from quantlab.core.errors import QuantlabError
from quantlab.core.gguf_file import read_header
from quantlab.quantize.convert import convert
from quantlab.quantize.convert.external import convert_with
from quantlab.runtime.backend import Batch, Capacity
from quantlab.runtime.llamacpp import LlamaCppBackend
from tests.full_disk import limited_files
from tests.hf_folders import (
    CONFIGS,
    HEADS,
    HIDDEN,
    change_config,
    config,
    forward,
    narrow,
    random_weights,
    sentencepiece_tokenizer,
    write_folder,
    write_safetensors,
    write_weights,
)

FAMILIES = list(CONFIGS)
VOCAB = sentencepiece_tokenizer().get_vocab_size()
# The names of ggml's tensors by those of transformers, written down by hand.
GGUF_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}  # fmt: skip
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(family: str, name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in outer:
        return f"{outer[stem]}.{suffix}"
    layer, _, inner = stem.removeprefix("model.layers.").partition(".")
    names = GGUF_NAMES | (GEMMA_NAMES if family == "gemma3" else {})
    return f"blk.{layer}.{names[inner]}.{suffix}"


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + half of a head become rows 2i and 2i + 1, one at a time."""
    size = len(values) // heads
    out = np.empty_like(values)
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = values[head * size + i]
            out[head * size + 2 * i + 1] = values[head * size + size // 2 + i]
    return out


def expected_values(family: str, c: dict[str, Any], name: str, values: np.ndarray) -> np.ndarray:
    if family in ("llama", "mistral"):
        if ".q_proj." in name:
            return interleaved(values, HEADS)
        if ".k_proj." in name:
            return interleaved(values, c["num_key_value_heads"])
    return values + np.float32(1) if family == "gemma3" and "norm" in name else values


def stored_bits(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Type and bits of every tensor, rows first."""
    data = np.memmap(path, np.uint8, "r")
    found = {}
    for tensor in read_header(path).tensors:
        kind = "<u4" if tensor.type == "F32" else "<u2"
        bits = data[tensor.offset : tensor.offset + tensor.size_bytes].view(kind)
        found[tensor.name] = (tensor.type, np.array(bits).reshape(tensor.shape[::-1]))
    return found


def refusal(folder: Path, outtype: str = "F16") -> QuantlabError:
    with pytest.raises(QuantlabError) as caught:
        convert(folder, folder / "out.gguf", outtype=outtype)
    return caught.value


@pytest.mark.parametrize("outtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_at_its_place(tmp_path: Path, family: str, outtype: str) -> None:
    source = {"llama": "F32", "mistral": "BF16", "qwen2": "F16"}.get(family, "BF16")
    weights = write_folder(tmp_path / "hf", family, kind=source, shards=3 if family == "mistral" else 1)
    convert(tmp_path / "hf", tmp_path / "out.gguf", outtype=outtype)
    found = stored_bits(tmp_path / "out.gguf")
    assert set(found) == {gguf_name(family, name) for name in weights}
    c = json.loads((tmp_path / "hf" / "config.json").read_text())
    for name, values in weights.items():
        kind, bits = found[gguf_name(family, name)]
        assert kind == ("F32" if values.ndim == 1 else outtype), name
        np.testing.assert_array_equal(bits, narrow(expected_values(family, c, name, values), kind), err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_what_transformers_defines(tmp_path: Path, family: str) -> None:
    weights = write_folder(tmp_path / "hf", family)
    convert(tmp_path / "hf", tmp_path / "out.gguf", outtype="F32", extra_metadata={"general.name": "tiny"})
    ids = np.random.default_rng(3).integers(3, VOCAB, 40).astype(np.int32)
    expected = forward(family, json.loads((tmp_path / "hf" / "config.json").read_text()), weights, ids)
    backend = LlamaCppBackend(tmp_path / "out.gguf", Capacity(n_ctx=64), device="cpu", threads=1)
    try:
        got = backend.forward(Batch.of(0, ids, 0, logits="all")).copy()
    finally:
        backend.close()
    # The KV cache and ggml's gelu are float16; a wrong row order or norm is off by the logits' own spread.
    assert np.abs(got - expected).max() < 0.02 * expected.std()


def metadata(folder: Path) -> dict[str, Any]:
    out = folder.parent / f"{folder.name}.gguf"
    convert(folder, out, outtype="F16", header_only=True)
    return read_header(out).metadata


def test_numbers_of_the_architecture(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", "mistral")
    found = metadata(tmp_path / "hf")
    wanted = {
        "general.architecture": "llama", "general.type": "model", "general.file_type": 1,
        "general.quantization_version": 2, "llama.block_count": 3, "llama.context_length": 256,
        "llama.embedding_length": HIDDEN, "llama.feed_forward_length": 96, "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": 2, "llama.attention.key_length": 32, "llama.attention.value_length": 32,
        "llama.rope.dimension_count": 32, "llama.rope.freq_base": 10000.0, "llama.vocab_size": VOCAB,
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    assert {key: found.get(key) for key in wanted} == wanted


def test_the_folder_and_the_caller_name_the_model(tmp_path: Path) -> None:
    write_folder(tmp_path / "My-Model", "qwen3")
    (tmp_path / "My-Model" / "README.md").write_text("---\nlicense: apache-2.0\ntags: [tiny]\n---\nText.\n")
    (tmp_path / "My-Model" / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7}')
    found = metadata(tmp_path / "My-Model")
    assert (found["general.name"], found["general.license"]) == ("My Model", "apache-2.0")
    assert (found["general.sampling.temp"], found["general.sampling.top_k"]) == (0.5, 7)
    (tmp_path / "My-Model" / "README.md").write_text("---\n: [not yaml\n---\n")
    extra = {"general.name": "given", "quantlab.parent": "org/name"}
    convert(tmp_path / "My-Model", tmp_path / "x.gguf", outtype="F16", extra_metadata=extra)
    found = read_header(tmp_path / "x.gguf").metadata
    assert (found["general.name"], found["quantlab.parent"]) == ("given", "org/name")


def test_a_commit_for_a_folder_name_is_no_fine_tune(tmp_path: Path) -> None:
    commit = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
    write_folder(tmp_path / commit, "qwen3")
    convert(tmp_path / commit, tmp_path / "o.gguf", outtype="F16", extra_metadata={"general.name": "given"})
    assert commit not in read_header(tmp_path / "o.gguf").metadata.values()


def test_rotary_parameters_of_both_versions_of_transformers(tmp_path: Path) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5}
    write_folder(tmp_path / "old", "qwen2", rope_theta=5e5, rope_scaling={"type": "yarn", **scaling})
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    new = {"rope_type": "yarn", "rope_theta": 5e5, **scaling}
    change_config(tmp_path / "new", ["rope_theta", "rope_scaling"], rope_parameters=new)
    old, new = metadata(tmp_path / "old"), metadata(tmp_path / "new")
    del old["general.name"], new["general.name"]
    assert old == new
    assert old["qwen2.rope.scaling.type"] == "yarn"
    assert (old["qwen2.rope.freq_base"], old["qwen2.rope.scaling.factor"]) == (5e5, 4.0)
    assert old["qwen2.rope.scaling.original_context_length"] == 64
    # llama.cpp multiplies by 1 + 0.1 ln(factor) itself.
    assert old["qwen2.rope.scaling.attn_factor"] == pytest.approx(1.5 / (1 + 0.1 * np.log(4.0)), rel=1e-6)


def test_llama3_factors_follow_the_published_rule(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    write_folder(tmp_path / "hf", "llama", head_dim=HIDDEN // HEADS, rope_scaling=rope, rope_theta=5e5)
    convert(tmp_path / "hf", tmp_path / "out.gguf", outtype="F16")
    kind, bits = stored_bits(tmp_path / "out.gguf")["rope_freqs.weight"]
    expected = []
    for i in range(HIDDEN // HEADS // 2):
        wavelength = 2 * np.pi * 5e5 ** (2 * i / (HIDDEN // HEADS))
        smooth = (64 / wavelength - 1) / 3
        expected.append(1 if wavelength < 16 else 8 if wavelength > 64 else 1 / ((1 - smooth) / 8 + smooth))
    assert kind == "F32" and {1.0, 8.0} < set(expected)
    np.testing.assert_allclose(bits.view("<f4"), expected, rtol=1e-5)


def test_longrope_factors_and_partial_rotation_of_phi3(tmp_path: Path) -> None:
    long, short = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    scaling = {"type": "longrope", "long_factor": long, "short_factor": short}
    changed = {"rope_scaling": scaling, "partial_rotary_factor": 0.75, "max_position_embeddings": 1024}
    write_folder(tmp_path / "hf", "phi3", **changed)
    convert(tmp_path / "hf", tmp_path / "out.gguf", outtype="F16")
    found, tensors = read_header(tmp_path / "out.gguf").metadata, stored_bits(tmp_path / "out.gguf")
    np.testing.assert_array_equal(tensors["rope_factors_long.weight"][1].view("<f4"), np.float32(long))
    np.testing.assert_array_equal(tensors["rope_factors_short.weight"][1].view("<f4"), np.float32(short))
    assert found["phi3.rope.dimension_count"] == 12
    assert found["phi3.rope.scaling.original_context_length"] == 256
    assert found["phi3.rope.scaling.attn_factor"] == pytest.approx(np.sqrt(1 + np.log(4) / np.log(256)))
    change_config(tmp_path / "hf", rope_scaling={**scaling, "short_factor": short[:-1]})
    assert "`short_factor` must list 6 numbers" in refusal(tmp_path / "hf").message


def test_layers_with_a_window_of_gemma3(tmp_path: Path) -> None:
    write_folder(tmp_path / "usual", "gemma3")
    found = metadata(tmp_path / "usual")
    assert (found["gemma3.attention.sliding_window"], found["gemma3.rope.freq_base_swa"]) == (8, 1000.0)
    assert "gemma3.attention.sliding_window_pattern" not in found
    kinds = ["full_attention", "sliding_attention"] * 3 + ["full_attention"]
    write_folder(tmp_path / "other", "gemma3", layer_types=kinds)
    pattern = metadata(tmp_path / "other")["gemma3.attention.sliding_window_pattern"]
    assert pattern == [kind == "sliding_attention" for kind in kinds]
    change_config(tmp_path / "other", layer_types=["full_attention"] * 7, final_logit_softcapping=30.0)
    found = metadata(tmp_path / "other")
    assert found["gemma3.final_logit_softcapping"] == 30.0
    assert not any("sliding" in key or "swa" in key for key in found)
    change_config(tmp_path / "other", layer_types=kinds[1:])
    assert "6 `layer_types` for 7 layers" in refusal(tmp_path / "other").message


def test_the_text_model_of_a_multimodal_gemma3(tmp_path: Path) -> None:
    c = config("gemma3", VOCAB)
    weights = random_weights("gemma3", c)
    write_folder(tmp_path / "plain", "gemma3", weights=weights)
    for folder, prefix in (("old", "language_model.{}"), ("new", "{}")):
        shutil.copytree(tmp_path / "plain", tmp_path / folder)
        inner = {key: value for key, value in c.items() if key != "architectures"}
        whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner, "vision_config": {}}
        (tmp_path / folder / "config.json").write_text(json.dumps(whole))
        named = {
            prefix.format(n if folder == "old" else n.replace("model.", "model.language_model.")): v
            for n, v in weights.items()
        }
        vision = {f"{'' if folder == 'v4' else 'model.'}vision_tower.x.weight": np.ones((4, 4), np.float32)}
        write_weights(tmp_path / folder, named | vision)
    texts = {}
    for folder in ("plain", "old", "new"):
        convert(tmp_path / folder, tmp_path / "out.gguf", outtype="F16", extra_metadata={"general.name": "x"})
        texts[folder] = (tmp_path / "out.gguf").read_bytes()
    assert texts["plain"] == texts["old"] == texts["new"]


def test_a_head_that_repeats_the_embedding_is_not_stored_twice(tmp_path: Path) -> None:
    weights = random_weights("llama", config("llama", VOCAB))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    for tied in (True, False):
        write_folder(tmp_path / "hf", "llama", weights=weights, tie_word_embeddings=tied)
        convert(tmp_path / "hf", tmp_path / "out.gguf", outtype="F16")
        assert "output.weight" not in {tensor.name for tensor in read_header(tmp_path / "out.gguf").tensors}
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    write_folder(tmp_path / "hf", "llama", weights=weights, tie_word_embeddings=True)
    assert "`lm_head.weight` differs from `model.embed_tokens.weight`" in refusal(tmp_path / "hf").message
    del weights["lm_head.weight"]
    write_folder(tmp_path / "hf", "llama", weights=weights)
    assert "missing: `lm_head.weight`" in refusal(tmp_path / "hf").message
    # A config.json that does not say is taken at what the weights say.
    change_config(tmp_path / "hf", ["tie_word_embeddings"])
    convert(tmp_path / "hf", tmp_path / "out.gguf", outtype="F16")


def test_the_same_weights_under_a_second_name_are_left_out(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", "llama")
    convert(tmp_path / "hf", tmp_path / "one.gguf", outtype="F16")
    write_safetensors(tmp_path / "hf" / "consolidated.safetensors", {"tok": ("F32", np.zeros((2, 2), "<u4"))})
    convert(tmp_path / "hf", tmp_path / "two.gguf", outtype="F16")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


def test_header_only_plans_the_same_file(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", "llama")
    convert(tmp_path / "hf", tmp_path / "full.gguf", outtype="F16")
    convert(tmp_path / "hf", tmp_path / "plan.gguf", outtype="F16", header_only=True)
    full, plan = read_header(tmp_path / "full.gguf"), read_header(tmp_path / "plan.gguf")
    assert full == msgspec.structs.replace(plan, path=full.path)


def test_progress_grows_to_the_end(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", "llama")
    seen: list[tuple[float, float]] = []
    convert(
        tmp_path / "hf", tmp_path / "o.gguf", outtype="F16", progress=lambda _, done, total: seen.append((done, total))
    )
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]


def test_disk_full_is_found_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "hf", "llama")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))
    assert "free" in refusal(tmp_path / "hf").message
    assert not (tmp_path / "hf" / "out.gguf").exists()


def test_a_disk_that_fills_up_is_told_without_the_passing_name(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", "llama")
    with limited_files(100_000):
        message = refusal(tmp_path / "hf").message
    assert "File too large" in message and "out.gguf" not in message


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def configured(**changed: Any) -> Callable[[Path], None]:
    return lambda folder: change_config(folder, **changed)


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def broken_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:8] + b"x" + path.read_bytes()[9:])


def extra_tensor(folder: Path) -> None:
    c = config("llama", VOCAB)
    write_weights(folder, random_weights("llama", c) | {"model.layers.0.self_attn.sinks": np.ones(4, np.float32)})


def lost_tensor(folder: Path) -> None:
    weights = random_weights("llama", config("llama", VOCAB))
    del weights["model.layers.1.mlp.up_proj.weight"]
    write_weights(folder, weights)


def quantized_tensor(folder: Path) -> None:
    weights = {n: ("F32", v.view("<u4")) for n, v in random_weights("llama", config("llama", VOCAB)).items()}
    name = "model.layers.0.mlp.up_proj.weight"
    write_safetensors(folder / "model.safetensors", weights | {name: ("I8", np.zeros((96, 64), np.uint8))})


def only_an_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


@pytest.mark.parametrize(
    ("spoil", "message", "hint"),
    [
        (remove("config.json"), "no config.json", "Hugging Face"),
        (only_an_adapter, "is an adapter", "merge it"),
        (remove("model.safetensors"), "no *.safetensors", "safetensors"),
        (remove("tokenizer.json"), "neither tokenizer.json nor tokenizer.model", "download"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON", "again"),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{}"),
            "no counterpart of the model None",
            "--converter",
        ),
        (configured(architectures=["BertForMaskedLM"]), "`BertForMaskedLM`", "LlamaForCausalLM"),
        (configured(architectures=["GraniteForCausalLM"]), "`GraniteForCausalLM`", "--converter"),
        (configured(architectures=["CLIPVisionModel"]), "no text-generating model", "LlamaForCausalLM"),
        (configured(architectures=[]), "names no architecture", "architectures"),
        (configured(quantization_config={"quant_method": "awq"}), "quantization_config: awq", "quantized from"),
        (configured(hidden_act="relu"), "activation is `relu`", "exactly"),
        (configured(rope_scaling={"rope_type": "ntk_parts"}), "`ntk_parts` is not known", "--converter"),
        (configured(rope_scaling={"type": "yarn", "factor": 2.0, "beta_fast": 8}), "`beta_fast` is 8", "without it"),
        (configured(rope_scaling={"type": "linear"}), "`factor` is None", "positive"),
        (
            lambda folder: (folder / "generation_config.json").write_text('{"top_k": "x"}'),
            "cannot be stored",
            "generation",
        ),
        (configured(rope_theta="big"), "`rope_theta` is 'big'", "positive"),
        (configured(num_hidden_layers=10**9), "says 1000000000 layers", "download"),
        (configured(num_hidden_layers="many"), "`num_hidden_layers` is 'many'", "whole number"),
        (configured(num_attention_heads=3, head_dim=16), "3 heads of 16 do not fit 2", "config.json"),
        (configured(intermediate_size=100), "has the shape [64, 96], config.json says [64, 100]", "another model"),
        (configured(vocab_size=VOCAB + 5), "`model.embed_tokens.weight` has the shape", "another model"),
        (cut_short, "is truncated", "again"),
        (broken_header, "header is damaged", "again"),
        (extra_tensor, "without a place in llama: `model.layers.0.self_attn.sinks`", "another architecture"),
        (lost_tensor, "missing: `model.layers.1.mlp.up_proj.weight`", "again"),
        (quantized_tensor, "`model.layers.0.mlp.up_proj.weight` is stored as I8", "quantized"),
    ],
)
def test_bad_folders_are_refused(tmp_path: Path, spoil: Callable[[Path], Any], message: str, hint: str) -> None:
    folder = tmp_path / "hf"
    write_folder(folder, "llama")
    spoil(folder)
    error = refusal(folder)
    assert message in error.message
    assert hint in error.hint


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        ("gemma3", {"query_pre_attn_scalar": 64}, "`query_pre_attn_scalar` is 64"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping` is set"),
        ("gemma3", {"hidden_activation": "silu"}, "activation is `silu`"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "`high_freq_factor` 4.0 is not above",
        ),
        ("qwen2", {"head_dim": 32}, "4 heads of 32 are not the 64"),
        ("qwen3", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "`llama3` is not known for qwen3"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is 0.5"),
        ("mistral", {"rope_parameters": [1]}, "rotary parameters are [1]"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    tmp_path: Path, family: str, changed: dict[str, Any], message: str
) -> None:
    write_folder(tmp_path / "hf", family)
    change_config(tmp_path / "hf", **changed)
    assert message in refusal(tmp_path / "hf").message


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(QuantlabError, match="is no folder"):
        convert(tmp_path / "nowhere", tmp_path / "out.gguf", outtype="F16")


def test_stories_tells_the_same_story_to_llama_cpp(stories: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    convert(stories, tmp_path / "s.gguf", outtype="F32")
    c = json.loads((stories / "config.json").read_text()) | {"rope_theta": 10000.0}
    backend = LlamaCppBackend(tmp_path / "s.gguf", Capacity(n_ctx=64), device="cpu", threads=1)
    try:
        ids = backend.encode("Once upon a time there was a little dog named Tim.", bos=True)
        got = backend.forward(Batch.of(0, ids, 0, logits="all")).copy()
    finally:
        backend.close()
    weights = load_file(stories / "model.safetensors")
    expected = forward_of_other_size(c, weights, ids)
    assert np.abs(got - expected).max() < 0.02 * expected.std()


def forward_of_other_size(c: dict[str, Any], weights: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    import tests.hf_folders as sizes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "HIDDEN", c["hidden_size"])
        patch.setattr(sizes, "HEADS", c["num_attention_heads"])
        return forward("llama", c, weights, ids)


WRITES = """
import argparse, pathlib, shutil, sys
import beside
p = argparse.ArgumentParser()
p.add_argument("model"); p.add_argument("--outfile"); p.add_argument("--outtype")
a = p.parse_args()
assert a.outtype == "bf16" and pathlib.Path(a.model).is_dir()
shutil.copy(beside.MADE, a.outfile)
"""


def test_a_converter_of_the_user(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", "llama")
    convert(tmp_path / "hf", tmp_path / "made.gguf", outtype="BF16")
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text(WRITES)
    # The real script imports modules beside it.
    (tmp_path / "beside.py").write_text(f"MADE = {str(tmp_path / 'made.gguf')!r}")
    convert_with(script, tmp_path / "hf", tmp_path / "out.gguf", outtype="BF16")
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "made.gguf").read_bytes()


def test_a_converter_that_fails_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "c.py"
    script.write_text("import sys\nprint('loading', file=sys.stderr)\nraise SystemExit('no torch here')")
    with pytest.raises(QuantlabError, match=r"ended with code 1: loading \| no torch here"):
        convert_with(script, tmp_path, tmp_path / "out.gguf", outtype="F16")
    script.write_text("import sys; open(sys.argv[3], 'wb').write(b'GGUF')")
    with pytest.raises(QuantlabError, match="not a GGUF file"):
        convert_with(script, tmp_path, tmp_path / "out.gguf", outtype="F16")
    with pytest.raises(QuantlabError, match="does not exist"):
        convert_with(tmp_path / "none.py", tmp_path, tmp_path / "out.gguf", outtype="F16")


def test_a_converter_ends_with_a_killed_run(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text("import os, sys, time\nopen(sys.argv[3], 'w').write(str(os.getpid()))\ntime.sleep(60)")
    call = (
        "from pathlib import Path; from quantlab.quantize.convert.external import convert_with; "
        f"convert_with(Path({str(script)!r}), Path('.'), Path({str(tmp_path / 'out')!r}), outtype='F16')"
    )
    parent = subprocess.Popen([sys.executable, "-c", call])
    until = time.monotonic() + 30
    while not (text := (tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""):
        assert time.monotonic() < until
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    while psutil.pid_exists(int(text)) and psutil.Process(int(text)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.02)
