"""Tensors of a GGUF: which are matrices, which match a pattern, how many bits their types take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from quantlab.core.artifact import gguf_shards
from quantlab.core.errors import UsageError
from quantlab.core.gguf_file import TYPES, GGUFHeader, TensorInfo, read_header
from quantlab.quantize.spec import WIDE_TYPES

HEADS = ("token_embd.weight", "output.weight")
_CHUNK = 1 << 22
_NUMBERS = ("F64", "I8", "I16", "I32", "I64")
BLOCKS = {name: (weights, size_bytes) for name, weights, size_bytes in TYPES.values()}


def whole_header(path: Path) -> GGUFHeader:
    """The header of a GGUF with the tensors of all its shards."""
    headers = [read_header(shard) for shard in gguf_shards(path)]
    return msgspec.structs.replace(headers[0], tensors=[tensor for header in headers for tensor in header.tensors])


def is_quantized(kind: str) -> bool:
    """Whether a stored type is a quantized one."""
    return kind not in (*WIDE_TYPES, *_NUMBERS)


def stored_bytes(params: int, kind: str) -> int:
    """The bytes of `params` weights stored as `kind`."""
    weights, size_bytes = BLOCKS[kind]
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
            kinds = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})
            raise UsageError(f"`--skip {pattern}` matches no matrix of the model", f"its matrices: {', '.join(kinds)}")
        found.update(matched)
    return [name for name in names if name in found]


def misfit(columns: Iterable[int], block: int) -> str:
    """Why a type was not used: `576 is not a multiple of 256`."""
    sizes = sorted(set(columns))
    return f"{' and '.join(map(str, sizes))} {'is' if len(sizes) == 1 else 'are'} not a multiple of {block}"


def head_is_copy(path: Path) -> bool:
    """Whether the output matrix repeats the token embedding byte for byte: a tied head stored twice."""
    found = {
        tensor.name: (shard, tensor)
        for shard in gguf_shards(path)
        for tensor in read_header(shard).tensors
        if tensor.name in HEADS
    }
    if len(found) < len(HEADS):
        return False
    (embedding_file, embedding), (head_file, head) = (found[name] for name in HEADS)
    if (embedding.type, embedding.shape) != (head.type, head.shape):
        return False
    with embedding_file.open("rb") as a, head_file.open("rb") as b:
        a.seek(embedding.offset)
        b.seek(head.offset)
        left = head.size_bytes
        while left > 0 and a.read(min(left, _CHUNK)) == b.read(min(left, _CHUNK)):
            left -= _CHUNK
        return left <= 0
