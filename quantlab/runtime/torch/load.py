"""Open a Hugging Face folder in torch: local files only, safetensors only, never remote code."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantlab.core.artifact import read_json, safetensors_files, safetensors_header
from quantlab.core.errors import QuantlabError, UsageError, missing_extra, unknown_name
from quantlab.core.files import os_error
from quantlab.core.hardware import FP8_CAPABILITY
from quantlab.core.result import DEVICES
from quantlab.runtime.worker import out_of_memory

# Before transformers is imported: a local folder needs no network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
os.environ.setdefault("TQDM_DISABLE", "1")
# They warn of each optional kernel that does not load.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
try:
    import torch
    import transformers
except ModuleNotFoundError as error:
    raise missing_extra(str(error.name), "torch") from error

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# gptqmodel's layers that can be unpacked: its own choice on a CPU rounds activations and scales to bfloat16, whatever
# the dtype. Of these that of gptq would unpack at each product, that of awq compute in float16.
_EXACT = {"gptq": "gptq_torch", "awq": "torch_awq"}


class FolderError(QuantlabError):
    """The folder itself does not load, on any machine; the message does not name it, since it may yet be renamed."""


def device_named(name: str) -> torch.device:
    """The device of a name; `auto` takes cuda, then mps, then cpu. QuantlabError where the machine has none such."""
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES)
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, there in found.items() if there)
    if not found[name]:
        built = torch.version.cuda is not None if name == "cuda" else torch.backends.mps.is_built()
        why = "torch finds no such device" if built else f"torch {torch.__version__} is built without it"
        raise QuantlabError(f"no `{name}` here: {why}", "use `--device cpu`, and see `quantlab doctor`")
    return torch.device(name)


def dtype_named(name: str, device: torch.device, config: Any) -> torch.dtype:
    """The dtype of a name.

    `auto` is float32 on a CPU, where matrix products of 16 bits are slow and numbers shall compare; elsewhere it is
    that of config.json, or float16 where it names none.
    """
    if name != "auto" and name not in DTYPES:
        raise unknown_name("dtype", name, ("auto", *DTYPES))
    if name != "auto":
        return DTYPES[name]
    stored = getattr(config, "dtype", None)
    if device.type == "cpu":
        return torch.float32
    # The kernels of 4-bit weights compute in 16 bits, whatever dtype they were made from.
    if stored not in DTYPES.values() or (stored == torch.float32 and config_method(config) in ("gptq", "awq")):
        return torch.float16
    return stored


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the banners and progress bars of libraries to themselves; what goes wrong is raised."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def load_config(folder: Path, *, attention: str | None = None) -> Any:
    """The configuration of a folder, for a model that attends by `attention`, or as transformers chooses where None.

    Refuses what is no causal language model of transformers itself.
    """
    content = read_json(folder / "config.json")
    for file in safetensors_files(folder):
        safetensors_header(file)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # Every family's own class raises what it likes.
        hint = (
            "its own code is not run; quantlab loads what transformers knows"
            if "auto_map" in content
            else (f"transformers {transformers.__version__} does not know it; a newer one may")
        )
        raise machine_error(error, folder) or QuantlabError(
            f"`{folder / 'config.json'}`: {_first_line(error)}", hint
        ) from error
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise QuantlabError(
            f"`{folder}` ({config.model_type}) is no decoder-only language model", "give a causal language model"
        )
    if attention is not None:
        # Its setter reaches the configurations within, as transformers itself sets it.
        config._attn_implementation = attention
    return config


def load_model(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    exact: bool = False,
    strict: bool = False,
) -> Any:
    """The model of `config` (load_config) in evaluation mode.

    `exact`: packed weights are unpacked here and multiplied in float32 where `dtype` is. QuantlabError where the folder
    does not load, its weights lack a tensor of the model, or this machine cannot load it. With `strict` it is a
    FolderError where the folder is at fault, and so is a tensor that the model has no place for.
    """
    method = config_method(config)
    exact = exact and dtype == torch.float32 and method in _EXACT
    if exact:
        config.quantization_config["backend"] = _EXACT[str(method)]
    try:
        model, info = _from_pretrained(folder, config, dtype, device)
        _refuse_keys(type(model).__name__, info, strict=strict)
    except FolderError as error:
        if strict:
            raise
        raise QuantlabError(f"`{folder}`: {error.message}", error.hint) from error
    if exact:
        from quantlab.runtime.torch.unpack import unpack_layers

        unpack_layers(model)
    return model.eval()


def _from_pretrained(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> tuple[Any, dict[str, Any]]:
    try:
        with quiet():
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                device_map=device.type,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                # They are named by _refuse_keys.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except ImportError as error:
        raise QuantlabError(
            f"transformers does not load `{folder}`: {_first_line(error)}", "see `quantlab engines` for what it needs"
        ) from error
    except Exception as error:
        # Every method's own loader raises what it likes.
        reason = _first_line(error).replace(str(folder), "the folder")
        raise machine_error(error, folder) or FolderError(
            f"transformers does not load it: {reason}", "check it with `quantlab inspect`"
        ) from error
    return model, info


def machine_error(error: Exception, folder: Path) -> QuantlabError | None:
    """The error to raise where a folder's load failed for want of memory, in the system or in CUDA; else None."""
    if out_of_memory(error):
        return QuantlabError(f"`{folder}` does not fit in memory", "use a smaller model, or `--device cpu`")
    # transformers raises OSError for a folder's faults too, but without a number of the system's.
    if isinstance(error, OSError) and error.errno:
        return os_error(error, folder)
    if "CUDA error" in str(error):
        return QuantlabError(f"`{folder}`: {_first_line(error)}", "see `quantlab doctor`, or use `--device cpu`")
    return None


