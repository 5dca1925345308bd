"""What every child of a torch quantization measures of itself: the time of its stages and the peaks of its memory."""

from __future__ import annotations

import time

from quantlab.core import hardware
from quantlab.quantize.torch_work import Checked, EngineDone


class Stages:
    """The seconds of a child's stages, of each from the end of the one before it, in `seconds`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._ended = time.perf_counter()

    def end(self, stage: str) -> None:
        """Say what was done since the last one's end."""
        self.seconds[stage] = self.skip()

    def skip(self) -> float:
        """The seconds since the last one's end, which are told elsewhere; the next stage begins."""
        before, self._ended = self._ended, time.perf_counter()
        return self._ended - before

    def tell(self, done: EngineDone | Checked) -> None:
        """Write them into `done`, and the peaks of this process's memory."""
        import torch

        done.stages_s, done.peak_process_bytes = self.seconds, hardware.peak_process_bytes()
        if torch.cuda.is_available():
            done.peak_device_bytes = torch.cuda.max_memory_allocated()
