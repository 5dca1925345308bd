"""ModelRef: where a model comes from, read from what the user typed. Nothing is opened or fetched here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.files import user_path

DEMO = "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def file_label(path: Path) -> str:
    """What a model on disk is called in tables: a dot in a folder's name is no suffix."""
    return path.stem if path.suffix.lower() == ".gguf" else path.name


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model on this disk, as the spec of a run names it.

    `label` is its name in tables, `source` what the user called it, `sha256` its content
    (core.artifact.content_sha256), `note` what a reader must know of its weights.
    """

    path: str
    label: str
    source: str
    sha256: str
    revision: str | None = None
    note: str | None = None


class ModelRef(msgspec.Struct, frozen=True):
    """`where` is a path, a Hub id, a URL or `demo`; `revision` belongs to a Hub id only."""

    kind: Literal["folder", "gguf", "hub", "endpoint", "demo"]
    where: str
    revision: str | None = None

    @property
    def name(self) -> str:
        """A short name for labels and file names."""
        if self.kind == "gguf":
            return Path(self.where).stem
        return self.where.rstrip("/").rpartition("/")[2]

    @classmethod
    def parse(cls, text: str) -> ModelRef:
        """Read MODEL of the command line: what exists on disk wins over a Hub id of the same spelling."""
        if text == DEMO:
            return cls("demo", DEMO)
        if text.startswith(("http://", "https://")):
            return cls("endpoint", text)
        path = user_path(text)
        if path.is_dir():
            return cls("folder", str(path.resolve()))
        if path.suffix.lower() == ".gguf":
            if not path.is_file():
                raise QuantlabError(f"`{text}` does not exist", "check the path")
            return cls("gguf", str(path.resolve()))
        if path.is_file():
            raise UsageError(f"`{text}` is neither a folder nor a .gguf file", "give the folder that holds config.json")
        if _HUB_ID.fullmatch(text) and ".." not in text:
            where, _, revision = text.partition("@")
            return cls("hub", where, revision or None)
        raise QuantlabError(
            f"`{text}` is no folder, .gguf file, Hub id (org/name[@revision]), URL or `demo`", "check the path"
        )
