"""What a backend must do: a loaded model that takes one step at a time.

The benches, the perplexity loop and the engine know only this file. Every backend passes
tests/backend_contract.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from quantlab.core.result import RuntimeInfo

Tokens = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Capacity:
    """What a backend reserves at load.

    `n_ctx` tokens for each of `n_seq` sequences; `n_batch` tokens at most in one forward, of which `n_outputs`
    may ask for logits (0: all of them); `n_ubatch` tokens computed at a time. `shared` allows `share`; without it
    several sequences decode faster.
    """

    n_ctx: int = 2048
    n_seq: int = 1
    n_batch: int = 512
    n_ubatch: int = 512
    n_outputs: int = 0
    shared: bool = True


@dataclass(frozen=True)
class Loaded:
    """What actually loaded."""

    runtime: RuntimeInfo
    capacity: Capacity
    n_vocab: int
    n_ctx_train: int
    weight_bytes: int
    # Bytes of the weights that one decoded token reads: a lookup table counts one row, an expert its share.
    bytes_read_per_token: int
    kv_bytes_per_token: int
    bos: int | None
    eos: frozenset[int]
    # Whether the tokenizer puts BOS before a text.
    adds_bos: bool
    chat_template: str | None
    # Layers that are stored quantized but held in 16 or 32 bits, by the type that is stored.
    decompressed: dict[str, int] = field(default_factory=dict)
    # Of `kv_bytes_per_token` what is of layers that look only so far back: (tokens, bytes per token).
    windowed_kv: tuple[tuple[int, int], ...] = ()

    def beyond_training(self, n_tokens: int) -> bool:
        """Whether a sequence of `n_tokens` has positions that the model was not trained on; False where not known."""
        return 0 < self.n_ctx_train < n_tokens

    def kv_bytes_read(self, depth: float) -> float:
        """Bytes of keys and values that a token reads which attends to `depth` tokens."""
        unseen = sum(size * max(0.0, depth - window) for window, size in self.windowed_kv)
        return self.kv_bytes_per_token * depth - unseen


@dataclass
class Batch:
    """Tokens of several sequences for one device step: int32 arrays of one length, and where logits are wanted."""

    tokens: Tokens
    positions: Tokens
    seqs: Tokens
    logits: npt.NDArray[np.bool_]

    @classmethod
    def of(
        cls, seq: int, tokens: Sequence[int] | Tokens, start: int, *, logits: Literal["all", "last", "none"]
    ) -> Batch:
        """The tokens of one sequence from position `start` on."""
        n = len(tokens)
        wanted = np.full(n, logits == "all")
        if logits == "last" and n:
            wanted[-1] = True
        return cls(
            np.asarray(tokens, np.int32),
            np.arange(start, start + n, dtype=np.int32),
            np.full(n, seq, np.int32),
            wanted,
        )


@dataclass(frozen=True)
class Memory:
    """Bytes, kept apart: what is allocated on the device now, the most that was reserved and allocated, the process."""

    device_allocated: int
    device_reserved_peak: int
    device_peak: int
    process: int
    process_peak: int


@dataclass(frozen=True)
class Request:
    """Prompt token ids and a limit. `arrival_s` is relative to the start of the run."""

    prompt: Tokens
    max_new_tokens: int
    ignore_eos: bool = True
    arrival_s: float = 0.0


@dataclass
class Generation:
    """The new token ids of one request, and the time at which each reached the host (perf_counter, seconds)."""

    start_s: float
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    finish_reason: Literal["length", "stop"] = "length"


class Backend(Protocol):
    """One loaded model. Every method raises QuantlabError on misuse and leaves the model usable."""

    def describe(self) -> Loaded:
        """What loaded: device, kernels, sizes, special tokens."""

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> Tokens:
        """Token ids of `text`. `special`: control tokens written in the text are parsed, as HF tokenizers do.

        `bos`: special tokens are added as the tokenizer does by itself.
        """

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """The text of token ids; control tokens are written out."""

    def piece_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for; empty for a control token."""

    def forward(self, batch: Batch) -> Logits:
        """Compute one step; returns when the device is done.

        Returns float32 (n, n_vocab): a row for each True in `batch.logits`, in order; a view that holds until the
        next call. Positions must continue each sequence.
        """

    def length(self, seq: int) -> int:
        """How many tokens of `seq` are in the KV cache."""

    def share(self, src: int, dst: int, n: int) -> None:
        """Let `dst` begin with the first `n` tokens of `src`; no KV bytes move.

        `dst` is empty or holds the first of those tokens already, computed or shared; then it keeps what it has.
        """

    def truncate(self, seq: int, n: int) -> None:
        """Keep the first `n` tokens of `seq`."""

    def release(self, seq: int) -> None:
        """Forget `seq`."""

    def save(self, seq: int, start: int = 0, end: int | None = None) -> bytes:
        """The KV of the tokens `start` to `end` (None: its last) of `seq`, for this model and version only."""

    def restore(self, seq: int, blob: bytes) -> None:
        """Continue `seq` with a saved KV; it must hold the tokens before it and no more. A foreign blob is refused."""

    def identity(self) -> bytes:
        """32 bytes that change with what a saved KV depends on: the model's content, the library, the KV's layout."""

    def kv_bytes(self) -> int:
        """Bytes of KV in use: what sequences share counts once, with whatever the library notes of who holds it."""

    def memory(self) -> Memory:
        """Bytes now and at the peak."""

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Greedy decoding of all requests as one static batch."""

    def counters(self) -> dict[str, int]:
        """Tokens and steps computed since `reset`."""

    def reset(self) -> None:
        """Forget every sequence and set the counters to zero."""

    def close(self) -> None:
        """Free the model. Calling it again does nothing."""


def generate_static(
    backend: Backend, requests: Sequence[Request], now: Callable[[], float] = time.perf_counter
) -> list[Generation]:
    """Greedy decoding on any backend: all prompts in full batches, then all sequences step by step.

    A static batch answers as a whole: the first tokens are handed out when the last prompt is done, so that TTFT is
    the prefill of the whole batch and no gap between two tokens holds the prefill of another request. A time stamp
    is taken when the token id is on the host, by `now`.
    """
    eos = backend.describe().eos
    start = now()
    generations = [Generation(start) for _ in requests]
    tokens = prefill_all(backend, [request.prompt for request in requests])
    alive = emit(tokens, list(range(len(requests))), requests, generations, eos, now_s=now())
    while alive:
        # One batch serves until a sequence ends, filled number by number: the weights of a step sweep the caches, and
        # numpy's own code, read from memory again for every token, would be felt in TPOT.
        going, tokens = alive, [generations[s].tokens[-1] for s in alive]
        last = [len(requests[s].prompt) + len(generations[s].tokens) - 2 for s in alive]
        step = Batch(
            np.empty(len(last), np.int32),
            np.array(last, np.int32),
            np.array(alive, np.int32),
            np.ones(len(last), np.bool_),
        )
        while alive == going:
            for i, token in enumerate(tokens):
                step.tokens[i] = token
                step.positions[i] += 1
            tokens = backend.forward(step).argmax(axis=1).tolist()
            alive = emit(tokens, alive, requests, generations, eos, now_s=now())
    return generations


def prefill_all(backend: Backend, prompts: Sequence[Tokens]) -> list[int]:
    """Put prompt i into sequence i, packed into full batches; returns the most likely next token of each."""
    lengths = [len(prompt) for prompt in prompts]
    n_batch = backend.describe().capacity.n_batch
    tokens = np.concatenate(prompts).astype(np.int32)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    seqs = np.repeat(np.arange(len(prompts), dtype=np.int32), lengths)
    wanted = np.zeros(len(tokens), np.bool_)
    wanted[np.cumsum(lengths) - 1] = True
    following: list[int] = []
    for at in range(0, len(tokens), n_batch):
        part = slice(at, at + n_batch)
        logits = backend.forward(Batch(tokens[part], positions[part], seqs[part], wanted[part]))
        following += logits.argmax(axis=1).tolist()
    return following


def emit(
    tokens: list[int],
    seqs: list[int],
    requests: Sequence[Request],
    generations: list[Generation],
    eos: frozenset[int],
    *,
    now_s: float | None = None,
) -> list[int]:
    """Stamp one token of each sequence in `seqs`, now or at `now_s`; returns the sequences that go on."""
    now = time.perf_counter() if now_s is None else now_s
    alive = []
    for seq, token in zip(seqs, tokens, strict=True):
        generation, request = generations[seq], requests[seq]
        generation.tokens.append(token)
        generation.times_s.append(now)
        if token in eos and not request.ignore_eos:
            generation.finish_reason = "stop"
        elif len(generation.tokens) < request.max_new_tokens:
            alive.append(seq)
    return alive
