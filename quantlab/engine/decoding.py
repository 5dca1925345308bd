"""The decoding sequences, advanced all at once: a step costs nothing for each of them.

Only the count of decode steps moves. What a sequence holds and has generated follows from the count at which it
joined; a heap knows the count at which each reaches its limit.
"""

from __future__ import annotations

import heapq

from quantlab.engine.sequence import Sequence


class Decoding:
    """Sequences that generate one token a step."""

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        # Tokens that they hold together.
        self.context = 0
        self._steps = 0
        # By the count that ends them; one that left keeps a stale entry, and may have several.
        self._ends: list[tuple[int, int, Sequence]] = []
        self._joins = 0

    def __len__(self) -> int:
        return len(self.sequences)

    def join(self, sequence: Sequence) -> None:
        """It decodes from now on; its target is in the KV."""
        sequence.state = "decode"
        sequence.joined = self._steps
        sequence.ends_at = self._steps + sequence.limit - sequence.generated
        self.sequences[sequence.request.id] = sequence
        self.context += sequence.target
        self._joins += 1
        heapq.heappush(self._ends, (sequence.ends_at, self._joins, sequence))

    def leave(self, sequence: Sequence) -> int:
        """It decodes no more; returns how many tokens it held."""
        held = self.held(sequence)
        del self.sequences[sequence.request.id]
        self.context -= held
        sequence.generated += self._steps - sequence.joined
        sequence.ends_at = -1
        return held

    def held(self, sequence: Sequence) -> int:
        """Tokens that one of them holds."""
        return sequence.target + self._steps - sequence.joined

    def until_next_end(self) -> int:
        """Steps until the first of them reaches its limit."""
        ends = self._ends
        while ends[0][2].ends_at != ends[0][0]:
            heapq.heappop(ends)
        return ends[0][0] - self._steps

    def advance(self, steps: int) -> list[Sequence]:
        """So many steps ran; returns those that reached their limit, which still have to leave."""
        self._steps += steps
        self.context += len(self.sequences) * steps
        ended: list[Sequence] = []
        while self._ends and self._ends[0][0] <= self._steps:
            at, _, sequence = heapq.heappop(self._ends)
            if sequence.ends_at == at:
                sequence.ends_at = -1
                ended.append(sequence)
        return ended
