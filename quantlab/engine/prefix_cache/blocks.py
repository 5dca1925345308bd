"""Blocks of one prompt after the other as a tree: a block's parent is what stands before it.

Nothing is moved here. A block is known while its KV is on the device (`slots`) or in RAM (`blob`). A parent is known as
long as a child is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from quantlab.engine.prefix_cache.keys import Prompt


class Block:
    """Some tokens after those of its parent; a root has none, and `index` -1.

    `slots` are the device's sequences that hold it whole, `users` the running ones that may not lose it.
    """

    __slots__ = ("blob", "children", "index", "key", "parent", "slots", "tokens", "users")

    def __init__(self, key: bytes, parent: Block | None, tokens: bytes) -> None:
        self.key, self.parent, self.tokens = key, parent, tokens
        self.index: int = -1 if parent is None else parent.index + 1
        self.children: set[Block] = set()
        self.users = 0
        self.slots: set[int] = set()
        self.blob: bytes | None = None

    def ancestors(self) -> Iterator[Block]:
        """The blocks before it, the nearest first; not the root."""
        at = self.parent
        while at is not None and at.parent is not None:
            yield at
            at = at.parent

    def prefix(self) -> bytes:
        """All tokens up to its last."""
        parts = [self.tokens, *(block.tokens for block in self.ancestors())]
        return b"".join(reversed(parts))

    def root(self) -> bytes:
        """The key of its root."""
        at = self
        while at.parent is not None:
            at = at.parent
        return at.key


class Lease:
    """What a running sequence has of the cache: the blocks that its prompt begins with and that its slot holds."""

    def __init__(self, prompt: Prompt, blocks: list[Block]) -> None:
        self.prompt, self.blocks = prompt, blocks


class Tree:
    """All blocks that are known, by key; `device` and `ram` hold them by last use, the oldest first."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.device: OrderedDict[Block, None] = OrderedDict()
        self.ram: OrderedDict[Block, None] = OrderedDict()
        self.ram_bytes = 0
        self.collisions = 0
        self._roots: dict[bytes, Block] = {}
        self._blocks: dict[bytes, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def root(self, key: bytes) -> Block:
        """The root of this key; a new one is known once a block hangs from it."""
        return self._roots.get(key) or Block(key, None, b"")

    def chain(self, prompt: Prompt) -> list[Block]:
        """The known blocks that a prompt begins with."""
        at, found = self.root(prompt.root), list[Block]()
        while len(found) < len(prompt) // prompt.block_tokens:
            block = self.child(at, prompt)
            if block is None:
                break
            found.append(block)
            at = block
        return found

    def child(self, parent: Block, prompt: Prompt) -> Block | None:
        """The known block of a prompt after `parent`. A block of the same key that is another is a collision: none."""
        index = parent.index + 1
        block = self._blocks.get(prompt.key(index))
        if block is None:
            return None
        if block.parent is not parent or block.tokens != prompt.part(index):
            self.collisions += 1
            return None
        return block

    def add(self, parent: Block, prompt: Prompt) -> Block | None:
        """The block of a prompt after `parent`, as a new one; None where another block has its key."""
        key = prompt.key(parent.index + 1)
        if key in self._blocks:
            return None
        block = Block(key, parent, prompt.part(parent.index + 1))
        if parent.parent is None:
            self._roots[parent.key] = parent
        parent.children.add(block)
        self._blocks[key] = block
        return block

    def forget(self, block: Block) -> None:
        """Drop a block that is nowhere any more, and has no children."""
        assert not (block.children or block.users or block.slots or block.blob)
        parent = block.parent
        assert parent is not None
        parent.children.remove(block)
        del self._blocks[block.key]
        if parent.parent is None and not parent.children:
            del self._roots[parent.key]

    def touch(self, chain: list[Block]) -> None:
        """These were used now: the last of them is the first to go, so that no child outlives its parent."""
        for block in reversed(chain):
            if block.slots:
                self.device[block] = None
                self.device.move_to_end(block)
            if block.blob is not None:
                self.ram.move_to_end(block)

    def put_blob(self, block: Block, blob: bytes) -> None:
        """Keep the KV of a block in RAM, as its newest."""
        block.blob = blob
        self.ram[block] = None
        self.ram_bytes += len(blob)

    def take_blob(self, block: Block) -> bytes:
        """Take it out again."""
        blob = block.blob
        assert blob is not None
        block.blob = None
        del self.ram[block]
        self.ram_bytes -= len(blob)
        return blob

    def parents_first(self) -> Iterator[Block]:
        """Every known block."""
        todo = list(self._roots.values())
        while todo:
            block = todo.pop()
            todo += block.children
            if block.parent is not None:
                yield block
