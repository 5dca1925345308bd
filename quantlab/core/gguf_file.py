"""The header of a GGUF file, read with every length checked against the file before it is believed.

The `gguf` package maps arrays before it checks them, so a truncated or hostile file ends in a numpy error or an
endless loop there; and reading 150,000 tokens takes it a second. Specification: ggml docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import msgspec

from quantlab.core.errors import QuantlabError
from quantlab.core.files import os_error

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
# Vocabularies and their merges have under a million entries; as a Python list, a whole file fills the memory.
_MOST_ITEMS = 1 << 24
_F16_BYTES = 2

# (name, weights a block, bytes a block) by ggml type id; from ggml.h and ggml-common.h.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor: `shape` as ggml counts it (fastest dimension first), `offset` from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    size_bytes: int

    @property
    def params(self) -> int:
        """The number of weights."""
        return math.prod(self.shape)


class GGUFHeader(msgspec.Struct, frozen=True):
    """Metadata and tensors of the file at `path`. Arrays in `metadata` are Python lists."""

    path: str
    version: int
    metadata: dict[str, Any]
    tensors: list[TensorInfo]
    data_offset: int
    size_bytes: int


class _Cursor:
    """Reads forward and refuses to pass the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def fail(self, what: str) -> QuantlabError:
        return QuantlabError(f"`{self.path}` is not a sound GGUF file: {what}", "download or convert it again")

    def take(self, n: int) -> bytes:
        if n < 0 or self.at + n > len(self.data):
            raise self.fail(f"it ends inside the header, {n} bytes wanted at byte {self.at}")
        self.at += n
        return self.data[self.at - n : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        raise self.fail(f"unknown metadata type {kind} at byte {self.at}")

    def array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > _MOST_ITEMS:
            raise self.fail(f"an array of {count} items")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            # The size is checked before a format of `count` items is built.
            if count * struct.calcsize(code) > len(self.data) - self.at:
                raise self.fail(f"an array of {count} items does not fit in it")
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))
        if kind != _STRING:
            raise self.fail(f"an array of metadata type {kind} at byte {self.at}")
        if count * 8 > len(self.data) - self.at:
            raise self.fail(f"an array of {count} items does not fit in it")
        return self.strings(count)

    def strings(self, count: int) -> list[str]:
        """`count` strings: the vocabulary, so without a call for each."""
        data, at, end, found = self.data, self.at, len(self.data), []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = at + 8
            at = start + length_at(data, at)[0] if start <= end else end + 1
            if at > end:
                raise self.fail("it ends inside an array of strings")
            found.append(data[start:at].decode("utf-8", "surrogateescape"))
        self.at = at
        return found


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of `path`.

    Raises QuantlabError for what is not GGUF, is truncated, or whose tensors do not lie within the file.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise QuantlabError(f"`{path}` is not a GGUF file: it has {size} bytes", "check the path")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data, path))
    except OSError as error:
        raise os_error(error, path) from error


def _parse(cursor: _Cursor) -> GGUFHeader:
    if (magic := cursor.take(4)) != _MAGIC:
        raise QuantlabError(f"`{cursor.path}` is not a GGUF file: it starts with {magic!r}", "check the path")
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise cursor.fail(f"version {version} (2 and 3 are read; a large number means big endian)")
    n_tensors, n_metadata = cursor.scalar("Q"), cursor.scalar("Q")
    if n_tensors * 32 + n_metadata * 13 > len(cursor.data):
        raise cursor.fail(f"{n_tensors} tensors and {n_metadata} metadata entries do not fit in it")
    metadata: dict[str, Any] = {}
    for _ in range(n_metadata):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    entries = [_entry(cursor) for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = []
    for name, shape, type_id, offset in entries:
        tensor = _tensor(cursor, name, shape, type_id, start + offset)
        if tensor.offset + tensor.size_bytes > len(cursor.data):
            raise cursor.fail(f"it is truncated: tensor `{name}` ends past the last of its {len(cursor.data)} bytes")
        tensors.append(tensor)
    if len({t.name for t in tensors}) != len(tensors):
        raise cursor.fail("two tensors have the same name")
    return GGUFHeader(str(cursor.path), version, metadata, tensors, start, len(cursor.data))


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, n_dims = cursor.string(), cursor.scalar("I")
    if not name.isprintable():
        raise cursor.fail(f"a tensor has the name {name!r}")
    if n_dims > _MAX_DIMS:
        raise cursor.fail(f"tensor `{name}` has {n_dims} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(n_dims))
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _tensor(cursor: _Cursor, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> TensorInfo:
    if type_id not in TYPES:
        raise cursor.fail(f"tensor `{name}` has the unknown type {type_id}")
    type_name, block, block_bytes = TYPES[type_id]
    if not shape or any(n <= 0 for n in shape) or shape[0] % block:
        raise cursor.fail(f"tensor `{name}` of type {type_name} has the shape {shape}")
    return TensorInfo(name, shape, type_name, offset, math.prod(shape) // block * block_bytes)


def kv_bytes_per_token(header: GGUFHeader) -> int:
    """Bytes of K and V in f16 that one token adds over all layers; a sliding window bounds their number.

    Raises QuantlabError where the metadata cannot describe a transformer.
    """
    metadata = header.metadata
    arch = metadata.get("general.architecture", "")

    def counts(name: str, default: list[int]) -> list[int]:
        """One number, or one for each layer; a text in its place could be multiplied beyond all memory."""
        found = metadata.get(f"{arch}.{name}", default)
        numbers = found if isinstance(found, list) else [found]
        if not all(isinstance(number, int) for number in numbers):
            raise TypeError(f"`{arch}.{name}` is no number")
        return numbers

    try:
        heads = counts("attention.head_count", [1])
        kv_heads = counts("attention.head_count_kv", heads)
        [width], [layers] = counts("embedding_length", [0]), counts("block_count", [0])
        head_dim = width // max(heads)
        [key], [value] = counts("attention.key_length", [head_dim]), counts("attention.value_length", [head_dim])
        total = sum(kv_heads) if len(kv_heads) > 1 else kv_heads[0] * layers
        return total * (key + value) * _F16_BYTES
    except (TypeError, ValueError, LookupError, ZeroDivisionError) as error:
        raise QuantlabError(
            f"the metadata of `{header.path}` is damaged: {error}", "download or convert it again"
        ) from error
