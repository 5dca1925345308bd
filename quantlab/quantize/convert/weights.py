"""safetensors -> GGUF weights: read by memory map, converted and written a few megabytes at a time.

Neither a model nor a tensor is ever in memory as a whole. bfloat16 is rounded to nearest, ties to even, as IEEE 754
and torch do. Format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from quantlab.core.artifact import safetensors_files, safetensors_header
from quantlab.core.errors import QuantlabError
from quantlab.core.files import os_error
from quantlab.quantize.convert.architectures import Part

_CHUNK_WEIGHTS = 1 << 20


@dataclass(frozen=True)
class FloatType:
    """A floating point type as unsigned integers: a value whose bits without the sign reach `inf` is not finite."""

    name: Literal["F16", "BF16", "F32"]
    bits: np.dtype[Any]
    inf: int


TYPES = {
    "F16": FloatType("F16", np.dtype("<u2"), 0x7C00),
    "BF16": FloatType("BF16", np.dtype("<u2"), 0x7F80),
    "F32": FloatType("F32", np.dtype("<u4"), 0x7F80_0000),
}


def stored_type(part: Part, outtype: str) -> FloatType:
    """The type of a tensor in the GGUF: llama.cpp reads vectors, norms among them, as F32 only."""
    return TYPES["F32" if len(part.shape) == 1 else outtype]


@dataclass(frozen=True)
class _Stored:
    data: mmap.mmap
    offset: int
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a folder's safetensors files. Use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._maps: list[mmap.mmap] = []
        self._tensors: dict[str, _Stored] = {}
        for path in safetensors_files(folder):
            header = safetensors_header(path)
            data = self._map(path)
            start = 8 + int.from_bytes(data[:8], "little")
            for name, entry in header.items():
                if name in self._tensors:
                    raise QuantlabError(f"`{folder}` holds the tensor `{name}` twice", "remove the file too many")
                offset = start + entry["data_offsets"][0]
                self._tensors[name] = _Stored(data, offset, entry["dtype"], tuple(entry["shape"]))

    def _map(self, path: Path) -> mmap.mmap:
        try:
            with path.open("rb") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise os_error(error, path) from error
        return self._maps[-1]

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        for data in self._maps:
            # After an error its traceback still holds a view; the map then closes with that.
            with contextlib.suppress(BufferError):
                data.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape."""
        return {name: stored.shape for name, stored in self._tensors.items()}

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same bytes."""
        a, b = self._tensors[one], self._tensors[other]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        blocks = zip(self._raw(one), self._raw(other), strict=True)
        return all(np.array_equal(x, y) for x, y in blocks)

    def _type(self, name: str) -> FloatType:
        dtype = self._tensors[name].dtype
        if dtype not in TYPES:
            raise QuantlabError(
                f"the tensor `{name}` is stored as {dtype}; {', '.join(TYPES)} are read",
                "give the model that it was quantized from",
            )
        return TYPES[dtype]

    def _raw(self, name: str, order: npt.NDArray[np.intp] | None = None) -> Iterator[npt.NDArray[Any]]:
        """The bits of some rows at a time, (rows, weights of a row)."""
        stored, kind = self._tensors[name], self._type(name).bits
        rows, width = stored.shape[0], math.prod(stored.shape[1:])
        bits: npt.NDArray[Any] = np.ndarray((rows, width), kind, stored.data, stored.offset)
        step = max(1, _CHUNK_WEIGHTS // max(1, width))
        for at in range(0, rows, step):
            yield bits[at : at + step] if order is None else bits[order[at : at + step]]
            _release(stored, (at + step) * width * kind.itemsize)

    def convert(self, name: str, part: Part, outtype: FloatType) -> Iterator[npt.NDArray[Any]]:
        """The bits of one tensor as they are written, some rows at a time, little-endian.

        Raises QuantlabError for NaN, inf, and what `outtype` cannot hold.
        """
        source = self._type(name)
        for bits in self._raw(name, part.row_order()):
            if not is_finite(bits, source):
                what = "NaN" if np.isnan(to_float32(bits, source)).any() else "inf"
                raise QuantlabError(f"the tensor `{name}` holds {what}", "the weights are damaged: download them again")
            if source is outtype and not part.plus:
                yield np.ascontiguousarray(bits)
                continue
            wide = to_float32(bits, source)
            if part.plus:
                wide = wide + np.float32(part.plus)
            narrow = from_float32(wide, outtype)
            if not is_finite(narrow, outtype):
                raise QuantlabError(
                    f"the tensor `{name}` holds {np.abs(wide).max():.6g}, too large for {outtype.name}",
                    f"use `--outtype {'BF16' if outtype.name == 'F16' else 'F32'}`",
                )
            yield narrow


def _release(stored: _Stored, n_bytes: int) -> None:
    """Give the pages that were read back to the system, so that they do not count as this process's memory."""
    if hasattr(mmap, "MADV_DONTNEED"):
        begin = stored.offset // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(stored.offset + n_bytes, len(stored.data))
        stored.data.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def is_finite(bits: npt.NDArray[Any], kind: FloatType) -> bool:
    """Whether no value is inf or NaN; an order of magnitude faster than numpy's isfinite on float16."""
    return not bits.size or int((bits << 1).max()) < kind.inf << 1


def to_float32(bits: npt.NDArray[Any], kind: FloatType) -> npt.NDArray[np.float32]:
    """The values as float32; exact."""
    if kind.name == "F16":
        return np.ascontiguousarray(bits).view("<f2").astype(np.float32)
    if kind.name == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(bits).view("<f4")


def from_float32(wide: npt.NDArray[np.float32], kind: FloatType) -> npt.NDArray[Any]:
    """The bits of finite float32 values, rounded to nearest, ties to even; what is too large becomes inf."""
    if kind.name == "F16":
        with np.errstate(over="ignore"):
            return wide.astype("<f2").view("<u2")
    bits: npt.NDArray[np.uint32] = wide.view("<u4")
    if kind.name == "F32":
        return bits
    # Half of the cut part's range, less one where the kept part is even: a tie carries only into odd ones.
    return ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype("<u2")
