"""Whether a GGUF splits text into the same tokens as the Hugging Face tokenizer that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from quantlab.core.errors import QuantlabError, missing_extra
from quantlab.quantize.llama_model import LlamaModel

Mode = Literal["plain", "special"]

_KEPT_DIFFERENCES = 20
_CONTEXT_TOKENS, _SHOWN_TOKENS = 3, 8
# Two token sequences agree again where this many ids are the same, searched this far.
_AGREEING_TOKENS = 4
_SEARCHED_TOKENS = 64

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
    """One place where the two tokenizers part: `position` counts the tokenizer's tokens of text number `text`.

    `expected` and `got` are the first tokens of the folder's tokenizer and of llama.cpp there.
    """

    text: int
    mode: Mode
    position: int
    around: str
    expected: list[str]
    got: list[str]


class TokenCheck(msgspec.Struct, frozen=True):
    """`n_ids` compared in both modes together, 0 where the folder has no tokenizer.json to compare with.

    `n_different` counts the ids in the places where the two part, by the side that has more of them. `bos` counts the
    BOS tokens that llama.cpp puts at the head of a text, `expected_bos` those of the tokenizer.
    """

    n_ids: int
    n_different: int
    bos: int
    expected_bos: int
    # The first ones only.
    differences: list[TokenDifference]


def telling_lines(text: str) -> str:
    """The lines of `text` with a character that no line before them has.

    Tokenizers part over kinds of characters: of WikiText-2's test file these are 88 lines, 5% of it, with all of its
    259 characters; its beginning of that size has half of them.
    """
    seen: set[str] = set()
    lines = []
    for line in text.splitlines(keepends=True):
        if not seen.issuperset(line):
            seen.update(line)
            lines.append(line)
    return "".join(lines)


def check_tokens(folder: Path, gguf: Path, texts: list[str]) -> TokenCheck:
    """Tokenize `texts` with tokenizer.json of `folder` and with llama.cpp, and compare.

    Once as plain text, where control tokens that are written out are text, and once as prompts are read: control
    tokens parsed, BOS and EOS added. Raises QuantlabError where either does not load.
    """
    theirs = _tokenizer(folder)
    if theirs is None:
        return TokenCheck(0, 0, 0, 0, [])
    differences: list[TokenDifference] = []
    n_ids = n_different = 0
    modes: tuple[Mode, ...] = ("plain", "special")
    with LlamaModel(gguf) as ours:
        for mode in modes:
            special = mode == "special"
            theirs.encode_special_tokens = not special
            for number, text in enumerate(texts):
                expected = theirs.encode(text, add_special_tokens=special).ids
                got = ours.encode(text, special=special, add_special=special)
                spans = _different_spans(expected, got)
                n_ids += len(expected)
                n_different += sum(max(a.stop - a.start, b.stop - b.start) for a, b in spans)
                for a, b in spans[: _KEPT_DIFFERENCES - len(differences)]:
                    end = min(a.stop, a.start + _SHOWN_TOKENS) + _CONTEXT_TOKENS
                    around = theirs.decode(expected[max(0, a.start - _CONTEXT_TOKENS) : end], skip_special_tokens=False)
                    shown = expected[a][:_SHOWN_TOKENS], got[b][:_SHOWN_TOKENS]
                    pieces = [[str(theirs.id_to_token(token)) for token in ids] for ids in shown]
                    differences.append(TokenDifference(number, mode, a.start, around, *pieces))
        bos_token = theirs.token_to_id(ours.special_text("bos"))
        bos = _leading(ours.encode("a", special=True, add_special=True), bos_token)
        expected_bos = _leading(theirs.encode("a").ids, bos_token)
    return TokenCheck(n_ids, n_different, bos, expected_bos, differences)


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


def _leading(ids: list[int], token: int | None) -> int:
    return next((n for n, i in enumerate(ids) if i != token), len(ids))


def _different_spans(a: list[int], b: list[int]) -> list[tuple[slice, slice]]:
    """Spans in which `a` and `b` differ, each as short as the search finds it."""
    spans = []
    i = j = 0
    while i < len(a) or j < len(b):
        if i < len(a) and j < len(b) and a[i] == b[j]:
            i, j = i + 1, j + 1
            continue
        skip_a, skip_b = _resume(a, b, i, j)
        spans.append((slice(i, i + skip_a), slice(j, j + skip_b)))
        i, j = i + skip_a, j + skip_b
    return spans


def _resume(a: list[int], b: list[int], i: int, j: int) -> tuple[int, int]:
    """How many ids to leave out of both until they agree again for a while; all of them where they never do."""
    for skipped in range(1, _SEARCHED_TOKENS):
        for skip_a in range(skipped + 1):
            x, y = i + skip_a, j + skipped - skip_a
            if x <= len(a) and y <= len(b) and a[x : x + _AGREEING_TOKENS] == b[y : y + _AGREEING_TOKENS]:
                return skip_a, skipped - skip_a
    return len(a) - i, len(b) - j
