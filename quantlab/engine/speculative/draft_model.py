"""Another model that drafts: a smaller one of the family, or the target's own low-bit copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quantlab.core.errors import QuantlabError
from quantlab.engine.sampling import Weights, confidence, picked, probabilities
from quantlab.engine.speculative.draft import NO_DRAFT, Ask, Draft
from quantlab.engine.speculative.feeding import feed
from quantlab.runtime.backend import Backend, Batch, Logits


class _Growing:
    """A draft while it is made."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.tokens: list[int] = []
        self.drawn_from: list[Weights] = []
        self.confidences: list[float] = []

    @property
    def done(self) -> bool:
        """Whether it is to have no further token."""
        if len(self.tokens) >= self.ask.limit:
            return True
        return self.ask.goes_on is not None and not self.ask.goes_on(self.confidences)

    def draft(self) -> Draft:
        drawn = self.drawn_from if self.ask.sampling.temperature > 0 else None
        return Draft(self.tokens, drawn, self.confidences)


class DraftModel:
    """Drafts with a backend that has a slot for each of the target's, token after token.

    `n_shared` ids of its vocabulary are the target's, which has `n_vocab` in all (`shared_vocabulary`); it drafts no
    others. Drafts are drawn as the target samples, which has them accepted most often. Where its context of `n_ctx`
    tokens (None: what it was opened for) is full it drafts nothing.
    """

    chained = True

    def __init__(self, backend: Backend, *, name: str, n_shared: int, n_vocab: int, n_ctx: int | None = None) -> None:
        self.name = name
        self._backend, self._n_shared, self._n_vocab = backend, n_shared, n_vocab
        self._n_ctx = n_ctx or backend.describe().capacity.n_ctx

    def begin(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """See `Proposer`: the prompts are computed now, so that they count before the first token."""
        fitting = [(slot, prompt) for slot, prompt in prompts.items() if len(prompt) <= self._n_ctx]
        if fitting:
            feed(self._backend, fitting)
            # Of a prompt whose last token is computed already, the next step would have nothing to compute.
            for slot, prompt in fitting:
                self._backend.truncate(slot, len(prompt) - 1)

    def watch(self, batch: Batch) -> None:
        """It reads the text itself."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """See `Proposer`."""
        # The last token that is drafted is not computed.
        fitting = [a._replace(limit=min(a.limit, self._n_ctx - len(a.context) + 1)) for a in asks]
        drafts = {a.slot: _Growing(a) for a in fitting if a.limit > 0}
        going = list(drafts.values())
        pieces = [(d.ask.slot, d.ask.context[self._backend.length(d.ask.slot) :]) for d in going]
        while going:
            rows = feed(self._backend, pieces)
            for growing, row in zip(going, rows, strict=True):
                self._grow(growing, row[: self._n_shared])
            going = [growing for growing in going if not growing.done]
            pieces = [(growing.ask.slot, growing.tokens[-1:]) for growing in going]
        return [drafts[a.slot].draft() if a.slot in drafts else NO_DRAFT for a in fitting]

    def _grow(self, growing: _Growing, row: Logits) -> None:
        ask = growing.ask
        if not np.isfinite(row.max()):
            raise QuantlabError(
                f"the logits of the draft `{self.name}` are not finite", "check it with `quantlab inspect`"
            )
        if ask.sampling.temperature == 0:
            token = int(row.argmax())
            if ask.goes_on is not None:
                growing.confidences.append(confidence(row, token))
        else:
            drawn_from = np.zeros(self._n_vocab)
            drawn_from[: self._n_shared] = probabilities(row, ask.sampling)
            token = picked(drawn_from, ask.chance.draws(ask.n_new + len(growing.tokens)))
            growing.drawn_from.append(drawn_from)
            growing.confidences.append(float(drawn_from[token]))
        growing.tokens.append(token)

    def settle(self, slot: int, length: int) -> None:
        """See `Proposer`."""
        self._backend.truncate(slot, min(length, self._backend.length(slot)))

    def release(self, slot: int) -> None:
        """See `Proposer`."""
        self._backend.release(slot)
