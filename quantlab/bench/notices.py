"""What a reader must know before believing a bench: each condition, its bound and the advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quantlab.bench.metrics import Repetition, decodes
from quantlab.bench.spec import BenchSpec
from quantlab.core import hardware, statistics, units
from quantlab.core.result import Measurement, ModelInfo, Notice
from quantlab.runtime.backend import Loaded

# Interquartile range of the repetitions' TPOT, as a share of its median.
LARGE_SPREAD = 0.05
# By how much the library's own decoding may be slower than the model, before it hides what a kernel does.
LARGE_OVERHEAD = 0.25
# What the types of a safetensors file hold where weights are quantized.
_STORED = {"I32": "packed integers", "U8": "packed integers", "I8": "INT8", "F8_E4M3": "FP8"}
# With fewer there is no interval.
FEW_REPEATS = statistics.FEWEST_SAMPLES


def of_settings(spec: BenchSpec, threads: int) -> Iterator[Notice]:
    """Settings that make weak or slow measurements."""
    if spec.repeats < FEW_REPEATS:
        yield Notice(
            "few-repeats",
            f"repetitions: {spec.repeats}, too few for an interval, so that no difference can be told from chance",
            f"use `--repeats {FEW_REPEATS}` or more",
        )
    if threads > hardware.usable_cores():
        yield Notice(
            "threads-exceed-cores",
            f"{threads} threads on {hardware.usable_cores()} cores wait for each other",
            f"use `--threads {hardware.usable_cores()}`",
        )


def of_lengths(loaded: Loaded, prompt_tokens: int, new_tokens: int) -> Iterator[Notice]:
    """Sequences that are longer than those of the training."""
    # The last token is not fed.
    n_tokens = prompt_tokens + new_tokens - 1
    if loaded.beyond_training(n_tokens):
        yield Notice(
            "n-ctx-beyond-training",
            f"sequences of {n_tokens} tokens; the model was trained on {loaded.n_ctx_train}: they can be timed, but "
            "answers beyond that are not to be trusted",
            f"use fewer `--prompt-tokens` or `--new-tokens`, at most {loaded.n_ctx_train + 1} together",
        )


def of_generations(repetitions: Sequence[Repetition], spec: BenchSpec) -> Iterator[Notice]:
    """Answers that ended before the limit."""
    counts = [len(g.tokens) for batch in repetitions for g in batch]
    if stopped := stopped_requests(repetitions):
        yield Notice(
            "stopped-early",
            f"{stopped} of {len(counts)} answers ended before {spec.new_tokens} tokens (the shortest has "
            f"{min(counts)}); rates count the tokens that were generated",
            "compare models on equal lengths with `--ignore-eos`",
        )
    if not decodes(repetitions):
        yield Notice(
            "no-tpot",
            f"no TPOT: {sum(n < 2 for n in counts)} of {len(counts)} answers have fewer than two tokens",
            "use `--new-tokens 2` or more, and `--ignore-eos`",
        )


def stopped_requests(repetitions: Sequence[Repetition]) -> int:
    """Requests that ended by themselves."""
    return sum(g.finish_reason == "stop" for batch in repetitions for g in batch)


def of_loading(loaded: Loaded, info: ModelInfo) -> Iterator[Notice]:
    """Weights that are not computed as they are stored."""
    runtime = loaded.runtime
    if loaded.decompressed:
        kinds = " and ".join(_STORED.get(kind, kind) for kind in loaded.decompressed)
        yield Notice(
            "decompressed-at-load",
            f"{sum(loaded.decompressed.values())} layers are stored as {kinds} and computed after decompression to "
            f"{runtime.dtype}: no speed and no memory from quantization on this runtime",
            "read its quality here, and its speed where a kernel computes it as it is stored",
        )
    if runtime.name != "torch" or not any(kind.startswith(("F8", "FP8")) for kind in info.tensor_types):
        return
    capability = hardware.nvidia_capability() if runtime.device == "cuda" else None
    if capability is None or capability < hardware.FP8_CAPABILITY:
        here = f"compute capability {capability}" if capability else f"`{runtime.device}`"
        how = f"decompressed to {runtime.dtype}" if loaded.decompressed else "read as FP8 and multiplied in 16 bits"
        yield Notice(
            "fp8-fallback",
            f"{here} has no FP8 arithmetic: weights are {how}",
            "measure the speed of FP8 on Ada or Hopper (compute capability 8.9 or more)",
        )


def of_measurements(found: dict[str, Measurement], loaded: Loaded) -> Iterator[Notice]:
    """Noise, and a floor that does not hold."""
    if "tpot" not in found:
        return
    repetitions = found["tpot"].repetitions()
    if len(repetitions) >= FEW_REPEATS and (spread := statistics.relative_spread(repetitions)) > LARGE_SPREAD:
        yield Notice(
            "large-spread",
            f"TPOT varies by {units.percent(spread, digits=2)} between repetitions (bound {LARGE_SPREAD:.0%})",
            "end other work on the machine, or use more `--repeats`",
        )
    if "tpot_generate" in found:
        yield from _overhead(statistics.median(found["tpot_generate"].repetitions()), statistics.median(repetitions))
    if "tpot_floor" not in found:
        yield Notice(
            "no-floor",
            f"no `tpot_floor`: the memory bandwidth of `{loaded.runtime.device}` is not measured",
            "measure with `--device cpu` to see it",
        )
        return
    # A device's own cache is not known; a floor above the time tells of it.
    cache = hardware.last_level_cache_bytes() if loaded.runtime.device == "cpu" else 0
    share = found["tpot_floor"].samples[0] / statistics.median(repetitions)
    if loaded.weight_bytes <= cache or share > 1:
        of_cache = f" and a cache of {units.size(cache)}" if cache else ""
        yield Notice(
            "fits-in-cache",
            f"{units.size(loaded.weight_bytes)} of weights{of_cache}: weights come from the cache, so the time to read "
            "them from memory is no floor of TPOT",
            "read nothing from the share of the floor; larger models have one",
        )


def _overhead(plain_s: float, tpot_s: float) -> Iterator[Notice]:
    """Plain decoding that is slower than the model: its TPOT says little of kernels."""
    if plain_s > (1 + LARGE_OVERHEAD) * tpot_s:
        yield Notice(
            "launch-overhead",
            f"plain `generate` takes {units.milliseconds(plain_s)} a token where the model itself takes "
            f"{units.milliseconds(tpot_s)}: {units.percent(1 - tpot_s / plain_s, digits=2)} is overhead around the "
            "kernels (Python, launches, a growing cache), and hides what a kernel gains or loses",
            "compare kernels by TPOT, and what users of plain `generate` see by TPOT generate",
        )


def no_graph(reason: str) -> Notice:
    """Steps on CUDA that had to be launched kernel by kernel."""
    return Notice(
        "no-cuda-graph",
        f"steps were launched kernel by kernel, without a CUDA graph ({reason}): TPOT holds the launches too, which "
        "hide what a kernel gains or loses",
        "compare it with no model that ran as a graph",
    )


def not_interleaved(models: int) -> Notice:
    """Models that had to be measured one after another."""
    return Notice(
        "not-interleaved",
        f"{models} models do not fit in memory together and were measured one after another: drift of the machine is "
        "part of their difference",
        "bench fewer models at a time, or smaller ones",
    )
