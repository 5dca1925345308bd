"""The client of a server that misbehaves in every way: one outcome a request, nothing lost, no request held back."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import gzip
import json
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.runtime.backend import Request
from quantlab.runtime.server import Server, TextRequest
from quantlab.runtime.server_stream import OUTCOMES
from tests.fake_server import FakeServer, Reply, good

KEY = "sk-secret-0123456789"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_key_is_sent_and_told_to_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")

    async def script(body: dict[str, Any], reply: Reply) -> None:
        if body["prompt"] == "p0":
            await reply.whole(401, {"error": {"message": f"wrong key {KEY}"}})
        else:
            await reply.head()
            await reply.event({"error": {"message": f"wrong key {KEY}"}})
            await reply.end()

    with FakeServer(script) as server:
        client = Server(server.url)
        got = client.generate(texts(2))
        told = repr((got, client.describe(), client.describe().runtime, client.counters()))
        client.close()
        assert all(headers["authorization"] == f"Bearer {KEY}" for _, headers, _ in server.asked)
        server.about["/v1/models"] = (500, {"error": f"{KEY}?"})
        with pytest.raises(QuantlabError) as caught:
            Server(server.url)
    assert [g.outcome for g in got] == ["refused", "server_error"]
    assert "wrong key ***" in told
    assert KEY not in told + caplog.text + caught.value.message
    monkeypatch.setenv("OPENAI_API_KEY", "schlüssel")
    with pytest.raises(UsageError, match="OPENAI_API_KEY"):
        Server(server.url)


def test_no_key_no_header() -> None:
    with FakeServer() as server:
        ask(server, texts(1))
        assert not any("authorization" in headers for _, headers, _ in server.asked)


def test_a_proxy_of_the_environment_is_not_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with FakeServer() as server:
        got, _ = ask(server, texts(1))
        assert got[0].outcome == "finished"
        Server(server.url.replace("127.0.0.1", "localhost")).close()


def _listed(*names: str) -> dict[str, Any]:
    return {"/v1/models": {"data": [{"id": name, "owned_by": "me"} for name in names]}}


def test_the_model_is_named_where_there_are_several() -> None:
    with FakeServer(about=_listed("one", "two")) as server:
        with pytest.raises(UsageError, match="serves 2 models") as caught:
            Server(server.url)
        assert "one, two" in caught.value.hint
        with pytest.raises(UsageError, match="unknown model of the server `tow`"):
            Server(server.url, model="tow")
        client = Server(server.url, model="two")
        assert client.describe().model == "two"
        assert {body["model"] for body in server.bodies()} == {"two"}
        client.close()


@pytest.mark.parametrize(
    ("page", "words", "hint"),
    [
        ((401, {"error": "no"}), "wants another key", "OPENAI_API_KEY"),
        ((404, "nothing here"), "HTTP 404: nothing here", "/v1"),
        ((503, {"error": {"message": "Loading model"}}), "Loading model", "loaded"),
        ("<html>hello</html>", "is no list of models", "OpenAI"),
        ({"data": "m"}, "is no list of models", "OpenAI"),
        ({"data": []}, "serves 0 models", "--model"),
    ],
)
def test_what_is_no_server(page: Any, words: str, hint: str) -> None:
    with FakeServer(about={"/v1/models": page}) as server, pytest.raises(QuantlabError, match=words) as caught:
        Server(server.url)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1/v1", "http:///v1", "127.0.0.1:80", "http://127.0.0.1:99999/v1", "http://a:b@127.0.0.1/v1",
            "http://127.0.0.1/v1?key=1"]
)  # fmt: skip
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        Server(url)
    assert "a:b" not in caught.value.message


def test_nobody_listens() -> None:
    with FakeServer() as server:
        url = server.url
    with pytest.raises(QuantlabError, match="no server answers"):
        Server(url)


def test_the_path_may_be_left_out() -> None:
    with FakeServer() as server:
        client = Server(server.url.removesuffix("/v1"))
        assert client.describe().url == server.url
        client.close()


def test_a_server_that_takes_text_alone() -> None:
    async def fussy(body: dict[str, Any], reply: Reply) -> None:
        if not isinstance(body["prompt"], str):
            await reply.whole(500, {"error": "prompt must be a string"})
        elif "stream_options" in body:
            await reply.whole(400, {"error": "unknown field stream_options"})
        else:
            await good(body, reply)

    with FakeServer(fussy, probed=fussy) as server:
        client = Server(server.url)
        info = client.describe()
        assert (info.prompts, info.has_usage, info.ignores_eos) == ("text", False, False)
        assert client.generate(texts(1))[0].outcome == "finished"
        with pytest.raises(QuantlabError, match="no tokenizer"):
            client.generate([Request(np.array([1, 2], np.int32), 4)])
        client.close()


def test_ids_that_are_read_as_something_else() -> None:
    async def probed(body: dict[str, Any], reply: Reply) -> None:
        await good({**body, "prompt": str(body["prompt"])}, reply)

    with FakeServer(probed=probed) as server:
        client = Server(server.url)
        assert client.describe().prompts == "text"
        client.close()


def test_a_server_of_chats() -> None:
    async def chat(body: dict[str, Any], reply: Reply) -> None:
        if "messages" not in body:
            await reply.whole(404, {"error": "no such path"})
            return
        await reply.head()
        await reply.event({"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]})
        for word in "ab":
            await reply.event({"choices": [{"delta": {"content": word}, "finish_reason": None}]})
        await reply.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        await reply.end()

    with FakeServer(chat, probed=chat) as server:
        client = Server(server.url)
        assert client.describe().prompts == "chat"
        (got,) = client.generate([TextRequest([{"role": "user", "content": "hi"}], 4)])
        assert (got.outcome, got.text, len(got.times_s), got.finish_reason) == ("finished", "ab", 2, "stop")
        for request in (TextRequest("hi", 4), Request(np.array([1], np.int32), 4)):
            with pytest.raises(QuantlabError, match="chats only"):
                client.generate([request])
        client.close()


@pytest.mark.parametrize(("status", "hint"), [(503, "loaded"), (400, "log")])
def test_a_server_that_answers_nothing(status: int, hint: str) -> None:
    async def refuse(body: dict[str, Any], reply: Reply) -> None:
        await reply.whole(status, {"error": "not now"})

    with FakeServer(probed=refuse) as server, pytest.raises(QuantlabError, match="not now") as caught:
        Server(server.url)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("prompt", "new", "arrival_s"), [("", 4, 0), ("a", 0, 0), ("a", 4, -1), ("a", 4, math.nan), ("a", 4, math.inf)]
)
def test_requests_that_cannot_be(prompt: str, new: int, arrival_s: float) -> None:
    with FakeServer() as server:
        client = Server(server.url)
        with pytest.raises(UsageError, match="request 0"):
            client.generate([TextRequest(prompt, new, arrival_s=arrival_s)])
        assert client.generate([]) == []
        client.close()


def _metrics(prompt: int, new: int, queries: int, hits: int) -> str:
    return f"""# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {prompt}.0
