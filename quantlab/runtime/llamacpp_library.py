"""llama.cpp itself: its library, what it logs, and a model loaded into it.

It tells by its log alone why a load failed, which kernels compute the weights, and what its buffers take.
"""

from __future__ import annotations

import collections
import os
import re
from pathlib import Path
from typing import Any

from quantlab.core.errors import QuantlabError, missing_extra, unknown_name
from quantlab.core.result import DEVICES

# When llama.cpp aborts, its own message must be the last that is said, not a debugger's pages.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
try:
    import llama_cpp.llama_cpp as lib
except ModuleNotFoundError as error:
    raise missing_extra("llama-cpp-python", "gguf") from error

__all__ = ["buffers", "kernels", "last_errors", "lib", "load_model", "offloads", "version", "windowed_kv"]

_ERROR_LEVEL = 4

_log: collections.deque[tuple[int, str]] = collections.deque(maxlen=4000)


@lib.llama_log_callback  # type: ignore[untyped-decorator]
def _keep_log(level: int, text: bytes, _: Any) -> None:
    _log.append((level, text.decode("utf-8", "replace").rstrip()))


def last_errors() -> str:
    """What llama.cpp said last on its error level, for an error message."""
    errors = [text for level, text in _log if level == _ERROR_LEVEL and text]
    return "; ".join(errors[-2:]) or "it gave no reason"


def load_model(path: Path, settings: dict[str, Any]) -> Any:
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


def offloads(device: str) -> bool:
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


def kernels(n_tensors: int) -> dict[str, int]:
    """Weights by the buffer type whose kernels compute them, as llama.cpp's log tells after a load.

    CPU_REPACK interleaves rows of some quantized types for faster kernels; the log names one tensor that could not
    go there and the number of the others.
    """
    said = " ".join(text for _, text in _log)
    found = {}
    if offloaded := re.search(r"offloaded (\d+)/\d+ layers to GPU", said):
        found["GPU layers"] = int(offloaded[1])
    if kept := re.search(
        r"\(and (\d+) others\) cannot be used with preferred buffer type (\S+), using (\S+) instead", said
    ):
        found[kept[3]] = int(kept[1]) + 1
        found[kept[2]] = n_tensors - int(kept[1]) - 1
    return {name: n for name, n in found.items() if n > 0} or {"CPU": n_tensors}


def windowed_kv(kv_bytes: int, window: int) -> tuple[tuple[int, int], ...]:
    """See `Loaded`: how many layers have the window llama.cpp's log tells; they count alike in `kv_bytes`."""
    said = " ".join(text for _, text in _log)
    whole, windowed = (
        int(found[1]) if (found := re.search(rf"creating +{kind} KV cache.*?cells, *(\d+) layers", said)) else 0
        for kind in ("non-SWA", "SWA")
    )
    return ((window, kv_bytes * windowed // (whole + windowed)),) if window and windowed else ()


def buffers() -> list[tuple[str, int]]:
    """(buffer type, bytes) of weights, KV and compute buffers that llama.cpp reported."""
    found = []
    for _, text in list(_log):
        if match := re.search(r"(\S+)\s+(?:model|KV|RS|compute|output) buffer size\s*=\s*([\d.]+) MiB", text):
            found.append((match[1], int(float(match[2]) * 2**20)))
    return found


def version() -> str:
    """Of the binding, which has llama.cpp in it."""
    import importlib.metadata

    return importlib.metadata.version("llama-cpp-python")
