"""What runs on this machine, found without loading any model."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import msgspec

from quantlab.core import hardware, units
from quantlab.core.errors import install_hint
from quantlab.core.result import Environment
from quantlab.quantize.spec import METHODS


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
    return Examination(machine, env, [_llamacpp(env), _converter(), _data(), *_torch_methods()])


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


def _torch_methods() -> list[Check]:
    later = [name for name, module in METHODS.items() if module is None]
    return [Check(name, False, "this version does not build it", "use `--method gguf`") for name in later]
