"""Texts: the sets that calib_data/cards describe, files of the user, and how each is reached.

Quantize calibrates on them, evaluate measures on them. A set is a text of our own in calib_data, or one that is
looked for in the folder named by QUANTLAB_DATA, in the cache, and last on the Hub. Evaluation text is refused as
calibration.
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
from quantlab.core.files import cache_folder, os_error, user_path, write_text
from quantlab.core.overlap import shared
from quantlab.core.result import Notice

# Of a calibration text: the valid part of WikiText shares nothing with its test part.
_LARGEST_SHARE = 0.01
Purpose = Literal["calibration", "evaluation"]
Message = dict[str, str]

DATA_VARIABLE = "QUANTLAB_DATA"
WIKITEXT = "wikitext2"
FALLBACK = "builtin_eval"
_HUB_TIMEOUT_S = 5.0
_WIKITEXT_NAME = re.compile(r"wiki(text)?[-_.]?(2|103)?[-_.]?(raw[-_.])?(v1[-_.])?(test|valid|train)", re.IGNORECASE)
_WIKITEXT_MARKS = re.compile(r" @[-,.]@ |^ = .+ = $", re.MULTILINE)
# Headings and @-@ marks in the first 20,000 characters beyond which a text looks like WikiText.
_FEW_MARKS = 5
# Of a large set on the Hub, this many rows are enough.
_HUB_ROWS = 2000
_JOIN = "\n\n"


class Builtin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="builtin"):
    """A text in calib_data; `sha256` and `bytes` are of the file."""

    file: str
    sha256: str
    bytes: int


class Hub(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hub"):
    """A data set on the Hub, and files in QUANTLAB_DATA that stand for it; "" means none."""

    dataset: str
    config: str
    column: str
    split_calibration: str = ""
    split_evaluation: str = ""
    local_calibration: str = ""
    local_calibration_sha256: str = ""
    local_evaluation: str = ""
    local_evaluation_sha256: str = ""

    def split(self, purpose: Purpose) -> str:
        """The split that serves `purpose`."""
        return self.split_calibration if purpose == "calibration" else self.split_evaluation

    def local(self, purpose: Purpose) -> tuple[str, str]:
        """Name and sha256 of the local file that serves `purpose`."""
        if purpose == "calibration":
            return self.local_calibration, self.local_calibration_sha256
        return self.local_evaluation, self.local_evaluation_sha256


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One set: what it is, whose it is, what it may serve and how it is reached (calib_data/cards/NAME.toml)."""

    name: str
    description: str
    language: str
    kind: Literal["text", "chat"]
    role: Literal["calibration", "evaluation", "both"]
    licence: str
    source: str
    loader: Builtin | Hub

    def serves(self, purpose: Purpose) -> bool:
        """Whether the set may be used for `purpose`."""
        return self.role in ("both", purpose)

    def sha256(self, purpose: Purpose) -> str:
        """The sha256 of the file that serves `purpose`, "" where none is known."""
        if not self.serves(purpose):
            return ""
        return self.loader.sha256 if isinstance(self.loader, Builtin) else self.loader.local(purpose)[1]


class Corpus(msgspec.Struct, frozen=True):
    """A loaded text. `canonical`: its sha256 is the one that its card states; False for a file of the user.

    `documents` are texts in order (a plain text file is one), `conversations` are lists of messages; a corpus has
    one or the other. `sha256` is of `raw` for plain text, of the file for .jsonl.
    """

    name: str
    sha256: str
    canonical: bool
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
    path = user_path(name_or_path)
    if path.is_file():
        return _load_file(path, known, purpose)
    if path.exists():
        raise QuantlabError(f"`{name_or_path}` is not a text file", "check the path")
    if path.suffix or os.sep in name_or_path:
        raise QuantlabError(f"`{name_or_path}` does not exist", "check the path")
    raise unknown_name(f"{purpose} text", name_or_path, [card.name for card in known.values() if card.serves(purpose)])


def _load_set(card: Card, known: dict[str, Card], purpose: Purpose, *, offline: bool) -> Corpus:
    notes = []
    if not card.serves(purpose):
        if purpose == "calibration":
            raise _spoils(card.name)
        notes, purpose = [_calibration_text(card.name)], "calibration"
    if isinstance(card.loader, Builtin):
        corpus = _builtin(card, card.loader)
    else:
        try:
            corpus = _of_hub(card, card.loader, purpose, offline=offline)
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


def _builtin(card: Card, loader: Builtin) -> Corpus:
    path = data_folder() / loader.file
    corpus = _read(path, card.name)
    if corpus.sha256 != loader.sha256:
        raise QuantlabError(f"`{path}` is not the text that its card describes", "install quantlab again")
    return msgspec.structs.replace(corpus, canonical=True)


