"""Tiny random Hugging Face folders of every family that convert() knows, and a numpy model of what they compute."""

from __future__ import annotations

import copy
import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

HIDDEN, FFN, HEADS, LAYERS = 64, 96, 4, 3
TRAINING_TEXT = (
    "the river rises in the hills and the wind turns the mill. return r ** 2 12 345 the hills the mill "
    "Größe und Übermut; l'été déjà; Холодный ветер; 今天下午 喝茶 喝茶; the kettle sings, the kettle's cold. "
) * 4

_COMMON = {
    "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "head_dim": 32},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "head_dim": 32, "query_pre_attn_scalar": 32, "num_key_value_heads": 1,
        "num_hidden_layers": 7, "sliding_window": 8, "rope_local_base_freq": 1000.0, "rope_theta": 1e6,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 256, "sliding_window": None},
}  # fmt: skip


def config(family: str, vocab_size: int, **changed: Any) -> dict[str, Any]:
    return {**_COMMON, **copy.deepcopy(CONFIGS[family]), "vocab_size": vocab_size, **changed}


def tensor_shapes(family: str, c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as the classes of transformers save them."""
    head_dim = c.get("head_dim") or HIDDEN // HEADS
    q, kv = HEADS * head_dim, c["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], HIDDEN)}
    for i in range(c["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (HIDDEN,),
            "self_attn.o_proj.weight": (HIDDEN, q),
            "post_attention_layernorm.weight": (HIDDEN,),
            "mlp.down_proj.weight": (HIDDEN, FFN),
        }
        if family == "phi3":
            layer |= {"self_attn.qkv_proj.weight": (q + 2 * kv, HIDDEN), "mlp.gate_up_proj.weight": (2 * FFN, HIDDEN)}
        else:
            rows = {"q": q, "k": kv, "v": kv}
            layer |= {f"self_attn.{x}_proj.weight": (n, HIDDEN) for x, n in rows.items()}
            layer |= {"mlp.gate_proj.weight": (FFN, HIDDEN), "mlp.up_proj.weight": (FFN, HIDDEN)}
            if family in ("llama", "qwen2"):
                layer |= {f"self_attn.{x}_proj.bias": (n,) for x, n in rows.items()}
        if family == "llama":
            layer |= {"self_attn.o_proj.bias": (HIDDEN,), "mlp.down_proj.bias": (HIDDEN,)}
            layer |= {"mlp.gate_proj.bias": (FFN,), "mlp.up_proj.bias": (FFN,)}
        if family in ("qwen3", "gemma3"):
            layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
        if family == "gemma3":
            layer |= {f"{x}_feedforward_layernorm.weight": (HIDDEN,) for x in ("pre", "post")}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (HIDDEN,)
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], HIDDEN)
    return shapes


def random_weights(family: str, c: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in tensor_shapes(family, c).items():
        values = rng.standard_normal(shape) * (0.1 if len(shape) == 1 else 0.08)
        if "norm" in name and family != "gemma3":
            values += 1
        weights[name] = values.astype(np.float32)
    return weights


def bfloat16_bits(value: float) -> int:
    """Nearest bfloat16 of one finite float32, ties to even, by comparing distances."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    below = bits >> 16
    numbers = [struct.unpack("<f", struct.pack("<I", n << 16))[0] if n & 0x7F80 != 0x7F80 else math.inf
               for n in (below, below + 1)]  # fmt: skip
    # 2 ** 128 with the sign is where infinity lies on the grid.
    near, far = (math.copysign(2.0**128, value) if math.isinf(n) else n for n in numbers)
    low, high = abs(value - near), abs(far - value)
    return below + (high < low or (high == low and below & 1))


def narrow(values: np.ndarray, kind: str) -> np.ndarray:
    """The bits of float32 values in F32, F16 or BF16."""
    if kind == "F32":
        return values.view("<u4")
    if kind == "F16":
        return values.astype("<f2").view("<u2")
    return np.array([bfloat16_bits(float(v)) for v in values.ravel()], "<u2").reshape(values.shape)


def widen(bits: np.ndarray, kind: str) -> np.ndarray:
    if kind == "F32":
        return bits.view("<f4")
    return bits.view("<f2").astype(np.float32) if kind == "F16" else (bits.astype("<u4") << 16).view("<f4")


def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """Write one file from the type and the bits of each tensor."""
    header, end = {}, 0
    for name, (kind, bits) in tensors.items():
        begin, end = end, end + bits.nbytes
        header[name] = {"dtype": kind, "shape": list(bits.shape), "data_offsets": [begin, end]}
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    data = b"".join(np.ascontiguousarray(bits).tobytes() for _, bits in tensors.values())
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def write_weights(folder: Path, weights: dict[str, np.ndarray], kind: str = "F32", shards: int = 1) -> None:
    stored = {name: (kind, narrow(values, kind)) for name, values in weights.items()}
    if shards == 1:
        write_safetensors(folder / "model.safetensors", stored)
        return
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for i, file in enumerate(files):
        write_safetensors(folder / file, dict(list(stored.items())[i::shards]))
    index = {name: files[n % shards] for n, name in enumerate(stored)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def byte_level_tokenizer(vocab_size: int = 360) -> tokenizers.Tokenizer:
    """BPE with GPT-2's pre-tokenizer."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>", "<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    tokenizer.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    return tokenizer


def sentencepiece_vocabulary(n_merged: int = 60) -> tuple[list[str], int]:
    """Pieces of a SentencePiece BPE model, best first, and how many of them are not merged from others."""
    trained = tokenizers.Tokenizer(models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=n_merged + 150, show_progress=False)
    trained.train_from_iterator([TRAINING_TEXT.replace(" ", "▁")], trainer)
    by_id = [token for token, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    merged = [token for token in by_id if len(token) > 1][:n_merged]
    letters = [token for token in by_id if len(token) == 1]
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return [*fixed, *merged, *letters], len(fixed)


def sentencepiece_tokenizer(*, bos: bool = True, prefix: bool = True) -> tokenizers.Tokenizer:
    """tokenizer.json as transformers makes it from a SentencePiece model: every split of a piece is a merge."""
    pieces, n_fixed = sentencepiece_vocabulary()
    known = set(pieces[n_fixed:])
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces[n_fixed:]
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def sentencepiece_protobuf(*, kind: int = 2, prefix: bool = True) -> bytes:
    """The same vocabulary as tokenizer.model: field 1 pieces, 2 trainer_spec, 3 normalizer_spec."""
    pieces, n_fixed = sentencepiece_vocabulary()
    types = [2, 3, 3, *([6] * 256)]
    message = b""
    for i, piece in enumerate(pieces):
        text = piece.encode()
        score = 0.0 if i < n_fixed else float(n_fixed - i)
        body = b"\x0a" + _varint(len(text)) + text + b"\x15" + struct.pack("<f", score)
        if i < n_fixed:
            body += b"\x18" + bytes([types[i]])
        message += b"\x0a" + _varint(len(body)) + body
    message += b"\x12\x02\x18" + bytes([kind])
    return message + b"\x1a\x02\x18" + bytes([prefix])


def _varint(n: int) -> bytes:
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def write_folder(
    folder: Path,
    family: str,
    *,
    kind: str = "F32",
    shards: int = 1,
    tokenizer: tokenizers.Tokenizer | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    weights: dict[str, np.ndarray] | None = None,
    **changed: Any,
) -> dict[str, np.ndarray]:
    """Write a whole folder; returns the weights by the names of transformers, as they are stored."""
    folder.mkdir(exist_ok=True)
    tokenizer = tokenizer or sentencepiece_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = tokenizer_config if tokenizer_config is not None else {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    c = config(family, changed.pop("vocab_size", tokenizer.get_vocab_size()), **changed)
    (folder / "config.json").write_text(json.dumps(c))
    weights = random_weights(family, c) if weights is None else weights
    write_weights(folder, weights, kind, shards)
    return {name: widen(narrow(values, kind), kind) for name, values in weights.items()}


def change_config(folder: Path, remove: Iterable[str] = (), **changed: Any) -> None:
    path = folder / "config.json"
    c = {key: value for key, value in json.loads(path.read_text()).items() if key not in remove}
    path.write_text(json.dumps(c | changed))


def forward(family: str, c: dict[str, Any], w: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Logits (n, vocab) of the model as transformers defines it, in float64."""
    w = {name: values.astype(np.float64) for name, values in w.items()}
    gemma = family == "gemma3"

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = w[name] + 1 if gemma else w[name]
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c["rms_norm_eps"]) * scale

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    x = w["model.embed_tokens.weight"][ids] * (math.sqrt(HIDDEN) if gemma else 1)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        sliding = gemma and (i + 1) % 6 != 0
        y = _attention(family, c, norm(x, at + "input_layernorm.weight"), at, sliding, linear, norm)
        x = x + (norm(y, at + "post_attention_layernorm.weight") if gemma else y)
        y = norm(x, at + ("pre_feedforward" if gemma else "post_attention") + "_layernorm.weight")
        if family == "phi3":
            gate, up = np.split(linear(y, at + "mlp.gate_up_proj"), 2, axis=-1)
        else:
            gate, up = linear(y, at + "mlp.gate_proj"), linear(y, at + "mlp.up_proj")
        y = linear(_activation(gate, gemma) * up, at + "mlp.down_proj")
        x = x + (norm(y, at + "post_feedforward_layernorm.weight") if gemma else y)
    head = w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
    return norm(x, "model.norm.weight") @ head.T


def _activation(x: np.ndarray, gelu: bool) -> np.ndarray:
    if gelu:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1 + np.exp(-x))


