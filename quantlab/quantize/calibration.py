"""Calibration windows: texts mixed by weight, packed without padding, drawn by seed.

A mix keeps its proportions: the text that is soonest used up bounds all of them. Conversations are rendered with
the model's own chat template, and only what the assistant says counts in the loss, for engines that have one. What
is recorded is the sha256 of the token ids, never the text.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quantlab.core.corpus import Corpus, load_text
from quantlab.core.errors import QuantlabError
from quantlab.core.result import Notice
from quantlab.quantize.chinese import CHINESE_SET
from quantlab.quantize.conversations import Template, Text, render
from quantlab.quantize.spec import QuantizeSpec, split_weight
from quantlab.quantize.torch_work import Samples

# One text of a mix and its weight.
Part = tuple[Corpus, float]
# Text -> token ids; the second argument says whether control tokens written in the text are parsed.
Encode = Callable[[str, bool], list[int]]
# Text -> for each of its token ids where its characters begin and end.
Offsets = Callable[[str], list[tuple[int, int]]]

DEFAULT_SAMPLES = 128
_DEFAULT_SETS = ("builtin_en", "builtin_code", "builtin_chat")


class Calibration(msgspec.Struct, frozen=True):
    """`windows` is int32 (windows, tokens); `record` says what they are, without their text.

    `mask` is int8 of the same shape: 1 where the loss counts.
    """

    windows: npt.NDArray[np.int32]
    mask: npt.NDArray[np.int8]
    record: dict[str, Any]
    notices: list[Notice]


def load_parts(spec: QuantizeSpec, *, chinese: bool) -> list[Part]:
    """The texts that a spec names, else texts of our own: with a Chinese one for a model that speaks Chinese."""
    names = spec.calib or [*_DEFAULT_SETS, *([CHINESE_SET] if chinese else [])]
    weighted = [split_weight(name) for name in names]
    return [(load_text(name, "calibration", offline=spec.offline), weight) for name, weight in weighted]


def of_tokenizer(samples: Samples, tokenizer: Any) -> Calibration:
    """The calibration that `samples` asks for, in the ids of a transformers tokenizer.

    Each window begins with BOS where the tokenizer puts one before a text.
    """
    source = tokenizer.chat_template
    if isinstance(source, dict):
        source = source.get("default")
    template = Template(source, tokenizer.bos_token or "", tokenizer.eos_token or "") if source else None
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    # What is longer than the model's context is cut into windows; transformers would warn of it.
    longest, tokenizer.model_max_length = tokenizer.model_max_length, sys.maxsize
    try:
        return build(
            samples.parts,
            lambda text, _: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
            samples=samples.samples,
            length=samples.length,
            seed=samples.seed,
            bos=tokenizer.bos_token_id if adds_bos else None,
            template=template,
            offsets=lambda text: _offsets(tokenizer, text),
        )
    finally:
        tokenizer.model_max_length = longest


def _offsets(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    if not tokenizer.is_fast:
        return []
    return list(tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"])


def build(
    parts: Sequence[Part],
    encode: Encode,
    *,
    samples: int | None,
    length: int,
    seed: int,
    bos: int | None,
    template: Template | None,
    offsets: Offsets | None = None,
) -> Calibration:
    """Windows of `length` tokens from `parts`; with `bos` each window's first token is replaced by it.

    `samples` None takes as many as the mix gives, at most 128. Without `offsets` the loss of every token counts. Raises
    QuantlabError for a text too short.
    """
    draw = random.Random(seed)  # noqa: S311 - a reproducible draw, no secret
    notices: list[Notice] = []
    parts = [(_without_duplicates(corpus, notices), weight) for corpus, weight in parts]
    texts = [_text(corpus, template, draw, notices, masked=offsets is not None) for corpus, _ in parts]
    streams = [encode(text.text, bool(corpus.conversations)) for text, (corpus, _) in zip(texts, parts, strict=True)]
    for (corpus, _), stream in zip(parts, streams, strict=True):
        if len(stream) < length:
            raise QuantlabError(
                f"the calibration text `{corpus.name}` gives {len(stream)} tokens, a sample needs {length}",
                "give more text, or a smaller `--calib-length`",
            )
    masks = [_mask(text, len(stream), offsets) for text, stream in zip(texts, streams, strict=True)]
    starts = _starts(streams, masks, length, notices)
    for (corpus, _), places in zip(parts, starts, strict=True):
        if not places:
            raise QuantlabError(
                f"no window of {length} tokens of the calibration text `{corpus.name}` holds anything new or an answer",
                "give other text, or a larger `--calib-length`",
            )
    counts = _counts([weight for _, weight in parts], [len(places) for places in starts], samples)
    if samples is not None and sum(counts) < samples:
        notices.append(
            Notice(
                "calibration-short",
                f"{samples} samples of {length} tokens asked, the texts give {sum(counts)} in their proportions",
                "give more text with `--calib`",
            )
        )
    windows = []
    for stream, counted, places, count in zip(streams, masks, starts, counts, strict=True):
        for start in draw.sample(places, count):
            part = slice(start, start + length)
            windows.append((stream[part], counted[part]))
    draw.shuffle(windows)
    array = np.array([ids for ids, _ in windows], np.int32)
    mask = np.array([counted for _, counted in windows], np.int8)
    if bos is not None:
        array[:, 0] = bos
    record = {
        "sets": [
            {"name": corpus.name, "sha256": corpus.sha256, "weight": weight, "samples": count}
            for (corpus, weight), count in zip(parts, counts, strict=True)
        ],
        "samples": len(array),
        "length_tokens": length,
        "seed": seed,
        "sha256": hashlib.sha256(array.astype("<i4").tobytes()).hexdigest(),
    }
    if not mask.all():
        record |= {
            "loss_tokens": int(mask.sum()),
            "loss_mask_sha256": hashlib.sha256(mask.tobytes()).hexdigest(),
        }
    return Calibration(array, mask, record, notices)


def _starts(
    streams: Sequence[list[int]], masks: Sequence[npt.NDArray[np.int8]], length: int, notices: list[Notice]
) -> list[list[int]]:
    """Where the windows of each text begin, without those that equal one before or in which nothing counts."""
    seen: set[bytes] = set()
    found: list[list[int]] = []
    repeated = silent = 0
    for stream, mask in zip(streams, masks, strict=True):
        ids = np.array(stream, np.int32)
        found.append([])
        for at in range(0, len(ids) - length + 1, length):
            window = ids[at : at + length].tobytes()
            if window in seen:
                repeated += 1
            elif not mask[at : at + length].any():
                silent += 1
            else:
                found[-1].append(at)
            seen.add(window)
    if repeated:
        notices.append(Notice("calibration-duplicates", f"{repeated} windows of the texts repeat others: left out"))
    if silent:
        notices.append(Notice("calibration-left-out", f"{silent} windows hold no answer of the assistant: left out"))
    return found


def _counts(weights: Sequence[float], available: Sequence[int], samples: int | None) -> list[int]:
    """How many windows each text gives: shares of a total that no text runs short of, at least one each."""
    share = [weight / sum(weights) for weight in weights]
    total = min(samples or DEFAULT_SAMPLES, *(n / part for n, part in zip(available, share, strict=True))) + 1e-9
    exact = [total * part for part in share]
    counts = [max(1, int(value)) for value in exact]
    for i in sorted(range(len(exact)), key=lambda i: int(exact[i]) - exact[i]):
        if sum(counts) < int(total) and counts[i] < available[i]:
            counts[i] += 1
    # The windows that a small share is given come out of the largest.
    while sum(counts) > max(int(total), len(counts)):
        counts[counts.index(max(counts))] -= 1
    return counts


def _without_duplicates(corpus: Corpus, notices: list[Notice]) -> Corpus:
    """The corpus with each document and conversation once: what stands twice would weigh twice."""
    documents = list(dict.fromkeys(corpus.documents))
    conversations = list({msgspec.json.encode(messages): messages for messages in corpus.conversations}.values())
    given, left = (len(a) + len(b) for a, b in ((corpus.documents, corpus.conversations), (documents, conversations)))
    if left == given:
        return corpus
    notices.append(
        Notice(
            "calibration-duplicates", f"{given - left} of {given} texts of `{corpus.name}` are repetitions: left out"
        )
    )
    return msgspec.structs.replace(corpus, documents=documents, conversations=conversations)


def _text(
    corpus: Corpus, template: Template | None, draw: random.Random, notices: list[Notice], *, masked: bool
) -> Text:
    """One stream of text: documents and conversations in a drawn order."""
    if not corpus.conversations or template is None:
        documents = draw.sample(corpus.documents, len(corpus.documents))
        return Text("\n\n".join(documents) if documents else corpus.raw, None)
    conversations = draw.sample(corpus.conversations, len(corpus.conversations))
    rendered = render(conversations, template, corpus.name, notices)
    contents = sum(len(message["content"]) for messages in conversations for message in messages)
    text = "".join(part.text for part in rendered)
    if contents < len(text) / 2:
        notices.append(
            Notice(
                "template-share",
                f"more than half of the calibration text `{corpus.name}` is the chat template, not conversation",
                "mix in plain text, or longer conversations",
            )
        )
    if masked and (unclear := sum(part.counted is None for part in rendered)):
        notices.append(
            Notice(
                "calibration-mask",
                f"the answers in {unclear} of {len(rendered)} conversations of `{corpus.name}` cannot be told from the "
                "rest: all of their tokens count",
            )
        )
    counted, at = [], 0
    for part in rendered:
        counted += [(at + start, at + end) for start, end in part.counted or [(0, len(part.text))]]
        at += len(part.text)
    return Text(text, counted)


def _mask(text: Text, n: int, offsets: Offsets | None) -> npt.NDArray[np.int8]:
    """1 for each of the `n` tokens whose loss counts: those that share characters with a counted span."""
    places = offsets(text.text) if offsets is not None and text.counted is not None else []
    if len(places) != n or text.counted is None:
        return np.ones(n, np.int8)
    counted = np.zeros(len(text.text) + 1, np.int64)
    for start, end in text.counted:
        counted[start + 1 : end + 1] = 1
    before = np.cumsum(counted)
    starts, ends = np.array(places, np.int64).T
    mask: npt.NDArray[np.int8] = (before[ends] > before[starts]).astype(np.int8)
    return mask
