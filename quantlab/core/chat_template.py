"""A model's own chat template (Jinja): it comes from a downloaded file, so it runs in a sandbox."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from quantlab.core.errors import QuantlabError, missing_extra

# (messages, whether the assistant's turn is opened) -> text. It may fail on anything that a conversation holds.
Renderer = Callable[[Sequence[Mapping[str, str]], bool], str]

# A tag of transformers around what the model says: nothing is written for it.
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def compiled(source: str, *, bos: str, eos: str, hint: str) -> Renderer:
    """The template ready to render; `bos` and `eos` are how the model writes them.

    Raises QuantlabError with `hint` for a broken template. The renderer raises what the template raises.
    """
    try:
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError:
        raise missing_extra("jinja2", "gguf") from None

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals.update(raise_exception=refuse, strftime_now=lambda _: "")
    try:
        template = environment.from_string(_GENERATION.sub(_as_condition, source))
    except TemplateError as error:
        raise QuantlabError(f"the model's chat template is broken: {error}", hint) from error

    def render(messages: Sequence[Mapping[str, str]], open_turn: bool) -> str:
        return str(template.render(messages=messages, bos_token=bos, eos_token=eos, add_generation_prompt=open_turn))

    return render


def _as_condition(tag: re.Match[str]) -> str:
    return f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}"
