"""Results as a lab of three artifacts leaves them: the material of the comparison and rendering tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from quantlab.core.result import Environment, Measurement, ModelInfo, Notice, Result, RuntimeInfo, TensorType
from quantlab.report.comparison import Comparison, Row, compare
from quantlab.report.metrics import METRICS, sentence
from quantlab.report.values import Value

ENV = Environment("Test CPU, 2 cores", None, None, 8_000_000_000, "Linux 6.1 x86_64", {}, None, 0.4)
RUNTIME = RuntimeInfo("llamacpp", "0.3.36", "cpu", "f16", {}, 2)
NLL = [3.0, 3.2, 3.4, 3.1]
CELL = {"prompt_tokens": 128, "new_tokens": 64, "batch": 1}
UNITS = {
    "ttft": ("s", "lower"),
    "tpot": ("s", "lower"),
    "tpot_floor": ("s", "lower"),
    "peak_process_bytes": ("B", "lower"),
    "peak_device_bytes": ("B", "lower"),
    "output_throughput": ("tokens/s", "higher"),
    "decode_throughput": ("tokens/s", "higher"),
    "ppl": ("1", "lower"),
    "nll": ("nat", "lower"),
    "kld_mean": ("nat", "lower"),
    "top1_agreement": ("1", "higher"),
}
F16 = ModelInfo("demo", "gguf", "none", 270_884_736, 16.0, {"F16": TensorType(211, 134_515_008)}, sha256="f" * 64)
Q4 = ModelInfo(
    "Q4_K_M.gguf",
    "gguf",
    "gguf",
    105_454_144,
    6.27,
    {"Q5_0": TensorType(166, 90_000_000), "Q4_K": TensorType(16, 30_000_000), "Q8_0": TensorType(15, 14_515_008)},
    parent="demo",
    sha256="4" * 64,
)
Q8 = ModelInfo(
    "Q8_0.gguf",
    "gguf",
    "gguf",
    144_811_712,
    8.5,
    {"Q8_0": TensorType(211, 134_515_008)},
    parent="demo",
    sha256="8" * 64,
)


def measured(**samples: float | Sequence[float]) -> dict[str, Measurement]:
    """Measurements by name, with the contract's units and directions."""
    listed = {name: [value] if isinstance(value, (int, float)) else list(value) for name, value in samples.items()}
    return {name: Measurement(UNITS[name][0], UNITS[name][1], values) for name, values in listed.items()}


def result(kind: str, label: str, model: ModelInfo, **given: Any) -> Result:
    """One finished Result; `given` replaces any field."""
    minute = given.pop("minute", 0)
    fields: dict[str, Any] = {
        "schema": 1,
        "id": f"{kind}-{label}-{minute}",
        "kind": kind,
        "status": "ok",
        "label": label,
        "spec": {},
        "fingerprint": "",
        "model": model,
        "runtime": RUNTIME,
        "env": ENV,
        "measurements": {},
        "warnings": [],
        "started_at": f"2026-11-29T10:{minute:02d}:00+00:00",
        "duration_s": 1.0,
    }
    return Result(**{**fields, **given})


def bench(label: str, model: ModelInfo, tpot: Sequence[float], **given: Any) -> Result:
    """A bench Result whose throughputs follow from TPOT."""
    numbers = measured(
        tpot=tpot,
        ttft=[20 * x for x in tpot],
        tpot_floor=model.size_bytes / 20e9,
        peak_process_bytes=model.size_bytes + 60e6,
        decode_throughput=[1 / x for x in tpot],
        output_throughput=[64 / (83 * x) for x in tpot],
    )
    return result(
        "bench", label, model, **{"spec": CELL, "measurements": numbers, "details": {"session": "s1"}} | given
    )


def ppl(label: str, model: ModelInfo, nll: Sequence[float], **given: Any) -> Result:
    """A ppl Result of windows of equal length; `details` are added to those of 8 llama.cpp windows."""
    import math

    details = {
        "protocol": "llama.cpp",
        "n_ctx": 512,
        "stride": 512,
        "windows": len(nll),
        "scored_tokens": 255 * len(nll),
        "bos": "none: the model's tokenizer adds none",
        "text_hash": "173c87a53759e0201f33e0ccf978e510",
        "token_hash": "aaaa",
    } | given.pop("details", {})
    numbers = measured(ppl=math.exp(sum(nll) / len(nll)), nll=nll, **given.pop("numbers", {}))
    return result("ppl", label, model, measurements=numbers, details=details, **given)


def lab() -> list[Result]:
    """f16, Q8_0 and Q4_K_M: quantized, benched in one session, measured on eight windows."""
    noise = random.Random(2)
    drift = [1 + noise.gauss(0, 0.03) for _ in range(5)]

    def tpots(mean_s: float) -> list[float]:
        return [mean_s * slow * (1 + noise.gauss(0, 0.01)) for slow in drift]

    base = [3.2 + noise.gauss(0, 0.15) for _ in range(8)]
    q8 = [x + noise.gauss(0.0002, 0.003) for x in base]
    q4 = [x + noise.gauss(0.05, 0.02) for x in base]
    beside = {"against": {"label": "f16", "sha256": "f" * 64}}
    spread = Notice("large-spread", "TTFT varies by 12% between repetitions", "close other programs")
    return [
        result("quantize", "Q8_0", Q8, spec={"type": "Q8_0"}),
        result("quantize", "Q4_K_M", Q4, spec={"type": "Q4_K_M"}, minute=1),
        bench("f16", F16, tpots(0.021), minute=2),
        bench("Q8_0", Q8, tpots(0.0205), minute=2),
        bench("Q4_K_M", Q4, tpots(0.0152), minute=2, warnings=[spread]),
        ppl("f16", F16, base, minute=3),
        ppl("Q8_0", Q8, q8, minute=4, details=beside, numbers={"kld_mean": 0.00171, "top1_agreement": 0.9765}),
        ppl("Q4_K_M", Q4, q4, minute=5, details=beside, numbers={"kld_mean": 0.05703, "top1_agreement": 0.86176}),
    ]


# What tests ask of a comparison


def labels(comparison: Comparison) -> list[str]:
    return [row.artifact.label for row in comparison.rows]


def row(comparison: Comparison, label: str, cell: str | None = None) -> Row:
    return next(r for r in comparison.rows if r.artifact.label == label and cell in (None, str(r.cell)))


def value(comparison: Comparison, label: str, metric: str, cell: str | None = None) -> Value:
    found = [v for column, v in row(comparison, label, cell).values.items() if column.metric.name == metric]
    assert len(found) == 1
    return found[0]


def said(comparison: Comparison, label: str, metric: str) -> str:
    found = value(comparison, label, metric)
    return sentence(next(m for m in METRICS if m.name == metric), found.ratio, found.verdict)


def two(tpot_a, tpot_b, **given) -> Comparison:
    return compare([bench("f16", F16, tpot_a), bench("Q4", Q4, tpot_b, **given)])
