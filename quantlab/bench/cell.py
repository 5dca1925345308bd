"""The child process of one model in one cell: it loads and warms up, then repeats whenever the parent says so.

Its peak memory is the model's: what Python and the libraries hold before the load is subtracted by the parent.

A backend may have a second way to decode, its library's plain `generate`; then both run in every repetition, so that
what the library costs a token stands beside what the model does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from quantlab.bench import workloads
from quantlab.bench.spec import BenchSpec
from quantlab.core import hardware
from quantlab.runtime.backend import Backend, Capacity, Generation, Loaded, Memory, Request, Tokens
from quantlab.runtime.worker import Channel

# llama-bench's sizes, so that numbers can be compared with it.
N_BATCH, N_UBATCH = 2048, 512


class Job(msgspec.Struct, frozen=True):
    """One model of `spec`, which is of one cell (BenchSpec.cells)."""

    spec: BenchSpec
    model: int


class Ready(msgspec.Struct, frozen=True):
    """The model is loaded and warm."""

    loaded: Loaded
    prompt_tokens: int
    prompt_sha256: str
    process_bytes_before_load: int


class Repeated(msgspec.Struct, frozen=True):
    """One repetition: a Generation for each request, and the CPU seconds of this process.

    `plain` holds the same requests decoded by the library's own loop, where it has one, and `no_graph` why the model's
    steps were no CUDA graph, where they might have been.
    """

    generations: list[Generation]
    cpu_s: float
    plain: list[Generation] = []
    no_graph: str | None = None


@runtime_checkable
class DecodesPlainly(Protocol):
    """A backend with a second way to decode: its library's own loop. The first is a CUDA graph, or `no_graph` tells."""

    @property
    def no_graph(self) -> str | None:
        """Why the steps of the last `generate` on CUDA were no graph."""

    def generate_plain(self, requests: Sequence[Request]) -> list[Generation]:
        """Greedy decoding as the library's users call it."""


def work(job_json: object, channel: Channel) -> Memory:
    """Send Ready; then for each number received run that repetition and send Repeated; end at None with the peaks."""
    from quantlab.runtime.loading import import_runtime, opened

    job = msgspec.convert(job_json, Job)
    spec, path = job.spec, Path(job.spec.models[job.model].path)
    import_runtime(path)
    before = hardware.process_bytes()
    batch = spec.batch[0]
    capacity = Capacity(
        n_ctx=_prompt_length(spec, path) + spec.new_tokens,
        n_seq=batch,
        n_batch=max(N_BATCH, batch),
        n_ubatch=N_UBATCH,
        n_outputs=batch,
        shared=False,
    )
    # A GGUF file's types are its own.
    dtype = spec.dtype if path.is_dir() else "auto"
    with opened(path, capacity, device=spec.device, dtype=dtype, threads=spec.threads) as backend:
        prompts = workloads.prompts(backend, spec)
        cell = _Cell(backend, spec)
        for k in range(spec.warmup):
            cell.repeat(prompts[k])
        flat = [prompt for of_batch in prompts[spec.warmup :] for prompt in of_batch]
        ready = Ready(backend.describe(), len(flat[0]), workloads.ids_sha256(flat), before)
        channel.send("ready", msgspec.to_builtins(ready))
        while (k := channel.receive()) is not None:
            channel.send("repeated", msgspec.to_builtins(cell.repeat(prompts[spec.warmup + k])))
        return cell.memory or backend.memory()


def _prompt_length(spec: BenchSpec, path: Path) -> int:
    """Tokens of each prompt; for a prompt as it is, the tokenizer must be asked before the context can be made."""
    from quantlab.runtime.loading import vocabulary

    if spec.prompt_tokens:
        return spec.prompt_tokens[0]
    # Without the weights: they would count in the peak.
    with vocabulary(path) as speaks:
        return workloads.whole_length(speaks, spec)


class _Cell:
    """Runs repetitions; `memory` is that before the first plain decoding, whose KV cache is another."""

    def __init__(self, backend: Backend, spec: BenchSpec) -> None:
        self._backend, self._spec = backend, spec
        self.memory: Memory | None = None

    def repeat(self, prompts: list[Tokens]) -> Repeated:
        backend, spec = self._backend, self._spec
        backend.reset()
        requests = [Request(prompt, spec.new_tokens, ignore_eos=spec.ignore_eos) for prompt in prompts]
        before = time.process_time()
        generations = backend.generate(requests)
        plain: list[Generation] = []
        no_graph = None
        if isinstance(backend, DecodesPlainly):
            no_graph = backend.no_graph
            self.memory = self.memory or backend.memory()
            backend.reset()
            plain = backend.generate_plain(requests)
        return Repeated(generations, time.process_time() - before, plain, no_graph)