def _attention(
    family: str, c: dict[str, Any], x: np.ndarray, at: str, sliding: bool, linear: Any, norm: Any
) -> np.ndarray:
    n, kv_heads = len(x), c["num_key_value_heads"]
    head_dim = c.get("head_dim") or HIDDEN // HEADS
    if family == "phi3":
        cuts = [HEADS * head_dim, (HEADS + kv_heads) * head_dim]
        q, k, v = np.split(linear(x, at + "self_attn.qkv_proj"), cuts, axis=-1)
    else:
        q, k, v = (linear(x, f"{at}self_attn.{name}_proj") for name in "qkv")
    q, k, v = (part.reshape(n, -1, head_dim).swapaxes(0, 1) for part in (q, k, v))
    if family in ("qwen3", "gemma3"):
        q, k = norm(q, at + "self_attn.q_norm.weight"), norm(k, at + "self_attn.k_norm.weight")
    theta = c["rope_local_base_freq"] if sliding else c["rope_theta"]
    q, k = _rotate(q, theta), _rotate(k, theta)
    k, v = (part.repeat(HEADS // kv_heads, axis=0) for part in (k, v))
    scores = q @ k.swapaxes(1, 2) / math.sqrt(head_dim)
    distance = np.arange(n)[:, None] - np.arange(n)[None, :]
    hidden = (distance < 0) | ((distance >= c["sliding_window"]) if sliding else False)
    scores = np.where(hidden, -np.inf, scores)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (shares / shares.sum(-1, keepdims=True)) @ v
    return linear(mixed.swapaxes(0, 1).reshape(n, -1), at + "self_attn.o_proj")


def _rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotate the first half of each head against its second half."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
