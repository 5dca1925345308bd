"""What every child of a torch quantization sets before it imports torch, or an engine that reads it at import."""

from __future__ import annotations

import os

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}


def set_environment(device: str, **more: str) -> None:
    """No network, no progress bars, and `more`; where `device` is cpu, no accelerator: engines take what they see."""
    os.environ.update(_ENVIRONMENT | more)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
