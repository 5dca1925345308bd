"""Logs of requests: JSON lines of OpenAI messages, prompts or texts, or the text log of vLLM, as the segments that a
chat template would write.

A segment is a sentence, a line, or one tool, with the part of the request that it stands in. How a server's template
frames them is not known: tools come first, then the messages in their order, as most templates have it.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from quantlab.core.errors import QuantlabError
from quantlab.core.files import os_error

# Where a request is wrapped: batch files, proxies' logs.
_WRAPPERS = ("body", "request", "params", "kwargs", "payload", "input")
_TEXTS = ("prompt", "text", "input", "content")
_TOOLS = ("tools", "functions")
# After a line, and after a sentence before the next begins; `5.` of a date or a list is no end.
_CUT = re.compile(r"(?<=\n)|(?<=[。！？])(?!\n)|(?<!\b\d\.)(?<!\b\d\d\.)(?<=[.!?])(?=[ \t]+\S)")
# A request in the text log of vLLM (`--enable-log-requests`): its prompt as Python writes a string.
_VLLM = re.compile(
    r"\b(?:Received request|Request) \S+ ?(?:details)?: prompt: "
    r"('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"), (?:params|prompt_token_ids): "
)


class Segment(NamedTuple):
    """A piece of a request: `part` is `tools`, a role, or `prompt`; `message` counts the messages from 0."""

    part: str
    message: int
    text: str


Request = list[Segment]

# What a line of JSON begins with here.
_JSON = ("{", "[", '"')


def read_log(path: Path) -> list[Request]:
    """The requests of a log, in order; QuantlabError that names the line for what is none."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise os_error(error, path) from error
    except UnicodeDecodeError as error:
        raise QuantlabError(f"`{path}` is not UTF-8 text: byte {error.start}", "convert it to UTF-8") from error
    requests = _of_server(text) or _of_lines(text, path)
    if not any(requests):
        raise QuantlabError(f"`{path}` holds no requests", "give a log with one request a line")
    return requests


def _of_server(text: str) -> list[Request]:
    """The requests that vLLM wrote; none where it is another log. What else a server writes is no request."""
    requests = []
    for prompt in _VLLM.findall(text):
        with contextlib.suppress(ValueError, SyntaxError):
            requests.append(list(segments("prompt", 0, ast.literal_eval(prompt))))
    return requests


def _of_lines(text: str, path: Path) -> list[Request]:
    requests = []
    # A log of objects with a line that is none is harmed; it has no plain prompts.
    of_objects = text.lstrip()[:1] == "{"
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            if of_objects and line.lstrip()[:1] not in _JSON:
                raise ValueError("no JSON, as the first line is")
            found = _segments(_value(line))
            requests.append([Segment(_encodable(s.part), s.message, _encodable(s.text)) for s in found])
        except (ValueError, RecursionError) as error:
            raise QuantlabError(f"line {number} of `{path}`: {error}", "correct or remove the line") from error
    return requests


def _encodable(text: str) -> str:
    """JSON can hold halves of characters, as escapes, which no output takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def segments(part: str, message: int, text: str) -> Iterator[Segment]:
    """A text cut into its lines and sentences."""
    for piece in _CUT.split(text):
        if piece:
            yield Segment(part, message, piece)


def _value(line: str) -> Any:
    """The JSON of a line; a line that is none is a prompt."""
    if line.lstrip()[:1] not in _JSON:
        return line.strip()
    return json.loads(line)


def _segments(value: Any) -> Iterator[Segment]:
    if isinstance(value, str):
        yield from segments("prompt", 0, value)
        return
    if isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict):
        raise ValueError("neither a text nor an object")
    request = _unwrapped(value)
    for name in _TOOLS:
        for tool in tools if isinstance(tools := request.get(name), list) else []:
            yield Segment("tools", -1, json.dumps(tool, ensure_ascii=False) + "\n")
    messages = _messages(request)
    if messages is None:
        raise ValueError(f"no messages and no prompt; it has {', '.join(map(str, list(value)[:8])) or 'nothing'}")
    for number, (role, text) in enumerate(messages):
        if role == "prompt":
            yield from segments(role, number, text)
        else:
            yield Segment(role, number, f"<|{role}|>\n")
            yield from segments(role, number, text if text.endswith("\n") else text + "\n")


def _unwrapped(value: dict[str, Any]) -> dict[str, Any]:
    """The request itself, which proxies and batch files put into an object of their own."""
    for _ in range(3):
        if any(isinstance(value.get(name), str | list) for name in ("messages", *_TEXTS)):
            break
        value = next((value[name] for name in _WRAPPERS if isinstance(value.get(name), dict)), value)
    return value


def _messages(request: dict[str, Any]) -> list[tuple[str, str]] | None:
    """(role, text) of each message; None where there are none."""
    found: list[tuple[str, str]] = []
    if isinstance(request.get("system") or request.get("instructions"), str | list):
        found.append(("system", _text(request.get("system") or request.get("instructions"))))
    listed = request.get("messages")
    if listed is None and isinstance(request.get("input"), list):
        listed = request["input"]
    if isinstance(listed, list):
        return found + [_message(message) for message in listed]
    for name in _TEXTS:
        if isinstance(request.get(name), str):
            return [*found, ("user", request[name])] if found else [("prompt", request[name])]
    return None


def _message(message: Any) -> tuple[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("a message without a role")
    text = _text(message.get("content"))
    if message.get("tool_calls"):
        text += json.dumps(message["tool_calls"], ensure_ascii=False)
    role = "system" if message["role"] == "developer" else message["role"]
    return role, text


def _text(content: Any) -> str:
    """The text of a message, whose content may be a list of parts; what is no text stands as its JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False)
    return "".join(
        part if isinstance(part, str)
        else part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str)
        else json.dumps(part, ensure_ascii=False)
        for part in content
    )  # fmt: skip
