"""What would help against a cause: the same requests, what varies moved behind what does not, or brought into one form.

The requests are only counted again, not sent: whether a model answers alike when a line stands elsewhere is for their
owner to try.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

from quantlab.bench.prefix_cache.lint.causes import Cause, Difference, value_at
from quantlab.bench.prefix_cache.lint.log import Request, Segment

ADVICE: dict[Cause, str] = {
    "timestamp": "move it to the end of the last message, or cut it to the day",
    "id": "move it to the end of the last message, or leave it out: the model seldom needs it",
    "user name": "move it to the end of the last message",
    "number": "move it to the end of the last message",
    "value": "move it to the end of the last message",
    "tool order": "sort the tools by name",
    "tool keys": "write the JSON of the tools with sorted keys",
    "tool set": "send the same tools each time, or those that are always there first",
    "order": "keep one order, such as by id",
    "template": "settle on one text; while both run, send each kind of request to one of them",
    "history": "cut the history seldom and much, not a message each time",
    "stable text behind": "put the text that all requests have before what is their own",
}


# The share of requests from which on a text is one of a template.
FREQUENT = 0.1
# Characters around a value that tell its form.
_LEAST_FORM = 3
# A segment that holds so many characters besides the value stays where it is, without the value.
_LEAST_REST = 24


def repaired(requests: list[Request], found: Difference) -> list[Request]:
    """The requests without this difference."""
    repair = _REPAIRS.get(found.cause, _moved_back)
    return repair(requests, found)


def _moved_back(requests: list[Request], found: Difference) -> list[Request]:
    """Segments of the same form as the one that differs, or the values in them, stand at the end of the request."""
    head, tail = _around(found)
    seldom = texts_of_few(requests)

    def matches(segment: Segment) -> bool:
        if segment.part != found.part:
            return False
        if len(head.strip()) >= _LEAST_FORM:
            return segment.text.startswith(head)
        return segment.text.endswith(tail) if len(tail.strip()) >= _LEAST_FORM else seldom(segment.text)

    moved = []
    for request in requests:
        end = request[-1].message if request else 0
        stay, back = list[Segment](), list[Segment]()
        for segment in request:
            kept, text = _without_value(found.cause, segment.text, head) if matches(segment) else (segment.text, "")
            stay += [segment._replace(text=kept)] if kept else []
            back += [Segment("moved", end, text)] if text else []
        moved.append(stay + back)
    return moved


def _without_value(cause: Cause, text: str, head: str) -> tuple[str, str]:
    """What of a segment stays, and what is moved: all of it where the value is most of it."""
    end = value_at(cause, text, len(head)) if len(head.strip()) >= _LEAST_FORM else None
    if end is None or len(text[end:].strip()) < _LEAST_REST:
        return "", text
    return head + text[end:], text[len(head) : end] + "\n"


def _around(found: Difference) -> tuple[str, str]:
    """What stands before and behind the value in its segment."""
    before, value, behind = found.now.partition(found.value) if found.value else ("", "", "")
    return (before, behind) if value else ("", "")


def texts_of_few(requests: list[Request]) -> Callable[[str], bool]:
    """Whether few requests have a text."""
    frequency = Counter(text for request in requests for text in {segment.text for segment in request})
    return lambda text: frequency[text] < max(2, FREQUENT * len(requests))


def _sorted_tools(requests: list[Request], found: Difference) -> list[Request]:
    """Tools by how many requests have them, then by name, their JSON with sorted keys."""
    written = {text: _canonical(text) for request in requests for _, _, text in request}
    frequency = Counter(
        written[text] for request in requests for text in {s.text for s in request if s.part == "tools"}
    )

    def in_order(request: Request) -> Request:
        tools = [segment._replace(text=written[segment.text]) for segment in request if segment.part == "tools"]
        tools.sort(key=lambda segment: (-frequency[segment.text], segment.text))
        return [*tools, *(segment for segment in request if segment.part != "tools")]

    return [in_order(request) for request in requests]


def _canonical(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False) + "\n"
    except ValueError:
        return text


def _one_order(requests: list[Request], found: Difference) -> list[Request]:
    """Lines that several requests have, of the part that differs, in one order: the most frequent first."""
    lined = [_lines(request) for request in requests]
    frequency = Counter(text for request in lined for text in {s.text for s in request if s.part == found.part})

    def in_order(request: Request) -> Request:
        places = [i for i, s in enumerate(request) if s.part == found.part and frequency[s.text] > 1]
        ordered = sorted((request[i] for i in places), key=lambda s: (s.message, -frequency[s.text], s.text))
        result = list(request)
        for place, segment in zip(places, ordered, strict=True):
            result[place] = segment
        return result

    return [in_order(request) for request in lined]


def _lines(request: Request) -> Request:
    """The sentences of each line as one segment."""
    lines: Request = []
    for segment in request:
        last = lines[-1] if lines else None
        if last is not None and last[:2] == segment[:2] and not last.text.endswith("\n"):
            lines[-1] = last._replace(text=last.text + segment.text)
        else:
            lines.append(segment)
    return lines


def _one_template(requests: list[Request], found: Difference) -> list[Request]:
    """The part of every request that is nearly the most frequent one becomes that."""
    texts = [tuple(s for s in request if s.part == found.part and s.message <= 0) for request in requests]
    ((usual, _),) = Counter(text for text in texts if text).most_common(1)

    def settled(request: Request, text: tuple[Segment, ...]) -> Request:
        same = sum(len(s.text) for s in (Counter(text) & Counter(usual)).elements())
        if not text or same < 0.5 * sum(len(s.text) for s in text):
            return request
        first = request.index(text[0])
        rest = [s for s in request if not (s.part == found.part and s.message <= 0)]
        return [*rest[:first], *usual, *rest[first:]]

    return [settled(request, text) for request, text in zip(requests, texts, strict=True)]


def _stable_first(requests: list[Request], found: Difference) -> list[Request]:
    """Of each message of the part, segments that many requests have come first."""
    frequency = Counter(text for request in requests for text in {s.text for s in request if s.part == found.part})
    many = max(2, 0.3 * len(requests))
    return [
        sorted(request, key=lambda s: (s.message, s.part == found.part and frequency[s.text] < many))
        for request in requests
    ]


def _as_it_is(requests: list[Request], found: Difference) -> list[Request]:
    return requests


_REPAIRS: dict[Cause, Callable[[list[Request], Difference], list[Request]]] = {
    "tool order": _sorted_tools,
    "tool keys": _sorted_tools,
    "tool set": _sorted_tools,
    "order": _one_order,
    "template": _one_template,
    "stable text behind": _stable_first,
    "history": _as_it_is,
}
