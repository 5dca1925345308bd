"""What a block of KV is called: the hash of its tokens, chained to the hash of the block before it.

The first block is chained to a root that stands for all else that changes the KV, so that equal tokens under another
model, adapter or salt never meet (Kwon et al. 2023, arXiv:2309.06180, and vLLM's design of prefix caching). A hash only
finds a block: whoever takes it compares the tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from quantlab.runtime.backend import Tokens

KEY_BYTES = 32
TOKEN_BYTES = 4


def root_key(identity: bytes, *, adapter: str = "", salt: str = "") -> bytes:
    """The root of one model (`Backend.identity`), adapter and tenant: those of different salts share nothing."""
    parts = [identity, adapter.encode(), salt.encode()]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """The key of a block from that of the block (or root) before it and its own tokens."""
    return hashlib.sha256(parent + tokens).digest()


class Prompt:
    """The tokens of one prompt, block by block: as they are hashed and compared, int32, and their keys, each made once.

    Whoever computes the prompt keeps it, and adds what it generates.
    """

    def __init__(self, root: bytes, block_tokens: int, hash_block: Callable[[bytes, bytes], bytes] = block_key) -> None:
        self.root, self.block_tokens, self._hash = root, block_tokens, hash_block
        self._width, self._data, self._keys = block_tokens * TOKEN_BYTES, bytearray(), list[bytes]()

    def __len__(self) -> int:
        return len(self._data) // TOKEN_BYTES

    def extend(self, tokens: Sequence[int] | Tokens) -> None:
        """These come after those that it has."""
        self._data += np.asarray(tokens, "<i4").tobytes()

    def part(self, index: int) -> bytes:
        """The tokens of a whole block."""
        return bytes(self._data[index * self._width : (index + 1) * self._width])

    def until(self, index: int) -> bytes:
        """All tokens up to the end of a whole block."""
        return bytes(self._data[: (index + 1) * self._width])

    def key(self, index: int) -> bytes:
        """The key of a whole block."""
        keys = self._keys
        while len(keys) <= index:
            keys.append(self._hash(keys[-1] if keys else self.root, self.part(len(keys))))
        return keys[index]
