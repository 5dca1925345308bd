"""Values that applications put into prompts, by their form: times, ids, names of people, amounts.

Months and weekdays are known by their first letters in the languages of Europe, dates and clocks also as Chinese,
Japanese and Korean write them.
"""

from __future__ import annotations

import difflib
import re
from typing import Literal, NamedTuple

Kind = Literal["timestamp", "id", "user name", "number", "value"]

_MONTH = (
    r"(?i:jan|ene|gen|styc|feb|fév|fev|luty|mar|mär|mrt|apr|avr|abr|kwie|ma[ijyg]\b|mag|mei|jun|jui|giu|czer|jul|lug|lip"
    r"|aug|ago|aoû|sie|sep|set|wrz|oct|okt|ott|out|paź|nov|lis|dec|dez|déc|dic|gru|янв|фев|мар|апр|ма[йя]|ию[нл]|авг|сен"
    r"|окт|ноя|дек)[^\W\d_]*\.?"
)
_WEEKDAY = (
    r"\b(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
    r"|(?:Mon|Diens|Donners|Frei|Sams|Sonn)tag|Mittwoch|Sonnabend|(?i:lun|mar|mercre|jeu|vendre|same)di|(?i:dimanche)"
    r"|(?i:lunes|martes|miércoles|jueves|viernes|sábado|domingo))\b"
)
_WEEKDAY_CJK = r"(?:星期|周|週)[一二三四五六日天]|[月火水木金土日]曜日|[월화수목금토일]요일"
_CLOCK = (
    r"(?<!\d)\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\b\.?)?(?: ?(?:Z|[+-]\d\d:?\d\d|[A-Z]{3,4})\b)?"
    r"|\b\d{1,2} ?h ?\d\d\b|\d{1,2} ?[时時点點시] ?(?:\d{1,2} ?[分분] ?)?(?:\d{1,2} ?[秒초])?"
)
_DATE = (
    r"\b\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?!\d)|\b\d{4}-W\d\d\b|\b\d{1,2}[/.]\d{1,2}[/.]\d{2,4}\b"
    r"|(?:\d{4} ?[年년] ?)?\d{1,2} ?[月월] ?(?:\d{1,2} ?[日号號일])?"
    rf"|\b\d{{1,2}}(?:st|nd|rd|th|er|\.|º)? (?:de |of )?\b{_MONTH}(?:,? (?:de )?\d{{4}}\b)?"
    rf"|\b{_MONTH}(?: \d{{1,2}}(?:st|nd|rd|th)?\b)(?:,? \d{{4}}\b)?|\b{_MONTH} \d{{4}}\b"
)
_DAY = rf"(?:{_WEEKDAY},? (?:den |le |el )?)?(?:{_DATE})(?: ?[（(]?(?:{_WEEKDAY_CJK}))?[)）]?"
_TIMES = re.compile(
    rf"(?:{_DAY}|{_WEEKDAY}|{_WEEKDAY_CJK})(?:[T, ]{{1,2}}|(?=\d))(?:(?:at|um|à|alle|a las|kl\.?|в|о) )?(?:{_CLOCK})"
    rf"|{_DAY}|{_CLOCK}|{_WEEKDAY}|{_WEEKDAY_CJK}"
    r"|\b20[0-4]\d(?:0[1-9]|1[0-2])(?:[0-2]\d|3[01])(?:[T_-]?\d{4,6}Z?)?\b"
    r"|\b1[5-9]\d{8}(?:\d{3}){0,3}(?:\.\d+)?\b"
)
_IDS = re.compile(
    r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"
    r"|\b(?=[0-9a-fA-F]*\d)(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{8,}\b"
    r"|\b[A-Za-z]{1,16}[-_#](?=[\w-]*\d)[\w-]{4,}"
    r"|\b(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{16,}\b"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}\b"
)
_ID_KEYS = re.compile(
    r"(?i)(?:\b(?:\w*[ _-])?(?:id|uuid|guid|nonce|session|request|trace|correlation|conversation|thread|ticket|case|"
    r"order|invoice|run|build|seed|transaction|token|hash|key|ref(?:erence)?)s?\b[\"']?(?: (?:number|no\.?|id|is))?"
    r"\s*[:=#]?\s*|(?:编号|单号|会话|请求|番号|번호)[:： ]*|#\s?)[\"']?(?=[\w-]*\d)[\w-]+"
)
# The id itself, behind its key.
_ID_BEHIND = re.compile(r"[\w-]+$")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+")
_NAME_KEYS = re.compile(
    r"(?i)(?:\b(?:user(?:[ _]?name)?|name|customer|client|caller|member|employee|account(?: holder| owner)?|patient|"
    r"student|agent|owner|author|e-?mail|help(?:ing)?|assist(?:ing)?|serv(?:e|ing)|(?:speak|talk|chat)(?:ing)? "
    r"(?:with|to)|hello|hi|hey|dear|welcome(?: back)?|for|on behalf of|signed in as|logged in as|benutzer(?:name)?|"
    r"kund(?:e|in)|hallo|utilisateur|client|bonjour|usuario|cliente|nombre|hola|nome|nom)\b"
    r"|用户名?|客户|顾客|姓名|学生|患者|您好|你好|ユーザー|お客様|名前|사용자|고객|이름)[\"']?[\s:：=,，\"']*(?:is\s+|named\s+|是)?$"
)
_AMOUNT = re.compile(r"[\d.,%$€£]+")
_NAME = re.compile(r"[^\W\d_][\w'-]*(?: [A-Z][\w'-]*)*")
_TOKEN = re.compile(r"[\w-]+")
_FORMS: dict[str, tuple[re.Pattern[str], ...]] = {
    "timestamp": (_TIMES,), "id": (_IDS, _TOKEN), "user name": (_EMAIL, _NAME), "number": (_AMOUNT,),
}  # fmt: skip
_KNOWN: tuple[tuple[Kind, re.Pattern[str]], ...] = (("timestamp", _TIMES), ("id", _IDS), ("user name", _EMAIL))
# Chinese and Japanese write no spaces between words.
_WORD = re.compile(r"\d+|[\u3040-\u30ff\u3400-\u9fff]|[^\W\d_\u3040-\u30ff\u3400-\u9fff]+|.", re.DOTALL)
# Of longer texts only the beginning is aligned, which takes time that grows with the square.
_MOST_WORDS, _MOST_CHARACTERS = 256, 4096
# Texts of which so much is equal are one form with another value.
_ALIKE = 0.5


