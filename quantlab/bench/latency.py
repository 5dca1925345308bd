"""`bench`: speed and memory of models, cell by cell, in interleaved repetitions.

Every model of a cell has a process of its own; in round r each of them runs repetition r, and who begins changes
from round to round, so that drift of the machine meets all alike and repetitions can be compared in pairs.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from quantlab.bench import bandwidth, metrics, notices
from quantlab.bench.cell import Job, Ready, Repeated
from quantlab.bench.contention import Contention
from quantlab.bench.residency import together
from quantlab.bench.spec import BenchSpec
from quantlab.bench.workloads import ids_sha256
from quantlab.core import hardware
from quantlab.core.artifact import model_info
from quantlab.core.errors import QuantlabError
from quantlab.core.progress import Progress, silent
from quantlab.core.result import Better, Measurement, ModelInfo, Notice, Outcome, RuntimeInfo
from quantlab.runtime.backend import Generation, Memory
from quantlab.runtime.worker import Worker, run_in_child

_CHILD = "quantlab.bench.cell:work"


@dataclass
class Subject:
    """One model while its cell is measured; `positions` tells its turn in each round, from 0.

    `plain` are the repetitions of the library's own decoding, where it has one; `no_graph`: see `Repeated`.
    """

    index: int
    worker: Worker
    ready: Ready
    repetitions: list[list[Generation]] = field(default_factory=list)
    plain: list[list[Generation]] = field(default_factory=list)
    no_graph: str | None = None
    positions: list[int] = field(default_factory=list)
    memory: Memory | None = None


class Session:
    """The models of one cell that are measured in turns, and what they have in common."""

    def __init__(self, spec: BenchSpec, indices: list[int], progress: Progress) -> None:
        self.id = uuid.uuid4().hex[:16]
        self.spec, self.indices = spec, indices
        self.subjects: list[Subject] = []
        self.failures: list[QuantlabError] = []
        self.contention = Contention()
        self.load_average = [hardware.load_average()]
        self._progress, self._done = progress, 0

    def measure(self) -> None:
        """Load and warm up one model after another, then run the rounds; a model that fails drops out."""
        self._advance(0)
        with contextlib.ExitStack() as stack:
            for index in self.indices:
                with self._dropping():
                    self.subjects.append(self._start(index, stack))
            for round_ in range(self.spec.repeats):
                first = round_ % max(1, len(self.subjects))
                for position, subject in enumerate(self.subjects[first:] + self.subjects[:first]):
                    with self._dropping(subject):
                        self._repeat(subject, round_, position)
            for subject in list(self.subjects):
                with self._dropping(subject):
                    subject.worker.send(None)
                    subject.memory = msgspec.convert(subject.worker.result(), Memory)
        self.load_average.append(hardware.load_average())

    def _start(self, index: int, stack: contextlib.ExitStack) -> Subject:
        job = msgspec.to_builtins(Job(self.spec, index))
        worker = stack.enter_context(Worker(_CHILD, job))
        subject = Subject(index, worker, msgspec.convert(worker.receive(), Ready))
        self._advance()
        return subject

    def _repeat(self, subject: Subject, round_: int, position: int) -> None:
        self.contention.begin()
        subject.worker.send(round_)
        repeated = msgspec.convert(subject.worker.receive(), Repeated)
        self.contention.end(repeated.cpu_s)
        subject.repetitions.append(repeated.generations)
        subject.plain += [repeated.plain] if repeated.plain else []
        subject.no_graph = subject.no_graph or repeated.no_graph
        subject.positions.append(position)
        self._advance()

    def _advance(self, steps: int = 1) -> None:
        self._done += steps
        spec = self.spec
        prompt = "" if spec.prompt_tokens is None else f"{spec.prompt_tokens[0]}+"
        self._progress(
            f"bench {prompt}{spec.new_tokens} x{spec.batch[0]}", self._done, len(self.indices) * (1 + spec.repeats)
        )

    @contextlib.contextmanager
    def _dropping(self, subject: Subject | None = None) -> Iterator[None]:
        """Keep an error for later and go on without the model that failed."""
        try:
            yield
        except QuantlabError as error:
            self.failures.append(error)
            if subject is not None:
                self.subjects.remove(subject)


def run(spec: BenchSpec, progress: Progress = silent) -> Iterator[Outcome]:
    """One Outcome for each cell and model, as soon as the cell is done.

    A model that fails drops out of its cell. What failed is raised when everything else is done: an error as it came,
    unlike ones together as one QuantlabError.
    """
    infos = [model_info(model) for model in spec.models]
    failures: list[QuantlabError] = []
    measured = functools.cache(lambda where: run_in_child("quantlab.bench.bandwidth:work", msgspec.to_builtins(where)))
    for cell in spec.cells():
        for indices in together(cell, infos):
            session = Session(cell, indices, progress)
            session.measure()
            failures += session.failures
            for subject in session.subjects:
                where = _memory_of(subject.ready.loaded.runtime)
                yield _outcome(subject, session, infos[subject.index], measured(where) if where else [])
    distinct = {error.message: error for error in failures}
    if len(distinct) > 1:
        raise QuantlabError(f"{len(failures)} measurements failed: {'; '.join(distinct)}", failures[0].hint)
    if failures:
        raise failures[0]


def _memory_of(runtime: RuntimeInfo) -> bandwidth.Where | None:
    """The memory that holds the weights, as far as its bandwidth can be measured."""
    if runtime.device == "cpu":
        return bandwidth.Where(runtime.threads)
    # llama.cpp calls any device `gpu`.
    on_cuda = runtime.device == "cuda" or (runtime.device == "gpu" and hardware.nvidia()[0] is not None)
    return bandwidth.Where(1, "cuda") if on_cuda else None


def _outcome(subject: Subject, session: Session, info: ModelInfo, bytes_per_s: list[float]) -> Outcome:
    spec, ready = session.spec, subject.ready
    found = metrics.measurements(subject.repetitions, ready.prompt_tokens)
    found |= _sizes(subject) | metrics.plain_measurements(subject.plain)
    depth = metrics.mean_depth(subject.repetitions, ready.prompt_tokens)
    if bytes_per_s:
        floor = metrics.tpot_floor(ready.loaded, spec.batch[0], depth, bandwidth.best(bytes_per_s))
        found["tpot_floor"] = Measurement("s", "lower", [floor])
        found["bandwidth_bytes_per_s"] = Measurement("bytes/s", "none", bytes_per_s)
    return Outcome(
        label=spec.models[subject.index].label,
        model=info,
        runtime=ready.loaded.runtime,
        measurements=found,
        warnings=_warnings(subject, session, found, info),
        details=_details(subject, session) | {"mean_depth_tokens": depth},
    )


def _sizes(subject: Subject) -> dict[str, Measurement]:
    """Bytes; of the process what it grew by since just before the load, so that Python and libraries do not count."""
    memory, ready = subject.memory, subject.ready
    assert memory is not None
    values: dict[str, tuple[float, Better]] = {
        "peak_process_bytes": (memory.process_peak - ready.process_bytes_before_load, "lower"),
        "peak_device_bytes": (memory.device_peak, "lower"),
        "peak_reserved_bytes": (memory.device_reserved_peak, "lower"),
        "weight_bytes": (ready.loaded.weight_bytes, "lower"),
        "kv_bytes_per_token": (ready.loaded.kv_bytes_per_token, "lower"),
    }
    return {name: Measurement("bytes", better, [float(value)]) for name, (value, better) in values.items()}


def _warnings(subject: Subject, session: Session, found: dict[str, Measurement], info: ModelInfo) -> list[Notice]:
    loaded = subject.ready.loaded
    alone = len(session.indices) < len(session.spec.models)
    return [
        *notices.of_settings(session.spec, loaded.runtime.threads),
        *notices.of_lengths(loaded, subject.ready.prompt_tokens, session.spec.new_tokens),
        *notices.of_generations(subject.repetitions, session.spec),
        *notices.of_loading(loaded, info),
        *notices.of_measurements(found, loaded),
        *([notices.no_graph(subject.no_graph)] if subject.no_graph else []),
        *([notices.not_interleaved(len(session.spec.models))] if alone else []),
        *session.contention.notices(loaded.runtime.threads),
    ]


def _details(subject: Subject, session: Session) -> dict[str, object]:
    """What is no sample; `session` is equal for Outcomes whose repetitions may be compared in pairs."""
    spec, ready = session.spec, subject.ready
    return {
        "session": session.id,
        "interleaved": len(session.indices) > 1,
        "positions_in_rounds": subject.positions,
        "prompt_tokens": ready.prompt_tokens,
        "new_tokens": spec.new_tokens,
        "batch": spec.batch[0],
        "repetitions": len(subject.repetitions),
        "warmup_discarded": spec.warmup,
        "threads": ready.loaded.runtime.threads,
        "load_average": session.load_average,
        "other_cpu_cores": session.contention.cores(),
        "prompt_sha256": ready.prompt_sha256,
        "generated_tokens": [sum(len(g.tokens) for g in batch) for batch in subject.repetitions],
        "generated_sha256": [ids_sha256([g.tokens for g in batch]) for batch in subject.repetitions],
        "stopped_requests": notices.stopped_requests(subject.repetitions),
        "process_bytes_before_load": ready.process_bytes_before_load,
        "bytes_read_per_token": ready.loaded.bytes_read_per_token,
    }
