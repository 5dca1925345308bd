"""config.json -> what the GGUF must hold: tensors with their shapes and row orders, and the architecture's numbers.

A family lists every tensor it has, so what is missing, misshapen or without a place is found before a byte is
written. Tensor names come from gguf's TensorNameMap; metadata keys follow llama.cpp's src/llama-arch.cpp, defaults
the configuration classes of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantlab.core.artifact import read_json
from quantlab.core.errors import QuantlabError, missing_extra

UPSTREAM_HINT = "give llama.cpp's own script with `--converter PATH/convert_hf_to_gguf.py`"
# Sliding-window layers of gemma3 where neither config.json nor GGUF says otherwise: five of six.
_GEMMA_PATTERN = 6
_SHOWN_NAMES = 5


@dataclass(frozen=True)
class Family:
    """One class of transformers: its GGUF architecture and the defaults of its configuration."""

    arch: str
    defaults: dict[str, Any]
    activations: tuple[str, ...] = ("silu", "swish")
    ropes: tuple[str, ...] = ("linear", "yarn")
    # Parts of a multimodal model that the text model leaves behind.
    skipped: tuple[str, ...] = ()


_GEMMA3 = Family(
    "gemma3",
    {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
    activations=("gelu_pytorch_tanh",),
    ropes=("linear",),
    skipped=("vision_tower.", "multi_modal_projector."),
)  # fmt: skip
_LLAMA = Family("llama", {"max_position_embeddings": 2048}, ropes=("linear", "yarn", "llama3"))
FAMILIES = {
    "LlamaForCausalLM": _LLAMA,
    "LLaMAForCausalLM": _LLAMA,
    "MistralForCausalLM": Family("llama", {"max_position_embeddings": 131_072, "num_key_value_heads": 8}),
    "Qwen2ForCausalLM": Family("qwen2", {"max_position_embeddings": 32_768}),
    "Qwen3ForCausalLM": Family("qwen3", {"max_position_embeddings": 32_768, "head_dim": 128}),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Phi3ForCausalLM": Family(
        "phi3",
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        ropes=("su", "longrope"),
    ),
}
_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu"}


@dataclass(frozen=True)
class Part:
    """One tensor: its GGUF name, the shape it must have in the folder, and what changes on the way.

    The rows of `rotary_heads` heads are interleaved: transformers rotates a head's two halves against each other,
    the `llama` of ggml neighbouring rows. `plus` is added to every weight.
    """

    gguf: str
    shape: tuple[int, ...]
    rotary_heads: int = 0
    plus: float = 0.0

    @property
    def params(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)

    def row_order(self) -> npt.NDArray[np.intp] | None:
        """Which source row each row is, or None where they stay."""
        if not self.rotary_heads:
            return None
        return np.arange(self.shape[0]).reshape(self.rotary_heads, 2, -1).swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True)
class Model:
    """A checked config.json; text_config is merged in and defaults are filled."""

    family: Family
    config: dict[str, Any]
    rope: dict[str, Any] = field(default_factory=dict)

    def count(self, key: str) -> int:
        """A positive whole number of config.json."""
        value = self.config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise QuantlabError(f"config.json: `{key}` is {value!r}", "it must be a positive whole number")
        return value

    def number(self, key: str) -> float:
        """A positive number of config.json."""
        return _positive(self.config.get(key), key)

    @property
    def kv_heads(self) -> int:
        """Key-value heads; as many as query heads where config.json does not say."""
        return self.count("num_key_value_heads" if self.config.get("num_key_value_heads") else "num_attention_heads")

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        if self.config.get("head_dim"):
            return self.count("head_dim")
        return self.count("hidden_size") // self.count("num_attention_heads")


def _positive(value: Any, key: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise QuantlabError(f"config.json: `{key}` is {value!r}", "it must be a positive number")
    return float(value)


def read_model(folder: Path) -> Model:
    """Read and check config.json of a Hugging Face folder.

    Raises QuantlabError for a missing or damaged file, an architecture that is not known, quantized weights,
    adapters, and what llama.cpp computes otherwise than transformers.
    """
    if not folder.is_dir():
        raise QuantlabError(f"`{folder}` is no folder", "give the folder that holds config.json")
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise QuantlabError(f"`{folder}` is an adapter, no model", "merge it into its base model first")
        raise QuantlabError(f"`{folder}` has no config.json", "give the folder of a model in Hugging Face form")
    config = read_json(path)
    family = _family(config)
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    given = {key: value for key, value in config.items() if value is not None}
    config = {**config, **_DEFAULTS, **family.defaults, **given}
    model = Model(family, config)
    model = Model(family, config, _rope(model))
    _check_computation(model)
    return model


def _family(config: dict[str, Any]) -> Family:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise QuantlabError("config.json names no architecture", "its `architectures` must name the model class")
    known = ", ".join(FAMILIES)
    if names[0] not in FAMILIES:
        what = "no converter here" if "CausalLM" in names[0] else "no text-generating model that is known here"
        raise QuantlabError(f"`{names[0]}`: {what}", f"known: {known}; for others {UPSTREAM_HINT}")
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    if quantized := config.get("quantization_config") or inner:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise QuantlabError(
            f"the weights are quantized already (quantization_config: {method or 'unnamed'})",
            "give the model that they were quantized from",
        )
    return FAMILIES[names[0]]


def _check_computation(model: Model) -> None:
    """Refuse what llama.cpp would run with other mathematics than transformers, and say nothing."""
    config, arch = model.config, model.family.arch
    activation = config["hidden_activation" if arch == "gemma3" else "hidden_act"]
    if activation not in model.family.activations:
        raise QuantlabError(
            f"config.json: the activation is `{activation}`; llama.cpp computes {arch} with "
            f"`{model.family.activations[0]}`",
            "this model cannot be converted exactly",
        )
    heads, hidden = model.count("num_attention_heads"), model.count("hidden_size")
    if heads % model.kv_heads or model.head_dim % 2:
        raise QuantlabError(
            f"config.json: {heads} heads of {model.head_dim} do not fit {model.kv_heads} key-value heads",
            "check config.json",
        )
    if arch in ("qwen2", "phi3") and heads * model.head_dim != hidden:
        raise QuantlabError(
            f"config.json: {heads} heads of {model.head_dim} are not the {hidden} of hidden_size",
            f"llama.cpp runs {arch} only where they are",
        )
    if arch == "gemma3":
        _check_gemma(model, hidden // heads)


def _check_gemma(model: Model, plain_head_dim: int) -> None:
    config = model.config
    # llama.cpp knows the 27B model by its 62 layers.
    scale = plain_head_dim if config["num_hidden_layers"] == 62 else model.head_dim
    if config["query_pre_attn_scalar"] != scale:
        raise QuantlabError(
            f"config.json: `query_pre_attn_scalar` is {config['query_pre_attn_scalar']}; llama.cpp scales by {scale}",
            "this model cannot be converted exactly",
        )
    for key in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            raise QuantlabError(f"config.json: `{key}` is set", "llama.cpp runs gemma3 without it")


def sliding_layers(model: Model) -> list[bool]:
    """Which layers of gemma3 attend to a window only."""
    layers = model.count("num_hidden_layers")
    if isinstance(types := model.config.get("layer_types"), list):
        if len(types) != layers:
            raise QuantlabError(f"config.json: {len(types)} `layer_types` for {layers} layers", "check config.json")
        return [kind == "sliding_attention" for kind in types]
    pattern = model.count("sliding_window_pattern") if model.config.get("sliding_window_pattern") else _GEMMA_PATTERN
    return [(i + 1) % pattern != 0 for i in range(layers)]


def _rope(model: Model) -> dict[str, Any]:
    """Rotary parameters of full attention, as `rope_parameters` of transformers 5 holds them.

    transformers 4 keeps `rope_theta` beside a `rope_scaling` that may say `type` for `rope_type`.
    """
    config = model.config
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    full = given.get("full_attention", given) if isinstance(given, dict) else None
    sliding = (given.get("sliding_attention") or {}) if isinstance(given, dict) else None
    if not isinstance(full, dict) or not isinstance(sliding, dict):
        raise QuantlabError(f"config.json: the rotary parameters are {given!r}", "check config.json")
    rope = {
        "rope_theta": config["rope_theta"],
        "local_theta": config.get("rope_local_base_freq"),
        "original_max_position_embeddings": config.get("original_max_position_embeddings"),
        "partial_rotary_factor": config.get("partial_rotary_factor") or 1.0,
        **{key: value for key, value in full.items() if value is not None},
    }
    rope["local_theta"] = sliding.get("rope_theta", rope["local_theta"])
    kind = str(rope.get("rope_type", rope.get("type", "default"))).lower()
    # `dynamic` changes nothing within the trained context, and llama.cpp has no counterpart beyond it.
    rope["rope_type"] = "default" if kind == "dynamic" else kind
    if rope["rope_type"] not in ("default", *model.family.ropes):
        raise QuantlabError(
            f"config.json: the rotary embedding `{kind}` is not known for {model.family.arch}", UPSTREAM_HINT
        )
    fixed: dict[str, Any] = {
        "mrope_section": None,
        "mscale": None,
        "mscale_all_dim": None,
        "truncate": True,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    if model.family.arch != "phi3":
        fixed["partial_rotary_factor"] = 1.0
    for key, value in fixed.items():
        if rope.get(key, value) != value:
            raise QuantlabError(
                f"config.json: the rotary setting `{key}` is {rope[key]!r}",
                f"llama.cpp runs {model.family.arch} without it",
            )
    return rope


def parts(model: Model, tensor_count: int) -> dict[str, Part]:
    """Every tensor the model has: its name in the folder -> its place. `lm_head.weight` is among them.

    `tensor_count` of the folder bounds what a damaged config.json can ask for.
    """
    try:
        import gguf
    except ImportError:
        raise missing_extra("gguf", "gguf") from None
    layers = model.count("num_hidden_layers")
    if layers > tensor_count:
        raise QuantlabError(
            f"config.json says {layers} layers, the folder holds {tensor_count} tensors", "download the folder again"
        )
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == model.family.arch)
    names = gguf.get_tensor_name_map(arch, layers)
    hidden, vocab = model.count("hidden_size"), model.count("vocab_size")
    plus = 1.0 if model.family.arch == "gemma3" else 0.0
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in _block(model).items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    found = {}
    for name, shape in shapes.items():
        heads = 0
        if model.family.arch == "llama":
            kind = name.rpartition("self_attn.")[2].partition(".")[0]
            heads = {"q_proj": model.count("num_attention_heads"), "k_proj": model.kv_heads}.get(kind, 0)
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        found[name] = Part(place, shape, heads, plus if name.endswith("norm.weight") else 0.0)
    return found


def _block(model: Model) -> dict[str, tuple[int, ...]]:
    """Names and shapes (out, in) of one layer."""
    arch = model.family.arch
    hidden, ffn = model.count("hidden_size"), model.count("intermediate_size")
    q, kv = model.count("num_attention_heads") * model.head_dim, model.kv_heads * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    if arch == "phi3":
        shapes |= {"self_attn.qkv_proj.weight": (q + 2 * kv, hidden), "mlp.gate_up_proj.weight": (2 * ffn, hidden)}
    else:
        projections = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
        shapes |= {f"self_attn.{name}.weight": shape for name, shape in projections.items()}
        shapes |= {"mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden)}
        if arch == "qwen2" or (arch == "llama" and model.config.get("attention_bias")):
            shapes |= {f"self_attn.{name}.bias": shape[:1] for name, shape in projections.items()}
    shapes |= {
        "self_attn.o_proj.weight": (hidden, q),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if arch in ("qwen3", "gemma3"):
        shapes |= {"self_attn.q_norm.weight": (model.head_dim,), "self_attn.k_norm.weight": (model.head_dim,)}
    if arch == "gemma3":
        shapes |= {"pre_feedforward_layernorm.weight": (hidden,), "post_feedforward_layernorm.weight": (hidden,)}
    if arch == "llama" and model.config.get("attention_bias"):
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if arch == "llama" and model.config.get("mlp_bias"):
        shapes |= {"mlp.gate_proj.bias": (ffn,), "mlp.up_proj.bias": (ffn,), "mlp.down_proj.bias": (hidden,)}
    return shapes


def canonical_name(model: Model, name: str) -> str | None:
    """The name of a tensor of the folder as `parts` spells it; None for what no text model needs."""
    # Buffers that old versions of transformers saved.
    if name.endswith((".rotary_emb.inv_freq", ".attention.masked_bias", ".attention.bias")):
        return None
    if not model.family.skipped:
        return name
    if name.removeprefix("model.").startswith(model.family.skipped):
        return None
    return name.replace("language_model.", "", 1)


def list_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - _SHOWN_NAMES
    return ", ".join(f"`{name}`" for name in names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def factor_tensors(model: Model) -> dict[str, npt.NDArray[np.float32]]:
    """Per-frequency divisors of rotary scaling, which GGUF stores as tensors of head_dim / 2."""
    rope = model.rope
    if rope["rope_type"] == "llama3":
        return {"rope_freqs.weight": _llama3_factors(model)}
    if rope["rope_type"] not in ("su", "longrope"):
        return {}
    width = _rotated(model) // 2
    tensors = {}
    for kind in ("long", "short"):
        factors = rope.get(f"{kind}_factor")
        if not isinstance(factors, list) or len(factors) != width:
            raise QuantlabError(f"config.json: `{kind}_factor` must list {width} numbers", "check config.json")
        tensors[f"rope_factors_{kind}.weight"] = np.array([_positive(f, f"{kind}_factor") for f in factors], np.float32)
    return tensors


def _llama3_factors(model: Model) -> npt.NDArray[np.float32]:
    """Llama 3.1's scaling: long wavelengths are divided by `factor`, short ones kept, those between blended.

    float32 throughout, as transformers computes it (modeling_rope_utils, `llama3`).
    """
    rope = model.rope
    factor, low = (
        _positive(rope.get("factor", 8.0), "factor"),
        _positive(rope.get("low_freq_factor", 1.0), "low_freq_factor"),
    )
    high = _positive(rope.get("high_freq_factor", 4.0), "high_freq_factor")
    trained = _positive(rope["original_max_position_embeddings"] or 8192, "original_max_position_embeddings")
    if high <= low:
        raise QuantlabError(
            f"config.json: `high_freq_factor` {high} is not above `low_freq_factor`", "check config.json"
        )
    base = np.float32(_positive(rope["rope_theta"], "rope_theta"))
    exponents = np.arange(0, model.head_dim, 2, dtype=np.float32) / np.float32(model.head_dim)
    wavelengths = np.float32(2 * math.pi) / (1 / base**exponents)
    smooth = (np.float32(trained) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = 1 / ((1 - smooth) / np.float32(factor) + smooth)
    scaled = np.where(wavelengths > trained / low, np.float32(factor), blended)
    return np.where(wavelengths < trained / high, np.float32(1), scaled).astype(np.float32)


def _rotated(model: Model) -> int:
    """How many dimensions of a head are rotated."""
    if model.family.arch == "phi3":
        share = _positive(model.rope["partial_rotary_factor"], "partial_rotary_factor")
        width = int(share * model.count("hidden_size"))
        return width // model.count("num_attention_heads")
    return model.head_dim


def write_parameters(writer: Any, model: Model) -> None:
    """Put the architecture's numbers into the metadata of a GGUFWriter."""
    arch = model.family.arch
    writer.add_block_count(model.count("num_hidden_layers"))
    writer.add_context_length(model.count("max_position_embeddings"))
    writer.add_embedding_length(model.count("hidden_size"))
    writer.add_feed_forward_length(model.count("intermediate_size"))
    writer.add_head_count(model.count("num_attention_heads"))
    writer.add_head_count_kv(model.kv_heads)
    writer.add_layer_norm_rms_eps(model.number("rms_norm_eps"))
    writer.add_rope_freq_base(_positive(model.rope["rope_theta"], "rope_theta"))
    if arch != "phi3" and (arch == "llama" or model.config.get("head_dim")):
        writer.add_key_length(model.head_dim)
        writer.add_value_length(model.head_dim)
    if arch == "llama":
        writer.add_vocab_size(model.count("vocab_size"))
    if arch in ("llama", "phi3"):
        writer.add_rope_dimension_count(_rotated(model))
    if arch == "gemma3":
        _write_gemma(writer, model)
    _write_scaling(writer, model)


