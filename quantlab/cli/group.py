"""A command that measures a model, with a further command beside it: `NAME MODEL`, `NAME WORD ...`."""

from __future__ import annotations

from typing import Any

import typer
import typer.core

MEASURE = "measure"


def measuring_beside(word: str, help_text: str) -> typer.Typer:
    """An app whose command MEASURE is meant wherever the first argument is not `word`.

    A model in a folder called `word` is `./word`.
    """

    class Group(typer.core.TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            return super().parse_args(ctx, args if args[:1] == [word] else [MEASURE, *args])

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, command, rest = super().resolve_command(ctx, args)
            return "" if name == MEASURE else name, command, rest

    return typer.Typer(cls=Group, help=help_text, rich_markup_mode=None)
