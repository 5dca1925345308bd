"""What a torch method starts from: a folder of a causal language model in plain weights, looked at before any work."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quantlab import __version__
from quantlab.core.artifact import gguf_shards, read_json, safetensors_files, safetensors_header
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.files import cache_folder, locked
from quantlab.core.gguf_file import read_header
from quantlab.core.hf_config import quantization, text_config
from quantlab.core.progress import Progress
from quantlab.core.result import Notice
from quantlab.quantize.restore import restore, restored_shapes
from quantlab.quantize.spec import QuantizeSpec
from quantlab.quantize.tensors import is_quantized, whole_header

# The bits of the exponent of each float type, as an unsigned integer: all set in NaN and infinity alone.
_EXPONENTS: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000), "F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80),
}  # fmt: skip
_CHUNK_BYTES = 1 << 26
_CAUSAL, _OF_GPT2 = "ForCausalLM", ("GPT2LMHeadModel", "OpenAIGPTLMHeadModel")
# How configurations name the experts of a layer.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


class TorchSource(msgspec.Struct, frozen=True):
    """`folder` is what engines read: for a GGUF it exists from `prepare` on. `config` is that of the language model.

    `shapes` of all tensors by name, `stored_bytes` their size in the folder; `gguf` is the file that the folder is
    restored from; `notices` what must be said; `note` what a reader must know of the weights' history.
    """

    folder: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    stored_bytes: int
    gguf: Path | None = None
    notices: list[Notice] = []
    note: str | None = None

    @property
    def params(self) -> int:
        """The number of weights."""
        return sum(math.prod(shape) for shape in self.shapes.values())


def read_source(spec: QuantizeSpec) -> TorchSource:
    """Look at the input of `spec`, at headers alone.

    Raises QuantlabError or UsageError for what is no causal language model in plain weights.
    """
    path = Path(spec.model.path)
    if not path.is_dir():
        return _gguf(spec, path)
    source = read_folder(path)
    if spec.allow_requantize:
        raise UsageError("`--allow-requantize` is for a quantized GGUF", "leave it out for a folder")
    return msgspec.structs.replace(source, note=spec.model.note)


def prepare(source: TorchSource, progress: Progress) -> None:
    """Make the folder that engines read: a GGUF is restored to one in the cache, once.

    Raises QuantlabError for a weight that is NaN or infinite.
    """
    if source.gguf is not None:
        with locked(cache_folder() / "locks" / f"restored-{source.folder.name}"):
            if not source.folder.exists():
                restore(source.gguf, source.folder, progress=progress)
    check_numbers(source.folder, progress)


def vocabulary(source: TorchSource) -> list[str]:
    """The tokens of the vocabulary, empty where it lies in no file that is read here."""
    if source.gguf is not None:
        tokens = read_header(source.gguf).metadata.get("tokenizer.ggml.tokens", [])
        return [token for token in tokens if isinstance(token, str)]
    try:
        vocab = read_json(source.folder / "tokenizer.json")["model"]["vocab"]
        return [entry if isinstance(entry, str) else str(entry[0]) for entry in vocab]
    except (QuantlabError, LookupError, TypeError):
        return []


def read_folder(folder: Path) -> TorchSource:
    """Read config.json and headers; refuse what is no causal language model in plain weights, by its name."""
    text = text_config(folder)
    _check_sizes(folder, text)
    _check_kind(folder, read_json(folder / "config.json"), text)
    entries = {name: entry for file in safetensors_files(folder) for name, entry in safetensors_header(file).items()}
    odd = {name: entry["dtype"] for name, entry in entries.items() if len(entry["shape"]) > 1}
    odd = {name: dtype for name, dtype in odd.items() if dtype not in _EXPONENTS}
    if odd:
        name, dtype = next(iter(odd.items()))
        raise QuantlabError(
            f"{len(odd)} matrices of `{folder.name}` are no plain weights (`{name}` is {dtype})",
            "give the original model in 16 or 32 bits",
        )
    stored = sum(end - begin for begin, end in (entry["data_offsets"] for entry in entries.values()))
    return TorchSource(folder, text, {name: tuple(entry["shape"]) for name, entry in entries.items()}, stored)


def _check_sizes(folder: Path, text: dict[str, Any]) -> None:
    """Refuse a config.json whose sizes are none: JSON as Python reads it has Infinity, too."""
    for name in _SIZES:
        value = text.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise QuantlabError(f"`{folder / 'config.json'}`: `{name}` is {value!r}, no size", "download it again")


def _check_kind(folder: Path, config: dict[str, Any], text: dict[str, Any]) -> None:
    """Raise unless config.json is that of a causal language model whose weights are plain."""
    named = [str(name) for name in config.get("architectures") or []]
    what = named[0] if named else str(config.get("model_type"))
    causal = "give a causal language model (architectures: ...ForCausalLM)"
    if (stored := quantization(folder)) is not None:
        bits = f" {stored['bits']} bits" if stored.get("bits") else ""
        raise UsageError(
            f"`{folder.name}` is quantized already ({stored.get('quant_method', 'an unknown method')}{bits})",
            "quantize the original: codes cannot be turned back into the weights that they were made from",
        )
    if config.get("is_encoder_decoder"):
        raise QuantlabError(f"`{what}` is an encoder with a decoder, no causal language model", causal)
    if any(key in config for key in ("vision_config", "audio_config", "vision_tower")):
        raise QuantlabError(
            f"`{what}` reads images or sound: its language model alone cannot be quantized here",
            "give the folder of a text model",
        )
    if any(name.endswith(_OF_GPT2) for name in named):
        raise QuantlabError(
            f"`{what}` keeps its layers as Conv1D, as GPT-2 does, which the engines here do not quantize",
            "give a model whose layers are Linear (architectures: ...ForCausalLM)",
        )
    if not any(name.endswith(_CAUSAL) for name in named):
        raise QuantlabError(f"`{what}` is no causal language model (an encoder, or another head)", causal)
    if not isinstance(config.get("model_type"), str):
        raise QuantlabError(
            f"`{folder / 'config.json'}` names no `model_type`: transformers cannot tell what it is",
            "download it again",
        )
    _check_code(config, what)
    if experts := next((text[key] for key in _EXPERTS if text.get(key)), 0):
        raise QuantlabError(
            f"`{what}` has {experts} experts a layer, and the engines here quantize plain Linear layers only",
            "use `--method gguf` for a mixture of experts",
        )


def _check_code(config: dict[str, Any], what: str) -> None:
    """Raise where only code that comes with the model could load it, as far as an installed transformers tells."""
    if "auto_map" not in config or (found := importlib.util.find_spec("transformers")) is None or not found.origin:
        return
    tables = (Path(found.origin).parent / "models" / "auto").glob("*.py")
    if not any(f'"{config["model_type"]}"' in table.read_text(encoding="utf-8") for table in tables):
        raise QuantlabError(
            f"`{what}` ({config['model_type']}) needs code that comes with it: transformers has no such model",
            "quantlab runs no remote code; take a model that transformers has itself",
        )


def _gguf(spec: QuantizeSpec, path: Path) -> TorchSource:
    """What a GGUF becomes: dequantized where `--allow-requantize` says so."""
    quantized = sorted({tensor.type for tensor in whole_header(path).tensors if is_quantized(tensor.type)})
    if quantized and not spec.allow_requantize:
        raise UsageError(
            f"`{path.name}` is quantized already ({', '.join(quantized)}): quantizing it again adds error to error",
            "quantize the original, or use `--allow-requantize`",
        )
    if len(gguf_shards(path)) > 1:
        raise QuantlabError(f"`{path.name}` is one of several files", "give the model's Hugging Face folder")
    config, shapes = restored_shapes(path)
    folder = cache_folder() / "restored" / f"{spec.model.sha256[:16]}-{__version__}"
    notices = [
        Notice(
            "requantized",
            f"made from weights that were quantized before ({', '.join(quantized)}): errors add up",
            "quantize the original model",
        )
    ]
    history = [f"weights dequantized from {' and '.join(quantized)} ({path.name})"] if quantized else []
    note = "; ".join([*([spec.model.note] if spec.model.note else []), *history])
    # It is restored in 16 bits.
    stored = 2 * sum(math.prod(shape) for shape in shapes.values())
    return TorchSource(folder, config, shapes, stored, path, notices if quantized else [], note or None)


def check_numbers(folder: Path, progress: Progress) -> None:
    """Raise QuantlabError naming the first weight that is NaN or infinite: no engine says a word of it."""
    files = safetensors_files(folder)
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        data_at = _data_offset(file)
        for name, entry in safetensors_header(file).items():
            begin, end = entry["data_offsets"]
            if (at := _first_not_finite(file, data_at + begin, end - begin, entry["dtype"])) is not None:
                index = tuple(int(i) for i in np.unravel_index(at, entry["shape"] or [1]))
                raise QuantlabError(
                    f"`{name}` of `{file.name}` is not finite at {list(index)}",
                    "the model is damaged: download it again",
                )
            done += end - begin
            progress("look for NaN", done, total)


def _data_offset(file: Path) -> int:
    with file.open("rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little")


def _first_not_finite(file: Path, offset: int, size_bytes: int, dtype: str) -> int | None:
    if dtype not in _EXPONENTS:
        return None
    unsigned, exponent = _EXPONENTS[dtype]
    kind = np.dtype(unsigned)
    with file.open("rb") as opened:
        opened.seek(offset)
        for at in range(0, size_bytes, _CHUNK_BYTES):
            values = np.frombuffer(opened.read(min(_CHUNK_BYTES, size_bytes - at)), kind)
            bad = (values & kind.type(exponent)) == exponent
            if bad.any():
                return at // kind.itemsize + int(bad.argmax())
    return None
