"""Sequences of a step lie side by side in llama.cpp's KV: moves against a model, and what the backend gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantlab.runtime import llamacpp, llamacpp_library
from quantlab.runtime.backend import Batch, Capacity, Logits
from quantlab.runtime.llamacpp_streams import Streams
from quantlab.runtime.step_model import shape_of
from tests.tiny_gguf import write_gguf

N = 6


@given(st.lists(st.tuples(st.sets(st.integers(0, N - 1), min_size=1), st.sets(st.integers(0, N - 1))), max_size=30))
def test_every_sequence_keeps_its_own_kv(steps: list[tuple[set[int], set[int]]]) -> None:
    """Each step computes some sequences and then forgets some: what lies in the streams is always of its owner."""
    streams, held = Streams(N), [0] * N
    content: dict[int, int] = {}
    for seqs, forgotten in steps:
        before = dict(content)
        moves = streams.close_up(seqs, held)
        assert len({place for _, place in moves}) == len(moves)
        for source, place in moves:
            assert place not in content, "a sequence was written over"
            content[place] = content.pop(source)
        assert sorted(streams.of) == list(range(N))
        idle = {seq for seq in range(N) if held[seq]} - seqs
        assert all(before.get(streams.of[seq]) == seq for seq in idle), "one that is not in the step was moved"
        used = [streams.of[seq] for seq in seqs]
        if not idle:
            assert max(used) - min(used) + 1 == len(used)
        for seq in seqs:
            held[seq] += 1
            content[streams.of[seq]] = seq
        for seq in forgotten:
            held[seq] = 0
            content.pop(streams.of[seq], None)
        assert all(content[streams.of[seq]] == seq for seq in range(N) if held[seq])


def test_as_few_as_can_be_are_moved() -> None:
    streams = Streams(8)
    # 5, 6 and 7 hold tokens and 0 begins: it goes to them.
    assert streams.close_up({0, 5, 6, 7}, [0, 0, 0, 0, 0, 3, 3, 3]) == []
    assert streams.of[0] == 4
    # 6 is gone: one of the others takes its place.
    assert len(streams.close_up({0, 5, 7}, [4, 0, 0, 0, 0, 4, 0, 4])) == 1
    # Around one that stays where it is there is no room: nothing is moved.
    streams = Streams(3)
    assert streams.close_up({0, 2}, [1, 1, 1]) == []
    assert streams.of == [0, 1, 2]


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[llamacpp.LlamaCppBackend]:
    # Read when a context is made: llama.cpp then tells in its log each pass that it makes.
    monkeypatch.setenv("LLAMA_BATCH_DEBUG", "1")
    write_gguf(tmp_path / "tiny.gguf")
    with llamacpp.opened(tmp_path / "tiny.gguf", Capacity(64, 8, 64, shared=False), device="cpu", threads=1) as opened:
        yield opened


def _forward(backend: llamacpp.LlamaCppBackend, parts: list[tuple[int, int, list[int]]]) -> tuple[Logits, int]:
    """A step of (slot, position, tokens): logits of each part's last token, and the passes that llama.cpp made."""
    llamacpp_library._log.clear()
    made = [Batch.of(slot, tokens, start, logits="last") for slot, start, tokens in parts]
    names = ("tokens", "positions", "seqs", "logits")
    rows = backend.forward(Batch(*(np.concatenate([getattr(one, name) for one in made]) for name in names)))
    return np.array(rows), sum("added ubatch" in text for _, text in llamacpp_library._log)


@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [3, 2, 1, 0], [6, 0, 5, 2]])
def test_a_step_is_one_pass_over_the_weights_and_its_rows_are_in_the_order_of_the_batch(
    backend: llamacpp.LlamaCppBackend, slots: list[int]
) -> None:
    prompts = [list(range(10 + slot, 20 + slot)) for slot in slots]
    alone = []
    for prompt, slot in zip(prompts, slots, strict=True):
        _forward(backend, [(slot, 0, prompt)])
        alone.append(_forward(backend, [(slot, 10, [7 + slot])])[0][0])
        backend.release(slot)
    for prompt, slot in zip(prompts, slots, strict=True):
        _forward(backend, [(slot, 0, prompt)])
    for position in (10, 11):
        rows, passes = _forward(backend, [(slot, position, [7 + slot]) for slot in slots])
        assert passes == 1
        if position == 10:
            assert np.allclose(rows, alone, atol=1e-4)


def test_the_groups_of_a_step_are_the_passes_of_llama_cpp(backend: llamacpp.LlamaCppBackend) -> None:
    for slot in (1, 4):
        _forward(backend, [(slot, 0, [5] * 6)])
    # Slots 1 and 4 decode or begin beside prompts of several lengths.
    for chunks in ([5], [5, 5], [5, 3], [5, 3, 9], [1, 4]):
        decoding = [(slot, backend.length(slot), [7]) for slot in (1, 4)]
        begun = [(slot, 0, [9] * n) for slot, n in zip((6, 0, 3), chunks, strict=False)]
        _, passes = _forward(backend, decoding + begun)
        assert passes == shape_of([(0, n) for n in chunks], 2, 20).groups
        for slot, _, _ in begun:
            backend.release(slot)
