"""Bytes of a stream to events, and events to tokens: every way in which servers and networks cut them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantlab.runtime.server_stream import Answer, EventStream, ServerGeneration

STREAM = """\
\ufeff: a comment
event: completion
id: 7
retry: 10
data: {"text": "héé ✓"}

: ping - 2026
:

data:no space
data:  two lines

data

data: [DONE]

""".encode()
EVENTS = ['{"text": "héé ✓"}'.encode(), b"no space\n two lines", b"", b"[DONE]"]


def events_of(stream: EventStream, parts: list[bytes]) -> list[bytes]:
    return [event for part in parts for event in stream.feed(part)] + stream.finish()


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@given(cuts=st.lists(st.integers(0, len(STREAM) + 30), max_size=30))
def test_events_do_not_depend_on_the_packets(end: bytes, cuts: list[int]) -> None:
    data = STREAM.replace(b"\n", end)
    at = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert events_of(EventStream(), [data[a:b] for a, b in itertools.pairwise(at)]) == EVENTS


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_an_event_is_there_with_its_last_byte(end: bytes) -> None:
    stream = EventStream()
    data = b"data: 1\n\n".replace(b"\n", end)
    assert [stream.feed(data[i : i + 1]) for i in range(len(data))] == [[]] * (len(data) - 1) + [[b"1"]]


def test_an_end_without_its_blank_line() -> None:
    for tail in (b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\r"):
        assert events_of(EventStream(), [b"data: 1\n\n", tail]) == [b"1", b"[DONE]"]
    assert events_of(EventStream(), [b"data: 1\n\n", b": nothing"]) == [b"1"]


def test_a_field_of_errors() -> None:
    assert events_of(EventStream(), [b'error: {"code": 500}\n\n']) == [b'{"error": {"code": 500}}']


def test_a_line_without_an_end_is_refused() -> None:
    stream = EventStream()
    with pytest.raises(ValueError, match="a line of more than"):
        for _ in range(5):
            stream.feed(b"x" * (1 << 22))


def read(*events: Any) -> ServerGeneration:
    """The generation of events at 1, 2, 3... seconds."""
    answer = Answer(ServerGeneration(0.0))
    for now, event in enumerate(events, 1):
        answer.read(event.encode() if isinstance(event, str) else json.dumps(event).encode(), float(now))
    answer.settle()
    return answer.generation


def choice(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    ids = {"token_ids": more.pop("token_ids")} if "token_ids" in more else {}
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **ids}], **more}


def delta(**content: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": content.pop("finish", None)}]}


def usage(new: int, **more: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": new, "total_tokens": 9 + new, **more}}


def running(new: int) -> dict[str, Any]:
    return usage(new)["usage"]


def test_events_are_tokens_where_nothing_is_told() -> None:
    got = read(choice("a"), choice("b"), choice("", "length"), "[DONE]")
    assert (got.times_s, got.counted_by, got.text, got.finish_reason) == ([1, 2], "events", "ab", "length")
    assert got.prompt_tokens is got.cached_tokens is None


def test_a_chat_begins_with_its_role_and_thinks() -> None:
    got = read(
        delta(role="assistant", content=""), delta(reasoning_content="x"), delta(content="a"), delta(finish="stop")
    )
    assert (got.times_s, got.text, got.finish_reason) == ([2, 3], "xa", "stop")


def test_a_total_that_fits_the_events() -> None:
    got = read(choice("a"), choice("b", "length"), usage(2, prompt_tokens_details={"cached_tokens": 8}), "[DONE]")
    assert (got.times_s, got.counted_by, got.prompt_tokens, got.cached_tokens) == ([1, 2], "spread", 9, 8)


def test_the_end_of_sequence_comes_with_the_finish() -> None:
    assert read(choice("a"), choice("b"), choice("", "stop"), usage(3)).times_s == [1, 2, 3]
    # At the limit no end of sequence was made: the third is in an event with text.
    assert read(choice("a"), choice("bbbb"), choice("", "length"), usage(3)).times_s == [1, 2, 2]


@pytest.mark.parametrize("total", range(1, 40))
def test_spread_tokens_follow_the_text_and_add_up(total: int) -> None:
    texts = ["a", "bbbbbb", "c", "dddddddd", "e"]
    times = read(*(choice(text) for text in texts), choice("", "length"), usage(total)).times_s
    assert len(times) == total
    assert times == sorted(times)
    assert times[0] == 1
    assert total == 1 or times[-1] == 5
    if total >= 5:
        assert set(times) == {1, 2, 3, 4, 5}
        extra = [times.count(i) - 1 for i in range(1, 6)]
        want = [(total - 5) * len(text) / 17 for text in texts]
        assert all(abs(a - b) < 1.01 for a, b in zip(extra, want, strict=True))


def test_running_counts_are_exact() -> None:
    got = read(
        choice("", usage=running(0)),
        choice("abc", usage=running(3)),
        # Half a character: a token without text.
        choice("", usage=running(4)),
        choice("d", usage=running(6)),
        choice("", "stop", usage=running(7)),
        usage(7),
    )
    assert (got.times_s, got.counted_by) == ([2, 2, 2, 3, 4, 4, 5], "server")


def test_running_timings_of_llama_server() -> None:
    def timings(n: int) -> dict[str, int]:
        return {"predicted_n": n, "cache_n": 5, "prompt_n": 2}

    got = read(
        choice("a", timings=timings(1)), choice("bc", timings=timings(3)), choice("", "stop", timings=timings(4))
    )
    assert (got.times_s, got.counted_by) == ([1, 2, 2, 3], "server")
    # They are there before the usage, so for an answer that is cut too.
    assert (got.prompt_tokens, got.cached_tokens) == (7, 5)


def test_token_ids_are_kept() -> None:
    got = read(choice("ab", token_ids=[5, 6]), choice("c", "length", token_ids=[7]), usage(3))
    assert (got.tokens, got.times_s, got.counted_by) == ([5, 6, 7], [1, 1, 2], "server")
    # An end of sequence that is counted and not listed leaves no list that pairs with the times.
    got = read(choice("ab", token_ids=[5, 6]), choice("", "stop"), usage(3))
    assert (got.tokens, got.times_s) == ([], [1, 1, 2])


def test_usage_in_the_last_choice_is_a_total() -> None:
    got = read(choice("a"), choice("b"), choice("c", "length", usage=running(5)))
    assert (len(got.times_s), got.counted_by) == (5, "spread")


def test_an_answer_of_nothing() -> None:
    assert read(choice("", "stop"), usage(0)).times_s == []
    assert read(choice("", "stop"), usage(1)).times_s == [1]
    assert read("[DONE]").times_s == []
    assert read(usage(3)).times_s == []


@pytest.mark.parametrize(
    ("event", "outcome", "told"),
    [
        ('{"choices": [', "server_error", "cannot be read"),
        ("Internal Server Error", "server_error", "`Internal Server Error`"),
        ("[1]", "server_error", "cannot be read"),
        ('{"choices": [{"text": 5}]}', "server_error", "cannot be read"),
        ({"error": {"message": "out of memory", "code": 500}}, "server_error", "out of memory"),
        ({"error": {"message": "slow down", "code": 429}}, "rejected", "slow down"),
        ({"error": {"message": "too long", "code": 400}}, "refused", "too long"),
        ({"error": "broken"}, "server_error", "broken"),
        ({"error": {}}, "server_error", "{}"),
        ({"object": "error", "message": "old", "code": 400}, "refused", "old"),
        (choice("", "abort"), "server_error", "abort"),
        (usage(1 << 40), "server_error", "cannot be read"),
    ],
)
def test_errors_in_the_stream_keep_what_came_before(event: Any, outcome: str, told: str) -> None:
    got = read(choice("a"), choice("b"), event)
    assert (got.outcome, got.times_s, got.text) == (outcome, [1, 2], "ab")
    assert told in got.error


def test_bytes_that_are_no_text() -> None:
    answer = Answer(ServerGeneration(0.0))
    answer.read(b'{"choices": [{"text": "\xff\xfe"}]}', 1.0)
    assert answer.over
    assert answer.generation.outcome == "server_error"
