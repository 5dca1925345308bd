"""Why two requests part that go on alike: a value such as a time, an order, white space, another template.

Only the place of the first difference is looked at, and what stands behind it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from quantlab.bench.prefix_cache.lint.forms import Value, value_of
from quantlab.bench.prefix_cache.lint.log import Request, Segment
from quantlab.bench.prefix_cache.why import common_prefix

Cause = Literal[
    "timestamp", "id", "user name", "number", "value", "tool order", "tool keys", "tool set", "order", "turn order",
    "json keys", "white space", "template", "history", "stable text behind",
]  # fmt: skip
# The place of an item in its list: `[3]`, `2.`, `Document 4:`, `<doc id="1">`.
_PLACE = re.compile(r"^\W*(?:[^\W\d_]{1,12}\W{0,2}(?:id\W{1,3})?)?\d{1,3}\b\W*")
_WORD_OR_SIGN = re.compile(r"\w+|[^\w\s]")
# So many letters that are equal behind other white space make it the cause.
_EQUAL_BEHIND = 32


class Difference(NamedTuple):
    """The first difference of two requests. `key` names what differs: the same for all requests with that difference.

    `earlier` and `now` are the segments; what changed stands in `now` from `start` to `end`, if it is a value.
    """

    cause: Cause
    part: str
    key: str
    earlier: str
    now: str
    start: int = 0
    end: int = 0

    @property
    def head(self) -> str:
        """What stands before the value in its segment."""
        return self.now[: self.start]


def difference(
    earlier: Request, at_earlier: int | None, now: Request, at_now: int | None, *, frequent: Callable[[str], bool]
) -> Difference:
    """What differs between the segments at which two requests part; `frequent` tells texts that many requests have."""
    behind = (
        earlier[len(earlier) if at_earlier is None else at_earlier :],
        now[len(now) if at_now is None else at_now :],
    )
    old, new = (rest[0] if rest else Segment("end", -1, "") for rest in behind)
    part = old.part if new.part == "end" else new.part
    if "tools" in (old.part, new.part):
        return _between_tools(earlier, old, now, new)
    cause = _structure(*behind)
    if cause is None and _cut_off(earlier, old, now, new):
        cause = "history"
    found = value_of(old.text, new.text) if cause is None else None
    of_template = found is None or found.kind in ("number", "value")
    if cause is None and new.message <= 0 and of_template and frequent(old.text) and frequent(new.text):
        cause = "template"
    if cause is None and found is not None:
        return _valued(found, part, old, new)
    cause = cause or ("value" if part == "system" else "stable text behind")
    return Difference(cause, part, cause, old.text, new.text)


def item(text: str) -> str:
    """A text without its number in a list, which changes with the order."""
    return _PLACE.sub("", text.strip(), count=1)


def words(text: str) -> tuple[str, ...]:
    """Its words and signs in the order of the alphabet: the same for what differs only in order."""
    return tuple(sorted(_WORD_OR_SIGN.findall(text)))


def without_space(text: str) -> str:
    """A text without white space."""
    return re.sub(r"\s+", "", text)


def _structure(old: Request, new: Request) -> Cause | None:
    """What can be told of where two requests part without looking for a value."""
    if not old or not new or old[0].message != new[0].message:
        return "history"
    return "white space" if _white_space(old, new) else _order(old, new)


def _white_space(old: Request, new: Request) -> bool:
    """Whether the messages go on alike but for white space, where they part."""
    texts = ["".join(s.text for s in rest if s.message == rest[0].message) for rest in (old, new)]
    start = common_prefix(*texts)
    behind = [without_space(text[start:]) for text in texts]
    equal = common_prefix(*behind)
    return texts[0] != texts[1] and equal >= min(_EQUAL_BEHIND, *map(len, behind)) and equal > 0


def _order(old: Request, new: Request) -> Literal["order", "turn order", "json keys"] | None:
    """Whether both have what the other has here, elsewhere: further behind in the message, in another, in the line."""
    first, second = old[0], new[0]
    if first.part != second.part:
        return None
    if words(first.text) == words(second.text) and first.text != second.text:
        return "json keys" if "{" in second.text and ":" in second.text else "order"
    in_old, in_new = ([item(s.text) for s in rest if s.part == first.part] for rest in (old, new))
    items = item(first.text), item(second.text)
    if not all(items) or items[0] == items[1]:
        return None
    # Of a numbered list, retrieved anew each time, either may be missing in the other: the others are not in one order.
    labels = [text.strip().removesuffix(body) for text, body in zip((first.text, second.text), items, strict=True)]
    both = set(in_old) & set(in_new)
    permuted = [body for body in in_old if body in both] != [body for body in in_new if body in both]
    numbered = labels[0] == labels[1] != ""
    if not (numbered and (permuted or not both.isdisjoint(items))) and not both.issuperset(items):
        return None
    same_message = {item(s.text) for s in old if s.message == first.message}
    return "turn order" if items[1] in both and items[1] not in same_message else "order"


def _between_tools(earlier: Request, old: Segment, now: Request, new: Segment) -> Difference:
    """Of one tool that is not the same text the value in it; else what the lists of tools are to each other."""
    cause: Cause = _of_tools(_of_part(earlier, "tools"), _of_part(now, "tools"))
    same_tool = cause == "tool set" and _tool_name(old.text) == _tool_name(new.text) != ""
    if same_tool and (found := value_of(old.text, new.text)) is not None:
        return _valued(found, "tools", old, new)
    return Difference(cause, "tools", cause, old.text, new.text)


def _valued(found: Value, part: str, old: Segment, new: Segment) -> Difference:
    key = f"{found.kind}: {new.text[: found.start].strip()[-40:]}"
    return Difference(found.kind, part, key, old.text, new.text, found.start, found.end)


def _of_part(request: Iterable[Segment], part: str) -> list[str]:
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
    if new.message < 1:
        return False
    of_now = [s.text for s in now if s.message == new.message]
    later = {s.message for s in earlier if s.message > old.message}
    return any(of_now == [s.text for s in earlier if s.message == message] for message in later)
