"""The prefix cache: random histories against a model, and each of its promises by itself."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quantlab.core.errors import QuantlabError
from quantlab.engine import PrefixBlocks
from quantlab.engine.prefix_cache import PrefixCache, block_key, root_key
from tests.prefix_cases import BLOB_BYTES, BLOCK, N_CTX, Model, backend, check, compute, serve, store_of, weak_hash

# Few different blocks, so that prompts share beginnings, and all lengths of the last one.
prompts = st.builds(
    lambda words, rest: [word * BLOCK + i for word in words for i in range(BLOCK)] + [9] * rest,
    st.lists(st.integers(0, 3), max_size=6),
    st.integers(0, BLOCK - 1),
).filter(bool)


class Histories(RuleBasedStateMachine):
    """Sequences begin, fill, decode and end in any order, on a device, RAM and a disk of any size, which is harmed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.running: dict[int, list[int]] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(
        n_seq=st.integers(2, 6), budget=st.integers(0, 10), ram=st.integers(0, 6), disk=st.none() | st.integers(0, 8),
        bits=st.none() | st.integers(0, 4),
    )  # fmt: skip
    def open(self, n_seq: int, budget: int, ram: int, disk: int | None, bits: int | None) -> None:
        self.on = backend(n_seq)
        self.n_seq, self.disk_bytes = n_seq, None if disk is None else disk * 2 * BLOB_BYTES
        self.cache = PrefixCache(
            self.on,
            budget_tokens=budget * BLOCK,
            block_tokens=BLOCK,
            ram_bytes=ram * BLOB_BYTES,
            store=None if disk is None else store_of(self.on, self.folder, self.disk_bytes),
            hash_block=block_key if bits is None else weak_hash(bits),
        )

    @precondition(lambda self: len(self.running) < self.n_seq - 1)
    @rule(tokens=prompts, salt=st.sampled_from(["", "a"]))
    def begin(self, tokens: list[int], salt: str) -> None:
        prompt = self.cache.prompt(tokens, salt)
        told = self.cache.peek(prompt)
        slot, held = self.cache.begin(prompt)
        assert told <= held < len(tokens)
        assert slot not in self.running
        compute(self.on, slot, tokens[: held + (len(tokens) - held) // 2])
        self.running[slot] = tokens

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0), more=st.lists(st.integers(0, 20), max_size=6))
    def fill(self, which: int, more: list[int]) -> None:
        slot = sorted(self.running)[which % len(self.running)]
        tokens = self.running.pop(slot)
        more = more[: N_CTX - len(tokens)]
        compute(self.on, slot, tokens + more)
        self.cache._leases[slot].prompt.extend(more)
        self.running[self.cache.filled(slot)] = tokens + more

    @precondition(lambda self: len(self.running) < self.n_seq - 1)
    @rule(stream=st.lists(prompts, min_size=1, max_size=4))
    def serve(self, stream: list[list[int]]) -> None:
        for tokens in stream:
            serve(self.cache, self.on, tokens)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0), sound=st.booleans())
    def end(self, which: int, sound: bool) -> None:
        slot = sorted(self.running)[which % len(self.running)]
        del self.running[slot]
        self.cache.end(slot, self.on.length(slot) if sound else 0)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert all(block.users for block in self.cache._tree.device)
        assert not self.cache._tree.ram

    @rule()
    def persist(self) -> None:
        self.cache.persist()

    @rule(which=st.integers(0), how=st.sampled_from(["cut", "flip", "remove", "swap", "empty"]))
    def harm(self, which: int, how: str) -> None:
        files = sorted(self.folder.glob("*/*.kv"))
        if not files:
            return
        file, other = files[which % len(files)], files[(which + 1) % len(files)]
        if how == "swap" and other.stat().st_size > file.stat().st_size:
            # What grows a file breaks the budget by itself.
            file, other = other, file
        data = file.read_bytes()
        place = which % len(data) if data else 0
        if how == "remove":
            file.unlink()
        else:
            spoilt = {
                "cut": data[:place],
                "flip": data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :] if data else b"",
                "swap": other.read_bytes(),
                "empty": b"",
            }
            file.write_bytes(spoilt[how])

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "cache"):
            return
        check(self.cache, self.on)
        for slot, tokens in self.running.items():
            held = self.on.length(slot)
            fresh = backend(1, n_ctx=4 * N_CTX)
            compute(fresh, 0, tokens)
            assert self.on._states[slot] == fresh._states[0][:held], "a wrong KV"
        stored = sum(file.stat().st_size for file in self.folder.glob("*/*.kv"))
        assert self.disk_bytes is None or stored <= self.disk_bytes


TestHistories = Histories.TestCase
TestHistories.settings = hypothesis.settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)


