"""A random llama as GGUF whose width the test chooses: 256 fits every block, 64 forces llama.cpp to fall back."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from quantlab.core.artifact import content_sha256
from quantlab.core.model import ModelFile
from tests.tiny_gguf import MERGES, SPECIALS, TEMPLATE, tokens

HEADS, KV_HEADS, LAYERS = 4, 2, 2


def write_model(
    path: Path,
    *,
    hidden: int = 256,
    ffn: int = 512,
    kind: str = "F16",
    tied: bool = True,
    experts: int = 0,
    layers: int = LAYERS,
    metadata: dict[str, bool | int | str] | None = None,
    replace: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Write the file and return its weights as float32; `kind` is F16, BF16 or F32, vectors are always F32."""
    rng = np.random.default_rng(11)
    vocab = tokens(padding=2)
    out = gguf.GGUFWriter(path, "llama")
    out.add_name("tiny")
    out.add_file_type(gguf.LlamaFileType[{"F32": "ALL_F32"}.get(kind, f"MOSTLY_{kind}")])
    out.add_block_count(layers)
    out.add_context_length(256)
    out.add_embedding_length(hidden)
    out.add_feed_forward_length(ffn)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(hidden // HEADS)
    if experts:
        out.add_expert_count(experts)
        out.add_expert_used_count(2)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(vocab)
    out.add_token_types([3] * len(SPECIALS) + [4] + [1] * (len(vocab) - len(SPECIALS) - 3) + [5] * 2)
    out.add_token_merges(MERGES)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_chat_template(TEMPLATE)
    for key, value in (metadata or {}).items():
        out.kv_data[0].pop(key, None)
        add = out.add_bool if isinstance(value, bool) else out.add_uint32 if isinstance(value, int) else out.add_string
        add(key, value)
    weights = {}
    for name, shape in _shapes(len(vocab), hidden, ffn, experts, layers, tied=tied).items():
        value = (replace or {}).get(name)
        if value is None:
            spread = rng.standard_normal(shape).astype(np.float32)
            value = 1 + 0.1 * spread if len(shape) == 1 else spread / np.sqrt(shape[-1]).astype(np.float32)
        wanted = gguf.GGMLQuantizationType[kind if len(shape) > 1 and "gate_inp" not in name else "F32"]
        stored = gguf.quants.quantize(value.astype(np.float32), wanted)
        weights[name] = gguf.quants.dequantize(stored, wanted)
        out.add_tensor(name, stored, raw_dtype=wanted)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return weights


def model_file(path: Path) -> ModelFile:
    """The file or folder as a spec names it."""
    return ModelFile(str(path), path.stem, str(path), content_sha256(path))


def stored_tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of every tensor, read by the gguf package."""
    return {t.name: (t.tensor_type.name, t.data.tobytes()) for t in gguf.GGUFReader(path).tensors}


def stored_metadata(path: Path) -> dict[str, object]:
    """The metadata, read by the gguf package."""
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def _shapes(vocab: int, hidden: int, ffn: int, experts: int, layers: int, *, tied: bool) -> dict[str, tuple[int, ...]]:
    kv = hidden // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if not tied:
        shapes["output.weight"] = (vocab, hidden)
    for i in range(layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "attn_q": (hidden, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, hidden),
            "ffn_norm": (hidden,),
        }
        if experts:
            block |= {
                "ffn_gate_inp": (experts, hidden),
                "ffn_gate_exps": (experts, ffn, hidden),
                "ffn_up_exps": (experts, ffn, hidden),
                "ffn_down_exps": (experts, hidden, ffn),
            }
        else:
            block |= {"ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden), "ffn_down": (hidden, ffn)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    return shapes
