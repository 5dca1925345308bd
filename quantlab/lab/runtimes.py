"""Which runtime computes a model: llama.cpp a GGUF file, torch a quantized folder, either of them a plain folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quantlab import __version__
from quantlab.core import hardware
from quantlab.core.artifact import content_sha256, read_record
from quantlab.core.errors import QuantlabError, UsageError, unknown_name
from quantlab.core.files import cache_folder, locked, write_text
from quantlab.core.hf_config import quantization
from quantlab.core.model import ModelFile
from quantlab.core.progress import Progress
from quantlab.core.result import Notice

RUNTIMES = ("auto", "torch", "llamacpp", "server")
Options = Mapping[str, Any]


def in_torch(models: Sequence[ModelFile], options: Options) -> list[bool]:
    """Whether torch computes each of the models of one command; else llama.cpp does.

    A plain folder runs in torch where CUDA is, where a dtype is asked for, and where another model of the command
    can run nowhere else, so that the two are measured alike. `options` may name `runtime`, `device` and `dtype`.
    Raises UsageError for a runtime that does not read one of the models.
    """
    runtime, dtype = asked(options), options.get("dtype", "auto")
    folders = [Path(model.path).is_dir() for model in models]
    needs_torch = [check_runtime(model, runtime) for model in models]
    together = runtime == "torch" or (
        runtime == "auto" and (dtype != "auto" or any(needs_torch) or (any(folders) and _cuda(options)))
    )
    chosen = [folder and together for folder in folders]
    if dtype != "auto" and not any(chosen):
        raise UsageError(f"`--dtype {dtype}` is torch's, and llama.cpp runs every model here", "leave it out")
    return chosen


def asked(options: Options) -> str:
    """The runtime that `options` name; raises UsageError for one that is none."""
    runtime = str(options.get("runtime", "auto"))
    if runtime not in RUNTIMES:
        raise unknown_name("runtime", runtime, RUNTIMES)
    return runtime


def check_runtime(model: ModelFile, runtime: str) -> bool:
    """Whether the model runs in torch alone; raises UsageError where `runtime` does not read it."""
    path = Path(model.path)
    if runtime == "server":
        raise UsageError(f"`--runtime server` is of an endpoint, `{model.source}` is none", "leave `--runtime` out")
    if not path.is_dir():
        if runtime == "torch":
            raise UsageError(
                f"`{model.source}` is a GGUF file, and torch reads none",
                "give the folder that the file was made from; without torch llama.cpp runs the file itself",
            )
        return False
    config = quantization(path)
    if config is not None and runtime == "llamacpp":
        raise UsageError(
            f"`{model.source}` is a folder quantized with {config.get('quant_method')}, and llama.cpp reads none",
            "leave `--runtime` out, or quantize its parent with `--method gguf`",
        )
    return config is not None


def as_gguf(
    model: ModelFile, *, offline: bool, progress: Progress, kind: str = "F16"
) -> tuple[ModelFile, list[Notice]]:
    """A model as GGUF of a type in the cache, converted once, and what was said of the conversion."""
    from quantlab.quantize.methods import run
    from quantlab.quantize.spec import QuantizeSpec

    # Another version may convert otherwise.
    path = cache_folder() / "gguf" / f"{model.sha256[:16]}-{__version__}" / f"{model.label}-{kind}.gguf"
    if (notices := _converted(path)) is None:
        with locked(cache_folder() / "locks" / path.parent.name):
            # Another run may have made it while this one waited.
            if (notices := _converted(path)) is None:
                spec = QuantizeSpec(
                    model, str(path), type=kind, force=True, offline=offline, allow_requantize=kind != "F16"
                )
                try:
                    notices = run(spec, progress).warnings
                except QuantlabError as error:
                    itself = ["run the folder itself: `--runtime torch`"] if Path(model.path).is_dir() else []
                    hint = "; or ".join([*([error.hint] if error.hint else []), *itself])
                    raise type(error)(error.message, hint) from error
                write_text(_notices_path(path), msgspec.json.encode(notices).decode() + "\n")
    return msgspec.structs.replace(model, path=str(path), label=path.stem, sha256=content_sha256(path)), notices


def _cuda(options: Options) -> bool:
    """Whether torch would find a CUDA device here; torch itself takes seconds to import."""
    wanted = options.get("device", "auto") in ("auto", "cuda")
    return wanted and hardware.torch_cuda() is not None and hardware.cuda_device()


def _notices_path(gguf: Path) -> Path:
    return gguf.with_suffix(".notices.json")


def _converted(path: Path) -> list[Notice] | None:
    """What was said of a conversion in the cache; None unless the file is as its record describes it."""
    try:
        record = read_record(path)
        if record is None or record.sha256 != content_sha256(path):
            return None
        # Written last.
        return msgspec.json.decode(_notices_path(path).read_bytes(), type=list[Notice])
    except (QuantlabError, OSError, msgspec.MsgspecError):
        return None
