"""A loaded model on its device: one pass over a row of tokens, its KV sizes, its memory, its identity."""

from __future__ import annotations

import collections
import gc
import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import transformers

from quantlab.core import hardware
from quantlab.core.artifact import content_sha256
from quantlab.core.errors import QuantlabError
from quantlab.runtime.backend import Logits, Memory
from quantlab.runtime.torch import attention, load, rope
from quantlab.runtime.worker import out_of_memory

VERSION = f"{torch.__version__}, transformers {transformers.__version__}"


class Model:
    """The causal language model of a folder, for texts of `n_ctx` tokens; `network` is transformers' own."""

    def __init__(self, path: Path, device: str, dtype: str, *, n_ctx: int, exact: bool) -> None:
        self.path, self.device = path, load.device_named(device)
        config = load.load_config(path, attention=attention.NAME)
        _require_attention(config, path)
        wanted = load.dtype_named(dtype, self.device, config)
        attention.register()
        load.keep_fp8(config, wanted, self.device)
        self.network: Any = load.load_model(path, config, wanted, self.device, exact=exact)
        rope.settle(self.network, n_ctx)
        # A method's loader may have chosen another.
        self.dtype = self.network.dtype
        self.config: Any = self.network.config.get_text_config()
        self.n_vocab: int = self.config.vocab_size
        self.eos = _eos(self.network)
        # Its sampling settings would rule `generate`.
        self.network.generation_config = transformers.GenerationConfig()
        with load.quiet():
            self.kv_shapes, self.kv_dtype, self._kv_windows = self._probe()
        if self.device.type == "cuda":
            # What loading needed for a moment is no part of the run's peak.
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of all layers."""
        itemsize: int = self.kv_dtype.itemsize
        return sum(heads * (k + v) for heads, k, v in self.kv_shapes) * itemsize

    @property
    def windowed_kv(self) -> tuple[tuple[int, int], ...]:
        """See `Loaded`."""
        sizes: collections.Counter[int] = collections.Counter()
        for (heads, k, v), window in zip(self.kv_shapes, self._kv_windows, strict=True):
            sizes[window or 0] += heads * (k + v) * self.kv_dtype.itemsize
        return tuple((window, size) for window, size in sorted(sizes.items()) if window)

    def _probe(self) -> tuple[list[tuple[int, int, int]], torch.dtype, list[int | None]]:
        """From a step of one token (KV heads, key size, value size) of each layer, the KV's dtype, and each window.

        Weights that a library decompresses at the first step are decompressed after it.
        """
        probe = attention.Probe()
        self.run(np.zeros(1, np.int64), np.zeros(1, np.int64), probe, [0])
        n_layers = self.config.num_hidden_layers
        what = None
        if sorted(probe.shapes) != list(range(n_layers)) or probe.calls != n_layers:
            what = f"{probe.calls} of {n_layers} layers attend to keys of their own, the others keep another state"
        elif other := [i for i, window in self._windows().items() if probe.windows[i] != window]:
            what = f"layer {other[0]} ({self.config.layer_types[other[0]]}) does not tell how far it looks back"
        if what:
            raise QuantlabError(
                f"`{self.path}` ({self.config.model_type}): {what}",
                "the torch runtime computes attention to all tokens or to a sliding window; try a GGUF of it",
            )
        layers = range(n_layers)
        return [probe.shapes[i] for i in layers], probe.dtype, [probe.windows[i] for i in layers]

    def _windows(self) -> dict[int, int | None]:
        """How far each layer looks back by config.json, where it names layers; -1 for what is not computed."""
        windows = {"full_attention": None, "sliding_attention": getattr(self.config, "sliding_window", None)}
        kinds = getattr(self.config, "layer_types", None) or []
        return {i: windows.get(kind, -1) for i, kind in enumerate(kinds)}

    def run(self, tokens: Any, positions: Any, step: attention.Step, wanted: list[int]) -> Logits:
        """One pass over a row of tokens; float32 logits of the `wanted` ones, when the device is done."""
        ids, places = (torch.from_numpy(array.astype(np.int64))[None].to(self.device) for array in (tokens, positions))
        named = {"input_ids": ids, "position_ids": places, "use_cache": False, "quantlab_step": step}
        try:
            with torch.inference_mode():
                if not wanted:
                    self.network.base_model(**named)
                    self._synchronize()
                    return np.empty((0, self.n_vocab), np.float32)
                keep = torch.tensor(wanted, device=self.device)
                logits = self.network(**named, logits_to_keep=keep).logits[0]
                return np.asarray(logits.float().cpu().numpy())
        except QuantlabError:
            raise
        except Exception as error:
            # Every model's own code raises what it likes.
            if out_of_memory(error):
                raise QuantlabError(
                    f"a step of {len(tokens)} tokens does not fit in the memory of `{self.device.type}`",
                    "use a smaller batch or `--n-ctx`",
                ) from error
            reason = next(iter(str(error).splitlines()), "") or repr(error)
            raise QuantlabError(
                f"torch fails a step of {len(tokens)} tokens of `{self.path.name}`: {reason}",
                "check the artifact with `quantlab inspect`, or try another `--dtype` or `--device`",
            ) from error

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def require_room(self, n_tokens: int) -> None:
        """Refuse a KV cache of `n_tokens` that the device has no room for."""
        need = self.kv_bytes_per_token * n_tokens
        cuda = self.device.type == "cuda"
        room = torch.cuda.mem_get_info()[0] if cuda else psutil.virtual_memory().available
        if need > room:
            raise QuantlabError(
                f"the KV cache of {n_tokens} tokens needs {need} bytes, {room} are free",
                "use a smaller `--n-ctx` or batch",
            )

    def memory(self) -> Memory:
        """Bytes now and at the peak; on a CPU all is the process's. MPS keeps no peak: what its driver holds now."""
        allocated = reserved = peak = 0
        if self.device.type == "cuda":
            allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved()
            peak = torch.cuda.max_memory_allocated()
        elif self.device.type == "mps":
            allocated, reserved = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
            peak = reserved
        return Memory(allocated, reserved, peak, hardware.process_bytes(), hardware.peak_process_bytes())

    def identity(self) -> bytes:
        """32 bytes that change with the folder's content, the libraries, the dtypes and the factors of RoPE."""
        named = f"{VERSION} {self.dtype} {self.kv_dtype} {content_sha256(self.path)}"
        return hashlib.sha256(named.encode() + rope.factors(self.network)).digest()


def _require_attention(config: Any, path: Path) -> None:
    """Refuse a model whose code never asks for an attention by its name."""
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kind = kind[0] if isinstance(kind, tuple) else kind
    asks = hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS")
    if not (asks or getattr(kind, "_supports_attention_backend", False)):
        raise QuantlabError(
            f"`{path}`: `{kind.__name__}` has no attention that can be replaced, as the torch runtime must",
            "its weights are not at fault: try a GGUF of it",
        )


def _eos(network: Any) -> frozenset[int]:
    """The ids that end an answer, by generation_config.json and config.json."""
    named = [getattr(settings, "eos_token_id", None) for settings in (network.generation_config, network.config)]
    return frozenset(
        int(token) for ids in named if ids is not None for token in (ids if isinstance(ids, list | tuple) else [ids])
    )
