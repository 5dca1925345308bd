"""From which length on a tier beats computing: the same beginning computed, and brought back from RAM and from disk."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from quantlab.core.statistics import median
from quantlab.engine.prefix_cache import BlockStore, Prompt, root_key
from quantlab.runtime.backend import Backend, Batch, Tokens

_LENGTHS = (64, 128, 256, 512, 1024, 2048)


class TierPoint(msgspec.Struct, frozen=True):
    """Seconds, a sample for each repetition, that `n_tokens` take."""

    n_tokens: int
    bytes: int
    recompute_s: list[float]
    save_s: list[float]
    ram_s: list[float]
    disk_s: list[float]


def tier_lengths(n_tokens: int, block_tokens: int) -> list[int]:
    """The lengths that are measured of a context of `n_tokens`; none where a block is longer."""
    return [n for n in _LENGTHS if block_tokens <= n <= n_tokens]


def measure_tiers(backend: Backend, tokens: Tokens, *, block_tokens: int, repeats: int) -> list[TierPoint]:
    """The lengths that `tokens` has. The folder is a temporary one, whose pages the system may still hold in memory."""
    with tempfile.TemporaryDirectory(prefix="quantlab-blocks-") as folder:
        store = BlockStore(Path(folder), backend.identity(), block_tokens=block_tokens)
        lengths = tier_lengths(len(tokens), block_tokens)
        # One unmeasured round.
        return [_point(backend, store, tokens[:n], repeats) for n in lengths[:1] + lengths][1:]


def _point(backend: Backend, store: BlockStore, tokens: Tokens, repeats: int) -> TierPoint:
    size, n = store.block_tokens, len(tokens) // store.block_tokens
    prompt = Prompt(root_key(backend.identity()), size)
    prompt.extend(tokens)
    named = [(prompt.key(i), prompt.root, prompt.until(i)) for i in range(n)]
    blobs: list[bytes] = []

    def compute() -> None:
        backend.reset()
        step = backend.describe().capacity.n_batch
        for at in range(0, n * size, step):
            backend.forward(Batch.of(0, tokens[at : min(at + step, n * size)], at, logits="last"))

    def save() -> None:
        blobs[:] = [backend.save(0, i * size, (i + 1) * size) for i in range(n)]

    def from_ram() -> None:
        backend.release(0)
        for blob in blobs:
            backend.restore(0, blob)

    def from_disk() -> None:
        backend.release(0)
        for name in named:
            blob = store.get(*name)
            assert blob is not None
            backend.restore(0, blob)

    spent: dict[str, list[float]] = {"recompute_s": [], "save_s": [], "ram_s": [], "disk_s": []}
    for _ in range(repeats):
        spent["recompute_s"].append(_timed(compute))
        spent["save_s"].append(_timed(save))
        for name, blob in zip(named, blobs, strict=True):
            store.put(*name, blob)
        spent["ram_s"].append(_timed(from_ram))
        spent["disk_s"].append(_timed(from_disk))
    backend.reset()
    return TierPoint(n * size, sum(map(len, blobs)), **spent)


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def break_even(points: list[TierPoint], tier: str) -> int | None:
    """The smallest measured length from which on bringing back from `ram` or `disk` takes less time than computing."""
    found = None
    for point in reversed(points):
        if median(getattr(point, f"{tier}_s")) >= median(point.recompute_s):
            break
        found = point.n_tokens
    return found
