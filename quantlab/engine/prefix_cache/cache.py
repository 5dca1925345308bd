"""The same prefix computed once: blocks of KV that sequences share, on any backend that can `share`.

A block lies in the KV of a device sequence, its slot, behind the blocks before it; `share` lets other sequences have it
too, and moves nothing. A sequence that ends leaves its slot to the cache, for as long as a block in it is nowhere else.
What is evicted from the device goes to RAM, and from there to disk, where there is room (`save`), and comes back
(`restore`) where that is predicted to take less time than computing it again.

The cache has a budget of its own: the KV of running sequences is counted in full beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.result import Notice
from quantlab.engine.costs import Costs
from quantlab.engine.limits import Limits
from quantlab.engine.prefix_cache.blocks import Block, Lease, Tree
from quantlab.engine.prefix_cache.keys import Prompt, block_key, root_key
from quantlab.engine.prefix_cache.residency import Residency
from quantlab.engine.prefix_cache.restoring import RestoreCosts, Tier, worth_restoring
from quantlab.engine.prefix_cache.store import BlockStore
from quantlab.runtime.backend import Backend, Tokens
from quantlab.runtime.clock import Clock, WallClock

_COUNTS = (
    "query_tokens", "hit_tokens", "hit_device_tokens", "hit_ram_tokens", "hit_disk_tokens", "not_worth_restoring",
    "failed_restores",
)  # fmt: skip


class PrefixCache:
    """Blocks of `block_tokens` tokens on one backend, in RAM and in a store.

    `budget_tokens` bounds what lies on the device, `ram_bytes` what lies in RAM. `costs` predicts what recomputing
    takes; without it whatever is held is restored. `adapter` names what else changes the KV besides the model.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        budget_tokens: int,
        block_tokens: int = 16,
        ram_bytes: int = 0,
        store: BlockStore | None = None,
        costs: Costs | None = None,
        clock: Clock | None = None,
        adapter: str = "",
        hash_block: Callable[[bytes, bytes], bytes] = block_key,
    ) -> None:
        if block_tokens < 1 or budget_tokens < 0 or ram_bytes < 0:
            raise UsageError(
                f"a prefix cache of {budget_tokens} tokens and {ram_bytes} bytes in blocks of {block_tokens} tokens",
                "give sizes from 1 on",
            )
        if store is not None and store.block_tokens != block_tokens:
            raise UsageError(f"a store of blocks of {store.block_tokens} tokens for blocks of {block_tokens}")
        if not backend.describe().capacity.shared:
            raise UsageError("the backend was opened without sharing", "open it with `Capacity(shared=True)`")
        self.budget_tokens, self.block_tokens = budget_tokens, block_tokens
        self._backend, self._clock, self._adapter = backend, clock or WallClock(), adapter
        self._costs, self.restore_costs = costs, RestoreCosts()
        self._tree, self._hash_block = Tree(block_tokens), hash_block
        self._residency = Residency(
            backend, self._tree, most_blocks=budget_tokens // block_tokens, ram_bytes=ram_bytes, store=store
        )
        self._leases: dict[int, Lease] = {}
        self._counts = dict.fromkeys(_COUNTS, 0)

    def check(self, limits: Limits) -> None:
        """Refuse limits that leave no room beside the sequences that run: UsageError."""
        capacity = self._backend.describe().capacity
        room = capacity.n_ctx * capacity.n_seq
        if limits.max_num_seqs >= capacity.n_seq or limits.kv_budget_tokens + self.budget_tokens > room:
            raise UsageError(
                f"{limits.max_num_seqs} sequences with {limits.kv_budget_tokens} tokens of KV and a prefix cache of "
                f"{self.budget_tokens} tokens: the backend was opened for {capacity.n_seq} sequences and {room} tokens",
                "give `limits_of` the tokens of the cache as `prefix_tokens`, or open the backend larger",
            )

    def prompt(self, tokens: Sequence[int] | Tokens = (), salt: str = "") -> Prompt:
        """A prompt as the other functions take it; prompts of different salts share nothing."""
        root = root_key(self._backend.identity(), adapter=self._adapter, salt=salt)
        prompt = Prompt(root, self.block_tokens, self._hash_block)
        prompt.extend(tokens)
        return prompt

    def peek(self, prompt: Prompt) -> int:
        """How many tokens of a prompt lie on the device; one is always computed, for its logits."""
        chain = self._tree.chain(prompt)
        return min(len(prompt) - 1, self.block_tokens * sum(1 for block in chain if block.slots))

    def begin(self, prompt: Prompt) -> tuple[int, int]:
        """A sequence of the backend to compute a prompt in, and how many of its tokens it holds already.

        At least the last token is left to be computed.
        """
        chain = self._tree.chain(prompt)
        blocks = [block for block in chain if block.slots]
        slot, held = self._slot(blocks), max(0, min(self.block_tokens * len(blocks), len(prompt) - 1))
        if held:
            self._backend.share(next(iter(blocks[-1].slots)), slot, held)
        # Of a prompt that is held to its end the last block is shared but for a token: it is not this sequence's.
        whole = held // self.block_tokens
        for block in blocks[whole:]:
            block.users -= 1
        for block in blocks[:whole]:
            block.slots.add(slot)
        lease = self._leases[slot] = Lease(prompt, blocks[:whole])
        self._counts["query_tokens"] += len(prompt)
        self._count_hit("device", held)
        if whole == len(blocks):
            self._restore(slot, lease, chain)
        self._tree.touch(self._tree.chain(prompt))
        return slot, self._backend.length(slot)

    def begin_empty(self, prompt: Prompt) -> int:
        """An empty sequence of the backend for a prompt whose KV comes from elsewhere."""
        slot = self._slot([])
        self._leases[slot] = Lease(prompt, [])
        return slot

    def filled(self, slot: int) -> int:
        """The slot holds the KV of its prompt, and goes on: others may share it. Returns its slot from now on."""
        return self._keep(slot, len(self._leases[slot].prompt))

    def end(self, slot: int, n_tokens: int = 0) -> None:
        """The sequence is over; the cache keeps the KV of the first `n_tokens` of its prompt, which it holds."""
        lease, n_tokens = self._leases[slot], min(n_tokens, len(self._leases[slot].prompt))
        if len(lease.blocks) + len(self._found(lease, n_tokens)) < n_tokens // self.block_tokens:
            slot = self._keep(slot, n_tokens)
        del self._leases[slot]
        for block in lease.blocks:
            block.users -= 1
        self._tree.touch(lease.blocks)
        self._residency.keep(slot, lease.blocks)

    def clear(self) -> None:
        """Forget all that no running sequence uses, on the device and in RAM; the store keeps what it has."""
        self._residency.clear()

    def persist(self) -> None:
        """Put all that is held into the store, for other processes and later runs."""
        self._residency.persist()

    def counters(self) -> dict[str, int]:
        """Tokens asked and found, blocks evicted, since the cache was made; counts of the store as `store_...`."""
        store = self._residency.store
        return {
            **self._counts,
            "evicted_device": self._residency.evicted_device,
            "evicted_ram": self._residency.evicted_ram,
            "collisions": self._tree.collisions,
            **{f"store_{name}": n for name, n in (store.counts if store else {}).items()},
        }

    def held(self) -> dict[str, int]:
        """What is held now; `shared_tokens` are those that running sequences would hold more without sharing."""
        more = sum(block.users - 1 for block in self._tree.device if block.users > 1)
        return {
            "device_tokens": len(self._tree.device) * self.block_tokens,
            "ram_bytes": self._tree.ram_bytes,
            "shared_tokens": more * self.block_tokens,
        }

    def notices(self) -> list[Notice]:
        """What went wrong at the store."""
        return self._residency.store.notices() if self._residency.store else []

    # what a prompt finds

    def _slot(self, needed: list[Block]) -> int:
        """An empty sequence of the backend, which is not made at the cost of the `needed` blocks; these have a user."""
        slot = self._taken(needed)
        if slot is None:
            raise QuantlabError(
                f"{len(self._leases)} sequences run and the prefix cache has no other for the next",
                "open the backend with a larger `n_seq`, or lower `max_num_seqs`",
            )
        return slot

    def _taken(self, needed: list[Block]) -> int | None:
        """The same; None, and no user more, where there is none."""
        for block in needed:
            block.users += 1
        slot = self._residency.take()
        if slot is None:
            for block in needed:
                block.users -= 1
        return slot

    def _last(self, lease: Lease) -> Block:
        return lease.blocks[-1] if lease.blocks else self._tree.root(lease.prompt.root)

    def _restore(self, slot: int, lease: Lease, chain: list[Block]) -> None:
        """Continue the slot with blocks of RAM and disk, as far as that is worth it."""
        # Its last token must be computed.
        most = (len(lease.prompt) - 1) // self.block_tokens
        tiers: list[Tier] = ["ram"] * (min(most, len(chain)) - len(lease.blocks))
        store = self._residency.store
        for index in range(len(chain), most if store is not None else 0):
            if store is None or lease.prompt.key(index) not in store:
                break
            tiers.append("disk")
        start = len(lease.blocks) * self.block_tokens
        worth = worth_restoring(tiers, self.restore_costs, self._costs, start=start, block_tokens=self.block_tokens)
        self._counts["not_worth_restoring"] += len(tiers) - worth
        for tier in tiers[:worth]:
            began = self._clock.now()
            if not self._restore_one(slot, lease):
                break
            self.restore_costs.observe(tier, self.block_tokens, self._clock.now() - began)
            self._count_hit(tier, self.block_tokens)
        if store is not None and worth:
            store.touch([block.key for block in lease.blocks])

    def _restore_one(self, slot: int, lease: Lease) -> bool:
        """Continue the slot with its next block; False where it is gone, harmed, or finds no room."""
        at, prompt = self._last(lease), lease.prompt
        known, store = self._tree.child(at, prompt), self._residency.store
        blob = known.blob if known else None
        if blob is None and store is not None:
            blob = store.get(prompt.key(at.index + 1), prompt.root, prompt.until(at.index + 1))
        if blob is None or not self._residency.make_room(1):
            return False
        # Room may have been made at the cost of the block itself, in RAM.
        block = self._tree.child(at, prompt) or self._tree.add(at, prompt)
        if block is None:
            return False
        try:
            self._backend.restore(slot, blob)
        except QuantlabError:
            self._counts["failed_restores"] += 1
            self._residency.spoilt(block)
            return False
        self._hold(slot, lease, block)
        return True

    # what a prompt leaves

    def _keep(self, slot: int, n_tokens: int) -> int:
        """The first `n_tokens` of the prompt, which the slot holds, become blocks of the cache."""
        lease = self._leases[slot]
        if found := self._found(lease, n_tokens):
            to = self._regraft(slot, lease, found, n_tokens)
            if to is None:
                return slot
            slot = to
        self._add(slot, lease, n_tokens)
        self._tree.touch(lease.blocks)
        return slot

    def _found(self, lease: Lease, n_tokens: int) -> list[Block]:
        """The blocks after those of the lease that the slot has computed, and others before it."""
        at, found = self._last(lease), list[Block]()
        for _ in range(len(lease.blocks), n_tokens // self.block_tokens):
            block = self._tree.child(at, lease.prompt)
            if block is None or not block.slots:
                break
            found.append(block)
            at = block
        return found

    def _regraft(self, slot: int, lease: Lease, found: list[Block], n_tokens: int) -> int | None:
        """The same sequence in another slot, where it shares what it had computed itself: its copy is given up.

        None where there is no other slot.
        """
        to = self._taken(found)
        if to is None:
            return None
        self._backend.share(next(iter(found[-1].slots)), to, self.block_tokens * (found[-1].index + 1))
        self._backend.share(slot, to, n_tokens)
        self._residency.leave(slot, lease.blocks)
        lease.blocks += found
        for block in lease.blocks:
            block.slots.add(to)
        self._leases[to] = self._leases.pop(slot)
        return to

    def _add(self, slot: int, lease: Lease, n_tokens: int) -> None:
        """The blocks that the slot holds beyond those of the cache become blocks of the cache, as far as they fit."""
        for _ in range(self._residency.make_room(n_tokens // self.block_tokens - len(lease.blocks))):
            at, prompt = self._last(lease), lease.prompt
            block = self._tree.child(at, prompt) or self._tree.add(at, prompt)
            if block is None:
                return
            self._hold(slot, lease, block)

    def _hold(self, slot: int, lease: Lease, block: Block) -> None:
        """The slot of a running sequence holds this block, after those that it holds."""
        block.slots.add(slot)
        block.users += 1
        lease.blocks.append(block)
        self._tree.device[block] = None

    def _count_hit(self, tier: Tier, tokens: int) -> None:
        self._counts["hit_tokens"] += tokens
        self._counts[f"hit_{tier}_tokens"] += tokens
