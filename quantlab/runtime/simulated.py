"""A backend that computes nothing: pseudo logits from a hash of the tokens, time from a step model.

It holds what a real one holds (lengths, KV per sequence, limits) and refuses what a real one refuses, so that the
engine, its policies and its bookkeeping run on it unchanged. What it does not show: the model's own words, and
anything of time that the step model does not know.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from quantlab.core import hardware
from quantlab.core.errors import UsageError
from quantlab.core.result import RuntimeInfo
from quantlab.runtime import saved
from quantlab.runtime.backend import (
    Batch,
    Capacity,
    Generation,
    Loaded,
    Logits,
    Memory,
    Request,
    Tokens,
    generate_static,
)
from quantlab.runtime.checks import check_batch, check_requests, check_share
from quantlab.runtime.clock import VirtualClock
from quantlab.runtime.step_model import StepShape, StepTime, shape_of

_BLOB_MAGIC = b"QLKS\x02"
# A row of logits is a window of one random vector, at a place that the hash names.
_WINDOWS = 4096
_MULTIPLIER, _MASK = 6364136223846793005, 2**64 - 1
_MOST, _MOST_SEQS = 2**31 - 1, 65_536


class SimulatedBackend:
    """A model that is not there (a `Backend`). Tokens are bytes; logits depend on the sequence's tokens alone.

    Every forward advances `clock` by the step time; `save` and `restore` by `swap_token_s` for each token.
    """

    def __init__(
        self,
        capacity: Capacity,
        step_time: StepTime,
        clock: VirtualClock,
        *,
        n_vocab: int = 512,
        eos: frozenset[int] = frozenset(),
        swap_token_s: float = 0.0,
        kv_bytes_per_token: int = 1,
        seed: int = 0,
    ) -> None:
        sizes = (capacity.n_ctx, capacity.n_seq, capacity.n_batch, capacity.n_ubatch, capacity.n_outputs + 1)
        if min(sizes) < 1 or max(sizes) > _MOST or capacity.n_seq > _MOST_SEQS:
            raise UsageError(f"{capacity} has a size below 1 or too large", "give sizes from 1 on")
        if n_vocab < 256 or not swap_token_s >= 0:
            raise UsageError(
                f"a vocabulary of {n_vocab}, swapping in {swap_token_s} s",
                "256 tokens are the bytes; time is from 0 on",
            )
        self._capacity, self._step_time, self.clock = capacity, step_time, clock
        self._swap_token_s = swap_token_s
        noise = np.random.default_rng(seed).standard_normal(n_vocab + _WINDOWS).astype(np.float32)
        self._windows = np.lib.stride_tricks.sliding_window_view(noise, n_vocab)
        self._identity = hashlib.sha256(f"simulated {n_vocab} {seed}".encode()).digest()
        # For each sequence the hash after each of its tokens: what its KV stands for.
        self._states: list[list[int]] = [[] for _ in range(capacity.n_seq)]
        self._open = True
        self._loaded = Loaded(
            runtime=RuntimeInfo("simulated", "1", "none", "none", {}, 0),
            capacity=capacity,
            n_vocab=n_vocab,
            n_ctx_train=capacity.n_ctx,
            weight_bytes=0,
            bytes_read_per_token=0,
            kv_bytes_per_token=kv_bytes_per_token,
            bos=None,
            eos=eos,
            adds_bos=False,
            chat_template=None,
        )
        self.reset()

    def describe(self) -> Loaded:
        """What a real backend would say; see `Backend`."""
        return self._loaded

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> Tokens:
        """The bytes of the text; see `Backend`."""
        self._require_open()
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """The text of bytes; see `Backend`."""
        return b"".join(self.piece_bytes(int(token)) for token in tokens).decode("utf-8", "replace")

    def piece_bytes(self, token: int) -> bytes:
        """The byte; nothing for a token beyond 255; see `Backend`."""
        self._require_open()
        if not 0 <= token < self._loaded.n_vocab:
            raise UsageError(f"token id {token} is outside the vocabulary of {self._loaded.n_vocab}")
        return bytes([token]) if token < 256 else b""

    def forward(self, batch: Batch) -> Logits:
        """Advance the clock by the step and return pseudo logits; see `Backend`."""
        ends, rows = check_batch(batch, self._capacity, self._loaded.n_vocab, self.length)
        self.clock.advance(self._step_time.seconds(self._shape(ends)))
        places = []
        for token, seq, wanted in zip(batch.tokens.tolist(), batch.seqs.tolist(), batch.logits.tolist(), strict=True):
            states = self._states[seq]
            state = ((states[-1] if states else 0) * _MULTIPLIER + 2 * token + 1) & _MASK
            states.append(state)
            if wanted:
                # The high bits are the well mixed ones.
                places.append((state ^ state >> 31) * _MULTIPLIER % 2**64 >> 52)
        self._counters["steps"] += 1
        self._counters["tokens"] += len(batch.tokens)
        self._counters["logits"] += rows
        return self._windows[places]

    def _shape(self, ends: dict[int, int]) -> StepShape:
        starts = [(len(self._states[seq]), end) for seq, end in ends.items()]
        return shape_of((start, end - start) for start, end in starts)

    def length(self, seq: int) -> int:
        """Tokens of `seq`; see `Backend`."""
        self._require_open()
        if not 0 <= seq < self._capacity.n_seq:
            raise UsageError(f"sequence {seq}; this backend was opened for {self._capacity.n_seq}")
        return len(self._states[seq])

    def share(self, src: int, dst: int, n: int) -> None:
        """Let `dst` begin with the first `n` tokens of `src`; see `Backend`."""
        check_share(self._capacity, src, dst, n, self.length)
        self._states[dst] += self._states[src][self.length(dst) : n]

    def truncate(self, seq: int, n: int) -> None:
        """Keep the first `n` tokens of `seq`; see `Backend`."""
        if not 0 <= n <= self.length(seq):
            raise UsageError(f"sequence {seq} holds {self.length(seq)} tokens, {n} cannot be kept")
        del self._states[seq][n:]

    def release(self, seq: int) -> None:
        """Forget `seq`; see `Backend`."""
        self.length(seq)
        self._states[seq] = []

    def save(self, seq: int, start: int = 0, end: int | None = None) -> bytes:
        """What the tokens stand for (runtime/saved.py); see `Backend`."""
        end = self.length(seq) if end is None else end
        saved.check_part(seq, self.length(seq), start, end)
        self.clock.advance(self._swap_token_s * (end - start))
        payload = struct.pack(f"<{end - start}Q", *self._states[seq][start:end])
        return saved.pack(_BLOB_MAGIC, self._identity, start, end, payload)

    def restore(self, seq: int, blob: bytes) -> None:
        """Put it back; see `Backend`."""
        held = self.length(seq)
        end, payload = saved.unpack(blob, _BLOB_MAGIC, self._identity, seq=seq, held=held, n_ctx=self._capacity.n_ctx)
        self.clock.advance(self._swap_token_s * (end - held))
        self._states[seq] += struct.unpack(f"<{end - held}Q", payload)

    def identity(self) -> bytes:
        """What a saved KV belongs to; see `Backend`."""
        return self._identity

    def _require_open(self) -> None:
        if not self._open:
            raise UsageError("this backend is closed", "open it again")

    def _require_empty(self, seq: int) -> None:
        if held := self.length(seq):
            raise UsageError(f"sequence {seq} holds {held} tokens", "release it first")

    def kv_bytes(self) -> int:
        """KV that a real backend would use, if equal histories are shared; see `Backend`."""
        self._require_open()
        return len(set().union(*self._states)) * self._loaded.kv_bytes_per_token

    def memory(self) -> Memory:
        """The KV that a real backend would hold, and this process; see `Backend`."""
        held = sum(map(len, self._states)) * self._loaded.kv_bytes_per_token
        return Memory(held, held, held, hardware.process_bytes(), hardware.peak_process_bytes())

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Greedy decoding of one static batch, stamped in virtual time; see `Backend`."""
        check_requests(requests, self._capacity, self._loaded.n_vocab)
        for seq in range(len(requests)):
            self._require_empty(seq)
        return generate_static(self, requests, self.clock.now)

    def counters(self) -> dict[str, int]:
        """Steps, tokens and logits rows since `reset`."""
        return dict(self._counters)

    def reset(self) -> None:
        """Forget every sequence; time goes on; see `Backend`."""
        self._require_open()
        self._states = [[] for _ in range(self._capacity.n_seq)]
        self._counters = {"steps": 0, "tokens": 0, "logits": 0}

    def close(self) -> None:
        """Refuse everything from now on; see `Backend`."""
        self._open = False
