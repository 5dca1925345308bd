"""Several engine runs in one child, each loaded again as a user would: an engine takes seconds to import."""

from __future__ import annotations

import importlib
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quantlab.core.corpus import Corpus
from quantlab.quantize.torch_work import EngineDone, EngineJob, Samples, Weights
from quantlab.runtime.worker import run_in_child
from tests.hf_folders import TRAINING_TEXT, config, forward, write_folder

SECRET = "the kettle sings of the wind"
# Every line another, so that no window repeats one.
_WORDS = random.Random(0).choices(TRAINING_TEXT.split(), k=2000)
TEXT = "".join(f"{' '.join(_WORDS[i : i + 20])} {i}; {SECRET}.\n" for i in range(0, 2000, 20))
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
_KINDS = {"gemma3": {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]}}


class Run(msgspec.Struct):
    """One engine run: what it said, and the logits in memory, after loading, and of the parent."""

    done: EngineDone
    stages: list[list[Any]]
    memory: list[list[float]]
    loaded: list[list[float]]
    parent: list[list[float]]
    ids: list[int]
    types: dict[str, str]


def write_model(folder: Path, family: str, **changed: Any) -> dict[str, np.ndarray]:
    """A tiny random float16 folder of two layers, with a chat template in a file of its own; returns its weights."""
    kinds = _KINDS.get(family, {"model_type": family}) | changed
    weights = write_folder(folder, family, kind="F16", num_hidden_layers=2, torch_dtype="float16", **kinds)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    return weights


def job(folder: Path, out: Path, method: str, *, sym: bool | None = None, **options: Any) -> EngineJob:
    """4 bits, groups of 32, 8 windows of 64 tokens."""
    bits, group_size = options.pop("bits", 4), options.pop("group_size", 32)
    sym, desc_act = method == "gptq" if sym is None else sym, options.pop("desc_act", False)
    return EngineJob(
        method=method,
        folder=str(folder),
        out=str(out),
        probe=str(out.with_suffix(".probe")),
        keep=options.pop("keep", []),
        device="cpu",
        dtype="float32",
        threads=1,
        seed=0,
        weights=Weights(bits, group_size, sym, desc_act),
        calibration=Samples([(Corpus("mill", "0", False, [TEXT]), 1.0)], 8, 64, 0),
        **options,
    )


def run_all(engine: str, jobs: dict[str, EngineJob]) -> dict[str, Run]:
    """Run all jobs in one child."""
    root, before = str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = root
    for each in jobs.values():
        Path(each.out).mkdir()
    try:
        spec = {"engine": engine, "jobs": msgspec.to_builtins(jobs)}
        found = run_in_child("tests.engine_runs:work", spec)
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return msgspec.convert(found, dict[str, Run])


class _Channel:
    def __init__(self) -> None:
        self.stages: list[list[Any]] = []

    def progress(self, *stage: Any) -> None:
        self.stages.append(list(stage))


def work(spec: Any, _: Any) -> dict[str, Run]:
    """The child's side of `run_all`."""
    # The kernels of gptqmodel compile at their first product, ten seconds each.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    engine = importlib.import_module(f"quantlab.quantize.engines.{spec['engine']}")
    return {name: _run(engine, each) for name, each in spec["jobs"].items()}


def _run(engine: Any, spec: Any) -> Run:
    channel = _Channel()
    done = engine.work(spec, channel)
    import torch

    from quantlab.quantize.torch_model import load_model, logits_of, read_probe

    ids, memory = read_probe(Path(spec["probe"]))
    model = load_model(Path(spec["out"]), dtype=torch.float32, device="cpu")
    return Run(
        done=done,
        stages=channel.stages,
        memory=memory.tolist(),
        loaded=logits_of(model, ids).tolist(),
        parent=logits_of(load_model(Path(spec["folder"]), dtype=torch.float32, device="cpu"), ids).tolist(),
        ids=ids,
        types={name: type(module).__name__ for name, module in model.named_modules()},
    )


def divergence(first: Any, second: Any) -> float:
    """Mean KL divergence in nats of two arrays of logits (tokens, n_vocab), in float64."""
    first, second = (np.asarray(logits, np.float64) for logits in (first, second))
    first, second = (x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
                     for x in (first, second))  # fmt: skip
    return float((np.exp(first) * (first - second)).sum(-1).mean())


def rounded_logits(family: str, weights: dict[str, np.ndarray], ids: list[int], *, sym: bool) -> np.ndarray:
    """What plain rounding of all Linear weights to 4 bits in groups of 32 computes."""
    rounded = {
        name: _round(values, sym=sym) if name.endswith("_proj.weight") else values for name, values in weights.items()
    }
    c = config(family, len(weights["model.embed_tokens.weight"]), num_hidden_layers=2)
    return forward(family, c, rounded, np.array(ids))


def _round(values: np.ndarray, *, sym: bool) -> np.ndarray:
    x = values.astype(np.float64).reshape(len(values), -1, 32)
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    if sym:
        scale, zero = 2 * np.abs(x).max(-1, keepdims=True) / 15, 8
    else:
        scale = (high - low) / 15
        zero = np.round(-low / scale)
    return ((np.clip(np.round(x / scale) + zero, 0, 15) - zero) * scale).reshape(values.shape)
