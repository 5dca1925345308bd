"""What is recorded and said of a gguf artifact: its record, its metadata, its measurements, its warnings."""

from __future__ import annotations

import collections
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from quantlab import __version__
from quantlab.core.artifact import Record, histogram
from quantlab.core.gguf_file import GGUFHeader, TensorInfo
from quantlab.core.model import ModelFile
from quantlab.core.result import Measurement, ModelInfo, Notice, RuntimeInfo
from quantlab.quantize.gguf_source import Source
from quantlab.quantize.gguf_work import Done, Fallback
from quantlab.quantize.spec import NEED_IMATRIX, WIDE_TYPES, Prediction, QuantizeSpec, split_weight
from quantlab.quantize.tensors import BLOCKS, HEADS, is_quantized, misfit, stored_bytes

_SMALL_PARAMS = 1_000_000_000
# Types whose output matrix is Q8_0 in any case.
_STORED_AS_Q8 = ("Q8_0", "MXFP4_MOE")
# llama.cpp works through larger tensors in slabs of this size.
_LARGEST_BUFFER = 8 << 30


def parent_name(model: ModelFile) -> str:
    """What the parent is called, without a path of this machine."""
    return model.label if Path(model.source).expanduser().exists() else model.source


def metadata(spec: QuantizeSpec, *, kind: str) -> dict[str, str]:
    """The record as it stands in the GGUF: no text, no place."""
    facts = {
        "quantlab.version": __version__,
        "quantlab.method": "none" if kind in WIDE_TYPES else spec.method,
        "quantlab.type": kind,
        "quantlab.parent": parent_name(spec.model),
        "quantlab.parent_sha256": spec.model.sha256,
        "quantlab.parent_revision": spec.model.revision,
        "quantlab.note": spec.model.note,
    }
    return {key: value for key, value in facts.items() if value is not None}


def record(spec: QuantizeSpec, done: Done) -> Record:
    """The record beside the artifact: what was asked and what it was made of."""
    asked: dict[str, Any] = {
        "type": spec.type,
        "outtype": spec.outtype,
        "imatrix": spec.imatrix,
        "skip": spec.skip,
        "allow_requantize": spec.allow_requantize,
        "converter": Path(spec.converter).name if spec.converter else None,
    }
    if spec.imatrix:
        # A path tells of this machine; the file's name is enough beside the sha256 in `calibration`.
        asked["calib"] = [Path(split_weight(calib)[0]).name for calib in spec.calib]
    return Record(
        quantlab=__version__,
        method="none" if spec.type in WIDE_TYPES else spec.method,
        asked=asked,
        parent=parent_name(spec.model),
        parent_sha256=spec.model.sha256,
        sha256=done.sha256,
        parent_revision=spec.model.revision,
        calibration=done.calibration,
        note=spec.model.note,
    )


def runtime(spec: QuantizeSpec, threads: int) -> RuntimeInfo:
    """What did the work."""
    return RuntimeInfo("llamacpp", importlib.metadata.version("llama-cpp-python"), "cpu", spec.type, {}, threads)


def measurements(info: ModelInfo, duration_s: float, done: Done) -> dict[str, Measurement]:
    """The measurements of the contract; memory is that of the child, which did all of the work."""
    return {
        "duration": Measurement("s", "lower", [duration_s]),
        "peak_process_bytes": Measurement("bytes", "lower", [done.peak_process_bytes]),
        # llama.cpp quantizes on the CPU, whatever devices there are.
        "peak_device_bytes": Measurement("bytes", "lower", [0]),
        "size_bytes": Measurement("bytes", "lower", [info.size_bytes]),
        "bits_per_weight": Measurement("bits", "lower", [info.bits_per_weight]),
    }


def details(spec: QuantizeSpec, info: ModelInfo, done: Done, out: Path, how: str) -> dict[str, Any]:
    """Asked beside got, and the facts that are no samples."""
    kinds = {kind: entry.count for kind, entry in info.tensor_types.items()}
    found: dict[str, Any] = {
        "asked": spec.type,
        "got": kinds,
        "file": out.name,
        "base": how,
        "stages_s": done.stages_s,
        "fallbacks": [
            {"columns": f.columns, "block": f.block, "wanted": f.wanted, "stored": f.stored, "tensors": n}
            for f, n in _grouped(done.fallbacks)
        ],
    }
    if done.calibration is not None:
        found["calibration"] = done.calibration
    if done.tokens is not None:
        found["tokenizer"] = done.tokens
    return found


def small_model_notices(params: int) -> list[Notice]:
    """A warning where a model of so many weights loses much to fewer than 8 bits."""
    if params >= _SMALL_PARAMS:
        return []
    return [
        Notice(
            "small-model",
            f"{params / 1e6:.3g} million parameters: small models lose more quality to few bits",
            "measure it: `quantlab ppl ARTIFACT --against PARENT`",
        )
    ]


