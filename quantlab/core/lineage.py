"""Whether one model was made from another, as far as records and sizes tell."""

from __future__ import annotations

from quantlab.core.result import ModelInfo

# Forms of one model differ by less: a table of rotations, a scale a tensor.
_SAME_SIZE = 0.01


def made_from(child: ModelInfo, parent: ModelInfo) -> bool | None:
    """Whether `child` was made from `parent`, or from what `parent` holds in 16 or 32 bits; None without a record."""
    if child.parent_sha256 is None:
        return None
    wide_form = parent.method == "none" and parent.parent_sha256 == child.parent_sha256
    return wide_form or parent.sha256 == child.parent_sha256


def as_many_weights(a: ModelInfo, b: ModelInfo) -> bool:
    """Whether two models have about as many weights: what every form of one model has, and some unrelated ones too."""
    n, m = n_weights(a), n_weights(b)
    return abs(n - m) <= _SAME_SIZE * max(n, m)


def n_weights(model: ModelInfo) -> int:
    """The number of weights that are stored."""
    return sum(stored.params for stored in model.tensor_types.values())
