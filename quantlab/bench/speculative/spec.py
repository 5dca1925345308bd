"""What the speculative bench is asked to measure."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from quantlab.core.errors import UsageError, unknown_name
from quantlab.core.model import ModelFile
from quantlab.core.result import DEVICES, DTYPES

DraftKind = Literal["draft", "ngram", "medusa", "eagle"]
# A longer draft is never accepted to its end, and its verify is a prefill.
LONGEST_DRAFT = 64


class DraftSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What drafts: `model` is a model, or the file of trained heads; an n-gram lookup has none."""

    kind: DraftKind
    label: str
    model: ModelFile | None = None


class SpeculativeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One target, what drafts for it, and on which prompts.

    Each of `draft` is measured with every number of draft tokens `k`, with `adaptive` also with one that adapts (up to
    the largest of them), and with every number of sequences `batch`. `prompts` is a file (prompts.py), of which the
    first `prompts_per_category` of each of `categories` are taken. Answers end by themselves, or at `new_tokens`.
    An endpoint is sent the prompts, and its own counters are read: it drafts by itself.
    """

    model: ModelFile
    served_model: str | None = None
    draft: list[DraftSource] = []
    k: list[int] = msgspec.field(default_factory=lambda: [1, 2, 4, 8])
    adaptive: bool = True
    batch: list[int] = msgspec.field(default_factory=lambda: [1])
    prompts: str | None = None
    categories: list[str] | None = None
    prompts_per_category: int = 4
    new_tokens: int = 64
    ignore_eos: bool = False
    n_ctx: int = 2048
    temperature: float = 0.0
    prompt_lookup_max: int = 3
    prompt_lookup_min: int = 1
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        least = {"k": self.k, "batch": self.batch}
        for name in ("prompts_per_category", "n_ctx", "threads", "prompt_lookup_min"):
            value = getattr(self, name)
            least[name] = [] if value is None else [value]
        for name, values in least.items():
            if values and min(values) < 1:
                raise UsageError(f"`{_option(name)}` {min(values)}", "give at least 1")
        if not self.k or not self.batch:
            raise UsageError(f"`{'-k' if not self.k else '--batch'}` names no number", "give at least one")
        if max(self.k) > LONGEST_DRAFT:
            raise UsageError(f"`-k` {max(self.k)}", f"drafts have up to {LONGEST_DRAFT} tokens; 1,2,4,8 are usual")
        if self.new_tokens < 2:
            raise UsageError(f"`--new-tokens` {self.new_tokens}", "give at least 2: the first one is the prompt's")
        self._check_context()
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"`--temperature` {self.temperature}", "give 0 (greedy) or a number above it")
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise UsageError(
                f"`--prompt-lookup-max` {self.prompt_lookup_max} is below `--prompt-lookup-min` "
                f"{self.prompt_lookup_min}",
                "give the larger one as the most",
            )
        if self.seed < 0:
            raise UsageError(f"`--seed` {self.seed}", "give 0 or more")
        for name, value, known in (("dtype", self.dtype, DTYPES), ("device", self.device, DEVICES)):
            if value not in known:
                raise unknown_name(name, value, known)
        self._check_place()

    def _check_context(self) -> None:
        if self.new_tokens >= self.n_ctx:
            raise UsageError(
                f"`--new-tokens` {self.new_tokens} in a context of {self.n_ctx}",
                "raise `--n-ctx`, or lower `--new-tokens`",
            )
        # The first token is the prompt's, the last the target's own. A server has its own lengths.
        if not self.endpoint and max(self.k) > self.new_tokens - 2:
            raise UsageError(
                f"`-k` {max(self.k)} with answers of {self.new_tokens} tokens: no draft of that length would fit",
                f"raise `--new-tokens` to {max(self.k) + 2} at least, or lower `-k`",
            )

    def _check_place(self) -> None:
        if self.endpoint and self.draft:
            raise UsageError("a server drafts by itself", "leave `--draft` out: what it runs is read from its counters")
        if not self.endpoint and not self.draft:
            raise UsageError(
                "nothing drafts", "give `--draft MODEL`, `self:Q4_0`, `ngram`, `medusa:PATH` or `eagle:PATH`"
            )
        if not self.endpoint and self.served_model is not None:
            raise UsageError("`--model` names a model of an endpoint", "leave it out for files")
        labels = [draft.label for draft in self.draft]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise UsageError(f"`--draft {twice[0]}` is given twice", "give each once")

    def batches(self) -> list[int]:
        """The batch sizes, smallest first."""
        return sorted(set(self.batch))

    def longest_draft(self, most: int | None) -> int:
        """The longest draft of any run, of what drafts no more than `most` tokens (None: any number)."""
        return max(self.k) if most is None else min(max(self.k), most)

    @property
    def endpoint(self) -> bool:
        """Whether the model is behind a URL."""
        return self.model.path.startswith(("http://", "https://"))


def _option(name: str) -> str:
    return f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
