"""Logs as other programs write them: LiteLLM, vLLM, Langfuse, the Anthropic API, Alpaca prompts, agents with tools.

They were written after the detector, in styles that it had not seen, and run once before it was mended.
"""

from __future__ import annotations

import datetime
import email.utils
import json
import random
import uuid
from typing import Any

Line = Any
N = 30
_START = datetime.datetime(2026, 2, 3, 7, 58, 41, tzinfo=datetime.UTC)
_TASKS = [
    "Rewrite this sentence so that it sounds friendlier: send the file now.", "List the steps for closing the books.",
    "Which of the two plans is cheaper over three years?", "Turn the notes below into minutes of a meeting.",
    "What changed in version 4 of the handbook?", "Give me three titles for a talk about soil.",
    "Translate 'the meeting is cancelled' into Polish.", "How do I undo the last commit without losing my work?",
    "Draft an answer to the landlord about the broken heating.", "Why is the sky darker at high altitude?",
]  # fmt: skip
_GUIDE = """You write for people who are busy. Begin with the answer and give the reasons after it.
Never use a word of which you are not sure that the reader knows it; explain the ones that you cannot avoid.
If a request cannot be met, say which part cannot, and offer the part that can.
Figures carry their unit and the year to which they belong, and a source where one was given to you.
Lists have no more than seven entries; longer ones are grouped under short headings.
Quote people exactly or not at all, and keep what they said apart from what you conclude.
Do not guess at names, dates, addresses or amounts: ask for them, once, all in one question.
Write numbers up to twelve as words unless they stand in a table or before a unit.
When the user pastes a table, keep its columns in their order and say so if one was dropped.
If two instructions contradict each other, follow the later one and tell the user that you did.
"""


def held_out() -> dict[str, tuple[set[str], list[Line]]]:
    """Name -> (the causes that it has, its requests); no cause where nothing varies too early."""
    return {
        "litellm, date of the mail kind": ({"timestamp"}, _litellm(lambda now: f"Server date: {now}\n")),
        "vllm, conversation": ({"id"}, _vllm(random.Random(1), planted=True)),
        "agent, tools by a set": ({"tool order"}, _agent(shuffled=True)),
        "agent, clock in a tool": ({"timestamp"}, _agent(shuffled=False)),
        "alpaca, a person in the story": ({"user name"}, _alpaca()),
        "langfuse, scores of chunks": ({"number"}, _langfuse()),
        "anthropic, memories in any order": ({"order"}, _anthropic()),
        "litellm, nothing": (set(), _litellm(lambda now: "")),
        "vllm, nothing": (set(), _vllm(random.Random(2), planted=False)),
    }


def _litellm(first: Any) -> list[Line]:
    rng, lines = random.Random(3), []
    for i in range(N):
        at = _START + datetime.timedelta(seconds=83 * i)
        messages = [
            {"role": "system", "content": first(email.utils.format_datetime(at, usegmt=True)) + _GUIDE},
            {"role": "user", "content": f"{rng.choice(_TASKS)} ({i})"},
        ]
        lines.append(
            {"id": f"chatcmpl-{rng.getrandbits(60):x}", "call_type": "acompletion", "model": "gpt-4o-mini",
             "startTime": at.timestamp(), "messages": messages, "response": {"choices": []}, "stream": True}
        )  # fmt: skip
    return lines


def _vllm(rng: random.Random, *, planted: bool) -> list[Line]:
    """Text lines of `--enable-log-requests`, other lines of the server between them."""
    lines = []
    for i in range(N):
        at = _START + datetime.timedelta(seconds=5 * i)
        clock = f"{at:%m-%d %H:%M:%S}"
        own = f"conversation {uuid.UUID(int=rng.getrandbits(128), version=4)}\n" if planted else ""
        prompt = f"<|im_start|>system\n{own}{_GUIDE}<|im_end|>\n<|im_start|>user\n{rng.choice(_TASKS)} It's no. {i}"
        prompt += "<|im_end|>\n<|im_start|>assistant\n"
        lines.append(
            f"INFO {clock} [logger.py:42] Received request chatcmpl-{rng.getrandbits(128):032x}: prompt: {prompt!r}, "
            "params: SamplingParams(n=1, temperature=0.7, max_tokens=512, stop=[]), prompt_token_ids: None, "
            "prompt_embeds shape: None, lora_request: None."
        )
        lines.append(f'INFO:     127.0.0.1:{40000 + i} - "POST /v1/chat/completions HTTP/1.1" 200 OK')
    return lines


