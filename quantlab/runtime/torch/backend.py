"""A safetensors folder in torch (a `Backend`): any decoder of transformers that attends by its attention interface.

The model is transformers' own code with the kernels that the folder's quantization brings; only attention and the KV
are ours. Device memory is what torch's allocator holds: the CUDA context and the driver come on top.
"""

from __future__ import annotations

import functools
import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
    emit,
    generate_static,
    prefill_all,
)
from quantlab.runtime.checks import check_batch, check_requests, check_share
from quantlab.runtime.torch import attention, load, weights
from quantlab.runtime.torch.decode import StaticDecoder, generate_plain
from quantlab.runtime.torch.kv import BLOCK_TOKENS, Blocks, Storage, blocks_of
from quantlab.runtime.torch.model import VERSION, Model
from quantlab.runtime.torch.vocabulary import Vocabulary

_BLOB_MAGIC = b"QLKT\x02"


class TorchBackend:
    """A model of transformers on one device (a `Backend`)."""

    def __init__(
        self,
        path: Path,
        capacity: Capacity,
        *,
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        exact: bool = False,
    ) -> None:
        """`exact`: see `runtime.loading.opened`."""
        self._model: Model | None = None
        sizes = (capacity.n_ctx, capacity.n_seq, capacity.n_batch, capacity.n_ubatch, capacity.n_outputs + 1)
        if min(sizes) < 1:
            raise UsageError(f"{capacity} has a size below 1", "give sizes from 1 on")
        load.check_threads(threads)
        torch.set_num_threads(threads or hardware.usable_cores())
        model = Model(path, device, dtype, n_ctx=capacity.n_ctx, exact=exact)
        self._capacity = capacity
        self._vocabulary = Vocabulary(path, model.n_vocab)
        model.require_room(capacity.n_seq * blocks_of(capacity.n_ctx) * BLOCK_TOKENS)
        self._blocks = Blocks(capacity.n_seq, capacity.n_ctx)
        n_blocks = capacity.n_seq * self._blocks.per_seq
        self._storage = Storage(model.kv_shapes, n_blocks, model.kv_dtype, model.device)
        self._decoder = StaticDecoder(model.network, self._storage, self._blocks)
        self._model = model
        self._loaded = self._describe(model)
        self._lengths = [0] * capacity.n_seq
        self._counters: dict[str, int] = {}
        self.reset()

    def describe(self) -> Loaded:
        """What loaded; see `Backend`."""
        return self._loaded

    def _describe(self, model: Model) -> Loaded:
        vocabulary = self._vocabulary
        eos = model.eos | ({vocabulary.eos} if vocabulary.eos is not None else frozenset())
        return Loaded(
            runtime=RuntimeInfo(
                name="torch",
                version=VERSION,
                device=model.device.type,
                dtype=str(model.dtype).removeprefix("torch."),
                kernels=weights.kernels(model.network),
                threads=torch.get_num_threads(),
            ),
            capacity=self._capacity,
            n_vocab=model.n_vocab,
            n_ctx_train=getattr(model.config, "max_position_embeddings", None) or 0,
            weight_bytes=weights.weight_bytes(model.network),
            bytes_read_per_token=weights.bytes_read_per_token(model.network),
            kv_bytes_per_token=model.kv_bytes_per_token,
            windowed_kv=model.windowed_kv,
            bos=vocabulary.bos,
            eos=frozenset(token for token in eos if 0 <= token < model.n_vocab),
            adds_bos=vocabulary.adds_bos,
            chat_template=vocabulary.chat_template,
            decompressed=weights.decompressed(model.path, model.network),
        )

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> Tokens:
        """Token ids of `text`; see `Backend`."""
        self._opened()
        return self._vocabulary.encode(text, special=special, bos=bos)

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """The text of token ids; see `Backend`."""
        self._opened()
        return self._vocabulary.decode(tokens)

    def piece_bytes(self, token: int) -> bytes:
        """The bytes of one token; see `Backend`."""
        self._opened()
        return self._vocabulary.piece_bytes(token)

    def forward(self, batch: Batch) -> Logits:
        """Compute one step; see `Backend`."""
        model = self._opened()
        ends, n_rows = check_batch(batch, self._capacity, model.n_vocab, self.length)
        rows = np.empty((n_rows, model.n_vocab), np.float32)
        row_of = np.cumsum(batch.logits) - 1
        with self._kept_on_failure():
            for seq, end in ends.items():
                self._storage.copy_blocks(self._blocks.extend(seq, self._lengths[seq], end))
            order = order_rows(batch.seqs, ends, self._lengths)
            for at in range(0, len(order), self._capacity.n_ubatch):
                part = order[at : at + self._capacity.n_ubatch]
                step = attention.PagedStep(self._storage, self._blocks, _spans(batch.seqs[part], batch.positions[part]))
                wanted = np.flatnonzero(batch.logits[part])
                logits = model.run(batch.tokens[part], batch.positions[part], step, wanted.tolist())
                rows[row_of[part[wanted]]] = logits
        for seq, end in ends.items():
            self._lengths[seq] = end
        self._count(len(batch.tokens), n_rows)
        return rows

    @contextmanager
    def _kept_on_failure(self) -> Iterator[None]:
        """A step that fails leaves every sequence as it was."""
        try:
            yield
        except BaseException:
            for seq, length in enumerate(self._lengths):
                self._blocks.truncate(seq, length)
            raise

    def _count(self, tokens: int, logits: int) -> None:
        for name, n in (("steps", 1), ("tokens", tokens), ("logits", logits)):
            self._counters[name] += n

    def length(self, seq: int) -> int:
        """Tokens of `seq` in the KV cache; see `Backend`."""
        self._opened()
        if not 0 <= seq < self._capacity.n_seq:
            raise UsageError(f"sequence {seq}; this backend was opened for {self._capacity.n_seq}")
        return self._lengths[seq]

    def share(self, src: int, dst: int, n: int) -> None:
        """Let `dst` begin with the first `n` tokens of `src`; see `Backend`."""
        self._opened()
        check_share(self._capacity, src, dst, n, self.length)
        self._blocks.share(src, dst, n, self._lengths[dst])
        self._lengths[dst] = n

    def truncate(self, seq: int, n: int) -> None:
        """Keep the first `n` tokens of `seq`; see `Backend`."""
        if not 0 <= n <= self.length(seq):
            raise UsageError(f"sequence {seq} holds {self._lengths[seq]} tokens, {n} cannot be kept")
        self._blocks.truncate(seq, n)
        self._lengths[seq] = n

    def release(self, seq: int) -> None:
        """Forget `seq`; see `Backend`."""
        self.length(seq)
        self.truncate(seq, 0)

    def save(self, seq: int, start: int = 0, end: int | None = None) -> bytes:
        """The KV of a part of `seq` (runtime/saved.py); see `Backend`."""
        end = self.length(seq) if end is None else end
        saved.check_part(seq, self.length(seq), start, end)
        payload = self._storage.read(self._blocks.slots(seq, start, end))
        return saved.pack(_BLOB_MAGIC, self._identity, start, end, payload)

    def restore(self, seq: int, blob: bytes) -> None:
        """Continue `seq` with a saved KV; see `Backend`."""
        start = self.length(seq)
        end, kept = saved.unpack(blob, _BLOB_MAGIC, self._identity, seq=seq, held=start, n_ctx=self._capacity.n_ctx)
        self._storage.copy_blocks(self._blocks.extend(seq, start, end))
        self._storage.write(self._blocks.slots(seq, start, end), bytes(kept))
        self._lengths[seq] = end

    def identity(self) -> bytes:
        """What a saved KV belongs to; see `Backend`."""
        return self._identity

    @functools.cached_property
    def _identity(self) -> bytes:
        return self._opened().identity()

    def kv_bytes(self) -> int:
        """KV in use, in whole blocks; see `Backend`."""
        self._opened()
        return self._blocks.used * BLOCK_TOKENS * self._loaded.kv_bytes_per_token

    def memory(self) -> Memory:
        """Bytes now and at the peak; see `Model.memory`."""
        return self._opened().memory()

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Greedy decoding of one static batch, its steps as one CUDA graph where that works; see `Backend`."""
        self._require_requests(requests)
        if not self._decoder.ready(requests):
            return generate_static(self, requests)
        start = time.perf_counter()
        generations = [Generation(start) for _ in requests]
        tokens = prefill_all(self, [request.prompt for request in requests])
        alive = emit(tokens, list(range(len(requests))), requests, generations, self._loaded.eos)
        self._decoder.begin(tokens, requests)
        while alive:
            ids = self._decoder.step()
            self._count(len(alive), len(alive))
            self._counters["graph_steps"] += 1
            alive = emit([ids[seq] for seq in alive], alive, requests, generations, self._loaded.eos)
        for seq, generation in enumerate(generations):
            self._lengths[seq] += len(generation.tokens) - 1
            self._blocks.truncate(seq, self._lengths[seq])
        return generations

    @property
    def no_graph(self) -> str | None:
        """Why the steps of the last `generate` on CUDA were launched kernel by kernel."""
        return self._decoder.no_graph

    def generate_plain(self, requests: Sequence[Request]) -> list[Generation]:
        """The same requests by transformers' own `generate`, launched kernel by kernel; sequences stay empty."""
        self._require_requests(requests)
        model = self._opened()
        return generate_plain(model.network, requests, self._loaded.eos, model.device)

    def _require_requests(self, requests: Sequence[Request]) -> None:
        check_requests(requests, self._capacity, self._opened().n_vocab)
        for seq in range(len(requests)):
            self._require_empty(seq)

    def counters(self) -> dict[str, int]:
        """Steps, tokens and logits rows since `reset`, and how many of the steps were a CUDA graph."""
        return dict(self._counters)

    def reset(self) -> None:
        """Forget every sequence; see `Backend`."""
        self._opened()
        for seq in range(self._capacity.n_seq):
            self._blocks.truncate(seq, 0)
        self._lengths = [0] * self._capacity.n_seq
        self._counters = {"steps": 0, "tokens": 0, "logits": 0, "graph_steps": 0}

    def close(self) -> None:
        """Free the model; see `Backend`."""
        if self._model is None:
            return
        cuda = self._model.device.type == "cuda"
        del self._model, self._decoder, self._storage
        self._model = None
        if cuda:
            gc.collect()
            torch.cuda.empty_cache()

    def _opened(self) -> Model:
        if self._model is None:
            raise UsageError("this backend is closed", "open the model again")
        return self._model

    def _require_empty(self, seq: int) -> None:
        if self.length(seq):
            raise UsageError(f"sequence {seq} holds {self._lengths[seq]} tokens", "release it first")


def order_rows(seqs: Any, ends: dict[int, int], lengths: list[int]) -> Any:
    """Rows sorted by the number of new tokens of their sequence, then by sequence; each in its own order."""
    if len(ends) == 1:
        return np.arange(len(seqs))
    new = np.array([ends[seq] - lengths[seq] for seq in seqs.tolist()])
    return np.lexsort((seqs, new))


def _spans(seqs: Any, positions: Any) -> list[tuple[int, int, int]]:
    """(sequence, start, end) of rows that lie sequence by sequence."""
    cuts = [0, *(np.flatnonzero(np.diff(seqs)) + 1).tolist(), len(seqs)]
    return [(int(seqs[a]), int(positions[a]), int(positions[b - 1]) + 1) for a, b in itertools.pairwise(cuts)]
