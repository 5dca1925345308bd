"""The next token from logits: greedy, or by temperature, top-k and top-p with a random stream of each request.

The uniform number behind token i of a request is a hash of (seed, request id, i): the same whatever else is in the
batch, in which order steps ran, and whether the request was preempted.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quantlab.core.errors import QuantlabError
from quantlab.engine.request import Sampling
from quantlab.runtime.backend import Logits

Weights = npt.NDArray[np.float64]


def uniform(seed: int, request_id: int, index: int) -> float:
    """A number in [0, 1), uniform over requests and token indices."""
    key = struct.pack("<QQQ", seed % 2**64, request_id % 2**64, index)
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def choose(rows: Logits, wanted: Sequence[tuple[Sampling, int, int]]) -> list[int]:
    """One token for each row; `wanted` has its sampling, request id and token index."""
    tokens: list[int] = rows.argmax(axis=1).tolist()
    # argmax finds a NaN first.
    if not np.isfinite(rows[range(len(tokens)), tokens]).all():
        raise QuantlabError("the logits are not finite", "check the model with `quantlab inspect`")
    for i, (sampling, request_id, index) in enumerate(wanted):
        if sampling.temperature > 0:
            tokens[i] = sample(rows[i], sampling, uniform(sampling.seed, request_id, index))
    return tokens


def sample(row: Logits, sampling: Sampling, at: float) -> int:
    """The token at `at` (in [0, 1)) of the distribution that is left.

    Temperature first, then top-k, then top-p, as transformers and vLLM do; top-p keeps the most likely tokens until
    their sum reaches p. Ties go to the lower id.
    """
    kept, weights = _left(row, sampling)
    return int(kept[picked(weights, at)])


def picked(weights: Weights, at: float) -> int:
    """The index at `at` (in [0, 1)) of what is drawn in proportion to `weights`."""
    mass = np.cumsum(weights)
    return min(int(np.searchsorted(mass, at * mass[-1], side="right")), len(mass) - 1)


def probabilities(row: Logits, sampling: Sampling) -> Weights:
    """The distribution that `sample` draws from, for a temperature above 0: (n_vocab,), its sum is 1."""
    kept, weights = _left(row, sampling)
    whole: Weights = np.zeros(len(row))
    whole[kept] = weights / weights.sum()
    return whole


def confidence(row: Logits, token: int) -> float:
    """The probability of a token as the model has it, at temperature 1."""
    return float(1 / np.exp(row - row[token]).sum())


def _left(row: Logits, sampling: Sampling) -> tuple[npt.NDArray[np.intp], Weights]:
    """The tokens that top-k and top-p leave, in order of ids, and their weights."""
    kept: npt.NDArray[np.intp] = np.arange(len(row))
    if not sampling.top_k and sampling.top_p == 1:
        return kept, _weights(row, sampling.temperature)
    kept = np.argsort(-row, kind="stable")[: sampling.top_k or None]
    if sampling.top_p < 1:
        mass = np.cumsum(_weights(row[kept], sampling.temperature))
        kept = kept[: int(np.searchsorted(mass, sampling.top_p * mass[-1])) + 1]
    # In order of ids: in order of probability two tokens that are nearly alike would change places by rounding.
    kept.sort()
    return kept, _weights(row[kept], sampling.temperature)


def _weights(logits: Logits, temperature: float) -> Weights:
    scaled = logits.astype(np.float64) / temperature
    weights: Weights = np.exp(scaled - scaled.max())
    return weights
