"""What a model on disk really holds: stored types against the label, sizes, kernels, tokenizer, template, head.

Read from headers; no weight is computed. What only a load can tell (the kernel that this CPU gets) is said so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantlab.core.artifact import model_info, read_record
from quantlab.core.gguf_file import GGUFHeader, TensorInfo
from quantlab.core.progress import Progress
from quantlab.core.result import Measurement, ModelInfo, Notice, Outcome
from quantlab.core.text import printable
from quantlab.quantize.inspection_folder import inspect_folder
from quantlab.quantize.spec import TYPES, InspectSpec
from quantlab.quantize.tensors import BLOCKS, HEADS, head_is_copy, is_quantized, misfit, whole_header

# The CPUs for which llama.cpp interleaves rows of a type at load, for faster kernels (ggml-cpu/repack.cpp).
_AVX2_OR_NEON, _NEON = "AVX2 or NEON dotprod", "NEON dotprod"
_REPACKED_ON = {
    "Q4_0": _AVX2_OR_NEON, "Q4_K": _AVX2_OR_NEON, "IQ4_NL": _AVX2_OR_NEON, "MXFP4": _AVX2_OR_NEON,
    "Q2_K": "AVX-512", "Q5_K": _NEON, "Q6_K": _NEON, "Q8_0": _NEON,
}  # fmt: skip
_REPACK_ROWS = 8

# The stored type that a label stands for, where its name does not begin with it (llama_ftype_get_default_type).
_LABEL_TYPES = {"IQ2_S": "IQ2_XS", "IQ2_M": "IQ2_S", "IQ3_XS": "IQ3_S", "IQ3_M": "IQ3_S"}


def run(spec: InspectSpec, progress: Progress) -> Outcome:
    """Look at a GGUF file or a folder."""
    path = Path(spec.model.path)
    info = model_info(spec.model)
    if path.is_dir():
        details, warnings = inspect_folder(path, info)
    else:
        details, warnings = _inspect_gguf(path, info)
    record = read_record(path)
    return Outcome(
        label=spec.model.label,
        model=info,
        runtime=None,
        measurements={
            "size_bytes": Measurement("bytes", "lower", [info.size_bytes]),
            "bits_per_weight": Measurement("bits", "lower", [info.bits_per_weight]),
        },
        warnings=warnings + _record_notices(info, record.sha256 if record else None),
        details=details,
    )


def label_type(label: str) -> str:
    """The stored type that a file type's name stands for: Q4_K for Q4_K_M."""
    named = [kind for kind in BLOCKS if label == kind or label.startswith(kind + "_")]
    return _LABEL_TYPES.get(label) or max(named, key=len)


def _record_notices(info: ModelInfo, recorded: str | None) -> list[Notice]:
    if recorded in (None, info.sha256):
        return []
    return [
        Notice(
            "record-differs",
            "the file is not the one that its record describes: it was changed after it was written",
            "quantize again",
        )
    ]


def _inspect_gguf(path: Path, info: ModelInfo) -> tuple[dict[str, Any], list[Notice]]:
    header = whole_header(path)
    metadata = header.metadata
    arch = metadata.get("general.architecture")
    label = next((name for name, number in TYPES.items() if number == metadata.get("general.file_type")), None)
    tokenizer, warnings = _tokenizer(header)
    head, head_warnings = _head(path, header)
    tensor_bytes = sum(tensor.size_bytes for tensor in header.tensors)
    details = {
        "architecture": _fact(arch),
        "scheme": label or "unlabelled",
        "record": {
            printable(key): _fact(value)
            for key, value in metadata.items()
            # What is empty was said of an earlier artifact and holds no more.
            if key.startswith("quantlab.") and value != ""
        },
        "sizes": {"tensors_bytes": tensor_bytes, "metadata_bytes": info.size_bytes - tensor_bytes},
        "n_ctx_train": _fact(metadata.get(f"{arch}.context_length")),
        "kernels": _kernels(header.tensors),
        "tokenizer": tokenizer,
        "chat_template": isinstance(metadata.get("tokenizer.chat_template"), str),
        "head": head,
        "importance_matrix": bool(metadata.get("quantize.imatrix.entries_count")),
    }
    return details, [*_label_notices(label, header.tensors, info), *warnings, *head_warnings]


