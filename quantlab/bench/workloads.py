"""Prompts of a bench: slices of real text, each request's its own, the same for every model of one vocabulary.

Random token ids would not resemble traffic, and equal prompts would be served from a prefix cache. A slice is taken
in token ids, so its length is exact whatever the tokenizer does at its ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from quantlab.bench.spec import BenchSpec
from quantlab.core.corpus import load_text
from quantlab.core.errors import UsageError
from quantlab.runtime.backend import Backend, Tokens
from quantlab.runtime.loading import Vocabulary

# English first; the others make long prompts possible.
BUILTIN = ("builtin_en", "builtin_chat", "builtin_code")


def prompts(backend: Backend, spec: BenchSpec) -> list[list[Tokens]]:
    """The prompts of one cell (BenchSpec.cells): a list for each repetition, warm-ups first, of one for each request.

    Control tokens count in the user's text, as HF tokenizers read them.
    """
    ids, loaded, batch = _ids(backend, spec), backend.describe(), spec.batch[0]
    repetitions = spec.warmup + spec.repeats
    length = spec.prompt_tokens[0] if spec.prompt_tokens else None
    flat = slices(ids, loaded.bos if loaded.adds_bos else None, length, repetitions * batch, spec.seed)
    return [flat[k * batch : (k + 1) * batch] for k in range(repetitions)]


def whole_length(vocabulary: Vocabulary, spec: BenchSpec) -> int:
    """Tokens of the prompt that is a text as it is."""
    bos = vocabulary.bos if vocabulary.adds_bos else None
    return len(slices(_ids(vocabulary, spec), bos, None, 1, spec.seed)[0])


def _ids(speaker: Backend | Vocabulary, spec: BenchSpec) -> Tokens:
    if spec.prompt is None:
        return speaker.encode("\n\n".join(load_text(name).raw for name in BUILTIN))
    return speaker.encode(spec.prompt, special=True)


def slices(ids: Tokens, bos: int | None, prompt_tokens: int | None, count: int, seed: int) -> list[Tokens]:
    """`count` prompts of exactly `prompt_tokens` ids, BOS included where the model wants it (`bos` not None).

    They begin at different places of the text, drawn by `seed`, as long as it has enough; None takes the whole
    text for each. Raises UsageError where the text is too short.
    """
    head = np.array([] if bos is None else [bos], np.int32)
    if prompt_tokens is None:
        # A chat template's text may hold BOS already.
        return [ids if len(ids) and ids[0] == bos else np.concatenate([head, ids])] * count
    taken = prompt_tokens - len(head)
    places = len(ids) - taken + 1
    if places < 1 or taken < 1:
        raise UsageError(
            f"prompts of {prompt_tokens} tokens asked, the text holds {len(ids)}",
            "give a longer text with `--prompt @FILE`, or fewer `--prompt-tokens`"
            if taken >= 1
            else "give at least 2: BOS is one of them",
        )
    rng = np.random.default_rng([seed, prompt_tokens])
    starts = np.resize(rng.choice(places, size=min(places, count), replace=False), count)
    return [np.concatenate([head, ids[start : start + taken]]) for start in starts]


def ids_sha256(sequences: Sequence[Sequence[int] | Tokens]) -> str:
    """The sha256 of lists of token ids, lengths included."""
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(len(ids).to_bytes(8, "little") + np.asarray(ids, "<i4").tobytes())
    return digest.hexdigest()
