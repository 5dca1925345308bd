"""Size, memory and time of a torch quantization before it runs, from shapes and this machine's speed.

- Size: the codes, scales, zero points and indices of the format, and 16 bits for every other weight.
- Memory: that of the engine or of the check, which is larger. The engine's process holds the libraries, the files as
  they are read, the model as the engine computes it, what was packed, the inputs and outputs of one layer for all
  samples (2 x samples x length x hidden size), and two Hessians (in_features^2 of float32) for each module of a layer,
  or with gptqmodel's awq what goes into each module of a layer for all samples, three times; the check's the
  libraries, two tokenizers, a model in float32, and the largest of: the artifact's file mapped with logits of a window,
  the parent's file as it is read, and three windows with the copies in float64 that compare them.
- Memory of the device: the whole model with llmcompressor and autoawq and in the check, the widest layer twice and the
  embedding with the others; samples and Hessians on top.
- Time on a CPU: the engine's own call. A pass is 2 x weights x tokens operations; gptq takes 2 and a Hessian
  (2 x tokens x in_features^2 for each module), 3 products of in_features^3 for its inverse, and goes through the
  columns one by one; awq takes 2 and tries 21 scales, each a pass over the searched tokens of what the scales touch,
  and tries 10 bounds of each group; static scales take 1. Products at the speed that a float32 product of numpy has
  here, what is bound by memory and by calls at the speed it was measured with. Loading, saving and checking come on
  top. On a GPU the time is not known beforehand.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from quantlab.core import hardware
from quantlab.core.result import Notice, TensorType
from quantlab.quantize.calibration import DEFAULT_SAMPLES
from quantlab.quantize.engines import ENGINES
from quantlab.quantize.engines.companions import stored_dtype
from quantlab.quantize.spec import Prediction, QuantizeSpec
from quantlab.quantize.torch_source import TorchSource
from quantlab.quantize.torch_work import (
    AWQ_SEARCH_TOKENS,
    CHECK_TOKENS,
    CHECK_WINDOW_TOKENS,
    COMPARED_TOKENS,
    PROBE_TOKENS,
)

# Names in a layer hold its number; what stands outside of layers (embedding, head) stays in 16 bits.
LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
# What the header of a safetensors file says of a tensor, name and all, and the tensors of a quantized module.
_HEADER_BYTES, _PARTS = 115, 3.5
# Resident memory of Python with torch, transformers and an engine imported (torch 2.13, CPU).
_LIBRARIES_BYTES = 650_000_000
# What a tokenizer holds of an entry of its vocabulary: the check has those of artifact and parent.
_ENTRY_BYTES = 660
# Blocks of logits in float64 that a divergence has at once.
_COMPARED_COPIES = 5
_PASSES = {"gptq": 2.0, "awq": 2.0, "int8": 3.0, "fp8": 1.0}
_SOLVE_PRODUCTS = 3
# Scales that awq tries, and the weights that a trial passes: o_proj and down_proj are tried twice.
_TRIALS, _TRIED_WEIGHTS = 21, 1.35
# What gptqmodel's awq holds of the inputs of a layer's modules: each batch, all joined, and a copy to reduce.
_AWQ_INPUTS = 3
# Seconds a weight and a column beside the products (two AVX-512 cores, gptqmodel 7.6): ranges are searched again and
# again over the weights, which is bound by memory, and GPTQ takes a dozen small calls a column.
_ROUND_S, _SEARCH_S = 6e-9, {"gptq": 4e-7, "awq": 9e-7}
_COLUMN_S = 3e-4
_PROBE_SIZE, _PROBE_REPEATS = 768, 12


class Linear(msgspec.Struct, frozen=True):
    """A Linear module: its full name and its sizes."""

    module: str
    in_features: int
    out_features: int

    @property
    def params(self) -> int:
        """The number of its weights."""
        return self.in_features * self.out_features


def predict(source: TorchSource, quantized: list[Linear], spec: QuantizeSpec, *, device: str, dtype: str) -> Prediction:
    """The prediction for a checked spec whose engine computes in `dtype` on `device`."""
    packed = sum(stored_bytes(linear, spec) for linear in quantized)
    weights = sum(linear.params for linear in quantized)
    tied = bool(source.config.get("tie_word_embeddings"))
    others = [
        math.prod(shape) for name, shape in source.shapes.items() if not (tied and name.endswith("lm_head.weight"))
    ]
    plain = sum(others) - weights
    size_bytes = packed + 2 * plain
    header = round(_HEADER_BYTES * (len(others) + (_PARTS - 1) * len(quantized)))
    width = 4 if dtype == "float32" else 2
    return Prediction(
        size_bytes=size_bytes + header,
        bits_per_weight=8 * size_bytes / (weights + plain),
        tensor_types={
            stored_kind(spec): TensorType(len(quantized), weights),
            _plain_kind(source, spec): TensorType(len(others) - len(quantized), plain),
        },
        peak_process_bytes=max(
            _process_bytes(source, quantized, spec, width) + packed, check_bytes(source, device, size_bytes)
        ),
        peak_device_bytes=_device_bytes(source, quantized, spec, width) if device == "cuda" else 0,
        disk_bytes=size_bytes + header + _scratch_bytes(source, quantized, spec, width),
        quantize_s=_seconds(quantized, spec) if device == "cpu" else None,
        warnings=_warnings(spec),
    )


def stored_kind(spec: QuantizeSpec) -> str:
    """The stored type of a quantized module, as core/packed.py names it."""
    if spec.method == "fp8":
        return "FP8_E4M3"
    family = "" if spec.engine == "llmcompressor" else f"{spec.method.upper()}-"
    return f"{family}INT{spec.bits}"


def stored_bytes(linear: Linear, spec: QuantizeSpec) -> int:
    """The bytes of a quantized module in its format, without its bias."""
    rows, columns = linear.out_features, linear.in_features
    if spec.method == "fp8":
        # Static scales: one of the weights, one of the activations.
        scales = {"block": -(-rows // 128) * -(-columns // 128), "static": 2, "dynamic": rows}[str(spec.scheme)]
        return rows * columns + 2 * scales
    if spec.method == "int8":
        return rows * columns + 2 * rows
    assert spec.bits is not None
    assert spec.group_size is not None
    groups = 1 if spec.group_size == -1 else columns // spec.group_size
    if spec.engine != "llmcompressor":
        # g_idx: an int32 a column.
        index = 0 if spec.method == "awq" else 4 * columns
        return rows * columns * spec.bits // 8 + rows * groups * (2 * 8 + spec.bits) // 8 + index
    codes, zeros = (4 * -(-n * spec.bits // 32) for n in (columns, rows))
    # weight_shape: two int64.
    return rows * codes + 2 * rows * groups + (0 if spec.sym else zeros * groups) + 16


def _plain_kind(source: TorchSource, spec: QuantizeSpec) -> str:
    # autoawq's format has no other type.
    return "F16" if spec.engine == "autoawq" or stored_dtype(source.config) == "float16" else "BF16"


def _tokens(spec: QuantizeSpec) -> int:
    """The tokens that are looked at, at most; 0 for a method that needs none."""
    if spec.method == "rtn" or spec.scheme in ("dynamic", "block"):
        return 0
    return (spec.calib_samples or DEFAULT_SAMPLES) * spec.calib_length


def _scratch_bytes(source: TorchSource, quantized: list[Linear], spec: QuantizeSpec, width: int) -> int:
    """Disk that a run needs beside the artifact: logits of probe and check, and what an engine keeps to continue."""
    logits = 4 * (PROBE_TOKENS + 2 * CHECK_TOKENS) * int(source.config.get("vocab_size") or 0)
    if not ENGINES[spec.engine or ""].resumes:
        return logits
    hidden = _tokens(spec) * int(source.config.get("hidden_size") or 0) * width
    return logits + 2 * hidden + sum(stored_bytes(linear, spec) for linear in quantized)


def _samples_bytes(source: TorchSource, quantized: list[Linear], spec: QuantizeSpec, width: int) -> int:
    """Inputs and outputs of a layer for all samples, and what the method keeps of its modules."""
    inout = 2 * _tokens(spec) * int(source.config.get("hidden_size") or 0) * width
    if _solves(spec):
        return inout + 2 * 4 * max(_by_layer(quantized, lambda linear: linear.in_features**2), default=0)
    if spec.method == "awq" and spec.engine == "gptqmodel":
        widest = max(_by_layer(quantized, lambda linear: linear.in_features), default=0)
        return inout + _AWQ_INPUTS * _tokens(spec) * widest * width
    return inout


def _solves(spec: QuantizeSpec) -> bool:
    """Whether GPTQ makes the codes; also those of fp8 with static scales, whose text is there anyway."""
    return spec.method in ("gptq", "int8") or spec.scheme == "static"


def _process_bytes(source: TorchSource, quantized: list[Linear], spec: QuantizeSpec, width: int) -> int:
    model = source.stored_bytes + source.params * width
    return _LIBRARIES_BYTES + model + _samples_bytes(source, quantized, spec, width)


def _window_bytes(source: TorchSource) -> int:
    """Logits of a window of the check's text, of which it holds three."""
    tokens = min(CHECK_WINDOW_TOKENS, int(source.config.get("max_position_embeddings") or CHECK_WINDOW_TOKENS))
    return 3 * 4 * tokens * int(source.config.get("vocab_size") or 0)


