"""A draft whose acceptance is known: the target itself, made wrong where the dice say so."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quantlab.engine.speculative import Ask, Draft, DraftModel
from quantlab.runtime.backend import Backend, Capacity
from quantlab.runtime.clock import VirtualClock
from quantlab.runtime.simulated import SimulatedBackend
from quantlab.runtime.step_model import StepModel

_GOLDEN = (math.sqrt(5) - 1) / 2


class SyntheticDraft(DraftModel):
    """Each token is right with probability `acceptance` if those before it are.

    The runs of right tokens follow a sequence of low discrepancy, so that their distribution is met in few rounds.
    """

    def __init__(self, backend: Backend, acceptance: float) -> None:
        n_vocab = backend.describe().n_vocab
        super().__init__(backend, name="synthetic", n_shared=n_vocab, n_vocab=n_vocab)
        self._acceptance, self._rounds, self._wrong = acceptance, 0, n_vocab

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._made_wrong(draft) for draft in super().propose(asks)]

    def _made_wrong(self, draft: Draft) -> Draft:
        self._rounds += 1
        u = (self._rounds * _GOLDEN) % 1
        right = len(draft.tokens) if self._acceptance >= 1 else int(math.log(u) / math.log(self._acceptance))
        tokens = list(draft.tokens)
        if right < len(tokens):
            tokens[right] = (tokens[right] + 1) % self._wrong
        return Draft(tokens, None, draft.confidences)


def simulated(clock: VirtualClock, model: StepModel, *, n_seq: int = 1, n_ctx: int = 8192) -> SimulatedBackend:
    return SimulatedBackend(Capacity(n_ctx=n_ctx, n_seq=n_seq, n_batch=4096), model, clock)
