"""Open a local model in the runtime that computes its format: GGUF in llama.cpp, a safetensors folder in torch."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from quantlab.core.errors import UsageError
from quantlab.core.hf_config import quantization, text_config
from quantlab.runtime.backend import Backend, Capacity, Tokens

# What transformers imports late, by itself or for a folder quantized with a method.
_LATE = ("transformers.modeling_utils", "transformers.models.auto.tokenization_auto")
_LATE_FOR = {"gptq": "gptqmodel", "awq": "gptqmodel", "compressed-tensors": "compressed_tensors"}


class Vocabulary(Protocol):
    """A model's tokenizer: as in `Backend` and `Loaded`."""

    bos: int | None
    adds_bos: bool

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> Tokens:
        """Token ids of `text`."""


def import_runtime(path: Path) -> None:
    """Import what `opened` needs, so that a process can tell a model's memory from that of its libraries."""
    if not path.is_dir():
        importlib.import_module("quantlab.runtime.llamacpp")
        return
    quiet = importlib.import_module("quantlab.runtime.torch.load").quiet
    importlib.import_module("quantlab.runtime.torch.backend")
    method = (quantization(path) or {}).get("quant_method")
    for module in (*_LATE, *([_LATE_FOR[method]] if method in _LATE_FOR else [])):
        # A library that is missing or broken is the load's to tell.
        with quiet(), contextlib.suppress(ImportError, RuntimeError):
            importlib.import_module(module)


@contextlib.contextmanager
def opened(
    path: Path,
    capacity: Capacity,
    *,
    device: str = "auto",
    dtype: str = "auto",
    threads: int | None = None,
    exact: bool = False,
    hidden: bool = False,
) -> Iterator[Backend]:
    """Open a `.gguf` file or a safetensors folder and close it at the end.

    `dtype` (auto, float32, float16, bfloat16) is what torch computes in; a GGUF file's types are its own. `exact`
    takes the kernels that round least instead of the fastest: for the quality of weights, not the speed of a kernel.
    `hidden` opens a folder as a HiddenBackend (runtime/torch/hidden.py); a GGUF file gives no hidden states.
    """
    backend: Backend
    if path.is_dir():
        from quantlab.runtime.torch.backend import TorchBackend
        from quantlab.runtime.torch.hidden import HiddenBackend

        kind = HiddenBackend if hidden else TorchBackend
        backend = kind(path, capacity, device=device, dtype=dtype, threads=threads, exact=exact)
    else:
        if dtype != "auto":
            raise UsageError(
                f"`--dtype {dtype}` for `{path.name}`", "a GGUF file's types are its own; leave the option out"
            )
        from quantlab.runtime.llamacpp import LlamaCppBackend

        backend = LlamaCppBackend(path, capacity, device=device, threads=threads)
    try:
        yield backend
    finally:
        backend.close()


@contextlib.contextmanager
def vocabulary(path: Path) -> Iterator[Vocabulary]:
    """Open the tokenizer of a model, without its weights."""
    if path.is_dir():
        from quantlab.runtime.torch.vocabulary import Vocabulary as OfFolder

        yield OfFolder(path, text_config(path).get("vocab_size") or 0)
        return
    from quantlab.runtime.llamacpp_vocabulary import opened_vocabulary

    with opened_vocabulary(path) as of_file:
        yield of_file
