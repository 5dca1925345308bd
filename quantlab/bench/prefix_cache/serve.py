"""The child process that holds the model, and what it measures there; in virtual time the same without a process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from quantlab.bench.batching.serve import Calibrated
from quantlab.bench.prefix_cache.measure import Bed
from quantlab.bench.prefix_cache.rows import Passes, Row, stream_row, tier_rows
from quantlab.bench.prefix_cache.scenarios import Stream, Texts, count, lengths, recorded, stream
from quantlab.bench.prefix_cache.spec import PrefixCacheSpec
from quantlab.bench.prefix_cache.tiers import measure_tiers, tier_lengths
from quantlab.core.errors import UsageError
from quantlab.core.progress import Progress
from quantlab.engine import Engine, MeasuredCosts, Request, limits_of
from quantlab.runtime.backend import Backend, Capacity
from quantlab.runtime.clock import Clock, WallClock
from quantlab.runtime.step_model import fit
from quantlab.runtime.worker import Channel

# As `bench` has it: a prompt is computed in steps of this size.
N_BATCH, N_UBATCH = 2048, 512
# Sequences that hold what is cached, of a model that reserves memory for each.
_SLOTS = 24
# A longer recorded prompt is cut.
_LONGEST_RECORDED = 2048
_CALIBRATION_TOKENS = (16, 32, 64, 128, 256, 512)


def capacity(spec: PrefixCacheSpec, n_ctx: int) -> Capacity:
    """What the backend is opened for; a simulated one has a sequence for every prompt."""
    # Those that run when all are held at once, those that were before, and one more.
    slots = 2 * count(spec) + 4
    slots = slots if spec.simulate else min(_SLOTS, slots)
    return Capacity(n_ctx=n_ctx, n_seq=slots, n_batch=N_BATCH, n_ubatch=N_UBATCH, n_outputs=slots)


def longest_request(spec: PrefixCacheSpec) -> int:
    """Tokens of the longest prompt and its answer."""
    longest = max(lengths(spec))
    if spec.trace is not None and not spec.simulate:
        longest = min(longest, _LONGEST_RECORDED)
    return longest + spec.new_tokens


def work(spec_json: object, channel: Channel) -> None:
    """Send the Loaded, then each Row, then None."""
    spec = msgspec.convert(spec_json, PrefixCacheSpec)
    with _opened(spec, capacity(spec, longest_request(spec))) as backend:
        channel.send("loaded", msgspec.to_builtins(backend.describe()))
        for row in measure(spec, backend, WallClock(), channel.progress):
            channel.send("row", msgspec.to_builtins(row))
        channel.send("row", None)


def calibrate(spec_json: object, channel: Channel) -> Calibrated:
    """The step model of prompts of many lengths, each alone."""
    spec = msgspec.convert(spec_json, PrefixCacheSpec)
    with _opened(spec, Capacity(n_ctx=2 * max(_CALIBRATION_TOKENS), n_batch=N_BATCH, n_ubatch=N_UBATCH)) as backend:
        texts, costs = _texts(backend, spec), MeasuredCosts()
        sizes = [n for n in _CALIBRATION_TOKENS for _ in range(spec.warmup + spec.repeats)]
        engine = Engine(backend, limits_of(backend), costs=costs)
        for done, n in enumerate(sizes):
            channel.progress("fitting the step model", done, len(sizes))
            engine.run([Request(0, texts.take(n), spec.new_tokens)])
        found = fit([step.measured for step in engine.steps[len(engine.steps) // len(sizes) :]])
    return Calibrated(found.model, found.n_steps, found.mean_relative_error, found.p95_relative_error, 0.0)


def _opened(spec: PrefixCacheSpec, room: Capacity) -> contextlib.AbstractContextManager[Backend]:
    from quantlab.runtime.loading import import_runtime, opened

    path = Path(spec.model.path)
    import_runtime(path)
    # A GGUF file's types are its own.
    dtype = spec.dtype if path.is_dir() else "auto"
    return opened(path, room, device=spec.device, dtype=dtype, threads=spec.threads)


def _texts(backend: Backend, spec: PrefixCacheSpec) -> Texts:
    loaded = backend.describe()
    return Texts(backend.encode, loaded.bos if loaded.adds_bos else None, spec.seed)


def measure(spec: PrefixCacheSpec, backend: Backend, clock: Clock, progress: Progress) -> Iterator[Row]:
    """The rows of every chosen stream, then those of the tiers."""
    bed, texts = _bed(spec, backend, clock), _texts(backend, spec)
    names = spec.chosen()
    # Virtual time repeats itself.
    warmup, repeats = (0, 1) if spec.simulate else (spec.warmup, spec.repeats)
    rounds = warmup + repeats
    longest = backend.describe().capacity.n_ctx - 1
    tiers = spec.tiers and not spec.simulate and bool(tier_lengths(longest, spec.block_tokens))
    for number, name in enumerate(names):
        began = time.process_time()
        found = _stream(spec, name, backend, bed, texts)
        passes = Passes([], [], [])
        for repetition in range(rounds):
            progress(name, number * rounds + repetition, len(names) * rounds)
            cold, warm = bed.cold(found), bed.warm(found)
            passes.primed = warm[: found.prime]
            if repetition >= warmup:
                passes.cold.append(cold)
                passes.warm.append(warm[found.prime :])
        whole_blocks = passes.warm[0][-1].cached_tokens // spec.block_tokens * spec.block_tokens
        row = stream_row(
            found,
            passes,
            bed,
            backend.decode,
            block_tokens=spec.block_tokens,
            sharing=bed.sharing(found),
            agreement=bed.agreement(found.prompts[-1], whole_blocks),
        )
        last = number + 1 == len(names) and not tiers
        yield msgspec.structs.replace(row, cpu_s=time.process_time() - began, last=last)
    if tiers:
        began = time.process_time()
        progress("tiers", len(names) * rounds, len(names) * rounds)
        points = measure_tiers(backend, texts.take(longest), block_tokens=spec.block_tokens, repeats=spec.repeats)
        for row in tier_rows(points):
            yield msgspec.structs.replace(row, cpu_s=time.process_time() - began)
            began = time.process_time()


def _bed(spec: PrefixCacheSpec, backend: Backend, clock: Clock) -> Bed:
    loaded = backend.describe()
    if loaded.beyond_training(loaded.capacity.n_ctx - 1):
        raise UsageError(
            f"requests of up to {loaded.capacity.n_ctx} tokens, the context of `{spec.model.label}` holds "
            f"{loaded.n_ctx_train}",
            "lower `--prefix-tokens`, `--suffix-tokens`, `--new-tokens` or `--requests`",
        )
    room = loaded.capacity.n_ctx * (loaded.capacity.n_seq - 1)
    wanted = room if spec.budget_bytes is None else spec.budget_bytes // max(1, loaded.kv_bytes_per_token)
    if wanted < spec.block_tokens:
        raise UsageError(
            f"a budget of {spec.budget_bytes} bytes: a block of {spec.block_tokens} tokens has "
            f"{spec.block_tokens * loaded.kv_bytes_per_token}",
            "give a larger `--budget`",
        )
    return Bed(
        backend, clock, budget_tokens=min(room, wanted), block_tokens=spec.block_tokens, new_tokens=spec.new_tokens
    )


def _stream(spec: PrefixCacheSpec, name: str, backend: Backend, bed: Bed, texts: Texts) -> Stream:
    if name == "trace":
        loaded = backend.describe()
        return recorded(spec, loaded.n_vocab, loaded.capacity.n_ctx - spec.new_tokens)
    return stream(spec, name, texts, lambda prompt: bed.ask(prompt).tokens)
