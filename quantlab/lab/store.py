"""The results store: one JSON file a Result, written once, never changed."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from quantlab.core.errors import QuantlabError
from quantlab.core.files import os_error, write_text
from quantlab.core.result import SCHEMA, Result

DEFAULT_FOLDER = Path("runs")


class Store:
    """A folder of Results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, result: Result) -> Path:
        """Write one Result; its name tells time, kind and label."""
        label = re.sub(r"[^\w.-]+", "-", result.label)[:80]
        stamp = re.sub(r"[^\dT]", "", result.started_at[:19])
        path = self.folder / f"{stamp}-{result.kind}-{label}-{result.id[:8]}.json"
        write_text(path, encode(result))
        return path

    def load(self) -> list[Result]:
        """All Results, oldest first."""
        results = [read_result(path) for path in self.folder.glob("*.json")]
        return sorted(results, key=lambda result: result.started_at)


def encode(results: Result | list[Result]) -> str:
    """JSON of one Result or of a list of them, as it is stored and as `--json` prints it."""
    return msgspec.json.format(msgspec.json.encode(results), indent=2).decode() + "\n"


def read_result(path: Path) -> Result:
    """One Result from a file; an error where it is none or of another schema."""
    try:
        return decode(path.read_bytes())
    except OSError as error:
        raise os_error(error, path) from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise QuantlabError(f"`{path}` is no Result: {error}", "remove it, or name the right file") from error


def decode(data: bytes) -> Result:
    """One Result from JSON; ValueError (or msgspec's subclass of it) where it is none."""
    result = msgspec.json.decode(data, type=Result)
    if result.schema != SCHEMA:
        raise ValueError(f"its schema is {result.schema}, this version reads {SCHEMA}")
    return result
