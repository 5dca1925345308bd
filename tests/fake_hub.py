"""A Hugging Face Hub on loopback, as far as downloads need it; it can break off, stall and lie."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """`files` of one repository `org/name`; what ends in .safetensors is kept as the Hub keeps large files."""

    files: dict[str, bytes]
    repo: str = "org/name"
    commit: str = COMMIT
    # The response to everything: (status, X-Error-Code).
    refuses: tuple[int, str] | None = None
    # File name -> bytes after which the connection breaks, once for each entry.
    breaks: dict[str, list[int]] = field(default_factory=dict)
    # File name -> bytes after which the server falls silent until `released`.
    stalls: dict[str, int] = field(default_factory=dict)
    released: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)
    # File name -> bytes sent instead of the true ones.
    lies: dict[str, bytes] = field(default_factory=dict)
    # (method, path, Range header)
    log: list[tuple[str, str, str | None]] = field(default_factory=list)

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(_Handler):
            fake = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def ranges(self, name: str) -> list[str | None]:
        """The Range headers of all GETs of a file."""
        return [asked for method, path, asked in self.log if method == "GET" and path.endswith("/" + name)]


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _is_large(name: str) -> bool:
    return name.endswith(".safetensors")


class _Handler(BaseHTTPRequestHandler):
    fake: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        fake, path = self.fake, urlparse(self.path).path
        fake.log.append((self.command, path, self.headers.get("Range")))
        model = f"/api/models/{fake.repo}"
        if fake.refuses:
            status, code = fake.refuses
            self.reply(status, b"{}", {"X-Error-Code": code})
        elif path.startswith(f"{model}/tree/"):
            self.json([self.tree_entry(name) for name in fake.files])
        elif path in (model, f"{model}/revision/main", f"{model}/revision/{fake.commit}"):
            siblings = [self.sibling(name) for name in fake.files]
            self.json({"_id": "1", "id": fake.repo, "sha": fake.commit, "private": False, "siblings": siblings})
        elif path.startswith(f"{model}/revision/"):
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(f"/{fake.repo}/resolve/{fake.commit}/"):
            self.file(path.rpartition("/")[2])
        else:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def file(self, name: str) -> None:
        if name not in self.fake.files:
            return self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.fake.commit})
        true = self.fake.files[name]
        data = self.fake.lies.get(name, true)
        etag = hashlib.sha256(true).hexdigest() if _is_large(name) else git_sha1(true)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": self.fake.commit, "Accept-Ranges": "bytes"}
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if self.headers.get("Range"):
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.reply(206 if self.headers.get("Range") else 200, data[start:], headers, name)
        return None

    def reply(self, status: int, body: bytes, headers: dict[str, str], name: str = "") -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if breaks := self.fake.breaks.get(name):
            self.wfile.write(body[: breaks.pop(0)])
            self.close_connection = True
        elif name in self.fake.stalls:
            self.wfile.write(body[: self.fake.stalls.pop(name)])
            self.wfile.flush()
            self.fake.stalled.set()
            self.fake.released.wait(60)
            self.close_connection = True
        else:
            self.wfile.write(body)

    def json(self, value: Any) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def tree_entry(self, name: str) -> dict[str, Any]:
        data = self.fake.files[name]
        large = {"lfs": _lfs(data)} if _is_large(name) else {}
        return {"type": "file", "path": name, "size": len(data), "oid": git_sha1(data), **large}

    def sibling(self, name: str) -> dict[str, Any]:
        data = self.fake.files[name]
        large = {"lfs": {**_lfs(data), "sha256": hashlib.sha256(data).hexdigest()}} if _is_large(name) else {}
        return {"rfilename": name, "size": len(data), "blobId": git_sha1(data), **large}


def _lfs(data: bytes) -> dict[str, Any]:
    return {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
