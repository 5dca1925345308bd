"""How long one step takes: fitted to measured steps, from a roofline, or random.

A step computes prefill chunks and one token for each decoding sequence. A chunk of one token onto an existing context
is the same work as a decoded token, and counts as one.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.statistics import percentile


class StepShape(NamedTuple):
    """The work of one step.

    `prefill_pairs` and `context_tokens` count positions attended, the token's own included: by the tokens of the
    prefill chunks, and by the decoding sequences. `groups`: how many different numbers of tokens its sequences take;
    a backend may compute each group in a pass of its own over the weights, as llama.cpp does.
    """

    prefill_tokens: int
    prefill_pairs: int
    decode_seqs: int
    context_tokens: int
    groups: int = 1


def shape_of(chunks: Iterable[tuple[int, int]], seqs: int = 0, context: int = 0) -> StepShape:
    """The work of (start, tokens) chunks beside `seqs` decoding sequences that attend `context` positions."""
    tokens = pairs = 0
    lengths = {1} if seqs else set()
    for start, n in chunks:
        lengths.add(n)
        if n == 1 and start:
            seqs += 1
            context += start + 1
        else:
            tokens += n
            pairs += chunk_pairs(start, n)
    return StepShape(tokens, pairs, seqs, context, max(1, len(lengths)))


def chunk_pairs(start: int, n: int) -> int:
    """Positions attended by `n` tokens from position `start` on."""
    return n * start + n * (n + 1) // 2


class MeasuredStep(NamedTuple):
    """A step that ran, and its duration on the device."""

    shape: StepShape
    duration_s: float


class StepTime(Protocol):
    """Predicts steps. `leaps`: whether many decode steps may be taken as one (they are not random)."""

    leaps: bool

    def seconds(self, shape: StepShape) -> float:
        """The duration of one step."""

    def decode_s(self, seqs: int, context: int, steps: int) -> float:
        """The duration of `steps` decode steps in a row; `context` is that of the first and grows by `seqs` a step."""

    def decode_steps(self, seqs: int, context: int, within_s: float, most: int) -> int:
        """The smallest number of decode steps that last at least `within_s`, from 1 to `most`."""


class StepModel(msgspec.Struct, frozen=True):
    """Linear in the work: base + prefill tokens and pairs + decoding sequences + context + groups, seconds each.

    Kernels seldom scale evenly from 1 sequence to 16. So `batch_s`, where it is given, has base and sequences together
    for 0, 1, 2... decoding sequences; the line holds beyond its end.
    """

    base_s: float
    prefill_token_s: float = 0.0
    prefill_pair_s: float = 0.0
    decode_seq_s: float = 0.0
    context_token_s: float = 0.0
    batch_s: tuple[float, ...] = ()
    # Of each group of sequences beyond the first.
    group_s: float = 0.0

    leaps = True

    def __post_init__(self) -> None:
        values = (*self._terms().values(), *self.batch_s)
        if any(not math.isfinite(value) or value < 0 for value in values) or not any(values):
            raise UsageError(f"a step model of {values}", "give seconds from 0 on, one of them above 0")

    def slower(self, factor: float) -> StepModel:
        """The same model with every step `factor` times as long."""
        terms = {name: factor * value for name, value in self._terms().items()}
        return StepModel(**terms, batch_s=tuple(factor * value for value in self.batch_s))

    def _terms(self) -> dict[str, float]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if name != "batch_s"}

    def batch(self, seqs: int) -> float:
        """What a step costs for `seqs` decoding sequences, before prefill and context."""
        return self.batch_s[seqs] if seqs < len(self.batch_s) else self.base_s + self.decode_seq_s * seqs

    def seconds(self, shape: StepShape) -> float:
        """See `StepTime`."""
        prefill, pairs, seqs, context, groups = shape
        return (
            self.batch(seqs)
            + self.prefill_token_s * prefill
            + self.prefill_pair_s * pairs
            + self.context_token_s * context
            + self.group_s * (groups - 1)
        )

    def decode_s(self, seqs: int, context: int, steps: int) -> float:
        """See `StepTime`."""
        first = self.batch(seqs) + self.context_token_s * context
        return steps * (first + self.context_token_s * seqs * (steps - 1) / 2)

    def decode_steps(self, seqs: int, context: int, within_s: float, most: int) -> int:
        """See `StepTime`: the root of a parabola, put right by a step where rounding missed."""
        growth = self.context_token_s * seqs / 2
        slope = self.batch(seqs) + self.context_token_s * context - growth
        # The form of the root that does not cancel for a small growth, or none.
        root = 2 * within_s / (slope + math.sqrt(slope * slope + 4 * growth * within_s))
        steps = max(1, math.ceil(root))
        if steps > 1 and self.decode_s(seqs, context, steps - 1) >= within_s:
            steps -= 1
        elif self.decode_s(seqs, context, steps) < within_s:
            steps += 1
        return min(steps, most)


class Roofline(msgspec.Struct, frozen=True):
    """Step time from numbers: the larger of moving bytes and computing, and an overhead that neither hides.

    Williams, S., et al. (2009), Roofline, CACM 52(4). Weights are read once a step and the KV of decoding sequences
    once; a token costs 2 FLOPs a weight. Attention's FLOPs, and the KV that prefill reads, are left out.
    """

    weight_bytes: float
    kv_bytes_per_token: float
    params: float
    bandwidth_bytes_per_s: float
    flops_per_s: float
    overhead_s: float = 0.0

    leaps = True

    def __post_init__(self) -> None:
        rates = (self.bandwidth_bytes_per_s, self.flops_per_s, self.weight_bytes, self.params)
        values = (*rates, self.kv_bytes_per_token, self.overhead_s)
        if any(not math.isfinite(value) for value in values) or min(rates) <= 0 or min(values) < 0:
            raise UsageError(f"a roofline of {self}", "sizes and rates are above 0, the overhead from 0 on")

    def seconds(self, shape: StepShape) -> float:
        """See `StepTime`."""
        moved = self.weight_bytes + self.kv_bytes_per_token * shape.context_tokens
        computed = 2 * self.params * (shape.prefill_tokens + shape.decode_seqs)
        return self.overhead_s + max(moved / self.bandwidth_bytes_per_s, computed / self.flops_per_s)

    def decode_s(self, seqs: int, context: int, steps: int) -> float:
        """See `StepTime`: compute binds until the context has grown enough, memory from then on."""
        compute_s = 2 * self.params * seqs / self.flops_per_s
        memory_s = (self.weight_bytes + self.kv_bytes_per_token * context) / self.bandwidth_bytes_per_s
        growth_s = self.kv_bytes_per_token * seqs / self.bandwidth_bytes_per_s
        bound = 0 if memory_s >= compute_s else steps
        if memory_s < compute_s and growth_s:
            bound = min(steps, math.ceil((compute_s - memory_s) / growth_s))
        # Steps `bound` to `steps` - 1 move memory_s + i * growth_s each.
        grown = (bound + steps - 1) * (steps - bound) / 2 * growth_s
        return steps * self.overhead_s + bound * compute_s + (steps - bound) * memory_s + grown

    def decode_steps(self, seqs: int, context: int, within_s: float, most: int) -> int:
        """See `StepTime`: by bisection."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self.decode_s(seqs, context, middle) >= within_s:
                high = middle
            else:
                low = middle + 1
        return low


