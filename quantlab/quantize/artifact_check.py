"""An artifact is checked before it counts: it loads, computes finite logits, and speaks as its parent does."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quantlab.core.errors import QuantlabError
from quantlab.core.gguf_file import GGUFHeader
from quantlab.quantize.llama_model import LlamaModel

# A dozen tokens on one thread: two threads that wait for each other on a busy machine take ten times as long.
_WINDOW = 12
_PROMPT = "The river rises in the hills, and return r ** 2 河水从山里流出。"


def find_fault(artifact: Path, own: GGUFHeader, parent: GGUFHeader) -> str | None:
    """Why the artifact must not be used, or None.

    Logits of a short prompt must be finite and not all alike, and one BOS at most stands before a text. `own` and
    `parent` are the headers of the artifact and of the GGUF that it was made from: what they say of the tokenizer, the
    chat template with it, must be the same, and so every text has the same ids.
    """
    try:
        with LlamaModel(artifact, n_ctx=_WINDOW) as model:
            return _logits_fault(model) or _tokenizer_fault(own, parent)
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


def _tokenizer_fault(own: GGUFHeader, parent: GGUFHeader) -> str | None:
    keys = {key for header in (own, parent) for key in header.metadata if key.startswith("tokenizer.")}
    for key in sorted(keys):
        if own.metadata.get(key) != parent.metadata.get(key):
            return f"its `{key}` is not its parent's"
    return None
