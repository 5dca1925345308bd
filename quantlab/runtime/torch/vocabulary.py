"""Text and token ids by the tokenizer of a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from quantlab.core.artifact import read_json
from quantlab.core.errors import UsageError
from quantlab.runtime.backend import Tokens
from quantlab.runtime.torch.load import FolderError, machine_error, quiet

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of a folder; FolderError where transformers does not load it, or only a slow one."""
    kind, config = transformers.AutoTokenizer, folder / "tokenizer_config.json"
    if config.is_file() and read_json(config).get("tokenizer_class") == "TokenizersBackend":
        # The name that transformers 5 gives this class and writes; the AutoTokenizer of earlier ones does not know it.
        kind = transformers.PreTrainedTokenizerFast
    try:
        with quiet():
            tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        assert tokenizer.backend_tokenizer is not None
    except Exception as error:
        # The Rust tokenizer raises plain Exception for a damaged file.
        reason = next(iter(str(error).splitlines()), repr(error))
        raise machine_error(error, folder) or FolderError(
            f"`{folder}` has no tokenizer that transformers loads: {reason}",
            "download tokenizer.json and tokenizer_config.json",
        ) from error
    return tokenizer


class Vocabulary:
    """The tokenizer of a folder, whose model has `n_vocab` logits."""

    def __init__(self, folder: Path, n_vocab: int) -> None:
        self._tokenizer = load_tokenizer(folder)
        backend = self._tokenizer.backend_tokenizer
        self.n_vocab = n_vocab
        self._backend = backend
        added = self._tokenizer.added_tokens_decoder
        self._control = {int(token) for token, entry in added.items() if entry.special}
        self._written: dict[int, bytes] = {int(token): entry.content.encode() for token, entry in added.items()}
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
        self._byte_level = "ByteLevel" in json.dumps(decoder)
        self._chars = _byte_characters()
        self.bos: int | None = self._tokenizer.bos_token_id
        self.eos: int | None = self._tokenizer.eos_token_id
        self.adds_bos = self.encode("a", bos=True).tolist()[:1] == [self.bos]
        template = self._tokenizer.chat_template
        self.chat_template: str | None = template.get("default") if isinstance(template, dict) else template

    def encode(self, text: str, *, special: bool = False, bos: bool = False) -> Tokens:
        """See `Backend.encode`."""
        ids: Any = self._tokenizer(text, add_special_tokens=bos, split_special_tokens=not special)["input_ids"]
        return np.array(ids, np.int32)

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """See `Backend.decode`."""
        ids = [int(token) for token in tokens]
        for token in ids:
            self._require(token)
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text

    def piece_bytes(self, token: int) -> bytes:
        """See `Backend.piece_bytes`; ids that pad the vocabulary stand for nothing."""
        self._require(token)
        if token in self._control:
            return b""
        if token in self._written:
            return self._written[token]
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            return b"".join(self._chars.get(char, char.encode()) for char in piece)
        if match := _BYTE.fullmatch(piece):
            return bytes.fromhex(match[1])
        return str(piece).replace("▁", " ").encode()

    def _require(self, token: int) -> None:
        if not 0 <= token < self.n_vocab:
            raise UsageError(f"token id {token} is outside the vocabulary of {self.n_vocab}")


def _byte_characters() -> dict[str, bytes]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(0x100 + i): bytes([byte]) for i, byte in enumerate(others)
    }