@hypothesis.given(
    st.integers(0, 12),
    st.lists(st.tuples(st.sampled_from(["begin", "fill", "end"]), prompts, st.integers(0, 9)), max_size=60),
)
@hypothesis.settings(max_examples=200, derandomize=True)
def test_hits_and_evictions_are_those_of_the_model(most: int, steps: list[tuple[str, list[int], int]]) -> None:
    on = backend(40)
    cache, model = PrefixCache(on, budget_tokens=most * BLOCK, block_tokens=BLOCK), Model(most)
    running: list[tuple[int, int, list[int]]] = []
    for name, (step, tokens, which) in enumerate(steps):
        if step == "begin" and len(running) < 6:
            slot, held = cache.begin(cache.prompt(tokens))
            assert held == model.begin(name, tokens)
            compute(on, slot, tokens)
            running.append((name, slot, tokens))
        elif running:
            of, slot, prompt = running.pop(which % len(running))
            model.offer(of, prompt)
            if step == "fill":
                running.append((of, cache.filled(slot), prompt))
            else:
                cache.end(slot, len(prompt))
                model.end(of)
        blocks = {tuple(np.frombuffer(block.prefix(), np.int32).tolist()) for block in cache._tree.device}
        assert blocks == set(model.used)
    for _, slot, tokens in running:
        cache.end(slot, len(tokens))
    check(cache, on)


@hypothesis.given(st.integers(0, 12), st.lists(prompts, max_size=30))
@hypothesis.settings(max_examples=100, derandomize=True)
def test_it_is_the_cache_of_a_simulated_replica(most: int, stream: list[list[int]]) -> None:
    on = backend(40)
    cache, other = PrefixCache(on, budget_tokens=most * BLOCK, block_tokens=BLOCK), PrefixBlocks(most * BLOCK, BLOCK)
    for tokens in stream:
        prefix = tuple(hash(tuple(tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK))
        assert serve(cache, on, tokens) == min(other.match(prefix), len(tokens) - 1)
        other.insert(prefix)


def test_a_prompt_does_not_push_out_what_it_shares() -> None:
    on = backend(2)
    cache = PrefixCache(on, budget_tokens=40, block_tokens=BLOCK)
    first, second = [1] * 9, [2] * 9
    serve(cache, on, first)
    serve(cache, on, second)
    # Both sequences are the cache's; one must be emptied, and the older one is needed.
    assert serve(cache, on, first) == 2 * BLOCK
    check(cache, on)
    assert serve(cache, on, second) == 0


def test_the_last_token_is_computed_wherever_the_others_lie(tmp_path: Path) -> None:
    on = backend(3)
    cache = PrefixCache(on, budget_tokens=2 * BLOCK, block_tokens=BLOCK, ram_bytes=10**4, store=store_of(on, tmp_path))
    prompt = [1] * (2 * BLOCK)
    assert serve(cache, on, prompt) == 0
    assert serve(cache, on, prompt) == 2 * BLOCK - 1
    serve(cache, on, [2] * (2 * BLOCK))
    # From RAM, then from disk, come whole blocks.
    assert serve(cache, on, prompt) == BLOCK
    cache.persist()
    cache.clear()
    assert serve(cache, on, prompt) == BLOCK
    assert cache.counters()["hit_disk_tokens"] == BLOCK


def test_ram_has_a_budget_of_its_own() -> None:
    on = backend(3)
    cache = PrefixCache(on, budget_tokens=BLOCK, block_tokens=BLOCK, ram_bytes=2 * BLOB_BYTES)
    for word in range(5):
        serve(cache, on, [word] * (BLOCK + 1))
        check(cache, on)
    assert [serve(cache, on, [word] * (BLOCK + 1)) for word in (3, 4, 0)] == [BLOCK, BLOCK, 0]
    assert cache.counters()["evicted_ram"] > 0


def test_more_sequences_than_the_backend_has_are_refused() -> None:
    on = backend(2)
    cache = PrefixCache(on, budget_tokens=40, block_tokens=BLOCK)
    cache.begin(cache.prompt([1]))
    cache.begin(cache.prompt([2]))
    with pytest.raises(QuantlabError, match="2 sequences run"):
        cache.begin(cache.prompt([3]))


def test_a_hash_only_finds_a_block() -> None:
    on = backend(8)
    cache = PrefixCache(on, budget_tokens=200, block_tokens=BLOCK, hash_block=weak_hash(0))
    serve(cache, on, [1] * 9)
    assert serve(cache, on, [1] * 9) == BLOCK
    assert serve(cache, on, [2] * 9) == 0
    assert cache.counters()["collisions"] > 0
    check(cache, on)


def test_keys_stand_for_all_that_changes_the_kv() -> None:
    roots = [
        root_key(b"model"), root_key(b"other"), root_key(b"model", adapter="a"), root_key(b"model", salt="a"),
        root_key(b"modela"), root_key(b"model", adapter="a", salt="b"), root_key(b"model", adapter="ab"),
    ]  # fmt: skip
    assert len(set(roots)) == len(roots)
    chained = {block_key(root, tokens) for root in roots for tokens in (b"1234", b"1235", b"12345678")}
    assert len(chained) == 3 * len(roots)
