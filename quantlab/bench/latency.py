"""`bench`: speed and memory of models, cell by cell, in interleaved repetitions.

Every model of a cell has a process of its own; in round r each of them runs repetition r, and who begins changes
from round to round, so that drift of the machine meets all alike and repetitions can be compared in pairs.
"""

from __future__ import annotations

import contextlib
import statistics
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from quantlab.bench import bandwidth, metrics, notices
from quantlab.bench.cell import Job, Ready, Repeated
from quantlab.bench.contention import Contention
from quantlab.bench.spec import BenchSpec
from quantlab.bench.workloads import ids_sha256
from quantlab.core import hardware
from quantlab.core.artifact import gguf_shards, model_info
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.gguf_file import kv_bytes_per_token, read_header
from quantlab.core.model import ModelFile
from quantlab.core.progress import Progress, silent
from quantlab.core.result import Measurement, Notice, Outcome
from quantlab.runtime.backend import Generation, Loaded, Memory
from quantlab.runtime.worker import Worker, run_in_child

_CHILD = "quantlab.bench.cell:work"
_BANDWIDTH = "quantlab.bench.bandwidth:work"
# Of the memory that is available, what models held at the same time may take.
_RESIDENT_SHARE = 0.5


@dataclass
class Subject:
    """One model while its cell is measured."""

    index: int
    model: ModelFile
    worker: Worker
    ready: Ready
    repetitions: list[list[Generation]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    contention: Contention = field(default_factory=Contention)
    memory: Memory | None = None


@dataclass(frozen=True)
class Session:
    """What the models measured in turns have in common."""

    id: str
    spec: BenchSpec
    interleaved: bool
    load_average: tuple[float, float]
    bandwidth: list[float]


def run(spec: BenchSpec, progress: Progress = silent) -> Iterator[Outcome]:
    """One Outcome for each cell and model, as soon as a cell is done.

    A model that fails drops out of its cell; when everything else is done, the failures are raised: a single one as
    it came, several as one QuantlabError.
    """
    for model in spec.models:
        if Path(model.path).is_dir():
            raise QuantlabError(f"`{model.source}` is no GGUF file", "quantize it with `--method gguf` first")
    failures: list[tuple[str, QuantlabError]] = []
    bytes_per_s: dict[int, list[float]] = {}
    for cell in spec.cells():
        for together in _sessions(cell):
            session, subjects = _measure(cell, together, failures, progress)
            for subject in subjects:
                threads = subject.ready.loaded.runtime.threads
                if threads not in bytes_per_s:
                    bytes_per_s[threads] = run_in_child(_BANDWIDTH, {"threads": threads})
                yield _outcome(subject, session, bytes_per_s[threads])
    if len(failures) == 1:
        raise failures[0][1]
    if failures:
        said = "; ".join(dict.fromkeys(f"{where}: {error.message}" for where, error in failures))
        raise QuantlabError(f"{len(failures)} benches failed: {said}", failures[0][1].hint)
