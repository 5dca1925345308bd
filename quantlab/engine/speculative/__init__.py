"""Speculative decoding: a proposer drafts, the target verifies, the output stays the target's.

    draft = DraftModel(small, name="0.5B", n_shared=shared_vocabulary(large, small), n_vocab=n)
    decoder = SpeculativeDecoder(large, draft, FixedLength(4))  # or AdaptiveLength(8, costs)
    for sequence in decoder.generate(requests):  # engine.Request: prompt, max_new_tokens, sampling
        sequence.tokens, sequence.rounds  # Round: drafted, accepted, emitted
    decoder.steps  # StepTimes: draft_s, verify_s, total_s

The target must be opened for `sequences * (most + 1)` rows of logits a step. theory.py says what to expect.
"""

from quantlab.engine.speculative.decoder import Speculated, SpeculativeDecoder, StepTimes
from quantlab.engine.speculative.draft import Ask, Chance, Draft, Proposer, Round
from quantlab.engine.speculative.draft_model import DraftModel
from quantlab.engine.speculative.heads import EagleProposer, MedusaProposer
from quantlab.engine.speculative.length import AdaptiveLength, DraftLength, FixedLength, RoundCosts
from quantlab.engine.speculative.ngram import NgramProposer
from quantlab.engine.speculative.vocabulary import shared_vocabulary

__all__ = [
    "AdaptiveLength", "Ask", "Chance", "Draft", "DraftLength", "DraftModel", "EagleProposer", "FixedLength",
    "MedusaProposer", "NgramProposer", "Proposer", "Round", "RoundCosts", "Speculated", "SpeculativeDecoder",
    "StepTimes", "shared_vocabulary",
]  # fmt: skip
