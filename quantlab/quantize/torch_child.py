"""What every child of a torch quantization sets before it imports torch, and how an engine's failures are told."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from quantlab.core.errors import QuantlabError, install_hint
from quantlab.core.files import cache_folder
from quantlab.quantize.engines import ENGINES
from quantlab.runtime.worker import out_of_memory, out_of_room

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
def importing(engine: str) -> Iterator[None]:
    """What its packages raise when they are imported becomes a QuantlabError that says how to get sound ones."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise
        said = f"`{engine}` does not load: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name:
            said = f"`{error.name}` is not installed"
        own = (cache_folder() / "engines").absolute() in Path(sys.prefix).parents
        # No extra holds one that lives alone.
        own = own or (engine in ENGINES and ENGINES[engine].alone)
        again = f"`quantlab engines add {engine} --force` builds its environment again"
        raise QuantlabError(said, again if own else install_hint("engines")) from error


@contextlib.contextmanager
def failures_of(engine: str) -> Iterator[None]:
    """What an engine raises, of whatever class, becomes a QuantlabError; the worker tells what memory or disks lack."""
    try:
        yield
    except QuantlabError:
        raise
    except Exception as error:
        if out_of_memory(error) or out_of_room(error):
            raise
        raise QuantlabError(
            f"{engine}: {type(error).__name__}: {error}",
            "try another `--engine`, or leave modules in 16 bits with `--skip`",
        ) from error
