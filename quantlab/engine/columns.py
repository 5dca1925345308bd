"""Records of very many requests as columns of numbers: 61 bytes a request."""

from __future__ import annotations

import math
from array import array

import numpy as np
import numpy.typing as npt

from quantlab.engine.request import PRIORITIES, RequestRecord

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
STATUSES = ("finished", "rejected", "failed")


class Columns:
    """A sink for records: `append` them, then read arrays with one number for each, in the order of appending.

    What did not happen is NaN.
    """

    def __init__(self) -> None:
        self._ids, self._prompts, self._news = array("q"), array("q"), array("q")
        self._arrivals, self._admitted, self._first, self._finished = (array("d") for _ in range(4))
        self._flags = array("b")
        self._preempted = array("i")

    def append(self, record: RequestRecord) -> None:
        """Keep the numbers of a record."""
        self._ids.append(record.id)
        self._prompts.append(record.prompt_tokens)
        self._news.append(record.new_tokens)
        self._arrivals.append(record.arrival_s)
        self._admitted.append(math.nan if record.admitted_s is None else record.admitted_s)
        self._first.append(math.nan if record.first_token_s is None else record.first_token_s)
        self._finished.append(math.nan if record.finished_s is None else record.finished_s)
        flags = 4 * (record.priority == PRIORITIES[1]) + 8 * record.degraded + 16 * record.met_deadlines
        self._flags.append(STATUSES.index(record.status) + flags)
        self._preempted.append(record.swapped + record.recomputed)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Request ids."""
        return np.array(self._ids)

    @property
    def finished(self) -> Flags:
        """Which finished."""
        return self._status(0)

    @property
    def rejected(self) -> Flags:
        """Which were rejected."""
        return self._status(1)

    @property
    def batch(self) -> Flags:
        """Which were of the batch class."""
        return self._flag(4)

    @property
    def degraded(self) -> Flags:
        """Which went to the smaller model."""
        return self._flag(8)

    @property
    def preempted(self) -> npt.NDArray[np.int32]:
        """How often each was preempted."""
        return np.array(self._preempted)

    @property
    def met_deadlines(self) -> Flags:
        """Which finished within their deadlines."""
        return self._flag(16)

    @property
    def new_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens generated."""
        return np.array(self._news)

    @property
    def prompt_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of the prompt."""
        return np.array(self._prompts)

    @property
    def arrival_s(self) -> Floats:
        """Arrivals."""
        return _floats(self._arrivals)

    @property
    def queue_delay_s(self) -> Floats:
        """Arrival to the first step."""
        return _floats(self._admitted) - self.arrival_s

    @property
    def ttft_s(self) -> Floats:
        """Arrival to the first token."""
        return _floats(self._first) - self.arrival_s

    @property
    def e2el_s(self) -> Floats:
        """Arrival to the last token; NaN unless it finished."""
        e2el: Floats = np.where(self.finished, _floats(self._finished) - self.arrival_s, np.nan)
        return e2el

    @property
    def tpot_s(self) -> Floats:
        """Seconds per token after the first; NaN for fewer than two tokens."""
        after: Floats = np.where(self.finished & (self.new_tokens > 1), self.new_tokens - 1.0, np.nan)
        return (_floats(self._finished) - _floats(self._first)) / after

    def _status(self, index: int) -> Flags:
        status: Flags = np.array(self._flags) & 3 == index
        return status

    def _flag(self, bit: int) -> Flags:
        flag: Flags = np.array(self._flags) & bit != 0
        return flag


def _floats(column: array[float]) -> Floats:
    return np.array(column, np.float64)
