"""A prefix cache on the simulated backend, driven step by step, and what must hold of it after each."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quantlab.engine.prefix_cache import BlockStore, PrefixCache, block_key
from quantlab.engine.prefix_cache.blocks import Block
from quantlab.runtime.backend import Batch, Capacity
from quantlab.runtime.clock import VirtualClock
from quantlab.runtime.simulated import SimulatedBackend
from quantlab.runtime.step_model import StepModel

ROOT = Path(__file__).resolve().parents[1]
BLOCK = 4
N_CTX = 48
# What the simulated backend writes for a block: magic, identity, range, 8 bytes a token, hash.
BLOB_BYTES = 5 + 32 + 16 + 8 * BLOCK + 32


def backend(n_seq: int, *, n_ctx: int = N_CTX, seed: int = 0, swap_token_s: float = 0.0) -> SimulatedBackend:
    capacity = Capacity(n_ctx=n_ctx, n_seq=n_seq, n_batch=4096)
    step_model = StepModel(0.01, 1e-3, 1e-6)
    return SimulatedBackend(capacity, step_model, VirtualClock(), seed=seed, swap_token_s=swap_token_s)


def store_of(
    of: SimulatedBackend, folder: Path, budget_bytes: int | None = None, *, block_tokens: int = BLOCK
) -> BlockStore:
    return BlockStore(folder, of.identity(), block_tokens=block_tokens, budget_bytes=budget_bytes)


def weak_hash(bits: int):
    """Keys of a few bits: most blocks collide."""

    def hash_block(parent: bytes, tokens: bytes) -> bytes:
        return bytes([block_key(parent, tokens)[0] % 2**bits]) + bytes(31)

    return hash_block


def compute(on: SimulatedBackend, slot: int, tokens: list[int]) -> None:
    """Put the tokens that the slot lacks into it."""
    held = on.length(slot)
    if held < len(tokens):
        on.forward(Batch.of(slot, tokens[held:], held, logits="last"))


def expected_states(tokens: list[int]) -> list[int]:
    """What the KV of these tokens stands for, computed afresh."""
    fresh = backend(1, n_ctx=4096)
    fresh.forward(Batch.of(0, tokens, 0, logits="none"))
    return fresh._states[0]


def serve(cache: PrefixCache, on: SimulatedBackend, tokens: list[int], salt: str = "") -> int:
    """One request from its beginning to its end; returns how many of its tokens were held."""
    slot, held = cache.begin(cache.prompt(tokens, salt))
    assert on._states[slot] == expected_states(tokens)[:held] if held else not on._states[slot]
    compute(on, slot, tokens)
    cache.end(cache.filled(slot), len(tokens))
    return held


def check(cache: PrefixCache, on: SimulatedBackend) -> None:
    """Nothing is lost, nothing is freed while it is needed, no budget is exceeded, and every KV is the right one."""
    tree, residency = cache._tree, cache._residency
    running, tails = cache._leases, residency._tails
    slots = [*residency._free, *running, *tails.values()]
    assert sorted(slots) == list(range(on.describe().capacity.n_seq))
    assert all(on.length(slot) == 0 for slot in residency._free)
    for tail, slot in tails.items():
        assert on.length(slot) == (tail.index + 1) * BLOCK
        assert sum(other in tails.values() for other in tail.slots) == 1
    assert len(tree.device) <= residency._most
    assert tree.ram_bytes == sum(len(block.blob) for block in tree.ram) <= max(residency._ram_most, 0)
    for block in tree._blocks.values():
        assert block.slots or block.blob, "a block that is nowhere"
        assert (block in tree.device) == bool(block.slots)
        assert (block in tree.ram) == (block.blob is not None)
        assert block in block.parent.children
        assert block.parent.index < 0 or block.parent in tree._blocks.values(), "a block without its parent"
        assert block.users == sum(block in lease.blocks for lease in running.values())
        for slot in block.slots:
            _check_kv(on, block, slot)
    assert {child for block in tree._blocks.values() for child in block.children} <= set(tree._blocks.values())
    for slot, lease in running.items():
        assert all(slot in block.slots for block in lease.blocks), "freed while it is needed"
    for blocks in (tree.device, tree.ram):
        age = {block: i for i, block in enumerate(blocks)}
        for block in blocks:
            if block.parent in age and (blocks is tree.device or not block.parent.slots):
                assert age[block] < age[block.parent], "a block would go before the one that stands on it"


def _check_kv(on: SimulatedBackend, block: Block, slot: int) -> None:
    tokens = np.frombuffer(block.prefix(), np.int32).tolist()
    assert on._states[slot][: len(tokens)] == expected_states(tokens)


class Model:
    """A prefix cache as one would write it down: the blocks of the device by all tokens up to their end.

    The oldest use goes first, and of one use the last block.
    """

    def __init__(self, most: int) -> None:
        self.most, self.now = most, 0
        self.used: dict[tuple[int, ...], tuple[int, int]] = {}
        self.pins: dict[int, list[tuple[int, ...]]] = {}

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]

    def leading(self, tokens: list[int]) -> list[tuple[int, ...]]:
        found = []
        for prefix in self.prefixes(tokens):
            if prefix not in self.used:
                break
            found.append(prefix)
        return found

    def touch(self, prefixes: list[tuple[int, ...]]) -> None:
        self.now += 1
        for prefix in prefixes:
            self.used[prefix] = (self.now, -len(prefix))

    def begin(self, name: int, tokens: list[int]) -> int:
        found = self.leading(tokens)
        held = min(BLOCK * len(found), len(tokens) - 1)
        self.pins[name] = found[: held // BLOCK]
        self.touch(found)
        return held

    def offer(self, name: int, tokens: list[int]) -> None:
        """The blocks of these tokens come in, the first ones first, and push the oldest out."""
        known = self.leading(tokens)
        self.pins[name] = known
        fresh = self.prefixes(tokens)[len(known) :]
        pinned = {prefix for pins in self.pins.values() for prefix in pins}
        while len(self.used) + len(fresh) > self.most:
            free = [prefix for prefix in self.used if prefix not in pinned]
            if not free:
                break
            del self.used[min(free, key=self.used.__getitem__)]
        fresh = fresh[: max(0, self.most - len(self.used))]
        self.pins[name] = known + fresh
        self.touch(known + fresh)

    def end(self, name: int) -> None:
        self.touch(self.pins.pop(name))
