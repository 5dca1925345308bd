"""What a Hugging Face folder holds: its configuration, weights and tokenizer files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantlab.core.artifact import read_json, safetensors_files, safetensors_header
from quantlab.core.errors import QuantlabError
from quantlab.core.result import ModelInfo, Notice

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def inspect_folder(path: Path, info: ModelInfo) -> tuple[dict[str, Any], list[Notice]]:
    """Details and warnings of a folder; raises QuantlabError where config.json is missing or damaged."""
    config = read_json(path / "config.json")
    settings = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    text = config.get("text_config")
    merged = config | text if isinstance(text, dict) else config
    shapes = {
        name: tuple(entry["shape"])
        for file in safetensors_files(path)
        for name, entry in safetensors_header(file).items()
    }
    files = [name for name in _TOKENIZER_FILES if (path / name).is_file()]
    in_file, in_settings = "chat_template.jinja" in files, bool(settings.get("chat_template"))
    head, warnings = _head(shapes, tied=merged.get("tie_word_embeddings"))
    tokenizer, tokenizer_warnings = _tokenizer(path, files, merged, shapes, settings)
    quantization = config.get("quantization_config")
    details = {
        "architecture": next(iter(config.get("architectures") or []), config.get("model_type")),
        "scheme": _scheme(quantization, info),
        "quantization_config": quantization,
        "n_ctx_train": merged.get("max_position_embeddings"),
        "kernels": dict.fromkeys(info.tensor_types, "decided at load"),
        "tokenizer": tokenizer,
        "chat_template": in_file or in_settings,
        "head": head,
    }
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
    return details, warnings


def _scheme(quantization: Any, info: ModelInfo) -> str:
    """The quantization that config.json names, else the type that holds most weights."""
    if not isinstance(quantization, dict):
        return next(iter(info.tensor_types))
    bits, group = quantization.get("bits"), quantization.get("group_size")
    named = str(quantization.get("quant_method", "unknown"))
    return f"{named}{f' {bits} bits' if bits else ''}{f' group {group}' if group else ''}"


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
