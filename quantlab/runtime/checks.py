"""What every backend refuses before it computes: wrong steps and wrong requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.runtime.backend import Batch, Capacity, Request


def check_batch(
    batch: Batch, capacity: Capacity, n_vocab: int, length: Callable[[int], int]
) -> tuple[dict[int, int], int]:
    """Refuse a step that does not continue its sequences or asks too much.

    `length(seq)` is the number of tokens held. Returns each sequence's new length and the number of logits rows.
    """
    n = len(batch.tokens)
    if not n == len(batch.positions) == len(batch.seqs) == len(batch.logits):
        raise UsageError("the arrays of a batch differ in length")
    if not 0 < n <= capacity.n_batch:
        raise UsageError(f"a step of {n} tokens; this backend takes 1 to {capacity.n_batch}")
    rows = batch.logits.tolist().count(True)
    if capacity.n_outputs and rows > capacity.n_outputs:
        raise UsageError(f"logits of {rows} tokens asked; this backend was opened for {capacity.n_outputs} a step")
    ends: dict[int, int] = {}
    # Plain integers: a decode step has few, and the weights have just swept numpy's code out of the caches.
    tokens, positions, seqs = batch.tokens.tolist(), batch.positions.tolist(), batch.seqs.tolist()
    for token, position, seq in zip(tokens, positions, seqs, strict=True):
        if not 0 <= token < n_vocab:
            raise UsageError(f"token id {token} is outside the vocabulary of {n_vocab}")
        end = ends[seq] if seq in ends else length(seq)
        if position != end:
            raise UsageError(f"position {position} in sequence {seq}", f"it continues at {end}, one by one")
        if end == capacity.n_ctx:
            raise QuantlabError(
                f"sequence {seq} would hold more than the {end} tokens that this backend was opened for",
                "open it with a larger `n_ctx`",
            )
        ends[seq] = end + 1
    return ends, rows


def check_share(capacity: Capacity, src: int, dst: int, n: int, length: Callable[[int], int]) -> None:
    """Refuse to let `dst` have the first `n` tokens of `src` where it holds something else: UsageError."""
    if not capacity.shared:
        raise UsageError("this backend was opened without sharing", "open it with `Capacity(shared=True)`")
    if not 0 <= n <= length(src):
        raise UsageError(f"{n} tokens of sequence {src} asked, it holds {length(src)}")
    if src == dst or length(dst) > n:
        raise UsageError(f"sequence {dst} holds {length(dst)} tokens", "release it first")


def check_requests(requests: Sequence[Request], capacity: Capacity, n_vocab: int) -> None:
    """Refuse requests that one static batch does not hold, before any of them is begun."""
    most = min(capacity.n_seq, capacity.n_batch, capacity.n_outputs or capacity.n_batch)
    if not 0 < len(requests) <= most:
        raise UsageError(f"{len(requests)} requests; this backend was opened for {most} at once")
    for request in requests:
        need = len(request.prompt) + request.max_new_tokens
        if not len(request.prompt) or request.max_new_tokens < 1:
            raise UsageError("a request needs a prompt and at least one new token")
        if need > capacity.n_ctx:
            raise UsageError(f"{need} tokens of prompt and answer; this backend was opened for {capacity.n_ctx}")
        if not 0 <= request.prompt.min() <= request.prompt.max() < n_vocab:
            raise UsageError(f"a prompt has token ids outside the vocabulary of {n_vocab}")
