"""`quantlab batching` against a server: what it rejects, loses and does not tell is counted, never hidden."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantlab.bench.batching.bench import run
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.model import ModelFile
from quantlab.core.result import Outcome
from quantlab.lab.execute import Lab, fingerprint
from quantlab.lab.steps import batching_step, loadable
from tests.fake_server import FakeServer, Reply, good
from tests.test_server_real import Serving, needs_packages

# A server answers the questions of a Server with two tokens; the loads have six.
SMALL: dict[str, Any] = {"new_tokens": 6, "random_range_ratio": 0.0, "requests": 20, "max_num_seqs": 1, "rate": [200.0]}


def spec(server: FakeServer, **options: Any) -> BatchingSpec:
    return BatchingSpec(ModelFile(server.url, "m", server.url, "0"), **{**SMALL, **options})


def every(n: int, script: Any, otherwise: Any = good) -> Any:
    """A script for every n-th request."""
    seen = 0

    async def scripted(body: dict[str, Any], reply: Reply) -> None:
        nonlocal seen
        seen += 1
        await (script if seen % n == 0 else otherwise)(body, reply)

    return scripted


async def busy(body: dict[str, Any], reply: Reply) -> None:
    await reply.whole(429, {"error": {"message": "too many requests"}})


async def cut(body: dict[str, Any], reply: Reply) -> None:
    await reply.head()
    await reply.text(" w0")
    reply.abort()


def gathered(outcomes: list[Outcome], spec: BatchingSpec) -> str:
    """Run to the error; the outcomes before it are appended."""
    with pytest.raises(QuantlabError) as caught:
        outcomes.extend(run(spec))
    return caught.value.message


def test_a_server_is_loaded_and_judged() -> None:
    with FakeServer() as server:
        outcomes = list(run(spec(server, rate=[30.0], ttft_slo_s=9.0, tpot_slo_s=9.0)))
        bodies = [body for body in server.bodies() if body["max_tokens"] == 6]
    assert [o.details["part"] for o in outcomes] == ["capacity", "load", "sla", "answer"]
    load = outcomes[1]
    assert load.details["requests_finished"] == 20
    assert (load.details["verdict"], load.details["within"]) == ("undecided", True)
    assert load.model.format == "endpoint"
    assert load.runtime is not None
    assert load.runtime.name == "server"
    assert load.measurements.keys() >= {"ttft", "tpot", "goodput", "rejected", "utilization"}
    # A server does not tell when a request leaves its queue.
    assert not {"queue_delay", "predicted_queue_delay", "preempted"} & load.measurements.keys()
    assert {"may-end-early"} <= {notice.code for notice in load.warnings}
    # Warm-up, capacity, the load, and the rate of the search.
    assert len(bodies) == 1 + 3 * 20
    # A prefix cache of the server has seen none of them before.
    assert len({str(body["prompt"]) for body in bodies[1:]}) == 3 * 20


def test_rejections_are_counted_and_are_no_error() -> None:
    with FakeServer(every(4, busy)) as server:
        outcomes = list(run(spec(server, parts=["load"])))
    load = outcomes[1].details
    assert load["requests_rejected"] == 5
    assert (load["requests_lost"], load["within"]) == (0, False)
    assert sum(outcomes[1].measurements["rejected"].samples) == load["share_unserved"] * 16


def test_cut_answers_are_counted_and_every_load_is_finished() -> None:
    outcomes: list[Outcome] = []
    with FakeServer(every(10, cut)) as server:
        message = gathered(outcomes, spec(server, parts=["load"], rate=[100.0, 200.0]))
    assert [o.details["requests_lost"] for o in outcomes] == [2, 2, 2]
    assert message == "6 of 61 requests were lost (6 cut)"
    assert "lost-requests" in {notice.code for notice in outcomes[2].warnings}


async def broken(body: dict[str, Any], reply: Reply) -> None:
    await reply.whole(500, {"error": {"message": "out of memory"}})


async def unavailable(body: dict[str, Any], reply: Reply) -> None:
    await reply.whole(503, "<html>busy</html>", "text/html")


async def garbage(body: dict[str, Any], reply: Reply) -> None:
    await reply.head()
    await reply.text(" w0")
    await reply.event("{not json")
    await reply.end()


async def binary(body: dict[str, Any], reply: Reply) -> None:
    await reply.head()
    await reply.raw(bytes(range(256)) * 8)
    await reply.end()


async def nothing(body: dict[str, Any], reply: Reply) -> None:
    await reply.head()
    await reply.end()


async def page(body: dict[str, Any], reply: Reply) -> None:
    await reply.whole(200, "<html>welcome</html>", "text/html")


async def wordless(body: dict[str, Any], reply: Reply) -> None:
    await reply.head()
    await reply.event({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
    await reply.event("[DONE]")
    await reply.end()


@pytest.mark.parametrize(
    ("script", "counted"),
    [
        (broken, "server error"),
        (unavailable, "server error"),
        (garbage, "server error"),
        (binary, "cut"),
        (nothing, "cut"),
        (page, "cut"),
        (wordless, "empty answer"),
    ],
)
def test_whatever_an_answer_is_its_loss_is_counted_by_name(script: Any, counted: str) -> None:
    outcomes: list[Outcome] = []
    with FakeServer(every(10, script)) as server:
        message = gathered(outcomes, spec(server, parts=["load"]))
    assert message == f"4 of 41 requests were lost (4 {counted})"
    load = outcomes[1]
    assert (load.details["requests_lost"], load.details["requests_finished"]) == (2, 18)
    # A part of an answer is no answer: latencies are those of the finished ones.
    measured = 16 - round(16 * load.details["share_unserved"])
    assert len(load.measurements["ttft"].samples) == len(load.measurements["tpot"].samples) == measured
    assert load.details["late_interval"][0] == load.details["share_unserved"]


def test_a_server_that_answers_nothing_more_ends_the_bench() -> None:
    """Not after each of the loads that are left: with timeouts that would take hours."""
    outcomes: list[Outcome] = []
    seen = 0

    async def dying(body: dict[str, Any], reply: Reply) -> None:
        nonlocal seen
        seen += 1
        await (good if seen <= 1 + 20 else nothing)(body, reply)

    with FakeServer(dying) as server:
        message = gathered(outcomes, spec(server, rate=[100.0, 200.0, 300.0]))
    assert [o.details["part"] for o in outcomes] == ["capacity", "load"]
    assert message == "20 of 41 requests were lost (20 cut)"


def test_a_server_that_is_killed_ends_the_bench_and_keeps_what_is_finished() -> None:
    server = FakeServer()
    seen = 0

    async def dying(body: dict[str, Any], reply: Reply) -> None:
        nonlocal seen
        seen += 1
        if seen == 1 + 2 * 20 + 8:
            server._stopped.set()
        await good(body, reply)

    server.script = dying
    outcomes: list[Outcome] = []
    with server:
        message = gathered(outcomes, spec(server, parts=["load", "sla"], rate=[100.0, 50.0, 300.0]))
    assert [o.details["part"] for o in outcomes] == ["capacity", "load", "load"]
    first, last = outcomes[1].details, outcomes[2].details
    assert (first["requests_lost"], first["requests_finished"]) == (0, 20)
    assert last["requests_lost"] >= 10
    assert last["requests_lost"] + last["requests_finished"] == 20
    assert f"{last['requests_lost']} of 61 requests were lost" in message
    assert "connection error" in message


def test_the_command_shows_what_was_finished_and_exits_with_1(tmp_path: Path) -> None:
    server = FakeServer()
    seen = 0

    async def dying(body: dict[str, Any], reply: Reply) -> None:
        nonlocal seen
        seen += 1
        if seen == 30 + 1:
            server._stopped.set()
        await good(body, reply)

    server.script = dying
    with server:
        command = [sys.executable, "-m", "quantlab", "batching", server.url, "--rate", "50,100", "--requests", "20"]
        command += ["--max-num-seqs", "1", "-n", "6", "--random-range-ratio", "0"]
        wide = {**os.environ, "COLUMNS": "200"}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=wide)
    assert done.returncode == 1
    assert "load, server" in done.stdout
    assert "requests were lost" in done.stdout
    assert "error:" in done.stderr
    assert "requests were lost" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(list((tmp_path / "runs").glob("*-batching-*.json"))) == 2


def test_no_server_and_a_request_beyond_its_context() -> None:
    gone = ModelFile("http://127.0.0.1:9/v1", "m", "x", "0")
    with pytest.raises(QuantlabError, match="no server answers"):
        list(run(BatchingSpec(gone)))
    card = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 24}]}
    with FakeServer(about={"/v1/models": card}) as server, pytest.raises(UsageError, match="holds 24"):
        list(run(spec(server)))


def test_an_endpoint_is_its_address() -> None:
    lab = Lab(None)
    model = loadable(lab, "http://127.0.0.1:1/v1", {})
    other = loadable(lab, "http://127.0.0.1:2/v1", {})
    assert model.source == "http://127.0.0.1:1/v1"
    assert fingerprint(batching_step(model, {})) != fingerprint(batching_step(other, {}))
    named = batching_step(model, {"served_model": "a"})
    assert fingerprint(named) != fingerprint(batching_step(model, {"served_model": "b"}))


@needs_packages
def test_a_real_server_that_is_killed_in_the_middle(stories: Path, tmp_path: Path) -> None:
    from quantlab.quantize.convert import convert

    convert(stories, tmp_path / "stories.gguf", outtype="F32")
    serving = Serving(tmp_path / "stories.gguf", "--interrupt_requests", "false")
    outcomes: list[Outcome] = []
    try:
        serving.opened().close()
        options: dict[str, Any] = {"requests": 12, "rate": [20.0, 4.0, 50.0], "parts": ["load"], "max_num_seqs": 1}
        url = ModelFile(serving.url, "stories", serving.url, "0")
        with pytest.raises(QuantlabError, match="were lost"):
            for outcome in run(BatchingSpec(url, **options)):
                outcomes.append(outcome)
                if outcome.details["part"] == "load":
                    os.kill(serving.process.pid, signal.SIGKILL)
    finally:
        serving.end()
    assert [o.details["part"] for o in outcomes] == ["capacity", "load", "load"]
    assert outcomes[1].details["requests_finished"] == 12
    assert outcomes[2].details["requests_lost"] == 12


async def half_cached(body: dict[str, Any], reply: Reply) -> None:
    await reply.head()
    for i in range(body["max_tokens"]):
        await reply.text(f" w{i}", "length" if i == body["max_tokens"] - 1 else None)
    await reply.usage(40, body["max_tokens"], prompt_tokens_details={"cached_tokens": 10})
    await reply.event("[DONE]")
    await reply.end()


def test_what_a_server_had_in_its_prefix_cache_is_told() -> None:
    with FakeServer(half_cached) as server:
        outcomes = list(run(spec(server, parts=["load"])))
    assert outcomes[1].details["share_cached"] == 0.25
