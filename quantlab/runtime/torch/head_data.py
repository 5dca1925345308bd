"""What heads learn from: the target's own answers to beginnings of calibration text, with its hidden states.

A head drafts what the target says, so it must see what the target says. Half of the windows are answered greedily, as
most targets are asked, the others are sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from quantlab.core.errors import UsageError
from quantlab.runtime.backend import Batch, Tokens
from quantlab.runtime.torch.hidden import HiddenBackend

_TEMPERATURE = 0.7


class Windows(NamedTuple):
    """`tokens` int64 (windows, length), `hidden` (windows, length, hidden size) of each: both on the CPU.

    From token `begun` on they are the target's own; the first half of the windows is greedy.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    begun: int


def beginnings(ids: Tokens, bos: int | None, count: int, length: int, seed: int) -> Tokens:
    """`count` pieces of a text, (count, length), BOS included where the model wants it, at drawn places."""
    taken = length - (bos is not None)
    places = len(ids) - taken + 1
    if places < count:
        raise UsageError(
            f"the calibration text has {len(ids)} tokens, too few for {count} windows",
            "give more with `--calib`, or fewer `--calib-samples`",
        )
    starts = np.random.default_rng(seed).choice(places, count, replace=False)
    head = [] if bos is None else [bos]
    return np.array([[*head, *ids[start : start + taken]] for start in starts], np.int32)


def answered(
    backend: HiddenBackend, prompts: Tokens, length: int, seed: int, advance: Callable[[float], None]
) -> Windows:
    """Let the target continue each prompt to `length` tokens, as many at once as it has sequences."""
    generator = torch.Generator().manual_seed(seed)
    n_seq = backend.describe().capacity.n_seq
    n_greedy = len(prompts) // 2
    tokens = torch.zeros(len(prompts), length, dtype=torch.long)
    hidden: torch.Tensor | None = None
    for first in range(0, len(prompts), n_seq):
        part = prompts[first : first + n_seq]
        n, begun = part.shape
        greedy = torch.arange(first, first + n) < n_greedy
        backend.reset()
        text = torch.zeros(n, length, dtype=torch.long)
        text[:, :begun] = torch.from_numpy(part)
        for at in range(begun, length + 1):
            fed = text[:, at - 1 : at] if at > begun else text[:, :begun]
            rows, states = _step(backend, fed.numpy())
            if hidden is None:
                hidden = torch.zeros(len(prompts), length, states.shape[-1])
            hidden[first : first + n, at - fed.shape[1] : at] = states
            if at < length:
                chances = torch.softmax(rows / _TEMPERATURE, dim=-1)
                drawn = torch.multinomial(chances, 1, generator=generator)[:, 0]
                text[:, at] = torch.where(greedy, rows.argmax(-1), drawn)
            advance((first + n * (at - begun) / (length - begun)) / len(prompts))
        tokens[first : first + n] = text
    backend.reset()
    assert hidden is not None
    return Windows(tokens, hidden, prompts.shape[1])


def _step(backend: HiddenBackend, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Equally many tokens of each sequence: logits of the last (n, vocabulary), all hidden states (n, tokens, size)."""
    n, width = tokens.shape
    start = backend.length(0)
    wanted = np.zeros((n, width), np.bool_)
    wanted[:, -1] = True
    batch = Batch(
        tokens.reshape(-1).astype(np.int32),
        np.tile(np.arange(start, start + width, dtype=np.int32), n),
        np.repeat(np.arange(n, dtype=np.int32), width),
        wanted.reshape(-1),
    )
    rows = torch.from_numpy(backend.forward(batch).copy())
    # What was made in inference mode cannot be learnt from.
    return rows, backend.hidden.view(n, width, -1).float().cpu().clone()
