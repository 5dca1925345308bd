"""One streamed answer of an OpenAI-compatible server: bytes -> events -> tokens with their times -> one outcome.

The stream is server-sent events (html.spec.whatwg.org/multipage/server-sent-events.html), its end `data: [DONE]`.

When a token reached us is when its event did, and several tokens of one event have one time stamp: nothing is smoothed.
How many tokens an event holds is taken from

- `server`: what the server says with each event (token ids, running usage, llama-server's timings)
- `spread`: only the total is told: each event with text holds at least one, the others go to the events by the length
  of their text; an end of sequence without text belongs to the event that finishes
- `events`: nothing is told: one for each event with text, which is too few where a server joins tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from quantlab.runtime.backend import Generation

Outcome = Literal["finished", "rejected", "refused", "server_error", "connection_error", "cut", "timed_out"]
OUTCOMES: tuple[Outcome, ...] = (
    "finished",  # the server said that the answer is complete
    "rejected",  # 429
    "refused",  # another 4xx, or 3xx: the request itself is not wanted
    "server_error",  # 5xx, an error told in the stream, or what is no stream of answers
    "connection_error",  # no answer began
    "cut",  # an answer began and ended without its finish
    "timed_out",
)
TokenCount = Literal["server", "spread", "events"]
_LINE_BYTES = 1 << 24


@dataclass
class ServerGeneration(Generation):
    """What came of one request, whatever its outcome: tokens that arrived before an error are kept.

    `start_s` is the time at which it was due, `sent_s` at which it was sent: a client too slow for the load shows in
    TTFT. `times_s` holds one time a token; `tokens` their ids where the server tells them, else it is empty.
    `prompt_tokens`, `cached_tokens`, `draft_tokens` and `accepted_tokens` are the server's own counts, None where it
    tells none.
    """

    sent_s: float = 0.0
    outcome: Outcome = "connection_error"
    status: int | None = None
    retry_after_s: float | None = None
    error: str = ""
    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    counted_by: TokenCount = "events"


class EventStream:
    """Server-sent events from bytes that are cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> list[bytes]:
        """The data of the events that `part` completes; raises ValueError for a line without an end."""
        lines = (self._rest + part).splitlines(keepends=True)
        # The second half of CR LF may be in the next packet.
        self._rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if len(self._rest) > _LINE_BYTES:
            raise ValueError(f"a line of more than {_LINE_BYTES} bytes")
        return [data for line in lines if (data := self._line(line.rstrip(b"\r\n"))) is not None]

    def finish(self) -> list[bytes]:
        """The event that the end of the stream left without its blank line."""
        lines = [*self._rest.splitlines(), b""]
        self._rest = b""
        return [data for line in lines if (data := self._line(line)) is not None]

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data) if data else None
        name, _, value = line.removeprefix(b"\xef\xbb\xbf").partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"error":
            # Older llama-servers tell an error in a field of its own.
            self._data.append(b'{"error": %b}' % value)
        return None


