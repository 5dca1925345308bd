"""How far two models' logits lie apart. Only imported by children: torch and transformers take seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from quantlab.core.errors import QuantlabError, install_hint
from quantlab.core.hf_config import quantization
from quantlab.quantize.torch_model import logits_of

Logits = np.ndarray[Any, np.dtype[np.float32]]
# Rows at once: a window of a large vocabulary in several copies fills gigabytes.
_ROWS = 64


def load_artifact(folder: Path, *, dtype: torch.dtype, device: str) -> tuple[Any, str | None]:
    """An artifact through transformers, and what is wrong with it (then maybe without a model).

    QuantlabError where it is this machine that cannot load it.
    """
    kernel = _exact_kernel(folder)
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map=device,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **({} if kernel is None else {"quantization_config": kernel}),
        )
    except ImportError as error:
        raise QuantlabError(
            f"the artifact cannot be checked, transformers lacks a package for it: {_first_line(error)}",
            install_hint("engines"),
        ) from error
    except torch.OutOfMemoryError as error:
        raise QuantlabError(
            f"the artifact cannot be checked: it does not fit in the memory of `{device}`", "use `--device cpu`"
        ) from error
    except Exception as error:
        # Each format's loader raises what it likes.
        return None, f"transformers does not load it: {_first_line(error)}"
    if dtype == torch.float32:
        _widen_awq(model)
    return model.eval(), _weights_fault(info)


def divergence(reference: Logits, other: Logits) -> np.ndarray[Any, np.dtype[np.float64]]:
    """KL(reference || other) of each token in nats, from logits (tokens, n_vocab)."""
    found = []
    for first in range(0, len(reference), _ROWS):
        p, q = (torch.from_numpy(x[first : first + _ROWS]).double().log_softmax(-1) for x in (reference, other))
        found.append((p.exp() * (p - q)).sum(-1))
    # Rounding leaves identical rows a little below zero.
    return np.asarray(torch.cat(found).clamp(min=0))


def relative_error(reference: Logits, other: Logits) -> float:
    """Power of the difference of logits over the power of the reference, each token's mean taken out.

    A divergence in nats shrinks where logits are near uniform, as in a random model; this does not.
    """
    power = error = 0.0
    for first in range(0, len(reference), _ROWS):
        a, b = (x[first : first + _ROWS].astype(np.float64) for x in (reference, other))
        a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
        power, error = power + float((a**2).sum()), error + float(((a - b) ** 2).sum())
    return error / power if power else float(error > 0)


def precision(logits: Logits) -> str:
    """The narrowest dtype that holds all of these: what the model computed in."""
    narrow = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    values = torch.from_numpy(logits[:_ROWS])
    return next((name for name, dtype in narrow.items() if torch.equal(values.to(dtype).float(), values)), "float32")


def blocks(values: np.ndarray[Any, np.dtype[np.float64]], size: int) -> list[float]:
    """Means of neighbouring values, `size` at a time; a shorter rest is left out."""
    whole = len(values) // size * size
    return [float(value) for value in values[:whole].reshape(-1, size).mean(1)]


def keep_logits(model: Any, windows: list[list[int]], folder: Path) -> list[Path]:
    """Compute each window's logits and keep them in files: all at once would fill the memory."""
    folder.mkdir()
    kept = []
    for number, window in enumerate(windows):
        kept.append(folder / f"{number}.npy")
        np.save(kept[-1], logits_of(model, window))
    return kept


def _exact_kernel(folder: Path) -> Any:
    """The plain torch kernels of gptqmodel, which compute in the dtype asked for.

    The kernel that it takes by itself on a CPU rounds scales and activations to bfloat16; that error would be taken for
    the artifact's.
    """
    config = quantization(folder) or {}
    if config.get("quant_method") == "gptq":
        return transformers.GPTQConfig(bits=config["bits"], backend="gptq_torch")
    return transformers.AwqConfig(backend="torch_awq") if config.get("quant_method") == "awq" else None


def _widen_awq(model: Any) -> None:
    """Put the weights that the codes mean in place of the one kernel of awq that computes in float16 whatever is asked.

    On a CPU that takes ten times as long.
    """
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "AwqTorchLinear":
            from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

            scales = module.scales.float()
            weight = dequantize_gemm(module.qweight, module.qzeros, scales, module.bits, module.group_size).T
            linear = torch.nn.Linear(*weight.T.shape, bias=module.bias is not None, device="meta")
            linear.weight = torch.nn.Parameter(weight.contiguous(), requires_grad=False)
            if module.bias is not None:
                linear.bias = torch.nn.Parameter(module.bias.float(), requires_grad=False)
            model.set_submodule(name, linear)


def _weights_fault(info: dict[str, Any]) -> str | None:
    kinds = {
        "missing_keys": "transformers finds no weights for",
        "mismatched_keys": "transformers wants another shape of",
        "unexpected_keys": "transformers has no place for",
        "error_msgs": "transformers does not load",
    }
    for kind, what in kinds.items():
        if names := sorted(str(key) for key in info.get(kind) or ()):
            return f"{what} {len(names)} of its tensors, first `{names[0]}`"
    return None


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