def _refuse_keys(kind: str, info: dict[str, Any], *, strict: bool) -> None:
    """Refuse weights that are not those of a model of class `kind`."""
    if other := sorted(info["mismatched_keys"]):
        name, stored, wanted = other[0]
        raise FolderError(
            f"it has {len(other)} tensors of another shape than config.json says, first `{name}`: "
            f"{tuple(stored)} instead of {tuple(wanted)}",
            "download the folder again",
        )
    if lacking := sorted(info["missing_keys"]):
        raise FolderError(
            f"it lacks {len(lacking)} tensors of {kind}, first `{lacking[0]}`",
            "transformers would fill them with random numbers; download the folder again",
        )
    if strict and (spare := sorted(info["unexpected_keys"])):
        raise FolderError(f"it has {len(spare)} tensors that {kind} has no place for, first `{spare[0]}`")


def config_method(config: Any) -> str | None:
    """The quantization method that config.json names."""
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict):
        return quantization.get("quant_method")
    return getattr(quantization, "quant_method", None)


def keep_fp8(config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """FP8 stays FP8 where the GPU multiplies it; elsewhere it is decompressed."""
    if config_method(config) == "compressed-tensors" and device.type == "cuda" and dtype == torch.bfloat16:
        major, minor = torch.cuda.get_device_capability()
        able = float(f"{major}.{minor}") >= FP8_CAPABILITY
        quantization = config.quantization_config
        quantization["use_optimized_inference"] = able and _is_fp8_by_rows(quantization)


def _is_fp8_by_rows(quantization: dict[str, Any]) -> bool:
    """Whether weights and activations are FP8 with a scale for each row or tensor: what the GPU's product takes."""
    groups = list(quantization.get("config_groups", {}).values())
    return bool(groups) and all(
        group["weights"]["type"] == "float"
        and group["weights"]["num_bits"] == 8
        and group["weights"]["strategy"] in ("channel", "tensor")
        and group.get("input_activations")
        for group in groups
    )


def check_threads(threads: int | None) -> None:
    """Refuse a number of threads that torch cannot start."""
    if threads is not None and not 1 <= threads <= 512:
        raise UsageError(f"{threads} threads", "torch takes 1 to 512")


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
