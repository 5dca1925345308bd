"""Whether a draft model speaks the target's language: token ids must mean the same, one by one."""

from __future__ import annotations

import re

from quantlab.core.errors import QuantlabError
from quantlab.runtime.backend import Backend

# Names that converters give to ids which only fill a vocabulary up to a round size.
_FILLS = re.compile(
    r"|\[PAD\d*\]|<pad\d*>|<unused\d+>|<dummy\d+>|<extra_id_\d+>|<\|reserved_special_token_\d+\|>", re.I
)


def shared_vocabulary(target: Backend, draft: Backend) -> int:
    """How many ids both have; raises QuantlabError with the first that differs.

    Ids beyond, which one of the two has to fill its vocabulary up, must be padding.
    """
    n_target, n_draft = (backend.describe().n_vocab for backend in (target, draft))
    shared = min(n_target, n_draft)
    for token in range(shared):
        if not _alike(target, draft, token):
            ours, theirs = (_shown(backend, token) for backend in (target, draft))
            raise QuantlabError(
                f"the vocabularies differ: token {token} is {ours} in the target and {theirs} in the draft",
                "give a draft model of the target's family, or `ngram`",
            )
    larger, whose = (target, "target") if n_target > n_draft else (draft, "draft")
    for token in range(shared, max(n_target, n_draft)):
        if not _fills(larger, token):
            raise QuantlabError(
                f"the vocabularies differ: the {whose} has token {token}, {_shown(larger, token)}, where the other one "
                f"ends at {shared}",
                "give a draft model of the target's family, or `ngram`",
            )
    return shared


def _alike(target: Backend, draft: Backend, token: int) -> bool:
    ours, theirs = target.piece_bytes(token), draft.piece_bytes(token)
    if ours or theirs:
        return ours == theirs
    # Control tokens stand for no bytes; their names tell them apart.
    written = target.decode([token]), draft.decode([token])
    return written[0] == written[1] or all(_FILLS.fullmatch(name) for name in written)


def _fills(backend: Backend, token: int) -> bool:
    text = backend.piece_bytes(token).decode("utf-8", "replace") or backend.decode([token])
    return _FILLS.fullmatch(text) is not None


def _shown(backend: Backend, token: int) -> str:
    return repr(backend.piece_bytes(token).decode("utf-8", "replace") or backend.decode([token]))
