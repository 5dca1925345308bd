"""A language model of one table: the logits of the next token depend on the token alone. A `Backend` for tests."""

from __future__ import annotations

import numpy as np

from quantlab.core.result import RuntimeInfo
from quantlab.runtime.backend import Batch, Capacity, Loaded, Memory

BOS = 0
LETTERS = "abcdefgh\n "


class BigramBackend:
    """Token 0 is the control token `<s>`, then one token a letter, then padding up to the table's size."""

    def __init__(self, table: np.ndarray, *, n_batch: int = 4, n_ctx: int = 64, adds_bos: bool = False) -> None:
        self.table = table.astype(np.float32)
        self.capacity = Capacity(n_ctx=n_ctx, n_batch=n_batch)
        self.adds_bos = adds_bos
        self.lengths: dict[int, int] = {}
        self.steps: list[Batch] = []
        self.encoded: list[str] = []
        self.rows = np.empty((0, len(table)), np.float32)

    def describe(self) -> Loaded:
        return Loaded(
            runtime=RuntimeInfo("bigram", "1", "cpu", "F32", {}, 1),
            capacity=self.capacity,
            n_vocab=len(self.table),
            n_ctx_train=32,
            weight_bytes=self.table.nbytes,
            bytes_read_per_token=0,
            kv_bytes_per_token=0,
            bos=BOS,
            eos=frozenset(),
            adds_bos=self.adds_bos,
            chat_template=None,
        )

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> np.ndarray:
        self.encoded.append(text)
        parts = text.split("<s>") if special else [text]
        ids = [BOS] if bos and self.adds_bos else []
        for number, part in enumerate(parts):
            ids += [BOS] * (number > 0) + [1 + LETTERS.index(letter) for letter in part]
        return np.array(ids, np.int32)

    def decode(self, tokens) -> str:
        return "".join("<s>" if t == BOS else self.piece_bytes(t).decode() or f"<pad{t}>" for t in tokens)

    def piece_bytes(self, token: int) -> bytes:
        return LETTERS[token - 1].encode() if 1 <= token <= len(LETTERS) else b""

    def forward(self, batch: Batch) -> np.ndarray:
        assert len(batch.tokens) <= self.capacity.n_batch
        # The rows of the step before are dead: whoever reads them now computes nonsense.
        self.rows[:] = np.nan
        length = self.lengths.get(0, 0)
        assert batch.seqs.tolist() == [0] * len(batch.tokens)
        assert batch.positions.tolist() == list(range(length, length + len(batch.tokens)))
        self.lengths[0] = length + len(batch.tokens)
        assert self.lengths[0] <= self.capacity.n_ctx
        self.steps.append(batch)
        self.rows = self.table[batch.tokens[batch.logits]]
        return self.rows

    def release(self, seq: int) -> None:
        self.lengths.pop(seq, None)

    def memory(self) -> Memory:
        return Memory(0, 0, 0, 1, 2)


def random_table(seed: int = 0, n_vocab: int = 12, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n_vocab, n_vocab)) * scale


def log_softmax(rows: np.ndarray) -> np.ndarray:
    """In float64, without a trick: the oracle."""
    wide = rows.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