class Value(NamedTuple):
    """What differs in two texts of one form: from `start` to `end` of the new one."""

    kind: Kind
    start: int
    end: int


def value_of(old: str, new: str) -> Value | None:
    """The first value that differs; None where the texts are not of one form."""
    old, new = old[:_MOST_CHARACTERS], new[:_MOST_CHARACTERS]
    (from_old, to_old), (start, end), equal = _changed(old, new)
    for kind, pattern in _KNOWN:
        was, found = _covers(pattern, old, from_old, to_old), _covers(pattern, new, start, end)
        if was is not None and found is not None:
            return Value(kind, min(found[0], start), max(found[1], end))
    named = _NAME_KEYS.search(new[:start]) and not (new[start : start + 1] + old[from_old : from_old + 1]).islower()
    if named and new[start : start + 1].isalpha() and old[from_old : from_old + 1].isalpha():
        return Value("user name", start, end)
    if equal < _ALIKE and re.search(r"[:：=]\s*[\"']?$", new[:start]) is None:
        return None
    was, found = _covers(_ID_KEYS, old, from_old, to_old), _covers(_ID_KEYS, new, start, end)
    if was is not None and found is not None:
        return Value("id", found[0] + len(_ID_BEHIND.sub("", new[found[0] : found[1]])), max(found[1], end))
    if _AMOUNT.fullmatch(old[from_old:to_old].strip()) and _AMOUNT.fullmatch(new[start:end].strip()):
        return Value("number", start, end)
    return Value("value", start, end)


def value_at(kind: str, text: str, start: int) -> int | None:
    """Where a value of this kind ends that begins at `start`; None where there is none."""
    ends = (match.end() for form in _FORMS.get(kind, ()) if (match := form.match(text, start)))
    return next(ends, None)


def _changed(old: str, new: str) -> tuple[tuple[int, int], tuple[int, int], float]:
    """The first words that differ, as ranges of both texts, and the share of the letters that are equal."""
    words = [_WORD.findall(text)[:_MOST_WORDS] for text in (old, new)]
    matcher = difflib.SequenceMatcher(None, words[0], words[1], autojunk=False)
    first: tuple[int, int, int, int] | None = None
    equal, closed = 0, False
    for tag, a, to_a, b, to_b in matcher.get_opcodes():
        # What stands between two words of one value is none of its ends.
        between = tag == "equal" and not any(word[0].isalnum() for word in words[1][b:to_b])
        if tag == "equal":
            equal += sum(len(word) for word in words[1][b:to_b] if word[0].isalnum())
            closed = closed or (first is not None and not between)
        elif first is None:
            first = (a, to_a, b, to_b)
        elif not closed:
            first = (first[0], to_a, first[2], to_b)
    most = max(1, *(sum(len(word) for word in of if word[0].isalnum()) for of in words))
    a, to_a, b, to_b = first or (len(words[0]), len(words[0]), len(words[1]), len(words[1]))
    ranges = [(_length(words[0][:a]), _length(words[0][:to_a])), (_length(words[1][:b]), _length(words[1][:to_b]))]
    return ranges[0], ranges[1], equal / most


def _length(words: list[str]) -> int:
    return sum(map(len, words))


def _covers(pattern: re.Pattern[str], text: str, start: int, end: int) -> tuple[int, int] | None:
    """The match that holds the difference from `start` to `end`, or a part of it."""
    for match in pattern.finditer(text):
        if match.start() <= start < match.end() or start <= match.start() < end:
            return match.span()
    return None
