"""tokenizer.json, tokenizer.model and tokenizer_config.json -> tokenizer.ggml.*.

Two kinds: `gpt2` is byte-level BPE with merges and a named pre-tokenizer, `llama` is SentencePiece's BPE with scores.
Keys: ggml docs/gguf.md; their meaning: llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantlab.core.artifact import read_json
from quantlab.core.errors import QuantlabError, missing_extra
from quantlab.quantize.convert.architectures import UPSTREAM_HINT, list_names
from quantlab.quantize.convert.pretokenizers import pre_tokenizer
from quantlab.quantize.convert.sentencepiece_model import read_sentencepiece

# gguf.TokenType
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_PADDING_SCORE, _ADDED_SCORE = -10000.0, -1000.0
# Tokens that act as control tokens although some tokenizers do not say so; llama.cpp's converter lists them.
_CONTROL_LOOK = re.compile(r"<pad>|<mask>|<2mass>|\[@BOS@\]|<\|.*\|>|<｜.*｜>|<unused.*>", re.DOTALL)
# SmolLM and the small Granite models name a BOS token and are not trained with one.
_VOCAB_WITHOUT_BOS = 49152
# What reading JSON of another form than expected ends in.
_DAMAGED = (KeyError, TypeError, ValueError, AttributeError, IndexError)


@dataclass
class Vocabulary:
    """What becomes tokenizer.ggml.*; a table entry for every row of the embedding."""

    kind: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    # None where llama.cpp's default for the kind holds.
    adds_space_prefix: bool | None
    # None where the tokenizer files say it.
    adds_bos: bool | None = None


def read_vocabulary(folder: Path, vocab_size: int, *, arch: str) -> Vocabulary:
    """The tokenizer of a folder with `vocab_size` entries; rows without a token are padded with unused ones.

    Raises QuantlabError for a missing or damaged tokenizer, one that llama.cpp has no counterpart for, an unknown
    pre-tokenizer, and token tables that llama.cpp would abort on.
    """
    path = folder / "tokenizer.json"
    if not path.is_file() and not (folder / "tokenizer.model").is_file():
        raise QuantlabError(f"`{folder}` has neither tokenizer.json nor tokenizer.model", "download the tokenizer")
    described = read_json(path) if path.is_file() else {}
    config = _optional_json(folder / "tokenizer_config.json")
    try:
        if not path.is_file() or _is_sentencepiece(described):
            vocabulary = _sentencepiece(folder, described, config, vocab_size)
        else:
            vocabulary = _byte_level(path, vocab_size)
    except _DAMAGED as error:
        raise _damaged(folder, error) from error
    if arch == "llama" and vocab_size == _VOCAB_WITHOUT_BOS:
        vocabulary.adds_bos = False
    # llama.cpp's converter copies the setting for these only; BPE has no use for it.
    if isinstance(prefix := config.get("add_prefix_space"), bool) and (vocabulary.kind == "llama" or arch == "llama"):
        vocabulary.adds_space_prefix = prefix
    _check(vocabulary)
    return vocabulary


def _damaged(folder: Path, error: Exception) -> QuantlabError:
    return QuantlabError(f"the tokenizer of `{folder}` is damaged: {error!r}", "download it again")


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _is_sentencepiece(described: dict[str, Any]) -> bool:
    """Whether tokenizer.json holds a converted SentencePiece model: BPE that falls back to byte tokens."""
    model = described.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        raise QuantlabError(f"tokenizer.json: llama.cpp has no counterpart of the model {kind!r} here", UPSTREAM_HINT)
    return bool(model.get("byte_fallback"))


def _byte_level(path: Path, vocab_size: int) -> Vocabulary:
    """Byte-level BPE, in the order of ids."""
    try:
        import tokenizers
    except ImportError:
        raise missing_extra("tokenizers", "gguf") from None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise QuantlabError(f"`{path}` is damaged: {error}", "download it again") from error
    added = tokenizer.get_added_tokens_decoder()
    by_id = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=True).items()}
    _check_size([i for i in by_id if i not in added], vocab_size)
    tokens, types = [], []
    for i in range(vocab_size):
        token, kind = by_id.get(i, f"[PAD{i}]"), _NORMAL if i in by_id else _UNUSED
        if i in added:
            token, kind = _added_token(tokenizer, added[i])
        tokens.append(token)
        types.append(kind)
    return Vocabulary("gpt2", pre_tokenizer(tokenizer), tokens, types, [], None)


def _added_token(tokenizer: Any, added: Any) -> tuple[str, int]:
    """Text and type of an added token; llama.cpp matches it in text that is normalized already."""
    token = str(added.content)
    if not added.normalized:
        ids = tokenizer.encode(token, add_special_tokens=False).ids
        token = tokenizer.decode(ids, skip_special_tokens=False)
    if added.special or _CONTROL_LOOK.fullmatch(token):
        return token, _CONTROL
    return token.replace("▁", " "), _USER_DEFINED


def _sentencepiece(folder: Path, described: dict[str, Any], config: dict[str, Any], vocab_size: int) -> Vocabulary:
    """SentencePiece BPE: from tokenizer.model, else from the merges of tokenizer.json."""
    if (path := folder / "tokenizer.model").is_file():
        model = read_sentencepiece(path)
        pieces = dict(enumerate(zip(model.pieces, model.scores, model.types, strict=True)))
        prefix = model.adds_space_prefix
    else:
        pieces, prefix = _from_merges(described["model"]), True
    if described:
        prefix = _prepends_space(described)
    _check_size([i for i, piece in pieces.items() if piece[2] != _UNUSED], vocab_size)
    table = [pieces.get(i, (f"[PAD{i}]", _PADDING_SCORE, _UNUSED)) for i in range(vocab_size)]
    # tokenizer.model calls them normal, and only what is user defined is found whole in a text.
    table = [(token, score, _NORMAL if kind == _USER_DEFINED else kind) for token, score, kind in table]
    for i, token, special in _listed_tokens(folder, described, config):
        # The tokenizer may know more tokens than the model has rows: gemma's image token, a pad token.
        if 0 <= i < vocab_size:
            control = special or bool(_CONTROL_LOOK.fullmatch(token))
            text = token if control else token.replace("▁", " ")
            table[i] = (text, _ADDED_SCORE, _CONTROL if control else _USER_DEFINED)
    tokens, scores, types = (list(column) for column in zip(*table, strict=True))
    return Vocabulary("llama", "default", tokens, types, scores, None if prefix else False)


def _from_merges(model: dict[str, Any]) -> dict[int, tuple[str, float, int]]:
    """Id -> (piece, score, type) of a SentencePiece model that was converted to merges.

    SentencePiece merges the pair whose union scores highest, the conversion wrote the pairs in that order; so a
    piece's score is the negative rank of its first merge.
    """
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    pieces = {}
    for piece, i in model["vocab"].items():
        if _BYTE_TOKEN.fullmatch(piece):
            pieces[int(i)] = (piece, 0.0, _BYTE)
        elif piece == model.get("unk_token"):
            pieces[int(i)] = (piece, 0.0, _UNKNOWN)
        else:
            pieces[int(i)] = (piece, -float(ranks.get(piece, len(ranks))), _NORMAL)
    return pieces


def _prepends_space(described: dict[str, Any]) -> bool:
    """Whether the normalizer or pre-tokenizer of tokenizer.json puts "▁" before a text."""
    for key, many in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        step = described.get(key) or {}
        for one in step.get(many, [step]):
            if one.get("type") == "Prepend":
                return True
            if one.get("type") == "Metaspace":
                return bool(one.get("prepend_scheme", "always") != "never" and one.get("add_prefix_space", True))
    return False


def _listed_tokens(folder: Path, described: dict[str, Any], config: dict[str, Any]) -> Iterator[tuple[int, str, bool]]:
    """(id, text, special) of every added token, in each place where versions of transformers put them."""
    for token, i in _optional_json(folder / "added_tokens.json").items():
        yield int(i), token, False
    for key, entry in config.get("added_tokens_decoder", {}).items():
        yield int(key), str(entry["content"]), bool(entry.get("special"))
    for entry in described.get("added_tokens", []):
        yield int(entry["id"]), str(entry["content"]), bool(entry.get("special"))


def _check_size(ids: list[int], vocab_size: int) -> None:
    if (largest := max(ids, default=-1)) >= vocab_size:
        raise QuantlabError(
            f"the tokenizer has ids up to {largest}, the embedding {vocab_size} rows",
            "the tokenizer belongs to another model, or `vocab_size` of config.json is wrong",
        )


def _check(vocabulary: Vocabulary) -> None:
    """Refuse tables that make llama.cpp end the process: it asserts and looks up without a check."""
    counts = Counter(vocabulary.tokens)
    if twice := [token for token, n in counts.items() if n > 1]:
        raise QuantlabError(f"the tokenizer has tokens of the same text: {list_names(twice)}", UPSTREAM_HINT)
    if vocabulary.kind == "llama" and any(f"<0x{byte:02X}>" not in counts for byte in range(256)):
        raise QuantlabError("the tokenizer lacks some of the 256 byte tokens", "llama.cpp cannot run without them")


def write_vocabulary(writer: Any, vocabulary: Vocabulary, folder: Path) -> None:
    """Put tokens, special tokens and the chat template into the metadata of a GGUFWriter."""
    import gguf

    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    if vocabulary.adds_space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.adds_space_prefix)
    try:
        special = gguf.SpecialVocab(folder, load_merges=vocabulary.kind == "gpt2", n_vocab=len(vocabulary.tokens))
        # gguf looks for the template file only where there is a tokenizer_config.json.
        if special.chat_template is None and (path := folder / "chat_template.jinja").is_file():
            special.chat_template = path.read_text(encoding="utf-8")
    except _DAMAGED as error:
        raise _damaged(folder, error) from error
    if vocabulary.kind == "gpt2" and not special.merges:
        raise QuantlabError("tokenizer.json holds no merges", "download it again")
    if vocabulary.adds_bos is not None:
        special.add_special_token["bos"] = vocabulary.adds_bos
    special.add_to_gguf(writer, quiet=True)
