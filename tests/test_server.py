"""The client of a server that misbehaves in every way: one outcome a request, and nothing lost."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import gzip
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quantlab.core.errors import QuantlabError
from quantlab.runtime.backend import Request
from quantlab.runtime.server import Server, TextRequest
from tests.fake_server import FakeServer, Reply, good
from tests.server_cases import ask, no_settings, texts

__all__ = ["no_settings"]


def test_a_good_answer() -> None:
    with FakeServer() as server:
        got, counters = ask(server, [Request(np.arange(5, dtype=np.int32), 4), TextRequest("hello", 3)])
    assert [g.outcome for g in got] == ["finished"] * 2
    assert [g.text for g in got] == [" w0 w1 w2 w3", " w0 w1 w2"]
    assert [len(g.times_s) for g in got] == [4, 3]
    assert all(g.start_s <= g.sent_s <= g.times_s[0] <= g.times_s[-1] <= time.perf_counter() for g in got)
    assert (counters["new_tokens"], counters["prompt_tokens"]) == (7, 10)
    assert server.bodies()[-2]["prompt"] == [0, 1, 2, 3, 4]
    assert all(body["temperature"] == 0 and body["stream"] for body in server.bodies())


def test_statuses() -> None:
    later = email.utils.format_datetime(
        datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=60), usegmt=True
    )
    answers: dict[str, tuple[Any, ...]] = {
        "p0": (429, {"error": {"message": "queue is full"}}, "application/json", {"Retry_After": "7"}),
        "p1": (429, "slow down", "text/plain", {"Retry_After": later}),
        "p2": (500, {"error": "boom"}, "application/json", {}),
        "p3": (503, {"detail": "Loading model"}, "application/json", {}),
        "p4": (400, {"message": "too long", "object": "error"}, "application/json", {}),
        "p5": (302, "", "text/plain", {"Location": "http://127.0.0.1:1/"}),
        "p6": (200, {"choices": [{"text": "not streamed"}]}, "application/json", {}),
        "p7": (502, "<html>" + "x" * 200_000, "text/html", {}),
    }

    async def script(body: dict[str, Any], reply: Reply) -> None:
        if body["prompt"] not in answers:
            await good(body, reply)
            return
        status, data, kind, headers = answers[body["prompt"]]
        await reply.whole(status, data, kind, **headers)

    with FakeServer(script) as server:
        got, counters = ask(server, texts(9))
    want = [
        "rejected",
        "rejected",
        "server_error",
        "server_error",
        "refused",
        "refused",
        "server_error",
        "server_error",
    ]
    assert [g.outcome for g in got] == [*want, "finished"]
    assert [g.status for g in got] == [429, 429, 500, 503, 400, 302, 200, 502, 200]
    assert got[0].retry_after_s == 7
    assert 50 < got[1].retry_after_s <= 60
    assert got[2].retry_after_s is None
    told = ["queue is full", "slow down", "boom", "Loading model", "too long", "302", "not streamed", "<html>"]
    assert all(words in g.error for words, g in zip(told, got, strict=False))
    assert max(len(g.error) for g in got) < 400
    assert counters["rejected"] == 2


def test_an_error_is_not_asked_again() -> None:
    seen = []

    async def script(body: dict[str, Any], reply: Reply) -> None:
        seen.append(body["prompt"])
        await (reply.whole(503, {}) if len(seen) == 1 else good(body, reply))

    with FakeServer(script) as server:
        got, _ = ask(server, texts(3, gap_s=0.05))
    assert [g.outcome for g in got] == ["server_error", "finished", "finished"]
    assert seen == ["p0", "p1", "p2"]


def test_a_server_that_is_gone() -> None:
    with FakeServer() as server:
        client = Server(server.url)
        server.stop()
        got = client.generate(texts(5))
        assert [g.outcome for g in got] == ["connection_error"] * 5
        assert all(g.status is None and "Connect call failed" in g.error and not g.times_s for g in got)
        assert client.counters()["connection_error"] == 5
        client.close()
        client.close()
        with pytest.raises(QuantlabError, match="closed"):
            client.generate(texts(1))


async def _three(reply: Reply) -> None:
    await reply.head()
    for word in "abc":
        await reply.text(word)
    await asyncio.sleep(0.05)


def _cuts() -> dict[str, Callable[[Reply], Any]]:
    async def done(reply: Reply) -> None:
        # llama_cpp.server means to say so that another request interrupted this one.
        await reply.event("[DONE]")
        await reply.end()

    async def inside(reply: Reply) -> None:
        await reply.raw(b'data: {"choices": [{"te')
        reply.abort()

    async def call(act: Callable[[], Any]) -> None:
        result = act()
        if asyncio.iscoroutine(result):
            await result

    return {
        "reset": lambda reply: call(reply.abort),
        "closed without the last chunk": lambda reply: call(reply.close),
        "ended without a finish": lambda reply: reply.end(),
        "done without a finish": done,
        "in the middle of an event": inside,
    }


@pytest.mark.parametrize("how", _cuts())
def test_cut_in_mid_stream(how: str) -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        if body["prompt"] == "p1":
            await good(body, reply)
            return
        await _three(reply)
        await _cuts()[how](reply)

    with FakeServer(script) as server:
        got, counters = ask(server, texts(3))
    assert [g.outcome for g in got] == ["cut", "finished", "cut"]
    assert [g.text for g in got] == ["abc", " w0 w1 w2 w3", "abc"]
    assert [len(g.times_s) for g in got] == [3, 4, 3]
    assert counters["cut"] == 2


def test_a_cut_before_the_first_byte() -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        if body["prompt"] == "p0":
            reply.abort()
        else:
            await reply.head()
            reply.abort()

    with FakeServer(script) as server:
        got, _ = ask(server, texts(2))
    assert [g.outcome for g in got] == ["connection_error", "cut"]


def test_a_connection_lost_after_the_finish_is_a_whole_answer() -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        await reply.head()
        await reply.text("a")
        await reply.text("b", "length")
        await asyncio.sleep(0.05)
        reply.abort()

    with FakeServer(script) as server:
        (got,), _ = ask(server, texts(1))
    assert (got.outcome, got.counted_by, len(got.times_s)) == ("finished", "events", 2)


def test_errors_told_in_a_stream() -> None:
    events = [
        '{"choices"',
        '{"error": {"message": "no memory", "code": 500}}',
        '{"error": {"message": "x", "code": 429}}',
    ]

    async def script(body: dict[str, Any], reply: Reply) -> None:
        await reply.head()
        await reply.text("a")
        await reply.event(events[int(body["prompt"][1:])])
        await reply.event("[DONE]")
        await reply.end()

    with FakeServer(script) as server:
        got, _ = ask(server, texts(3))
    assert [g.outcome for g in got] == ["server_error", "server_error", "rejected"]
    assert [g.text for g in got] == ["a"] * 3


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_packets_of_single_bytes(end: str) -> None:
    text = [" naïve", " ✓", "漢字"]

    async def script(body: dict[str, Any], reply: Reply) -> None:
        await reply.head()
        lines = [": ping", ""]
        for i, word in enumerate(text):
            event = {"choices": [{"text": word, "finish_reason": "length" if i == 2 else None}]}
            lines += ["event: x", f"data: {json.dumps(event, ensure_ascii=False)}", "", ": ping", ""]
        for byte in end.join([*lines, "data: [DONE]", "", ""]).encode():
            await reply.raw(bytes([byte]))
        await reply.end()

    with FakeServer(script) as server:
        (got,), _ = ask(server, texts(1))
    assert (got.outcome, got.text, len(got.times_s)) == ("finished", "".join(text), 3)


def test_compressed_streams() -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        data = b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
        await reply.head(Content_Encoding="gzip")
        await reply.raw(gzip.compress(data) if body["prompt"] == "p0" else data)
        await reply.end()

    with FakeServer(script) as server:
        got, _ = ask(server, texts(2))
        assert all(headers["accept-encoding"] == "identity" for _, headers, _ in server.asked)
    assert [g.outcome for g in got] == ["finished", "server_error"]


def test_several_tokens_an_event() -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        await reply.head()
        await reply.text("a b c")
        await asyncio.sleep(0.1)
        await reply.text("d", "length")
        await reply.usage(7, 4, prompt_tokens_details={"cached_tokens": 6})
        await reply.event("[DONE]")
        await reply.end()

    with FakeServer(script) as server:
        (got,), counters = ask(server, texts(1))
    assert len(set(got.times_s)) == 2
    assert got.times_s[0] == got.times_s[1] == got.times_s[2]
    assert got.times_s[3] - got.times_s[2] > 0.09
    assert (got.counted_by, got.prompt_tokens, got.cached_tokens, counters["cached_tokens"]) == ("spread", 7, 6, 6)


def test_a_connection_that_the_server_closed_is_replaced() -> None:
    """llama-server ends a connection after so many requests, and leaves the next one without an answer."""
    used, seen = set(), []

    async def script(body: dict[str, Any], reply: Reply) -> None:
        seen.append(body["prompt"])
        if reply.writer in used:
            reply.abort()
            return
        used.add(reply.writer)
        await good(body, reply)

    with FakeServer(script) as server:
        client = Server(server.url)
        got = [client.generate(texts(1))[0] for _ in range(4)]
        assert client.counters()["finished"] == 4
        client.close()
    assert [g.outcome for g in got] == ["finished"] * 4
    assert len(seen) == 4 + 3, "asked once more for each that was closed"


def test_a_new_connection_that_fails_is_not_replaced() -> None:
    seen = []

    async def script(body: dict[str, Any], reply: Reply) -> None:
        seen.append(body["prompt"])
        reply.abort()

    with FakeServer(script) as server:
        got, _ = ask(server, texts(6))
    assert [g.outcome for g in got] == ["connection_error"] * 6
    assert len(seen) == 6 + 1, "the first questions left one connection; only who took it asks again"


def test_a_request_that_the_server_worked_on_is_not_sent_again() -> None:
    seen = []

    async def script(body: dict[str, Any], reply: Reply) -> None:
        seen.append(body["prompt"])
        await asyncio.sleep(0.4)
        reply.abort()

    with FakeServer(script) as server:
        got, _ = ask(server, texts(1))
    assert [g.outcome for g in got] == ["connection_error"]
    assert seen == ["p0"]
