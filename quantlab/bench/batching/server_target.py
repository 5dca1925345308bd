"""A server behind a URL as what serves a load: it batches, orders and rejects by itself.

It does not tell when a request leaves its queue, so that there is no queueing delay apart from TTFT. What a server
loses is a failed record, with what befell it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from quantlab.bench.batching.load import Asked
from quantlab.bench.batching.serve import SEEDS, Cell, Run, slice_of
from quantlab.bench.batching.spec import BatchingSpec
from quantlab.bench.workloads import BUILTIN
from quantlab.core.corpus import load_text
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.result import Notice, RuntimeInfo
from quantlab.engine import RequestRecord
from quantlab.runtime.backend import Loaded, Request, Tokens
from quantlab.runtime.server import Server, TextRequest
from quantlab.runtime.server_stream import ServerGeneration

# Where a server has no tokenizer to ask: English has about as many characters in a token.
_CHARACTERS_PER_TOKEN = 4
# From where on our own lateness is part of what is measured.
_LATE_S = 0.01


class ServerTarget:
    """One model of an OpenAI-compatible server."""

    def __init__(self, server: Server, spec: BatchingSpec) -> None:
        self._server, self._seed = server, spec.seed
        self._info = server.describe()
        self._text = "\n\n".join(load_text(name).raw for name in BUILTIN)
        self._ids: Tokens | None = None
        self._latest_s = 0.0
        # Each load has prompts of its own: a server may keep the KV of those that it has seen.
        self._sent = 0
        self._unsure: set[str] = set()
        if self._info.prompts == "token ids":
            with contextlib.suppress(QuantlabError):
                self._ids = server.encode(self._text)
        self.loaded: Loaded | None = None
        self.runtime: RuntimeInfo = self._info.runtime

    def check_context(self, n_ctx: int) -> None:
        """Raise UsageError for requests that the server says it cannot hold."""
        if self._info.n_ctx is not None and n_ctx > self._info.n_ctx:
            raise UsageError(
                f"requests of up to {n_ctx} tokens, the context of `{self._info.model}` at the server holds "
                f"{self._info.n_ctx}",
                "lower `--prompt-tokens`, `--new-tokens` or `--length-scale`",
            )

    def run(self, cell: Cell) -> Run:
        """See `Target`; the limits and the policy of the cell are the server's own business."""
        self._server.reset()
        generations = self._server.generate([self._request(asked) for asked in cell.requests])
        self._latest_s = max(self._latest_s, self._server.counters()["client_lag_us"] / 1e6)
        self._unsure |= {g.counted_by for g in generations if g.times_s and g.counted_by != "server"}
        pairs = zip(cell.requests, generations, strict=True)
        return Run([_record(i, *pair) for i, pair in enumerate(pairs)], knows_queue=False)

    def _request(self, asked: Asked) -> Request | TextRequest:
        number = self._seed * SEEDS + self._sent
        self._sent += 1
        if self._ids is not None:
            # The text was encoded with its BOS, where the model has one.
            ids = slice_of(self._ids[1:], int(self._ids[0]), max(2, asked.prompt_tokens), number)
            return Request(ids, asked.new_tokens, arrival_s=asked.arrival_s)
        size = asked.prompt_tokens * _CHARACTERS_PER_TOKEN
        start = number * 7919 % max(1, len(self._text) - size)
        text = self._text[start : start + size]
        chat = self._info.prompts == "chat"
        prompt = [{"role": "user", "content": text}] if chat else text
        return TextRequest(prompt, asked.new_tokens, arrival_s=asked.arrival_s)

    def notices(self) -> list[Notice]:
        """See `Target`: what is uncertain about the answers' tokens and times."""
        found = []
        if not self._info.ignores_eos:
            found.append(
                Notice(
                    "may-end-early",
                    "this server cannot be told to ignore the end of an answer: answers may be shorter than asked",
                    "read rates, which count the tokens that came",
                )
            )
        if self._unsure:
            found.append(
                Notice(
                    "tokens-counted-by-events",
                    "the server does not say which tokens an event holds: TPOT is that of its events",
                    "start it so that it reports usage with every event, where it can",
                )
            )
        if self._latest_s > _LATE_S:
            found.append(
                Notice(
                    "client-lag",
                    f"this process was up to {1000 * self._latest_s:.0f} ms late to read its connections",
                    "run the bench on another machine than the server",
                )
            )
        return found


@contextlib.contextmanager
def opened_server(spec: BatchingSpec, n_ctx: int) -> Iterator[ServerTarget]:
    """The server of the spec, asked who it is."""
    server = Server(spec.model.path, model=spec.served_model)
    try:
        target = ServerTarget(server, spec)
        target.check_context(n_ctx)
        yield target
    finally:
        server.close()


def _record(number: int, asked: Asked, generation: ServerGeneration) -> RequestRecord:
    """The outcome of a request in the engine's terms, on a clock that starts with the load."""
    start = generation.start_s - asked.arrival_s
    times = [at - start for at in generation.times_s]
    finished = generation.outcome == "finished" and bool(times)
    what = "empty answer" if generation.outcome == "finished" else generation.outcome.replace("_", " ")
    return RequestRecord(
        id=number,
        priority=asked.priority,
        status="finished" if finished else "rejected" if generation.outcome == "rejected" else "failed",
        prompt_tokens=generation.prompt_tokens or asked.prompt_tokens,
        cached_tokens=generation.cached_tokens or 0,
        arrival_s=asked.arrival_s,
        new_tokens=len(times),
        first_token_s=times[0] if times else None,
        finished_s=times[-1] if times else None,
        finish_reason=generation.finish_reason if finished else None,
        reason="" if finished else f"{what}: {generation.error}",
        times_s=times,
    )
