"""llama.cpp through the low-level API of llama-cpp-python: several sequences a step, logits as views.

`Llama.__call__` costs milliseconds a token; here a step costs the arrays' fill and one C call. llama.cpp ends the
process on many kinds of misuse, so every argument is checked before it is passed down.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import hashlib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from quantlab.core import hardware
from quantlab.core.artifact import content_sha256, gguf_shards
from quantlab.core.errors import QuantlabError, UsageError, missing_extra, unknown_name
from quantlab.core.gguf_file import TensorInfo, kv_bytes_per_token, read_header
from quantlab.core.result import DEVICES, RuntimeInfo
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
from quantlab.runtime.llamacpp_streams import Streams

# When llama.cpp aborts, its own message must be the last that is said, not a debugger's pages.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
try:
    import llama_cpp.llama_cpp as lib
except ModuleNotFoundError as error:
    raise missing_extra("llama-cpp-python", "gguf") from error

# Positions and counts are int32 in llama.cpp.
_MOST = 2**31 - 1
_MOST_THREADS = 512  # GGML_MAX_N_THREADS
_ERROR_LEVEL = 4
_BLOB_MAGIC = b"QLKV\x02"

_log: collections.deque[tuple[int, str]] = collections.deque(maxlen=4000)


# The binding's own wrapper builds a pointer object that must be cast back.
_get_logits = lib._lib["llama_get_logits"]
_get_logits.argtypes, _get_logits.restype = (ctypes.c_void_p,), ctypes.c_void_p


@lib.llama_log_callback  # type: ignore[untyped-decorator]
def _keep_log(level: int, text: bytes, _: Any) -> None:
    _log.append((level, text.decode("utf-8", "replace").rstrip()))


def last_errors() -> str:
    """What llama.cpp said last on its error level, for an error message."""
    errors = [text for level, text in _log if level == _ERROR_LEVEL and text]
    return "; ".join(errors[-2:]) or "it gave no reason"


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
        self._offload = _offloads(device)
        self._load()
        self._vocabulary = _Vocabulary(self._model)
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
        self._model = _load_model(self._path, {} if self._offload else {"n_gpu_layers": 0})
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
                version=_version(),
                device="gpu" if self._offload else "cpu",
                dtype=_main_type(tensors),
                kernels=_kernels(len(tensors)),
                threads=self._threads,
            ),
            capacity=self._capacity,
            n_vocab=self._n_vocab,
            n_ctx_train=lib.llama_model_n_ctx_train(self._model),
            weight_bytes=sum(tensor.size_bytes for tensor in tensors),
            bytes_read_per_token=_bytes_read(tensors, metadata),
            kv_bytes_per_token=kv_bytes,
            windowed_kv=_windowed_kv(kv_bytes, lib.llama_model_n_swa(self._model)),
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
        named = f"{_version()} {self._capacity.shared} {content_sha256(self._path)}"
        return hashlib.sha256(named.encode()).digest()

    def kv_bytes(self) -> int:
        """KV in use; a token's position and sequences take 12 bytes or more; see `Backend`."""
        self._require_open()
        return int(lib.llama_state_get_size(self._context)) - self._empty_bytes

    def memory(self) -> Memory:
        """Bytes now and at the peak; llama.cpp allocates at load, so device peak and allocation are one number."""
        device = sum(size for name, size in _buffers() if not name.startswith("CPU") and "Host" not in name)
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


class _Vocabulary:
    """The tokenizer of a model that llama.cpp holds."""

    def __init__(self, model: Any) -> None:
        self.pointer = lib.llama_model_get_vocab(model)
        bos = lib.llama_vocab_bos(self.pointer)
        self.bos: int | None = bos if bos >= 0 else None
        self.adds_bos = bool(lib.llama_vocab_get_add_bos(self.pointer))

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> Tokens:
        """Token ids of `text`; see `Backend`."""
        data = text.encode()
        room = len(data) + 8
        buffer = (lib.llama_token * room)()
        n = lib.llama_tokenize(self.pointer, data, len(data), buffer, room, bos, special)
        if n < 0:
            raise QuantlabError(f"llama.cpp does not tokenize a text of {len(data)} bytes", "use a shorter text")
        return np.frombuffer(memoryview(buffer), np.int32)[:n].copy()


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