# A count that no answer has would fill our memory with time stamps.
_Count = Annotated[int, msgspec.Meta(le=1 << 24)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None


class _Timings(msgspec.Struct):
    predicted_n: _Count | None = None
    # The prompt is what was computed and what was cached.
    prompt_n: _Count | None = None
    cache_n: _Count | None = None
    # Where it speculates: tokens drafted for this answer so far, and accepted.
    draft_n: _Count | None = None
    draft_n_accepted: _Count | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None

    def written(self) -> str:
        """The text of the event; what a model thinks are tokens too."""
        if self.delta is None:
            return self.text or ""
        return (self.delta.reasoning_content or self.delta.reasoning or "") + (self.delta.content or "")


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None
    # vLLM once told errors so.
    object: str | None = None
    message: str | None = None
    code: Any = None


_EVENT = msgspec.json.Decoder(_Event)


@dataclass
class _Piece:
    """An event with a choice: its time, the length of its text, the tokens so far where the server tells them."""

    time_s: float
    characters: int
    running: int | None


@dataclass
class Answer:
    """Reads the events of one answer; `settle` writes what was read into its generation."""

    generation: ServerGeneration
    done: bool = False
    finish: str | None = None
    pieces: list[_Piece] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    total: int | None = None

    @property
    def over(self) -> bool:
        """Whether no more is expected."""
        return self.done or bool(self.generation.error)

    def read(self, data: bytes, now_s: float) -> None:
        """Take the data of one event, which came at `now_s`."""
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = _EVENT.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail("server_error", f"an event that cannot be read ({error}): {_shown(data)}")
            return
        if event.error is not None or event.object == "error":
            self._error(event)
            return
        self._count(event)
        for choice in (event.choices or [])[:1]:
            self._choice(choice, event, now_s)

    def settle(self) -> None:
        """Times, text, count and outcome of what was read, where an error has not decided on it before."""
        generation = self.generation
        generation.text = "".join(self.texts)
        generation.times_s, generation.counted_by = token_times(self.pieces, self.total, self.finish)
        if len(generation.tokens) != len(generation.times_s):
            generation.tokens = []
        if self.finish is not None:
            generation.finish_reason = "length" if self.finish == "length" else "stop"

    def _choice(self, choice: _Choice, event: _Event, now_s: float) -> None:
        text = choice.written()
        if choice.token_ids is not None:
            self.generation.tokens += choice.token_ids
            running: int | None = len(self.generation.tokens)
        elif event.timings is not None:
            running = event.timings.predicted_n
        else:
            running = event.usage.completion_tokens if event.usage is not None else None
        self.texts.append(text)
        self.pieces.append(_Piece(now_s, len(text), running))
        if choice.finish_reason in ("abort", "error"):
            self._fail("server_error", f"the server ended the answer: finish_reason `{choice.finish_reason}`")
        elif choice.finish_reason is not None:
            self.finish = choice.finish_reason

    def _count(self, event: _Event) -> None:
        generation, usage, timings = self.generation, event.usage, event.timings
        if timings is not None and timings.prompt_n is not None and timings.cache_n is not None:
            generation.cached_tokens, generation.prompt_tokens = timings.cache_n, timings.prompt_n + timings.cache_n
        if timings is not None and timings.draft_n is not None:
            generation.draft_tokens, generation.accepted_tokens = timings.draft_n, timings.draft_n_accepted
        if usage is not None:
            self.total, generation.prompt_tokens = usage.completion_tokens, usage.prompt_tokens
            if usage.prompt_tokens_details is not None:
                generation.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _error(self, event: _Event) -> None:
        error = event.error if isinstance(event.error, dict) else {"message": event.error or event.message}
        code = error.get("code", event.code)
        self._fail(of_status(code) if isinstance(code, int) else "server_error", str(error.get("message") or error))

    def _fail(self, outcome: Outcome, error: str) -> None:
        self.generation.outcome, self.generation.error = outcome, error


def of_status(status: int) -> Outcome:
    """The outcome of an HTTP status that is no success."""
    if status == 429:
        return "rejected"
    return "refused" if 300 <= status < 500 else "server_error"


def token_times(pieces: Sequence[_Piece], total: int | None, finish: str | None) -> tuple[list[float], TokenCount]:
    """One time a token, and who counted: the rules on top of this file. `finish` is the reason the server gave."""
    written = [piece for piece in pieces if piece.characters]
    if pieces and all(piece.running is not None for piece in written or pieces):
        return _running(pieces, total), "server"
    if total is None:
        return [piece.time_s for piece in written], "events"
    if not pieces:
        return [], "spread"
    last = [pieces[-1].time_s] if finish == "stop" and not pieces[-1].characters and total > len(written) else []
    return _spread(written or list(pieces[-1:]), total - len(last)) + last, "spread"


def _running(pieces: Sequence[_Piece], total: int | None) -> list[float]:
    times: list[float] = []
    for piece in pieces:
        times += [piece.time_s] * ((piece.running or 0) - len(times))
    # What the server counts after its last text, as an end of sequence.
    return times + [pieces[-1].time_s] * ((total or 0) - len(times))


def _spread(pieces: Sequence[_Piece], total: int) -> list[float]:
    n = len(pieces)
    if total < n:
        # Several events a token: the first and the last keep their times.
        return [pieces[i * (n - 1) // max(1, total - 1)].time_s for i in range(total)]
    characters = sum(piece.characters for piece in pieces) or 1
    times: list[float] = []
    seen = 0
    for i, piece in enumerate(pieces, 1):
        seen += piece.characters
        # Rounded sums, so that the parts add up.
        until = i + round((total - n) * seen / characters) if i < n else total
        times += [piece.time_s] * (until - len(times))
    return times


def _shown(data: bytes) -> str:
    return f"`{data[:80].decode('utf-8', 'replace')}`"
