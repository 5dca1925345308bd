"""The prompts of the bench by category: read from a file or built in, and as token ids of a model.

A line of the file is a JSON object: `turns` (Spec-Bench, MT-Bench; the first one is asked), `prompt` (HumanEval) or
`messages`, and `category`. Xia, H., et al. (2024), Unlocking Efficiency in LLM Inference: A Survey of Speculative
Decoding (Spec-Bench).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quantlab.bench.speculative.builtin_prompts import builtin_prompts
from quantlab.core.chat_template import Renderer, compiled
from quantlab.core.errors import QuantlabError, unknown_name
from quantlab.core.files import os_error
from quantlab.runtime.backend import Backend, Tokens

# Spec-Bench's names of ours; the others keep theirs.
_CATEGORIES = {
    "coding": "code", "rag": "retrieval", "math": "maths", "math_reasoning": "maths",
    "writing": "chat", "roleplay": "chat", "reasoning": "chat", "extraction": "chat",
    "stem": "chat", "humanities": "chat",
}  # fmt: skip
_UNNAMED = "prompts"
_HINT = 'a line is {"category": "code", "turns": ["..."]}, or has `prompt` or `messages`'

Messages = list[dict[str, str]]


class Prompt(NamedTuple):
    """One prompt as a conversation."""

    category: str
    messages: Messages


class Encoded(NamedTuple):
    """The prompts in the ids of a model; `too_long` were left out."""

    categories: list[str]
    ids: list[Tokens]
    too_long: int


def read_prompts(path: str | None, categories: list[str] | None, per_category: int) -> list[Prompt]:
    """The first `per_category` prompts of each category, in the order of the file (None: built in).

    Raises QuantlabError for a file that is damaged, UsageError for a category that it does not have.
    """
    if path is None:
        every = [Prompt(category, _asked(text)) for category, text in builtin_prompts()]
    else:
        every = _read(Path(path))
    there = list(dict.fromkeys(prompt.category for prompt in every))
    for name in categories or ():
        if name not in there:
            raise unknown_name("category", name, there)
    chosen: list[Prompt] = []
    for category in there:
        if categories is None or category in categories:
            chosen += [prompt for prompt in every if prompt.category == category][:per_category]
    return chosen


def _asked(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _read(path: Path) -> list[Prompt]:
    try:
        # Other line ends (U+2028) may stand within a JSON text.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise os_error(error, path) from error
    except UnicodeDecodeError as error:
        raise QuantlabError(f"`{path}` is not UTF-8 text: byte {error.start}", "convert it to UTF-8") from error
    prompts = [_parsed(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise QuantlabError(f"`{path}` holds no prompt", _HINT)
    return prompts


def _parsed(line: str, path: Path, number: int) -> Prompt:
    try:
        value: Any = json.loads(line)
        category = str(value.get("category") or _UNNAMED)
        if "messages" in value:
            messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in value["messages"]]
        else:
            messages = _asked(value["prompt"] if "prompt" in value else value["turns"][0])
        if not all(message["content"].strip() for message in messages) or not messages:
            raise ValueError("it is empty")
        for text in (category, *(message["content"] for message in messages)):
            # JSON can write half of a surrogate pair, which is no text.
            text.encode()
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise QuantlabError(f"`{path}`, line {number}: no prompt ({error!r})", _HINT) from error
    return Prompt(_CATEGORIES.get(category, category), messages)


def encode(prompts: list[Prompt], backend: Backend, most_tokens: int) -> Encoded:
    """The prompts as the model's chat template writes them, or as plain text where it has none.

    Those of more than `most_tokens` ids are left out; raises QuantlabError where that leaves none.
    """
    loaded, render = backend.describe(), _renderer(backend)
    found = Encoded([], [], 0)
    too_long = 0
    for prompt in prompts:
        try:
            text = render(prompt.messages, True)
        # A template may fail on anything that a conversation holds.
        except Exception as error:
            raise QuantlabError(
                f"the model's chat template does not render a prompt of `{prompt.category}`: {error}",
                "take messages of the roles that it knows",
            ) from error
        ids = backend.encode(text, special=True)
        if loaded.adds_bos and loaded.bos is not None and ids[:1].tolist() != [loaded.bos]:
            ids = np.concatenate([np.array([loaded.bos], np.int32), ids])
        if len(ids) > most_tokens:
            too_long += 1
            continue
        found.categories.append(prompt.category)
        found.ids.append(ids)
    if not found.ids:
        raise QuantlabError(
            f"all {too_long} prompts have more than the {most_tokens} tokens that the context leaves for them",
            "give shorter `--prompts`, fewer `--new-tokens` or a larger `--n-ctx`",
        )
    return found._replace(too_long=too_long)


def _renderer(backend: Backend) -> Renderer:
    loaded = backend.describe()
    if loaded.chat_template is None:
        return lambda messages, _: "\n\n".join(message["content"] for message in messages)
    bos = "" if loaded.bos is None else backend.decode([loaded.bos])
    eos = backend.decode([min(loaded.eos)]) if loaded.eos else ""
    return compiled(loaded.chat_template, bos=bos, eos=eos, hint="remove it, or give another model")
