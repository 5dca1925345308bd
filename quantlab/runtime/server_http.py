"""HTTP to one server: the questions about it, and streamed answers of which each ends in an outcome, never in an
exception.

Every request in flight has a connection of its own, so that none waits in this process for another. Each connection is
a client of httpx with a pool of one: a shared pool looks through all of its connections whenever one is asked for,
which at 1,500 streams costs 12 ms a request. asyncio sets TCP_NODELAY. No redirect is followed, and no proxy of the
environment is used for an address of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import ipaddress
import json
import math
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx

from quantlab.core.errors import UsageError
from quantlab.runtime.server_stream import Answer, EventStream, Outcome, ServerGeneration, of_status

KEY_VARIABLE = "OPENAI_API_KEY"
# Servers close idle connections after some seconds (uvicorn: 5); one that is about to be closed must not be used again.
_KEEPALIVE_S = 2.0
# Others close them after so many requests (llama-server: 100), some without a word: then the next one fails at once.
_STALE_S = 0.25
# How long the end of a stream may take after its [DONE]; then the connection is given up.
_END_S = 1.0
_ABOUT_TIMEOUT_S = 20.0
_ERROR_BYTES = 1 << 16

_Found = TypeVar("_Found")


class Connections:
    """Clients of one endpoint; `base` ends with /v1 as given by the user, `root` is what is above it."""

    def __init__(self, url: str) -> None:
        self.base = _endpoint(url)
        self.root = self.base.removesuffix("/v1")
        self._key = os.environ.get(KEY_VARIABLE, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise UsageError(f"{KEY_VARIABLE} holds characters that no header can carry", "set it again")
        self._headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self._key:
            self._headers["Authorization"] = f"Bearer {self._key}"
        self._tls = httpx.create_ssl_context()
        self._proxies = not _local(httpx.URL(self.base).host)
        self._idle: list[tuple[httpx.AsyncClient, float]] = []

    def redacted(self, text: str) -> str:
        """A text of the server without our key, which some servers repeat in their errors."""
        return text.replace(self._key, "***") if self._key else text

    async def fetch(self, url: str, question: dict[str, Any] | None = None) -> httpx.Response:
        """GET, or POST of a question, answered as a whole; raises httpx.HTTPError."""
        method = "GET" if question is None else "POST"

        async def send(client: httpx.AsyncClient) -> httpx.Response:
            return await client.request(method, url, json=question, timeout=_ABOUT_TIMEOUT_S)

        return await self._on_a_connection(send, lambda: False)

    async def ask(self, path: str, body: bytes, generation: ServerGeneration, timeout_s: float) -> None:
        """Send one request for a stream and write what comes of it into `generation`."""
        answer = Answer(generation)
        failure: tuple[Outcome, str] = "cut", "the stream ended without a finish_reason"
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                await self._on_a_connection(
                    lambda client: _stream(client, f"{self.base}/{path}", body, answer, deadline),
                    lambda: generation.status is not None,
                )
        except TimeoutError:
            failure = "timed_out", f"no end within {timeout_s:g} s"
        except (httpx.DecodingError, ValueError) as error:
            failure = "server_error", f"not a stream that can be read: {error}"
        except (httpx.HTTPError, OSError) as error:
            # Without a status no answer began.
            failure = "connection_error" if generation.status is None else "cut", _named(error)
        answer.settle()
        if answer.finish is not None and not generation.error:
            generation.outcome = "finished"
        elif not generation.error:
            generation.outcome, generation.error = failure
        generation.error = self.redacted(generation.error)

    async def _on_a_connection(
        self, send: Callable[[httpx.AsyncClient], Awaitable[_Found]], began: Callable[[], bool]
    ) -> _Found:
        """Send; once more on a new connection where one that was used before is found closed, and no answer began."""
        at = time.perf_counter()
        client, used_s = self._take()
        reused = at - used_s < _KEEPALIVE_S
        try:
            return await send(client)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            if not reused or began() or time.perf_counter() - at > _STALE_S:
                raise
            closed, client = client, self._new()
            await closed.aclose()
            return await send(client)
        finally:
            self._idle.append((client, time.perf_counter()))

    async def close(self) -> None:
        """Close every connection."""
        while self._idle:
            await self._idle.pop()[0].aclose()

    def _take(self) -> tuple[httpx.AsyncClient, float]:
        """A client, and when its connection was used last."""
        return self._idle.pop() if self._idle else (self._new(), -math.inf)

    def _new(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers=self._headers,
            verify=self._tls,
            trust_env=self._proxies,
            timeout=httpx.Timeout(None),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S),
        )


async def _stream(client: httpx.AsyncClient, url: str, body: bytes, answer: Answer, deadline: asyncio.Timeout) -> None:
    generation = answer.generation
    generation.sent_s = time.perf_counter()
    async with client.stream("POST", url, content=body) as response:
        generation.status = response.status_code
        plain = response.headers.get("content-type", "").startswith("application/json")
        if not response.is_success or plain:
            await _no_stream(response, generation)
            return
        events = EventStream()
        async for part in response.aiter_bytes():
            now = time.perf_counter()
            if answer.over:
                continue
            for data in events.feed(part):
                answer.read(data, now)
            if answer.over:
                # The end is read too, for a connection in the middle of an answer cannot be used again.
                deadline.reschedule(asyncio.get_running_loop().time() + _END_S)
        if not answer.over:
            for data in events.finish():
                answer.read(data, time.perf_counter())


async def _no_stream(response: httpx.Response, generation: ServerGeneration) -> None:
    """The outcome and reason of an answer that is not streamed."""
    generation.outcome = "server_error" if response.is_success else of_status(response.status_code)
    generation.retry_after_s = _retry_after_s(response.headers.get("retry-after", ""))
    prefix = "no stream: " if response.is_success else f"HTTP {response.status_code}: "
    generation.error = prefix
    body = b""
    async for part in response.aiter_bytes():
        body += part
        if len(body) > _ERROR_BYTES:
            break
    generation.error = prefix + reason(body)


def reason(body: bytes) -> str:
    """What an error's body says, in the forms that servers use."""
    with contextlib.suppress(ValueError):
        told = json.loads(body)
        for key in ("error", "detail", "message"):
            if isinstance(told, dict) and told.get(key):
                told = told[key]
        return (told if isinstance(told, str) else json.dumps(told))[:300]
    return " ".join(body.decode("utf-8", "replace").split())[:300]


def _retry_after_s(header: str) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or a date."""
    if header.isascii() and header.isdigit():
        return float(header)
    with contextlib.suppress(ValueError, TypeError):
        until = email.utils.parsedate_to_datetime(header)
        return max(0.0, (until - datetime.datetime.now(datetime.UTC)).total_seconds())
    return None


def _named(error: BaseException) -> str:
    """The error that is at the bottom: those above it say no more than that all failed."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _endpoint(url: str) -> str:
    """The URL that the paths of the API are appended to; `/v1` where the user gave host and port alone."""
    hint = "give http://HOST:PORT/v1"
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UsageError(f"the URL of the server: {error}", hint) from error
    if parsed.userinfo:
        raise UsageError("the URL of the server holds a user or password", f"put the key in {KEY_VARIABLE}")
    useless = parsed.query or parsed.fragment or not 0 < (parsed.port or 80) < 65536
    if parsed.scheme not in ("http", "https") or not parsed.host or useless:
        raise UsageError(f"`{url}` is no URL of a server", hint)
    base = str(parsed).rstrip("/")
    return base if parsed.path.rstrip("/") else f"{base}/v1"


def _local(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    return False