def _write_gemma(writer: Any, model: Model) -> None:
    if cap := model.config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(_positive(cap, "final_logit_softcapping"))
    sliding = sliding_layers(model)
    if not any(sliding):
        return
    writer.add_sliding_window(model.count("sliding_window"))
    writer.add_rope_freq_base_swa(_positive(model.rope["local_theta"], "rope_local_base_freq"))
    if sliding != [(i + 1) % _GEMMA_PATTERN != 0 for i in range(len(sliding))]:
        writer.add_sliding_window_pattern(sliding)


def _write_scaling(writer: Any, model: Model) -> None:
    import gguf

    rope = model.rope
    original = rope["original_max_position_embeddings"] or model.count("max_position_embeddings")
    original = _positive(original, "original_max_position_embeddings")
    if model.family.arch == "phi3":
        writer.add_rope_scaling_orig_ctx_len(int(original))
        # 0 tells llama.cpp a Phi-4 from the models with a window.
        writer.add_sliding_window(model.config.get("sliding_window") or 0)
        if rope["rope_type"] != "default":
            stretch = model.count("max_position_embeddings") / original
            attention = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 < original else 1.0
            given = rope.get("attention_factor")
            writer.add_rope_scaling_attn_factors(_positive(attention if given is None else given, "attention_factor"))
    if rope["rope_type"] in ("linear", "yarn"):
        kind = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}[rope["rope_type"]]
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(_positive(rope.get("factor"), "factor"))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(int(original))
        if rope.get("attention_factor") is not None:
            # llama.cpp multiplies by YaRN's own factor in any case and ignores its key `yarn_attn_factor`.
            own = 1 + 0.1 * math.log(_positive(rope["factor"], "factor"))
            writer.add_rope_scaling_attn_factors(_positive(rope["attention_factor"], "attention_factor") / own)
