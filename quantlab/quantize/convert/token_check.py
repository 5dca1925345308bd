"""Whether a GGUF splits text into the same tokens as the Hugging Face tokenizer that it was made from."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from quantlab.core.errors import QuantlabError, missing_extra

Ids = npt.NDArray[np.int32]

_KEPT_DIFFERENCES = 20
_CONTEXT_TOKENS = 3
_LARGEST_PIECE = 1024

PROBE = """\
The kettle sings at 7:45 a.m.; by 8 o'clock everyone's tea is cold — again. "Who'd have thought?", she asked.
Größe, Übermut und süße Träume: der Fuchs läuft über 1.234,56 Brücken. L'été, où l'on rêve déjà d'îles cœur à cœur.
¿Mañana? ¡Quizás! A avó põe pão à mesa. Zażółć gęślą jaźń; příliš žluťoučký kůň; İstanbul'da ılık bir akşam.
Холодный ветер гонит листья по пустой улице. Το φεγγάρι καθρεφτίζεται στο νερό. שלום לכל הקוראים. صباح الخير يا أصدقاء.
नदी के किनारे एक पुराना पेड़ है। แมวนอนหลับอยู่บนหลังคา Đêm nay trời nhiều sao. ქარი მთებიდან უბერავს.
今天下午三点半,我们在河边喝茶。窓の外で雨が静かに降っている。오늘은 하늘이 참 맑고 바람이 시원하다.
😀👩‍👩‍👧🏽‍🚒 ½ ¾ x² + y³ ≈ √2 · π ± 0.001 ﬁn № 5 ① … e\u0301 \u00a0|\u3000|\u200b|
def area(r: float) -> float:\n\treturn 3.14159 * r ** 2  # m²\n\n\n    if (x != y && !done) { a[i]++; }  \n
3 33 333 4444 55555 1,000,000 0x1F 10e-7 http://example.org/a_b?q=1&r=%20#top   trailing spaces   \r\n\tEND"""


class TokenDifference(msgspec.Struct, frozen=True):
    """One place where the two tokenizers part: `position` counts the tokenizer's tokens of text number `text`."""

    text: int
    mode: Literal["plain", "special"]
    position: int
    around: str
    expected: list[str]
    got: list[str]


class TokenCheck(msgspec.Struct, frozen=True):
    """`n_ids` compared in both modes together, 0 where the folder has no tokenizer.json to compare with.

    `bos` counts the BOS tokens that llama.cpp puts at the head of a text, `expected_bos` those of the tokenizer.
    """

    n_ids: int
    n_different: int
    bos: int
    expected_bos: int
    # The first ones only.
    differences: list[TokenDifference]


def check_tokens(folder: Path, gguf: Path, texts: list[str]) -> TokenCheck:
    """Tokenize `texts` with tokenizer.json of `folder` and with llama.cpp, and compare.

    Once as plain text, where control tokens that are written out are text, and once as prompts are read: control
    tokens parsed, BOS and EOS added. Raises QuantlabError where either does not load.
    """
    theirs = _tokenizer(folder)
    if theirs is None:
        return TokenCheck(0, 0, 0, 0, [])
    found: list[TokenDifference] = []
    n_ids = n_different = bos = expected_bos = 0
    modes: tuple[Literal["plain", "special"], ...] = ("plain", "special")
    with _Vocabulary(gguf) as ours:
        for mode in modes:
            special = mode == "special"
            theirs.encode_special_tokens = not special
            for number, text in enumerate(texts):
                expected = np.array(theirs.encode(text, add_special_tokens=special).ids, np.int32)
                got = ours.encode(text, special=special)
                spans = _different_spans(expected, got, ours.piece)
                n_ids, n_different = n_ids + len(expected), n_different + len(spans)
                for a, b in spans[: _KEPT_DIFFERENCES - len(found)]:
                    found.append(_difference(ours, number, mode, (expected, a), (got, b)))
                if special:
                    bos = max(bos, _leading(got, ours.bos))
                    expected_bos = max(expected_bos, _leading(expected, ours.bos))
    return TokenCheck(n_ids, n_different, bos, expected_bos, found)


def _difference(
    vocabulary: _Vocabulary,
    number: int,
    mode: Literal["plain", "special"],
    expected: tuple[Ids, slice],
    got: tuple[Ids, slice],
) -> TokenDifference:
    (theirs, a), (ours, b) = expected, got
    around = theirs[max(0, a.start - _CONTEXT_TOKENS) : a.stop + _CONTEXT_TOKENS]
    pieces = [[vocabulary.text([token]) for token in ids] for ids in (theirs[a], ours[b])]
    return TokenDifference(number, mode, a.start, vocabulary.text(around), *pieces)


def _tokenizer(folder: Path) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise missing_extra("tokenizers", "gguf") from None
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise QuantlabError(f"`{path}` is damaged: {error}", "download it again") from error


def _leading(ids: Ids, token: int) -> int:
    others = np.flatnonzero(ids != token)
    return int(others[0]) if len(others) else len(ids)


def _different_spans(a: Ids, b: Ids, piece: Callable[[int], bytes]) -> list[tuple[slice, slice]]:
    """Spans of `a` and `b` that stand for the same bytes with other tokens."""
    if np.array_equal(a, b):
        return []
    spans = []
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            i, j = i + 1, j + 1
            continue
        start, ahead = (i, j), 0
        # Walk on with whichever is behind until both end at the same byte again.
        while (i, j) == start or (ahead and i < len(a) and j < len(b)):
            if ahead <= 0:
                ahead, i = ahead + len(piece(int(a[i]))), i + 1
            if ahead > 0 and j < len(b):
                ahead, j = ahead - len(piece(int(b[j]))), j + 1
        spans.append((slice(start[0], i), slice(start[1], j)))
    if i < len(a) or j < len(b):
        spans.append((slice(i, len(a)), slice(j, len(b))))
    return spans


class _Vocabulary:
    """The vocabulary of a GGUF in llama.cpp, without its weights."""

    def __init__(self, path: Path) -> None:
        try:
            import llama_cpp.llama_cpp as lib
        except ImportError:
            raise missing_extra("llama-cpp-python", "gguf") from None
        self._lib = lib
        params = lib.llama_model_default_params()
        params.vocab_only = True
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise QuantlabError(f"llama.cpp does not load the vocabulary of `{path}`", "convert the model again")
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.bos: int = lib.llama_vocab_bos(self._vocab)
        self._pieces: dict[int, bytes] = {}

    def __enter__(self) -> _Vocabulary:
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.llama_model_free(self._model)

    def encode(self, text: str, *, special: bool) -> Ids:
        data = text.encode()
        # A byte is at most one token, and the tokenizer adds a few around them.
        buffer = (self._lib.llama_token * (len(data) + 8))()
        n = self._lib.llama_tokenize(self._vocab, data, len(data), buffer, len(buffer), special, special)
        if n < 0:
            raise QuantlabError(f"llama.cpp does not tokenize a text of {len(data)} bytes", "use a shorter text")
        return np.array(buffer[:n], np.int32)

    def piece(self, token: int) -> bytes:
        if token not in self._pieces:
            buffer = ctypes.create_string_buffer(_LARGEST_PIECE)
            n = self._lib.llama_token_to_piece(self._vocab, token, buffer, _LARGEST_PIECE, 0, True)
            self._pieces[token] = buffer.raw[: max(0, n)]
        return self._pieces[token]

    def text(self, tokens: Sequence[int] | Ids) -> str:
        return b"".join(self.piece(int(token)) for token in tokens).decode("utf-8", "replace")
