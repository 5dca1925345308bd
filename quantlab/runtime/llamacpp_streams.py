"""Which stream of llama.cpp's KV each sequence lies in, so that a step is as few passes over the weights as can be.

Where sequences do not share one buffer, llama.cpp computes together what takes equally many tokens of streams that
follow each other by number, in the order of the batch (`llama_batch_allocr::split_equal`): eight sequences that
decode in the streams 0, 2, ... 14, or in falling order, are eight passes over the weights instead of one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class Streams:
    """A stream for each sequence: at first the one of its own number."""

    def __init__(self, n_seq: int) -> None:
        self.of = list(range(n_seq))

    def close_up(self, seqs: Collection[int], held: Sequence[int]) -> list[tuple[int, int]]:
        """Let the sequences of a step lie side by side; returns the (from, to) streams whose KV must be moved.

        `held` is the number of tokens that each sequence holds. As few as can be are moved, and none that holds some
        and is not in the step: where those leave too little room between them, all stay where they are.
        """
        used = [self.of[seq] for seq in seqs]
        if max(used) - min(used) < len(used):
            return []
        owners = self._owners()
        stay = [seq in seqs and held[seq] > 0 for seq in owners]
        barred = [seq not in seqs and held[seq] > 0 for seq in owners]
        starts = [i for i in range(len(stay) - len(used) + 1) if not any(barred[i : i + len(used)])]
        if not starts:
            return []
        first = max(starts, key=lambda i: sum(stay[i : i + len(used)]))
        window = range(first, first + len(used))
        outside = [stream for stream in used if stream not in window]
        places = [stream for stream in window if stream not in used]
        moves = []
        for stream, place in zip(outside, places, strict=True):
            seq, empty = owners[stream], owners[place]
            self.of[seq], self.of[empty] = place, stream
            if held[seq]:
                moves.append((stream, place))
        return moves

    def _owners(self) -> list[int]:
        """The sequence of each stream."""
        return sorted(range(len(self.of)), key=self.of.__getitem__)
