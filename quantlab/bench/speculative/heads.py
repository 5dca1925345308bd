"""Train heads for a target: Medusa heads or an EAGLE layer, on its own answers to calibration text."""

from __future__ import annotations

import importlib.util
import time
import uuid
from pathlib import Path

import msgspec

from quantlab.core.artifact import model_info
from quantlab.core.corpus import load_text
from quantlab.core.errors import UsageError, missing_extra, unknown_name
from quantlab.core.files import check_output, written
from quantlab.core.model import ModelFile
from quantlab.core.progress import Progress, silent
from quantlab.core.result import DEVICES, DTYPES, Measurement, Outcome, RuntimeInfo
from quantlab.runtime.worker import run_in_child

METHODS = ("medusa", "eagle")
_CHILD = "quantlab.runtime.torch.head_training:work"
_DEFAULT_SETS = ["builtin_en", "builtin_code", "builtin_chat"]
_LEAST_WINDOWS = 16
# Of the training, in the details.
_TOLD = ("loss", "tokens", "draft_ids", "parameters", "answers_s", "training_s")


class HeadsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Heads to train for a folder that torch runs.

    The target answers `calib_samples` beginnings of the texts `calib` (names of sets or paths, each taken whole); a
    window of `calib_length` tokens is an eighth text, the rest answer. `heads` tokens are drafted in a row, of the
    `draft_vocab` most frequent ids of the windows.
    """

    model: ModelFile
    out: str
    method: str = "medusa"
    force: bool = False
    calib: list[str] = msgspec.field(default_factory=lambda: list(_DEFAULT_SETS))
    calib_samples: int = 256
    calib_length: int = 128
    heads: int = 4
    epochs: int = 6
    draft_vocab: int = 8192
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    seed: int = 0
    offline: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        for name, value, known in (
            ("method", self.method, METHODS),
            ("dtype", self.dtype, DTYPES),
            ("device", self.device, DEVICES),
        ):
            if value not in known:
                raise unknown_name(name, value, known)
        if not self.out.endswith(".safetensors"):
            raise UsageError(f"`--out {self.out}` does not end in .safetensors", f"call it `{self.out}.safetensors`")
        least = {"calib_samples": _LEAST_WINDOWS, "calib_length": 16, "heads": 1, "epochs": 1, "draft_vocab": 2}
        for name, most in least.items():
            if getattr(self, name) < most:
                raise UsageError(f"`--{name.replace('_', '-')}` {getattr(self, name)}", f"give at least {most}")
        if self.calib_length < 4 * self.heads:
            raise UsageError(f"windows of {self.calib_length} tokens for {self.heads} heads", "raise `--calib-length`")
        if not self.calib:
            raise UsageError("no text to begin from", "give `--calib NAME|PATH`, or leave it out")
        if self.seed < 0:
            raise UsageError(f"`--seed` {self.seed}", "give 0 or more")


def train(spec: HeadsSpec, progress: Progress = silent) -> Outcome:
    """Write the heads; `agreement` is how often they say what the target says, in greedy answers held out.

    Raises QuantlabError before any work where the output exists or torch is missing.
    """
    if importlib.util.find_spec("torch") is None:
        raise missing_extra("torch", "torch")
    out, started = Path(spec.out), time.perf_counter()
    check_output(out, force=spec.force)
    texts = [load_text(name, "calibration", offline=spec.offline) for name in spec.calib]
    with written(out) as temporary:
        job = {
            "path": spec.model.path,
            "target": spec.model.label,
            "target_sha256": spec.model.sha256,
            "method": spec.method,
            "out": str(temporary),
            "text": "\n\n".join(text.raw for text in texts),
            "windows": spec.calib_samples,
            "length": spec.calib_length,
            **{name: getattr(spec, name) for name in ("heads", "epochs", "draft_vocab", "seed", "device", "dtype")},
            "threads": spec.threads,
        }
        trained = run_in_child(_CHILD, job, progress)
    return Outcome(
        label=out.stem,
        model=model_info(spec.model),
        runtime=msgspec.convert(trained["runtime"], RuntimeInfo),
        measurements={
            "duration": Measurement("s", "lower", [time.perf_counter() - started]),
            "size_bytes": Measurement("bytes", "lower", [float(out.stat().st_size)]),
            "agreement": Measurement("share", "higher", trained["agreement"]),
        },
        warnings=[note for text in texts for note in text.notes],
        details={
            "part": "train",
            "session": uuid.uuid4().hex[:16],
            "row": 1,
            "complete": True,
            "out": spec.out,
            "method": spec.method,
            **{name: trained[name] for name in _TOLD},
            "calibration_sha256": {text.name: text.sha256 for text in texts},
        },
    )
