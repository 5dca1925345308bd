"""What goes wrong around a torch quantization: a full disk, a broken engine, another run. No work is lost by it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quantlab.core.errors import QuantlabError
from quantlab.quantize import torch_child, torch_method
from quantlab.quantize.spec import QuantizeSpec
from quantlab.quantize.torch_child import failures_of, importing
from quantlab.quantize.torch_plan import misfits
from quantlab.quantize.torch_prediction import Linear
from tests import fake_engine
from tests.conftest import ROOT
from tests.full_disk import limited_files
from tests.test_torch_method import folder, left, run, spec_of

__all__ = ["folder"]


def full(*_: Any, **__: Any) -> None:
    raise QuantlabError("`x`: No space left on device", "the disk is full: free some room and run again")


def test_a_disk_that_is_full_while_the_engine_saves_is_told(folder: Path) -> None:
    with limited_files(20_000), pytest.raises(QuantlabError, match="out of room on a disk") as caught:
        run(folder)
    assert "free some room" in caught.value.hint
    assert left(folder) == []


@pytest.mark.parametrize("step", ["write_card", "record"])
def test_a_disk_that_is_full_after_the_check_loses_no_artifact(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(torch_method.facts, step, full)
        with pytest.raises(QuantlabError, match="checked and recorded: `x`: No space left") as caught:
            run(folder)
    assert "run again; the quantized model is kept in" in caught.value.hint
    assert left(folder) == ["a.b.partial"]
    monkeypatch.setenv("KILLED", "1")
    run(folder)
    assert left(folder) == ["a.b"]


def test_a_full_disk_is_no_fault_of_the_engine() -> None:
    with pytest.raises(OSError, match="space"), failures_of("toy"):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'awq'", name="awq"), "`awq` is not installed"),
        (ImportError("libtorch.so: file too short"), "`toy` does not load: libtorch.so: file too short"),
        (RuntimeError("operator torchvision::nms does not exist"), "`toy` does not load: operator"),
    ],
)
@pytest.mark.parametrize("own", [True, False])
def test_an_engine_whose_packages_do_not_load_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, error: Exception, said: str, own: bool
) -> None:
    """`engines add` keeps an environment whose metadata are whole, and so does nothing without `--force`."""
    monkeypatch.setenv("QUANTLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(torch_child.sys, "prefix", str(tmp_path / "engines" / "toy") if own else "/usr")
    with pytest.raises(QuantlabError, match=said) as caught, importing("toy"):
        raise error
    assert ("engines add toy --force" if own else "quantlab[engines]") in caught.value.hint


def test_no_extra_is_said_to_hold_an_engine_that_lives_alone() -> None:
    with pytest.raises(QuantlabError, match="does not load") as caught, importing("autoawq"):
        raise ImportError("no PytorchGELUTanh")
    assert caught.value.hint.startswith("`quantlab engines add autoawq --force`")


def test_memory_that_is_short_at_an_import_is_told_as_such() -> None:
    with pytest.raises(MemoryError), importing("toy"):
        raise MemoryError


def test_autoawq_clips_64_rows_at_once(folder: Path) -> None:
    linear = Linear("model.layers.0.mlp.up_proj", 64, 96)
    options: QuantizeSpec = spec_of(folder, method="awq", engine="autoawq", bits=4)
    (misfit,) = misfits([linear], options)
    assert (misfit.what, misfit.divisor, misfit.size) == ("the clipping of autoawq", 64, 96)
    assert misfits([linear], spec_of(folder, method="awq", engine="gptqmodel", bits=4)) == []


_RUN = """\
import sys
sys.path.insert(0, sys.argv[1])
import pytest
from pathlib import Path
from tests.test_torch_method import patch, run
patch(pytest.MonkeyPatch())
run(Path(sys.argv[2]), calib_length=int(sys.argv[3]))
"""


def test_two_at_once_are_refused_before_the_work(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _RUN, str(ROOT), str(folder), str(fake_engine.HANGS)]
    first = subprocess.Popen(command, env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (folder.parent / "out" / "a.b.partial" / "whole").is_dir():
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        for force in (False, True):
            with pytest.raises(QuantlabError, match="another quantlab is writing"):
                run(folder, force=force)
    finally:
        first.kill()
        first.wait()
    run(folder)
    assert left(folder) == ["a.b"]