class ExponentialSteps:
    """Every step lasts an exponential time of mean `mean_s`, whatever its work: the service of an M/M/1 queue.

    The n-th step that is asked for has the n-th time of the seed's stream: so nothing else may ask. Policies predict
    with `StepModel(mean_s)`.
    """

    leaps = False

    def __init__(self, mean_s: float, seed: int) -> None:
        if not (mean_s > 0 and math.isfinite(mean_s)):
            raise UsageError(f"a mean step time of {mean_s} s", "give seconds above 0")
        self._rate, self._random = 1 / mean_s, random.Random(seed)  # noqa: S311

    def seconds(self, shape: StepShape) -> float:
        """See `StepTime`."""
        return self._random.expovariate(self._rate)

    def decode_s(self, seqs: int, context: int, steps: int) -> float:
        """See `StepTime`."""
        return sum(self._random.expovariate(self._rate) for _ in range(steps))

    def decode_steps(self, seqs: int, context: int, within_s: float, most: int) -> int:
        """One: a random step cannot be looked ahead of."""
        return 1


class Fit(NamedTuple):
    """A fitted model and how far the steps lie from it, as shares of the measured durations."""

    model: StepModel
    n_steps: int
    mean_relative_error: float
    p95_relative_error: float
    # 1 - the sum of squared residuals over the spread around the mean.
    r_squared: float


