"""What an artifact takes over from its parent unchanged: config, tokenizer, chat template, generation config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from quantlab.core.artifact import read_json
from quantlab.core.files import write_text

_NAMES = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def copy_companions(parent: Path, out: Path) -> None:
    """Copy the parent's own files over what a library wrote: it drops templates and renames settings."""
    for name in _NAMES:
        (out / name).unlink(missing_ok=True)
        if (parent / name).is_file():
            shutil.copyfile(parent / name, out / name)
    if (parent / "additional_chat_templates").is_dir():
        shutil.copytree(parent / "additional_chat_templates", out / "additional_chat_templates", dirs_exist_ok=True)


def stored_dtype(config: dict[str, Any]) -> str:
    """The 16-bit type of what is not quantized, by the parent's config: its own, float16 for a wider parent."""
    return "bfloat16" if "bfloat16" in (config.get("dtype"), config.get("torch_dtype")) else "float16"


def write_config(parent: Path, out: Path, *, dtype: str, quantization: dict[str, Any] | None = None) -> None:
    """Write the parent's config.json with the type of what is not quantized, and `quantization` if given.

    Loaders know the published config of a model; a library's own spelling of it they may not.
    """
    config = read_json(parent / "config.json")
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = dtype
    if quantization is not None:
        config["quantization_config"] = quantization
    write_text(out / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
