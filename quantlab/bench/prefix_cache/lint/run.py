"""`quantlab prefix-cache lint`: what varies too early in a log of requests, and what another order would give.

A cache without limits is replayed over the requests one after another: what it finds, what a request could have found
had an early difference not been, and the same after each repair. Not known here: the server's chat template, the order
in which requests were really served, and the size of its cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from quantlab.bench.prefix_cache.lint.causes import Difference, difference
from quantlab.bench.prefix_cache.lint.fixes import ADVICE, LEAST_FORM, repaired, texts_of_few
from quantlab.bench.prefix_cache.lint.log import Request, read_log
from quantlab.bench.prefix_cache.lint.tokens import Pieces
from quantlab.bench.prefix_cache.theory import hit_rate, reusable_tokens
from quantlab.bench.prefix_cache.why import common_prefix, misses
from quantlab.core.errors import UsageError
from quantlab.core.model import ModelFile
from quantlab.core.progress import Progress, silent
from quantlab.core.result import Measurement, ModelInfo, Outcome
from quantlab.runtime.backend import Tokens

# A group of requests that loses less of all tokens is not worth a change.
_WORTH_TELLING = 0.03
# What people, models and tools say differs each time: it counts where much that is always the same stands behind it.
_WORTH_IN_TALK = 0.15
# One request that loses so much of its own tokens is: a template that was changed loses each of its readers once.
_WORTH_ALONE = 0.4
_SETUP = ("tools", "system", "prompt")
# Shorter texts that happen to stand in two requests are chance.
_LEAST_BLOCKS = 2
_MOST_FINDINGS = 12
_SHOWN = 120
# What was told to be lost and does not come back by the repair, but for this share, has another cause.
_RECOVERED = 0.3
# What cannot be repaired by moving text: the advice stands by itself.
_ADVICE_ALONE = ("history", "tool set")


class LintSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A log of requests, as a file, and the size of the server's blocks."""

    model: ModelFile
    block_tokens: int = 16

    def __post_init__(self) -> None:
        """Refuse what is no size."""
        if self.block_tokens < 1:
            raise UsageError(f"`--block-tokens` {self.block_tokens}", "give at least 1")


class Finding(msgspec.Struct, frozen=True):
    """One cause, for which `requests` requests lose `lost_tokens`.

    `hit_rate_after` is the rate once it and the findings before it are repaired.
    """

    cause: str
    part: str
    requests: int
    lost_tokens: int
    lost_share: float
    earlier: str
    now: str
    advice: str
    hit_rate_after: float


def run(spec: LintSpec, progress: Progress = silent) -> Outcome:
    """Read the log and return what was found."""
    requests = read_log(Path(spec.model.path))
    before = _rate(requests, spec.block_tokens)
    findings, mended = find(requests, spec.block_tokens, progress)
    after = findings[-1].hit_rate_after if findings else before
    tokens = sum(len(ids) for ids in _ids(requests))
    return Outcome(
        label=spec.model.label,
        # A log has no model; what served it is not known.
        model=ModelInfo(spec.model.source, "endpoint", "none", 0, 0.0, {}, sha256=spec.model.sha256),
        runtime=None,
        measurements={
            "hit_rate": Measurement("share", "higher", [before]),
            "hit_rate_proposed": Measurement("share", "higher", [after]),
        },
        details={
            "part": "lint",
            "session": spec.model.sha256[:16],
            "row": 1,
            "complete": True,
            "requests": len(requests),
            "tokens": tokens,
            "findings": msgspec.to_builtins(findings),
            "order": order(mended) if findings else [],
        },
    )


def find(requests: list[Request], block_tokens: int, progress: Progress) -> tuple[list[Finding], list[Request]]:
    """The causes, each the costliest of what the repairs before it left, and the requests after the last repair.

    One without whose repair the others find as much is left out.
    """
    found: list[_Lost] = []
    handled: set[str] = set()
    mended = requests
    while len(found) < _MOST_FINDINGS:
        progress("looking for causes", len(found), _MOST_FINDINGS)
        worst = _worst(mended, block_tokens, handled)
        if worst is None:
            break
        found.append(worst)
        handled.add(worst.difference.key)
        mended = repaired(mended, worst.difference)
    for one in found[::-1]:
        others = [other for other in found if other is not one]
        gain = _rate(_mended(requests, found), block_tokens) - _rate(_mended(requests, others), block_tokens)
        if gain < _RECOVERED * one.share and one.difference.cause not in _ADVICE_ALONE:
            found = others
    rates = [_rate(_mended(requests, found[: n + 1]), block_tokens) for n in range(len(found))]
    return [_finding(one, rate) for one, rate in zip(found, rates, strict=True)], _mended(requests, found)


