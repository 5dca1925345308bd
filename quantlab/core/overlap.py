"""How much of a text stands in another, whatever its white space: evaluation text within calibration text."""

from __future__ import annotations

# Runs of so many words are hardly ever written twice by chance.
_RUN_WORDS = 12


def shared(text: str, other: str) -> float:
    """The share of `text`, in runs of 12 words, that stands in `other` word for word; 0 for a text of fewer words."""
    words, others = text.split(), other.split()
    runs = [tuple(words[at : at + _RUN_WORDS]) for at in range(0, len(words) - _RUN_WORDS + 1, _RUN_WORDS)]
    there = {hash(tuple(others[at : at + _RUN_WORDS])) for at in range(len(others) - _RUN_WORDS + 1)}
    return sum(hash(run) in there for run in runs) / len(runs) if runs else 0.0
