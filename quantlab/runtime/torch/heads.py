"""Trained heads on a target's hidden states: Medusa heads and an EAGLE layer, their file, and drafting with them.

Medusa: Cai, T., et al. (2024), Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads. Here
a head is a residual block alone, of two layers; the target's own output layer follows, restricted to the ids that
drafts may have.
EAGLE: Li, Y., et al. (2024), EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty. Both draft a chain,
not a tree: a step of a Backend has one token at a position.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from quantlab.core.errors import QuantlabError
from quantlab.runtime.backend import Logits, Tokens
from quantlab.runtime.torch.heads_file import METADATA_KEY, HeadsRecord, checked_record
from quantlab.runtime.torch.hidden import HiddenBackend

_IDS = "draft_ids"
_HEAD_SIZE = 64
_WIDER = 4
_ROPE_BASE = 10000.0
_EPS = 1e-6


class MedusaHeads(nn.Module):
    """`heads` residual blocks: head i makes of a hidden state that of i + 1 tokens later."""

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(hidden_size, _WIDER * hidden_size), nn.SiLU(), nn.Linear(_WIDER * hidden_size, hidden_size)
            )
            for _ in range(heads)
        )
        for block in self.blocks:
            # At first each head says what the target says of the next token.
            nn.init.zeros_(block[-1].weight)
            nn.init.zeros_(block[-1].bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(n, hidden) -> (n, heads, hidden)."""
        return torch.stack([hidden + block(hidden) for block in self.blocks], dim=1)


class EagleLayer(nn.Module):
    """One decoder layer on (hidden state, embedding of the token after it): the hidden state of that token."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.n_heads = max(1, hidden_size // _HEAD_SIZE)
        while hidden_size % (2 * self.n_heads):
            self.n_heads -= 1
        self.join = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.norm_in, self.norm_ffn = (nn.RMSNorm(hidden_size, eps=_EPS) for _ in range(2))
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate, self.up = (nn.Linear(hidden_size, 2 * hidden_size, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * hidden_size, hidden_size, bias=False)

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """(batch, n, hidden) each, after `past` keys and values; the hidden states and all keys and values."""
        x = self.join(torch.cat([hidden, embedded], dim=-1))
        batch, n, size = x.shape
        start = 0 if past is None else past[0].shape[2]
        q, k, v = self.qkv(self.norm_in(x)).view(batch, n, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (_rotated(tensor, start) for tensor in (q, k))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        mask = torch.ones(n, start + n, dtype=torch.bool, device=x.device).tril(start) if start and n > 1 else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=start == 0 and n > 1)
        x = x + self.out(y.transpose(1, 2).reshape(batch, n, size))
        z = self.norm_ffn(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z)), (k, v)


def _rotated(x: torch.Tensor, start: int) -> torch.Tensor:
    """Rotary positions from `start` on for (batch, heads, n, size)."""
    n, size = x.shape[2:]
    frequencies = _ROPE_BASE ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size)
    angles = torch.arange(start, start + n, device=x.device, dtype=torch.float32)[:, None] * frequencies
    cos, sin = (part.to(x.dtype) for part in (angles.cos(), angles.sin()))
    even, odd = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1)


def make(record: HeadsRecord) -> nn.Module:
    """The untrained module of a record."""
    if record.method == "medusa":
        return MedusaHeads(record.hidden_size, record.heads)
    return EagleLayer(record.hidden_size)


def save(path: Path, module: nn.Module, record: HeadsRecord, ids: torch.Tensor) -> None:
    """Write heads at a temporary path that the caller renames."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    metadata = {METADATA_KEY: msgspec.json.encode(record).decode()}
    save_file({**tensors, _IDS: ids.cpu().to(torch.int32)}, path, metadata=metadata)


