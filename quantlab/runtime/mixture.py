"""Step time of a mixture of experts from a roofline: a step reads the experts that its tokens are routed to, once.

Which those are depends on the text. Here every token is taken to choose its `used` experts uniformly and independently
of the others, so that a step of n tokens is expected to touch E (1 - (1 - used / E)^n) of a layer's E experts. Real
routing is uneven: then fewer are touched, and the step is faster than this.
"""

from __future__ import annotations

import msgspec

from quantlab.core.errors import UsageError
from quantlab.runtime.step_model import Roofline, StepShape


def experts_touched(experts: int, used: int, tokens: int) -> float:
    """Distinct experts of a layer that a step of so many tokens is expected to read, under uniform routing."""
    return experts * (1 - (1 - used / experts) ** tokens)


class MixtureRoofline(msgspec.Struct, frozen=True):
    """A `StepTime`. `dense` has the weights that every step reads, and as `params` those that a token computes with.

    `expert_bytes` are those of all experts of all layers together.
    """

    dense: Roofline
    expert_bytes: float
    experts: int
    used: int

    leaps = True

    def __post_init__(self) -> None:
        if not (1 <= self.used <= self.experts and self.expert_bytes >= 0):
            raise UsageError(
                f"{self.used} of {self.experts} experts of {self.expert_bytes} bytes",
                "give 1 or more, of at least so many",
            )

    def _of(self, tokens: int) -> Roofline:
        """The roofline of a step with so many tokens."""
        share = experts_touched(self.experts, self.used, tokens) / self.experts
        return msgspec.structs.replace(self.dense, weight_bytes=self.dense.weight_bytes + share * self.expert_bytes)

    def seconds(self, shape: StepShape) -> float:
        """See `StepTime`."""
        return self._of(shape.prefill_tokens + shape.decode_seqs).seconds(shape)

    def decode_s(self, seqs: int, context: int, steps: int) -> float:
        """See `StepTime`."""
        return self._of(seqs).decode_s(seqs, context, steps)

    def decode_steps(self, seqs: int, context: int, within_s: float, most: int) -> int:
        """See `StepTime`."""
        return self._of(seqs).decode_steps(seqs, context, within_s, most)