@contextlib.contextmanager
def opened_vocabulary(path: Path) -> Iterator[_Vocabulary]:
    """Open the tokenizer of a GGUF file, without its weights, and close it at the end."""
    model = _load_model(path, {"vocab_only": True})
    try:
        yield _Vocabulary(model)
    finally:
        lib.llama_model_free(model)


def _load_model(path: Path, settings: dict[str, Any]) -> Any:
    """The model's pointer; `settings` are fields of llama_model_params."""
    _log.clear()
    lib.llama_log_set(_keep_log, None)
    lib.llama_backend_init()
    params = lib.llama_model_default_params()
    for name, value in settings.items():
        setattr(params, name, value)
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise QuantlabError(f"llama.cpp does not load `{path}`: {last_errors()}", "check it with `quantlab inspect`")
    return model


def _offloads(device: str) -> bool:
    """Whether layers go to a GPU; `cuda` and `mps` are refused where this build of llama.cpp has none."""
    if device not in DEVICES:
        raise unknown_name("device", device, DEVICES)
    able = bool(lib.llama_supports_gpu_offload())
    if device in ("cuda", "mps") and not able:
        raise QuantlabError(
            f"this build of llama.cpp has no `{device}`",
            "build llama-cpp-python with CMAKE_ARGS=-DGGML_CUDA=on (or -DGGML_METAL=on), or use `--device cpu`",
        )
    return able and device != "cpu"


def _version() -> str:
    import importlib.metadata

    return importlib.metadata.version("llama-cpp-python")


def _main_type(tensors: list[TensorInfo]) -> str:
    """The type that holds most weights."""
    params: collections.Counter[str] = collections.Counter()
    for tensor in tensors:
        params[tensor.type] += tensor.params
    return params.most_common(1)[0][0]


def _kernels(n_tensors: int) -> dict[str, int]:
    """Weights by the buffer type whose kernels compute them, as llama.cpp's log tells after a load.

    CPU_REPACK interleaves rows of some quantized types for faster kernels; the log names one tensor that could not
    go there and the number of the others.
    """
    said = " ".join(text for _, text in _log)
    kernels = {}
    if offloaded := re.search(r"offloaded (\d+)/\d+ layers to GPU", said):
        kernels["GPU layers"] = int(offloaded[1])
    if kept := re.search(
        r"\(and (\d+) others\) cannot be used with preferred buffer type (\S+), using (\S+) instead", said
    ):
        kernels[kept[3]] = int(kept[1]) + 1
        kernels[kept[2]] = n_tensors - int(kept[1]) - 1
    return {name: n for name, n in kernels.items() if n > 0} or {"CPU": n_tensors}


def _windowed_kv(kv_bytes: int, window: int) -> tuple[tuple[int, int], ...]:
    """See `Loaded`: how many layers have the window llama.cpp's log tells; they count alike in `kv_bytes`."""
    said = " ".join(text for _, text in _log)
    whole, windowed = (
        int(found[1]) if (found := re.search(rf"creating +{kind} KV cache.*?cells, *(\d+) layers", said)) else 0
        for kind in ("non-SWA", "SWA")
    )
    return ((window, kv_bytes * windowed // (whole + windowed)),) if window and windowed else ()


def _buffers() -> list[tuple[str, int]]:
    """(buffer type, bytes) of weights, KV and compute buffers that llama.cpp reported."""
    found = []
    for _, text in list(_log):
        if match := re.search(r"(\S+)\s+(?:model|KV|RS|compute|output) buffer size\s*=\s*([\d.]+) MiB", text):
            found.append((match[1], int(float(match[2]) * 2**20)))
    return found


def _bytes_read(tensors: list[TensorInfo], metadata: dict[str, Any]) -> int:
    """The bytes of weights that one token reads.

    The token embedding is a lookup of one row, unless it is also the output matrix (tied); of a layer's experts
    only those used are read.
    """
    arch = metadata.get("general.architecture", "")
    experts, used = metadata.get(f"{arch}.expert_count", 0), metadata.get(f"{arch}.expert_used_count", 0)
    tied = all(tensor.name != "output.weight" for tensor in tensors)
    total = 0.0
    for tensor in tensors:
        if tensor.name == "token_embd.weight" and not tied:
            total += tensor.size_bytes / tensor.shape[1]
        elif "_exps." in tensor.name and experts:
            total += tensor.size_bytes * used / experts
        else:
            total += tensor.size_bytes
    return int(total)
