"""What a torch method will do, from headers alone: which modules, whether they fit, what it needs.

A group that does not divide a dimension is found here, before an hour of work, and by no engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import psutil

from quantlab.core import hardware
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.files import check_space, existing
from quantlab.core.result import Notice
from quantlab.quantize import torch_state, torch_vllm
from quantlab.quantize.engines import ENGINES
from quantlab.quantize.engines.companions import stored_dtype
from quantlab.quantize.engines.environment import state
from quantlab.quantize.spec import Prediction, QuantizeSpec
from quantlab.quantize.tensors import matching
from quantlab.quantize.torch_prediction import LAYER, Linear, predict
from quantlab.quantize.torch_source import TorchSource
from quantlab.quantize.torch_spec import GROUP_SIZES, calibrates
from quantlab.quantize.torch_vllm import FP8_BLOCK, FUSED

_NAMES_SHOWN = 2


class Plan(msgspec.Struct, frozen=True):
    """What the engine is told: `keep` are full names of the Linear modules of layers that stay in 16 bits.

    `warnings` must be said of a run; the prediction has more, of what the check of a run says by itself.
    """

    keep: list[str]
    quantized: list[Linear]
    device: str
    dtype: str
    threads: int
    prediction: Prediction
    warnings: list[Notice]


class Misfit(msgspec.Struct, frozen=True):
    """A module that cannot be stored as asked: `divisor` of `what` does not divide its `size`."""

    module: str
    what: str
    divisor: int
    dimension: str
    size: int


def plan(source: TorchSource, spec: QuantizeSpec) -> Plan:
    """The plan of a checked spec.

    Raises UsageError where a pattern of `skip` matches nothing, nothing is left to quantize, or layers do not fit, all
    of them at once; QuantlabError where memory or the disk of `out` is too small.
    """
    every = linears(source)
    if not every:
        raise QuantlabError(f"`{source.folder.name}` has no Linear layers that could be quantized", "use another model")
    skipped = set(matching(spec.skip, [linear.module for linear in every])) if spec.skip else set()
    quantized = [linear for linear in every if linear.module not in skipped]
    if not quantized:
        raise UsageError("`--skip` matches every Linear layer: nothing is left to quantize", "give a narrower pattern")
    if spec.engine == "optimum" and not _alike(quantized):
        raise UsageError(
            "optimum quantizes the same modules in all layers, and `--skip` keeps some in one layer and not in another",
            "use `--engine gptqmodel`, or a `--skip` that fits all layers",
        )
    if wrong := misfits(quantized, spec):
        raise _does_not_fit(wrong, quantized, spec)
    device, dtype = _device(spec), _dtype(spec, source)
    threads = spec.threads or hardware.usable_cores()
    prediction = predict(source, quantized, spec, device=device, dtype=dtype)
    _check_memory(prediction, spec)
    _check_disk(prediction, spec, source)
    warnings = [*source.notices, *prediction.warnings, *_length_notices(source, spec)]
    # The check of an artifact says itself what vLLM makes of it.
    said = [*warnings, *_vllm_notices(every, quantized, spec)]
    return Plan(
        keep=sorted(skipped),
        quantized=quantized,
        device=device,
        dtype=dtype,
        threads=threads,
        prediction=msgspec.structs.replace(prediction, warnings=said),
        warnings=warnings,
    )


def _alike(modules: Iterable[Linear]) -> bool:
    """Whether these are the same modules in every layer."""
    layers: dict[str, set[str]] = {}
    for linear in modules:
        number = LAYER.search(linear.module)
        assert number is not None
        layers.setdefault(number[0], set()).add(linear.module[number.end() :])
    first, *others = layers.values()
    return all(other == first for other in others)


def linears(source: TorchSource) -> list[Linear]:
    """The Linear modules of the layers, in order of their names in the files."""
    return [
        Linear(name.removesuffix(".weight"), shape[1], shape[0])
        for name, shape in source.shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and LAYER.search(name)
    ]


def misfits(modules: Iterable[Linear], spec: QuantizeSpec) -> list[Misfit]:
    """Every dimension that the group, or the format's packing, does not divide.

    Packing: gptq puts 32 / bits weights of a column into an int32, and zero points of a row; awq 8 weights of a row.
    """
    found = []
    for module in modules:
        for what, divisor, dimension in _divisors(spec):
            size = module.in_features if dimension == "in_features" else module.out_features
            if size % divisor:
                found.append(Misfit(module.module, what, divisor, dimension, size))
    return found


def _divisors(spec: QuantizeSpec) -> list[tuple[str, int, str]]:
    """(what, divisor, dimension) that a checked spec asks of every module."""
    if spec.scheme == "block":
        return [("the fp8 block", FP8_BLOCK, "in_features"), ("the fp8 block", FP8_BLOCK, "out_features")]
    found = []
    if spec.group_size is not None and spec.group_size > 0:
        found.append(("`group_size`", spec.group_size, "in_features"))
    if spec.method == "awq" and spec.engine == "autoawq":
        found.append(("the clipping of autoawq", 64, "out_features"))
    elif spec.method == "awq" and spec.engine != "llmcompressor":
        found.append(("the packing of awq", 8, "out_features"))
    if spec.method == "gptq" and spec.engine != "llmcompressor":
        assert spec.bits is not None
        # 3 bits cross the borders of int32: 32 weights fill 3 of them.
        packed = 32 if spec.bits == 3 else 32 // spec.bits
        found += [("the packing of gptq", packed, "in_features"), ("the packing of gptq", packed, "out_features")]
    return found


def _does_not_fit(wrong: list[Misfit], modules: list[Linear], spec: QuantizeSpec) -> UsageError:
    kinds: dict[tuple[str, int, str, int], list[str]] = {}
    for misfit in wrong:
        kinds.setdefault((misfit.what, misfit.divisor, misfit.dimension, misfit.size), []).append(misfit.module)
    said = [
        f"{what} {divisor} does not divide `{dimension}` {size} of {_named(names)}"
        for (what, divisor, dimension, size), names in kinds.items()
    ]
    hints = ["use `--scheme dynamic`"] if spec.scheme == "block" else []
    if sizes := _that_fit(lambda size: misfits(modules, msgspec.structs.replace(spec, group_size=size)), spec):
        others = f" (or {', '.join(map(str, sizes[1:]))})" if sizes[1:] else ""
        hints.append(f"use `--group-size {sizes[0]}`{others}")
    ends = {misfit.module.rpartition(".")[2] for misfit in wrong}
    fused = {part for parts in FUSED if set(parts) & set(ends) for part in parts}
    names = sorted({*ends, *(fused & _last_names(modules))})
    pattern = rf"\.{names[0]}$" if len(names) == 1 else rf"\.({'|'.join(names)})$"
    if not all(re.search(pattern, module.module) for module in modules):
        hints.append(f"keep these layers in 16 bits with `--skip '{pattern}'`")
    return UsageError("; ".join(said), ", or ".join(hints) or "these shapes fit no packing of this method: use another")


def _last_names(modules: Iterable[Linear]) -> set[str]:
    return {module.module.rpartition(".")[2] for module in modules}


def _that_fit(misfits_of: Callable[[int], list[Misfit]], spec: QuantizeSpec) -> list[int]:
    if spec.group_size is None or spec.group_size == -1:
        return []
    return [size for size in sorted(GROUP_SIZES, reverse=True) if not misfits_of(size)]


def _length_notices(source: TorchSource, spec: QuantizeSpec) -> list[Notice]:
    context = source.config.get("max_position_embeddings")
    if not calibrates(spec) or not isinstance(context, int) or spec.calib_length <= context:
        return []
    return [
        Notice(
            "calibration-length",
            f"samples of {spec.calib_length} tokens, and the model was made for {context}",
            f"use `--calib-length {context}` or less",
        )
    ]


def _check_memory(prediction: Prediction, spec: QuantizeSpec) -> None:
    """Raise where the process or the device lacks room now, with both numbers."""
    free = {"memory": psutil.virtual_memory().available}
    if prediction.peak_device_bytes and (on_device := hardware.nvidia_free_bytes()) is not None:
        free["device memory"] = on_device
    need = {"memory": prediction.peak_process_bytes, "device memory": prediction.peak_device_bytes}
    for kind, free_bytes in free.items():
        if need[kind] > free_bytes:
            raise QuantlabError(
                f"quantizing needs about {need[kind] / 1e9:.1f} GB of {kind}, {free_bytes / 1e9:.1f} GB are free",
                "end other work, "
                + ("use fewer `--calib-samples` or a smaller `--calib-length`, " if calibrates(spec) else "")
                + "or use a larger machine"
                + (", or `--device cpu`" if kind == "device memory" else ""),
            )


def _check_disk(prediction: Prediction, spec: QuantizeSpec, source: TorchSource) -> None:
    """Raise where a disk lacks room now, for the output or for the folder that a GGUF is restored to, or for both."""
    out, cache = Path(spec.out), source.folder.parent
    # What an interrupted run left there is used again, or gives way.
    need_bytes = prediction.disk_bytes - (torch_state.held_bytes(out) if spec.out else 0)
    if source.gguf is not None and not source.folder.exists():
        check_space(cache, source.stored_bytes)
        if existing(cache).stat().st_dev == existing(out.parent).stat().st_dev:
            need_bytes += source.stored_bytes
    check_space(out.parent, need_bytes)


def _vllm_notices(every: list[Linear], quantized: list[Linear], spec: QuantizeSpec) -> list[Notice]:
    """What transformers takes and vLLM does not, or not fast."""
    shapes = {linear.module: (linear.out_features, linear.in_features) for linear in every}
    names = dict.fromkeys(linear.module for linear in quantized)
    hint = "skip all of them or none where vLLM shall load the artifact"
    notices = [Notice("fused-split", said, hint)] if (said := torch_vllm.split(shapes, names)) else []
    weights_only = spec.bits is not None and spec.method != "int8"
    return [*notices, *(torch_vllm.tiles(shapes, names) if weights_only else [])]


def _named(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_NAMES_SHOWN])
    return f"{len(names)} Linear layers ({shown}{', ...' if len(names) > _NAMES_SHOWN else ''})"


def _device(spec: QuantizeSpec) -> str:
    """Where the engine runs: CUDA where it is, else the CPU (no engine here is tested on MPS)."""
    there = hardware.cuda_device()
    # An environment of its own has the index's torch, which is built for CUDA; this one may have another build.
    cuda = there and not (state(ENGINES[spec.engine or ""]).where == "here" and hardware.torch_cuda() is None)
    if spec.device == "cuda" and not cuda:
        what = "the installed torch is built without CUDA" if there else "no CUDA device was found"
        hint = "install a build of torch for CUDA" if there else "check `nvidia-smi` and CUDA_VISIBLE_DEVICES"
        raise QuantlabError(what, f"use `--device cpu`, or {hint}")
    if spec.device == "mps":
        raise QuantlabError("the engines do not run on MPS", "use `--device cpu`")
    return "cuda" if cuda and spec.device == "auto" else spec.device.replace("auto", "cpu")


def _dtype(spec: QuantizeSpec, source: TorchSource) -> str:
    """What the engine computes in: float32 on a CPU, whose 16-bit products are slow; else the type of the weights."""
    if spec.dtype != "auto":
        return spec.dtype
    if _device(spec) == "cpu":
        return "float32"
    return stored_dtype(source.config)
