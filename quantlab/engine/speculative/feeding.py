"""Tokens of several sequences into a backend, in as few steps as it takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from quantlab.runtime.backend import Backend, Batch, Logits


def feed(
    backend: Backend, pieces: Sequence[tuple[int, Sequence[int]]], then: Callable[[Batch], None] | None = None
) -> Logits:
    """Let each (sequence, tokens) continue; returns the logits of the last token of each, in order.

    They are a view that holds until the backend's next step. `then` is called after each step.
    """
    lengths = [len(tokens) for _, tokens in pieces]
    tokens = np.fromiter((token for _, piece in pieces for token in piece), np.int32, sum(lengths))
    positions = np.concatenate(
        [np.arange(backend.length(seq), backend.length(seq) + len(piece), dtype=np.int32) for seq, piece in pieces]
    )
    seqs = np.repeat(np.array([seq for seq, _ in pieces], np.int32), lengths)
    wanted = np.zeros(len(tokens), np.bool_)
    wanted[np.cumsum(lengths) - 1] = True
    size, rows = backend.describe().capacity.n_batch, []
    for at in range(0, len(tokens), size):
        part = slice(at, at + size)
        batch = Batch(tokens[part], positions[part], seqs[part], wanted[part])
        step = backend.forward(batch)
        if then is not None:
            then(batch)
        rows.append(step if at + size >= len(tokens) else step.copy())
    return rows[0] if len(rows) == 1 else np.concatenate(rows)
