"""Texts: the sets that calib_data/cards describe, files of the user, and how each is reached.

Quantize calibrates on them, evaluate measures on them. A set is looked for in calib_data (texts of our own), in the
folder named by QUANTLAB_DATA, in the cache, and last on the Hub. Evaluation text is refused as calibration.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from quantlab.core.errors import QuantlabError, UsageError, missing_extra, unknown_name
from quantlab.core.files import cache_folder, os_error, write_text
from quantlab.core.result import Notice

Purpose = Literal["calibration", "evaluation"]
Message = dict[str, str]

DATA_VARIABLE = "QUANTLAB_DATA"
WIKITEXT = "wikitext2"
FALLBACK = "builtin_eval"
_HUB_TIMEOUT_S = 5.0
_WIKITEXT_NAME = re.compile(r"wiki(text)?[-_.]?(2|103)?[-_.]?(raw[-_.])?(v1[-_.])?(test|valid|train)", re.IGNORECASE)
_WIKITEXT_MARKS = re.compile(r" @[-,.]@ |^ = .+ = $", re.MULTILINE)
_JOIN = "\n\n"


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one text of a set lies: `file` in calib_data or QUANTLAB_DATA, else columns of a data set on the Hub.

    `rows` limits how many rows of a large data set are read. A file ending in .jsonl holds one document a line,
    {"text": ...} or {"messages": [{"role": ..., "content": ...}]}.
    """

    file: str | None = None
    sha256: str | None = None
    hub: str | None = None
    config: str | None = None
    split: str | None = None
    column: str = "text"
    revision: str | None = None
    rows: int | None = None


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One set: what it is, whose it is, and a source for each purpose it may serve."""

    name: str
    description: str
    language: str
    licence: str
    origin: str
    calibration: Source | None = None
    evaluation: Source | None = None

    def source(self, purpose: Purpose) -> Source | None:
        """The source for `purpose`, None where the set must not serve it."""
        return self.calibration if purpose == "calibration" else self.evaluation


class Corpus(msgspec.Struct, frozen=True):
    """A loaded text. `canonical`: its sha256 is the one that its card states; False for a file of the user.

    `documents` are texts in order (a plain text file is one), `conversations` are lists of messages; a corpus has
    one or the other. `sha256` is of `raw` for plain text, of the file for .jsonl.
    """

    name: str
    sha256: str
    canonical: bool
    language: str | None = None
    documents: list[str] = []
    conversations: list[list[Message]] = []
    notes: list[Notice] = []

    @property
    def raw(self) -> str:
        """The raw file's text; documents of a .jsonl joined by a blank line, messages by a line break."""
        if self.conversations:
            return _JOIN.join("\n".join(m["content"] for m in messages) for messages in self.conversations)
        return self.documents[0] if len(self.documents) == 1 else _JOIN.join(self.documents)

    @property
    def rows(self) -> list[str]:
        """The text in the form of the Hub's rows: a blank line is an empty row, others keep their line break."""
        return rows_of(self.raw)


def rows_of(raw: str) -> list[str]:
    """The Hub's rows of a raw WikiText file (the Hub stores "" where the file has a line of one blank)."""
    lines = raw.split("\n")
    # What stands after the last line break is a row only where the file does not end in one.
    last = [lines[-1]] if lines[-1] else []
    return [line + "\n" if line.strip() else "" for line in lines[:-1]] + last


def raw_of(rows: Iterable[str]) -> str:
    """The raw file of the Hub's WikiText rows, byte for byte (the inverse of `rows_of`)."""
    return "".join(row or " \n" for row in rows)


