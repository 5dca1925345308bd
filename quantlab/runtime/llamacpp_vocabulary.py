"""The tokenizer of a GGUF file, by llama.cpp."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quantlab.core.errors import QuantlabError
from quantlab.runtime.backend import Tokens
from quantlab.runtime.llamacpp_library import lib, load_model


def tokenize(vocabulary: Any, text: str, *, special: bool, bos: bool) -> Tokens:
    """Token ids; `special`: control tokens in the text are parsed; `bos`: it is added where the model wants it."""
    data = text.encode()
    room = len(data) + 8
    buffer = (lib.llama_token * room)()
    n = lib.llama_tokenize(vocabulary, data, len(data), buffer, room, bos, special)
    if n < 0:
        raise QuantlabError(f"llama.cpp does not tokenize a text of {len(data)} bytes", "use a shorter text")
    return np.frombuffer(memoryview(buffer), np.int32)[:n].copy()


class Vocabulary:
    """The tokenizer of a model that llama.cpp holds."""

    def __init__(self, model: Any) -> None:
        self.pointer = lib.llama_model_get_vocab(model)
        bos = lib.llama_vocab_bos(self.pointer)
        self.bos: int | None = bos if bos >= 0 else None
        self.adds_bos = bool(lib.llama_vocab_get_add_bos(self.pointer))

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> Tokens:
        """Token ids of `text`; see `Backend`."""
        return tokenize(self.pointer, text, special=special, bos=bos)


@contextlib.contextmanager
def opened_vocabulary(path: Path) -> Iterator[Vocabulary]:
    """Open the tokenizer of a GGUF file, without its weights, and close it at the end."""
    model = load_model(path, {"vocab_only": True})
    try:
        yield Vocabulary(model)
    finally:
        lib.llama_model_free(model)
