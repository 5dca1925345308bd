"""The prefix cache of a simulated replica: which blocks of which prompts it holds, least recently used out first.

Blocks are named by hashes that stand for the whole prompt up to them, as in the Mooncake trace. The cache has its own
capacity; the KV of running sequences is counted in full beside it.
"""

from __future__ import annotations

from collections import OrderedDict

from quantlab.core.errors import UsageError


class PrefixBlocks:
    """Hashes of cached blocks."""

    def __init__(self, capacity_tokens: int, block_tokens: float) -> None:
        """A scaled trace has blocks of a broken number of tokens."""
        if capacity_tokens < 0 or not block_tokens > 0:
            raise UsageError(
                f"a prefix cache of {capacity_tokens} tokens in blocks of {block_tokens}", "give sizes above 0"
            )
        self.block_tokens = block_tokens
        self._most = int(capacity_tokens // block_tokens)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, prefix: tuple[int, ...]) -> int:
        """Tokens of the leading blocks that are held."""
        held = 0
        for block in prefix:
            if block not in self._blocks:
                break
            held += 1
        return int(held * self.block_tokens)

    def insert(self, prefix: tuple[int, ...]) -> None:
        """These blocks were computed or used; the last block of a prompt is the first of them to go."""
        blocks = self._blocks
        for block in reversed(prefix):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._most:
            blocks.popitem(last=False)
