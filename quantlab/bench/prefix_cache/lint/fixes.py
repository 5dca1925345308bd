"""What would help against a cause: the same requests, what varies moved behind what does not, or brought into one form.

The requests are only counted again, not sent: whether a model answers alike when a line stands elsewhere is for their
owner to try.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

from quantlab.bench.prefix_cache.lint.causes import Cause, Difference, item, without_space, words
from quantlab.bench.prefix_cache.lint.forms import value_at
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
    "turn order": "keep the turns that all requests have in one order",
    "json keys": "write the JSON with sorted keys",
    "white space": "write white space in one way: line ends, indentation, empty lines",
    "template": "settle on one text; while both run, send each kind of request to one of them",
    "history": "cut the history seldom and much, not a message each time",
    "stable text behind": "put the text that all requests have before what is their own",
}


# The share of requests from which on a text is one of a template.
FREQUENT = 0.1
# Characters around a value that tell its form.
LEAST_FORM = 3
# A segment that holds so many characters besides the value stays where it is, without the value.
_LEAST_REST = 24


def repaired(requests: list[Request], found: Difference) -> list[Request]:
    """The requests without this difference."""
    repair = _REPAIRS.get(found.cause, _moved_back)
    return repair(requests, found)


def _moved_back(requests: list[Request], found: Difference) -> list[Request]:
    """Segments of the same form as the one that differs, or the values in them, stand at the end of the request."""
    seldom = texts_of_few(requests)
    rests = Counter(_parted(found, segment, seldom)[0] for request in requests for segment in request)
    moved = []
    for request in requests:
        end = request[-1].message if request else 0
        stay, back = list[Segment](), list[Segment]()
        for segment in request:
            kept, text = _parted(found, segment, seldom)
            if text and rests[kept] < 2:
                # What is left varies too.
                kept, text = "", segment.text
            stay += [segment._replace(text=kept)] if kept else []
            back += [Segment("moved", end, text)] if text else []
        moved.append(stay + back)
    return moved


def _parted(found: Difference, segment: Segment, seldom: Callable[[str], bool]) -> tuple[str, str]:
    """What of a segment stays, and what is moved: all of it where the value is most of it, or is not known."""
    text, head, tail = segment.text, found.head, found.now[found.end :]
    known = [part for part in (head, tail) if len(part.strip()) >= LEAST_FORM] if found.end else []
    if segment.part != found.part:
        return text, ""
    if not known:
        return ("", text) if seldom(text) else (text, "")
    if not text.startswith(head) or (known[0] is tail and not text.endswith(tail)):
        return text, ""
    end = value_at(found.cause, text, len(head))
    if end is None or len(text[end:].strip()) < _LEAST_REST:
        return "", text
    return head + text[end:], text[len(head) : end] + "\n"


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
    """Lines that several requests have, of the part that differs, in one order: the most frequent first.

    Where they are numbered by their place, the numbers stay.
    """
    lined = [_lines(request) for request in requests]
    texts = {s.text for request in lined for s in request if s.part == found.part}
    # A label that always goes with its text is a part of it.
    numbered = len(texts) > len({item(text) for text in texts})
    name: Callable[[str], str] = item if numbered else str
    frequency = Counter(text for request in lined for text in {name(s.text) for s in request if s.part == found.part})

    def in_order(request: Request) -> Request:
        places = [i for i, s in enumerate(request) if s.part == found.part and frequency[name(s.text)] > 1]
        moved = sorted(((request[i].message, name(request[i].text)) for i in places), key=rank)
        result = list(request)
        for i, (_, text) in zip(places, moved, strict=True):
            here = request[i].text
            result[i] = request[i]._replace(text=here.replace(name(here), text) if name(here) else here)
        return result

    def rank(moved: tuple[int, str]) -> tuple[int, int, str]:
        return moved[0], -frequency[moved[1]], moved[1]

    forms = _usual_forms(lined, found)
    return [_of_one_form(in_order(request), forms) for request in lined]


def _sorted_words(requests: list[Request], found: Difference) -> list[Request]:
    """Segments that differ only in the order of their words are the first of them."""
    forms = _usual_forms(requests, found)
    return [_of_one_form(request, forms) for request in requests]


def _usual_forms(requests: list[Request], found: Difference) -> dict[tuple[str, ...], str]:
    forms: dict[tuple[str, ...], str] = {}
    for request in requests:
        for segment in request:
            if segment.part == found.part:
                forms.setdefault(words(segment.text), segment.text)
    return forms


def _of_one_form(request: Request, forms: dict[tuple[str, ...], str]) -> Request:
    return [segment._replace(text=forms.get(words(segment.text), segment.text)) for segment in request]


def _one_order_of_turns(requests: list[Request], found: Difference) -> list[Request]:
    """Turns that several requests have, each with its answer, in one order: the most frequent first."""
    parted = [_turns(request, found.part) for request in requests]
    frequency = Counter(text for turns in parted for text in {_said(turn) for turn in turns[1:]})

    def in_order(turns: list[Request]) -> Request:
        places = [i for i, turn in enumerate(turns) if i and frequency[_said(turn)] > 1]
        result = list(turns)
        ordered = sorted((turns[i] for i in places), key=lambda turn: (-frequency[_said(turn)], _said(turn)))
        for place, turn in zip(places, ordered, strict=True):
            first = turns[place][0].message - turn[0].message
            result[place] = [s._replace(message=s.message + first) for s in turn]
        return [segment for turn in result for segment in turn]

    return [in_order(turns) for turns in parted]


def _turns(request: Request, part: str) -> list[Request]:
    """What stands before the first message of `part`, then each message of it with those up to the next."""
    turns: list[Request] = [[]]
    before = None
    for segment in request:
        if segment.part == part and segment.message != before:
            turns.append([])
        before = segment.message
        turns[-1].append(segment)
    return turns


def _said(turn: Request) -> str:
    return "".join(segment.text for segment in turn)


def _one_white_space(requests: list[Request], found: Difference) -> list[Request]:
    """Segments that differ only in white space are the first of them; those of nothing else are left out."""
    forms: dict[str, str] = {}
    result = []
    for request in requests:
        kept = [segment for segment in request if segment.part != found.part or segment.text.strip()]
        result.append(
            [
                s._replace(text=forms.setdefault(without_space(s.text), s.text)) if s.part == found.part else s
                for s in kept
            ]
        )
    return result


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
    "turn order": _one_order_of_turns,
    "json keys": _sorted_words,
    "white space": _one_white_space,
    "template": _one_template,
    "stable text behind": _stable_first,
    "history": _as_it_is,
}
