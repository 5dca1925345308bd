"""What is recorded and said of a torch artifact: its record, its card, its recipe, its measurements, its warnings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from quantlab import __version__
from quantlab.core.artifact import Record
from quantlab.core.files import write_text
from quantlab.core.model import ModelFile, ModelRef
from quantlab.core.result import Measurement, ModelInfo, Notice, RuntimeInfo
from quantlab.quantize.engines import Engine
from quantlab.quantize.gguf_facts import parent_name, small_model_notices
from quantlab.quantize.spec import QuantizeSpec, split_weight, variant
from quantlab.quantize.torch_plan import Plan
from quantlab.quantize.torch_source import TorchSource
from quantlab.quantize.torch_spec import calibrates
from quantlab.quantize.torch_work import Checked, EngineDone

_CALIBRATION_OPTIONS = ("calib", "calib_samples", "calib_length", "seed")


class Made(msgspec.Struct, frozen=True):
    """All that is known of an artifact when it has passed its check."""

    spec: QuantizeSpec
    engine: Engine
    source: TorchSource
    plan: Plan
    done: EngineDone
    checked: Checked


def asked(spec: QuantizeSpec) -> dict[str, Any]:
    """The options of a checked spec that its method has, without a path of this machine."""
    names = ["method", "bits", "group_size", "sym", "scheme", "engine", "skip"]
    names += ["desc_act"] if spec.method == "gptq" else []
    names += _CALIBRATION_OPTIONS if calibrates(spec) else []
    found = {name: getattr(spec, name) for name in names if getattr(spec, name) not in (None, [])}
    if spec.method == "int8":
        del found["group_size"], found["sym"]
    if "calib" in found:
        found["calib"] = [_without_path(calib) for calib in spec.calib]
    if spec.allow_requantize:
        found["allow_requantize"] = True
    if spec.dtype != "auto":
        found["dtype"] = spec.dtype
    return found


def record(made: Made, sha256: str) -> Record:
    """The record in the folder: what was asked, what was done, what was measured of it."""
    spec, done, checked = made.spec, made.done, made.checked
    return Record(
        quantlab=__version__,
        method=spec.method,
        asked=asked(spec),
        parent=parent_name(spec.model),
        parent_sha256=spec.model.sha256,
        sha256=sha256,
        parent_revision=spec.model.revision,
        calibration=done.calibration,
        engine=_engine(made.engine),
        got={**_got(made), "losses": done.losses},
        checked=_divergences(checked),
        note=made.source.note,
    )


def _got(made: Made) -> dict[str, Any]:
    plan = made.plan
    layers = {"quantized_layers": len(made.done.layers), "layers_in_16_bits": plan.keep}
    return {**layers, "device": plan.device, "dtype": plan.dtype, "engine_packages": made.engine.pins}


def write_card(folder: Path, made: Made) -> None:
    """Write README.md, the model card, and recipe.yaml, which `quantlab run` reads, beside the weights."""
    spec = made.spec
    options = {name: value for name, value in asked(spec).items() if name != "seed" or value}
    recipe = {"name": variant(spec), "models": [_pinned(spec.model)], "quantize": [options]}
    write_text(folder / "recipe.yaml", _yaml(recipe))
    write_text(folder / "README.md", _card(made))


def _card(made: Made) -> str:
    spec, done, parent = made.spec, made.done, parent_name(made.spec.model)
    head = {"base_model": parent, "library_name": "transformers", "tags": ["quantlab", spec.method]}
    facts = asked(spec) | {
        "quantized layers": len(done.layers),
        "kept in 16 bits": ", ".join(["the head and the embedding", *made.plan.keep]),
    }
    if (drawn := done.calibration) is not None:
        facts["calibration"] = f"{drawn['samples']} samples of {drawn['length_tokens']} tokens, ids {drawn['sha256']}"
    return "\n".join(
        [
            f"---\n{_yaml(head)}---\n",
            f"# {parent}, {variant(spec)}\n",
            f"Made by quantlab {__version__} with {_engine(made.engine)} from `{parent}` ({spec.model.sha256}).\n",
            *([f"The parent: {made.source.note}.\n"] if made.source.note else []),
            *(f"- {name}: {value}" for name, value in facts.items()),
            "\nMeasured after the save, mean KL divergence in nats on a fixed text:\n",
            *(f"- {name}: {value:.4g}" for name, value in _divergences(made.checked).items()),
            "\n`quantlab.json` is the record. `quantlab run recipe.yaml` makes the artifact again; a model or text\n"
            "that was a file is named there without its folder.\n",
        ]
    )


def _yaml(value: Any) -> str:
    import yaml

    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def runtime(made: Made) -> RuntimeInfo:
    """What did the work."""
    plan = made.plan
    name, version = _engine(made.engine).split(" ", 1)
    return RuntimeInfo(name, version, plan.device, plan.dtype, {}, plan.threads)


def measurements(made: Made, info: ModelInfo, duration_s: float) -> dict[str, Measurement]:
    """The measurements of the contract: memory is the larger of the engine's and the check's process.

    A continued run has no duration: that of its rest goes by another name.
    """
    done, checked = made.done, made.checked
    device = max(done.peak_device_bytes, checked.peak_device_bytes)
    of_rest = "_of_rest" if done.continued_after else ""
    found = {
        f"duration{of_rest}": Measurement("s", "lower", [duration_s]),
        f"engine_duration{of_rest}": Measurement("s", "lower", [done.engine_s]),
        "peak_process_bytes": Measurement("bytes", "lower", [max(done.peak_process_bytes, checked.peak_process_bytes)]),
        "peak_device_bytes": Measurement("bytes", "lower", [device]),
        "size_bytes": Measurement("bytes", "lower", [info.size_bytes]),
        "bits_per_weight": Measurement("bits", "lower", [info.bits_per_weight]),
    }
    return found | {
        f"check_{name}": Measurement("nat", "lower", [value]) for name, value in _divergences(checked).items()
    }


def details(made: Made) -> dict[str, Any]:
    """Asked beside got, predicted beside measured, and the facts that are no samples."""
    plan, done, checked = made.plan, made.done, made.checked
    found: dict[str, Any] = {
        "asked": variant(made.spec),
        "got": _got(made),
        "engine": _engine(made.engine),
        "stages_s": {**done.stages_s, **{f"check: {name}": s for name, s in checked.stages_s.items()}},
        "losses": done.losses,
        "predicted": {
            "size_bytes": plan.prediction.size_bytes,
            "peak_process_bytes": plan.prediction.peak_process_bytes,
            "peak_device_bytes": plan.prediction.peak_device_bytes,
            "quantize_s": plan.prediction.quantize_s,
        },
    }
    if done.calibration is not None:
        found["calibration"] = done.calibration
    if done.continued_after:
        found["continued_after_layers"] = done.continued_after
    return found


def resume_notices(made: Made, *, only_checked: bool) -> list[Notice]:
    """Say that a run continued another one, at a layer, or by checking what that one had quantized."""
    notices = [] if not only_checked else [
        Notice(
            "continued",
            "an interrupted run had quantized the model and this one checked it: the duration is that of both",
        )
    ]  # fmt: skip
    if not made.done.continued_after:
        return notices
    return [
        *notices,
        Notice(
            "continued",
            f"continued after {made.done.continued_after} layers that an interrupted run had finished: "
            "times and peak memory are those of the rest",
            "for times to compare quantize again with `--force`",
        ),
    ]


def loss_notices(made: Made) -> list[Notice]:
    """What a reader must know about what quantizing loses."""
    bits = made.spec.bits
    return small_model_notices(made.source.params) if bits is not None and bits < 8 else []


def _divergences(checked: Checked) -> dict[str, float]:
    found = {
        "kld_engine": checked.kld_engine,
        "kld_parent": checked.kld_parent,
        "kld_rounding": checked.kld_rounding,
    }
    return {name: value for name, value in found.items() if value is not None}


def _engine(engine: Engine) -> str:
    return f"{engine.name} {engine.pins[engine.name]}"


def _pinned(model: ModelFile) -> str:
    """What a recipe calls the parent: a Hub id with the commit that was used."""
    name = parent_name(model)
    of_hub = name == model.source and ModelRef.parse(name).kind == "hub"
    return f"{name.partition('@')[0]}@{model.revision}" if of_hub and model.revision else name


def _without_path(calib: str) -> str:
    """NAME:WEIGHT of a set; of a file its name alone, since a path tells of this machine."""
    name, weight = split_weight(calib)
    return Path(name).name + (f":{weight:g}" if weight != 1 else "")
