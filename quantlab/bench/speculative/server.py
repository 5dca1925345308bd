"""An endpoint that speculates: what its own counters say of the prompts that it is sent.

vLLM counts drafts, draft tokens and accepted tokens, by position too; llama-server tells drafted and accepted tokens
with each answer; SGLang has a gauge of its last steps. None tells which method it runs. A plain run to compare with
does not exist, so there is no speed-up here: start the server without its draft, and compare the two Results' TPOT.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from quantlab.bench import metrics
from quantlab.bench.speculative.prompts import Prompt, read_prompts
from quantlab.bench.speculative.session import groups_of
from quantlab.bench.speculative.spec import SpeculativeSpec
from quantlab.core.errors import QuantlabError
from quantlab.core.progress import Progress
from quantlab.core.result import Measurement, ModelInfo, Notice, Outcome
from quantlab.engine.speculative.theory import expected_tokens
from quantlab.runtime.server import Server, TextRequest
from quantlab.runtime.server_stream import ServerGeneration

_START_PLAIN = "start it without its draft, and run this again: the TPOT of the two are the speed-up"


class Counted(NamedTuple):
    """What a server counted; None where it does not. `at` are the accepted tokens of each position."""

    drafts: int | None
    draft_tokens: int | None
    accepted: int | None
    at: list[int]

    @property
    def tested(self) -> int | None:
        """Draft tokens decided on: the first of each draft, and each after an accepted one."""
        if self.drafts is None or not self.at:
            return None
        return self.drafts + sum(self.at[:-1])

    @property
    def acceptance(self) -> float | None:
        """Accepted of tested, as for a draft of our own; None where positions are not counted."""
        return self.accepted / self.tested if self.tested and self.accepted is not None else None

    @property
    def accepted_of_drafted(self) -> float | None:
        """What vLLM calls the draft acceptance rate: tokens after a rejected one count as rejected."""
        return self.accepted / self.draft_tokens if self.draft_tokens and self.accepted is not None else None

    @property
    def by_position(self) -> list[float]:
        """Of each position the share accepted where it was tested."""
        if not self.drafts or not self.at:
            return []
        reached = [self.drafts, *self.at[:-1]]
        return [n / before for n, before in zip(self.at, reached, strict=True) if before]

    @property
    def tokens_per_verify(self) -> float | None:
        """Accepted tokens of a draft and one of the target's own."""
        return 1 + self.accepted / self.drafts if self.drafts and self.accepted is not None else None


def run(spec: SpeculativeSpec, progress: Progress) -> Iterator[Outcome]:
    """One Outcome for each number of requests at once."""
    prompts = read_prompts(spec.prompts, spec.categories, spec.prompts_per_category)
    categories = [prompt.category for prompt in prompts]
    session, total = uuid.uuid4().hex[:16], sum(len(groups_of(categories, batch)) for batch in spec.batches())
    done = 0
    server = Server(spec.model.path, model=spec.served_model)
    try:
        for row, batch in enumerate(spec.batches(), 1):
            server.reset()
            answers: list[list[ServerGeneration]] = []
            for category, numbers in groups_of(categories, batch):
                answers.append(_sent(server, [prompts[i] for i in numbers], spec))
                done += 1
                progress(f"batch {batch}, {category}", done, total)
            asked = sum(len(numbers) for _, numbers in groups_of(categories, batch))
            details = {"part": "server", "session": session, "row": row, "batch": batch, "asked": asked}
            details["complete"] = batch == spec.batches()[-1]
            yield _outcome(spec, server, answers, details)
    finally:
        server.close()


def _sent(server: Server, prompts: Sequence[Prompt], spec: SpeculativeSpec) -> list[ServerGeneration]:
    """A group at once; as chats, or as texts where the server takes none."""
    found = server.generate([TextRequest(p.messages, spec.new_tokens, spec.ignore_eos) for p in prompts])
    if all(g.outcome == "refused" for g in found):
        texts = ["\n\n".join(message["content"] for message in p.messages) for p in prompts]
        found = server.generate([TextRequest(text, spec.new_tokens, spec.ignore_eos) for text in texts])
    finished = [g for g in found if g.outcome == "finished" and g.times_s]
    if not finished:
        raise QuantlabError(f"the server answers no prompt: {found[0].error or found[0].outcome}", "see its log")
    return finished


