"""What a bench is asked to measure, and how the command line's sizes and prompt are read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec

from quantlab.core.errors import QuantlabError, UsageError, unknown_name
from quantlab.core.files import os_error
from quantlab.core.model import ModelFile
from quantlab.core.result import DEVICES, DTYPES

PROMPT_TOKENS = 512


class BenchSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every pair of `prompt_tokens` and `batch` is a cell; the models of a cell are measured in turns.

    Without `prompt` the prompts are slices of built-in text, PROMPT_TOKENS long where no length is given. With
    `prompt` they are that text as it is; with both they are slices of that text. `new_tokens` are generated for each
    request, fewer where the model ends its answer and `ignore_eos` is false. `dtype` is what torch computes in.
    """

    models: list[ModelFile]
    prompt_tokens: list[int] | None = None
    new_tokens: int = 128
    batch: list[int] = msgspec.field(default_factory=lambda: [1])
    repeats: int = 5
    warmup: int = 1
    prompt: str | None = None
    ignore_eos: bool = True
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no bench can do."""
        if not self.models:
            raise UsageError("no model to bench", "name at least one")
        least = {"prompt-tokens": self.prompt_tokens or [], "batch": self.batch}
        single = {"new-tokens": self.new_tokens, "repeats": self.repeats, "threads": self.threads}
        least |= {name: [value] for name, value in single.items() if value is not None}
        for name, values in least.items():
            if wrong := [value for value in values if value < 1]:
                raise UsageError(f"`--{name}` {wrong[0]}", "give at least 1")
        if not self.batch or self.prompt_tokens == []:
            raise UsageError(f"`--{'prompt-tokens' if self.batch else 'batch'}` names no size", "give at least one")
        if self.warmup < 0:
            raise UsageError(f"`--warmup` {self.warmup}", "give 0 or more")
        if self.seed < 0:
            raise UsageError(f"`--seed` {self.seed}", "give 0 or more")
        if self.prompt is not None and not self.prompt.strip():
            raise UsageError("the text of `--prompt` is empty", "give a text, or leave it out for built-in text")
        if self.dtype not in DTYPES:
            raise unknown_name("dtype", self.dtype, DTYPES)
        if self.device not in DEVICES:
            raise unknown_name("device", self.device, DEVICES)

    def cells(self) -> Iterator[BenchSpec]:
        """The spec of each cell alone, in order."""
        each = [[length] for length in self.prompt_tokens or [PROMPT_TOKENS]]
        lengths = [None] if self.prompt is not None and self.prompt_tokens is None else each
        for length, batch in itertools.product(lengths, self.batch):
            yield msgspec.structs.replace(self, prompt_tokens=length, batch=[batch])


def parse_sizes(text: str, option: str) -> list[int]:
    """The sizes of a comma list, `128,512`, each once; `option` is named in errors."""
    sizes = []
    for part in text.split(","):
        word = part.strip()
        if not (word.isascii() and word.isdigit()) or int(word) < 1:
            raise UsageError(f"`{option}` {text}: `{word}` is no size", f"for example `{option} 128,512`")
        sizes.append(int(word))
    return list(dict.fromkeys(sizes))


def prompt_text(text: str) -> str:
    """The prompt of `--prompt TEXT|@FILE`; raises QuantlabError for a file that cannot be read as UTF-8."""
    if not text.startswith("@"):
        return text
    path = Path(text[1:]).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise os_error(error, path) from error
    except UnicodeDecodeError as error:
        raise QuantlabError(f"`{path}` is not UTF-8 text: byte {error.start}", "convert it to UTF-8") from error
