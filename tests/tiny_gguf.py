"""A random llama or qwen2 of a few thousand weights as a GGUF file, and what the gguf package reads back of one.

Columns of 256 fit the blocks of every type; those of `write_gguf`'s own sizes make llama.cpp fall back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from quantlab.core.artifact import content_sha256
from quantlab.core.model import ModelFile

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
HEAD_DIM = HIDDEN // HEADS
N_CTX_TRAIN = 256
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ġ Ġ", "1 2", "ä ½", "' s", "Ċ Ċ"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
F16, F32, Q4_1 = (gguf.GGMLQuantizationType[name] for name in ("F16", "F32", "Q4_1"))


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
    hidden: int = HIDDEN,
    ffn: int = FFN,
    layers: int = LAYERS,
    experts: int = 0,
    tied: bool = True,
    kind: gguf.GGMLQuantizationType = Q4_1,
    metadata: dict[str, bool | int | str] | None = None,
    replace: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write the file; returns the float32 weights that its tensors stand for, by GGUF name, in C order.

    Matrices are stored as `kind`, vectors as F32.
    """
    vocab = tokens(padding=2)
    out = gguf.GGUFWriter(path, arch)
    _write_metadata(out, vocab, pre, hidden, ffn, layers, experts)
    out.add_file_type(gguf.LlamaFileType[{"F32": "ALL_F32"}.get(kind.name, f"MOSTLY_{kind.name}")])
    for key, value in (metadata or {}).items():
        out.kv_data[0].pop(key, None)
        add = out.add_bool if isinstance(value, bool) else out.add_uint32 if isinstance(value, int) else out.add_string
        add(key, value)
    rng = np.random.default_rng(7)
    weights = {}
    for name, shape in _shapes(arch, len(vocab), hidden, ffn, layers, experts, tied=tied).items():
        value = (replace or {}).get(name, rng.standard_normal(shape).astype(np.float32))
        stored_as = kind if value.ndim > 1 and "gate_inp" not in name else F32
        stored = gguf.quants.quantize(value, stored_as)
        weights[name] = gguf.quants.dequantize(stored, stored_as)
        out.add_tensor(name, stored, raw_dtype=stored_as)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return weights


def write_wide(path: Path, **options: Any) -> dict[str, np.ndarray]:
    """`write_gguf` of an F16 model whose columns fit every type."""
    return write_gguf(path, **({"hidden": 256, "ffn": 512, "kind": F16} | options))


def model_file(path: Path) -> ModelFile:
    """The file or folder as a spec names it."""
    return ModelFile(str(path), path.stem, str(path), content_sha256(path))


def stored_tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of every tensor, read by the gguf package."""
    return {t.name: (t.tensor_type.name, t.data.tobytes()) for t in gguf.GGUFReader(path).tensors}


def stored_metadata(path: Path) -> dict[str, object]:
    """The metadata, read by the gguf package."""
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def _write_metadata(
    out: gguf.GGUFWriter, vocab: list[str], pre: str, hidden: int, ffn: int, layers: int, experts: int
) -> None:
    out.add_name("tiny")
    out.add_block_count(layers)
    out.add_context_length(N_CTX_TRAIN)
    out.add_embedding_length(hidden)
    out.add_feed_forward_length(ffn)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_rope_freq_base(100000.0)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(hidden // HEADS)
    if experts:
        out.add_expert_count(experts)
        out.add_expert_used_count(2)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(vocab)
    out.add_token_types([3] * len(SPECIALS) + [4] + [1] * (len(vocab) - len(SPECIALS) - 3) + [5] * 2)
    out.add_token_merges(MERGES)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_chat_template(TEMPLATE)


def _shapes(
    arch: str, vocab: int, hidden: int, ffn: int, layers: int, experts: int, *, tied: bool
) -> dict[str, tuple[int, ...]]:
    kv = hidden // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if not tied:
        shapes["output.weight"] = (vocab, hidden)
    block: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (hidden, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden),
        "attn_output.weight": (hidden, hidden),
        "ffn_norm.weight": (hidden,),
    }
    if experts:
        block |= {
            "ffn_gate_inp.weight": (experts, hidden),
            "ffn_gate_exps.weight": (experts, ffn, hidden),
            "ffn_up_exps.weight": (experts, ffn, hidden),
            "ffn_down_exps.weight": (experts, hidden, ffn),
        }
    else:
        block |= {"ffn_gate.weight": (ffn, hidden), "ffn_up.weight": (ffn, hidden), "ffn_down.weight": (hidden, ffn)}
    if arch == "qwen2":
        block |= {f"attn_{name}.bias": (n,) for name, n in (("q", hidden), ("k", kv), ("v", kv))}
    return shapes | {f"blk.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}
