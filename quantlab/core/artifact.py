"""What lies on disk: the model's stored types and size, and the record that quantize writes beside it."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quantlab.core.errors import QuantlabError
from quantlab.core.files import os_error, sha256_file, sha256_known, write_text
from quantlab.core.gguf_file import read_header
from quantlab.core.model import ModelFile
from quantlab.core.packed import Stored, named_method, quantization_entry, stored_tensors, weight_shapes
from quantlab.core.result import ModelInfo, TensorType

RECORD_NAME = "quantlab.json"
# What changes the token ids or the prompt, and so what is computed.
_SETTINGS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
# As large as the safetensors library reads; a damaged length would fill the memory.
_LARGEST_HEADER_BYTES = 100_000_000
_SAFETENSORS_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


class Record(msgspec.Struct, frozen=True):
    """What was asked and what was done; `NAME.gguf.json` beside a GGUF, `quantlab.json` in a folder."""

    quantlab: str
    method: str
    asked: dict[str, Any]
    parent: str
    parent_sha256: str
    sha256: str
    parent_revision: str | None = None
    calibration: dict[str, Any] | None = None
    # The library that did it with its version, and what it stored: scheme, layers, layers in 16 bits.
    engine: str | None = None
    got: dict[str, Any] | None = None
    # What the check of the artifact measured.
    checked: dict[str, Any] | None = None
    # What a reader must know of the weights' history, such as "dequantized from Q4_1".
    note: str | None = None


class History(NamedTuple):
    """Where weights come from; the fields of a Record."""

    parent: str | None = None
    parent_sha256: str | None = None
    parent_revision: str | None = None
    note: str | None = None

    @classmethod
    def of_gguf(cls, metadata: Mapping[str, Any]) -> History:
        """What a GGUF file that quantlab wrote says of itself, where the record beside it was left behind."""
        told = (metadata.get(f"quantlab.{name}") for name in cls._fields)
        return cls(*(value if isinstance(value, str) else None for value in told))


def record_path(model: Path) -> Path:
    """Where the record of an artifact lies."""
    return model / RECORD_NAME if model.is_dir() else model.with_name(model.name + ".json")


def read_record(model: Path) -> Record | None:
    """The record of an artifact, or None for a model that quantlab did not write."""
    path = record_path(model)
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise os_error(error, path) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise QuantlabError(
            f"`{path}` lies where the record of `{model.name}` belongs and is none: {error}",
            "move it to another place, or give the model another name",
        ) from error


def write_record(model: Path, record: Record) -> None:
    """Write the record beside or into the artifact."""
    write_text(record_path(model), json.dumps(msgspec.to_builtins(record), indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model's folder; QuantlabError where it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise os_error(error, path) from error
    except (ValueError, RecursionError) as error:
        raise QuantlabError(f"`{path}` is not valid JSON: {error}", "download it again") from error
    if not isinstance(value, dict):
        raise QuantlabError(f"`{path}` is no JSON object", "download it again")
    return value


def is_shard(path: Path) -> bool:
    """Whether a file is named as a part of a split GGUF model."""
    return _SHARD.fullmatch(path.name) is not None


def gguf_shards(path: Path) -> list[Path]:
    """All files of a GGUF model: the file itself, or every `-0000N-of-0000M.gguf` beside it."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    shards = [path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(1, int(match[3]) + 1)]
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise QuantlabError(f"`{path}` lacks its shards {shown}", "download them beside it")
    if path not in shards:
        raise QuantlabError(
            f"`{path.name}` is named as a part that a model of {int(match[3])} parts does not have", "name it as it was"
        )
    return shards


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a folder, by its index where it has one."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        # Some repositories hold the same weights twice, as `consolidated.safetensors` too.
        found = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
        if not found:
            raise QuantlabError(f"`{folder}` has no *.safetensors", "download the weights in safetensors form")
        return found
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (KeyError, AttributeError, TypeError) as error:
        raise QuantlabError(f"`{index}` is damaged: {error}", "download it again") from error
    for name in names:
        # A name from a downloaded file never leads out of the folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise QuantlabError(f"`{index}` names the file {name!r}", "download it again")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise QuantlabError(f"`{folder}` lacks {', '.join(missing)}", "download the missing shards")
    return [folder / name for name in names]


