"""The prompts of a scenario: which parts of them are shared, and in which order the parts stand.

Parts are slices of real text, joined as token ids, so that lengths are exact and nothing depends on what a tokenizer
does at the seams. The first `prime` requests of a stream fill the cache; the others are measured.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quantlab.bench.prefix_cache.spec import PrefixCacheSpec
from quantlab.bench.traces import MOONCAKE_BLOCK_TOKENS, TraceShape, read_trace
from quantlab.bench.workloads import BUILTIN
from quantlab.core.corpus import load_text
from quantlab.core.errors import UsageError
from quantlab.runtime.backend import Tokens

# The answer of the model to a prompt, as many tokens as the bench asks for.
Answer = Callable[[Tokens], list[int]]
_REQUESTS, _TRACE_REQUESTS, _SIMULATED_TRACE_REQUESTS = 8, 32, 2000
_CONVERSATIONS = 2
_DOCUMENTS, _RETRIEVED = 4, 3
# BOS and a time stamp, whatever the tokenizer makes of it.
_HEAD_TOKENS = 48
_NOW = datetime.datetime(2026, 1, 5, 9, 13, 7)
_BETWEEN = datetime.timedelta(seconds=47)


class Stream(NamedTuple):
    """Prompts in their order, and how many of the first ones only fill the cache."""

    name: str
    prompts: list[Tokens]
    prime: int


class Texts:
    """Slices of built-in text that follow one another, as token ids; `bos` begins every prompt where it is not None."""

    def __init__(self, encode: Callable[[str], Tokens], bos: int | None, seed: int) -> None:
        self.say = encode
        self._ids = encode("\n\n".join(load_text(name).raw for name in BUILTIN))
        self._at = seed * 7919 % len(self._ids)
        self.head = np.array([] if bos is None else [bos], np.int32)

    def take(self, n: int) -> Tokens:
        """The next `n` ids, from the start again at the end."""
        found = np.take(self._ids, range(self._at, self._at + n), mode="wrap").astype(np.int32)
        self._at = (self._at + n) % len(self._ids)
        return found


def count(spec: PrefixCacheSpec) -> int:
    """How many requests of a stream are measured."""
    of_traces = _SIMULATED_TRACE_REQUESTS if spec.simulate else _TRACE_REQUESTS
    return spec.requests or (of_traces if spec.trace is not None else _REQUESTS)


def lengths(spec: PrefixCacheSpec) -> list[int]:
    """Upper limits of the lengths of the prompts."""
    if spec.trace is not None:
        scale = spec.block_tokens / MOONCAKE_BLOCK_TOKENS
        rows = read_trace(Path(spec.trace), TraceShape(length_scale=scale, limit=count(spec)))
        return [row.prompt_tokens for row in rows]
    turns = -(-count(spec) // _CONVERSATIONS) + 1 if "chat" in spec.chosen() else 1
    return [spec.prefix_tokens + turns * (spec.suffix_tokens + spec.new_tokens) + _HEAD_TOKENS]


def stream(spec: PrefixCacheSpec, name: str, texts: Texts, answer: Answer) -> Stream:
    """The stream of one scenario; `answer` is asked where later prompts hold earlier answers."""
    if name == "chat":
        return _chat(spec, texts, answer)
    rng = np.random.default_rng(spec.seed)
    quarter = spec.prefix_tokens // 4
    system, documents = texts.take(spec.prefix_tokens), [texts.take(quarter) for _ in range(_DOCUMENTS)]
    prompts = []
    for i in range(count(spec) + 1):
        own = texts.take(spec.suffix_tokens)
        stamp = texts.say(f"Current time: {_NOW + i * _BETWEEN:%Y-%m-%d %H:%M:%S}.\n")
        chosen = [documents[d] for d in rng.permutation(_DOCUMENTS)[:_RETRIEVED]]
        parts = {
            "system-prompt": [system, own],
            # An instruction and its examples, always in one order.
            "few-shot": [system[:quarter], *documents[:_RETRIEVED], own],
            "rag": [system[:quarter], *chosen, own],
            "timestamp-first": [stamp, system, own],
            "timestamp-last": [system, stamp, own],
        }[name]
        prompts.append(np.concatenate([texts.head, *parts]))
    return Stream(name, prompts, 1)


def _chat(spec: PrefixCacheSpec, texts: Texts, answer: Answer) -> Stream:
    """Conversations in turn: each prompt is the one before it, the answer to that, and what the user says next."""
    turns = -(-count(spec) // _CONVERSATIONS) + 1
    system = np.concatenate([texts.head, texts.take(spec.prefix_tokens)])
    history = [system] * _CONVERSATIONS
    prompts: list[Tokens] = []
    for _ in range(turns):
        for i in range(_CONVERSATIONS):
            prompts.append(np.concatenate([history[i], texts.take(spec.suffix_tokens)]))
            history[i] = np.concatenate([prompts[-1], answer(prompts[-1])]).astype(np.int32)
    return Stream("chat", prompts[: count(spec) + _CONVERSATIONS], _CONVERSATIONS)


def recorded(spec: PrefixCacheSpec, n_vocab: int, n_ctx: int) -> Stream:
    """The prompts of a trace: one block of ours for each of its ids, made of random tokens that the id names.

    UsageError for a trace without ids.
    """
    assert spec.trace is not None
    shape = TraceShape(
        length_scale=spec.block_tokens / MOONCAKE_BLOCK_TOKENS,
        max_prompt_tokens=n_ctx,
        limit=count(spec),
    )
    prompts = []
    for row in read_trace(Path(spec.trace), shape):
        if row.hash_ids is None:
            raise UsageError(
                f"`{spec.trace}` does not tell which requests share a prefix", "give a trace with hash_ids (Mooncake)"
            )
        blocks = [_block(spec, n_vocab, hash_id) for hash_id in row.hash_ids]
        prompts.append(np.concatenate(blocks)[: row.prompt_tokens])
    return Stream("trace", prompts, 0)


def _block(spec: PrefixCacheSpec, n_vocab: int, hash_id: int) -> Tokens:
    return np.random.default_rng([spec.seed, hash_id % 2**64]).integers(0, n_vocab, spec.block_tokens, dtype=np.int32)
