"""MODEL of the command line -> files on this machine."""

from __future__ import annotations

from pathlib import Path

from quantlab.core.artifact import gguf_shards, read_record
from quantlab.core.errors import UsageError
from quantlab.core.model import ModelRef
from quantlab.core.progress import Progress
from quantlab.lab.source import Source, check_folder


def resolve(ref: ModelRef, *, offline: bool, progress: Progress) -> Source:
    """Fetch what is not here yet, check that it is whole, and say where it lies.

    Folders and .gguf files stay where they are. With `offline` no connection is opened: only caches are read.
    Raises QuantlabError where the model is incomplete, cannot be fetched or is not cached.
    """
    if ref.kind == "endpoint":
        raise UsageError(
            f"`{ref.where}` is an endpoint, and this command reads a model's files",
            "give a folder, a .gguf file, a Hub id or `demo`",
        )
    if ref.kind == "demo":
        from quantlab.lab.demo import demo

        return demo(offline=offline, progress=progress)
    if ref.kind == "hub":
        from quantlab.lab.hub import download

        path, commit = download(ref.where, ref.revision, offline=offline, progress=progress)
        check_folder(path)
        return Source(path, ref.name, commit, None)
    path = Path(ref.where)
    if ref.kind == "folder":
        check_folder(path)
    else:
        gguf_shards(path)
    record = read_record(path)
    return Source(path, ref.name, None, record.note if record else None)
