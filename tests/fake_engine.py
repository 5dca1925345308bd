"""Stand-ins for an engine and a check, without torch: they run in children as the real ones do.

What a child does is told by the calibration length, the one number that reaches it untouched.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from quantlab.core.errors import QuantlabError
from quantlab.core.files import sha256_file
from quantlab.quantize import torch_markers
from quantlab.quantize.torch_markers import Finished
from quantlab.quantize.torch_work import Checked, CheckJob, EngineDone, EngineJob
from quantlab.runtime.worker import Channel

CRASHES, FAILS, HANGS, GARBAGE = 101, 102, 103, 104


def work(spec: Any, channel: Channel) -> EngineDone:
    """Copy the parent: an engine that changes nothing."""
    job = msgspec.convert(spec, EngineJob)
    channel.progress("layer", 0, 1)
    length = job.calibration.length if job.calibration else 0
    continued_after = _continue(Path(job.state)) if job.state is not None else 0
    for file in Path(job.folder).iterdir():
        shutil.copyfile(file, Path(job.out) / file.name)
    Path(job.probe).write_text("logits")
    # As safetensors writes it.
    (Path(job.out) / "model.safetensors").chmod(0o600)
    if length == CRASHES or "KILLED" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    if length == FAILS:
        raise QuantlabError("the engine found a singular matrix", "more text")
    if length == HANGS:
        time.sleep(600)
    if length == GARBAGE:
        (Path(job.out) / "garbage").touch()
    return EngineDone(
        engine_s=0.5,
        layers=["a", "b"],
        losses={"a": 0.1},
        calibration={"samples": 1, "length_tokens": 2, "sha256": "c"},
        continued_after=continued_after,
    )


def _continue(state: Path) -> int:
    """Finish one more layer of nine; returns how many were finished before."""
    finished = torch_markers.read(state) or Finished(0, 9, {}, "c", [])
    name = f"layer-{finished.layers}"
    (state / name).write_text("some weights")
    files = finished.files | {name: sha256_file(state / name)}
    torch_markers.write(state, Finished(finished.layers + 1, 9, files, "c", []))
    return finished.layers


def check(spec: Any, channel: Channel) -> Checked:
    """Find the fault that `work` planted."""
    job = msgspec.convert(spec, CheckJob)
    with tempfile.TemporaryDirectory(dir=Path(job.probe).parent) as logits:
        if "CHECK_HANGS" in os.environ:
            (Path(logits) / "0.safetensors").touch()
            time.sleep(600)
    planted = (Path(job.artifact) / "garbage").exists()
    return Checked(
        fault="its scales are shuffled" if planted else None, kld_engine=1e-6, kld_parent=0.01, kld_rounding=0.02
    )
