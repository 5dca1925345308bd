"""Heads on the target's hidden states draft: Medusa heads all at once, an EAGLE layer token after token.

The target gives the hidden states of its last step (runtime/torch/hidden.py); they are handed on as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from quantlab.core.errors import QuantlabError
from quantlab.engine.sampling import Weights, confidence, picked, probabilities
from quantlab.engine.speculative.draft import NO_DRAFT, Ask, Draft
from quantlab.runtime.backend import Batch, Logits, Tokens

# The hidden states of neighbouring positions of one sequence, and the first position.
_Piece = tuple[int, Any]


class GivesHidden(Protocol):
    """A target; `hidden` has a row for each token of its last step, in order."""

    hidden: Any


class Medusa(Protocol):
    """Trained heads; `ids` are the tokens that they draft, `most` how many in a row."""

    ids: Tokens
    most: int

    def logits(self, hidden: list[Any]) -> Logits:
        """Of each hidden state the logits of its heads: (n, heads, ids)."""


class Eagle(Protocol):
    """A trained layer; `ids` are the tokens that it drafts."""

    ids: Tokens

    def length(self, slot: int) -> int:
        """Hidden states that a sequence has."""

    def extend(self, slot: int, hidden: Any, tokens: list[int]) -> Logits:
        """Read hidden states and the tokens after them; logits (ids,) of the token after the last."""

    def step(self, slot: int, token: int) -> Logits:
        """The same for a drafted token."""

    def truncate(self, slot: int, n: int) -> None:
        """Keep the first `n` hidden states."""

    def release(self, slot: int) -> None:
        """Forget a sequence."""


class _Chosen:
    """A draft while it is made, from logits of some ids of a vocabulary."""

    def __init__(self, ask: Ask, ids: Tokens, n_vocab: int) -> None:
        self._ask, self._ids, self._n_vocab = ask, ids, n_vocab
        self.tokens: list[int] = []
        self._drawn_from: list[Weights] = []
        self._confidences: list[float] = []

    def choose(self, row: Logits) -> int:
        """The next token: the most likely, or drawn as the target samples."""
        ask = self._ask
        if not np.isfinite(row.max()):
            raise QuantlabError("the logits of the heads are not finite", "train them again")
        if ask.sampling.temperature == 0:
            place = int(row.argmax())
            if ask.goes_on is not None:
                self._confidences.append(confidence(row, place))
        else:
            shares = probabilities(row, ask.sampling)
            place = picked(shares, ask.chance.draws(ask.n_new + len(self.tokens)))
            drawn_from = np.zeros(self._n_vocab)
            drawn_from[self._ids] = shares
            self._drawn_from.append(drawn_from)
            self._confidences.append(float(shares[place]))
        self.tokens.append(int(self._ids[place]))
        return self.tokens[-1]

    @property
    def goes_on(self) -> bool:
        ask = self._ask
        return len(self.tokens) < ask.limit and (ask.goes_on is None or ask.goes_on(self._confidences))

    def draft(self) -> Draft:
        drawn = self._drawn_from if self._ask.sampling.temperature > 0 else None
        return Draft(self.tokens, drawn, self._confidences)


class MedusaProposer:
    """Drafts from the hidden state before the last token of the text: that is where the target chose it."""

    chained = False

    def __init__(self, target: GivesHidden, heads: Medusa, *, name: str, n_vocab: int) -> None:
        self.name = name
        self._target, self._heads, self._n_vocab = target, heads, n_vocab
        self._pieces: dict[int, _Piece] = {}

    def begin(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """The target's own prefill tells all."""

    def watch(self, batch: Batch) -> None:
        """See `Proposer`."""
        self._pieces |= _pieces(batch, self._target.hidden)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """See `Proposer`."""
        hidden = []
        for ask in asks:
            first, states = self._pieces[ask.slot]
            hidden.append(states[len(ask.context) - 2 - first])
        return [self._draft(ask, rows) for ask, rows in zip(asks, self._heads.logits(hidden), strict=True)]

    def _draft(self, ask: Ask, rows: Logits) -> Draft:
        chosen = _Chosen(ask, self._heads.ids, self._n_vocab)
        for row in rows[: ask.limit]:
            chosen.choose(row)
        return chosen.draft()

    def settle(self, slot: int, length: int) -> None:
        """The piece of the step holds whatever stands."""

    def release(self, slot: int) -> None:
        """See `Proposer`."""
        self._pieces.pop(slot, None)


class EagleProposer:
    """Reads the hidden states of everything that stands, then drafts on its own."""

    chained = True

    def __init__(self, target: GivesHidden, layer: Eagle, *, name: str, n_vocab: int) -> None:
        self.name = name
        self._target, self._layer, self._n_vocab = target, layer, n_vocab
        # What the layer has not read yet.
        self._pieces: dict[int, list[_Piece]] = {}

    def begin(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """See `Proposer`."""
        for slot in prompts:
            self._pieces[slot] = []

    def watch(self, batch: Batch) -> None:
        """See `Proposer`."""
        for slot, piece in _pieces(batch, self._target.hidden).items():
            self._pieces[slot].append(piece)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """See `Proposer`."""
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Draft:
        slot, chosen = ask.slot, _Chosen(ask, self._layer.ids, self._n_vocab)
        row = None
        for first, states in self._pieces[slot]:
            # The state at a position goes with the token after it; the last token has no state yet.
            tokens = list(ask.context[first + 1 : first + 1 + len(states)])
            row = self._layer.extend(slot, states, tokens)
        self._pieces[slot] = []
        if row is None:
            return NO_DRAFT
        read = self._layer.length(slot)
        while True:
            token = chosen.choose(row)
            if not chosen.goes_on:
                break
            row = self._layer.step(slot, token)
        self._layer.truncate(slot, read)
        return chosen.draft()

    def settle(self, slot: int, length: int) -> None:
        """Forget the states of what was not accepted."""
        self._pieces[slot] = [
            (first, states[: length - first]) for first, states in self._pieces[slot] if first < length
        ]

    def release(self, slot: int) -> None:
        """See `Proposer`."""
        self._pieces.pop(slot, None)
        self._layer.release(slot)


def _pieces(batch: Batch, hidden: Any) -> dict[int, _Piece]:
    """The hidden states of each sequence of a step, whose tokens lie sequence by sequence."""
    cuts = [0, *(np.flatnonzero(np.diff(batch.seqs)) + 1).tolist(), len(batch.seqs)]
    return {
        int(batch.seqs[start]): (int(batch.positions[start]), hidden[start:end])
        for start, end in itertools.pairwise(cuts)
    }
