"""What kind of text differs between two requests that go on alike: a time, an id, a name, an order, another template.

Only the place of the first difference is looked at, and what stands behind it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

from quantlab.bench.prefix_cache.lint.log import Request, Segment

Cause = Literal[
    "timestamp", "id", "user name", "number", "value", "tool order", "tool keys", "tool set", "order", "template",
    "history", "stable text behind",
]  # fmt: skip

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?|"
    r"Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_TIMES = re.compile(
    rf"\d{{4}}[-/]\d{{1,2}}[-/]\d{{1,2}}(?:[T ]\d{{1,2}}:\d\d(?::\d\d(?:\.\d+)?)?)?(?:Z|[+-]\d\d:?\d\d)?"
    rf"|\d{{1,2}}:\d\d(?::\d\d(?:\.\d+)?)?(?: ?[AaPp]\.?[Mm]\b\.?)?"
    rf"|\b\d{{1,2}}[/.]\d{{1,2}}[/.]\d{{2,4}}\b"
    rf"|\b(?:{_DAY},? )?(?:\d{{1,2}}(?:st|nd|rd|th)? )?\b{_MONTH}\b\.?(?: \d{{1,2}}(?:st|nd|rd|th)?\b)?(?:,? \d{{4}})?"
    rf"|\b{_DAY}\b"
    rf"|\b1[5-9]\d{{8}}(?:\d{{3}})?(?:\.\d+)?\b"
)
_IDS = re.compile(
    r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"
    r"|\b(?=[0-9a-fA-F]*\d)(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{8,}\b"
    r"|\b[A-Za-z]{1,16}[-_#](?=[\w-]*\d)[\w-]{4,}"
)
_ID_KEYS = re.compile(
    r"(?i)(?:\b(?:\w*[ _-])?(?:id|uuid|guid|nonce|session|request|trace|correlation|conversation|thread|ticket|case|"
    r"order|invoice|run|build|seed|transaction|token|hash|key|ref(?:erence)?)s?\b[\"']?(?: (?:number|no\.?|id|is))?"
    r"\s*[:=#]?\s*|#\s?)[\"']?(?=[\w-]*\d)[\w-]+"
)
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+")
_NAME_KEYS = re.compile(
    r"(?i)\b(?:user(?:[ _]?name)?|name|customer|client|caller|member|employee|account(?: holder| owner)?|patient|"
    r"student|agent|owner|author|e-?mail|help(?:ing)?|assist(?:ing)?|serv(?:e|ing)|(?:speak|talk|chat)(?:ing)? "
    r"(?:with|to)|hello|hi|hey|dear|welcome(?: back)?|for|on behalf of|signed in as|logged in as)\b[\"']?[\s:=,\"']*"
    r"(?:is\s+|named\s+)?$"
)
_WORD = re.compile(r"\w")
_AMOUNT = re.compile(r"[\d.,%$€£]+")
_NAME = re.compile(r"[^\W\d_][\w'-]*(?: [A-Z][\w'-]*)*")
_TOKEN = re.compile(r"[\w-]+")
_FORMS: dict[str, tuple[re.Pattern[str], ...]] = {
    "timestamp": (_TIMES,), "id": (_IDS, _TOKEN), "user name": (_EMAIL, _NAME), "number": (_AMOUNT,),
}  # fmt: skip


class Difference(NamedTuple):
    """The first difference of two requests. `key` names what differs: the same for all requests with that difference.

    `earlier` and `now` are the segments, `value` the text that changed as it is now.
    """

    cause: Cause
    part: str
    key: str
    earlier: str
    now: str
    value: str


def difference(
    earlier: Request, at_earlier: int | None, now: Request, at_now: int | None, *, frequent: Callable[[str], bool]
) -> Difference:
    """What differs between the segments at which two requests part; `frequent` tells texts that many requests have."""
    old = earlier[at_earlier] if at_earlier is not None else Segment("end", -1, "")
    new = now[at_now] if at_now is not None else Segment("end", -1, "")
    part = new.part if new.part != "end" else old.part
    if "tools" in (old.part, new.part):
        return _between_tools(earlier, old, now, new)
    if old.message != new.message or _cut_off(earlier, old, now, new):
        return Difference("history", part, "history", old.text, new.text, "")
    rest_old, rest_new = ({s.text for s in of if s.part == part} for of in (earlier[at_earlier:], now[at_now:]))
    if new.text in rest_old and old.text in rest_new:
        return Difference("order", part, "order", old.text, new.text, "")
    found = _of_value(old.text, new.text)
    if (
        new.message <= 0
        and (found is None or found[0] in ("number", "value"))
        and frequent(old.text)
        and frequent(new.text)
    ):
        return Difference("template", part, "template", old.text, new.text, new.text)
    if found is not None:
        return _valued(found, part, old, new)
    other: Cause = "value" if part == "system" else "stable text behind"
    return Difference(other, part, other, old.text, new.text, "")


def _between_tools(earlier: Request, old: Segment, now: Request, new: Segment) -> Difference:
    """Of one tool that is not the same text the value in it; else what the lists of tools are to each other."""
    cause: Cause = _of_tools(_of_part(earlier, "tools"), _of_part(now, "tools"))
    same_tool = cause == "tool set" and _tool_name(old.text) == _tool_name(new.text) != ""
    if same_tool and (found := _of_value(old.text, new.text)) is not None:
        return _valued(found, "tools", old, new)
    return Difference(cause, "tools", cause, old.text, new.text, _tool_name(new.text))


def _valued(found: tuple[Cause, int, str], part: str, old: Segment, new: Segment) -> Difference:
    cause, start, value = found
    return Difference(cause, part, f"{cause}: {new.text[:start].strip()[-40:]}", old.text, new.text, value)


def _of_part(request: Request, part: str) -> list[str]:
    return [segment.text for segment in request if segment.part == part]


def _of_tools(old: list[str], new: list[str]) -> Cause:
    """Whether the same tools come in another order, written otherwise, or are not the same."""
    as_json = [[json.dumps(json.loads(tool), sort_keys=True) for tool in tools] for tools in (old, new)]
    if Counter(as_json[0]) != Counter(as_json[1]):
        return "tool set"
    return "tool keys" if as_json[0] == as_json[1] else "tool order"


def _tool_name(text: str) -> str:
    try:
        tool = json.loads(text)
        return str(tool.get("function", tool).get("name", ""))
    except (ValueError, AttributeError):
        return ""


def _cut_off(earlier: Request, old: Segment, now: Request, new: Segment) -> bool:
    """Whether the messages from here on stand further behind in the earlier request: its beginning was cut off."""
    if new.message < 1 or old.message != new.message:
        return False
    of_now = [s.text for s in now if s.message == new.message]
    later = {s.message for s in earlier if s.message > old.message}
    return any(of_now == [s.text for s in earlier if s.message == message] for message in later)


def _of_value(old: str, new: str) -> tuple[Cause, int, str] | None:
    """The kind of value that differs in two segments of one form, where it begins in the new one, and its text."""
    start = _common(old, new)
    behind = _common(old[start:][::-1], new[start:][::-1])
    ends = len(old) - behind, len(new) - behind
    # A difference in the middle of a word or number is one of the whole.
    while start and _WORD.match(new[start - 1]) and (_WORD.match(new[start : start + 1] or " ") or
                                                    _WORD.match(old[start : start + 1] or " ")):  # fmt: skip
        start -= 1
    for cause, pattern in (("timestamp", _TIMES), ("id", _IDS), ("user name", _EMAIL)):
        if (at := _covers(pattern, old, start, ends[0])) is not None and (
            found := _covers(pattern, new, start, ends[1])
        ) is not None:
            return cause, min(at, found), new[found : ends[1]]  # type: ignore[return-value]
    value_old, value_new = _value(old, start, ends[0]), _value(new, start, ends[1])
    if not _alike(old, new, start, behind):
        return None
    if _NAME_KEYS.search(new[:start]) and value_new[:1].isupper() and value_old[:1].isupper():
        return "user name", start, value_new
    if (found := _covers(_ID_KEYS, new, start, ends[1])) is not None and _covers(
        _ID_KEYS, old, start, ends[0]
    ) is not None:
        return "id", found, value_new
    if _AMOUNT.fullmatch(value_old.strip()) and _AMOUNT.fullmatch(value_new.strip()):
        return "number", start, value_new
    return "value", start, value_new


def value_at(cause: Cause, text: str, start: int) -> int | None:
    """Where a value of this kind ends that begins at `start`; None where there is none."""
    ends = (match.end() for form in _FORMS.get(cause, ()) if (match := form.match(text, start)))
    return next(ends, None)


def _value(text: str, start: int, end: int) -> str:
    while end < len(text) and _WORD.match(text[end - 1 : end] or " ") and _WORD.match(text[end]):
        end += 1
    return text[start:end]


def _alike(old: str, new: str, start: int, behind: int) -> bool:
    """Whether two segments are one form with another value: most of them is equal, or a key stands before the value."""
    key = re.search(r"[:=]\s*[\"']?$", new[:start]) is not None
    return key or start + behind >= 0.5 * max(len(old.strip()), len(new.strip()), 1)


def _covers(pattern: re.Pattern[str], text: str, start: int, end: int) -> int | None:
    """Where a match begins that holds the difference from `start` to `end`, or a part of it."""
    for match in pattern.finditer(text):
        if match.start() <= start < match.end() or start <= match.start() < end:
            return match.start()
    return None


def _common(a: str, b: str) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
