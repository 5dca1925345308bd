"""The errors a user sees. The library raises them; only cli/app.py prints them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QuantlabError(Exception):
    """What went wrong with which value, and what to do next. Exit code 1."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(QuantlabError):
    """The command was given wrongly: an unknown name, options that exclude each other. Exit code 2."""

    exit_code = 2


class LimitError(QuantlabError):
    """A limit that the user set was crossed. Exit code 3."""

    exit_code = 3


def install_hint(extra: str) -> str:
    """How to add an extra: from quantlab's own folder, since the package index has another project of that name."""
    return f"it is in the extra quantlab[{extra}]: in quantlab's folder, pip install -e '.[{extra}]'"


def missing_extra(package: str, extra: str) -> QuantlabError:
    """The error for a heavy package that is not installed: it names the extra that holds it."""
    return QuantlabError(f"`{package}` is not installed", install_hint(extra))


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a misspelled name, with the nearest known ones (case is ignored)."""
    names = sorted(known)
    by_case = {n.lower(): n for n in names}
    near = [by_case[n] for n in difflib.get_close_matches(name.lower(), by_case, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else f"known: {', '.join(names)}"
    return UsageError(f"unknown {kind} `{name}`", hint)
