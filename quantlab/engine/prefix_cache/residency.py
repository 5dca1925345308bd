"""Where blocks lie: in slots of the device, in RAM, on disk; who makes room, and who goes where.

The least recently used block that no running sequence needs leaves the device first. As using a block uses those before
it too, it is always the last of its branch: no block is left without the ones before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from quantlab.core.errors import QuantlabError
from quantlab.engine.prefix_cache.blocks import Block, Tree
from quantlab.engine.prefix_cache.store import BlockStore
from quantlab.runtime.backend import Backend


class Residency:
    """The slots of a backend, and the blocks in them, in RAM and in the store.

    At most `most_blocks` on the device and `ram_bytes` in RAM.
    """

    def __init__(
        self, backend: Backend, tree: Tree, *, most_blocks: int, ram_bytes: int, store: BlockStore | None
    ) -> None:
        self._backend, self._tree, self.store = backend, tree, store
        self._most, self._ram_most = most_blocks, ram_bytes
        self._free = list(range(backend.describe().capacity.n_seq))[::-1]
        # The slots that no sequence runs in, by the last block that each holds. No other slot holds that block too,
        # unless a sequence runs there.
        self._tails: dict[Block, int] = {}
        self.evicted_device = self.evicted_ram = 0

    def take(self) -> int | None:
        """An empty slot, which is made by emptying one; None where sequences run in all, or need what is in them."""
        if not self._free:
            # One whose blocks a running sequence holds too costs nothing.
            tail = next((tail for tail in self._tails if len(tail.slots) > 1), None)
            if tail is not None:
                self.leave(self._tails.pop(tail), [tail, *tail.ancestors()])
        while not self._free:
            oldest = next((b for b in self._tree.device if b in self._tails and not b.users), None)
            if oldest is None:
                return None
            self._evict(oldest)
        return self._free.pop()

    def leave(self, slot: int, chain: Iterable[Block]) -> None:
        """Empty a slot that held `chain`, which others hold too."""
        self._backend.release(slot)
        for block in chain:
            block.slots.discard(slot)
        self._free.append(slot)

    def keep(self, slot: int, chain: list[Block]) -> None:
        """A sequence is over: the cache has its slot from now on, as far as another does not hold the same."""
        if not chain or chain[-1].slots != {slot}:
            self.leave(slot, chain)
            return
        self._backend.truncate(slot, self._tree.block_tokens * len(chain))
        for block in chain:
            if (other := self._tails.pop(block, None)) is not None:
                self.leave(other, [block, *block.ancestors()])
        self._tails[chain[-1]] = slot

    def make_room(self, n: int) -> int:
        """Evict until `n` more blocks fit on the device, as far as possible; returns how many do."""
        while len(self._tree.device) + n > self._most and self.evict():
            pass
        return max(0, min(n, self._most - len(self._tree.device)))

    def evict(self) -> bool:
        """Let the oldest block that no running sequence uses leave the device; False where there is none."""
        block = next((block for block in self._tree.device if not block.users), None)
        if block is not None:
            self._evict(block)
        return block is not None

    def _evict(self, block: Block) -> None:
        slot, parent = self._tails.pop(block), block.parent
        assert parent is not None
        self._demote(block)
        del self._tree.device[block]
        block.slots.clear()
        self.evicted_device += 1
        if parent.slots == {slot}:
            self._backend.truncate(slot, self._tree.block_tokens * block.index)
            self._tails[parent] = slot
        else:
            self.leave(slot, block.ancestors())
        if block.blob is None:
            self._forget(block)

    def _demote(self, block: Block) -> None:
        """Keep the KV of a block that leaves the device in RAM, else in the store."""
        if block.blob is not None:
            self._tree.ram.move_to_end(block)
            return
        if not self._ram_most:
            self._to_store(block)
            return
        blob = self.blob(block)
        if blob is None or len(blob) > self._ram_most:
            self._to_store(block, blob)
            return
        while self._tree.ram_bytes + len(blob) > self._ram_most:
            self.drop_blob(next(iter(self._tree.ram)))
        self._tree.put_blob(block, blob)

    def drop_blob(self, block: Block) -> None:
        """Let a block leave RAM for the store."""
        blob = self._tree.take_blob(block)
        self.evicted_ram += 1
        self._to_store(block, blob)
        if not block.slots:
            self._forget(block)

    def _to_store(self, block: Block, blob: bytes | None = None) -> None:
        if self.store is None or block.key in self.store:
            return
        blob = self.blob(block) if blob is None else blob
        if blob is not None:
            self.store.put(block.key, block.root(), block.prefix(), blob)

    def _forget(self, block: Block) -> None:
        """The block is neither on the device nor in RAM; what stands after it there is of no use any more."""
        for child in list(block.children):
            self.drop_blob(child)
        self._tree.forget(block)

    def spoilt(self, block: Block) -> None:
        """A block that is not on the device did not come back from RAM: it is of no use."""
        if block.blob is not None:
            self._tree.take_blob(block)
        self._forget(block)

    def blob(self, block: Block) -> bytes | None:
        """The saved KV of a block; None where the backend cannot save it."""
        if block.blob is not None:
            return block.blob
        start = block.index * self._tree.block_tokens
        try:
            return self._backend.save(next(iter(block.slots)), start, start + self._tree.block_tokens)
        except QuantlabError:
            return None

    def clear(self) -> None:
        """Forget all that no running sequence uses, on the device and in RAM; the store gets nothing."""
        ram, self._ram_most, store, self.store = self._ram_most, 0, self.store, None
        while self.evict():
            pass
        while self._tree.ram:
            self.drop_blob(next(iter(self._tree.ram)))
        self._ram_most, self.store = ram, store

    def persist(self) -> None:
        """Put all that is known into the store."""
        # Children first: what is put last is the last to go.
        for block in reversed(list(self._tree.parents_first())):
            self._to_store(block)
