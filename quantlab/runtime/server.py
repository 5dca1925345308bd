"""A server with an OpenAI-compatible endpoint: requests are sent when they are due and streamed back.

The load is open-loop: an arrival never waits for a completion, nor for a free connection, so that a queue at the server
cannot hide (coordinated omission). Nothing is sent twice: a rejected request stays rejected, with what the server said.
Decoding is greedy, as `generate` of a Backend. Not measured apart: HTTP and the network, which are in every time stamp.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import msgspec
import numpy as np

from quantlab.core.errors import QuantlabError, UsageError, unknown_name
from quantlab.runtime.backend import Request, Tokens
from quantlab.runtime.server_http import KEY_VARIABLE, Connections, reason
from quantlab.runtime.server_kind import (
    DIALECTS,
    Message,
    Prompt,
    PromptForm,
    ServerInfo,
    body,
    counters_in,
    gauge_in,
    recognize,
)
from quantlab.runtime.server_stream import OUTCOMES, ServerGeneration

_LOADING = "wait until the model is loaded"
_START = "start the server, and check host, port and the path /v1"
_TICK_S = 0.005
_OPEN_FILES = 65536
# In order of preference; every vocabulary has the three ids.
_PROBES: dict[PromptForm, Prompt] = {
    "token ids": [1, 1, 1],
    "text": "Hello",
    "chat": [{"role": "user", "content": "Hi"}],
}


@dataclass(frozen=True)
class TextRequest:
    """A request for a server alone: a text, or the messages of a chat ({"role": ..., "content": ...})."""

    prompt: str | Sequence[Message]
    max_new_tokens: int
    ignore_eos: bool = True
    arrival_s: float = 0.0


class Server:
    """One model of a server, opened by asking it who it is and for two tokens.

    `model` is the name at the server, needed where it serves several. The key of OPENAI_API_KEY is sent, and kept out
    of every result. Raises QuantlabError where no server answers, UsageError for a wrong URL or name.
    """

    def __init__(self, url: str, *, model: str | None = None, timeout_s: float = 600.0) -> None:
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise UsageError(f"a timeout of {timeout_s} s", "give a number above zero")
        self._timeout_s = timeout_s
        self._connections = Connections(url)
        self._tally: Counter[str] = Counter()
        self._before: dict[str, int] = {}
        self._runner: asyncio.Runner | None = asyncio.Runner()
        try:
            self._info = self._runner.run(self._open(model))
            self.reset()
        except BaseException:
            self.close()
            raise

    def describe(self) -> ServerInfo:
        """What answers."""
        return self._info

    def encode(self, text: str) -> Tokens:
        """The ids that /v1/completions makes of `text`, BOS included; QuantlabError where the server does not tell."""
        return np.asarray(self._run(self._convert("tokenize", text)), np.int32)

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """The text of ids by the server's own tokenizer, which may write control tokens out or leave them out."""
        return str(self._run(self._convert("detokenize", np.asarray(tokens).tolist())))

    def generate(self, requests: Sequence[Request | TextRequest]) -> list[ServerGeneration]:
        """Send each request at its arrival time; returns when every one has an outcome, in the order of `requests`."""
        for i, request in enumerate(requests):
            if not len(request.prompt):
                raise UsageError(f"request {i} has no prompt", "give at least one token")
            if request.max_new_tokens < 1 or not (request.arrival_s >= 0 and math.isfinite(request.arrival_s)):
                raise UsageError(
                    f"request {i}: {request.max_new_tokens} tokens at {request.arrival_s} s",
                    "ask for at least one token, at a time from 0 on",
                )
        prompts = [self._prompt(request) for request in requests]
        _allow_open_files()
        generations: list[ServerGeneration] = self._run(self._send(requests, prompts))
        for generation in generations:
            self._tally[generation.outcome] += 1
            self._tally["requests"] += 1
            self._tally["new_tokens"] += len(generation.times_s)
            self._tally["prompt_tokens"] += generation.prompt_tokens or 0
            self._tally["cached_tokens"] += generation.cached_tokens or 0
        return generations

    def counters(self) -> dict[str, int]:
        """Requests by outcome and tokens since `reset`, and as `server_...` the server's own, other traffic included.

        Prompt tokens are those that the server counted. `client_lag_us` is the longest that this process was late to
        look at its connections: what it adds to a time stamp at worst.
        """
        names = ("requests", *OUTCOMES, "prompt_tokens", "cached_tokens", "new_tokens", "client_lag_us")
        after = self._run(self._read_counters())
        grown = {name: after[name] - before for name, before in self._before.items() if name in after}
        return {name: self._tally[name] for name in names} | {n: grown[n] for n in grown if grown[n] >= 0}

    def accept_length(self) -> float | None:
        """Tokens of a verify as a gauge of the server has it now: of its last steps alone; None where it has none."""
        gauge = DIALECTS[self._info.kind].accept_length
        page = self._run(self._about("metrics")) if gauge and self._info.has_counters else None
        return gauge_in(page, gauge) if isinstance(page, str) else None

    def reset(self) -> None:
        """Set the counters to zero. The server keeps its prefix cache."""
        self._tally.clear()
        self._before = self._run(self._read_counters())

    def close(self) -> None:
        """Close the connections; the server goes on. Calling it again does nothing."""
        if self._runner is not None:
            with contextlib.suppress(Exception):
                self._runner.run(self._connections.close())
            self._runner.close()
            self._runner = None

    def _run(self, work: Any) -> Any:
        if self._runner is None:
            work.close()
            raise QuantlabError("the server is closed", "open it again")
        return self._runner.run(work)

    async def _send(
        self, requests: Sequence[Request | TextRequest], prompts: Sequence[Prompt]
    ) -> list[ServerGeneration]:
        order = sorted(range(len(requests)), key=lambda i: requests[i].arrival_s)
        start = time.perf_counter()
        generations = [ServerGeneration(start + request.arrival_s) for request in requests]
        async with asyncio.TaskGroup() as group:
            lag = group.create_task(self._watch_lag())
            asked = []
            for i in order:
                early = generations[i].start_s - time.perf_counter()
                if early > 0:
                    await asyncio.sleep(early)
                asked.append(group.create_task(self._ask(prompts[i], requests[i], generations[i])))
            await asyncio.gather(*asked)
            lag.cancel()
        return generations

    async def _ask(self, prompt: Prompt, request: Request | TextRequest, generation: ServerGeneration) -> None:
        path, fields = body(self._info, prompt, request.max_new_tokens, ignore_eos=request.ignore_eos)
        await self._connections.ask(path, fields, generation, self._timeout_s)

    async def _watch_lag(self) -> None:
        while True:
            due = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._tally["client_lag_us"] = max(self._tally["client_lag_us"], round((time.perf_counter() - due) * 1e6))

    def _prompt(self, request: Request | TextRequest) -> Prompt:
        form = self._info.prompts
        if isinstance(request, Request):
            if form == "chat":
                raise QuantlabError(f"`{self._info.url}` takes chats only", "give messages instead of token ids")
            return request.prompt.tolist() if form == "token ids" else self.decode(request.prompt)
        if not isinstance(request.prompt, str):
            return list(request.prompt)
        if form == "chat":
            raise QuantlabError(f"`{self._info.url}` takes chats only", "give messages instead of a text")
        return request.prompt

    async def _open(self, model: str | None) -> ServerInfo:
        card = _chosen(await self._models(), model, self._connections.base)
        kind, version, n_ctx = await recognize(card, self._about)
        counted = bool(DIALECTS[kind].counters) and isinstance(await self._about("metrics"), str)
        info = ServerInfo(self._connections.base, kind, version, card["id"], n_ctx, has_counters=counted)
        failures: list[ServerGeneration] = []
        for form, prompt in _PROBES.items():
            for usage in (True, False):
                info = dataclasses.replace(info, prompts=form, has_usage=usage)
                trial = ServerGeneration(time.perf_counter())
                path, fields = body(info, prompt, 2, ignore_eos=True)
                await self._connections.ask(path, fields, trial, self._timeout_s)
                if trial.outcome == "finished" and not (form == "token ids" and _misread(trial)):
                    return info
                failures.append(trial)
                if trial.outcome not in ("finished", "refused", "server_error"):
                    raise _silent(info, trial)
        raise _silent(info, failures[0])

    async def _models(self) -> list[dict[str, Any]]:
        url = self._connections.base
        try:
            response = await self._connections.fetch(f"{url}/models")
        except httpx.HTTPError as error:
            raise QuantlabError(f"no server answers at `{url}`: {error or type(error).__name__}", _START) from error
        if response.status_code in (401, 403):
            raise QuantlabError(f"`{url}` wants another key", f"set {KEY_VARIABLE} to the key of this server")
        if not response.is_success:
            told = self._connections.redacted(reason(response.content))
            hint = _LOADING if response.status_code == 503 else _START
            raise QuantlabError(f"`{url}/models`: HTTP {response.status_code}: {told}", hint)
        with contextlib.suppress(msgspec.MsgspecError):
            listed = msgspec.json.decode(response.content, type=_Models).data
            return [card for card in listed if isinstance(card.get("id"), str)]
        raise QuantlabError(f"`{url}/models` is no list of models", "give the URL of an OpenAI-compatible server")

    async def _about(self, path: str) -> Any:
        """The JSON or text below the server's root, None where it has none."""
        with contextlib.suppress(httpx.HTTPError):
            response = await self._connections.fetch(f"{self._connections.root}/{path}")
            if response.status_code == 200:
                try:
                    return response.json()
                except ValueError:
                    return response.text
        return None

    async def _read_counters(self) -> dict[str, int]:
        page = await self._about("metrics") if self._info.has_counters else None
        return counters_in(page, DIALECTS[self._info.kind].counters) if isinstance(page, str) else {}

    async def _convert(self, name: Literal["tokenize", "detokenize"], value: Any) -> Any:
        """Ask the server's tokenizer."""
        endpoint = getattr(DIALECTS[self._info.kind], name)
        what = f"`{self._info.url}` ({DIALECTS[self._info.kind].name})"
        if endpoint is None:
            raise QuantlabError(f"{what} has no tokenizer to ask", "give prompts as text")
        path, question, answer, fixed = endpoint
        try:
            response = await self._connections.fetch(
                f"{self._connections.root}/{path}", {"model": self._info.model, question: value, **fixed}
            )
            return response.raise_for_status().json()[answer]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            told = self._connections.redacted(f"{type(error).__name__}: {error}")
            raise QuantlabError(f"{what} does not {name}: {told}", "give prompts as text") from error


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


def _chosen(cards: list[dict[str, Any]], model: str | None, url: str) -> dict[str, Any]:
    names = [card["id"] for card in cards]
    if model is None:
        if len(cards) != 1:
            raise UsageError(f"`{url}` serves {len(cards)} models", f"choose with `--model`: {', '.join(names[:20])}")
        return cards[0]
    for card in cards:
        if card["id"] == model:
            return card
    raise unknown_name("model of the server", model, names)


def _silent(info: ServerInfo, trial: ServerGeneration) -> QuantlabError:
    return QuantlabError(
        f"`{info.url}` does not answer for `{info.model}`: {trial.error or trial.outcome}",
        _LOADING if trial.status == 503 else "see the log of the server",
    )


def _misread(trial: ServerGeneration) -> bool:
    """Whether a server read three token ids as something else; one more is a BOS."""
    return trial.prompt_tokens is not None and trial.prompt_tokens not in (3, 4)


def _allow_open_files() -> None:
    """Allow as many open files as this process may have: each connection is one, and often 1,024 are the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
