"""What doctor says of machines that this one is not: packages, devices and engines are put in place of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quantlab.core import hardware
from quantlab.lab import doctor
from quantlab.quantize.engines.environment import State

TORCH = {"torch": "2.13.0+cu130", "transformers": "5.17.0", "accelerate": "1.15.0"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it with a machine to get doctor's checks by name."""

    def examine(
        packages: dict[str, str],
        gpu: str | None = None,
        capability: float | None = None,
        cuda: str | None = None,
        nvcc: bool = False,
        engines: dict[str, State] | None = None,
    ) -> dict[str, doctor.Check]:
        env = msgspec.structs.replace(hardware.environment(), packages=packages, gpu=gpu, driver="580" if gpu else None)
        missing = State("missing", None, "not there", "`quantlab engines add IT`")
        monkeypatch.setattr(hardware, "environment", lambda: env)
        monkeypatch.setattr(hardware, "nvidia_capability", lambda: capability)
        monkeypatch.setattr(hardware, "torch_cuda", lambda: cuda)
        monkeypatch.setattr(doctor.shutil, "which", lambda *_, **__: "nvcc" if nvcc else None)
        monkeypatch.setattr(doctor, "state", lambda engine: (engines or {}).get(engine.name, missing))
        return {check.name: check for check in doctor.examine().checks}

    return examine


def test_without_torch_the_extra_is_named(machine: Any) -> None:
    checks = machine({})
    assert not checks["torch"].runs
    assert "torch, transformers, accelerate not installed" in checks["torch"].reason
    assert "quantlab[torch]" in checks["torch"].hint
    assert "fp8 arithmetic" not in checks


def test_a_gpu_without_a_cuda_build_of_torch(machine: Any) -> None:
    checks = machine({**TORCH, "torch": "2.13.0+cpu", "gptqmodel": "7.6.0"}, gpu="NVIDIA A10", capability=8.6)
    assert (checks["torch"].runs, checks["torch"].reason) == (True, "2.13.0+cpu, CPU only")
    assert checks["torch"].hint == "install the CUDA build of torch 2.13.0 to use the GPU"
    assert not checks["fp8 arithmetic"].runs
    assert "no kernels without CUDA" in checks["gptq, awq in torch"].reason


@pytest.mark.parametrize(("capability", "runs"), [(7.5, False), (8.6, False), (8.9, True), (9.0, True), (12.0, True)])
def test_fp8_arithmetic_begins_at_8_9(machine: Any, capability: float, runs: bool) -> None:
    checks = machine(TORCH, gpu="NVIDIA X", capability=capability, cuda="13.0")
    assert checks["torch"].reason == "2.13.0+cu130, CUDA 13.0"
    assert checks["fp8 arithmetic"].runs is runs
    assert f"compute capability {capability}" in checks["fp8 arithmetic"].reason
    assert bool(checks["fp8 arithmetic"].hint) is not runs


def test_kernels_need_gptqmodel_and_nvcc(machine: Any) -> None:
    name, gpu = "gptq, awq in torch", {"gpu": "NVIDIA X", "capability": 9.0, "cuda": "13.0"}
    assert not machine(TORCH, **gpu)[name].runs
    assert "nvcc" in machine({**TORCH, "gptqmodel": "7.6.0"}, **gpu)[name].hint
    there = machine({**TORCH, "gptqmodel": "7.6.0"}, **gpu, nvcc=True)[name]
    assert (there.runs, there.hint) == (True, "")
    assert "Marlin" in there.reason


def test_a_method_runs_where_one_of_its_engines_does(machine: Any) -> None:
    checks = machine(TORCH, engines={"llmcompressor": State("own environment", "/python")})
    assert checks["fp8"] == doctor.Check("fp8", True, "llmcompressor own environment")
    assert checks["gptq"].runs
    assert checks["gptq"].reason == "gptqmodel missing, llmcompressor own environment, optimum missing"
    assert checks["gptq"].hint == "`--engine llmcompressor`, or `quantlab engines add IT`"
    checks = machine(
        TORCH, engines={"gptqmodel": State("broken", None, "", "`quantlab engines add gptqmodel --force`")}
    )
    assert (checks["awq"].runs, checks["awq"].hint) == (False, "`quantlab engines add gptqmodel --force`")


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", None),
        ('cuda = "12.6"\n', "12.6"),
        ("", None),
    ],
)
def test_the_cuda_of_torch_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, cuda: str | None
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch" / "version.py").write_text(text)
    script = "from quantlab.core.hardware import torch_cuda; print(torch_cuda())"
    root = Path(__file__).resolve().parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said == f"{cuda}\n"


def test_doctor_and_engines_import_no_torch() -> None:
    script = (
        "import sys\nfrom quantlab.lab.doctor import examine\nfrom quantlab.quantize.methods import run\n"
        "examine()\nprint(sorted({'torch', 'transformers', 'gptqmodel', 'llmcompressor'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
