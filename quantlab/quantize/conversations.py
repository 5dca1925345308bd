"""Conversations as a model's own chat template writes them, and which of their characters the assistant says."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from quantlab.core.chat_template import Renderer, compiled
from quantlab.core.corpus import Message
from quantlab.core.errors import QuantlabError
from quantlab.core.result import Notice


class Template(msgspec.Struct, frozen=True):
    """A chat template (Jinja) and how the model writes its BOS and EOS."""

    source: str
    bos: str
    eos: str


class Text(NamedTuple):
    """One stream of text, and the spans of characters whose loss counts; None: all of it."""

    text: str
    counted: list[tuple[int, int]] | None


def render(conversations: list[list[Message]], template: Template, name: str, notices: list[Notice]) -> list[Text]:
    """Conversations as the model's template writes them; those that it refuses are left out, with a notice."""
    rendered, reason = [], ""
    renderer = compiled(template.source, bos=template.bos, eos=template.eos, hint="calibrate on plain text")
    for messages in conversations:
        try:
            rendered.append(_render_one(messages, renderer))
        # A template may fail on anything that a conversation holds.
        except Exception as error:
            reason = f"{error}"
    if not rendered:
        raise QuantlabError(
            f"the model's chat template renders no conversation of `{name}`: {reason}", "calibrate on plain text"
        )
    if reason:
        left_out = len(conversations) - len(rendered)
        notices.append(
            Notice(
                "calibration-left-out",
                f"{left_out} of {len(conversations)} conversations of `{name}` left out: "
                f"the chat template says {reason}",
            )
        )
    return rendered


def _render_one(messages: list[Message], renderer: Renderer) -> Text:
    """One conversation and what the assistant says in it, found by rendering it turn by turn.

    Where a template changes earlier turns when later ones come, the words of the turns are looked for, in their order.
    None where these are not found either, or where nobody answers.
    """

    def turns(n: int, *, prompt: bool) -> str:
        return renderer(messages[:n], prompt)

    text = turns(len(messages), prompt=False)
    counted: list[tuple[int, int]] | None = []
    for n, message in enumerate(messages):
        if message["role"] != "assistant" or counted is None:
            continue
        try:
            before, after = turns(n, prompt=True) if n else "", turns(n + 1, prompt=False)
        # A template may refuse a conversation that stops here.
        except Exception:
            before, after = " ", ""
        whole = after.startswith(before) and text.startswith(after)
        counted = [*counted, (len(before), len(after))] if whole else None
    return Text(text, counted or _by_content(messages, text) or None)


def _by_content(messages: list[Message], text: str) -> list[tuple[int, int]] | None:
    counted, at = [], 0
    for message in messages:
        content = message["content"].strip()
        if (start := text.find(content, at)) < 0:
            return None
        at = start + len(content)
        if message["role"] == "assistant":
            counted.append((start, at))
    return counted