vllm:prompt_tokens_total{{engine="1",model_name="m"}} 1.5e+01
vllm:generation_tokens_total{{engine="0",model_name="m, {{x}}"}} {new}.0
vllm:generation_tokens_created{{engine="0"}} 1.7e+09
vllm:gpu_prefix_cache_queries_total{{engine="0"}} {queries}.0
vllm:gpu_prefix_cache_hits_total{{engine="0"}} {hits}
vllm:e2e_request_latency_seconds_bucket{{le="+Inf"}} 4.0
"""


def test_vllm() -> None:
    about = {
        "/v1/models": {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 4096}]},
        "/version": {"version": "0.11.0"},
        "/metrics": _metrics(100, 20, 50, 10),
        "/tokenize": {"count": 2, "max_model_len": 4096, "tokens": [5, 6]},
        "/detokenize": {"prompt": "hello"},
    }
    with FakeServer(about=about) as server:
        client = Server(server.url)
        info = client.describe()
        assert (info.kind, info.n_ctx, info.prompts, info.has_counters) == ("vllm", 4096, "token ids", True)
        assert (info.runtime.name, info.runtime.version) == ("server", "vLLM 0.11.0")
        client.generate([TextRequest("a", 4), TextRequest("a", 4, ignore_eos=False)])
        server.about["/metrics"] = _metrics(160, 24, 90, 40)
        counters = client.counters()
        assert {n: v for n, v in counters.items() if n.startswith("server_") and n != "server_error"} == {
            "server_prompt_tokens": 60, "server_new_tokens": 4, "server_prefix_queries": 40, "server_prefix_hits": 30,
        }  # fmt: skip
        client.reset()
        assert not any(client.counters().values())
        ends, may_end = server.bodies()[-2:]
        assert ends["ignore_eos"]
        assert "ignore_eos" not in may_end
        assert ends["repetition_penalty"] == 1
        assert ends["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        assert client.encode("hello").tolist() == [5, 6]
        assert client.decode([5, 6]) == "hello"
        assert server.asked[-1][2] == {"model": "m", "tokens": [5, 6]}
        server.about["/metrics"] = (500, "x")
        assert "server_new_tokens" not in client.counters()
        client.close()


def test_other_kinds_are_recognized() -> None:
    def models(**card: Any) -> dict[str, Any]:
        return {"data": [{"id": "m", **card}]}

    pages = {
        "sglang": {
            "/v1/models": models(owned_by="sglang", max_model_len=100),
            "/get_server_info": {"version": "0.5"},
            "/metrics": 'sglang:prompt_tokens_total{a="b"} 9\nsglang:cached_tokens_total 4\n',
        },
        "llama-server": {
            "/v1/models": models(owned_by="llamacpp"),
            "/props": {"default_generation_settings": {"n_ctx": 100}, "build_info": "b1-0"},
            "/metrics": "llamacpp:prompt_tokens_total 5\nllamacpp:prompt_tokens_cached_total 4\n",
        },
        "llama_cpp.server": {
            "/v1/models": models(owned_by="me"),
            "/openapi.json": {"info": {"version": "0.3"}, "paths": {"/extras/tokenize": {}}},
        },
        "unknown": {"/v1/models": models(owned_by="me"), "/openapi.json": {"info": {"title": "x"}, "paths": None}},
    }
    versions = {"sglang": "SGLang 0.5", "llama-server": "llama-server b1-0", "llama_cpp.server": "llama_cpp.server 0.3"}
    for kind, about in pages.items():
        with FakeServer(about=about) as server:
            client = Server(server.url)
            info = client.describe()
            assert info.kind == kind
            assert info.n_ctx == (100 if kind in ("sglang", "llama-server") else None)
            assert info.runtime.version == versions.get(kind, "unknown server")
            if info.has_counters:
                server.about["/metrics"] = about["/metrics"].replace(" 4", " 7")
                assert client.counters()["server_prefix_hits"] == 3
            client.close()
