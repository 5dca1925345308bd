"""A model that lies on this machine, and whether a folder holds a whole one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quantlab.core.artifact import safetensors_files
from quantlab.core.errors import QuantlabError

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Source:
    """A folder or a .gguf file, ready to be read.

    `name` labels rows; `revision` is the commit of a Hub model; `note` is what a reader of its numbers must know of
    the weights' history.
    """

    path: Path
    name: str
    revision: str | None
    note: str | None


def check_folder(folder: Path) -> None:
    """Raise QuantlabError, naming what is missing, unless `folder` has config.json, safetensors and a tokenizer."""
    check_config(folder)
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise QuantlabError(f"`{folder}` cannot be read: {error.strerror}", "check its permissions") from error
    if not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        raise no_safetensors(f"`{folder}`", names)
    safetensors_files(folder)
    if not {"tokenizer.json", "tokenizer.model"} & set(names) and not {"vocab.json", "merges.txt"} <= set(names):
        raise QuantlabError(
            f"`{folder}` has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt)",
            "download the tokenizer's files into it",
        )


def check_config(folder: Path) -> None:
    """Raise QuantlabError unless `folder` has config.json; an adapter is named as such."""
    if (folder / "config.json").is_file():
        return
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        try:
            base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        except (OSError, ValueError, AttributeError):
            base = None
        of = f" of `{base}`" if base else ""
        raise QuantlabError(f"`{folder}` is an adapter{of}, not a model", "merge it into its base model and save that")
    raise QuantlabError(f"`{folder}` has no config.json", "give the folder that holds config.json and the weights")


def no_safetensors(where: str, names: Iterable[str]) -> QuantlabError:
    """The error for a folder or repository whose files `names` hold no weights that can be read safely."""
    if ggufs := sorted(name for name in names if name.endswith(".gguf")):
        shown = ", ".join(ggufs[:5]) + (", ..." if len(ggufs) > 5 else "")
        return QuantlabError(f"{where} holds GGUF files only: {shown}", "give the path of one of them, downloaded")
    if pickles := sorted(name for name in names if name.endswith(_PICKLES)):
        return QuantlabError(
            f"{where} has its weights as pickles only ({pickles[0]}), which run code when they are read",
            "convert them to safetensors, or take a revision that has them",
        )
    return QuantlabError(f"{where} has no weights (*.safetensors)", "download the weights in safetensors form")