class _Loaded:
    """A file of heads on the device of its target."""

    def __init__(self, target: HiddenBackend, path: Path, method: str, target_sha256: str) -> None:
        self.record = checked_record(path, method, target_sha256)
        _check_shape(self.record, target, path)
        weight = target.output_weight
        self._module = make(self.record).to(weight.device, weight.dtype).eval()
        with safe_open(path, "pt", device=str(weight.device)) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        ids = tensors.pop(_IDS, None)
        if ids is None or not len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < self.record.n_vocab:
            raise QuantlabError(f"`{path}` has no ids to draft, or some beyond the target's", "train the heads again")
        try:
            self._module.load_state_dict(tensors)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise QuantlabError(f"`{path}` is damaged: {reason}", "train the heads again") from error
        self.ids: Tokens = ids.cpu().numpy()
        self._output = weight[ids.long()]
        self._scale = self.record.scale
        self.size_bytes = sum(t.numel() * t.element_size() for t in (*self._module.parameters(), self._output))

    def _logits(self, hidden: torch.Tensor) -> Logits:
        return np.asarray((hidden * self._scale @ self._output.T).float().cpu().numpy())


def _check_shape(record: HeadsRecord, target: HiddenBackend, path: Path) -> None:
    n_vocab, hidden_size = target.output_weight.shape
    if (record.n_vocab, record.hidden_size) != (n_vocab, hidden_size):
        raise QuantlabError(
            f"`{path}` does not fit its target `{record.target}`: hidden size {record.hidden_size} and "
            f"{record.n_vocab} tokens, the target has {hidden_size} and {n_vocab}",
            "train the heads again",
        )


class Medusa(_Loaded):
    """Drafts from one hidden state each."""

    def __init__(self, target: HiddenBackend, path: Path, target_sha256: str) -> None:
        super().__init__(target, path, "medusa", target_sha256)
        self.most = self.record.heads

    @torch.inference_mode()
    def logits(self, hidden: list[torch.Tensor]) -> Logits:
        """Of each hidden state (hidden size,) the logits of its heads: (n, heads, ids)."""
        return self._logits(self._module(torch.stack(hidden) / self._scale))


class Eagle(_Loaded):
    """Drafts token after token; each sequence has keys and values of its own."""

    def __init__(self, target: HiddenBackend, path: Path, target_sha256: str) -> None:
        super().__init__(target, path, "eagle", target_sha256)
        self._embedding = target.input_weight
        # A key and a value of the layer.
        self.kv_bytes_per_token = 2 * self.record.hidden_size * self._output.element_size()
        self._past: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._last: dict[int, torch.Tensor] = {}

    def length(self, slot: int) -> int:
        """Hidden states that a sequence has."""
        return self._past[slot][0].shape[2] if slot in self._past else 0

    @torch.inference_mode()
    def extend(self, slot: int, hidden: torch.Tensor, tokens: list[int]) -> Logits:
        """Read hidden states of the target and the tokens after them; the logits of the token after the last."""
        return self._read(slot, hidden[None] / self._scale, tokens)

    @torch.inference_mode()
    def step(self, slot: int, token: int) -> Logits:
        """The same for a drafted token, on the layer's own hidden state."""
        return self._read(slot, self._last[slot], [token])

    def _read(self, slot: int, hidden: torch.Tensor, tokens: list[int]) -> Logits:
        ids = torch.tensor(tokens, device=self._embedding.device)
        made, self._past[slot] = self._module(hidden, self._embedding[ids][None].to(hidden.dtype), self._past.get(slot))
        self._last[slot] = made[:, -1:]
        row: Logits = self._logits(made[0, -1:])[0]
        return row

    def truncate(self, slot: int, n: int) -> None:
        """Keep the first `n` hidden states."""
        if slot in self._past:
            keys, values = self._past[slot]
            self._past[slot] = keys[:, :, :n], values[:, :, :n]

    def release(self, slot: int) -> None:
        """Forget a sequence."""
        self._past.pop(slot, None)
        self._last.pop(slot, None)
