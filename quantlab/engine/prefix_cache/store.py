"""Blocks of KV in a folder, which several processes may use at once and leave at any moment.

A block is a file, named by its key: magic, root, all tokens up to its last, the KV as `Backend.save` gave it, sha256
of all. A file is written beside and renamed; readers take no lock. What is damaged, of other tokens, or gone meanwhile
is a miss, and what cannot be written is left out. The disk is not waited for: a power failure may lose blocks, and the
hash shows it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.files import PARTIAL_SUFFIX, locked, os_error, write_text, written
from quantlab.core.result import Notice

_MAGIC = b"QLPB\x01"
_FORMAT = 1
_HASH_BYTES = 32
_SUFFIX = ".kv"
# A file that was never finished belongs to a writer that was killed; none takes so long.
_ABANDONED_S = 600.0
# Freed beyond what is needed when the budget is full, so that not every block looks through the folder.
_SLACK = 0.05


class _Manifest(msgspec.Struct, frozen=True):
    format: int
    identity: str
    block_tokens: int


class BlockStore:
    """A folder of blocks of one model; a folder of another model or version is refused with a QuantlabError.

    All processes together keep within the `budget_bytes` (None: no limit) that the writing one was given.
    """

    def __init__(
        self, folder: Path, identity: bytes, *, block_tokens: int = 16, budget_bytes: int | None = None
    ) -> None:
        if block_tokens < 1 or (budget_bytes is not None and budget_bytes < 0):
            raise UsageError(
                f"a store of {budget_bytes} bytes in blocks of {block_tokens} tokens", "give sizes from 1 on"
            )
        self.folder, self._budget = folder, budget_bytes
        self.block_tokens = block_tokens
        self.counts = dict.fromkeys(("written", "read", "evicted", "damaged", "collisions", "failed"), 0)
        self._said: dict[str, Notice] = {}
        self._claim(_Manifest(_FORMAT, identity.hex(), block_tokens))

    def _claim(self, mine: _Manifest) -> None:
        path = self.folder / "store.json"
        with locked(self.folder / "lock"):
            if not path.exists():
                write_text(path, msgspec.json.encode(mine).decode() + "\n")
            try:
                found = msgspec.json.decode(path.read_bytes(), type=_Manifest)
            except OSError as error:
                raise os_error(error, path) from error
            except msgspec.MsgspecError:
                found = None
        if found != mine:
            same = found is not None and (found.format, found.identity) == (mine.format, mine.identity)
            what = "blocks of another size" if same else "another model or version"
            raise QuantlabError(
                f"`{self.folder}` is a store of {what}" if found else f"`{path}` is damaged",
                "give another folder, or remove this one",
            )

    def __contains__(self, key: bytes) -> bool:
        return self._path(key).exists()

    def get(self, key: bytes, root: bytes, prefix: bytes) -> bytes | None:
        """The KV of the block that ends the tokens `prefix` under `root`; None where it is not there unharmed."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._fail(error, path)
            return None
        head = _head(root, prefix)
        if not data.startswith(_MAGIC) or hashlib.sha256(data[:-_HASH_BYTES]).digest() != data[-_HASH_BYTES:]:
            self.counts["damaged"] += 1
            self._say("damaged-block", f"a block in `{self.folder}` is damaged: it was removed, and is computed again")
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        if not data.startswith(head):
            self.counts["collisions"] += 1
            return None
        self.counts["read"] += 1
        return data[len(head) : -_HASH_BYTES]

    def put(self, key: bytes, root: bytes, prefix: bytes, blob: bytes) -> bool:
        """Keep a block; whether it is there now. The least recently used ones make room for it."""
        path, body = self._path(key), _head(root, prefix) + blob
        size = len(body) + _HASH_BYTES
        if path.exists():
            return True
        if self._budget is not None and size > self._budget:
            return False
        try:
            with locked(self.folder / "lock"):
                self._reserve(size)
                with written(path, durable=False) as temporary:
                    temporary.write_bytes(body + hashlib.sha256(body).digest())
        except (QuantlabError, OSError) as error:
            self._fail(error, path)
            return False
        self.counts["written"] += 1
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """These were used now, the blocks of one prompt in their order: the last is the first to go."""
        now = time.time_ns()
        for i, key in enumerate(keys):
            with contextlib.suppress(OSError):
                os.utime(self._path(key), ns=(now - 1000 * i, now - 1000 * i))

    def notices(self) -> list[Notice]:
        """What went wrong, each kind once."""
        return list(self._said.values())

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / f"{name}{_SUFFIX}"

    def _reserve(self, size: int) -> None:
        """Make room for `size` bytes and count them, before they are written: who is killed then counted too many."""
        path, most = self.folder / "used_bytes", math.inf if self._budget is None else self._budget
        try:
            used = int(path.read_text())
        except (OSError, ValueError):
            used = self._evict(most)
        if used + size > most:
            used = self._evict(most - max(size, _SLACK * most))
        path.write_text(str(used + size))

    def _evict(self, most: float) -> int:
        """Remove the oldest blocks until `most` bytes are left, and what killed writers left; returns what is left."""
        found, used = list[tuple[int, int, Path]](), 0
        for path in self.folder.glob("*/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.suffix == _SUFFIX:
                    found.append((status.st_mtime_ns, status.st_size, path))
                elif not path.name.endswith(PARTIAL_SUFFIX) or time.time() - status.st_mtime > _ABANDONED_S:
                    path.unlink()
                    continue
                used += status.st_size
        for _, size, path in sorted(found):
            if used <= most:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                used -= size
                self.counts["evicted"] += 1
        return used

    def _fail(self, error: QuantlabError | OSError, path: Path) -> None:
        self.counts["failed"] += 1
        told = os_error(error, path) if isinstance(error, OSError) else error
        self._say("store-failed", f"a block is left out of the store: {told.message}", told.hint)

    def _say(self, code: str, message: str, hint: str = "") -> None:
        self._said.setdefault(code, Notice(code, message, hint))


def _head(root: bytes, prefix: bytes) -> bytes:
    return _MAGIC + root + struct.pack("<Q", len(prefix)) + prefix
