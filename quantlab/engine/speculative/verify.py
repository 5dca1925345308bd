"""The verifier: rejection sampling that keeps the target's distribution exactly, whatever was proposed.

A draft token x, drawn from q where the target has p, is accepted with probability min(1, p(x) / q(x)); the first that
is not gives way to one drawn from max(p - q, 0), normalized. Greedy: the target's own choices.

Leviathan et al. (2023), appendix A.1; Chen, C., et al. (2023), Accelerating Large Language Model Decoding with
Speculative Sampling.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quantlab.core.errors import QuantlabError
from quantlab.engine.request import Sampling
from quantlab.engine.sampling import Weights, picked, probabilities
from quantlab.engine.speculative.draft import Chance, Draft
from quantlab.runtime.backend import Logits


class Verdict(NamedTuple):
    """How many draft tokens stand, and the token after them."""

    accepted: int
    token: int


def verify(rows: Logits, draft: Draft, sampling: Sampling, chance: Chance, index: int) -> Verdict:
    """Judge a draft by the target's logits (len(draft) + 1, n_vocab); `index` is that of its first token.

    Raises QuantlabError where the logits are not finite.
    """
    best = rows.argmax(axis=1).tolist()
    # argmax finds a NaN first.
    if not np.isfinite(rows[range(len(best)), best]).all():
        raise QuantlabError("the logits are not finite", "check the model with `quantlab inspect`")
    if sampling.temperature == 0:
        accepted = next((i for i, token in enumerate(draft.tokens) if token != best[i]), len(draft.tokens))
        return Verdict(accepted, best[accepted])
    for i, token in enumerate(draft.tokens):
        p = probabilities(rows[i], sampling)
        q = None if draft.drawn_from is None else draft.drawn_from[i]
        if chance.accepts(index + i) * (1.0 if q is None else q[token]) >= p[token]:
            return Verdict(i, picked(residual(p, q, token), chance.residue(index + i)))
    last = len(draft.tokens)
    return Verdict(last, picked(probabilities(rows[last], sampling), chance.plain(index + last)))


def residual(p: Weights, q: Weights | None, token: int) -> Weights:
    """What is drawn from after `token` was rejected, as weights; `q` None: it was chosen with probability 1."""
    if q is None:
        left = p.copy()
        left[token] = 0.0
    else:
        left = np.maximum(p - q, 0.0)
    # Where p and q are equal but for rounding, nothing is left and hardly anything is rejected.
    return left if left.sum() > 0 else p
