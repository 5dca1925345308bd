"""The four perplexity protocols: which text, which windows, which tokens are scored, where BOS stands.

`hf` is the measure of the quantization papers (GPTQ, AWQ): windows of 2048 that do not overlap. `llama.cpp` is what
llama-perplexity computes. `stride` is the sliding window of the Hugging Face guide, over whole windows only. `seed`
is one window of the text's beginning. Their numbers differ by tenths and are never compared with each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.evaluate import spec as specs

if TYPE_CHECKING:
    from quantlab.core.corpus import Corpus
    from quantlab.runtime.backend import Backend, Tokens

SEED_CHARACTERS = 8_000
_N_CTX: dict[specs.Protocol, int] = {"hf": 2048, "llama.cpp": 512, "stride": 2048, "seed": 2048}
# A part of a text ends with a line; only tokens this near to its end could join with what follows.
_MARGIN_TOKENS = 64
_CHARACTERS_PER_TOKEN = 5


@dataclass(frozen=True)
class Protocol:
    """One protocol with its sizes in tokens.

    Of each window the tokens from index `first_scored` on are scored, each predicted from the one before it.
    `stride` is the distance between the beginnings of two windows.
    """

    name: specs.Protocol
    n_ctx: int
    stride: int
    first_scored: int
    limit: int | None

    @classmethod
    def of(cls, spec: specs.PplSpec) -> Protocol:
        """The protocol that `spec` asks for; raises UsageError for sizes that leave nothing to score."""
        name = spec.protocol
        n_ctx = _N_CTX[name] if spec.n_ctx is None else spec.n_ctx
        if n_ctx < 3:
            raise UsageError(f"a window of {n_ctx} tokens leaves nothing to score", "use `--n-ctx 3` or more")
        if spec.limit is not None and spec.limit < 1:
            raise UsageError(f"a limit of {spec.limit} windows measures nothing", "use `--limit 1` or more")
        if spec.stride is not None and name != "stride":
            raise UsageError(f"protocol `{name}` has no stride", "use `--protocol stride`, or leave out `--stride`")
        stride = n_ctx
        if name == "stride":
            stride = n_ctx // 2 if spec.stride is None else spec.stride
        if not 1 <= stride <= n_ctx:
            raise UsageError(f"a stride of {stride} tokens; windows have {n_ctx}", f"use `--stride` 1 to {n_ctx}")
        # No token predicts a window's first one, so that one is never scored.
        first_scored = n_ctx // 2 + 1 if name == "llama.cpp" else max(1, n_ctx - stride)
        return cls(name, n_ctx, stride, first_scored, spec.limit)

    def text(self, corpus: Corpus) -> str:
        """The text form of this protocol."""
        if self.name == "llama.cpp":
            # llama-perplexity drops one line break at the end of its file.
            return corpus.raw.removesuffix("\n")
        joined = "\n\n".join(corpus.rows)
        return joined[:SEED_CHARACTERS] if self.name == "seed" else joined

    def encode(self, backend: Backend, text: str) -> tuple[Tokens, bool]:
        """The token ids of `text`, and whether these are all: with a limit only as many as its windows need.

        Hugging Face tokenizers read control tokens that are written in a text; llama-perplexity does not.
        """
        special = self.name != "llama.cpp"
        if self.limit is not None:
            need = self.n_ctx + (self.limit - 1) * self.stride
            size = _CHARACTERS_PER_TOKEN * (need + _MARGIN_TOKENS)
            while 0 < (end := text.find("\n", size) + 1) < len(text):
                ids = backend.encode(text[:end], special=special, bos=True)
                if len(ids) >= need + _MARGIN_TOKENS:
                    return ids[:need], False
                size = 2 * end
        return backend.encode(text, special=special, bos=True), True

    def windows(self, ids: Tokens, bos: int | None) -> Tokens:
        """All windows (n, n_ctx) of `ids`; `bos` is the id that a model wants before a text, or None.

        Raises QuantlabError where `ids` do not fill one window; `seed` takes what there is.
        """
        import numpy as np

        if self.name == "seed":
            ids = ids[: self.n_ctx]
        size = len(ids) if self.name == "seed" else self.n_ctx
        if len(ids) < max(size, 2):
            raise QuantlabError(
                f"the text has {len(ids)} tokens, one window of protocol `{self.name}` has {size}",
                "use a longer text" + (f", or `--n-ctx {len(ids)}`" if len(ids) > 2 else ""),
            )
        windows: Tokens = np.lib.stride_tricks.sliding_window_view(ids, size)[:: self.stride]
        if self.name == "llama.cpp" and bos is not None:
            windows = windows.copy()
            windows[:, 0] = bos
        return windows

    def bos_rule(self, bos: int | None) -> str:
        """Where BOS stands, in words."""
        if bos is None:
            return "none: the model's tokenizer adds none"
        if self.name == "llama.cpp":
            return "replaces the first token of each window"
        return "added by the tokenizer, once, before the text"
