"""A GGUF model in llama.cpp as quantize needs it: whole windows with logits of every token, its tokenizer, its log.

runtime/llamacpp.py is the backend for generating; this one is open for a moment, plain memory-mapped weights without
repacking, and lets a callback see every tensor that is computed.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantlab.core.errors import QuantlabError
from quantlab.runtime.llamacpp_library import lib
from quantlab.runtime.llamacpp_vocabulary import tokenize

__all__ = ["LlamaModel", "Log", "lib"]

_LIST_TAIL = 40


class Log:
    """llama.cpp's log as whole lines: the last ones are kept, each is given to `on_line`."""

    def __init__(self, on_line: Callable[[str], None] = lambda _: None) -> None:
        self.lines: list[str] = []
        self._on_line, self._part = on_line, ""
        self._callback = lib.llama_log_callback(self._take)

    def _take(self, _level: int, text: bytes, _data: Any) -> None:
        *lines, self._part = (self._part + text.decode("utf-8", "replace")).split("\n")
        for line in lines:
            if line.strip(" ."):
                self.lines = [*self.lines[1 - _LIST_TAIL :], line]
                self._on_line(line)

    @contextlib.contextmanager
    def listening(self) -> Iterator[Log]:
        """Receive the log within the block."""
        lib.llama_log_set(self._callback, None)
        try:
            yield self
        finally:
            lib.llama_log_set(_DEAF, None)

    def last(self, *marks: str) -> str:
        """The last line that holds one of `marks`, else the last line of all."""
        marked = [line for line in self.lines if any(mark in line for mark in marks)]
        return (marked or self.lines or ["it gave no reason"])[-1].strip()


@lib.llama_log_callback  # type: ignore[untyped-decorator]
def _DEAF(_level: int, _text: bytes, _data: Any) -> None:  # noqa: N802 - a constant that is a callback
    pass


class LlamaModel:
    """An open model. `n_ctx` 0 opens the vocabulary alone."""

    def __init__(self, path: Path, *, n_ctx: int = 0, threads: int = 1, on_tensor: Any = None) -> None:
        self._context: Any = None
        self._n_ctx = n_ctx
        with Log().listening() as log:
            params = lib.llama_model_default_params()
            params.n_gpu_layers = 0
            params.use_extra_bufts = False
            params.vocab_only = n_ctx == 0
            self._model = lib.llama_model_load_from_file(str(path).encode(), params)
            if not self._model:
                raise QuantlabError(f"llama.cpp does not load `{path.name}`: {log.last('error')}")
            self._vocab = lib.llama_model_get_vocab(self._model)
            if n_ctx:
                self._open_context(path, threads, on_tensor, log)

    def _open_context(self, path: Path, threads: int, on_tensor: Any, log: Log) -> None:
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self._n_ctx
        params.n_threads = params.n_threads_batch = threads
        params.offload_kqv = params.op_offload = False
        if on_tensor is not None:
            params.cb_eval = on_tensor
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise QuantlabError(f"llama.cpp makes no context for `{path.name}`: {log.last('error', 'failed')}")
        self._batch = lib.llama_batch_init(self._n_ctx, 0, 1)

    def __enter__(self) -> LlamaModel:
        return self

    def __exit__(self, *_: object) -> None:
        if self._context:
            lib.llama_batch_free(self._batch)
            lib.llama_free(self._context)
        lib.llama_model_free(self._model)

    @property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        return int(lib.llama_vocab_n_tokens(self._vocab))

    @property
    def n_ctx_train(self) -> int:
        """The context that the model was trained for."""
        return int(lib.llama_model_n_ctx_train(self._model))

    @property
    def bos(self) -> int | None:
        """The BOS id where the model wants one at the head of a text."""
        return int(lib.llama_vocab_bos(self._vocab)) if lib.llama_vocab_get_add_bos(self._vocab) else None

    @property
    def chat_template(self) -> str | None:
        """The chat template in the file."""
        template = lib.llama_model_chat_template(self._model, None)
        return template.decode("utf-8", "replace") if template else None

    def special_text(self, name: str) -> str:
        """How the `bos` or `eos` token is written in a text; empty where the model has none."""
        token = getattr(lib, f"llama_vocab_{name}")(self._vocab)
        return lib.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace") if token >= 0 else ""

    def encode(self, text: str, *, special: bool = False, add_special: bool = False) -> list[int]:
        """Token ids; `special`: control tokens in the text are parsed; `add_special`: BOS is added where wanted."""
        ids: list[int] = tokenize(self._vocab, text, special=special, bos=add_special).tolist()
        return ids

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """Compute one window from an empty context: float32 (tokens, n_vocab), a view until the next call."""
        n, batch = len(tokens), self._batch
        assert 0 < n <= self._n_ctx
        if min(tokens) < 0 or max(tokens) >= self.n_vocab:
            raise QuantlabError(f"a token id is outside the vocabulary of {self.n_vocab}")
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        with Log().listening() as log:
            if code := lib.llama_decode(self._context, batch):
                raise QuantlabError(f"llama.cpp failed a window of {n} tokens (code {code}): {log.last()}")
        flat = ctypes.cast(lib.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float))
        if not flat:
            raise QuantlabError("llama.cpp computes no logits for it: it is no causal language model")
        return np.ctypeslib.as_array(flat, (n, self.n_vocab))
