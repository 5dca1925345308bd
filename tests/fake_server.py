"""An OpenAI-compatible server that answers as a test tells it to, on a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "me"}]}


class Reply:
    """What goes back on one connection; every `raw` is a packet and an HTTP chunk of its own."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.closed = False

    async def head(self, status: int = 200, kind: str = "text/event-stream", **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", "Transfer-Encoding: chunked"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode())
        await self.writer.drain()

    async def raw(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writer.drain()

    async def event(self, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        await self.raw(f"data: {text}\n\n".encode())

    async def text(self, text: str, finish: str | None = None, **more: Any) -> None:
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more})

    async def usage(self, prompt: int, new: int, **more: Any) -> None:
        await self.event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": new, **more}})

    async def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def whole(self, status: int, data: Any, kind: str = "application/json", **headers: str) -> None:
        await self.head(status, kind, **headers)
        await self.raw(data.encode() if isinstance(data, str) else json.dumps(data).encode())
        await self.end()

    def close(self) -> None:
        self.closed = True
        self.writer.close()

    def abort(self) -> None:
        self.closed = True
        self.writer.transport.abort()


Script = Callable[[dict[str, Any], Reply], Awaitable[None]]


async def good(body: dict[str, Any], reply: Reply) -> None:
    """As many tokens as are asked for, and their count."""
    await reply.head()
    n = body["max_tokens"]
    for i in range(n):
        await reply.text(f" w{i}", "length" if i == n - 1 else None)
    await reply.usage(len(body.get("prompt", "")), n)
    await reply.event("[DONE]")
    await reply.end()


class FakeServer:
    """`script` answers every POST but the first questions of a Server; `about` are the bodies of GET by path."""

    def __init__(self, script: Script = good, about: dict[str, Any] | None = None, *, probed: Script = good) -> None:
        self.script, self.probed = script, probed
        self.about = {"/v1/models": MODELS, **(about or {})}
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.connections = 0
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def bodies(self) -> list[dict[str, Any]]:
        return [body for path, _, body in self.asked if path.startswith("/v1/") and body]

    def stop(self) -> None:
        """As a process that is killed: every connection is reset."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(10)

    def _serve(self) -> None:
        self._loop.run_until_complete(self._run())
        self._loop.close()

    async def _run(self) -> None:
        self._stopped = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=2000)
        self.port = server.sockets[0].getsockname()[1]
        self._up.set()
        await self._stopped.wait()
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while await self._one(reader, Reply(writer)):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, reply: Reply) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        method, path, _ = first.split(" ")
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        body = json.loads(data) if data else {}
        self.asked.append((path, headers, body))
        if method == "GET" or path in self.about:
            page = self.about.get(path)
            if isinstance(page, tuple):
                await reply.whole(*page)
            elif page is None:
                await reply.whole(404, {"error": {"message": "no such page"}})
            else:
                await reply.whole(200, page, "text/plain" if isinstance(page, str) else "application/json")
        elif body.get("max_tokens") == 2:
            await self.probed(body, reply)
        else:
            await self.script(body, reply)
        return not reply.closed
