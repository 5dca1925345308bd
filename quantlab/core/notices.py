"""Notices of several models folded: what is said of each in the same words is said once, with all their labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from quantlab.core.result import Notice

# A number by itself: no part of a name, a version or a hash.
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\w)")


def folded(notices: Iterable[tuple[str, Notice]]) -> list[tuple[list[str], Notice]]:
    """The labels and the notice of each kind, in order: those that differ in the model's label or in numbers are one.

    The model's own label becomes `each`; numbers that differ become a range, `63 to 127`.
    """
    kinds: dict[tuple[object, ...], list[tuple[str, Notice]]] = {}
    for label, notice in notices:
        texts = (_without(label, notice.message), _without(label, notice.hint))
        kinds.setdefault((notice.code, *map(_words, texts)), []).append((label, notice))
    return [_one(list(dict.fromkeys(alike))) for alike in kinds.values()]


def _one(alike: Sequence[tuple[str, Notice]]) -> tuple[list[str], Notice]:
    labels = list(dict.fromkeys(label for label, _ in alike))
    if len(alike) == 1:
        return labels, alike[0][1]
    several = len(labels) > 1
    messages, hints = (
        [_without(label, text) if several else text for (label, _), text in zip(alike, texts, strict=True)]
        for texts in zip(*((notice.message, notice.hint) for _, notice in alike), strict=True)
    )
    return labels, msgspec.structs.replace(alike[0][1], message=_ranges(messages), hint=_ranges(hints))


def _without(label: str, text: str) -> str:
    return text.replace(f"`{label}`", "each")


def _words(text: str) -> tuple[str, ...]:
    """What is no number; what stands between backticks is a name as it is."""
    return tuple(part if i % 2 else _NUMBER.sub("0", part) for i, part in enumerate(text.split("`")))


def _ranges(texts: Sequence[str]) -> str:
    """One text for texts of equal words."""
    parts = []
    for i, alike in enumerate(zip(*(text.split("`") for text in texts), strict=True)):
        if i % 2:
            parts.append(alike[0])
            continue
        numbers = [_range(column) for column in zip(*map(_NUMBER.findall, alike), strict=True)]
        between = _NUMBER.split(alike[0])
        parts.append("".join(a + b for a, b in zip(between, [*numbers, ""], strict=True)))
    return "`".join(parts)


def _range(numbers: Sequence[str]) -> str:
    low, high = min(numbers, key=float), max(numbers, key=float)
    return low if float(low) == float(high) else f"{low} to {high}"
