"""What a file of trained heads says of itself. No tensor is read, no torch imported: a wrong file is refused early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from quantlab.core.errors import QuantlabError

METADATA_KEY = "quantlab"


class HeadsRecord(msgspec.Struct, frozen=True):
    """What a file of heads is, in its metadata. `target_sha256` is the content of the model that they were made for.

    `scale` divides hidden states, so that they are of size one. `trained` tells how, without any text.
    """

    method: str
    target: str
    target_sha256: str
    hidden_size: int
    n_vocab: int
    heads: int
    scale: float
    trained: dict[str, Any] = {}


def read_record(path: Path) -> HeadsRecord:
    """What a file of heads is; QuantlabError where it is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            return msgspec.json.decode((file.metadata() or {})[METADATA_KEY], type=HeadsRecord)
    except (SafetensorError, OSError, KeyError, msgspec.MsgspecError) as error:
        raise QuantlabError(
            f"`{path}` holds no heads of quantlab: {error!r}", "train some: `quantlab speculative train TARGET`"
        ) from error


def checked_record(path: Path, method: str, target_sha256: str) -> HeadsRecord:
    """The record of a file that has heads of this method for this target; QuantlabError where it has others."""
    record = read_record(path)
    if record.method != method:
        raise QuantlabError(f"`{path}` is for {record.method}, not {method}", f"use `--draft {record.method}:PATH`")
    if record.target_sha256 != target_sha256:
        raise QuantlabError(
            f"`{path}` is of another model: trained for `{record.target}` of sha256 {record.target_sha256[:12]}, the "
            f"target's is {target_sha256[:12]}",
            "train heads for this target: `quantlab speculative train TARGET`",
        )
    return record
