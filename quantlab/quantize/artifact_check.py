"""An artifact is checked before it counts: it loads, computes finite logits, and speaks as its parent does."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quantlab.core.errors import QuantlabError
from quantlab.quantize.convert.token_check import PROBE
from quantlab.quantize.llama_model import LlamaModel

# A dozen tokens on one thread: two threads that wait for each other on a busy machine take ten times as long.
_WINDOW = 12
_PROMPT = "The river rises in the hills, and return r ** 2 河水从山里流出。"


def find_fault(artifact: Path, parent: Path) -> str | None:
    """Why the artifact must not be used, or None.

    `parent` is the GGUF that it was made from: the same ids for a probe in many scripts, the same chat template, one
    BOS at most. Logits of a short prompt must be finite and not all alike.
    """
    try:
        with LlamaModel(artifact, n_ctx=_WINDOW) as model:
            return _logits_fault(model) or _text_fault(model, parent, same=artifact == parent)
    except QuantlabError as error:
        return error.message


def _logits_fault(model: LlamaModel) -> str | None:
    tokens = model.encode(_PROMPT, add_special=True)[:_WINDOW]
    logits = model.logits(tokens)
    if not np.isfinite(logits).all():
        bad = int((~np.isfinite(logits).all(axis=1)).argmax())
        return f"its logits are not finite (token {bad} of the test prompt)"
    if np.ptp(logits[-1]) == 0:
        return "its logits are all alike"
    if model.bos is not None and tokens[:2] == [model.bos, model.bos]:
        return "its tokenizer puts two BOS tokens before a text"
    return None


def _text_fault(model: LlamaModel, parent: Path, *, same: bool) -> str | None:
    if same:
        return None
    with LlamaModel(parent) as other:
        if model.encode(PROBE, special=True, add_special=True) != other.encode(PROBE, special=True, add_special=True):
            return "its tokenizer gives other ids than its parent's"
        if model.chat_template != other.chat_template:
            return "its chat template is not its parent's"
    return None