def _agent(*, shuffled: bool) -> list[Line]:
    rng, lines = random.Random(4), []
    for i in range(N):
        clock = f" It is {_START + datetime.timedelta(minutes=i):%H:%M} now." if not shuffled else ""
        tools = [
            {"name": name, "description": about, "input_schema": {"type": "object", "properties": {
                "path": {"type": "string", "description": "Absolute, without a trailing slash."}}}}
            for name, about in [
                ("calendar", f"Looks up free slots in a calendar.{clock}"),
                ("read_file", "Reads a text file and returns its lines with their numbers."),
                ("list_dir", "Lists a directory, the newest entry first, with sizes in bytes."),
                ("run_tests", "Runs the tests below a path and returns the names of those that fail."),
                ("grep", "Finds a regular expression in all files that are under version control."),
            ]
        ]  # fmt: skip
        if shuffled:
            rng.shuffle(tools)
        call = {"id": f"call_{rng.getrandbits(64):x}", "type": "function",
                "function": {"name": "grep", "arguments": '{"path": "/src"}'}}  # fmt: skip
        lines.append(
            {"model": "local", "tools": tools, "tool_choice": "auto", "messages": [
                {"role": "system", "content": _GUIDE},
                {"role": "user", "content": f"{rng.choice(_TASKS)} ({i})"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": f"/src/a.py:{i}: found"},
            ]}
        )  # fmt: skip
    return lines


def _alpaca() -> list[Line]:
    rng = random.Random(5)
    people = ["Ines Duarte", "Jonas Feld", "Keiko Mori", "Luca Bassi", "Mira Thal", "Omar Said"]
    head = "Below is an instruction that describes a task. Write a response that completes the request."
    return [
        f"{head}\n\nThis is a chat with {rng.choice(people)}, who works in accounting.\n\n{_GUIDE}\n"
        f"### Instruction:\n{rng.choice(_TASKS)} ({i})\n\n### Response:\n"
        for i in range(N)
    ]


def _langfuse() -> list[Line]:
    rng, lines = random.Random(6), []
    chunks = _GUIDE.split("\n")[:5]
    for i in range(N):
        found = "\n".join(f"[score {rng.uniform(0.6, 0.9):.4f}] {chunk}" for chunk in chunks)
        text = f"Answer from these passages only.\n{found}\n\nQuestion: {rng.choice(_TASKS)} ({i})"
        lines.append(
            {"timestamp": f"2026-02-03T08:{i:02}:00Z", "name": "qa", "level": "DEFAULT",
             "input": {"messages": [{"role": "user", "content": text}]}, "output": {"content": "..."}}
        )  # fmt: skip
    return lines


def _anthropic() -> list[Line]:
    rng, lines = random.Random(7), []
    memories = [
        "The user keeps bees and sells honey on a market.", "The user prefers metric units and short answers.",
        "The user has a daughter who learns the cello.", "The user's laptop runs Linux and is twelve years old.",
        "The user is allergic to walnuts and asks for recipes without them.", "The user commutes by train on weekdays.",
    ]  # fmt: skip
    for i in range(N):
        rng.shuffle(memories)
        known = "\n".join(f"* {memory}" for memory in memories)
        system = [
            {"type": "text", "text": f"What you remember:\n{known}\n"},
            {"type": "text", "text": _GUIDE, "cache_control": {"type": "ephemeral"}},
        ]
        lines.append(
            {"model": "claude", "max_tokens": 1024, "system": system, "messages": [
                {"role": "user", "content": [{"type": "text", "text": f"{rng.choice(_TASKS)} ({i})"}]}]}
        )  # fmt: skip
    return lines


def log_text(lines: list[Line]) -> str:
    """The log as a file holds it: text lines as they are, the others as JSON."""
    plain = [line if isinstance(line, str) and line.startswith("INFO") else json.dumps(line) for line in lines]
    return "".join(f"{line}\n" for line in plain)
