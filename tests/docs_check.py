"""`make docs-check`: every command line, make target and path that the documents show must exist.

Commands in README's indented blocks are parsed by the real command line (not run); words in backticks that look like
paths of the repository are looked up; every option needs a help text.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from quantlab.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CHANGELOG.md", "calib_data/README.md")
_FOLDERS = ("quantlab/", "recipes/", "calib_data/", "tests/")


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """The lines of indented code, with their numbers."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("    "):
            yield number, line.strip()


def check_command(line: str, commands: dict[str, Any]) -> str | None:
    """What is wrong with one shown command line, or None."""
    words = shlex.split(line, comments=True)
    words = words[next((i for i, word in enumerate(words) if "=" not in word), 0) :]
    if words[0] == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        unknown = [word for word in words[1:] if "=" not in word and word not in targets]
        return f"no make target {unknown}" if unknown else None
    if words[0] != "quantlab":
        return None
    if words[1] not in commands:
        return f"no command `{words[1]}`"
    try:
        commands[words[1]].make_context(words[1], words[2:])
    except Exception as error:  # the class is click's or typer's own copy of it, by version
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    """Check all documents; exit 1 with a list of what is wrong."""
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    wrong, checked = [], 0
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        for number, line in blocks(text):
            checked += 1
            if problem := check_command(line, commands):
                wrong.append(f"{name}:{number}: {problem}")
        paths = [path for path in re.findall(r"`([\w./-]+)`", text) if path.startswith(_FOLDERS)]
        wrong += [f"{name}: `{path}` does not exist" for path in paths if not (ROOT / path).exists()]
        inline = re.findall(r"`(quantlab [^`]+)`", text)
        checked += len(inline)
        wrong += [f"{name}: `{line}`: {p}" for line in inline if (p := check_command(line, commands))]
    for command_name, command in commands.items():
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.help:
                wrong.append(f"quantlab {command_name} {parameter.opts[0]} has no help text")
    print("\n".join(wrong) or f"documents: {checked} lines checked")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
