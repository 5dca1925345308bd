"""How far a model's next-token distributions lie from its parent's: KL divergence and top-1 agreement.

KL(parent || model) = sum_i p_i (log p_i - log q_i) in nats, over the whole vocabulary and in float64 from the
float32 logits. llama-perplexity stores its base logits in 16 bits and clips them 16 nats below the largest; here
nothing is rounded or clipped, so that the two differ a little.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quantlab.core.errors import QuantlabError
from quantlab.runtime.backend import Backend, Logits, Tokens

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# A block of logits that stays in the cache of one core, in values.
BLOCK_VALUES = 1 << 16


class Divergence:
    """Compares rows of logits; its buffers are one block, whatever the number of rows."""

    def __init__(self, n_vocab: int) -> None:
        self._rows = max(1, BLOCK_VALUES // n_vocab)
        self._parent, self._model, self._difference = (np.empty((self._rows, n_vocab)) for _ in range(3))

    def __call__(self, parent: Logits, model: Logits) -> tuple[Floats, Bools]:
        """KL(parent || model) in nats and whether the top tokens agree, for each row of (n, n_vocab) logits.

        A row that is not finite gives NaN or infinity.
        """
        kld, agree = np.empty(len(parent)), np.empty(len(parent), np.bool_)
        with np.errstate(invalid="ignore"):
            for at in range(0, len(parent), self._rows):
                rows = slice(at, at + self._rows)
                kld[rows] = self._block(parent[rows], model[rows])
                agree[rows] = parent[rows].argmax(axis=1) == model[rows].argmax(axis=1)
        return kld, agree

    def _block(self, parent: Logits, model: Logits) -> Any:
        p, q, difference = self._parent[: len(parent)], self._model[: len(parent)], self._difference[: len(parent)]
        np.subtract(parent, parent.max(axis=1, keepdims=True), out=p, dtype=np.float64)
        np.subtract(model, model.max(axis=1, keepdims=True), out=q, dtype=np.float64)
        np.subtract(p, q, out=difference)
        np.exp(p, out=p)
        np.exp(q, out=q)
        total = p.sum(axis=1)
        mean_difference = np.multiply(p, difference, out=difference).sum(axis=1) / total
        # Rounding alone can bring equal distributions a little below zero.
        return np.maximum(mean_difference - np.log(total) + np.log(q.sum(axis=1)), 0.0)


def require_same_vocabulary(model: Backend, parent: Backend, names: tuple[str, str]) -> None:
    """Raise QuantlabError unless every token id stands for the same piece in both; `names` are model and parent."""
    sizes = (model.describe().n_vocab, parent.describe().n_vocab)
    if sizes[0] != sizes[1]:
        raise _not_parent(f"`{names[0]}` has a vocabulary of {sizes[0]} tokens, `{names[1]}` of {sizes[1]}")
    for token in range(sizes[0]):
        ours, theirs = _piece(model, token), _piece(parent, token)
        if ours != theirs:
            raise _not_parent(f"token {token} is {ours!r} in `{names[0]}` and {theirs!r} in `{names[1]}`")


def require_same_tokens(model: Tokens, parent: Tokens, names: tuple[str, str]) -> None:
    """Raise QuantlabError unless both tokenizers gave the text the same ids."""
    if len(model) == len(parent) and np.array_equal(model, parent):
        return
    n = min(len(model), len(parent))
    at = int(np.append(model[:n] != parent[:n], True).argmax())
    ids = [tokens[at] if at < len(tokens) else "missing" for tokens in (model, parent)]
    raise _not_parent(f"token {at} of the text is {ids[0]} in `{names[0]}` and {ids[1]} in `{names[1]}`")


def _not_parent(message: str) -> QuantlabError:
    return QuantlabError(message, "give `--against` the model that this one was made from")


def _piece(backend: Backend, token: int) -> bytes:
    # A control token stands for no bytes; its written form tells it from the others.
    return backend.piece_bytes(token) or backend.decode([token]).encode()
