"""The memory's bandwidth, for the lower bound of a decode step: of a CPU's with N threads, or of a CUDA device's.

On a CPU libc's memchr looks for a byte that does not occur: it reads every cache line once with vector instructions,
writes nothing, and ctypes releases the GIL around it. On a device a large block is copied within its memory: what is
read and written counts, as in the figures of its maker.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from quantlab.core import hardware

PASSES = 32
_LEAST_BYTES = 256 * 2**20
_CACHE_MULTIPLE = 4
# Many times the cache of any device, copied in under a millisecond.
_DEVICE_BYTES = 2**30


class Where(msgspec.Struct, frozen=True):
    """The memory to measure; `threads` are those that read a CPU's."""

    threads: int
    kind: Literal["cpu", "cuda"] = "cpu"


def work(where: Any, _: Any) -> list[float]:
    """Measure in a child process, whose buffer counts in nobody's peak; empty where there is no such memory."""
    where = msgspec.convert(where, Where)
    return measure(where.threads) if where.kind == "cpu" else measure_cuda()


def best(samples: list[float]) -> float:
    """The bandwidth: the fastest pass.

    Whatever else happens on the machine only slows a pass down, and the bandwidth serves as a floor of time.
    """
    return max(samples)


def buffer_bytes() -> int:
    """Bytes to read in a pass: so many that caches cannot hold a useful part of them."""
    return max(_LEAST_BYTES, _CACHE_MULTIPLE * hardware.last_level_cache_bytes())


def measure(threads: int, size: int | None = None) -> list[float]:
    """Bytes per second of each pass over `size` bytes (`buffer_bytes()`), every thread reading its own part.

    A pass lasts from the first thread's start to the last one's end.
    """
    buffer = np.empty(size or buffer_bytes(), np.uint8)
    barrier = threading.Barrier(threads)
    spans: list[list[tuple[float, float]]] = [[] for _ in range(threads)]
    parts = np.array_split(buffer, threads)
    readers = [
        threading.Thread(target=_read, args=(part, barrier, span)) for part, span in zip(parts, spans, strict=True)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    passes = zip(*spans, strict=True)
    return [buffer.nbytes / (max(end for _, end in one) - min(begin for begin, _ in one)) for one in passes]


def measure_cuda() -> list[float]:
    """Bytes per second of copies within the memory of the CUDA device that torch takes; empty where it finds none.

    CUDA events stand around each copy, so that its launch is not in the time.
    """
    try:
        import torch
    except ModuleNotFoundError:
        return []
    if not torch.cuda.is_available():
        return []
    source = torch.ones(min(_DEVICE_BYTES, torch.cuda.mem_get_info()[0] // 4), dtype=torch.uint8, device="cuda")
    target = source.clone()
    samples = []
    for _ in range(PASSES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        samples.append(2 * source.nbytes / (begin.elapsed_time(end) / 1000))
    return samples


def _read(part: npt.NDArray[np.uint8], barrier: threading.Barrier, spans: list[tuple[float, float]]) -> None:
    """Read `part` PASSES times, each time together with the other threads."""
    memchr = ctypes.CDLL(None).memchr
    memchr.restype = ctypes.c_void_p
    memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    # Written by the thread that reads it: the pages are real, and on its side of the machine.
    part.fill(1)
    for _ in range(PASSES):
        barrier.wait()
        begin = time.perf_counter()
        found = memchr(part.ctypes.data, 0, part.nbytes)
        spans.append((begin, time.perf_counter()))
        assert found is None