def _of_hub(card: Card, hub: Hub, purpose: Purpose, *, offline: bool) -> Corpus:
    """The text of a set of the Hub: the local file, else the cache, else the Hub itself."""
    name, sha256 = hub.local(purpose)
    folder = os.environ.get(DATA_VARIABLE)
    near = f"set {DATA_VARIABLE} to a folder with `{name}`, or name a file" if name else "name a file of your own"
    if name and folder and (path := Path(folder) / name).is_file():
        corpus = _read(path, card.name)
        if corpus.sha256 == sha256:
            return msgspec.structs.replace(corpus, canonical=True)
        if purpose == "calibration" and corpus.sha256 == hub.local("evaluation")[1]:
            raise _spoils(str(path))
        return _not_canonical(corpus)
    cached = _cache_path(card, hub, purpose)
    if not cached.is_file():
        if offline or os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
            raise QuantlabError(
                f"the text `{card.name}` is not on this machine, and the network is not to be used", near
            )
        _keep(cached, card, _hub_rows(hub, purpose, near, None if card.name == WIKITEXT else _HUB_ROWS))
    corpus = _read(cached, card.name)
    if corpus.sha256 == sha256:
        return msgspec.structs.replace(corpus, canonical=True)
    # The Hub's WikiText becomes the raw file again; of other sets the cache holds other rows than the local file.
    return _not_canonical(corpus) if card.name == WIKITEXT else corpus


def _not_canonical(corpus: Corpus) -> Corpus:
    note = Notice(
        "not-canonical",
        f"`{corpus.name}` is not what it looks like: its sha256 {corpus.sha256[:12]}... is of no canonical file",
        "do not compare its perplexity with published numbers",
    )
    return msgspec.structs.replace(corpus, name=f"{corpus.name} (not canonical)", notes=[*corpus.notes, note])


def _load_file(path: Path, known: dict[str, Card], purpose: Purpose) -> Corpus:
    corpus = _read(path, path.name)
    for card in known.values():
        if corpus.sha256 == card.sha256("evaluation"):
            if purpose == "calibration":
                raise _spoils(path.name)
            return msgspec.structs.replace(corpus, name=card.name, canonical=True)
        if corpus.sha256 == card.sha256("calibration"):
            notes = [_calibration_text(path.name)] if purpose == "evaluation" else []
            return msgspec.structs.replace(corpus, canonical=True, notes=notes)
    if purpose == "calibration":
        _refuse_evaluation(corpus, known)
    marks = len(_WIKITEXT_MARKS.findall(corpus.raw[:20_000]))
    if purpose == "evaluation" and (_WIKITEXT_NAME.match(path.name) or marks > _FEW_MARKS):
        return _not_canonical(corpus)
    return corpus


def _refuse_evaluation(corpus: Corpus, known: dict[str, Card]) -> None:
    """Raise UsageError for a text of which a part is evaluation text, as far as that is on this machine."""
    for card in known.values():
        if not card.serves("evaluation"):
            continue
        try:
            loader = card.loader
            text = (
                _builtin(card, loader)
                if isinstance(loader, Builtin)
                else _of_hub(card, loader, "evaluation", offline=True)
            )
        except QuantlabError:
            continue
        if (share := shared(corpus.raw, text.raw)) > _LARGEST_SHARE:
            raise UsageError(
                f"{share:.0%} of `{corpus.name}` is the evaluation text `{card.name}`: calibrating on it would spoil "
                "the measurement",
                "take it out, or use another text with `--calib`",
            )


def _read(path: Path, name: str) -> Corpus:
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
    return Corpus(name, sha256, False, documents, conversations)


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
                documents.append(_sound(row["text"].strip()))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            hint = 'each line is {"text": "..."} or {"messages": [{"role": "...", "content": "..."}]}'
            raise QuantlabError(f"`{path}` line {number} is not readable: {error!r}", hint) from error
    if documents and conversations:
        raise QuantlabError(f"`{path}` mixes texts and conversations", "split it into two files")
    return [d for d in documents if d], [c for c in conversations if c]


def _messages(value: Any) -> list[Message]:
    return [{"role": str(m["role"]), "content": _sound(str(m["content"]))} for m in value]


def _sound(text: str) -> str:
    r"""The text without lone surrogates, which JSON can write (`\ud800`) and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def _fallback(card: Card, error: QuantlabError) -> Corpus:
    assert isinstance(card.loader, Builtin)
    note = Notice(
        "builtin-text",
        f"{error.message}; `{card.name}` was used instead: compare its perplexity with no other text's",
        error.hint,
    )
    return msgspec.structs.replace(_builtin(card, card.loader), notes=[note])


def _cache_path(card: Card, hub: Hub, purpose: Purpose) -> Path:
    form = "txt" if card.name == WIKITEXT else "jsonl"
    return cache_folder() / "corpora" / f"{card.name}-{hub.split(purpose)}.{form}"


def _keep(path: Path, card: Card, rows: list[Any]) -> None:
    """Keep rows of the Hub in the cache, where `--offline` finds them."""
    if card.name == WIKITEXT:
        write_text(path, raw_of(rows))
    else:
        key = "messages" if card.kind == "chat" else "text"
        write_text(path, "".join(json.dumps({key: row}, ensure_ascii=False) + "\n" for row in rows))


def _hub_rows(hub: Hub, purpose: Purpose, near: str, limit: int | None) -> list[Any]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise missing_extra("datasets", "data") from None
    from huggingface_hub import HfApi

    try:
        # `datasets` itself tries for minutes where no network is.
        HfApi().dataset_info(hub.dataset, timeout=_HUB_TIMEOUT_S)
        stream = datasets.load_dataset(hub.dataset, hub.config, split=hub.split(purpose), streaming=True)
        return [row[hub.column] for row in itertools.islice(stream, limit)]
    except Exception as error:
        # Whatever it is (network, gating, a renamed column), the user's next step is the same.
        first = str(error).partition("\n")[0]
        raise QuantlabError(f"`{hub.dataset}` cannot be read from the Hub: {first}", near) from error
