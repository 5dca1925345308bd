"""The results store: one JSON file a Result, written once, never changed."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

from quantlab.core.errors import QuantlabError
from quantlab.core.files import os_error, write_text
from quantlab.core.result import SCHEMA, Result


class Store:
    """A folder of Results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check_writable(self) -> None:
        """Refuse a folder that cannot be written, before anything is measured for it."""
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise QuantlabError(
                f"no Result can be kept in `{self.folder}`: `{there}` is no folder that you may write to",
                "choose another with `--results`, or use `--no-save`",
            )

    def save(self, result: Result) -> Path:
        """Write one Result; its name tells time, kind and label.

        Where that fails, as on a full disk, the Result is kept among temporary files, and QuantlabError says so.
        """
        # ASCII, because a file name may have 255 bytes.
        label = re.sub(r"[^\w.-]+", "-", result.label, flags=re.ASCII)[:80]
        stamp = re.sub(r"[^\dT]", "", result.started_at[:19])
        path = self.folder / f"{stamp}-{result.kind}-{label}-{result.id[:8]}.json"
        try:
            write_text(path, encode(result))
        except QuantlabError as error:
            spare = Path(tempfile.gettempdir()) / path.name
            with contextlib.suppress(QuantlabError):
                write_text(spare, encode(result))
                error.hint += f"; what was measured is kept as `{spare}`: move it to `{self.folder}`"
            if result.kind == "quantize":
                error.hint += "; the artifact itself is written"
            raise
        return path

    def load(self) -> list[Result]:
        """All Results, oldest first."""
        results = [result for path in self.folder.glob("*.json") for result in read_results(path)]
        return sorted(results, key=_finished)


def _finished(result: Result) -> tuple[str, float]:
    """Results of one step have one start and were there one after another."""
    return result.started_at, result.duration_s


def encode(results: Result | list[Result]) -> str:
    """JSON of one Result or of a list of them, as it is stored and as `--json` prints it."""
    return msgspec.json.format(msgspec.json.encode(results), indent=2).decode() + "\n"


def read_results(path: Path) -> list[Result]:
    """The Results of one file: a stored Result, or the list that `--json` prints."""
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Result | list[Result])
    except OSError as error:
        raise os_error(error, path) from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise QuantlabError(f"`{path}` is no Result: {error}", "remove it, or name the right file") from error
    results = results if isinstance(results, list) else [results]
    for result in results:
        if result.schema != SCHEMA:
            raise QuantlabError(
                f"`{path}` has the schema {result.schema}, this version reads {SCHEMA}",
                "use the version that wrote it, or other `--results`",
            )
    return results


def load_results(paths: Iterable[Path]) -> list[Result]:
    """The Results of files and folders, oldest first; a file may hold a list, as `--json` prints it."""
    results: list[Result] = []
    for path in paths:
        if path.is_dir():
            results += Store(path).load()
        elif path.is_file():
            results += read_results(path)
        else:
            raise QuantlabError(
                f"`{path}` does not exist", "run `quantlab bench` or `quantlab ppl` first, or check the path"
            )
    if not results:
        raise QuantlabError("there are no results to compare", "run `quantlab bench` or `quantlab ppl` first")
    return sorted(results, key=_finished)
