"""Who a server is: its models, keys, kinds and counters, and what is no server."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.runtime.backend import Request
from quantlab.runtime.server import Server, TextRequest
from tests.fake_server import FakeServer, Reply, good
from tests.server_cases import ask, no_settings, texts

__all__ = ["no_settings"]

KEY = "sk-secret-0123456789"


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
