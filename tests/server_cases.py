"""Requests to a fake server, and what became of them: each has one outcome, and the counters lose none."""

from __future__ import annotations

from typing import Any

import pytest

from quantlab.runtime.server import Server, TextRequest
from quantlab.runtime.server_stream import OUTCOMES
from tests.fake_server import FakeServer


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a key nor a proxy of whoever runs the tests."""
    for name in ("OPENAI_API_KEY", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def texts(n: int, *, new: int = 4, gap_s: float = 0.0) -> list[TextRequest]:
    return [TextRequest(f"p{i}", new, arrival_s=i * gap_s) for i in range(n)]


def ask(server: FakeServer, requests: list[Any], **options: Any) -> tuple[list[Any], dict[str, int]]:
    """The generations, after checking that the counters lose none of them."""
    client = Server(server.url, **options)
    try:
        got = client.generate(requests)
        counters = client.counters()
    finally:
        client.close()
    assert len(got) == len(requests) == counters["requests"] == sum(counters[name] for name in OUTCOMES)
    assert {name: counters[name] for name in OUTCOMES} == {
        name: sum(g.outcome == name for g in got) for name in OUTCOMES
    }
    assert counters["new_tokens"] == sum(len(g.times_s) for g in got)
    assert all(bool(g.error) != (g.outcome == "finished") for g in got)
    return got, counters
