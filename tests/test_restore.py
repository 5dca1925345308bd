"""GGUF -> Hugging Face folder: exact weights, the same token ids as llama.cpp, nothing half written."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator

import gguf
import llama_cpp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from quantlab.core.artifact import content_sha256, read_record, safetensors_header
from quantlab.core.errors import QuantlabError
from quantlab.core.progress import silent
from quantlab.quantize import restore as module
from quantlab.quantize.restore import restore
from tests import tiny_gguf
from tests.tiny_gguf import HEAD_DIM, write_gguf

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def hf_name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, layer, tensor, part = name.split(".")
    return f"model.layers.{layer}.{NAMES[tensor]}.{part}"


def halves(rows: np.ndarray) -> np.ndarray:
    """llama.cpp rotates rows 2i and 2i+1 of a head together, transformers rows i and i + head_dim/2."""
    out = np.empty_like(rows)
    for head in range(0, len(rows), HEAD_DIM):
        for i in range(HEAD_DIM // 2):
            out[head + i] = rows[head + 2 * i]
            out[head + HEAD_DIM // 2 + i] = rows[head + 2 * i + 1]
    return out


@pytest.mark.parametrize(("arch", "tied"), [("llama", True), ("llama", False), ("qwen2", True)])
@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.BF16])
def test_weights_are_the_dequantized_ones(tmp_path, monkeypatch, arch, tied, kind):
    monkeypatch.setattr(module, "_CHUNK_WEIGHTS", 5 * 64)  # several chunks a tensor, a ragged last one
    weights = write_gguf(tmp_path / "m.gguf", arch, pre="qwen2" if arch == "qwen2" else "smollm", tied=tied, kind=kind)
    restore(tmp_path / "m.gguf", tmp_path / "hf", progress=silent)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(stored) == {hf_name(name) for name in weights}
    for name, wide in weights.items():
        rotated = arch == "llama" and name.endswith(("attn_q.weight", "attn_k.weight"))
        expected = (halves(wide) if rotated else wide).astype(np.float16)
        assert stored[hf_name(name)].dtype == np.float16
        np.testing.assert_array_equal(stored[hf_name(name)], expected, err_msg=name)


def test_the_folder_says_what_it_is(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    restore(tmp_path / "m.gguf", tmp_path / "hf", progress=silent)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    wanted = {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": tiny_gguf.N_CTX_TRAIN,
        "tie_word_embeddings": True,
        "vocab_size": len(tiny_gguf.tokens(2)),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in wanted} == wanted
    assert safetensors_header(tmp_path / "hf" / "model.safetensors")
    tokenizer_config = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert tokenizer_config["chat_template"] == tiny_gguf.TEMPLATE
    assert tokenizer_config["eos_token"] == "<|im_end|>"
    record = read_record(tmp_path / "hf")
    assert record is not None
    assert record.note == "weights dequantized from Q4_1 (m.gguf)"
    assert record.sha256 == content_sha256(tmp_path / "hf")


@pytest.fixture(scope="module", params=["smollm", "qwen2"])
def both(request, tmp_path_factory) -> Iterator[tuple[Tokenizer, Callable[[str], list[int]]]]:
    """The restored tokenizer, and llama.cpp's on the same GGUF."""
    folder = tmp_path_factory.mktemp(request.param)
    write_gguf(folder / "m.gguf", pre=request.param)
    restore(folder / "m.gguf", folder / "hf", progress=silent)
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(folder / "m.gguf").encode(), params)
    vocab = llama_cpp.llama_model_get_vocab(model)

    def encode(text: str) -> list[int]:
        data = text.encode()
        buffer = (llama_cpp.llama_token * (len(data) + 8))()
        n = llama_cpp.llama_tokenize(vocab, data, len(data), buffer, len(buffer), True, True)
        assert n >= 0
        return list(buffer[:n])

    yield Tokenizer.from_file(str(folder / "hf" / "tokenizer.json")), encode
    llama_cpp.llama_model_free(model)


PIECES = [*"the in's 12½\n\t.,!?()ÄéñЖ你好🙂", " ", "  ", "\n\n", "<|im_start|>", "<|im_end|>", "<tool>", "I'LL", "मर"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30))
def test_token_ids_equal_llama_cpp(both, pieces):
    tokenizer, encode = both
    text = unicodedata.normalize("NFC", "".join(pieces))
    ids = tokenizer.encode(text).ids
    assert ids == encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_one_id_and_unused_ones_none(both):
    tokenizer, _ = both
    assert [tokenizer.encode(token).ids for token in tiny_gguf.SPECIALS] == [[0], [1], [2]]
    assert tokenizer.token_to_id("[PAD0]") is None
    assert tokenizer.decode([1, 2]) == ""


@pytest.mark.parametrize("adds", [True, False])
def test_bos_is_added_as_the_gguf_says(tmp_path, adds):
    write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.add_bos_token": adds})
    restore(tmp_path / "m.gguf", tmp_path / "hf", progress=silent)
    tokenizer = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    assert (tokenizer.encode("the").ids[0] == 1) is adds
    assert 1 not in tokenizer.encode("the", add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"arch": "gemma3"}, "architecture `gemma3`"),
        ({"pre": "llama-bpe"}, "pre-tokenizer `llama-bpe`"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "rope scaling `yarn`"),
        ({"replace": {"blk.1.attn_norm.weight": np.full(64, np.nan, np.float32)}}, "`blk.1.attn_norm.weight`"),
        ({"replace": {"blk.1.ffn_norm.weight": np.full(64, 1e6, np.float32)}}, "not finite in float16"),
        ({"replace": {"blk.1.ffn_norm.weight": np.ones(32, np.float32)}}, r"has the shape \[32\], not \[64\]"),
        ({"metadata": {"llama.attention.key_length": 32}}, "a part of each head"),
    ],
)
def test_what_cannot_be_restored_is_refused_and_leaves_nothing(tmp_path, options, says):
    write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(QuantlabError, match=says):
        restore(tmp_path / "m.gguf", tmp_path / "hf", progress=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_missing_and_unknown_tensors_are_named(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "n.gguf").write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_ab.weight"))
    with pytest.raises(QuantlabError, match=r"lacks the tensor `blk.1.ffn_up.weight`"):
        restore(tmp_path / "n.gguf", tmp_path / "hf", progress=silent)
    write_gguf(tmp_path / "q.gguf", "qwen2")
    data = (tmp_path / "q.gguf").read_bytes()
    (tmp_path / "q.gguf").write_bytes(data.replace(b"qwen2", b"llama"))
    with pytest.raises(QuantlabError, match=r"`blk.0.attn_q.bias` is not part of `llama`"):
        restore(tmp_path / "q.gguf", tmp_path / "hf", progress=silent)


def test_an_existing_folder_is_kept(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").write_text("x")
    with pytest.raises(QuantlabError, match="exists"):
        restore(tmp_path / "m.gguf", tmp_path / "hf", progress=silent)
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["mine"]


def test_an_interrupted_run_leaves_nothing(tmp_path):
    write_gguf(tmp_path / "m.gguf")

    def interrupt(stage: str, done: float, total: float) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore(tmp_path / "m.gguf", tmp_path / "hf", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