# A number of decoding sequences measured fewer times is no corner of `batch_s`. Measured so often without prefill, it
# always is: kernels take rows by fours or eights, and seven sequences may cost more than eight.
_LEAST_AT_A_CORNER, _OFTEN = 3, 64
_REWEIGHTINGS = 5


def fit(steps: Sequence[MeasuredStep]) -> Fit:
    """The step model nearest to measured steps: least squares, relative to the prediction; no term below zero.

    `batch_s` is linear between corners: numbers of decoding sequences that were measured, often or at least twice the
    one before. Work that no step did costs nothing in the model: measure prefill and decoding in several batches.
    """
    import numpy as np
    from scipy.optimize import nnls

    if len(steps) < 2 or any(not 0 < step.duration_s < math.inf for step in steps):
        raise QuantlabError(f"{len(steps)} measured steps do not fit a step model", "run more steps; each takes time")
    corners = _corners([step.shape for step in steps])
    measured = np.array([step.duration_s for step in steps])
    shapes = np.array([step.shape for step in steps], np.float64)
    hats = np.stack([np.interp(shapes[:, 2], corners, row) for row in np.eye(len(corners))], axis=1)
    work = np.concatenate([hats, shapes[:, [0, 1, 3]], shapes[:, [4]] - 1], axis=1)
    # Columns of one size: nnls stops by an absolute tolerance.
    scale = np.maximum(work.max(axis=0), 1e-9)
    # The error relative to the measurement would follow the fastest steps; relative to the prediction it has no bias.
    against = np.full(len(steps), np.median(measured))
    try:
        for _ in range(_REWEIGHTINGS):
            weights = nnls(work / scale / against[:, None], measured / against)[0] / scale
            against = np.maximum(work @ weights, 1e-3 * np.median(measured))
    except RuntimeError as cause:
        raise QuantlabError(f"no step model fits {len(steps)} measured steps: {cause}", "run more steps") from cause
    *at_corners, prefill_s, pair_s, context_s, group_s = map(float, weights)
    table = np.interp(range(corners[-1] + 1), corners, at_corners).tolist()
    # Over a doubling: between neighbours there is more noise than slope.
    back = max((i for i, seqs in enumerate(corners) if 2 * seqs <= corners[-1]), default=0)
    wide = corners[-1] - corners[back]
    slope = max(0.0, (at_corners[-1] - at_corners[back]) / wide) if wide else 0.0
    base_s = max(0.0, at_corners[-1] - slope * corners[-1])
    model = StepModel(base_s, prefill_s, pair_s, slope, context_s, tuple(table), group_s)
    predicted = np.array([model.seconds(step.shape) for step in steps])
    error = np.abs(predicted - measured) / measured
    spread = float(((measured - measured.mean()) ** 2).sum())
    left = float(((predicted - measured) ** 2).sum())
    r_squared = 1 - left / spread if spread else float(left == 0)
    return Fit(model, len(steps), float(error.mean()), percentile(error.tolist(), 95), r_squared)


def _corners(shapes: Sequence[StepShape]) -> list[int]:
    """Numbers of decoding sequences, measured often or at least twice the one before; the largest is always one."""
    counts = Counter(shape.decode_seqs for shape in shapes)
    alone = Counter(shape.decode_seqs for shape in shapes if not shape.prefill_tokens)
    often = sorted(seqs for seqs, n in counts.items() if n >= _LEAST_AT_A_CORNER) or [max(counts)]
    corners = often[:1]
    for seqs in often[1:]:
        if alone[seqs] >= _OFTEN or seqs >= 2 * corners[-1]:
            corners.append(seqs)
    if corners[-1] != often[-1]:
        corners.append(often[-1])
    return corners
