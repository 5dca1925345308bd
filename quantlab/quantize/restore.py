"""GGUF -> a Hugging Face folder that transformers loads: weights dequantized to float16, configuration, tokenizer.

What quantization lost stays lost; the record in the folder says what the weights were dequantized from. Formats:
ggml docs/gguf.md, https://huggingface.co/docs/safetensors. The q and k rows of llama are interleaved for ggml's
rotary embedding and are put back in halves here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from quantlab import __version__
from quantlab.core.artifact import Record, content_sha256, write_record
from quantlab.core.errors import QuantlabError, missing_extra
from quantlab.core.files import check_space, sha256_file, written_folder
from quantlab.core.gguf_file import GGUFHeader, TensorInfo, read_header
from quantlab.core.progress import Progress
from quantlab.quantize.restore_tokenizer import known_pre_tokenizer, write_tokenizer

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
# Weights dequantized at a time: bounds the float32 copy to 32 MB, whatever the size of the tensor.
_CHUNK_WEIGHTS = 1 << 23


def restore(gguf: Path, folder: Path, *, progress: Progress) -> None:
    """Write the model of `gguf` (llama or qwen2) into the new folder `folder`, every tensor in float16.

    The folder appears only when it is complete. Raises QuantlabError where it exists, and for an architecture,
    tensor, type or tokenizer that cannot be restored exactly.
    """
    header = read_header(gguf)
    config = _config(header)
    plan = _plan(header, config)
    with written_folder(folder) as temporary:
        check_space(temporary, 2 * sum(t.params for t in header.tensors))
        special = write_tokenizer(header.metadata, temporary, n_ctx_train=config["max_position_embeddings"])
        ids = {f"{name}_token_id": i for name, i in special.items() if name != "unk"}
        _write_json(temporary / "config.json", config | ids)
        _write_json(temporary / "generation_config.json", ids)
        with (temporary / "model.safetensors").open("wb") as out:
            _write_weights(gguf, plan, config, out, progress)
        record = Record(
            quantlab=__version__,
            method="none",
            asked={},
            parent=gguf.name,
            parent_sha256=sha256_file(gguf),
            sha256=content_sha256(temporary),
            note=f"weights dequantized from {_types(header)} ({gguf.name})",
        )
        write_record(temporary, record)


def restored_shapes(gguf: Path) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """config.json, without the ids of special tokens, and the shape of each tensor, of what `restore` would write.

    Read from the header; raises QuantlabError where `restore` would refuse it.
    """
    header = read_header(gguf)
    config = _config(header)
    known_pre_tokenizer(header.metadata)
    return config, {name: tuple(reversed(tensor.shape)) for name, tensor in _plan(header, config)}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _types(header: GGUFHeader) -> str:
    """The quantized types, the one with the most weights first."""
    params: dict[str, int] = {}
    for tensor in header.tensors:
        params[tensor.type] = params.get(tensor.type, 0) + tensor.params
    kinds = [kind for kind in sorted(params, key=lambda kind: -params[kind]) if kind != "F32"]
    return " and ".join(kinds) or "F32"


def _config(header: GGUFHeader) -> dict[str, Any]:
    """config.json, without the ids of special tokens."""
    metadata = header.metadata
    arch = metadata.get("general.architecture")
    if arch not in _CLASSES:
        known = " and ".join(f"`{name}`" for name in _CLASSES)
        raise QuantlabError(f"the architecture `{arch}` cannot be restored, only {known}", "use the original model")
    if (scaling := metadata.get(f"{arch}.rope.scaling.type", "none")) != "none":
        raise QuantlabError(f"rope scaling `{scaling}` cannot be restored", "use the original model folder")

    def number(key: str, default: float | None = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if not isinstance(value, int | float) or not value > 0:
            raise QuantlabError(f"`{arch}.{key}` of the GGUF file is {value!r}", "download the file again")
        # GGUF stores float32: 9.999999747378752e-06 was written as 1e-05.
        return value if isinstance(value, int) else float(f"{value:.7g}")

    hidden, heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", hidden // heads)
    if number("rope.dimension_count", head_dim) != head_dim:
        raise QuantlabError("rotary embeddings of a part of each head cannot be restored", "use the original model")
    return {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "torch_dtype": "float16",
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens", ())),
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base", 10000.0),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in header.tensors),
    }


def _plan(header: GGUFHeader, config: dict[str, Any]) -> list[tuple[str, TensorInfo]]:
    """Each tensor beside its Hugging Face name; refuses missing, unknown and misshapen ones."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    layers = config["num_hidden_layers"]
    expected = {
        "token_embd.weight": ("model.embed_tokens.weight", (hidden, vocab)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        expected["output.weight"] = ("lm_head.weight", (hidden, vocab))
    block = {
        "attn_norm.weight": ("input_layernorm.weight", (hidden,)),
        "attn_q.weight": ("self_attn.q_proj.weight", (hidden, q)),
        "attn_k.weight": ("self_attn.k_proj.weight", (hidden, kv)),
        "attn_v.weight": ("self_attn.v_proj.weight", (hidden, kv)),
        "attn_output.weight": ("self_attn.o_proj.weight", (q, hidden)),
        "ffn_norm.weight": ("post_attention_layernorm.weight", (hidden,)),
        "ffn_gate.weight": ("mlp.gate_proj.weight", (hidden, ffn)),
        "ffn_up.weight": ("mlp.up_proj.weight", (hidden, ffn)),
        "ffn_down.weight": ("mlp.down_proj.weight", (ffn, hidden)),
    }
    if config["model_type"] == "qwen2":
        block |= {f"attn_{x}.bias": (f"self_attn.{x}_proj.bias", (n,)) for x, n in (("q", q), ("k", kv), ("v", kv))}
    # A hostile count of layers would fill the memory here.
    for i in range(min(layers, len(header.tensors))):
        expected |= {f"blk.{i}.{name}": (f"model.layers.{i}.{hf}", shape) for name, (hf, shape) in block.items()}
    found = {tensor.name: tensor for tensor in header.tensors}
    for name in [*expected, *found]:
        if name not in found:
            raise QuantlabError(f"the GGUF file lacks the tensor `{name}`", "download the file again")
        if name not in expected:
            raise QuantlabError(
                f"the tensor `{name}` is not part of `{config['model_type']}`", "use the original model"
            )
        if found[name].shape != expected[name][1]:
            shape = list(found[name].shape)
            raise QuantlabError(
                f"the tensor `{name}` has the shape {shape}, not {list(expected[name][1])}", "download it again"
            )
    return [(hf, found[name]) for name, (hf, _) in expected.items()]


def _write_weights(
    gguf: Path, plan: list[tuple[str, TensorInfo]], config: dict[str, Any], out: BinaryIO, progress: Progress
) -> None:
    """Write one safetensors file, a chunk of rows at a time."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in plan:
        begin, end = end, end + 2 * tensor.params
        entries[name] = {"dtype": "F16", "shape": list(reversed(tensor.shape)), "data_offsets": [begin, end]}
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    out.write(struct.pack("<Q", len(head)) + head)
    done = 0
    for _, tensor in plan:
        progress("dequantizing weights", done, end)
        for chunk in _float16(gguf, tensor, _rotary_heads(tensor, config)):
            done += out.write(chunk)
    progress("dequantizing weights", end, end)


def _rotary_heads(tensor: TensorInfo, config: dict[str, Any]) -> int:
    """The number of heads whose rows were interleaved when the GGUF was made; 0 for every other tensor."""
    if config["model_type"] == "llama" and tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        return int(tensor.shape[1] // config["head_dim"])
    return 0


def _float16(gguf: Path, tensor: TensorInfo, rotary_heads: int) -> Iterator[bytes]:
    """The rows of one tensor in the order of Hugging Face, as little-endian float16."""
    import numpy as np

    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise missing_extra("gguf", "gguf") from None
    width = tensor.shape[0]
    n_rows = tensor.params // width
    stored = np.memmap(gguf, np.uint8, "r", tensor.offset, (n_rows, tensor.size_bytes // n_rows))
    order = np.arange(n_rows)
    if rotary_heads:
        # Row 2i + j of a head in GGUF is row i + j * head_dim / 2 of it here. A row is quantized by itself.
        order = order.reshape(rotary_heads, -1, 2).swapaxes(1, 2).reshape(-1)
    step = max(1, _CHUNK_WEIGHTS // width)
    for at in range(0, n_rows, step):
        try:
            wide = dequantize(stored[order[at : at + step]], GGMLQuantizationType[tensor.type])
        except (NotImplementedError, KeyError):
            raise QuantlabError(
                f"the type {tensor.type} of the tensor `{tensor.name}` cannot be dequantized",
                "use a GGUF file of another type, or the original model",
            ) from None
        with np.errstate(over="ignore"):
            half = wide.astype("<f2")
        if not np.isfinite(half).all():
            raise QuantlabError(
                f"the tensor `{tensor.name}` has weights that are not finite in float16", "use the original model"
            )
        yield half.tobytes()
