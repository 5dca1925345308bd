"""The client under load: no request is held back, and every time is the one that it was."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from quantlab.runtime.server import Server, TextRequest
from tests.fake_server import FakeServer, Reply, good
from tests.server_cases import ask, no_settings, texts

__all__ = ["no_settings"]


def test_a_slow_first_token_is_in_the_ttft_and_not_after_it() -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        await reply.head()
        await asyncio.sleep(0.3)
        for word in "abc":
            await reply.text(word, "length" if word == "c" else None)
            await asyncio.sleep(0.05)
        await reply.event("[DONE]")
        await reply.end()

    with FakeServer(script) as server:
        (got,), _ = ask(server, texts(1))
    # The other side of the bounds is a loaded machine.
    assert 0.29 < got.times_s[0] - got.start_s < 2
    assert 0.05 < got.times_s[2] - got.times_s[0] < 0.25


def test_arrivals_never_wait_for_completions() -> None:
    seen: dict[str, float] = {}

    async def script(body: dict[str, Any], reply: Reply) -> None:
        seen[body["prompt"]] = time.perf_counter()
        await asyncio.sleep(1.0)
        await good(body, reply)

    with FakeServer(script) as server:
        requests = texts(20, gap_s=0.02)
        # The order of the list is not that of arrival.
        got, counters = ask(server, requests[::-1])
    start = got[-1].start_s
    late = [seen[r.prompt] - start - r.arrival_s for r in requests]
    assert min(late) > -0.001
    # A client that waits for an answer is a second late or more.
    assert max(late) < 0.9
    assert [g.start_s - start for g in got] == pytest.approx([r.arrival_s for r in requests[::-1]], abs=1e-6)
    assert all(0 <= g.sent_s - g.start_s < 0.9 for g in got)
    assert 0 < counters["client_lag_us"] < 900_000


def test_no_request_waits_for_a_connection() -> None:
    together = 400
    waiting = 0
    everyone = asyncio.Event()

    async def script(body: dict[str, Any], reply: Reply) -> None:
        # Nobody is answered before all are here.
        nonlocal waiting
        waiting += 1
        if waiting == together:
            everyone.set()
        await everyone.wait()
        await good(body, reply)

    with FakeServer(script) as server:
        got, _ = ask(server, texts(together), timeout_s=30)
    assert [g.outcome for g in got] == ["finished"] * together


def test_idle_connections_are_used_again_unless_they_are_old() -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        await good(body, reply)
        if body["prompt"] == "p2":
            # As a server that closes what is idle.
            await asyncio.sleep(0.05)
            reply.close()

    with FakeServer(script) as server:
        client = Server(server.url)
        before = server.connections
        for i in range(5):
            assert client.generate([TextRequest(f"p{i}", 4)])[0].outcome == "finished"
            time.sleep(0.3)
        assert server.connections - before <= 2
        client.close()


def test_timeouts() -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        if body["prompt"] == "p0":
            await asyncio.sleep(30)
        if body["prompt"] == "p3":
            await good(body, reply)
            return
        await reply.head()
        await reply.text("a")
        await reply.text("b")
        if body["prompt"] == "p1":
            await asyncio.sleep(30)
        # An answer that is whole, on a connection that never ends.
        await reply.text("c", "length")
        await reply.event("[DONE]")
        await asyncio.sleep(30)

    with FakeServer(script) as server:
        before = time.perf_counter()
        got, _ = ask(server, texts(4), timeout_s=1.5)
        assert time.perf_counter() - before < 10
    assert [g.outcome for g in got] == ["timed_out", "timed_out", "finished", "finished"]
    assert [len(g.times_s) for g in got] == [0, 2, 3, 4]


def test_a_done_that_nothing_follows_ends_the_wait() -> None:
    async def script(body: dict[str, Any], reply: Reply) -> None:
        await reply.head()
        await reply.text("c", "length")
        await reply.event("[DONE]")
        await asyncio.sleep(30)

    with FakeServer(script) as server:
        before = time.perf_counter()
        (got,), _ = ask(server, texts(1))
        assert time.perf_counter() - before < 5
    assert got.outcome == "finished"
