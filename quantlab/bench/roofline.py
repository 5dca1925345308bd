"""The step times of a model on a device that is not here: from the files' headers, its bandwidth and its FLOP/s."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from quantlab.core.artifact import gguf_shards, stored_weights
from quantlab.core.errors import UsageError
from quantlab.core.gguf_file import kv_bytes_per_token, read_header
from quantlab.core.hf_config import kv_values_per_token, text_config
from quantlab.core.result import ModelInfo, Notice
from quantlab.runtime.mixture import MixtureRoofline
from quantlab.runtime.step_model import Roofline

# What configurations call the experts of a layer: Mixtral, Qwen, DeepSeek.
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")

# From below what any device had to above what one will have soon: outside, step times leave what arithmetic can hold.
_BANDWIDTHS, _FLOPS = (1e6, 1e18), (1e6, 1e21)


class Experts(NamedTuple):
    """The experts of a model: so many in a layer, `used` by a token; bytes and weights of all layers together."""

    per_layer: int
    used: int
    size_bytes: int
    params: int


def check_device(bandwidth_bytes_per_s: float | None, flops_per_s: float | None, *, simulate: bool) -> None:
    """Raise UsageError for numbers that are of no device, or where one is missing."""
    given = {"bandwidth": (bandwidth_bytes_per_s, _BANDWIDTHS), "flops": (flops_per_s, _FLOPS)}
    for name, (value, (least, most)) in given.items():
        if value is not None and not least <= value <= most:
            raise UsageError(
                f"`--{name}` {value:g}", f"give bytes or operations a second: from {least:g} to {most:g}, 3.35e12"
            )
    n_given = sum(value is not None for value, _ in given.values())
    if n_given and not (simulate and n_given == len(given)):
        raise UsageError(
            "a roofline needs `--simulate`, `--bandwidth` and `--flops`",
            "give all three, or `--simulate` alone for a step model fitted on this machine",
        )


def roofline(
    path: Path, info: ModelInfo, bandwidth_bytes_per_s: float, flops_per_s: float
) -> Roofline | MixtureRoofline:
    """The roofline of a GGUF file or a safetensors folder; of a mixture of experts see runtime/mixture.py."""
    found = experts(path)
    params = 8 * info.size_bytes / info.bits_per_weight
    idle = 0.0 if found is None else found.params * (1 - found.used / found.per_layer)
    dense = Roofline(
        weight_bytes=info.size_bytes - (found.size_bytes if found else 0),
        kv_bytes_per_token=kv_bytes(path),
        params=params - idle,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        flops_per_s=flops_per_s,
    )
    return dense if found is None else MixtureRoofline(dense, found.size_bytes, found.per_layer, found.used)


def notice(steps: Roofline | MixtureRoofline, *also: str) -> Notice:
    """That nothing was measured at all, and what the simulation takes for granted; `also` is what more it does."""
    taken = ["no kernel reaches it", *also]
    if isinstance(steps, MixtureRoofline):
        taken.append("tokens choose experts uniformly")
    dense = steps.dense if isinstance(steps, MixtureRoofline) else steps
    return Notice(
        "simulated",
        f"simulated in virtual time from a roofline of {dense.bandwidth_bytes_per_s:.3g} bytes/s and "
        f"{dense.flops_per_s:.3g} FLOP/s: {', '.join(taken)}",
        "leave `--bandwidth` and `--flops` out for a step model fitted on this machine",
    )


def kv_bytes(path: Path) -> int:
    """Bytes of KV that a token adds: 16 bits a value, as vLLM and llama.cpp hold it by default."""
    return 2 * kv_values_per_token(path) if path.is_dir() else kv_bytes_per_token(read_header(path))


def experts(path: Path) -> Experts | None:
    """What the files tell of routed experts; None for a dense model. Shared experts are read by every token."""
    if path.is_dir():
        config = text_config(path)
        count = next((config[name] for name in _COUNTS if config.get(name)), 0)
        used = config.get("num_experts_per_tok", 0)
        routed = [(t.size_bytes, t.params) for t in stored_weights(path) if ".experts." in t.name]
    else:
        headers = [read_header(shard) for shard in gguf_shards(path)]
        metadata = headers[0].metadata
        arch = metadata.get("general.architecture", "")
        count, used = (metadata.get(f"{arch}.{name}", 0) for name in ("expert_count", "expert_used_count"))
        routed = [(t.size_bytes, t.params) for header in headers for t in header.tensors if "_exps." in t.name]
    if not (routed and isinstance(count, int) and isinstance(used, int) and 0 < used <= count):
        return None
    return Experts(count, used, sum(size for size, _ in routed), sum(params for _, params in routed))