def loss_notices(spec: QuantizeSpec, source: Source, done: Done) -> list[Notice]:
    """Warnings about what quantizing lost, or had lost before."""
    if spec.type in WIDE_TYPES:
        return []
    notices = [] if "8" in spec.type else small_model_notices(source.params)
    if quantized := sorted({kind for kind in done.types.values() if is_quantized(kind)}):
        notices.append(
            Notice(
                "requantized",
                f"made from weights that were quantized before ({', '.join(quantized)}): errors add up",
                "quantize the original where it can be had",
            )
        )
    return notices


def bits_per_weight(tensors: Sequence[TensorInfo]) -> float:
    """8 x bytes of all tensors / number of weights, as llama.cpp prints it."""
    return 8 * sum(tensor.size_bytes for tensor in tensors) / sum(tensor.params for tensor in tensors)


def label_notices(label: str, tensors: Sequence[TensorInfo], fallbacks: list[Fallback]) -> list[Notice]:
    """A warning where label and content part ways because columns are no multiple of a block."""
    if not fallbacks:
        return []
    (most, _), *_ = _grouped(fallbacks)
    alike = [fallback for fallback in fallbacks if fallback.stored == most.stored]
    nominal = nominal_bits(label, tensors, fallbacks)
    hint = f"{nominal:.1f} is what the types that {label} stands for would take if they fitted"
    if is_quantized(most.stored):
        hint += "; types with blocks of 32 (Q8_0, Q5_0, Q4_0, IQ4_NL) do fit"
    return [
        Notice(
            "label-content",
            f"{label}: {len(alike)} of {len(tensors)} tensors stored as {most.stored}, because "
            f"{misfit((fallback.columns for fallback in alike), most.block)}: "
            f"{bits_per_weight(tensors):.2f} bits per weight, not {nominal:.1f}",
            hint,
        )
    ]


def nominal_bits(label: str, tensors: Sequence[TensorInfo], fallbacks: Sequence[Fallback]) -> float:
    """Bits per weight of these tensors in the types that the label stands for, as if every column count fitted.

    The output matrix (the embedding where it serves as one) falls back without a word in the log: to Q8_0 from Q5_K
    for the types below IQ3_XS, from Q6_K for the others.
    """
    wanted = {fallback.tensor: fallback.wanted for fallback in fallbacks}
    head = "Q5_K" if label in NEED_IMATRIX - {"IQ3_XS", "Q2_K_S"} else "Q6_K"
    bits = 0.0
    for tensor in tensors:
        kind = wanted.get(tensor.name, tensor.type)
        if tensor.name in HEADS and kind == "Q8_0" and tensor.shape[0] % BLOCKS[head][0] and label not in _STORED_AS_Q8:
            kind = head
        weights, size_bytes = BLOCKS[kind]
        bits += 8 * size_bytes / weights * tensor.params
    return bits / sum(tensor.params for tensor in tensors)


def prediction(spec: QuantizeSpec, source: Source, header: GGUFHeader, done: Done, *, converts: bool) -> Prediction:
    """Size, memory, disk and time of an artifact, from the types that the library chose for the tensors of `header`.

    Memory: the process itself, and the largest of: the folder's weights mapped while converting; the largest tensor
    while quantizing, as stored, in float32 and as written; the artifact mapped while it is checked. Disk: the artifact,
    and, where the run `converts`, the GGUF that a folder is converted to first.
    """
    tensors = [
        msgspec.structs.replace(
            tensor, type=done.types[tensor.name], size_bytes=stored_bytes(tensor.params, done.types[tensor.name])
        )
        for tensor in header.tensors
    ]
    new_keys = {key: value for key, value in metadata(spec, kind=spec.type).items() if key not in header.metadata}
    numbers = [key for key in ("general.file_type", "general.quantization_version") if key not in header.metadata]
    head_bytes = header.data_offset + sum(20 + len(key) + len(value.encode()) for key, value in new_keys.items())
    head_bytes += sum(16 + len(key) for key in numbers)
    size_bytes = -(-head_bytes // 32) * 32 + sum(-(-tensor.size_bytes // 32) * 32 for tensor in tensors)
    quantizing = max(
        old.size_bytes + new.size_bytes + (0 if old.type == "F32" else 4 * old.params)
        for old, new in zip(header.tensors, tensors, strict=True)
    )
    weights = sum(tensor.size_bytes for tensor in tensors)
    return Prediction(
        size_bytes=size_bytes,
        bits_per_weight=bits_per_weight(tensors),
        tensor_types=histogram((tensor.type, tensor.params) for tensor in tensors),
        peak_process_bytes=done.floor_bytes
        + max(min(quantizing, _LARGEST_BUFFER), weights, source.size_bytes if source.is_folder else 0),
        disk_bytes=size_bytes + (sum(tensor.size_bytes for tensor in header.tensors) if converts else 0),
        quantize_s=done.quantize_s,
        warnings=label_notices(spec.type, tensors, done.fallbacks),
    )


def _grouped(fallbacks: list[Fallback]) -> list[tuple[Fallback, int]]:
    """One fallback of each kind with the number of tensors it happened to, most first."""
    counts: collections.Counter[tuple[int, int, str, str]] = collections.Counter(
        (f.columns, f.block, f.wanted, f.stored) for f in fallbacks
    )
    return [(Fallback("", *kind), n) for kind, n in counts.most_common()]