def check_bytes(source: TorchSource, device: str, size_bytes: int) -> int:
    """The memory of the process that checks an artifact of `size_bytes`; a torch for CUDA takes more by itself."""
    entries = int(source.config.get("vocab_size") or 0)
    # Without an engine there are 425 MB of libraries; the heap keeps some of the passes (demo: 1.60 GB).
    libraries = _LIBRARIES_BYTES + 2 * _ENTRY_BYTES * entries
    model = 4 * source.params if device == "cpu" else 0
    windows = _window_bytes(source)
    compared = windows + _COMPARED_COPIES * 8 * COMPARED_TOKENS * entries
    return libraries + model + max(size_bytes + windows // 3, source.stored_bytes, compared)


def _device_bytes(source: TorchSource, quantized: list[Linear], spec: QuantizeSpec, width: int) -> int:
    held = source.params
    if spec.engine in ("gptqmodel", "optimum"):
        widest = max(_by_layer(quantized, lambda linear: linear.params), default=0)
        held = source.params - sum(linear.params for linear in quantized) + 2 * widest
    return max(held * width + _samples_bytes(source, quantized, spec, width), 2 * source.params + _window_bytes(source))


def _by_layer(quantized: list[Linear], size: Callable[[Linear], int]) -> Iterable[int]:
    sums: dict[str, int] = {}
    for linear in quantized:
        number = LAYER.search(linear.module)
        layer = linear.module[: number.end()] if number else ""
        sums[layer] = sums.get(layer, 0) + size(linear)
    return sums.values()


def _seconds(quantized: list[Linear], spec: QuantizeSpec) -> float:
    weights, tokens = sum(linear.params for linear in quantized), _tokens(spec)
    found = weights * _ROUND_S
    if not tokens:
        return found
    operations = _PASSES[spec.method] * 2 * weights * tokens
    if _solves(spec):
        columns, squares, cubes = (sum(linear.in_features**power for linear in quantized) for power in (1, 2, 3))
        operations += 2 * tokens * squares + 2 * _SOLVE_PRODUCTS * cubes
        found += columns * _COLUMN_S
    if spec.method == "awq":
        searched = min(tokens, AWQ_SEARCH_TOKENS.get(str(spec.engine), tokens))
        operations += _TRIALS * _TRIED_WEIGHTS * 2 * weights * searched
    return found + weights * _SEARCH_S.get(spec.method, 0) + operations / _operations_per_s()


def _operations_per_s() -> float:
    """The speed of a float32 matrix product of numpy here, with the threads that it takes: the fastest of a few."""
    a = np.ones((_PROBE_SIZE, _PROBE_SIZE), np.float32)
    best = math.inf
    for _ in range(_PROBE_REPEATS):
        started = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - started)
    return 2.0 * _PROBE_SIZE**3 / best


def _warnings(spec: QuantizeSpec) -> list[Notice]:
    if spec.method != "fp8":
        return []
    if (hardware.nvidia_capability() or 0) >= hardware.FP8_CAPABILITY:
        return []
    return [
        Notice(
            "fp8-fallback",
            "no FP8 arithmetic here: the artifact is written all the same, and computes in 16 or 32 bits",
            "FP8 needs a GPU of compute capability 8.9 or more (Ada, Hopper)",
        )
    ]
