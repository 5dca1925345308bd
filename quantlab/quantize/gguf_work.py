"""What the parent of a gguf run asks of its child and what the child answers, as plain data."""

from __future__ import annotations

from typing import Any

import msgspec

from quantlab.core.corpus import Corpus
from quantlab.core.result import Notice
from quantlab.quantize.spec import OutType


class Conversion(msgspec.Struct, frozen=True):
    """A folder to convert to `Work.base` first."""

    folder: str
    outtype: OutType
    converter: str | None
    metadata: dict[str, str]


class Importance(msgspec.Struct, frozen=True):
    """An importance matrix to compute from weighted texts and to write to `out`."""

    parts: list[tuple[Corpus, float]]
    samples: int | None
    length: int
    seed: int
    out: str


class Job(msgspec.Struct, frozen=True):
    """One call of llama_model_quantize; matrices whose names match `skip` stay in 16 bits (`keep_type`).

    `weigh`: an importance matrix is used; a dry run has none, but its time depends on it.
    """

    out: str
    type: str
    skip: list[str] = []
    keep_type: str = "F16"
    allow_requantize: bool = False
    metadata: dict[str, str | int] = {}
    weigh: bool = False
    dry_run: bool = False


class Work(msgspec.Struct, frozen=True):
    """All that the child does with the GGUF `base`. Without a `job` the converted base is the artifact."""

    base: str
    threads: int
    conversion: Conversion | None = None
    importance: Importance | None = None
    job: Job | None = None


class Fallback(msgspec.Struct, frozen=True):
    """A tensor whose columns are no multiple of the block of the type that the label stands for."""

    tensor: str
    columns: int
    block: int
    wanted: str
    stored: str


class Done(msgspec.Struct):
    """What the child did. `fault`: why the artifact must not be used; `sha256` is that of the artifact.

    `types` of the tensors: as stored in the base, of a dry run as they would be; its `quantize_s` is predicted and
    `floor_bytes` is the memory of the child before any work.
    """

    sha256: str = ""
    peak_process_bytes: int = 0
    fault: str | None = None
    fallbacks: list[Fallback] = []
    types: dict[str, str] = {}
    quantize_s: float = 0.0
    floor_bytes: int = 0
    stages_s: dict[str, float] = {}
    calibration: dict[str, Any] | None = None
    tokens: dict[str, Any] | None = None
    notices: list[Notice] = []
