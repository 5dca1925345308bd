"""An artifact speaks as its parent: the same token ids, one BOS, the same chat template and generation settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantlab.core.artifact import read_json
from quantlab.core.errors import QuantlabError
from quantlab.quantize.torch_model import PROBE
from quantlab.runtime.torch.load import FolderError
from quantlab.runtime.torch.vocabulary import load_tokenizer

_GENERATION = "generation_config.json"
# Written by whatever library saved the file.
_VERSION = "transformers_version"
# Of a tokenizer, beside its vocabulary: where it cuts and fills.
_CUT_AND_FILL = ("model_max_length", "truncation_side", "padding_side")
# Enough of them to meet every kind.
_SPECIAL_TOKENS = 64


def find_fault(artifact: Path, parent: Path, before: Any, text: str) -> str | None:
    """What of its parent's language it lost, or None.

    `before` is the tokenizer of `parent`; `text` is long, so that a cut that was left on is seen.
    """
    try:
        own = load_tokenizer(artifact)
    except FolderError as error:
        return f"its tokenizer does not load: {error.__cause__}"
    return (
        _vocabulary_fault(own, before)
        or _ids_fault(own, before, text)
        or _template_fault(artifact, parent, own, before)
        or _generation_fault(artifact, parent)
    )


def _vocabulary_fault(own: Any, before: Any) -> str | None:
    if own.get_vocab() != before.get_vocab():
        return f"its tokenizer has another vocabulary than its parent's ({len(own)} tokens, {len(before)})"
    for name in _CUT_AND_FILL:
        if (says := getattr(own, name)) != (said := getattr(before, name)):
            return f"the `{name}` of its tokenizer is {says}, its parent's {said}"
    return None


def _ids_fault(own: Any, before: Any, text: str) -> str | None:
    special = [str(token) for token in before.added_tokens_decoder.values()][:_SPECIAL_TOKENS]
    marked = "A river. ".join(special) + "Its end."
    for name, example in (("the test text", PROBE), ("text with special tokens", marked), ("a long text", text)):
        for add in (True, False):
            ids = before.encode(example, add_special_tokens=add)
            if own.encode(example, add_special_tokens=add) != ids:
                return f"its tokenizer gives other ids than its parent's for {name}"
            if own.decode(ids) != before.decode(ids):
                return f"its tokenizer writes the ids of {name} otherwise than its parent's"
    for role in ("bos", "eos", "pad"):
        if getattr(own, f"{role}_token_id") != getattr(before, f"{role}_token_id"):
            return f"its tokenizer has another {role} token than its parent's"
    bos = own.bos_token_id
    if bos is not None and own.encode(PROBE)[:2] == [bos, bos]:
        return "its tokenizer puts two BOS tokens before a text"
    return None


def _template_fault(artifact: Path, parent: Path, own: Any, before: Any) -> str | None:
    if own.chat_template != before.chat_template:
        return "its chat template is " + ("lost" if own.chat_template is None else "not its parent's")
    # A server that reads one of these files may not read the other.
    for name in ("chat_template.json", "chat_template.jinja"):
        if (parent / name).is_file() and not (artifact / name).is_file():
            return f"it lost {name}"
    if "chat_template" in _settings(parent) and "chat_template" not in _settings(artifact):
        return "its chat template is lost from tokenizer_config.json, which servers read"
    return None


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def _generation_fault(artifact: Path, parent: Path) -> str | None:
    try:
        own, before = _generation(artifact), _generation(parent)
    except QuantlabError as error:
        return error.message
    if own == before:
        return None
    if own is None or before is None:
        return f"its {_GENERATION} is lost" if own is None else f"it has a {_GENERATION}, and its parent has none"
    changed = sorted(key for key in own.keys() | before.keys() if own.get(key) != before.get(key))
    return f"its {_GENERATION} is not its parent's: {', '.join(changed)}"


def _generation(folder: Path) -> dict[str, Any] | None:
    path = folder / _GENERATION
    if not path.is_file():
        return None
    return {key: value for key, value in read_json(path).items() if key != _VERSION}
