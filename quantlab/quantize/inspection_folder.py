"""What a Hugging Face folder holds: its configuration, weights and tokenizer files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantlab.core.artifact import Record, read_json, read_record, stored_weights
from quantlab.core.errors import QuantlabError
from quantlab.core.packed import Stored, quantization_entry
from quantlab.core.result import ModelInfo, Notice
from quantlab.core.text import printable
from quantlab.quantize.inspection_faults import asked_beside_got, contradictions
from quantlab.quantize.inspection_scheme import file_format, kernels, matrices_left, scheme, sizes

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
# Deeper than anything that is shown.
_DEEPEST = 12


def inspect_folder(path: Path, info: ModelInfo) -> tuple[dict[str, Any], list[Notice]]:
    """Details and warnings of a folder; raises QuantlabError where config.json is missing or damaged."""
    config = read_json(path / "config.json")
    settings = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    text = config.get("text_config")
    merged = config | text if isinstance(text, dict) else config
    stored = stored_weights(path)
    record = read_record(path)
    shapes = {tensor.name: tensor.shape for tensor in stored}
    files = [name for name in _TOKENIZER_FILES if (path / name).is_file()]
    in_file, in_settings = "chat_template.jinja" in files, bool(settings.get("chat_template"))
    head, warnings = _head(shapes, tied=merged.get("tie_word_embeddings"))
    tokenizer, tokenizer_warnings = _tokenizer(path, files, merged, shapes, settings)
    details = {
        "architecture": _architecture(config),
        **_quantization(quantization_entry(config), stored, info, record),
        "sizes": sizes(stored, info.size_bytes),
        "n_ctx_train": merged.get("max_position_embeddings"),
        "tokenizer": tokenizer,
        "chat_template": in_file or in_settings,
        "head": head,
        "quantization_config": quantization_entry(config),
    }
    warnings += contradictions(quantization_entry(config), stored)
    warnings += asked_beside_got(record, stored) if record else []
    warnings += tokenizer_warnings
    if not in_file and not in_settings:
        warnings.append(Notice("no-chat-template", "the folder holds no chat template", "chat with it needs one given"))
    elif in_file and not in_settings:
        warnings.append(
            Notice(
                "chat-template-file",
                "the chat template lies in chat_template.jinja alone: older servers do not read that file",
                "copy it into tokenizer_config.json for them",
            )
        )
    return _shown(details), warnings


def _architecture(config: dict[str, Any]) -> Any:
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named else config.get("model_type")


def _quantization(
    entry: dict[str, Any] | None, stored: list[Stored], info: ModelInfo, record: Record | None
) -> dict[str, Any]:
    """How the weights are stored: what config.json and the record say, and what the tensors tell."""
    codes = [tensor for tensor in stored if tensor.quantized]
    method = info.method
    if record is None and method == "rtn":
        # A folder of others does not say who chose its codes.
        method = str((entry or {}).get("quant_method", "codes"))
    found: dict[str, Any] = {"scheme": next(iter(info.tensor_types)), "kernels": kernels(entry or {}, stored)}
    if codes:
        found["scheme"] = scheme(entry or {}, stored, method)
        found["quantized_modules"] = len(codes)
        found["not_quantized"] = matrices_left(stored)
    if entry is not None:
        found["format"] = file_format(entry)
    if record is not None:
        got = {name: value for name, value in (record.got or {}).items() if name != "losses"}
        found["record"] = {
            "parent": record.parent, "engine": record.engine, "asked": record.asked, "got": got,
            "calibration": record.calibration, "checked": record.checked,
        }  # fmt: skip
    return found


def _shown(value: Any, depth: int = 0) -> Any:
    """A value of downloaded JSON as it may be shown and stored: no control characters, no bottomless nesting."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict | list | tuple) and depth > _DEEPEST:
        return f"({type(value).__name__})"
    if isinstance(value, dict):
        return {printable(str(name)): _shown(inner, depth + 1) for name, inner in value.items()}
    return [_shown(inner, depth + 1) for inner in value] if isinstance(value, list | tuple) else value


def _head(shapes: dict[str, tuple[int, ...]], *, tied: Any) -> tuple[str, list[Notice]]:
    stored = any(name.endswith(_HEAD) for name in shapes)
    if not stored:
        return "tied", []
    if not tied:
        return "separate", []
    return "duplicated", [
        Notice(
            "tied-head-duplicated",
            "config.json ties the head to the embedding, and lm_head.weight is stored all the same",
            "its bytes are not used",
        )
    ]


def _tokenizer(
    path: Path, files: list[str], config: dict[str, Any], shapes: dict[str, tuple[int, ...]], settings: dict[str, Any]
) -> tuple[dict[str, Any], list[Notice]]:
    rows = next((shape[0] for name, shape in shapes.items() if name.endswith(_EMBEDDING) and shape), None)
    n_tokens = _vocabulary_size(path / "tokenizer.json") if "tokenizer.json" in files else None
    warnings = []
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & set(files):
        warnings.append(Notice("no-tokenizer", "the folder holds no tokenizer", "download tokenizer.json"))
    if n_tokens is not None and rows is not None and n_tokens > rows:
        warnings.append(
            Notice("vocabulary-size", f"{n_tokens} tokens, but {rows} embedding rows", "tokenizer and weights differ")
        )
    if rows is not None and isinstance(config.get("vocab_size"), int) and config["vocab_size"] != rows:
        warnings.append(
            Notice(
                "vocabulary-size",
                f"config.json says {config['vocab_size']} tokens, the embedding has {rows} rows",
                "download the folder again",
            )
        )
    facts = {
        "files": files,
        "tokens": n_tokens,
        "embedding_rows": rows,
        "bos": config.get("bos_token_id"),
        "eos": config.get("eos_token_id"),
        "adds_bos": settings.get("add_bos_token"),
    }
    return facts, warnings


def _vocabulary_size(path: Path) -> int:
    """The number of ids that tokenizer.json gives out: its vocabulary and the tokens added to it."""
    content = read_json(path)
    try:
        vocab = content["model"]["vocab"]
        ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
        return 1 + max([*ids, *(token["id"] for token in content.get("added_tokens", []))], default=-1)
    except (KeyError, TypeError) as error:
        raise QuantlabError(f"`{path}` is no tokenizer: {error!r}", "download it again") from error
