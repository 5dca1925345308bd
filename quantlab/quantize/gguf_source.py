"""What a gguf run starts from: a folder to convert or a GGUF, looked at before any work."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec

from quantlab.core.artifact import gguf_shards, read_json, safetensors_files, safetensors_header
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.gguf_file import read_header
from quantlab.quantize.spec import QuantizeSpec
from quantlab.quantize.tensors import is_quantized, matching, matrices, whole_header


class Source(msgspec.Struct, frozen=True):
    """`files` are the weight files. `wide_type` is the 16-bit type that tensors are kept in.

    `path` is the folder, or the first file of the GGUF. `matrices` are GGUF names: none where nothing is skipped, or
    where only a foreign converter knows them. `history` is what the GGUF says of its own making, emptied: llama.cpp
    copies metadata, and it is not true of the next artifact.
    """

    path: Path
    is_folder: bool
    files: list[Path]
    params: int
    matrices: list[str]
    wide_type: str
    history: dict[str, str | int] = {}

    @property
    def size_bytes(self) -> int:
        """The bytes of the weight files."""
        return sum(file.stat().st_size for file in self.files)


def read_source(spec: QuantizeSpec) -> Source:
    """Look at the input of `spec`; raises QuantlabError or UsageError for what cannot be quantized."""
    path = Path(spec.model.path)
    source = _folder(spec, path) if path.is_dir() else _gguf(spec, path)
    if spec.skip and source.matrices:
        matching(spec.skip, source.matrices)
    return source


def vocabulary(source: Source) -> list[str]:
    """The tokens of the input's vocabulary, empty where it lies in no file that is read here."""
    if not source.is_folder:
        tokens = read_header(source.path).metadata.get("tokenizer.ggml.tokens", [])
        return [token for token in tokens if isinstance(token, str)]
    try:
        vocab = read_json(source.path / "tokenizer.json")["model"]["vocab"]
        return [entry if isinstance(entry, str) else str(entry[0]) for entry in vocab]
    except (QuantlabError, LookupError, TypeError):
        return []


def least_bytes(spec: QuantizeSpec, source: Source, *, converts: bool) -> int:
    """The bytes that the output needs at the very least, and the temporary base where the run `converts` to one.

    The digits of a type are its bits.
    """
    bits = int(re.findall(r"\d+", spec.type)[0])
    if converts:
        bits += int(re.findall(r"\d+", spec.outtype)[0])
    return source.params * bits // 8


def _folder(spec: QuantizeSpec, path: Path) -> Source:
    if spec.allow_requantize:
        raise UsageError("`--allow-requantize` is for a quantized GGUF", "leave it out for a folder")
    if not (path / "config.json").is_file():
        raise QuantlabError(f"`{path}` has no config.json", "give the folder of a Hugging Face model")
    files = safetensors_files(path)
    headers = [safetensors_header(file) for file in files]
    known = bool(spec.skip) and spec.converter is None
    return Source(
        path=path,
        is_folder=True,
        files=files,
        params=sum(math.prod(entry["shape"]) for header in headers for entry in header.values()),
        matrices=_converted_names(path, sum(map(len, headers))) if known else [],
        wide_type=spec.outtype if spec.outtype == "BF16" else "F16",
    )


def _converted_names(path: Path, n_tensors: int) -> list[str]:
    """The GGUF names of the folder's matrices, as our converter will write them."""
    from quantlab.quantize.convert.architectures import parts, read_model

    return [part.gguf for part in parts(read_model(path), n_tensors).values() if len(part.shape) > 1]


def _gguf(spec: QuantizeSpec, path: Path) -> Source:
    if spec.converter is not None or spec.outtype != "F16":
        raise UsageError("`--converter` and `--outtype` are for a folder", f"`{path.name}` is a GGUF already")
    shards = gguf_shards(path)
    header = whole_header(path)
    if (kind := header.metadata.get("general.type", "model")) != "model":
        raise QuantlabError(f"`{path}` is no model but of the type {kind!r}", "give the model's own GGUF")
    tensors = header.tensors
    quantized = sorted({tensor.type for tensor in tensors if is_quantized(tensor.type)})
    if quantized and not spec.allow_requantize:
        raise UsageError(
            f"`{path.name}` is quantized already ({', '.join(quantized)}): quantizing it again adds error to error",
            "quantize the original, or use `--allow-requantize`",
        )
    return Source(
        path=shards[0],
        is_folder=False,
        files=shards,
        params=sum(tensor.params for tensor in tensors),
        matrices=matrices(tensors),
        wide_type="BF16" if any(tensor.type == "BF16" for tensor in tensors) else "F16",
        history={
            key: "" if isinstance(value, str) else 0
            for key, value in header.metadata.items()
            # The weights' own history stays true.
            if key.startswith(("quantlab.", "quantize.imatrix.")) and key != "quantlab.note"
        },
    )