def safetensors_header(path: Path) -> dict[str, Any]:
    """The header of one safetensors file: name -> {dtype, shape, data_offsets}; checked against the file's size.

    Format: https://huggingface.co/docs/safetensors. Raises QuantlabError where it is truncated or damaged.
    """
    again = "download it again"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if not 0 < length <= min(size - 8, _LARGEST_HEADER_BYTES):
                raise QuantlabError(
                    f"`{path}` is not a sound safetensors file: its header is cut off or too long", again
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise os_error(error, path) from error
    except (ValueError, RecursionError) as error:
        raise QuantlabError(f"`{path}` is not a sound safetensors file: its header is damaged", again) from error
    try:
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        filled = 0
        for name, entry in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            bits = _SAFETENSORS_BITS[entry["dtype"]]
            whole = all(type(n) is int and n >= 0 for n in (begin, end, *entry["shape"]))
            if not whole or (end - begin) * 8 != math.prod(entry["shape"]) * bits or begin > end:
                raise QuantlabError(f"`{path}` is damaged: tensor `{name}` does not fill its place", again)
            if 8 + length + end > size:
                raise QuantlabError(f"`{path}` is truncated: tensor `{name}` ends past its last byte", again)
            # The format wants every byte to belong to one tensor.
            if begin != filled:
                raise QuantlabError(f"`{path}` is damaged: tensor `{name}` does not begin where another ends", again)
            filled = end
        if 8 + length + filled != size:
            raise QuantlabError(f"`{path}` is damaged: bytes after its last tensor", again)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise QuantlabError(f"`{path}` is not a sound safetensors file: {error!r} in its header", again) from error
    return tensors


def stored_weights(folder: Path) -> list[Stored]:
    """Every tensor of a safetensors folder as what it stands for, from config.json and headers."""
    header: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in safetensors_files(folder):
        found = safetensors_header(file)
        header |= found
        shapes |= weight_shapes(file, found)
    return stored_tensors(_config(folder), header, shapes)


def _config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "config.json") if (folder / "config.json").is_file() else {}


def model_info(model: ModelFile) -> ModelInfo:
    """Size, stored types and bits per weight of a GGUF file or a safetensors folder, from headers alone.

    Bits per weight = 8 x bytes of all tensors / number of weights, as llama.cpp prints it; packed codes count as the
    weights that they hold. The record, where there is one, tells method and parent; else config.json tells the method,
    as far as it can, and a GGUF file of quantlab its parent.
    """
    path = Path(model.path)
    record = read_record(path)
    history = History(*(getattr(record, name) for name in History._fields)) if record else History()
    if path.is_dir():
        files = safetensors_files(path)
        tensors = [(stored.kind, stored.params, stored.size_bytes) for stored in stored_weights(path)]
        method = record.method if record else named_method(quantization_entry(_config(path)))
    else:
        files = gguf_shards(path)
        headers = [read_header(file) for file in files]
        tensors = [(t.type, t.params, t.size_bytes) for header in headers for t in header.tensors]
        history = history if record else History.of_gguf(headers[0].metadata)
        wide = all(kind in ("F32", "F16", "BF16", "F64") for kind, _, _ in tensors)
        method = "none" if wide else "gguf"
    params = sum(n for _, n, _ in tensors)
    if not params:
        raise QuantlabError(f"`{path}` holds no tensors", "give a file with weights (this may be a vocabulary file)")
    return ModelInfo(
        source=model.source,
        revision=model.revision or history.parent_revision,
        format="safetensors" if path.is_dir() else "gguf",
        parent=history.parent,
        method=method,
        size_bytes=sum(file.stat().st_size for file in files),
        bits_per_weight=8 * sum(n for _, _, n in tensors) / params,
        tensor_types=histogram((kind, n) for kind, n, _ in tensors),
        sha256=model.sha256,
        note=model.note or history.note,
        parent_sha256=history.parent_sha256,
    )


def content_sha256(path: Path) -> str:
    """The sha256 that identifies a model: of its one weight file, or of the sha256 list of all of them.

    For a folder config.json and the tokenizer's files count too: they change what the weights compute.
    """
    if path.is_dir():
        settings = [path / name for name in _SETTINGS if (path / name).is_file()]
        hashes = [file.name + sha256_file(file) for file in settings]
        hashes += [sha256_known(file) for file in safetensors_files(path)]
    else:
        hashes = [sha256_known(file) for file in gguf_shards(path)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def histogram(tensors: Iterable[tuple[str, int]]) -> dict[str, TensorType]:
    """Count (type, weights) by type, the type of most weights first."""
    counts: dict[str, tuple[int, int]] = {}
    for kind, params in tensors:
        count, total = counts.get(kind, (0, 0))
        counts[kind] = (count + 1, total + params)
    ordered = sorted(counts.items(), key=lambda item: -item[1][1])
    return {kind: TensorType(count, params) for kind, (count, params) in ordered}
