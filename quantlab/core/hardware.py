"""What machine this is, found without torch: read from the system and from nvidia-smi where it exists."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import psutil

from quantlab.core.result import Environment

# The packages whose versions can change a number.
PACKAGES = (
    "quantlab", "llama-cpp-python", "gguf", "numpy", "tokenizers", "safetensors", "datasets", "huggingface-hub",
    "torch", "transformers", "accelerate", "compressed-tensors", "gptqmodel", "llmcompressor", "optimum", "autoawq",
)  # fmt: skip
# CUDA's compute capability from which on tensor cores multiply FP8 (Ada; Hopper has 9.0).
FP8_CAPABILITY = 8.9


def environment() -> Environment:
    """The machine and the software, now."""
    gpu, driver = nvidia()
    return Environment(
        cpu=cpu_name(),
        gpu=gpu,
        driver=driver,
        ram_bytes=psutil.virtual_memory().total,
        os=f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}",
        packages=package_versions(),
        git=_git_revision(),
        load_average=load_average(),
    )


def cpu_name() -> str:
    """The processor's name and the cores this process may use."""
    name = platform.processor() or platform.machine()
    if platform.system() == "Darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string") or name
    else:
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {usable_cores()} cores"


def usable_cores() -> int:
    """The cores this process may use; physical ones where hyper-threads would share them."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, psutil.cpu_count(logical=False) or allowed)


def load_average() -> float:
    """The 1-minute load average (the number of processes that wanted to run)."""
    return os.getloadavg()[0]


def nvidia() -> tuple[str | None, str | None]:
    """Names of the NVIDIA devices and the driver's version, or two Nones."""
    lines = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    if not lines:
        return None, None
    names, _, driver = zip(*(line.partition(", ") for line in lines), strict=True)
    return ", ".join(names), driver[0]


def cuda_device() -> bool:
    """Whether a process here sees an NVIDIA device: there is one, and CUDA_VISIBLE_DEVICES does not hide it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and nvidia()[0] is not None


def nvidia_capability() -> float | None:
    """The compute capability of the oldest NVIDIA device (8.9: Ada, 9.0: Hopper), or None without one."""
    found = _output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").split()
    return min((float(text) for text in found if re.fullmatch(r"\d+\.\d+", text)), default=None)


def nvidia_free_bytes() -> int | None:
    """Memory that is free on the NVIDIA device that torch takes first, or None where its driver does not say."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
    free = _output("nvidia-smi", f"--id={first}", "--query-gpu=memory.free", "--format=csv,noheader,nounits").strip()
    return int(free) * 2**20 if free.isdigit() else None


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch was built for, None for another build; torch is not imported."""
    found = importlib.util.find_spec("torch")
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8") if found and found.origin else ""
    except OSError:
        return None
    built = re.search(r"^cuda\b[^=\n]*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return built[1] if built else None


def package_versions() -> dict[str, str]:
    """Versions of the installed packages in PACKAGES."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def last_level_cache_bytes() -> int:
    """The size of the largest CPU cache, 0 where the system does not tell."""
    if platform.system() == "Darwin":
        sizes = [_output("sysctl", "-n", name) for name in ("hw.l3cachesize", "hw.perflevel0.l2cachesize")]
        return max((int(size) for size in sizes if size.isdigit()), default=0)
    found = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1024, "M": 1024**2}
    return max((int(size[:-1]) * units[size[-1]] for size in found if size[-1:] in units), default=0)


def _git_revision() -> str | None:
    """The revision of quantlab's own checkout, with `+` where it has changes; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    revision = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{revision}{'+' if changed else ''}" if revision else None


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def process_bytes() -> int:
    """The resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_process_bytes() -> int:
    """The largest resident memory this process has had.

    Linux counts it in VmHWM: `ru_maxrss` there starts from the parent's at the time of the fork.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
