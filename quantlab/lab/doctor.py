"""What runs on this machine, found without loading any model."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil

import msgspec

from quantlab.core import hardware, units
from quantlab.core.errors import install_hint
from quantlab.core.result import Environment
from quantlab.quantize.engines import DEFAULT_ENGINE, ENGINES
from quantlab.quantize.engines.environment import state

# Where gptqmodel looks for nvcc beside PATH.
_CUDA_FOLDERS = ("/usr/local/cuda/bin", f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin")


class Check(msgspec.Struct, frozen=True):
    """One method or backend: whether it runs here, why, and what to do."""

    name: str
    runs: bool
    reason: str
    hint: str = ""


class Examination(msgspec.Struct, frozen=True):
    """The machine, and what runs on it."""

    machine: dict[str, str]
    env: Environment
    checks: list[Check]


def examine() -> Examination:
    """Look at the machine and the installed packages."""
    env = hardware.environment()
    machine = {
        "cpu": env.cpu,
        "gpu": f"{env.gpu}, driver {env.driver}" if env.gpu else "none found",
        "memory": units.size(env.ram_bytes, None),
        "cpu cache": units.size(hardware.last_level_cache_bytes(), None),
        "load": f"{env.load_average:.2f}",
        "os": env.os,
        **env.packages,
    }
    return Examination(machine, env, [_llamacpp(env), _converter(), _data(), *_torch(env), *_engines()])


def _llamacpp(env: Environment) -> Check:
    if "llama-cpp-python" not in env.packages:
        return Check("llama.cpp", False, "llama-cpp-python is not installed", install_hint("gguf"))
    try:
        import llama_cpp.llama_cpp as lib
    except (ImportError, OSError, RuntimeError) as error:
        return Check("llama.cpp", False, f"does not load: {error}", "build llama-cpp-python again on this machine")
    gpu = bool(lib.llama_supports_gpu_offload())
    reason = f"{env.packages['llama-cpp-python']}, {'with GPU offload' if gpu else 'CPU only'}"
    if env.gpu and not gpu:
        return Check("llama.cpp", True, reason, "a GPU is here: rebuild with CMAKE_ARGS=-DGGML_CUDA=on to use it")
    return Check("llama.cpp", True, reason)


def _converter() -> Check:
    missing = [
        name for name in ("llama_cpp", "gguf", "safetensors", "tokenizers") if importlib.util.find_spec(name) is None
    ]
    if missing:
        return Check("gguf", False, f"{', '.join(missing)} not installed", install_hint("gguf"))
    return Check("gguf", True, "converts and quantizes on this CPU")


def _data() -> Check:
    if importlib.util.find_spec("datasets") is None:
        return Check("datasets", False, "not installed: no corpora from the Hub", install_hint("data"))
    return Check("datasets", True, importlib.metadata.version("datasets"))


def _torch(env: Environment) -> list[Check]:
    """The torch runtime, and what of FP8 the device computes; torch is not imported."""
    missing = [name for name in ("torch", "transformers", "accelerate") if name not in env.packages]
    if missing:
        return [Check("torch", False, f"{', '.join(missing)} not installed", install_hint("torch"))]
    cuda, version = hardware.torch_cuda(), env.packages["torch"]
    if env.gpu and cuda is None:
        hint = f"install the CUDA build of torch {version.partition('+')[0]} to use the GPU"
        return [Check("torch", True, f"{version}, CPU only", hint), _int4_kernels(env, None), _fp8_units(None)]
    apple = platform.system() == "Darwin" and platform.machine() == "arm64"
    device = f"CUDA {cuda}" if env.gpu else "MPS and CPU" if apple else "CPU only"
    return [
        Check("torch", True, f"{version}, {device}"),
        _int4_kernels(env, cuda),
        _fp8_units(hardware.nvidia_capability()),
    ]


def _int4_kernels(env: Environment, cuda: str | None) -> Check:
    """What computes gptq and awq folders: transformers leaves them to gptqmodel."""
    name = "gptq, awq in torch"
    if "gptqmodel" not in env.packages:
        return Check(
            name, False, "gptqmodel is not installed here, without which they do not load", install_hint("engines")
        )
    if not env.gpu or cuda is None:
        return Check(name, True, "torch's own operations: no kernels without CUDA")
    if any(shutil.which("nvcc", path=folder) for folder in (None, *_CUDA_FOLDERS)):
        return Check(name, True, "gptqmodel compiles its kernels (Marlin) at the first use")
    hint = "put the CUDA toolkit's nvcc on PATH: without it no Marlin kernel is compiled, and slower ones are taken"
    return Check(name, True, "no nvcc: Triton and torch kernels alone", hint)


def _fp8_units(capability: float | None) -> Check:
    if capability is None:
        return Check("fp8 arithmetic", False, "no GPU that torch uses: fp8 is unpacked and computed in the run's dtype")
    if capability < hardware.FP8_CAPABILITY:
        reason = (
            f"compute capability {capability}, FP8 begins at {hardware.FP8_CAPABILITY}: fp8 computes in 16 bits here"
        )
        return Check("fp8 arithmetic", False, reason, "fp8 saves memory here, not time; int8 or awq may be faster")
    return Check("fp8 arithmetic", True, f"compute capability {capability}")


def _engines() -> list[Check]:
    """Each torch method: whether its default engine runs, then the others."""
    states = {name: state(engine) for name, engine in ENGINES.items()}
    checks = []
    for method, default in DEFAULT_ENGINE.items():
        names = [default, *(name for name in ENGINES if name != default and method in ENGINES[name].methods)]
        reason = ", ".join(f"{name} {states[name].where}" for name in names)
        able = [name for name in names if states[name].python]
        hint = states[default].hint
        if able and default not in able:
            hint = f"`--engine {able[0]}`, or {hint}"
        checks.append(Check(method, bool(able), reason, hint))
    return checks
