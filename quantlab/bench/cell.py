"""The child process of one model in one cell: it loads and warms up, then repeats whenever the parent says so.

Its peak memory is the model's: what Python and the libraries hold before the load is subtracted by the parent.
"""

from __future__ import annotations

import time
from pathlib import Path

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
    """One repetition: a Generation for each request, and the CPU seconds of this process."""

    generations: list[Generation]
    cpu_s: float


def work(job_json: object, channel: Channel) -> Memory:
    """Send Ready; then for each number received run that repetition and send Repeated; end at None with the peaks."""
    from quantlab.runtime.llamacpp import opened

    job = msgspec.convert(job_json, Job)
    spec, path = job.spec, Path(job.spec.models[job.model].path)
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
    with opened(path, capacity, device=spec.device, threads=spec.threads) as backend:
        prompts = workloads.prompts(backend, spec)
        for k in range(spec.warmup):
            _repeat(backend, spec, prompts[k])
        flat = [prompt for of_batch in prompts[spec.warmup :] for prompt in of_batch]
        ready = Ready(backend.describe(), len(flat[0]), workloads.ids_sha256(flat), before)
        channel.send("ready", msgspec.to_builtins(ready))
        while (k := channel.receive()) is not None:
            channel.send("repeated", msgspec.to_builtins(_repeat(backend, spec, prompts[spec.warmup + k])))
        return backend.memory()


def _prompt_length(spec: BenchSpec, path: Path) -> int:
    """Tokens of each prompt; for a prompt as it is, the tokenizer must be asked before the context can be made."""
    from quantlab.runtime.llamacpp import opened

    if spec.prompt_tokens:
        return spec.prompt_tokens[0]
    with opened(path, Capacity(n_ctx=1, n_batch=1), device="cpu", threads=1) as backend:
        return len(workloads.prompts(backend, spec)[0][0])


def _repeat(backend: Backend, spec: BenchSpec, prompts: list[Tokens]) -> Repeated:
    backend.reset()
    requests = [Request(prompt, spec.new_tokens, ignore_eos=spec.ignore_eos) for prompt in prompts]
    before = time.process_time()
    generations = backend.generate(requests)
    return Repeated(generations, time.process_time() - before)
