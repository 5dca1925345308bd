"""What a block of KV is called: the hash of its tokens, chained to the hash of the block before it.

The first block is chained to a root that stands for all else that changes the KV, so that equal tokens under another
model, adapter or salt never meet (Kwon et al. 2023, arXiv:2309.06180, and vLLM's design of prefix caching). A hash only
finds a block: whoever takes it compares the tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

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


def token_bytes(tokens: Sequence[int] | Tokens) -> bytes:
    """Token ids as they are hashed and compared: int32, little-endian."""
    return np.asarray(tokens, "<i4").tobytes()