def data_folder() -> Path:
    """calib_data: inside an installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "calib_data", package.parent / "calib_data"):
        if (folder / "cards").is_dir():
            return folder
    raise QuantlabError("quantlab's `calib_data` is missing", "install quantlab again")


def cards() -> dict[str, Card]:
    """Every known set by name."""
    found = {}
    for path in sorted((data_folder() / "cards").glob("*.toml")):
        try:
            card = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Card)
        except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            raise QuantlabError(
                f"`{path}` is not a card of a text: {error}", "see the other cards beside it"
            ) from error
        found[card.name] = card
    return found


def load_text(name_or_path: str, purpose: Purpose = "calibration", *, offline: bool = False) -> Corpus:
    """Load a set by name or a file by path.

    Raises UsageError for unknown names and for evaluation text asked as calibration; QuantlabError where the text
    cannot be reached, is empty or is not UTF-8. For evaluation on WikiText-2 alone, an unreachable text is replaced
    by the built-in evaluation text under that text's own name, with a note. With `offline` the network is not used.
    """
    known = cards()
    if name_or_path in known:
        return _load_set(known[name_or_path], known, purpose, offline=offline)
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return _load_file(path, known, purpose)
    if path.exists() or path.suffix or os.sep in name_or_path:
        raise QuantlabError(f"`{name_or_path}` is not a text file", "check the path")
    usable = [card.name for card in known.values() if card.source(purpose)]
    raise unknown_name(f"{purpose} text", name_or_path, usable)


def _load_set(card: Card, known: dict[str, Card], purpose: Purpose, *, offline: bool) -> Corpus:
    source = card.source(purpose)
    notes = []
    if source is None and purpose == "calibration":
        raise _spoils(card.name)
    if source is None:
        source = card.calibration
        assert source is not None
        notes.append(_calibration_text(card.name))
    found = _local(card, source) or _cached(card, source)
    try:
        corpus = found or _from_hub(card, source, offline=offline)
    except QuantlabError as error:
        if purpose != "evaluation" or card.name != WIKITEXT:
            raise
        return _fallback(known[FALLBACK], error)
    return msgspec.structs.replace(corpus, notes=[*notes, *corpus.notes])


def _spoils(name: str) -> UsageError:
    return UsageError(
        f"`{name}` is evaluation text: calibrating on it would spoil the measurement", "use another text with `--calib`"
    )


def _calibration_text(name: str) -> Notice:
    return Notice(
        "calibration-text",
        f"`{name}` is a calibration text: models calibrated on it look better than they are",
        "measure on `wikitext2`, or on a text of your own",
    )


def _local(card: Card, source: Source) -> Corpus | None:
    """The text from calib_data or from QUANTLAB_DATA; a file with another sha256 is named so."""
    if source.file is None:
        return None
    folders = [data_folder(), *([Path(os.environ[DATA_VARIABLE])] if os.environ.get(DATA_VARIABLE) else [])]
    for folder in folders:
        if (path := folder / source.file).is_file():
            return _named(_read(path, card.name, card.language), source.sha256)
    return None


def _cached(card: Card, source: Source) -> Corpus | None:
    path = _cache_path(card, source)
    if not path.is_file():
        return None
    # The Hub's WikiText becomes the raw file again; of other sets it holds other rows than the local file.
    return _named(_read(path, card.name, card.language), source.sha256 if card.name == WIKITEXT else None)


def _named(corpus: Corpus, sha256: str | None) -> Corpus:
    """The corpus marked canonical, or renamed where its content is not what its name says."""
    if sha256 in (None, corpus.sha256):
        return msgspec.structs.replace(corpus, canonical=True)
    name = f"{corpus.name} (not canonical)"
    note = Notice(
        "not-canonical",
        f"`{corpus.name}` has the sha256 {corpus.sha256[:12]}..., the canonical text has {sha256[:12]}..."
        if sha256
        else f"`{corpus.name}` looks like WikiText, but its sha256 {corpus.sha256[:12]}... is of no canonical file",
        "do not compare its perplexity with published numbers",
    )
    return msgspec.structs.replace(corpus, name=name, canonical=False, notes=[*corpus.notes, note])


def _load_file(path: Path, known: dict[str, Card], purpose: Purpose) -> Corpus:
    corpus = _read(path, path.name, None)
    for card in known.values():
        if card.evaluation and card.evaluation.sha256 == corpus.sha256:
            if purpose == "calibration":
                raise _spoils(path.name)
            return msgspec.structs.replace(corpus, name=card.name, canonical=True, language=card.language)
        if card.calibration and card.calibration.sha256 == corpus.sha256:
            notes = [_calibration_text(path.name)] if purpose == "evaluation" else []
            return msgspec.structs.replace(corpus, canonical=True, language=card.language, notes=notes)
    marks = len(_WIKITEXT_MARKS.findall(corpus.raw[:20_000]))
    if purpose == "evaluation" and (_WIKITEXT_NAME.match(path.name) or marks > 5):
        return _named(corpus, "")
    return corpus


def _read(path: Path, name: str, language: str | None) -> Corpus:
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise os_error(error, path) from error
    except UnicodeDecodeError as error:
        raise QuantlabError(f"`{path}` is not UTF-8 text: byte {error.start}", "convert it to UTF-8") from error
    sha256 = hashlib.sha256(data).hexdigest()
    if path.suffix == ".jsonl":
        documents, conversations = _read_jsonl(text, path)
    else:
        documents, conversations = [text] if text.strip() else [], []
    if not documents and not conversations:
        raise QuantlabError(f"`{path}` holds no text", "give a file with text in it")
    return Corpus(name, sha256, False, language, documents, conversations)


def _read_jsonl(text: str, path: Path) -> tuple[list[str], list[list[Message]]]:
    documents, conversations = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "messages" in row:
                conversations.append(_messages(row["messages"]))
            else:
                documents.append(str(row["text"]))
        except (ValueError, TypeError, KeyError) as error:
            hint = 'each line is {"text": "..."} or {"messages": [{"role": "...", "content": "..."}]}'
            raise QuantlabError(f"`{path}` line {number} is not readable: {error!r}", hint) from error
    if documents and conversations:
        raise QuantlabError(f"`{path}` mixes texts and conversations", "split it into two files")
    return [d for d in documents if d.strip()], [c for c in conversations if c]


def _messages(value: Any) -> list[Message]:
    return [{"role": str(m["role"]), "content": str(m["content"])} for m in value]


def _fallback(card: Card, error: QuantlabError) -> Corpus:
    assert card.evaluation is not None
    corpus = _local(card, card.evaluation)
    assert corpus is not None
    note = Notice(
        "builtin-text",
        f"WikiText-2 cannot be reached ({error.message}); `{card.name}` was used: its perplexity is only comparable to itself",
        f"set {DATA_VARIABLE} to a folder with wiki.test.raw, or use `--data FILE`",
    )
    return msgspec.structs.replace(corpus, notes=[*corpus.notes, note])


def _cache_path(card: Card, source: Source) -> Path:
    form = "txt" if card.name == WIKITEXT else "jsonl"
    return cache_folder() / "corpora" / f"{card.name}-{source.split or 'train'}.{form}"


def _from_hub(card: Card, source: Source, *, offline: bool) -> Corpus:
    """Read the rows through `datasets` and keep them in the cache, where `--offline` finds them."""
    near = f"set {DATA_VARIABLE} to a folder with `{source.file}`" if source.file else "give a file of your own"
    if source.hub is None:
        raise QuantlabError(f"the text `{card.name}` lies in no folder known", near)
    if offline or os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
        raise QuantlabError(f"the text `{card.name}` is not on this machine, and the network is not to be used", near)
    rows = _hub_rows(source, near)
    path = _cache_path(card, source)
    if card.name == WIKITEXT:
        write_text(path, raw_of(rows))
    else:
        key = "messages" if rows and isinstance(rows[0], list) else "text"
        write_text(path, "".join(json.dumps({key: row}, ensure_ascii=False) + "\n" for row in rows))
    corpus = _cached(card, source)
    assert corpus is not None
    return corpus


def _hub_rows(source: Source, near: str) -> list[Any]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise missing_extra("datasets", "data") from None
    from huggingface_hub import HfApi

    try:
        # `datasets` itself tries for minutes where no network is.
        HfApi().dataset_info(source.hub or "", revision=source.revision, timeout=_HUB_TIMEOUT_S)
        stream = datasets.load_dataset(
            source.hub, source.config, split=source.split or "train", revision=source.revision, streaming=True
        )
        return [row[source.column] for row in itertools.islice(stream, source.rows)]
    except Exception as error:
        # Whatever it is (network, gating, a renamed column), the user's next step is the same.
        first = str(error).partition("\n")[0]
        raise QuantlabError(f"`{source.hub}` cannot be read from the Hub: {first}", near) from error
