"""A real server of the package index, started and killed here: greedy text as our own backend, nothing lost."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from quantlab.core.errors import QuantlabError
from quantlab.runtime.backend import Capacity, Request
from quantlab.runtime.process import Process
from quantlab.runtime.server import Server, TextRequest
from quantlab.runtime.server_stream import OUTCOMES, Answer

# What `llama_cpp.server` imports beyond llama-cpp-python itself: its extra `server`.
NEEDS = ("llama_cpp", "fastapi", "uvicorn", "sse_starlette", "starlette_context", "pydantic_settings")
MISSING = [name for name in NEEDS if importlib.util.find_spec(name) is None]
needs_packages = pytest.mark.skipif(bool(MISSING), reason=f"llama_cpp.server needs {', '.join(MISSING)}")
LLAMA_SERVER = shutil.which("llama-server")

PROMPTS = ["Once upon a time", "Lily and Ben went", "The sun is", "Tom said \u201cHello\u201d"]


@pytest.fixture(scope="module")
def model(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from quantlab.quantize.convert import convert

    path = tmp_path_factory.mktemp("served") / "stories.gguf"
    convert(stories, path, outtype="F32")
    return path


PYTHON_SERVER = (
    sys.executable,
    "-m",
    "llama_cpp.server",
    "--model_alias",
    "stories",
    "--n_ctx",
    "512",
    "--n_threads",
    "1",
)


class Serving:
    """A server process on a free port, and a client when it is ready."""

    def __init__(self, model: Path, *options: str, program: Sequence[str] = PYTHON_SERVER) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}/v1"
        self.log = (model.parent / f"{port}.log").open("wb")
        command = [*program, "--model", str(model), "--host", "127.0.0.1", "--port", port, *options]
        self.process = Process(command, stdout=self.log, stderr=self.log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def opened(self) -> Server:
        for _ in range(600):
            try:
                return Server(self.url)
            except QuantlabError as error:
                assert self.process.poll() is None, Path(self.log.name).read_text()
                assert "no server answers" in error.message or "loaded" in error.hint, error.message
                time.sleep(0.1)
        raise AssertionError("the server does not start")

    def end(self) -> None:
        self.process.end()
        self.log.close()


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    serving = Serving(model, "--interrupt_requests", "false")
    try:
        client = serving.opened()
        yield client
        client.close()
    finally:
        serving.end()


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, tuple[np.ndarray, list[int], str]]:
    """Prompt ids, new ids and their text by our own backend."""
    from quantlab.runtime.llamacpp import opened

    found = {}
    with opened(model, Capacity(n_ctx=512), threads=1) as backend:
        for prompt in PROMPTS:
            backend.reset()
            ids = backend.encode(prompt, bos=True)
            tokens = backend.generate([Request(ids, 40)])[0].tokens
            found[prompt] = ids, tokens, backend.decode(tokens)
    return found


@needs_packages
def test_who_answers(server: Server) -> None:
    info = server.describe()
    assert (info.kind, info.model, info.prompts, info.has_counters) == ("llama_cpp.server", "stories", "text", False)
    assert info.version == importlib.import_module("llama_cpp").__version__


@needs_packages
def test_greedy_text_is_that_of_our_backend(
    server: Server, expected: dict[str, tuple[np.ndarray, list[int], str]]
) -> None:
    server.reset()
    requests = [TextRequest(prompt, 40, arrival_s=0.02 * i) for i, prompt in enumerate(PROMPTS)]
    for prompt, got in zip(PROMPTS, server.generate(requests), strict=True):
        ids, tokens, text = expected[prompt]
        assert got.outcome == "finished", got.error
        assert got.text == text
        # This server tells no usage; where every token is a piece of text an event is a token.
        assert (got.counted_by, len(got.times_s), got.finish_reason) == ("events", len(tokens), "length")
        assert server.encode(prompt).tolist() == ids.tolist()
    assert server.counters()["finished"] == len(PROMPTS)


@needs_packages
def test_token_ids_go_as_text(server: Server, expected: dict[str, tuple[np.ndarray, list[int], str]]) -> None:
    ids, _, text = expected[PROMPTS[0]]
    (got,) = server.generate([Request(ids, 40)])
    assert (got.outcome, got.text) == ("finished", text)


@needs_packages
def test_a_prompt_beyond_the_context_is_refused(server: Server) -> None:
    long, short = server.generate([TextRequest("Once upon a time " * 400, 4), TextRequest("Once", 4)])
    assert (short.outcome, len(short.times_s)) == ("finished", 4)
    assert long.outcome != "finished"
    assert not long.times_s
    assert long.error


@pytest.mark.skipif(LLAMA_SERVER is None, reason="needs llama-server on the PATH")
def test_llama_server_counts_as_we_do(model: Path, expected: dict[str, tuple[np.ndarray, list[int], str]]) -> None:
    assert LLAMA_SERVER is not None
    options = ["--alias", "stories", "-c", "2048", "-np", "4", "-t", "1", "--metrics", "--no-warmup"]
    serving = Serving(model, *options, program=[LLAMA_SERVER])
    try:
        client = serving.opened()
        info = client.describe()
        assert (info.kind, info.n_ctx, info.prompts, info.ignores_eos) == ("llama-server", 512, "token ids", True)
        requests = [Request(expected[prompt][0], 40, arrival_s=0.02 * i) for i, prompt in enumerate(PROMPTS)]
        got = client.generate([*requests, TextRequest(PROMPTS[0], 40)])
        for prompt, generation in zip([*PROMPTS, PROMPTS[0]], got, strict=True):
            ids, tokens, text = expected[prompt]
            assert (generation.outcome, generation.text) == ("finished", text)
            assert (generation.counted_by, len(generation.times_s)) == ("server", len(tokens))
            assert generation.prompt_tokens == len(ids)
        counters = client.counters()
        for ours, theirs in (
            ("prompt_tokens", "prompt_tokens"),
            ("new_tokens", "new_tokens"),
            ("cached_tokens", "prefix_hits"),
        ):
            assert counters[ours] == counters[f"server_{theirs}"]
        client.close()
    finally:
        serving.end()


@needs_packages
def test_a_server_that_interrupts_has_cut_answers(model: Path) -> None:
    """The default of this server: a new request ends the stream of the one before."""
    serving = Serving(model)
    try:
        client = serving.opened()
        got = client.generate([TextRequest("Once upon a time", 450, arrival_s=0.01 * i) for i in range(4)])
        # Which of them comes last is the server's.
        assert sorted(g.outcome for g in got) == ["cut"] * 3 + ["finished"]
        whole = max(len(g.times_s) for g in got if g.outcome == "finished")
        assert all(len(g.times_s) < whole and g.error for g in got if g.outcome == "cut")
        client.close()
    finally:
        serving.end()


@needs_packages
def test_killed_in_the_middle(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving(model, "--interrupt_requests", "false")
    read, events = Answer.read, itertools.count(1)

    def killing(self: Answer, data: bytes, now_s: float) -> None:
        read(self, data, now_s)
        # Answers come one after the other: the second is on its way.
        if next(events) == 600:
            os.kill(serving.process.pid, signal.SIGKILL)

    try:
        client = serving.opened()
        monkeypatch.setattr(Answer, "read", killing)
        requests = [TextRequest("Once upon a time", 480) for _ in range(20)]
        # These come when the server is gone.
        requests += [TextRequest("Once", 4, arrival_s=3) for _ in range(5)]
        got = client.generate(requests)
        counters = client.counters()
        client.close()
    finally:
        serving.end()
    assert all(g.outcome in ("finished", "cut", "connection_error") for g in got)
    assert [g.outcome for g in got[20:]] == ["connection_error"] * 5
    assert sum(g.outcome == "finished" for g in got) == 1
    (partial,) = (g for g in got if g.outcome == "cut" and g.times_s)
    assert 100 < len(partial.times_s) < 480
    assert partial.text
    assert all(g.error for g in got if g.outcome != "finished")
    assert counters["requests"] == 25 == sum(counters[name] for name in OUTCOMES)
    assert counters["new_tokens"] == sum(len(g.times_s) for g in got)
