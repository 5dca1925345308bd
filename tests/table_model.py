"""A model that is a table: the next token's logits depend on the last `order` tokens. A whole `Backend`, few tokens.

Beside it the exact distribution of its continuations, by enumeration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from quantlab.core.result import RuntimeInfo
from quantlab.engine import Sampling
from quantlab.runtime.backend import Batch, Capacity, Loaded, Logits
from quantlab.runtime.checks import check_batch


class TableBackend:
    """Logits of the last two tokens; token 0 is a letter as any other unless `eos` says otherwise."""

    def __init__(
        self,
        seed: int = 0,
        *,
        n_vocab: int = 5,
        eos: frozenset[int] = frozenset(),
        scale: float = 1.5,
        padding: int = 0,
        **capacity: int,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.table = (scale * rng.standard_normal((n_vocab, n_vocab, n_vocab + padding))).astype(np.float32)
        # What pads a vocabulary is never the answer.
        self.table[:, :, n_vocab:] = -30
        self.n_vocab, self.eos = n_vocab, eos
        self.capacity = Capacity(**({"n_ctx": 64, "n_seq": 4, "n_batch": 4096} | capacity))
        self.states: list[list[int]] = [[] for _ in range(self.capacity.n_seq)]
        self.steps: list[Batch] = []
        self._rows = np.empty((0, n_vocab + padding), np.float32)

    def describe(self) -> Loaded:
        return Loaded(
            runtime=RuntimeInfo("table", "1", "cpu", "F32", {}, 1),
            capacity=self.capacity,
            n_vocab=self.table.shape[2],
            n_ctx_train=self.capacity.n_ctx,
            weight_bytes=self.table.nbytes,
            bytes_read_per_token=self.table.nbytes,
            kv_bytes_per_token=2,
            bos=None,
            eos=self.eos,
            adds_bos=False,
            chat_template=None,
        )

    def piece_bytes(self, token: int) -> bytes:
        return bytes([97 + token]) if token < self.n_vocab else b""

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.piece_bytes(t).decode() or f"[PAD{t}]" for t in tokens)

    def forward(self, batch: Batch) -> Logits:
        check_batch(batch, self.capacity, self.describe().n_vocab, self.length)
        # The rows of the step before are dead: whoever reads them now computes nonsense.
        self._rows[:] = np.nan
        rows = []
        for token, seq, wanted in zip(batch.tokens.tolist(), batch.seqs.tolist(), batch.logits.tolist(), strict=True):
            state = self.states[seq]
            if wanted:
                rows.append((state[-1] if state else 0, token))
            state.append(token)
        self.steps.append(batch)
        self._rows = self.table[tuple(np.array(rows).T)] if rows else self.table[0, :0]
        return self._rows

    def length(self, seq: int) -> int:
        return len(self.states[seq])

    def truncate(self, seq: int, n: int) -> None:
        assert 0 <= n <= len(self.states[seq])
        del self.states[seq][n:]

    def release(self, seq: int) -> None:
        self.states[seq] = []

    def continuations(
        self, prompt: Sequence[int], n: int, sampling: Sampling
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        """Every answer of up to `n` tokens (shorter where it ends), and its probability."""
        yield from self._continued(tuple(prompt), (), n, 1.0, sampling)

    def _continued(
        self, prompt: tuple[int, ...], answer: tuple[int, ...], n: int, share: float, sampling: Sampling
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        if len(answer) == n or (answer and answer[-1] in self.eos):
            yield answer, share
            return
        before, last = (0, 0, *prompt, *answer)[-2:]
        for token, probability in _shares(self.table[before, last].tolist(), sampling).items():
            yield from self._continued(prompt, (*answer, token), n, share * probability, sampling)


def _shares(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """What temperature, top-k and top-p leave of each token, written once more in the plainest way."""
    likely = sorted(range(len(logits)), key=lambda token: -logits[token])[: sampling.top_k or None]
    weights = {token: math.exp(logits[token] / sampling.temperature) for token in likely}
    total, kept = sum(weights.values()), dict[int, float]()
    for token in likely:
        if sum(kept.values()) < sampling.top_p * total:
            kept[token] = weights[token]
    return {token: weight / sum(kept.values()) for token, weight in kept.items()}
