"""Tensors of a GGUF: which are matrices, which match a pattern, how many bits their types take."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from quantlab.core.artifact import gguf_shards
from quantlab.core.errors import UsageError
from quantlab.core.gguf_file import TYPES, GGUFHeader, TensorInfo, read_header
from quantlab.quantize.gguf_work import Fallback
from quantlab.quantize.spec import WIDE_TYPES

HEADS = ("token_embd.weight", "output.weight")
_CHUNK = 1 << 22
_NUMBERS = ("F64", "I8", "I16", "I32", "I64")
_BLOCKS = {name: (weights, size_bytes) for name, weights, size_bytes in TYPES.values()}


def whole_header(path: Path) -> GGUFHeader:
    """The header of a GGUF with the tensors of all its shards."""
    headers = [read_header(shard) for shard in gguf_shards(path)]
    return msgspec.structs.replace(headers[0], tensors=[tensor for header in headers for tensor in header.tensors])


def is_quantized(kind: str) -> bool:
    """Whether a stored type is a quantized one."""
    return kind not in (*WIDE_TYPES, *_NUMBERS)


def stored_bytes(params: int, kind: str) -> int:
    """The bytes of `params` weights stored as `kind`."""
    weights, size_bytes = _BLOCKS[kind]
    return params // weights * size_bytes


def matrices(tensors: Iterable[TensorInfo]) -> list[str]:
    """The names of the tensors that quantizing may touch: those of two dimensions or more."""
    return [tensor.name for tensor in tensors if sum(n > 1 for n in tensor.shape) > 1]


def matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names in which one of the regular expressions is found; UsageError where one is wrong or finds nothing."""
    found = set()
    for pattern in patterns:
        try:
            matched = [name for name in names if re.search(pattern, name)]
        except re.error as error:
            raise UsageError(f"`--skip {pattern}` is no regular expression: {error}", "try a part of a name") from error
        if not matched:
            kinds = sorted({re.sub(r"^blk\.\d+\.", "blk.*.", name) for name in names})
            raise UsageError(f"`--skip {pattern}` matches no matrix of the model", f"its matrices: {', '.join(kinds)}")
        found.update(matched)
    return [name for name in names if name in found]


def misfit(columns: Iterable[int], block: int) -> str:
    """Why a type was not used: `576 is not a multiple of 256`."""
    sizes = sorted(set(columns))
    return f"{' and '.join(map(str, sizes))} {'is' if len(sizes) == 1 else 'are'} not a multiple of {block}"


def nominal_bits(tensors: Sequence[TensorInfo], fallbacks: Sequence[Fallback]) -> float:
    """Bits per weight that the label would stand for, were every column count a multiple of the block.

    For an embedding or output matrix whose columns do not fit, the library's rule is Q8_0 in place of Q6_K, and it
    logs nothing.
    """
    wanted: Mapping[str, str] = {fallback.tensor: fallback.wanted for fallback in fallbacks}
    bits = 0.0
    for tensor in tensors:
        kind = wanted.get(tensor.name, tensor.type)
        if tensor.name in HEADS and kind == "Q8_0" and fallbacks:
            kind = "Q6_K"
        weights, size_bytes = _BLOCKS[kind]
        bits += 8 * size_bytes / weights * tensor.params
    return bits / sum(tensor.params for tensor in tensors)


def head_is_copy(path: Path, header: GGUFHeader) -> bool:
    """Whether the output matrix repeats the token embedding byte for byte: a tied head stored twice."""
    tensors = {tensor.name: tensor for tensor in header.tensors}
    embedding, head = (tensors.get(name) for name in HEADS)
    if embedding is None or head is None or (embedding.type, embedding.shape) != (head.type, head.shape):
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return all(
            data[embedding.offset + at : embedding.offset + min(at + _CHUNK, head.size_bytes)]
            == data[head.offset + at : head.offset + min(at + _CHUNK, head.size_bytes)]
            for at in range(0, head.size_bytes, _CHUNK)
        )
