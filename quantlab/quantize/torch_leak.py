"""What an artifact must not tell: paths of the machine that made it, and the text that it was calibrated on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantlab.core.artifact import read_json
from quantlab.core.hf_config import quantization

_PATH = re.compile(r"(?<![\w.:/*\\])(?:/[\w.@+-]+){2,}|\b[A-Za-z]:\\\\?[\w.]+\\")
# A name or a pattern is shorter, a sample of calibration text longer.
_LONGEST_STRING = 1000
_TEXT_FILES = ("*.json", "*.yaml", "*.yml", "*.txt", "*.md", "*.csv")
_TOKENIZER = re.compile(r"token|vocab|merges|chat_template")


def leak(artifact: Path, parent: Path) -> str | None:
    """A path of a machine, or text that was calibrated on, in a file that quantizing wrote."""
    for file in sorted(path for pattern in _TEXT_FILES for path in artifact.glob(pattern)):
        if _TOKENIZER.search(file.name):
            continue
        text = file.read_text(encoding="utf-8")
        original = parent / file.name
        known = original.read_text(encoding="utf-8") if original.is_file() else ""
        if found := next((path for path in _PATH.findall(text) if path not in known), None):
            return f"its {file.name} holds the path `{found}`"
        if file.suffix == ".json":
            own = set(_strings(read_json(original))) if known else set()
            if any(len(s) > _LONGEST_STRING and s not in own for s in _strings(read_json(file))):
                return f"its {file.name} holds a text of more than {_LONGEST_STRING} characters"
    config = quantization(artifact) or {}
    if isinstance(config.get("dataset"), list):
        return "its config.json holds the calibration text"
    return None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
