"""Memory bandwidth: real bytes are read, by all threads; no number is expected of a machine."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from quantlab.bench import bandwidth
from quantlab.core import hardware
from quantlab.runtime.worker import run_in_child


@pytest.mark.parametrize("threads", [1, 3])
def test_every_pass_is_a_sample(threads: int) -> None:
    before = threading.active_count()
    samples = bandwidth.measure(threads, 3_000_001)
    assert len(samples) == bandwidth.PASSES > 1
    assert all(np.isfinite(samples))
    assert min(samples) > 0
    assert bandwidth.best(samples) == max(samples)
    assert threading.active_count() == before


def test_all_bytes_are_written_before_and_read_by_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    original = bandwidth._read

    def spy(part: np.ndarray, barrier: threading.Barrier, spans: list[tuple[float, float]]) -> None:
        original(part, barrier, spans)
        assert (part == 1).all()
        seen.append((part.ctypes.data, part.nbytes))

    monkeypatch.setattr(bandwidth, "_read", spy)
    bandwidth.measure(3, 1_000_001)
    ordered = sorted(seen)
    assert sum(size for _, size in ordered) == 1_000_001
    assert all(start + size == later for (start, size), (later, _) in itertools.pairwise(ordered))


def test_a_byte_that_is_not_searched_past_would_be_noticed() -> None:
    """The search must reach the end: it finds a byte planted there."""
    buffer = np.ones(1000, np.uint8)
    barrier = threading.Barrier(1)
    with pytest.raises(AssertionError):
        planted = buffer.view(_Planted)
        bandwidth._read(planted, barrier, [])


class _Planted(np.ndarray):
    """An array whose last byte stays 0 when it is filled."""

    def fill(self, value: int) -> None:
        super().fill(value)
        self[-1] = 0


def test_the_buffer_is_no_matter_of_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "last_level_cache_bytes", lambda: 0)
    assert bandwidth.buffer_bytes() >= 256 * 2**20
    monkeypatch.setattr(hardware, "last_level_cache_bytes", lambda: 2**30)
    assert bandwidth.buffer_bytes() >= 4 * 2**30


def test_it_is_measured_in_a_child_whose_buffer_is_not_ours() -> None:
    before = hardware.peak_process_bytes()
    samples = run_in_child("quantlab.bench.bandwidth:work", {"threads": 1})
    assert len(samples) == bandwidth.PASSES
    assert hardware.peak_process_bytes() - before < 64 * 2**20


@pytest.mark.gpu
def test_the_bandwidth_of_a_device_is_that_of_its_memory() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    samples = run_in_child("quantlab.bench.bandwidth:work", {"kind": "cuda", "threads": 1})
    assert len(samples) == bandwidth.PASSES
    # No device that runs torch has less; none has more than 20 TB/s.
    assert 50e9 < bandwidth.best(samples) < 20e12


def test_a_device_that_is_not_there_has_no_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert run_in_child("quantlab.bench.bandwidth:work", {"kind": "cuda", "threads": 1}) == []
