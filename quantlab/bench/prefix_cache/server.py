"""A server behind a URL: what its own prefix cache finds of the same streams, and the TTFT that this saves.

Its cache cannot be emptied from here on every kind of server. So each cell has first tokens that no prompt had before:
one for all requests of a warm pass, another for each cold request. The requests come one by one. Not measured: KV bytes
and tiers, of which a server tells nothing, and whether answers are the same, for those tokens change them.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from quantlab.bench import metrics
from quantlab.bench.prefix_cache.measure import Served
from quantlab.bench.prefix_cache.notices import few_repeats, of_server
from quantlab.bench.prefix_cache.rows import Passes, stream_details
from quantlab.bench.prefix_cache.scenarios import Stream, Texts, lengths, stream
from quantlab.bench.prefix_cache.spec import PrefixCacheSpec
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.progress import Progress
from quantlab.core.result import Measurement, ModelInfo, Outcome
from quantlab.runtime.backend import Request, Tokens
from quantlab.runtime.server import Server, TextRequest
from quantlab.runtime.server_stream import ServerGeneration

# Where the server takes no token ids, a character stands for one, and so many for a token.
_CHARACTERS_PER_TOKEN = 4
# What the first tokens of a cell add to a prompt at most.
_SALT_TOKENS = 24


_NOT_MEASURED = {
    "kv_bytes_saved": "no API of a server tells how many bytes of KV a token has",
    "tiers": "a server moves its KV itself",
    "same_answers": "the first tokens of each cell differ, and change the answers",
}


class Found(NamedTuple):
    """Tokens of a pass that the server had, of so many asked; None where it tells neither by usage nor by metrics."""

    by: str
    cached: int | None
    asked: int | None

    @property
    def rate(self) -> float | None:
        """The hit rate."""
        return self.cached / self.asked if self.cached is not None and self.asked else None


class Client:
    """Prompts as the server takes them: token ids, or the characters of a text or of a chat's one message."""

    def __init__(self, server: Server) -> None:
        self._server, info = server, server.describe()
        self._chat, self.units = info.prompts == "chat", _CHARACTERS_PER_TOKEN
        self.bos: int | None = None
        if info.prompts == "token ids":
            with contextlib.suppress(QuantlabError):
                one, two = (server.encode(text).tolist() for text in ("One", "Two of them"))
                self.units, self.bos = 1, one[0] if len(one) > 1 and one[0] == two[0] else None

    def encode(self, text: str) -> Tokens:
        """The ids of a text without BOS, or its characters."""
        if self.units > 1:
            return np.array([ord(character) for character in text], np.int32)
        return self._server.encode(text)[0 if self.bos is None else 1 :]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids or characters."""
        return self._server.decode(ids) if self.units == 1 else "".join(map(chr, ids))

    def salted(self, prompt: Tokens, salt: Tokens) -> Tokens:
        """The prompt with `salt` behind its BOS."""
        at = 0 if self.bos is None else 1
        return np.concatenate([prompt[:at], salt, prompt[at:]]).astype(np.int32)

    def salt(self) -> Tokens:
        """A beginning that no other prompt has, of this run or another."""
        return self.encode(f"{uuid.uuid4().hex[:16]}\n")

    def ask(self, prompt: Tokens, new_tokens: int) -> ServerGeneration:
        """Send one request and wait for its end."""
        request: Request | TextRequest
        if self.units == 1:
            request = Request(prompt, new_tokens)
        else:
            text = self.decode(prompt.tolist())
            request = TextRequest([{"role": "user", "content": text}] if self._chat else text, new_tokens)
        (answer,) = self._server.generate([request])
        if answer.outcome != "finished" or not answer.times_s:
            raise QuantlabError(f"the server did not answer: {answer.error or answer.outcome}", "see its log")
        return answer


def run(spec: PrefixCacheSpec, progress: Progress) -> Iterator[Outcome]:
    """One Outcome for each scenario."""
    session, names = uuid.uuid4().hex[:16], spec.chosen()
    server = Server(spec.model.path, model=spec.served_model)
    try:
        n_ctx, longest = server.describe().n_ctx, max(lengths(spec)) + spec.new_tokens + _SALT_TOKENS
        if n_ctx is not None and longest > n_ctx:
            raise UsageError(
                f"requests of up to {longest} tokens, the context of `{server.describe().model}` holds {n_ctx}",
                "lower `--prefix-tokens`, `--suffix-tokens`, `--new-tokens` or `--requests`",
            )
        bed = _Bed(spec, server)
        for row, name in enumerate(names, 1):
            details = {"part": "scenario", "session": session, "row": row, "complete": row == len(names)}
            yield bed.outcome(name, details, progress)
    finally:
        server.close()


class _Bed:
    """Measures streams on one server."""

    def __init__(self, spec: PrefixCacheSpec, server: Server) -> None:
        self._spec, self._server, self._client = spec, server, Client(server)
        units = self._client.units
        self._in_units = msgspec.structs.replace(
            spec,
            prefix_tokens=spec.prefix_tokens * units,
            suffix_tokens=spec.suffix_tokens * units,
            block_tokens=spec.block_tokens * units,
        )
        self._texts = Texts(self._client.encode, self._client.bos, spec.seed)

    def outcome(self, name: str, details: dict[str, Any], progress: Progress) -> Outcome:
        """The row of one scenario."""
        client, new_tokens = self._client, self._spec.new_tokens
        plain = stream(self._in_units, name, self._texts, lambda prompt: self._answer(client.ask(prompt, new_tokens)))
        passes, founds = Passes([], [], []), list[tuple[Found, Found]]()
        salted, left = plain, list[Tokens]()
        rounds = self._spec.warmup + self._spec.repeats
        for repetition in range(rounds):
            progress(name, repetition, rounds)
            measured = plain.prompts[plain.prime :]
            cold, cold_found = self._pass([client.salted(prompt, client.salt()) for prompt in measured])
            salt = client.salt()
            salted = plain._replace(prompts=[client.salted(prompt, salt) for prompt in plain.prompts])
            primed, _ = self._pass(salted.prompts[: plain.prime])
            warm, warm_found = self._pass(salted.prompts[plain.prime :])
            left = [
                np.append(prompt, self._answer(answer)[:-1]).astype(np.int32)
                for prompt, answer in zip(salted.prompts, [*primed, *warm], strict=True)
            ]
            if repetition >= self._spec.warmup:
                passes.cold.append(_served(cold))
                passes.warm.append(_served(warm))
                founds.append((cold_found, warm_found))
        return self._row(salted, left, passes, founds, details)

    def _answer(self, answer: ServerGeneration) -> list[int]:
        """The ids of an answer, or its characters."""
        if answer.tokens and self._client.units == 1:
            return list(answer.tokens)
        return [int(i) for i in self._client.encode(answer.text)] if answer.text else []

    def _pass(self, prompts: Sequence[Tokens]) -> tuple[list[ServerGeneration], Found]:
        self._server.reset()
        answers = [self._client.ask(prompt, self._spec.new_tokens) for prompt in prompts]
        return answers, found(answers, self._server.counters())

    def _row(
        self,
        measured: Stream,
        left: list[Tokens],
        passes: Passes,
        found_each: list[tuple[Found, Found]],
        details: dict[str, Any],
    ) -> Outcome:
        colds, founds = zip(*found_each, strict=True)
        units, by = self._client.units, founds[0].by
        prompts, block = measured.prompts[measured.prime :], self._in_units.block_tokens
        size = len(prompts)
        cold, warm = ([s.ttft_s for one in of for s in one] for of in (passes.cold, passes.warm))
        rates = [one.rate for one in founds if one.rate is not None]
        saved = [float(one.cached) for one in founds if one.cached is not None]
        measurements = {
            "ttft_cold": Measurement("s", "lower", cold, size),
            "ttft_warm": Measurement("s", "lower", warm, size),
        }
        if rates and len(rates) == len(founds):
            measurements["hit_rate"] = Measurement("share", "higher", rates)
            measurements["prefill_tokens_saved"] = Measurement("tokens", "higher", saved)
        told = stream_details(measured, left, passes, self._client.decode, block_tokens=block)
        # In characters, or of counts that the requests do not have each.
        if by != "usage" or units > 1:
            told["ttft_saved_predicted_s"] = None
        details = {
            **details,
            **_in_tokens(told, units),
            "counted_by": by,
            "not_measured": _NOT_MEASURED,
            "cold_hit_rate": max((one.rate for one in colds if one.rate is not None), default=None),
        }
        info = self._server.describe()
        notices = [*few_repeats(self._spec), *of_server(info, details, rates)]
        model = ModelInfo(self._spec.model.source, "endpoint", "none", 0, 0.0, {})
        return Outcome(self._spec.model.label, model, info.runtime, measurements, notices, details)


def _in_tokens(details: dict[str, Any], units: int) -> dict[str, Any]:
    """The details of a stream, `units` of whose prompts stand for a token."""
    return {
        **details,
        "prompt_tokens_mean": details["prompt_tokens_mean"] / units,
        "expected_cached_tokens": [n // units for n in details["expected_cached_tokens"]],
        "budget_curve": [(n // units, rate) for n, rate in details["budget_curve"]],
        "misses": [
            {**miss, "at_token": miss["at_token"] // units, "lost_tokens": miss["lost_tokens"] // units}
            for miss in details["misses"]
        ],
    }


def found(answers: Sequence[ServerGeneration], counters: dict[str, int]) -> Found:
    """What was cached: by the usage of each answer, else by how the server's metrics grew."""
    cached = [answer.cached_tokens for answer in answers]
    asked = [answer.prompt_tokens for answer in answers]
    if None not in cached and None not in asked:
        return Found("usage", sum(n or 0 for n in cached), sum(n or 0 for n in asked))
    if "server_prefix_hits" in counters and counters.get("server_prefix_queries"):
        return Found("metrics", counters["server_prefix_hits"], counters["server_prefix_queries"])
    return Found("none", None, None)


def _served(answers: Sequence[ServerGeneration]) -> list[Served]:
    return [Served(metrics.ttft(answer), answer.cached_tokens or 0, list(answer.tokens)) for answer in answers]
