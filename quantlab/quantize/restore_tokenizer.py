"""The tokenizer of a GGUF file -> tokenizer.json and tokenizer_config.json.

GGUF names the pre-tokenizer (`tokenizer.ggml.pre`) but does not store it, so each known name has its rules here; any
other name is refused, since a near miss changes token ids without a sign.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantlab.core.errors import QuantlabError, missing_extra

# gguf.constants.TokenType
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
# The split of Qwen2's published tokenizer.json.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_tokenizer(metadata: dict[str, Any], folder: Path, *, n_ctx_train: int) -> dict[str, int]:
    """Write both tokenizer files into `folder`; returns the ids of `bos`, `eos`, `unk` and `pad` where GGUF has them.

    Raises QuantlabError for a tokenizer that is not BPE, for an unknown pre-tokenizer and for damaged tables.
    """
    try:
        tokens = list(metadata["tokenizer.ggml.tokens"])
        types = list(metadata["tokenizer.ggml.token_type"])
        added = {i: tokens[i] for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)}
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        keys = {short: f"tokenizer.ggml.{long}_token_id" for short, long in names.items()}
        special = {short: int(metadata[key]) for short, key in keys.items() if key in metadata}
        ends = {short: tokens[i] for short, i in special.items()}
    except (KeyError, IndexError, TypeError) as error:
        raise _damaged(error) from error
    tokenizer = _bpe(metadata, tokens, types)
    around = [name for name in ("bos", "eos") if metadata.get(f"tokenizer.ggml.add_{name}_token")]
    if around:
        tokenizer.post_processor = _adding(around, ends, special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        # Other classes of transformers 5 build their own pre-tokenizer instead of reading tokenizer.json.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": n_ctx_train,
        **{f"{short}_token": token for short, token in ends.items()},
        "added_tokens_decoder": {
            str(i): {
                "content": token,
                "special": types[i] == _CONTROL,
                "normalized": False,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
            }
            for i, token in added.items()
        },
    }
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
    return special


def known_pre_tokenizer(metadata: dict[str, Any]) -> str:
    """The pre-tokenizer that the metadata of a GGUF names; raises QuantlabError where it cannot be restored."""
    if (kind := metadata.get("tokenizer.ggml.model")) != "gpt2":
        raise QuantlabError(f"tokenizers of the kind `{kind}` cannot be restored, only `gpt2` (BPE)", _ORIGINAL)
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in ("smollm", "qwen2"):
        raise QuantlabError(f"the pre-tokenizer `{pre}` cannot be restored, only `smollm` and `qwen2`", _ORIGINAL)
    return str(pre)


def _bpe(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Any:
    """A `tokenizers.Tokenizer` with the tokens, merges and pre-tokenizer of the GGUF."""
    try:
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers
    except ImportError:
        raise missing_extra("tokenizers", "gguf") from None
    pre = known_pre_tokenizer(metadata)
    # Unused tokens only pad the embedding; no tokenizer knows them.
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    try:
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
        for special in (True, False):
            wanted = _CONTROL if special else _USER_DEFINED
            tokenizer.add_tokens(
                [
                    tokenizers.AddedToken(tokens[i], special=special, normalized=False)
                    for i, kind in enumerate(types)
                    if kind == wanted
                ]
            )
    except Exception as error:  # tokenizers raises bare Exception for merges outside of the vocabulary
        raise _damaged(error) from error
    first: Any = pre_tokenizers.Digits(individual_digits=True)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        first = pre_tokenizers.Split(tokenizers.Regex(_QWEN2_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _adding(around: list[str], ends: dict[str, str], ids: dict[str, int]) -> Any:
    """The post-processor that puts BOS before a text, EOS after it, or both."""
    from tokenizers.processors import TemplateProcessing

    if missing := [name for name in around if name not in ends]:
        raise _damaged(f"it adds {missing[0]} and does not say which token that is")
    before = [ends["bos"]] if "bos" in around else []
    after = [ends["eos"]] if "eos" in around else []
    return TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=[(ends[name], ids[name]) for name in around],
    )


_ORIGINAL = "use the original model folder"


def _damaged(what: object) -> QuantlabError:
    return QuantlabError(f"the tokenizer of the GGUF file is damaged: {what!r}", "download the file again")
