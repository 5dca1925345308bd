"""Calibration windows: texts mixed by weight, packed without padding, drawn by seed.

A mix keeps its proportions: the text that is soonest used up bounds all of them. Conversations are rendered with
the model's own chat template. What is recorded is the sha256 of the token ids, never the text.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quantlab.core.corpus import Corpus, Message, load_text
from quantlab.core.errors import QuantlabError, missing_extra
from quantlab.core.result import Notice
from quantlab.quantize.spec import QuantizeSpec, split_weight

# One text of a mix and its weight.
Part = tuple[Corpus, float]
# Text -> token ids; the second argument says whether control tokens written in the text are parsed.
Encode = Callable[[str, bool], list[int]]

DEFAULT_SAMPLES = 128
_DEFAULT_SETS = ("builtin_en", "builtin_code", "builtin_chat")
_CHINESE_SET = "builtin_zh"
_CHINESE_NAMES = ("qwen", "yi-", "glm", "baichuan", "internlm", "deepseek", "minicpm", "chinese", "-zh")
# A vocabulary or a text with at least this share of Chinese tokens or characters counts as Chinese.
_CHINESE_SHARE = 0.05


class Template(msgspec.Struct, frozen=True):
    """A chat template (Jinja) and how the model writes its BOS and EOS."""

    source: str
    bos: str
    eos: str


class Calibration(msgspec.Struct, frozen=True):
    """`windows` is int32 (windows, tokens); `record` says what they are, without their text."""

    windows: npt.NDArray[np.int32]
    record: dict[str, Any]
    notices: list[Notice]


def load_parts(spec: QuantizeSpec, *, chinese: bool) -> list[Part]:
    """The texts that a spec names, else texts of our own: with a Chinese one for a model that speaks Chinese."""
    names = spec.calib or [*_DEFAULT_SETS, *([_CHINESE_SET] if chinese else [])]
    weighted = [split_weight(name) for name in names]
    return [(load_text(name, "calibration", offline=spec.offline), weight) for name, weight in weighted]


def speaks_chinese(name: str, vocabulary: Sequence[str]) -> bool:
    """Whether a model is likely meant for Chinese: by its name, or 5% of its tokens hold Chinese characters."""
    if any(mark in f"{name.lower()}-" for mark in _CHINESE_NAMES):
        return True
    chinese = sum(1 for token in vocabulary if _has_chinese(_readable(token)))
    return bool(vocabulary) and chinese / len(vocabulary) >= _CHINESE_SHARE


def language_notices(name: str, parts: Sequence[Part], *, chinese: bool) -> list[Notice]:
    """A warning where a Chinese model is calibrated on texts without Chinese."""
    if not chinese or any(_chinese_share(corpus.raw) >= _CHINESE_SHARE for corpus, _ in parts):
        return []
    sets = ", ".join(f"`{corpus.name}`" for corpus, _ in parts)
    return [
        Notice(
            "calibration-language",
            f"`{name}` looks like a Chinese model (by its name or vocabulary), but {sets} hold no Chinese",
            f"mix in Chinese text: `--calib {_CHINESE_SET}` or `--calib zh_wiki`",
        )
    ]


def build(
    parts: Sequence[Part],
    encode: Encode,
    *,
    samples: int | None,
    length: int,
    seed: int,
    bos: int | None,
    template: Template | None,
) -> Calibration:
    """Windows of `length` tokens from `parts`; with `bos` each window's first token is replaced by it.

    `samples` None takes as many as the mix gives, at most 128. Raises QuantlabError for a text too short.
    """
    draw = random.Random(seed)  # noqa: S311 - a reproducible draw, no secret
    notices: list[Notice] = []
    streams = [encode(_text(corpus, template, draw, notices), bool(corpus.conversations)) for corpus, _ in parts]
    for (corpus, _), stream in zip(parts, streams, strict=True):
        if len(stream) < length:
            raise QuantlabError(
                f"the calibration text `{corpus.name}` gives {len(stream)} tokens, a sample needs {length}",
                "give more text, or a smaller `--calib-length`",
            )
    counts = _counts([weight for _, weight in parts], [len(stream) // length for stream in streams], samples)
    if samples is not None and sum(counts) < samples:
        notices.append(
            Notice(
                "calibration-short",
                f"{samples} samples of {length} tokens asked, the texts give {sum(counts)} in their proportions",
                "give more text with `--calib`",
            )
        )
    windows = []
    for stream, count in zip(streams, counts, strict=True):
        starts = draw.sample(range(len(stream) // length), count)
        windows += [stream[start * length : (start + 1) * length] for start in starts]
    draw.shuffle(windows)
    array = np.array(windows, np.int32)
    if bos is not None:
        array[:, 0] = bos
    record = {
        "sets": [
            {"name": corpus.name, "sha256": corpus.sha256, "weight": weight, "samples": count}
            for (corpus, weight), count in zip(parts, counts, strict=True)
        ],
        "samples": len(array),
        "length_tokens": length,
        "seed": seed,
        "sha256": hashlib.sha256(array.astype("<i4").tobytes()).hexdigest(),
    }
    return Calibration(array, record, notices)


def _counts(weights: Sequence[float], available: Sequence[int], samples: int | None) -> list[int]:
    """How many windows each text gives: shares of a total that no text runs short of, at least one each."""
    share = [weight / sum(weights) for weight in weights]
    total = min(samples or DEFAULT_SAMPLES, *(n / part for n, part in zip(available, share, strict=True))) + 1e-9
    exact = [total * part for part in share]
    counts = [max(1, int(value)) for value in exact]
    for i in sorted(range(len(exact)), key=lambda i: int(exact[i]) - exact[i]):
        if sum(counts) < int(total) and counts[i] < available[i]:
            counts[i] += 1
    # The windows that a small share is given come out of the largest.
    while sum(counts) > max(int(total), len(counts)):
        counts[counts.index(max(counts))] -= 1
    return counts


def _text(corpus: Corpus, template: Template | None, draw: random.Random, notices: list[Notice]) -> str:
    """One stream of text: documents and conversations in a drawn order."""
    if not corpus.conversations or template is None:
        documents = draw.sample(corpus.documents, len(corpus.documents))
        return "\n\n".join(documents) if documents else corpus.raw
    conversations = draw.sample(corpus.conversations, len(corpus.conversations))
    rendered = _render(conversations, template, corpus.name, notices)
    contents = sum(len(message["content"]) for messages in conversations for message in messages)
    text = "".join(rendered)
    if contents < len(text) / 2:
        notices.append(
            Notice(
                "template-share",
                f"more than half of the calibration text `{corpus.name}` is the chat template, not conversation",
                "mix in plain text, or longer conversations",
            )
        )
    return text


def _render(conversations: list[list[Message]], template: Template, name: str, notices: list[Notice]) -> list[str]:
    """Conversations as the model's template writes them; those that it refuses are left out, with a notice."""
    try:
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError:
        raise missing_extra("jinja2", "gguf") from None

    def refuse(message: str) -> None:
        raise TemplateError(message)

    # The template comes from a downloaded file: it runs in a sandbox.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals.update(raise_exception=refuse, strftime_now=lambda _: "")
    rendered, reason = [], ""
    try:
        compiled = environment.from_string(template.source)
    except TemplateError as error:
        raise QuantlabError(f"the model's chat template is broken: {error}", "calibrate on plain text") from error
    for messages in conversations:
        try:
            rendered.append(compiled.render(messages=messages, bos_token=template.bos, eos_token=template.eos))
        # A template may fail on anything that a conversation holds.
        except Exception as error:
            reason = f"{error}"
    if not rendered:
        raise QuantlabError(
            f"the model's chat template renders no conversation of `{name}`: {reason}", "calibrate on plain text"
        )
    if reason:
        left_out = len(conversations) - len(rendered)
        notices.append(
            Notice(
                "calibration-left-out",
                f"{left_out} of {len(conversations)} conversations of `{name}` left out: "
                f"the chat template says {reason}",
            )
        )
    return rendered


def _has_chinese(text: str) -> bool:
    return any("一" <= c <= "鿿" for c in text)


def _chinese_share(text: str) -> float:
    return sum(1 for c in text if "一" <= c <= "鿿") / max(1, len(text))


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level BPE vocabularies write for bytes (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()


def _readable(token: str) -> str:
    """A vocabulary entry as text: byte-level entries are decoded, others are text already."""
    if all(c in _BYTES for c in token):
        return bytes(_BYTES[c] for c in token).decode("utf-8", "ignore")
    return token
