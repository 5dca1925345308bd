"""Keys and values of all sequences in blocks of 16 tokens, reference counted and copied on write.

A sequence's block prefers its home, the place where it follows the sequence's block before it: a sequence at home
is one slice of memory that attention reads in place. Only one that shares or was displaced is gathered.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

BLOCK_TOKENS = 16


def blocks_of(n_tokens: int) -> int:
    """The number of blocks that hold `n_tokens`."""
    return -(-n_tokens // BLOCK_TOKENS)


class Blocks:
    """Which block holds which tokens of which sequence; no tensor is touched here."""

    def __init__(self, n_seq: int, n_ctx: int) -> None:
        self.per_seq = blocks_of(n_ctx)
        # Sharing only lowers the need: this many are enough for every sequence at full length.
        self._free = dict.fromkeys(range(n_seq * self.per_seq))
        self._users = [0] * (n_seq * self.per_seq)
        self.tables: list[list[int]] = [[] for _ in range(n_seq)]

    def extend(self, seq: int, start: int, end: int) -> list[tuple[int, int]]:
        """Make tokens `start` to `end` of `seq` writable; returns (from, to) blocks to copy first."""
        table, copies = self.tables[seq], []
        for i in range(start // BLOCK_TOKENS, min(len(table), blocks_of(end))):
            if self._users[table[i]] > 1:
                mine = self._take(seq, i)
                copies.append((table[i], mine))
                self._drop(table[i])
                table[i] = mine
        while len(table) < blocks_of(end):
            table.append(self._take(seq, len(table)))
        return copies

    def share(self, src: int, dst: int, n_tokens: int, held: int = 0) -> None:
        """Let `dst`, which holds the first `held` tokens of `src`, use the blocks of those up to `n_tokens`."""
        # A block that it holds in part gives way to the whole one.
        first = held // BLOCK_TOKENS
        self.truncate(dst, first * BLOCK_TOKENS)
        for block in self.tables[src][first : blocks_of(n_tokens)]:
            self.tables[dst].append(block)
            self._users[block] += 1

    def truncate(self, seq: int, n_tokens: int) -> None:
        """Keep the blocks of the first `n_tokens`."""
        table = self.tables[seq]
        for block in table[blocks_of(n_tokens) :]:
            self._drop(block)
        del table[blocks_of(n_tokens) :]

    @property
    def used(self) -> int:
        """Blocks that some sequence uses."""
        return len(self._users) - len(self._free)

    def at_home(self, seq: int) -> bool:
        """Whether the blocks of `seq` lie one after the other at its own place."""
        home = seq * self.per_seq
        return all(block == home + i for i, block in enumerate(self.tables[seq]))

    def slots(self, seq: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """The places of tokens `start` to `end`, counted in tokens over all blocks."""
        first = start // BLOCK_TOKENS
        table = np.array(self.tables[seq][first : blocks_of(end)], np.int64)
        places = (table[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)
        return places[start - first * BLOCK_TOKENS : end - first * BLOCK_TOKENS]

    def _take(self, seq: int, i: int) -> int:
        home = seq * self.per_seq + i
        if home in self._free:
            del self._free[home]
            block = home
        else:
            block = self._free.popitem()[0]
        self._users[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self._users[block] -= 1
        if not self._users[block]:
            self._free[block] = None


class Storage:
    """The tensors: for each layer keys and values (slots, KV heads, head size), zeros at first.

    Zeros, because a masked place counts with weight 0, and 0 x NaN of foreign memory is NaN.
    """

    def __init__(
        self, shapes: list[tuple[int, int, int]], n_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        n_slots = n_blocks * BLOCK_TOKENS
        self.keys = [torch.zeros(n_slots, heads, k, dtype=dtype, device=device) for heads, k, _ in shapes]
        self.values = [torch.zeros(n_slots, heads, v, dtype=dtype, device=device) for heads, _, v in shapes]

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every layer."""
        for tensor in self.keys + self.values:
            for source, target in copies:
                at, to = source * BLOCK_TOKENS, target * BLOCK_TOKENS
                tensor[to : to + BLOCK_TOKENS] = tensor[at : at + BLOCK_TOKENS]

    def read(self, slots: npt.NDArray[np.int64]) -> bytes:
        """Keys and values at `slots`, layer by layer."""
        index = torch.from_numpy(slots).to(self.keys[0].device)
        parts = [
            tensor[index].cpu().contiguous() for pair in zip(self.keys, self.values, strict=True) for tensor in pair
        ]
        return b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)

    def write(self, slots: npt.NDArray[np.int64], payload: bytes) -> None:
        """Put back what `read` gave."""
        index = torch.from_numpy(slots).to(self.keys[0].device)
        at = 0
        for pair in zip(self.keys, self.values, strict=True):
            for tensor in pair:
                shape = (len(slots), *tensor.shape[1:])
                size = len(slots) * tensor[0].numel() * tensor.element_size()
                part = torch.frombuffer(bytearray(payload[at : at + size]), dtype=tensor.dtype).view(shape)
                tensor[index] = part.to(tensor.device)
                at += size
