"""What every child of a torch quantization sets before it imports torch, and how an engine's failures are told."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from quantlab.core.errors import QuantlabError
from quantlab.runtime.worker import out_of_memory

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


@contextlib.contextmanager
def failures_of(engine: str) -> Iterator[None]:
    """What an engine raises, of whatever class, becomes a QuantlabError; that memory is short the worker tells."""
    try:
        yield
    except QuantlabError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        raise QuantlabError(
            f"{engine}: {type(error).__name__}: {error}",
            "try another `--engine`, or leave modules in 16 bits with `--skip`",
        ) from error
