"""The form of a saved part of a sequence: magic, 32 bytes of the model's identity, its first position and the one after
its last, payload, sha256 of all.
"""

from __future__ import annotations

import hashlib
import struct

from quantlab.core.errors import QuantlabError, UsageError

_IDENTITY_BYTES = _DIGEST_BYTES = 32


def check_part(seq: int, length: int, start: int, end: int) -> None:
    """Refuse to save what a sequence of `length` tokens does not have: UsageError."""
    if length == 0:
        raise UsageError(f"sequence {seq} is empty")
    if not 0 <= start < end <= length:
        raise UsageError(f"tokens {start} to {end} of sequence {seq} asked, it holds {length}")


def pack(magic: bytes, identity: bytes, start: int, end: int, payload: bytes | memoryview) -> bytes:
    """The blob of the tokens `start` to `end` of a sequence."""
    body = b"".join([magic, identity, struct.pack("<QQ", start, end), payload])
    return body + hashlib.sha256(body).digest()


def unpack(blob: bytes, magic: bytes, identity: bytes, *, seq: int, held: int, n_ctx: int) -> tuple[int, memoryview]:
    """The length that sequence `seq`, which holds `held` tokens, will have with the blob, and the payload.

    QuantlabError for what is damaged, of another model, or longer than `n_ctx`; UsageError where it does not continue
    the sequence.
    """
    head = len(magic) + _IDENTITY_BYTES + 16
    body = memoryview(blob)[:-_DIGEST_BYTES]
    if len(blob) < head + _DIGEST_BYTES or hashlib.sha256(body).digest() != blob[-_DIGEST_BYTES:]:
        raise QuantlabError("a saved sequence is damaged or none", "compute it again")
    if not blob.startswith(magic + identity):
        raise QuantlabError("a saved sequence belongs to another model or version", "compute it again")
    start, end = struct.unpack("<QQ", blob[head - 16 : head])
    if held != start:
        raise UsageError(f"sequence {seq} holds {held} tokens, the saved ones begin at {start}", "release it first")
    if end > n_ctx:
        raise QuantlabError(f"a saved sequence of {end} tokens does not fit in {n_ctx}")
    return end, body[head:]
