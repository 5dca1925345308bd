"""tokenizer.model of SentencePiece, as far as GGUF needs it: pieces, scores and types.

A protobuf message read by hand, since the library would be one more package for four fields. Schema:
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quantlab.core.errors import QuantlabError
from quantlab.core.files import os_error

_BPE = 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class SentencePieceModel:
    """`types` counts as GGUF does: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    adds_space_prefix: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read tokenizer.model. Raises QuantlabError where it is damaged or not of the BPE kind."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise os_error(error, path) from error
    model = SentencePieceModel([], [], [], adds_space_prefix=True)
    kind, prefix = 1, True  # the schema's defaults: unigram, with a prefix
    try:
        for number, value in _fields(data):
            if number == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                model.pieces.append(_bytes(piece[1]).decode())
                model.scores.append(struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0])
                model.types.append(_int(piece.get(3, 1)))
            elif number == 2 and isinstance(value, bytes):
                kind = _int(dict(_fields(value)).get(3, 1))
            elif number == 3 and isinstance(value, bytes):
                prefix = bool(dict(_fields(value)).get(3, 1))
    except (KeyError, IndexError, ValueError, TypeError, struct.error) as error:
        raise QuantlabError(
            f"`{path}` is no sound SentencePiece model: {error!r}", "download it again (it may be a tiktoken file)"
        ) from error
    if kind != _BPE or not model.pieces:
        raise QuantlabError(
            f"`{path}` is a SentencePiece model of another kind than BPE", "llama.cpp would split text otherwise"
        )
    return SentencePieceModel(model.pieces, model.scores, model.types, prefix)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of one protobuf message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(wire, 0)
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif not size:
            raise ValueError(f"wire type {wire}")
        if at + size > len(data):
            raise ValueError("it is cut off")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("a number has no end")


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a number where bytes belong")
    return value


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise TypeError("bytes where a number belongs")
    return value
