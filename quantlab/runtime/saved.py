"""The form of a saved sequence: magic, 32 bytes of the model's identity, length in tokens, payload, sha256 of all."""

from __future__ import annotations

import hashlib
import struct

from quantlab.core.errors import QuantlabError

_IDENTITY_BYTES = _DIGEST_BYTES = 32


def pack(magic: bytes, identity: bytes, length: int, payload: bytes | memoryview) -> bytes:
    """The blob of a sequence of `length` tokens."""
    body = b"".join([magic, identity, struct.pack("<Q", length), payload])
    return body + hashlib.sha256(body).digest()


def unpack(blob: bytes, magic: bytes, identity: bytes, n_ctx: int) -> tuple[int, memoryview]:
    """Length and payload; QuantlabError for what is damaged, of another model, or longer than `n_ctx`."""
    head = len(magic) + _IDENTITY_BYTES + 8
    body = memoryview(blob)[:-_DIGEST_BYTES]
    if len(blob) < head + _DIGEST_BYTES or hashlib.sha256(body).digest() != blob[-_DIGEST_BYTES:]:
        raise QuantlabError("a saved sequence is damaged or none", "compute it again")
    if not blob.startswith(magic + identity):
        raise QuantlabError("a saved sequence belongs to another model or version", "compute it again")
    length: int = struct.unpack("<Q", blob[head - 8 : head])[0]
    if length > n_ctx:
        raise QuantlabError(f"a saved sequence of {length} tokens does not fit in {n_ctx}")
    return length, body[head:]
