"""`prefix-cache http://...`: a fake server that tells its hits as vLLM, SGLang and llama-server do, or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantlab.bench.prefix_cache.bench import run
from quantlab.bench.prefix_cache.server import found
from quantlab.bench.prefix_cache.spec import PrefixCacheSpec
from quantlab.core.errors import UsageError
from quantlab.core.model import ModelFile
from quantlab.core.result import Outcome
from quantlab.lab.prefix_cache import prefix_cache_step
from quantlab.runtime.server_stream import ServerGeneration
from tests.fake_server import FakeServer, Reply
from tests.test_server_real import MISSING, Serving

BLOCK = 16
BOS = 1


class Caching:
    """A server of one kind with a prefix cache of whole blocks, that tells what it found as that kind does."""

    def __init__(self, kind: str, *, usage: bool = True, cache: bool = True, tokenizer: bool = False) -> None:
        self.kind, self.usage, self.cache, self.tokenizer = kind, usage, cache, tokenizer
        self.blocks: set[tuple[Any, ...]] = set()
        self.hits = self.queries = 0

    def about(self) -> dict[str, Any]:
        owner = {"vllm": "vllm", "sglang": "sglang", "llama-server": "llamacpp"}.get(self.kind, "me")
        card = {"id": "m", "object": "model", "owned_by": owner, "max_model_len": 4096}
        return {"/v1/models": {"object": "list", "data": [card]}, "/props": {"build_info": "b1"}}

    def metrics(self) -> str:
        names = {
            "vllm": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
            "sglang": ("sglang:prompt_tokens_total", "sglang:cached_tokens_total"),
        }[self.kind]
        return f'{names[0]}{{engine="0"}} {self.queries}\n{names[1]}{{engine="0"}} {self.hits}\n'

    async def __call__(self, body: dict[str, Any], reply: Reply) -> None:
        if "max_tokens" not in body:
            await self._tokenizer(body, reply)
            return
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        ids = list(prompt)
        prefixes = [tuple(ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK)]
        held = 0
        for prefix in prefixes if self.cache else []:
            if prefix not in self.blocks:
                break
            held += BLOCK
        held = min(held, len(ids) - 1)
        self.blocks.update(prefixes)
        self.hits, self.queries = self.hits + held, self.queries + len(ids)
        await reply.head()
        n, told = body["max_tokens"], {}
        if self.kind == "llama-server":
            told = {"timings": {"prompt_n": len(ids) - held, "cache_n": held, "predicted_n": n}}
        for i in range(n):
            await reply.text("x", "length" if i == n - 1 else None, **(told if i == n - 1 else {}))
        if self.kind in ("vllm", "sglang"):
            details = {"cached_tokens": held} if self.usage else None
            await reply.usage(len(ids), n, prompt_tokens_details=details)
        await reply.event("[DONE]")
        await reply.end()

    async def _tokenizer(self, body: dict[str, Any], reply: Reply) -> None:
        """An id for each character, and a BOS."""
        text = body.get("prompt", body.get("content", ""))
        answer: dict[str, Any] = {"tokens": [BOS, *(ord(character) + 2 for character in text)]}
        if "tokens" in body:
            text = "".join(chr(i - 2) for i in body["tokens"] if i != BOS)
            answer = dict.fromkeys(("prompt", "content", "text"), text)
        await reply.whole(200 if self.tokenizer else 404, answer)


class Pages(dict[str, Any]):
    """The pages of a server, whose metrics are those of the moment."""

    def __init__(self, pages: dict[str, Any], caching: Caching) -> None:
        super().__init__(pages)
        self._caching = caching

    def get(self, path: str, default: Any = None) -> Any:
        return self._caching.metrics() if path == "/metrics" else super().get(path, default)


@pytest.fixture
def served() -> Iterator[Callable[..., FakeServer]]:
    running: list[FakeServer] = []

    def start(script: Caching, *, counted: bool = False) -> FakeServer:
        server = FakeServer(script, script.about())
        if counted:
            server.about = Pages(server.about, script)
        running.append(server.__enter__())
        return server

    yield start
    for server in running:
        server.stop()


def rows(url: str, **options: Any) -> list[Outcome]:
    spec = PrefixCacheSpec(
        ModelFile(url, "m", url, "0"), suffix_tokens=16, requests=3, new_tokens=4, warmup=0,
        **{"prefix_tokens": 96, "repeats": 3, "scenario": ["system-prompt"], **options},
    )  # fmt: skip
    return list(run(spec))


def codes(outcome: Outcome) -> set[str]:
    return {notice.code for notice in outcome.warnings}


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llama-server"])
def test_hits_are_those_that_the_server_tells(served: Callable[..., FakeServer], kind: str) -> None:
    (row,) = rows(served(Caching(kind)).url)
    assert row.details["counted_by"] == "usage"
    assert row.measurements["hit_rate"].samples[0] > 0.8
    assert row.details["cold_hit_rate"] < 0.05
    assert len(row.measurements["ttft_cold"].samples) == len(row.measurements["ttft_warm"].samples) == 9
    assert codes(row) == {"cache-not-reset"}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_hits_of_metrics_where_answers_tell_none(served: Callable[..., FakeServer], kind: str) -> None:
    (by_usage,) = rows(served(Caching(kind)).url)
    (row,) = rows(served(Caching(kind, usage=False), counted=True).url)
    assert row.details["counted_by"] == "metrics"
    assert row.measurements["hit_rate"].samples == pytest.approx(by_usage.measurements["hit_rate"].samples, abs=0.02)
    assert codes(row) == {"cache-not-reset", "cached-of-all"}
    assert row.details["ttft_saved_predicted_s"] is None


@pytest.mark.parametrize("kind", ["vllm", "llama-server"])
def test_token_ids_keep_their_bos_and_each_cell_has_its_own_beginning(
    served: Callable[..., FakeServer], kind: str
) -> None:
    server = served(Caching(kind, tokenizer=True))
    (row,) = rows(server.url, repeats=2)
    asked = [body["prompt"] for body in server.bodies() if body.get("max_tokens") == 4]
    assert all(isinstance(prompt, list) and prompt[0] == BOS and prompt.count(BOS) == 1 for prompt in asked)
    # Of each repetition three cold requests and one warm pass of four.
    assert len(asked) == 2 * 7
    assert len({tuple(prompt[1:17]) for prompt in asked}) == 2 * 4
    assert row.measurements["hit_rate"].samples == [pytest.approx(row.details["expected_hit_rate"])] * 2
    assert row.details["cold_hit_rate"] == 0
    assert row.details["ttft_saved_predicted_s"] > 0


def test_what_nobody_tells_is_not_made_up(served: Callable[..., FakeServer]) -> None:
    (row,) = rows(served(Caching("unknown")).url)
    assert row.details["counted_by"] == "none"
    assert set(row.measurements) == {"ttft_cold", "ttft_warm"}
    assert set(row.details["not_measured"]) == {"kv_bytes_saved", "same_answers", "tiers"}
    assert "no-cached-counts" in codes(row)


def test_a_server_without_a_cache_is_told(served: Callable[..., FakeServer]) -> None:
    (row,) = rows(served(Caching("vllm", cache=False)).url)
    assert row.measurements["hit_rate"].samples == [0, 0, 0]
    assert "finds-nothing" in codes(row)


def test_a_second_run_is_as_cold_as_the_first(served: Callable[..., FakeServer]) -> None:
    server = served(Caching("vllm"))
    first, second = (rows(server.url)[0] for _ in range(2))
    assert first.details["cold_hit_rate"] == second.details["cold_hit_rate"]
    assert "not-cold" not in codes(second)


def test_a_time_stamp_costs_the_hits(served: Callable[..., FakeServer]) -> None:
    late, early = rows(served(Caching("vllm")).url, scenario=["timestamp-last", "timestamp-first"])[::-1]
    assert late.measurements["hit_rate"].samples[0] > early.measurements["hit_rate"].samples[0] + 0.4
    assert early.details["misses"]


def test_usage_goes_before_metrics_and_half_told_is_not_told() -> None:
    told, silent = ServerGeneration(0.0), ServerGeneration(0.0)
    told.cached_tokens, told.prompt_tokens = 32, 40
    counters = {"server_prefix_hits": 7, "server_prefix_queries": 70}
    assert found([told, told], counters) == ("usage", 64, 80)
    assert found([told, silent], counters) == ("metrics", 7, 70)
    assert found([told, silent], {}).rate is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"trace": "t.jsonl"}, "trace"), ({"budget": "1MB"}, "--budget"), ({"tiers": True}, "--tiers"),
        ({"threads": 2}, "--threads"), ({"dtype": "float16"}, "dtype"), ({"simulate": True}, "not simulated"),
        ({"runtime": "torch"}, "--runtime torch"), ({"device": "cpu"}, "--device"),
    ],
)  # fmt: skip
def test_options_that_a_server_cannot_heed_are_refused(options: dict[str, Any], says: str) -> None:
    url = "http://127.0.0.1:1/v1"
    with pytest.raises(UsageError) as raised:
        prefix_cache_step(ModelFile(url, "m", url, "0"), options)
    assert says in raised.value.message


def test_prompts_beyond_the_context_are_refused(served: Callable[..., FakeServer]) -> None:
    with pytest.raises(UsageError, match="holds 4096"):
        rows(served(Caching("vllm")).url, prefix_tokens=4096)


def test_the_command_shows_a_server(served: Callable[..., FakeServer], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quantlab", "prefix-cache", served(Caching("vllm")).url, "--scenario", "chat"]
    command += ["--requests", "4", "--prefix-tokens", "64", "-r", "1", "--warmup", "0"]
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    for shown in ("chat", "TTFT warm", "as the server counts it", "too few repetitions", "first tokens of its own"):
        assert shown in done.stdout + done.stderr
    (saved,) = (tmp_path / "runs").glob("*.json")
    assert json.loads(saved.read_text())["model"]["format"] == "endpoint"


@pytest.mark.skipif(bool(MISSING), reason=f"llama_cpp.server needs {', '.join(MISSING)}")
def test_a_real_server_that_tells_no_hits(stories: Path, tmp_path: Path) -> None:
    from quantlab.quantize.convert import convert

    path = tmp_path / "stories.gguf"
    convert(stories, path, outtype="F32")
    serving = Serving(path, "--interrupt_requests", "false")
    try:
        serving.opened().close()
        (row,) = rows(serving.url, repeats=1, prefix_tokens=64)
        assert row.details["counted_by"] == "none"
        assert len(row.measurements["ttft_warm"].samples) == 3
        assert {"no-cached-counts", "few-repeats"} <= codes(row)
    finally:
        serving.end()
