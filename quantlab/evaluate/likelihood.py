"""The loop of a perplexity run: windows through a model, and of their logits never more than one batch alive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quantlab.core.errors import QuantlabError
from quantlab.core.progress import Progress
from quantlab.evaluate.divergence import BLOCK_VALUES, Bools, Divergence, Floats
from quantlab.runtime.backend import Backend, Batch, Logits, Tokens


class TokenLoss:
    """-log softmax(logits)[target] in nats; its buffer is one block, whatever the number of rows."""

    def __init__(self, n_vocab: int) -> None:
        self._block = np.empty((max(1, BLOCK_VALUES // n_vocab), n_vocab), np.float32)

    def __call__(self, logits: Logits, targets: Tokens) -> Floats:
        """The loss of each row of (n, n_vocab) float32 logits: exponentials in float32, their sum in float64.

        A row that is not finite gives NaN or infinity.
        """
        loss = np.empty(len(targets))
        with np.errstate(invalid="ignore"):
            for at in range(0, len(targets), len(self._block)):
                rows = logits[at : at + len(self._block)]
                shifted = self._block[: len(rows)]
                np.subtract(rows, rows.max(axis=1, keepdims=True), out=shifted)
                of_target = shifted[np.arange(len(rows)), targets[at : at + len(rows)]].astype(np.float64)
                np.exp(shifted, out=shifted)
                loss[at : at + len(rows)] = np.log(shifted.sum(axis=1, dtype=np.float64)) - of_target
        return loss


@dataclass(frozen=True)
class Against:
    """Beside the parent: its loss, KL(parent || model) in nats, and whether the most likely token is the same."""

    parent_loss: Floats
    kld: Floats
    agree: Bools


@dataclass(frozen=True)
class Scores:
    """One value for each scored token: every array is (windows, scored tokens of a window). `loss` is in nats."""

    loss: Floats
    against: Against | None


def score(windows: Tokens, first_scored: int, model: Backend, parent: Backend | None, progress: Progress) -> Scores:
    """Score the tokens from index `first_scored` on of each window (n, n_ctx); each window is a sequence of its own.

    Model and parent take each batch in turn. Raises QuantlabError for logits that are not finite, naming the first.
    """
    n_vocab = model.describe().n_vocab
    loss_of, divergence_of = TokenLoss(n_vocab), Divergence(n_vocab)
    shape = (len(windows), windows.shape[1] - first_scored)
    loss = np.empty(shape)
    against = Against(np.empty(shape), np.empty(shape), np.empty(shape, np.bool_)) if parent is not None else None
    for number, window in enumerate(windows):
        progress("perplexity", number, len(windows))
        model.release(0)
        if parent is not None:
            parent.release(0)
        for batch, targets, place in _parts(window, first_scored, model.describe().capacity.n_batch):
            here = (number, place)
            logits = model.forward(batch)
            loss[here] = loss_of(logits, targets)
            if parent is not None and against is not None:
                parent_logits = parent.forward(batch)
                against.parent_loss[here] = loss_of(parent_logits, targets)
                against.kld[here], against.agree[here] = divergence_of(parent_logits, logits)
        _require_finite("model's logits", loss[number], number, first_scored)
        if against is not None:
            _require_finite("parent's logits", against.parent_loss[number], number, first_scored)
            _require_finite("divergence from the parent", against.kld[number], number, first_scored)
    progress("perplexity", len(windows), len(windows))
    return Scores(loss, against)


def _parts(window: Tokens, first_scored: int, n_batch: int) -> Iterator[tuple[Batch, Tokens, slice]]:
    """The window in steps of at most `n_batch` tokens: batch, the tokens its logits predict, their place in the row."""
    positions = np.arange(len(window), dtype=np.int32)
    predicts = (positions >= first_scored - 1) & (positions < len(window) - 1)
    for at in range(0, len(window), n_batch):
        part = positions[at : at + n_batch]
        batch = Batch(window[part], part, np.zeros(len(part), np.int32), predicts[part])
        scored = part[batch.logits] + 1
        start = max(at + 1, first_scored) - first_scored
        yield batch, window[scored], slice(start, start + len(scored))


def _require_finite(what: str, values: Floats, window: int, first_scored: int) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        position = first_scored - 1 + int(finite.argmin())
        raise QuantlabError(
            f"the {what} are not finite at position {position} of window {window + 1}",
            "the file is damaged or its quantization failed: write it again, or try another type",
        )
