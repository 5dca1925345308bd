"""A random llama or qwen2 of a few thousand weights, as a GGUF file that restore() and llama.cpp read."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
HEAD_DIM = HIDDEN // HEADS
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ġ Ġ", "1 2", "ä ½", "' s", "Ċ Ċ"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte (the table of its encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [letters[b] for b in range(256)]


def tokens(padding: int = 0) -> list[str]:
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*SPECIALS, "<tool>", *byte_letters(), *merged, *(f"[PAD{i}]" for i in range(padding))]


def write_gguf(
    path: Path,
    arch: str = "llama",
    *,
    pre: str = "smollm",
    tied: bool = True,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q4_1,
    metadata: dict[str, bool | int | str] | None = None,
    replace: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write the file; returns the float32 weights that its tensors stand for, by GGUF name, in C order."""
    rng = np.random.default_rng(7)
    vocab = tokens(padding=2)
    out = gguf.GGUFWriter(path, arch)
    out.add_name("tiny")
    out.add_block_count(LAYERS)
    out.add_context_length(128)
    out.add_embedding_length(HIDDEN)
    out.add_feed_forward_length(FFN)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_rope_freq_base(100000.0)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(HEAD_DIM)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(vocab)
    out.add_token_types([3] * len(SPECIALS) + [4] + [1] * (len(vocab) - len(SPECIALS) - 3) + [5] * 2)
    out.add_token_merges(MERGES)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_chat_template(TEMPLATE)
    for key, value in (metadata or {}).items():
        add = out.add_bool if isinstance(value, bool) else out.add_uint32 if isinstance(value, int) else out.add_string
        add(key, value)
    weights = {}
    for name, shape in _shapes(arch, len(vocab), tied=tied).items():
        value = (replace or {}).get(name, rng.standard_normal(shape).astype(np.float32))
        weights[name] = value
        if value.ndim == 2:
            stored = gguf.quants.quantize(value, kind)
            weights[name] = gguf.quants.dequantize(stored, kind)
            out.add_tensor(name, stored, raw_dtype=kind)
        else:
            out.add_tensor(name, value)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return weights


def _shapes(arch: str, vocab: int, *, tied: bool) -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (vocab, HIDDEN)
    for i in range(LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (q, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, q),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
        if arch == "qwen2":
            shapes |= {f"blk.{i}.attn_{name}.bias": (n,) for name, n in (("q", q), ("k", kv), ("v", kv))}
    return shapes
