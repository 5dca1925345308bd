"""One run, as it is kept: spec, model, environment, raw samples, warnings (schema 1 of the contract).

Statistics are derived from the samples (core/statistics.py), never stored alone.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

SCHEMA = 1

Better = Literal["lower", "higher", "none"]
Kind = Literal["quantize", "inspect", "bench", "ppl", "eval", "speculative", "prefix-cache", "batching", "stack"]


class Measurement(msgspec.Struct, frozen=True, omit_defaults=True):
    """Raw samples of one quantity.

    `samples_per_repetition` says how many neighbouring samples belong to one repetition (the requests of one
    batch, the gaps of one generation); 1 where every sample is a repetition of its own.
    """

    unit: str
    better: Better
    samples: list[float]
    samples_per_repetition: int = 1

    def __post_init__(self) -> None:
        if self.samples_per_repetition < 1 or len(self.samples) % self.samples_per_repetition:
            raise ValueError(
                f"{len(self.samples)} samples do not divide into repetitions of {self.samples_per_repetition}"
            )

    def repetitions(self) -> list[float]:
        """The mean of each repetition: what may be treated as independent."""
        n = self.samples_per_repetition
        return [sum(self.samples[i : i + n]) / n for i in range(0, len(self.samples), n)]


class Notice(msgspec.Struct, frozen=True):
    """A warning that carries advice. `code` is stable and made for machines."""

    code: str
    message: str
    hint: str = ""


class TensorType(msgspec.Struct, frozen=True):
    """How many tensors, and how many weights in them, are stored as one type."""

    count: int
    params: int


class ModelInfo(msgspec.Struct, frozen=True):
    """What the bytes on disk are.

    `sha256` identifies the content, whatever the file is called, `parent_sha256` what it was made from; `note` is what
    a reader must know of the weights.
    """

    source: str
    format: Literal["safetensors", "gguf", "endpoint"]
    method: str
    size_bytes: int
    bits_per_weight: float
    tensor_types: dict[str, TensorType]
    revision: str | None = None
    parent: str | None = None
    sha256: str | None = None
    note: str | None = None
    parent_sha256: str | None = None


# What torch may be asked to compute in; `auto` leaves it to the device.
DTYPES = ("auto", "float32", "float16", "bfloat16")
# Where a model may be asked to run; `auto` takes the best that is here.
DEVICES = ("auto", "cpu", "cuda", "mps")


class RuntimeInfo(msgspec.Struct, frozen=True):
    """What ran the model. `kernels` counts layers by the kernel that computes them."""

    name: str
    version: str
    device: str
    dtype: str
    kernels: dict[str, int]
    threads: int


class Environment(msgspec.Struct, frozen=True):
    """The machine and the software of a run."""

    cpu: str
    gpu: str | None
    driver: str | None
    ram_bytes: int
    os: str
    packages: dict[str, str]
    git: str | None
    load_average: float


class Outcome(msgspec.Struct, frozen=True):
    """What a room returns: all of a Result that the room knows; lab adds the rest."""

    label: str
    model: ModelInfo
    runtime: RuntimeInfo | None
    measurements: dict[str, Measurement]
    warnings: list[Notice] = []
    # Facts that are no samples: token hash, windows, asked beside got. They become part of the Result's `details`.
    details: dict[str, Any] = {}


class Result(msgspec.Struct, frozen=True):
    """One finished run."""

    schema: int
    id: str
    kind: Kind
    status: Literal["ok", "failed"]
    label: str
    spec: dict[str, Any]
    fingerprint: str
    model: ModelInfo
    runtime: RuntimeInfo | None
    env: Environment
    measurements: dict[str, Measurement]
    warnings: list[Notice]
    started_at: str
    duration_s: float
    details: dict[str, Any] = {}