def _kernels(tensors: list[TensorInfo]) -> dict[str, str]:
    """For each stored type of a matrix, the CPU kernel that would run: plain rows, or repacked where it can be."""
    found = {}
    for tensor in tensors:
        if sum(n > 1 for n in tensor.shape) < 2:
            continue
        cpus = _REPACKED_ON.get(tensor.type)
        if cpus and tensor.shape[1] % _REPACK_ROWS == 0:
            found[tensor.type] = f"CPU_REPACK on CPUs with {cpus}, else CPU: decided at load"
        else:
            found.setdefault(tensor.type, "CPU")
    return found


def _label_notices(label: str | None, tensors: list[TensorInfo], info: ModelInfo) -> list[Notice]:
    """A warning where most weights between embedding and head are of another type than the label stands for."""
    params: dict[str, int] = {}
    for tensor in tensors:
        if is_quantized(tensor.type) and tensor.name not in HEADS:
            params[tensor.type] = params.get(tensor.type, 0) + tensor.params
    if label is None or not params:
        return []
    wanted, most = label_type(label), max(params, key=params.__getitem__)
    if most == wanted:
        return []
    block, _ = BLOCKS[wanted]
    stored = [tensor for tensor in tensors if tensor.type == most]
    columns = {tensor.shape[0] for tensor in stored if tensor.shape[0] % block}
    why = f", because {misfit(columns, block)}" if columns else ""
    return [
        Notice(
            "label-content",
            f"{label}: {len(stored)} of {len(tensors)} tensors stored as {most}{why}: "
            f"{info.bits_per_weight:.2f} bits per weight",
            f"compare it with other {most} files, not with other {label} files",
        )
    ]


def _tokenizer(header: GGUFHeader) -> tuple[dict[str, Any], list[Notice]]:
    metadata = header.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    n_tokens = len(tokens) if isinstance(tokens, list) else 0
    rows = next((t.shape[1] for t in header.tensors if t.name == HEADS[0] and len(t.shape) > 1), None)
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    bos, eos = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.eos_token_id")
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token")
    template = metadata.get("tokenizer.chat_template")
    warnings = []
    if not n_tokens:
        warnings.append(Notice("no-tokenizer", "the file holds no vocabulary", "convert the model with its tokenizer"))
    elif rows is not None and rows != n_tokens:
        warnings.append(
            Notice("vocabulary-size", f"{n_tokens} tokens, but {rows} embedding rows", "convert the model again")
        )
    for name, token in (("BOS", bos), ("EOS", eos)):
        if token is not None and not (isinstance(token, int) and 0 <= token < n_tokens):
            warnings.append(
                Notice("special-token", f"{name} is token {_fact(token)} of {n_tokens}", "convert the model again")
            )
    if kind == "gpt2" and pre is None:
        warnings.append(
            Notice(
                "pre-tokenizer",
                "the file does not name its pre-tokenizer: llama.cpp falls back to a default and splits text otherwise",
                "convert the model again",
            )
        )
    if not isinstance(template, str):
        warnings.append(Notice("no-chat-template", "the file holds no chat template", "chat with it needs one given"))
    elif adds_bos and "bos_token" in template:
        warnings.append(
            Notice(
                "double-bos",
                "the chat template writes BOS and the tokenizer adds one: a rendered prompt may begin with two",
                "tokenize rendered prompts without special tokens",
            )
        )
    facts = {
        "model": _fact(kind), "pre": _fact(pre), "tokens": n_tokens, "embedding_rows": rows,
        "bos": _fact(bos), "eos": _fact(eos), "adds_bos": _fact(adds_bos),
    }  # fmt: skip
    return facts, warnings


def _fact(value: Any) -> str | int | float | None:
    """A value of the metadata as it may be shown and stored; a file may hold anything there."""
    if isinstance(value, str):
        return printable(value)
    return value if isinstance(value, int | float | None) else f"({type(value).__name__})"


def _head(path: Path, header: GGUFHeader) -> tuple[str, list[Notice]]:
    """Whether the output matrix is the embedding (`tied`), its own (`separate`) or a copy (`duplicated`)."""
    if all(tensor.name != HEADS[1] for tensor in header.tensors):
        return "tied", []
    if not head_is_copy(path):
        return "separate", []
    size = next(tensor.size_bytes for tensor in header.tensors if tensor.name == HEADS[1])
    return "duplicated", [
        Notice(
            "tied-head-duplicated",
            f"the output matrix repeats the token embedding: {size / 1e6:.0f} MB stored twice",
            "convert the model again with a converter that drops a tied head",
        )
    ]
