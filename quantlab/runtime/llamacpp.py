"""llama.cpp through the low-level API of llama-cpp-python: several sequences a step, logits as views.

`Llama.__call__` costs milliseconds a token; here a step costs the arrays' fill and one C call. llama.cpp ends the
process on many kinds of misuse, so every argument is checked before it is passed down.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from quantlab.core import hardware
from quantlab.core.artifact import content_sha256, gguf_shards
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.gguf_file import kv_bytes_per_token, read_header
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
from quantlab.runtime.llamacpp_facts import bytes_read, main_type
from quantlab.runtime.llamacpp_library import (
    buffers,
    kernels,
    last_errors,
    lib,
    load_model,
    offloads,
    version,
    windowed_kv,
)
from quantlab.runtime.llamacpp_streams import Streams
from quantlab.runtime.llamacpp_vocabulary import Vocabulary

# Positions and counts are int32 in llama.cpp.
_MOST = 2**31 - 1
_MOST_THREADS = 512  # GGML_MAX_N_THREADS
_BLOB_MAGIC = b"QLKV\x02"

# The binding's own wrapper builds a pointer object that must be cast back.
_get_logits = lib._lib["llama_get_logits"]
_get_logits.argtypes, _get_logits.restype = (ctypes.c_void_p,), ctypes.c_void_p


class LlamaCppBackend:
    """A GGUF file in llama.cpp (a `Backend`)."""

    def __init__(self, path: Path, capacity: Capacity, *, device: str = "auto", threads: int | None = None) -> None:
        self._model = self._context = None
        sizes = (capacity.n_ctx, capacity.n_seq, capacity.n_batch, capacity.n_ubatch, capacity.n_outputs + 1)
        if min(sizes) < 1 or max(*sizes, capacity.n_ctx * capacity.n_seq) > _MOST:
            raise UsageError(f"{capacity} has a size below 1 or above {_MOST}", "give sizes in between")
        # Parts of sequences are moved through one more, which no caller sees.
        self._spare = capacity.n_seq if capacity.shared else None
        if (most := lib.llama_max_parallel_sequences() - capacity.shared) < capacity.n_seq:
            raise UsageError(f"{capacity.n_seq} sequences at once", f"llama.cpp holds {most} at most")
        if threads is not None and not 1 <= threads <= _MOST_THREADS:
            raise UsageError(f"{threads} threads", f"llama.cpp takes 1 to {_MOST_THREADS}")
        self._path, self._capacity = path, capacity
        self._threads = threads or hardware.usable_cores()
        self._headers = [read_header(shard) for shard in gguf_shards(path)]
        self._offload = offloads(device)
        self._load()
        self._vocabulary = Vocabulary(self._model)
        self._vocab = self._vocabulary.pointer
        self._n_vocab: int = lib.llama_vocab_n_tokens(self._vocab)
        self._kv = lib.llama_get_memory(self._context)
        self._lengths = [0] * capacity.n_seq
        self._streams = Streams(capacity.n_seq)
        self._moves = not (capacity.shared or self._has_state())
        self._counters: dict[str, int] = {}
        self._pieces: dict[int, bytes] = {}
        self._view = np.empty((0, self._n_vocab), np.float32)
        self._view_of: tuple[int | None, int] = (None, 0)
        self._arrays = _BatchArrays(capacity.n_batch)
        self._loaded = self._describe()
        self._empty_bytes: int = lib.llama_state_get_size(self._context)
        self.reset()

    def _load(self) -> None:
        self._model = load_model(self._path, {} if self._offload else {"n_gpu_layers": 0})
        if lib.llama_model_has_encoder(self._model) or not lib.llama_model_has_decoder(self._model):
            self.close()
            raise QuantlabError(f"`{self._path}` is no decoder-only language model", "give a causal language model")
        params = lib.llama_context_default_params()
        capacity = self._capacity
        params.n_ctx = capacity.n_ctx * capacity.n_seq
        params.n_batch = capacity.n_batch
        params.n_ubatch = min(capacity.n_ubatch, capacity.n_batch)
        params.n_seq_max = capacity.n_seq + capacity.shared
        # llama.cpp ends the process where this is below the number of sequences.
        params.n_outputs_max = max(capacity.n_outputs or capacity.n_batch, params.n_seq_max)
        params.n_threads = params.n_threads_batch = self._threads
        # A part of a sequence can only be shared inside one buffer, and a sliding window must keep what was shared.
        params.kv_unified = params.swa_full = capacity.shared
        if not self._offload:
            params.offload_kqv = params.op_offload = False
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            reason = last_errors()
            self.close()
            raise QuantlabError(
                f"llama.cpp makes no context of {capacity.n_seq} x {capacity.n_ctx} tokens: {reason}",
                "use a smaller `--n-ctx` or batch",
            )

    def describe(self) -> Loaded:
        """What loaded; see `Backend`."""
        return self._loaded

    def _describe(self) -> Loaded:
        metadata = self._headers[0].metadata
        template = lib.llama_model_chat_template(self._model, None)
        tensors = [tensor for header in self._headers for tensor in header.tensors]
        kv_bytes = kv_bytes_per_token(self._headers[0])
        return Loaded(
            runtime=RuntimeInfo(
                name="llamacpp",
                version=version(),
                device="gpu" if self._offload else "cpu",
                dtype=main_type(tensors),
                kernels=kernels(len(tensors)),
                threads=self._threads,
            ),
            capacity=self._capacity,
            n_vocab=self._n_vocab,
            n_ctx_train=lib.llama_model_n_ctx_train(self._model),
            weight_bytes=sum(tensor.size_bytes for tensor in tensors),
            bytes_read_per_token=bytes_read(tensors, metadata),
            kv_bytes_per_token=kv_bytes,
            windowed_kv=windowed_kv(kv_bytes, lib.llama_model_n_swa(self._model)),
            bos=self._vocabulary.bos,
            eos=frozenset(t for t in range(self._n_vocab) if lib.llama_vocab_is_eog(self._vocab, t)),
            adds_bos=self._vocabulary.adds_bos,
            chat_template=template.decode("utf-8", "replace") if template else None,
        )

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> Tokens:
        """Token ids of `text`; see `Backend`."""
        self._require_open()
        return self._vocabulary.encode(text, special=special, bos=bos)

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """The text of token ids, control tokens written out; see `Backend`."""
        return b"".join(self._piece(int(t), special=True) for t in tokens).decode("utf-8", "replace")

    def piece_bytes(self, token: int) -> bytes:
        """The bytes of one token; see `Backend`."""
        if token not in self._pieces:
            self._pieces[token] = self._piece(token, special=False)
        return self._pieces[token]

    def _piece(self, token: int, *, special: bool) -> bytes:
        self._require_open()
        if not 0 <= token < self._n_vocab:
            raise UsageError(f"token id {token} is outside the vocabulary of {self._n_vocab}")
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            n = lib.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            room = -n

    def forward(self, batch: Batch) -> Logits:
        """Compute one step; see `Backend`."""
        n = len(batch.tokens)
        ends, rows = check_batch(batch, self._capacity, self._n_vocab, self.length)
        order = self._lay(batch, ends)
        arrays = self._arrays
        arrays.batch.n_tokens = n
        code = lib.llama_decode(self._context, arrays.batch)
        if code != 0:
            # A failed step may have stored some of its tokens: what was there before stays.
            for seq, length in enumerate(self._lengths):
                lib.llama_memory_seq_rm(self._kv, self._streams.of[seq], length, -1)
            reason = "the KV cache is full" if code == 1 else last_errors()
            raise QuantlabError(f"llama.cpp failed a step of {n} tokens (code {code}): {reason}")
        for seq, end in ends.items():
            self._lengths[seq] = end
        self._counters["steps"] += 1
        self._counters["tokens"] += n
        self._counters["logits"] += rows
        if rows == 0:
            lib.llama_synchronize(self._context)
        return self._rows(rows) if order is None else self._rows(rows)[order]

    def _lay(self, batch: Batch, ends: Collection[int]) -> Tokens | None:
        """Fill the arrays of a step, by streams; returns which row of logits belongs to each that was asked for."""
        n, arrays = len(batch.tokens), self._arrays
        if self._moves:
            for source, place in self._streams.close_up(ends, self._lengths):
                lib.llama_memory_seq_cp(self._kv, source, place, -1, -1)
                lib.llama_memory_seq_rm(self._kv, source, -1, -1)
        streams = np.array(self._streams.of, np.int32)[batch.seqs]
        sorted_already = bool(np.all(streams[1:] >= streams[:-1]))
        order = slice(None) if sorted_already else np.argsort(streams, kind="stable")
        arrays.tokens[:n] = batch.tokens[order]
        arrays.positions[:n] = batch.positions[order]
        arrays.seqs[:n] = streams[order]
        arrays.logits[:n] = batch.logits[order]
        if sorted_already:
            return None
        rows = np.empty(n, np.int32)
        rows[order] = np.cumsum(arrays.logits[:n], dtype=np.int32) - 1
        return rows[batch.logits]

    def _rows(self, rows: int) -> Logits:
        """The last step's logits, as a view; the same array while llama.cpp keeps them in one place."""
        pointer = _get_logits(self._context) if rows else None
        if (pointer, rows) != self._view_of:
            flat = ctypes.c_float * (rows * self._n_vocab)
            memory = flat.from_address(pointer) if pointer else flat()
            self._view = np.frombuffer(memoryview(memory), np.float32).reshape(rows, self._n_vocab)
            self._view_of = (pointer, rows)
        return self._view

    def length(self, seq: int) -> int:
        """Tokens of `seq` in the KV cache; see `Backend`."""
        self._require_open()
        if not 0 <= seq < self._capacity.n_seq:
            raise UsageError(f"sequence {seq}; this backend was opened for {self._capacity.n_seq}")
        return self._lengths[seq]

    def share(self, src: int, dst: int, n: int) -> None:
        """Let `dst` begin with the first `n` tokens of `src`; see `Backend`."""
        check_share(self._capacity, src, dst, n, self.length)
        if n < self._lengths[src]:
            self._require_divisible()
        lib.llama_memory_seq_cp(self._kv, self._streams.of[src], self._streams.of[dst], self._lengths[dst], n)
        self._lengths[dst] = n

    def truncate(self, seq: int, n: int) -> None:
        """Keep the first `n` tokens of `seq`; see `Backend`."""
        if not 0 <= n <= self.length(seq):
            raise UsageError(f"sequence {seq} holds {self._lengths[seq]} tokens, {n} cannot be kept")
        if n == self._lengths[seq]:
            return
        if not lib.llama_memory_seq_rm(self._kv, self._streams.of[seq], n, -1):
            raise QuantlabError(
                f"`{self._path.name}` cannot forget a part of a sequence (recurrent state)", "release it instead"
            )
        self._lengths[seq] = n

    def release(self, seq: int) -> None:
        """Forget `seq`; see `Backend`."""
        self.length(seq)
        lib.llama_memory_seq_rm(self._kv, self._streams.of[seq], -1, -1)
        self._lengths[seq] = 0

    def save(self, seq: int, start: int = 0, end: int | None = None) -> bytes:
        """The KV of a part of `seq` (runtime/saved.py); see `Backend`."""
        end = self.length(seq) if end is None else end
        saved.check_part(seq, self._lengths[seq], start, end)
        whole = (start, end) == (0, self._lengths[seq])
        of = self._streams.of[seq] if whole else self._require_spare()
        if not whole:
            lib.llama_memory_seq_cp(self._kv, self._streams.of[seq], of, start, end)
        size = lib.llama_state_seq_get_size(self._context, of)
        buffer = (ctypes.c_uint8 * size)()
        written = lib.llama_state_seq_get_data(self._context, buffer, size, of)
        if not whole:
            lib.llama_memory_seq_rm(self._kv, of, -1, -1)
        if written == 0:
            raise QuantlabError(f"llama.cpp does not save sequence {seq}: {last_errors()}")
        return saved.pack(_BLOB_MAGIC, self.identity(), start, end, memoryview(buffer)[:written])

    def restore(self, seq: int, blob: bytes) -> None:
        """Continue `seq` with a saved KV; see `Backend`."""
        start = self.length(seq)
        end, kept = saved.unpack(blob, _BLOB_MAGIC, self.identity(), seq=seq, held=start, n_ctx=self._capacity.n_ctx)
        payload = (ctypes.c_uint8 * len(kept)).from_buffer_copy(kept)
        # What is put into a sequence takes the place of all that it held.
        to = self._require_spare() if start else self._streams.of[seq]
        if lib.llama_state_seq_set_data(self._context, payload, len(payload), to) == 0:
            lib.llama_memory_seq_rm(self._kv, to, -1, -1)
            raise QuantlabError(f"llama.cpp does not restore a saved sequence: {last_errors()}", "compute it again")
        if start:
            lib.llama_memory_seq_cp(self._kv, to, self._streams.of[seq], start, end)
            lib.llama_memory_seq_rm(self._kv, to, -1, -1)
        self._lengths[seq] = end

    def _require_spare(self) -> int:
        if self._spare is None:
            raise UsageError(
                "a part of a sequence of a backend that was opened without sharing",
                "open it with `Capacity(shared=True)`",
            )
        self._require_divisible()
        return self._spare

    def _require_divisible(self) -> None:
        if self._has_state():
            raise QuantlabError(
                f"`{self._path.name}` keeps a recurrent state, of which no part can be shared or saved",
                "compute it again",
            )

    def _has_state(self) -> bool:
        """Whether it is recurrent: a state stands for all tokens before it, and has no parts."""
        return bool(lib.llama_model_is_recurrent(self._model) or lib.llama_model_is_hybrid(self._model))

    def _require_open(self) -> None:
        if not self._context:
            raise UsageError("this backend is closed", "open the model again")

    def _require_empty(self, seq: int) -> None:
        if self.length(seq):
            raise UsageError(f"sequence {seq} holds {self._lengths[seq]} tokens", "release it first")

    def identity(self) -> bytes:
        """What a saved KV belongs to; see `Backend`."""
        return self._identity

    @functools.cached_property
    def _identity(self) -> bytes:
        named = f"{version()} {self._capacity.shared} {content_sha256(self._path)}"
        return hashlib.sha256(named.encode()).digest()

    def kv_bytes(self) -> int:
        """KV in use; a token's position and sequences take 12 bytes or more; see `Backend`."""
        self._require_open()
        return int(lib.llama_state_get_size(self._context)) - self._empty_bytes

    def memory(self) -> Memory:
        """Bytes now and at the peak; llama.cpp allocates at load, so device peak and allocation are one number."""
        device = sum(size for name, size in buffers() if not name.startswith("CPU") and "Host" not in name)
        return Memory(device, device, device, hardware.process_bytes(), hardware.peak_process_bytes())

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Greedy decoding of one static batch; see `Backend`."""
        check_requests(requests, self._capacity, self._n_vocab)
        for seq in range(len(requests)):
            self._require_empty(seq)
        return generate_static(self, requests)

    def counters(self) -> dict[str, int]:
        """Steps, tokens and logits rows since `reset`."""
        return dict(self._counters)

    def reset(self) -> None:
        """Forget every sequence; see `Backend`."""
        self._require_open()
        lib.llama_memory_clear(self._kv, True)
        self._lengths = [0] * self._capacity.n_seq
        self._counters = {"steps": 0, "tokens": 0, "logits": 0}

    def close(self) -> None:
        """Free the model; see `Backend`."""
        if self._context:
            lib.llama_free(self._context)
            self._context = None
        if self._model:
            lib.llama_model_free(self._model)
            self._model = None


class _BatchArrays:
    """A llama_batch over numpy arrays of n_batch tokens, each of one sequence."""

    def __init__(self, n_batch: int) -> None:
        self.tokens, self.positions, self.seqs = (np.zeros(n_batch, np.int32) for _ in range(3))
        self.logits = np.zeros(n_batch, np.int8)
        self._counts = np.ones(n_batch, np.int32)
        self._seq_pointers = self.seqs.ctypes.data + 4 * np.arange(n_batch, dtype=np.uint64)
        fields = {kind: ctype for kind, ctype, *_ in lib.llama_batch._fields_}

        def pointer(array: Any, field: str) -> Any:
            return ctypes.cast(array.ctypes.data, cast(Any, fields[field]))

        self.batch = lib.llama_batch(
            n_tokens=0,
            token=pointer(self.tokens, "token"),
            embd=None,
            pos=pointer(self.positions, "pos"),
            n_seq_id=pointer(self._counts, "n_seq_id"),
            seq_id=pointer(self._seq_pointers, "seq_id"),
            logits=pointer(self.logits, "logits"),
        )


@contextlib.contextmanager
def opened(
    path: Path, capacity: Capacity, *, device: str = "auto", threads: int | None = None
) -> Iterator[LlamaCppBackend]:
    """Open a GGUF file and close it at the end."""
    backend = LlamaCppBackend(path, capacity, device=device, threads=threads)
    try:
        yield backend
    finally:
        backend.close()
