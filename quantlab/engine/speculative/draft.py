"""What passes between the decoder and a proposer: who wants a draft, the draft, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from quantlab.engine.request import Sampling
from quantlab.engine.sampling import Weights, uniform
from quantlab.runtime.backend import Batch

# Streams of uniform numbers of one request; stream 0 is plain sampling's.
_DRAWS, _ACCEPTS, _RESIDUES = 1, 2, 3
_STREAM_BITS = 40


class Chance(NamedTuple):
    """The random numbers of one request.

    Those of token i are the same whenever it is drafted again: a draft that was not reached decided nothing.
    """

    seed: int
    request_id: int

    def plain(self, index: int) -> float:
        """For token `index` where no draft is involved: as without speculation."""
        return uniform(self.seed, self.request_id, index)

    def draws(self, index: int) -> float:
        """For drawing the draft of token `index`."""
        return self._of(_DRAWS, index)

    def accepts(self, index: int) -> float:
        """For accepting it."""
        return self._of(_ACCEPTS, index)

    def residue(self, index: int) -> float:
        """For what takes its place."""
        return self._of(_RESIDUES, index)

    def _of(self, stream: int, index: int) -> float:
        return uniform(self.seed, self.request_id, stream << _STREAM_BITS | index)


class Ask(NamedTuple):
    """A sequence that wants a draft.

    `context` are its ids, prompt and answer, not to be changed; `n_new` counts the new tokens so far; `limit`
    the most to draft. `goes_on`, where it is given, is asked after each token whether to draft another, with the
    draft's own probabilities of those it has.
    """

    slot: int
    context: Sequence[int]
    n_new: int
    limit: int
    sampling: Sampling
    chance: Chance
    goes_on: Callable[[Sequence[float]], bool] | None = None


class Draft(NamedTuple):
    """Tokens that may follow. `drawn_from`: the distribution of each, over the target's vocabulary.

    Without it they were not drawn but chosen: each has probability 1. `confidences` may be empty.
    """

    tokens: Sequence[int]
    drawn_from: Sequence[Weights] | None = None
    confidences: Sequence[float] = ()


NO_DRAFT = Draft(())


class Round(NamedTuple):
    """One verify of one sequence: draft tokens, those accepted, tokens handed out, and whether it ended the answer.

    A draft token after the end of the answer is not accepted. `tested` were decided on: the accepted ones and the
    first that was not; what follows it says nothing of acceptance.
    """

    drafted: int
    accepted: int
    emitted: int
    ended: bool

    @property
    def tested(self) -> int:
        """See the class."""
        return self.accepted if self.ended else min(self.drafted, self.accepted + 1)


class Proposer(Protocol):
    """Drafts for sequences in slots. `chained`: it drafts token after token, so that it can stop after each."""

    name: str
    chained: bool

    def begin(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Sequences begin with these prompts; their slots are free."""

    def watch(self, batch: Batch) -> None:
        """The target has just computed `batch`."""

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """A draft of at most `limit` tokens for each; fewer, or none, where it has no more."""

    def settle(self, slot: int, length: int) -> None:
        """Of what the sequence was and its draft, the first `length` tokens stand."""

    def release(self, slot: int) -> None:
        """The sequence is over."""
