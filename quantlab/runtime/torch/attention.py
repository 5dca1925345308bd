"""Attention over the blocks: transformers' models call it by name, one step's plan tells it what to read.

All sequences of a step are one row of tokens for the model, so that no linear layer computes padding. Attention
takes them apart again: sequences with equally many new tokens are one call of
torch.nn.functional.scaled_dot_product_attention, with a mask only where causality and equal lengths do not do.
transformers builds no mask for a function that it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
import transformers

from quantlab.core.errors import QuantlabError
from quantlab.runtime.torch.kv import BLOCK_TOKENS, Blocks, Storage

NAME = "quantlab"
# What a model may hand to its attention beside queries, keys and values without changing what must be computed.
_HARMLESS = {"is_causal", "position_ids", "output_attentions", "use_cache", "cache_position", "output_router_logits"}


@dataclass(frozen=True)
class Asked:
    """One layer's call: `query`, `key`, `value` of the new tokens, each (tokens, heads, size)."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None


class Step(Protocol):
    """What one forward pass knows of the KV."""

    def attend(self, asked: Asked) -> torch.Tensor:
        """Store the new keys and values, and attend: (tokens, heads, size)."""


def _attention(  # noqa: PLR0917 (transformers calls it so)
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    quantlab_step: Step | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: (1, heads, tokens, size) in, (1, tokens, heads, size) out."""
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _HARMLESS)
    if unknown or quantlab_step is None or attention_mask is not None or not getattr(module, "is_causal", True):
        what = ", ".join(unknown) or "masks of its own"
        raise QuantlabError(
            f"the attention of `{type(module).__name__}` has {what}, which the torch runtime does not compute",
            "give a model of another family",
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return quantlab_step.attend(Asked(module.layer_idx, q, k, v, scale, sliding_window))[None], None


def register() -> None:
    """Make the function known to transformers."""
    transformers.AttentionInterface.register(NAME, _attention)


class Probe:
    """A first step of one token: learns the sizes of each layer's keys and values."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.windows: dict[int, int | None] = {}
        self.dtype = torch.float32
        self.calls = 0

    def attend(self, asked: Asked) -> torch.Tensor:
        """One token sees itself alone: its own value."""
        self.calls += 1
        _, heads, size = asked.key.shape
        self.dtype = asked.key.dtype
        self.windows[asked.layer] = asked.window
        self.shapes[asked.layer] = (heads, size, asked.value.shape[2])
        return asked.value.repeat_interleave(asked.query.shape[1] // heads, dim=1)


@dataclass
class _Group:
    """Sequences with equally many new tokens: rows of the step, and where their keys lie."""

    first_row: int
    seqs: list[int]
    new: int
    ends: list[int]
    slots: torch.Tensor | None  # (sequences, longest), None: at home one after the other
    masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.new * len(self.seqs))


class PagedStep:
    """A step of several sequences, ragged: rows sorted by `order_rows`, `new` tokens for each sequence."""

    def __init__(self, storage: Storage, blocks: Blocks, spans: list[tuple[int, int, int]]) -> None:
        """`spans`: (sequence, start, end) of the new tokens, in the order of the rows; blocks are allocated."""
        self._storage, self._seq_tokens = storage, blocks.per_seq * BLOCK_TOKENS
        self._device = storage.keys[0].device
        places = np.concatenate([blocks.slots(seq, start, end) for seq, start, end in spans])
        self._places = torch.from_numpy(places).to(self._device)
        self._groups: list[_Group] = []
        row = 0
        for run in _runs(spans):
            seqs = [seq for seq, _, _ in run]
            new = run[0][2] - run[0][1]
            ends = [end for _, _, end in run]
            self._groups.append(_Group(row, seqs, new, ends, self._gathered(blocks, seqs, ends)))
            row += new * len(run)

    def _gathered(self, blocks: Blocks, seqs: list[int], ends: list[int]) -> torch.Tensor | None:
        in_place = all(blocks.at_home(seq) for seq in seqs) and seqs == list(range(seqs[0], seqs[0] + len(seqs)))
        if in_place:
            return None
        # Past a sequence's end stands its first token, masked out.
        rows = np.zeros((len(seqs), max(ends)), np.int64)
        for row, seq, end in zip(rows, seqs, ends, strict=True):
            row[:end] = blocks.slots(seq, 0, end)
            row[end:] = row[0]
        return torch.from_numpy(rows).to(self._device)

    def attend(self, asked: Asked) -> torch.Tensor:
        """Store the new keys and values, and attend: (tokens, heads, size)."""
        keys, values = self._storage.keys[asked.layer], self._storage.values[asked.layer]
        keys[self._places], values[self._places] = asked.key, asked.value
        n_rows, heads, _ = asked.query.shape
        out = asked.query.new_empty(n_rows, heads, asked.value.shape[2])
        for group in self._groups:
            n = len(group.seqs)
            query = asked.query[group.rows].reshape(n, group.new, *asked.query.shape[1:])
            first = _first_seen(group, asked.window)
            k, v = (self._read(tensor, group, first) for tensor in (keys, values))
            if (first, asked.window) not in group.masks:
                group.masks[first, asked.window] = _mask(group, first, asked.window, self._device)
            answer = sdpa(query, k, v, group.masks[first, asked.window], asked.scale)
            out[group.rows] = answer.reshape(-1, *answer.shape[2:])
        return out

    def _read(self, tensor: torch.Tensor, group: _Group, first: int) -> torch.Tensor:
        """(sequences, tokens from `first` to the longest end, KV heads, size)."""
        if group.slots is not None:
            return tensor[group.slots[:, first:]]
        at_home = tensor.view(-1, self._seq_tokens, *tensor.shape[1:])
        return at_home[group.seqs[0] : group.seqs[0] + len(group.seqs), first : max(group.ends)]


def _runs(spans: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Neighbours with equally many new tokens."""
    runs: list[list[tuple[int, int, int]]] = []
    for span in spans:
        if runs and runs[-1][-1][2] - runs[-1][-1][1] == span[2] - span[1]:
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


def _first_seen(group: _Group, window: int | None) -> int:
    """The first position that any of the new tokens looks at."""
    return max(0, min(group.ends) - group.new - window + 1) if window else 0


def _mask(group: _Group, first: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """True where a new token looks at a stored one, (sequences, 1, new, stored); None where all or causal does."""
    longest = max(group.ends)
    same = min(group.ends) == longest
    if same and (not window or longest - first <= window) and group.new in (1, longest):
        return None
    ends = torch.tensor(group.ends, device=device)
    asking = ends[:, None] - group.new + torch.arange(group.new, device=device)
    stored = torch.arange(first, longest, device=device)
    return seen(asking, stored, window)[:, None]


def seen(asking: torch.Tensor, stored: torch.Tensor, window: int | None) -> torch.Tensor:
    """(sequences, new, stored): whether positions `asking` (sequences, new) look at positions `stored`."""
    distance = asking[:, :, None] - stored
    mask = distance >= 0
    return mask & (distance < window) if window else mask


def sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention of (sequences, new, heads, size) on (sequences, stored, KV heads, size); causal without a mask.

    One new token: the query heads of one KV head are as many queries of it, so that nothing is repeated.
    """
    n, new, heads, size = query.shape
    kv_heads = key.shape[2]
    k, v = key.transpose(1, 2), value.transpose(1, 2)
    if new == 1:
        q = query.reshape(n, kv_heads, heads // kv_heads, size)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).reshape(n, 1, heads, -1)
    # The kernels that know grouped heads know no masks (on CUDA).
    grouped = heads != kv_heads and mask is None
    if heads != kv_heads and not grouped:
        k, v = (tensor.repeat_interleave(heads // kv_heads, dim=1) for tensor in (k, v))
    answer = F.scaled_dot_product_attention(
        query.transpose(1, 2), k, v, attn_mask=mask, scale=scale, is_causal=mask is None, enable_gqa=grouped
    )
    return answer.transpose(1, 2)
