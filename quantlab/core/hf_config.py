"""What config.json of a Hugging Face folder says of a model's shape, read without transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantlab.core.artifact import read_json
from quantlab.core.errors import QuantlabError
from quantlab.core.packed import quantization_entry


def text_config(folder: Path) -> dict[str, Any]:
    """config.json, with what it says of the language model of a multimodal one in front."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config


def quantization(folder: Path) -> dict[str, Any] | None:
    """The quantization that config.json describes, or None for a folder of plain weights."""
    return quantization_entry(read_json(folder / "config.json"))


def kv_values_per_token(folder: Path) -> int:
    """Numbers of K and V that one token adds over all layers: 2 x layers x KV heads x head size.

    A sliding window bounds how many tokens add them. Raises QuantlabError where config.json cannot describe a
    transformer.
    """
    config = text_config(folder)
    try:
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        numbers = (layers, kv_heads, head_dim)
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            raise TypeError(f"{numbers} are no sizes")
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise QuantlabError(
            f"`{folder / 'config.json'}` does not describe a language model: {error!r}", "download it again"
        ) from error
    return int(2 * layers * kv_heads * head_dim)
