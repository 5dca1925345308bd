"""Text from outside (labels, paths, names in downloaded files), made safe to show."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Write control characters, line breaks, direction overrides and lone surrogates as visible escapes (`\x1b`)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