class _Lost(NamedTuple):
    """A difference, the tokens that each request which has it loses, and their share of all tokens."""

    difference: Difference
    tokens: list[int]
    share: float


def _mended(requests: list[Request], found: list[_Lost]) -> list[Request]:
    for one in found:
        requests = repaired(requests, one.difference)
    return requests


def _finding(lost: _Lost, rate: float) -> Finding:
    found = lost.difference
    return Finding(
        found.cause,
        found.part,
        len(lost.tokens),
        sum(lost.tokens),
        lost.share,
        *_shown(found),
        ADVICE[found.cause],
        rate,
    )


def _shown(found: Difference) -> tuple[str, str]:
    """The beginnings of both texts; of white space the place where it differs, with what it is."""
    if found.cause != "white space":
        return found.earlier.strip()[:_SHOWN], found.now.strip()[:_SHOWN]
    start = max(0, common_prefix(found.earlier, found.now) - _SHOWN // 2)
    return repr(found.earlier[start:][:_SHOWN])[1:-1], repr(found.now[start:][:_SHOWN])[1:-1]


def _worst(requests: list[Request], block_tokens: int, handled: set[str]) -> _Lost | None:
    """The difference that costs most."""
    pieces, ids = [Pieces(request) for request in requests], _ids(requests)
    total = sum(map(len, ids))
    seldom = texts_of_few(requests)
    groups: dict[str, _Group] = {}
    for miss in misses([one.tolist() for one in ids], block_tokens):
        if miss.lost < _LEAST_BLOCKS * block_tokens:
            continue
        at = [pieces[i].segment_at(miss.at) for i in (miss.against, miss.request)]
        found = difference(
            requests[miss.against], at[0], requests[miss.request], at[1], frequent=lambda t: not seldom(t)
        )
        if found.part != "moved":
            group = groups.setdefault(found.key, _Group(found))
            group.lost.append(miss.lost)
            group.alone = max(group.alone, miss.lost / len(ids[miss.request]))
    worth = [group for group in _joined(groups.values()) if group.found.key not in handled and group.is_worth(total)]
    if not worth:
        return None
    worst = max(worth, key=lambda group: sum(group.lost))
    return _Lost(worst.found, worst.lost, sum(worst.lost) / total)


class _Group:
    """Requests with one difference, what each loses, and the largest share that one loses of its own tokens."""

    def __init__(self, found: Difference) -> None:
        self.found, self.alone = found, 0.0
        self.lost: list[int] = []

    def is_worth(self, total: int) -> bool:
        """Whether it is worth a change, of so many tokens of all requests."""
        setup = self.found.part in _SETUP
        least = (_WORTH_TELLING if setup else _WORTH_IN_TALK) * total
        return (len(self.lost) > 1 and sum(self.lost) >= least) or (setup and self.alone >= _WORTH_ALONE)


def _joined(groups: Iterable[_Group]) -> list[_Group]:
    """The groups; where a value stands behind another one of the same segment, its requests are of the first one's."""
    joined: list[_Group] = []
    for group in sorted(groups, key=lambda group: len(group.found.head)):
        head, part = group.found.head, group.found.part
        first = next((g for g in joined if g.found.part == part and _begins(head, g.found.head)), None)
        if first is None:
            joined.append(group)
        else:
            first.lost += group.lost
            first.alone = max(first.alone, group.alone)
    return joined


def _begins(head: str, shorter: str) -> bool:
    return len(shorter.strip()) >= LEAST_FORM and head.startswith(shorter)


def _ids(requests: list[Request]) -> list[Tokens]:
    names: dict[str, int] = {}
    return [
        np.array([names.setdefault(piece, len(names)) for piece in Pieces(request).pieces], np.int32)
        for request in requests
    ]


def _rate(requests: list[Request], block_tokens: int) -> float:
    ids = _ids(requests)
    return hit_rate(reusable_tokens(ids, ids, block_tokens), ids)


def order(requests: list[Request]) -> list[dict[str, Any]]:
    """The parts of the last request as they stand now, with the share of requests that have each text of them."""
    frequency = Counter(text for request in requests for text in {segment.text for segment in request})
    parts: list[dict[str, Any]] = []
    for segment in requests[-1]:
        share = frequency[segment.text] / len(requests)
        shown = "what varied" if segment.part == "moved" else segment.part
        if parts and parts[-1]["part"] == shown and (parts[-1]["share"] == 1) == (share == 1):
            parts[-1]["share"] = min(parts[-1]["share"], share)
            parts[-1]["characters"] += len(segment.text)
        else:
            parts.append({"part": shown, "share": share, "characters": len(segment.text)})
    return parts