def counted(server: Server, answers: Sequence[Sequence[ServerGeneration]]) -> Counted:
    """Since `reset`: by the server's counters, or by what it told with each answer."""
    counters = server.counters()
    if "server_drafts" in counters:
        places = sorted(int(name.rpartition("_")[2]) for name in counters if name.startswith("server_accepted_at_"))
        return Counted(
            counters["server_drafts"],
            counters.get("server_draft_tokens"),
            counters.get("server_accepted_tokens"),
            [counters[f"server_accepted_at_{i}"] for i in places],
        )
    told = [g for group in answers for g in group if g.draft_tokens is not None]
    if not told:
        return Counted(None, None, None, [])
    accepted = sum(g.accepted_tokens or 0 for g in told)
    # Each verify hands out what it accepts and one token; the first token is the prompt's.
    verifies = sum(len(g.times_s) - 1 for g in told) - accepted
    return Counted(verifies, sum(g.draft_tokens or 0 for g in told), accepted, [])


def _outcome(
    spec: SpeculativeSpec, server: Server, answers: Sequence[Sequence[ServerGeneration]], details: dict[str, Any]
) -> Outcome:
    info, found, gauge = server.describe(), counted(server, answers), server.accept_length()
    tokens = found.tokens_per_verify if found.drafts is not None else gauge
    speculates = None if found.drafts is None and gauge is None else bool(found.draft_tokens) or (gauge or 0) > 1
    length = found.draft_tokens / found.drafts if found.drafts and found.draft_tokens else None
    whole = [g for group in answers for g in group]
    samples = {
        "acceptance_rate": ("share", "higher", [found.acceptance] if found.acceptance is not None else []),
        "acceptance_rate_per_position": ("share", "higher", found.by_position),
        "mean_tokens_per_verify": ("tokens", "higher", [tokens] if tokens is not None and speculates else []),
        "tpot": ("s", "lower", [metrics.tpot(g) for g in whole if len(g.times_s) > 1]),
        "ttft": ("s", "lower", [metrics.ttft(g) for g in whole]),
    }
    expected = None if found.acceptance is None or length is None else expected_tokens(found.acceptance, round(length))
    return Outcome(
        label=spec.model.label,
        model=ModelInfo(spec.model.source, "endpoint", "none", 0, 0.0, {}),
        runtime=info.runtime,
        measurements={name: Measurement(*m) for name, m in samples.items() if m[2]},  # type: ignore[arg-type]
        warnings=[*_unanswered(details["asked"], len(whole)), *_notices(speculates, info.has_counters, gauge)],
        details={
            **details,
            "speculates": speculates,
            "drafts": found.drafts,
            "draft_tokens": found.draft_tokens,
            "accepted": found.accepted,
            "accepted_of_drafted": found.accepted_of_drafted,
            "draft_length": length,
            "expected_tokens_per_verify": expected,
            "requests": len(whole),
            "new_tokens": int(np.sum([len(g.times_s) for g in whole])),
        },
    )


def _unanswered(asked: int, answered: int) -> Iterator[Notice]:
    if answered < asked:
        text = f"{asked - answered} of {asked} requests were refused or failed, and are not in these numbers"
        yield Notice("unanswered", text, "see the server's log")


def _notices(speculates: bool | None, has_counters: bool, gauge: float | None) -> Iterator[Notice]:
    if speculates is None:
        what = "has no counters of drafts" if has_counters else "shows no counters"
        yield Notice("no-draft-counters", f"the server {what}: whether it speculates is not known", "see its log")
    elif not speculates:
        yield Notice("not-speculating", "the server's counters name no draft: it does not speculate", "")
    else:
        yield Notice("no-plain-run", "the server drafts: what that gains cannot be seen from outside", _START_PLAIN)
    if gauge is not None and speculates:
        yield Notice(
            "gauge", "tokens per verify are a gauge of the server's last steps, not of these answers alone", ""
        )
