"""Requests as pieces about as long as a tokenizer's tokens, and back from a piece to the segment that it stands in.

Where the model's own tokenizer is not at hand, words cut at six letters come close: what counts is which beginnings are
equal, and that is the same for every tokenizer but for a token or two at the difference.
"""

from __future__ import annotations

import re
from bisect import bisect_right

from quantlab.bench.prefix_cache.lint.log import Request

_PIECE = re.compile(r" ?[^\W\d_]{1,6}| ?\d{1,3}|\s+|.", re.DOTALL)


class Pieces:
    """The pieces of one request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.pieces: list[str] = []
        # Where each segment begins, in pieces.
        self._starts: list[int] = []
        for segment in request:
            self._starts.append(len(self.pieces))
            self.pieces += _PIECE.findall(segment.text)

    def segment_at(self, piece: int) -> int | None:
        """The index of the segment that holds a piece; None past the end."""
        return None if piece >= len(self.pieces) else bisect_right(self._starts, piece) - 1
