"""The benchmarks of quantlab itself: `make bench`. Interleaved runs, medians of paired ratios, never a test.

What compares with llama.cpp's own tools needs QUANTLAB_ORACLE (a folder with llama-perplexity and llama-bench); the
converter needs QUANTLAB_UPSTREAM (a llama.cpp checkout) and QUANTLAB_UPSTREAM_PYTHON (an interpreter with torch and
that checkout's gguf). Run it on an idle machine; every raw pair is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ORACLE = os.environ.get("QUANTLAB_ORACLE")
UPSTREAM = os.environ.get("QUANTLAB_UPSTREAM")
UPSTREAM_PYTHON = os.environ.get("QUANTLAB_UPSTREAM_PYTHON", sys.executable)
DATA = os.environ.get("QUANTLAB_DATA")
QUANTLAB = [sys.executable, "-m", "quantlab"]


class Run(NamedTuple):
    """One finished command: wall seconds, peak resident bytes of its largest process, and what it printed."""

    wall_s: float
    peak_bytes: int
    out: str


def run(command: Sequence[str | Path], env: dict[str, str] | None = None) -> Run:
    """Run a command to its end; its failure ends the benchmark."""
    with tempfile.TemporaryFile("w+") as out:
        began = time.perf_counter()
        process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=subprocess.STDOUT, env=env)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed ({process.returncode}):\n{text[-2000:]}")
    return Run(wall, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024), text)


def quantlab(*arguments: str | Path) -> Run:
    """Run quantlab; progress goes to nowhere, so that `out` is the JSON alone."""
    return _quiet([*QUANTLAB, *arguments])


def _quiet(command: Sequence[str | Path]) -> Run:
    return run(["sh", "-c", f"exec {shlex.join(map(str, command))} 2>/dev/null"])


def pairs(name: str, ours: Callable[[], float], theirs: Callable[[], float], rounds: int, unit: str = "s") -> None:
    """Run both in turn, the first one changing each round; print the median ratio and all pairs."""
    found: list[tuple[float, float]] = []
    for i in range(rounds):
        if i % 2:
            b, a = theirs(), ours()
        else:
            a, b = ours(), theirs()
        found.append((a, b))
    ratios = [a / b for a, b in found]
    raw = "  ".join(f"{a:.4g}/{b:.4g}" for a, b in found)
    print(f"{name}: ratio {statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]  ({unit}: {raw})")


def samples(result: dict[str, Any], name: str) -> list[float]:
    """The samples of one measurement of a Result."""
    return list(result["measurements"][name]["samples"])


def bench_start_up(rounds: int) -> None:
    """`--help`, and `compare` of 100 results."""
    times = [quantlab("--help").wall_s for _ in range(rounds + 1)][1:]
    print(f"quantlab --help: median {statistics.median(times):.3f} s (aim 0.25)  {[round(t, 3) for t in times]}")


def bench_compare(results: Path, rounds: int, work: Path) -> None:
    """`compare` of 100 results: copies of real ones under other labels."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    folder = work / "hundred"
    folder.mkdir()
    for i in range(100):
        copy = dict(found[i % len(found)])
        copy["id"], copy["label"] = f"{i:032x}", f"{copy['label']}-{i // len(found)}"
        copy["model"] = {**copy["model"], "sha256": f"{copy['model']['sha256'][:-4]}{i // len(found):04x}"}
        (folder / f"{i}.json").write_text(json.dumps(copy))
    times = [round(quantlab("compare", folder).wall_s, 3) for _ in range(rounds + 1)][1:]
    print(f"quantlab compare, 100 results: median {statistics.median(times):.3f} s (aim 0.6)  {times}")


CONVERT = """
import sys, pathlib
from quantlab.quantize.convert import convert
convert(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), outtype="F16")
"""


def bench_conversion(folder: Path, rounds: int, work: Path) -> None:
    """HF folder -> f16 GGUF against the upstream converter: the converter alone, and the command with its checks."""
    out = work / "a.gguf"

    def ours() -> float:
        return run([sys.executable, "-c", CONVERT, folder, out]).wall_s

    def checked() -> float:
        command = ["quantize", folder, "-m", "gguf", "--type", "F16", "-o", out, "--force", "--no-save"]
        return quantlab(*command).wall_s

    if UPSTREAM is None:
        print(f"conversion: {ours():.2f} s, with checks {checked():.2f} s (set QUANTLAB_UPSTREAM to compare)")
        return
    script = Path(UPSTREAM) / "convert_hf_to_gguf.py"
    command = [UPSTREAM_PYTHON, script, folder, "--outtype", "f16", "--outfile", work / "b.gguf"]
    pairs("conversion, converter in a process / upstream", ours, lambda: run(command).wall_s, rounds)
    pairs("conversion, whole command with its checks / upstream", checked, lambda: run(command).wall_s, rounds)


BARE = """
import sys, time, llama_cpp.llama_cpp as lib
params = lib.llama_model_quantize_default_params()
params.ftype, params.nthread = lib.LLAMA_FTYPE_MOSTLY_Q4_K_M, int(sys.argv[3])
began = time.perf_counter()
if lib.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params):
    sys.exit("failed")
print(time.perf_counter() - began)
"""


def bench_quantization(f16: Path, threads: int, rounds: int, work: Path) -> None:
    """f16 -> Q4_K_M: the call inside quantlab against the bare call, and the whole command against its process."""
    out = ["-o", work / "q.gguf", "--force", "--no-save", "--json", "-t", str(threads)]
    stages: list[float] = []

    def ours() -> float:
        done = quantlab("quantize", f16, "-m", "gguf", "--type", "Q4_K_M", *out)
        stages.append(json.loads(done.out)["details"]["stages_s"]["quantize"])
        return done.wall_s

    bare = [sys.executable, "-c", BARE, f16, work / "bare.gguf", str(threads)]
    calls: list[float] = []

    def theirs() -> float:
        done = run(bare)
        calls.append(float(done.out.split()[-1]))
        return done.wall_s

    pairs("quantization, whole command / bare call in a process", ours, theirs, rounds)
    ratio = statistics.median(a / b for a, b in zip(stages, calls, strict=True))
    print(f"quantization, the call: ratio {ratio:.3f}  (s: {stages} / {calls})")


def bench_ppl(f16: Path, q4: Path, threads: int, rounds: int) -> None:
    """Values, wall time and peak memory against llama-perplexity on the same file, windows and threads."""
    if DATA is None:
        print("ppl: set QUANTLAB_DATA to the folder of wiki.test.raw")
        return
    text = Path(DATA) / "wiki.test.raw"
    common = ["--data", text, "--protocol", "llama.cpp", "-t", str(threads), "--no-save", "--json"]
    peaks: dict[str, list[int]] = {"ours": [], "theirs": []}

    def ours() -> float:
        done = quantlab("ppl", f16, "--limit", "8", *common)
        result = json.loads(done.out)
        peaks["ours"].append(done.peak_bytes)
        print(f"  ppl f16, 8 windows: {samples(result, 'ppl')[0]:.6f} +- {samples(result, 'ppl_stderr')[0]:.5f}")
        return done.wall_s

    def theirs() -> float:
        tool = Path(ORACLE or "") / "llama-perplexity"
        done = run([tool, "-m", f16, "-f", text, "--chunks", "8", "-t", str(threads)])
        peaks["theirs"].append(done.peak_bytes)
        print("  " + next(line for line in done.out.splitlines() if "Final estimate" in line))
        return done.wall_s

    if ORACLE is None:
        print(f"ppl: {ours():.2f} s (set QUANTLAB_ORACLE to compare)")
    else:
        pairs("ppl wall, quantlab / llama-perplexity", ours, theirs, rounds)
        ratio = max(peaks["ours"]) / max(peaks["theirs"])
        print(f"ppl peak memory: {max(peaks['ours']) / 1e6:.0f} MB / {max(peaks['theirs']) / 1e6:.0f} MB = {ratio:.2f}")
    result = json.loads(quantlab("ppl", q4, "--limit", "4", "--against", f16, *common).out)
    mean, top = statistics.fmean(samples(result, "kld_mean")), statistics.fmean(samples(result, "top1_agreement"))
    print(f"KLD Q4_K_M against f16, 4 windows: {mean:.6f}, max {samples(result, 'kld_max')[0]:.6f}, same top {top:.3%}")


def bench_tpot(path: Path, threads: int, rounds: int) -> None:
    """TPOT against llama-bench's tg on the same file, threads and depth."""

    def ours() -> float:
        done = quantlab("bench", path, "-p", "128", "-n", "64", "-r", "3", "-t", str(threads), "--no-save", "--json")
        return 1e3 * statistics.median(samples(json.loads(done.out), "tpot"))

    def theirs() -> float:
        command = [Path(ORACLE or "") / "llama-bench", "-m", path, "-p", "0", "-n", "64", "-d", "128", "-r", "3"]
        done = _quiet([*command, "-t", str(threads), "-o", "json"])
        return 1e-6 * statistics.median(json.loads(done.out)[0]["samples_ns"]) / 64

    if ORACLE is None:
        print(f"TPOT {path.name}: {ours():.2f} ms (set QUANTLAB_ORACLE to compare)")
    else:
        pairs(f"TPOT {path.name}, quantlab / llama-bench", ours, theirs, rounds, "ms")


def main() -> None:
    """Quantize the demo model once, then run the benchmarks asked for."""
    every = ("start", "compare", "convert", "quantize", "ppl", "tpot")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", choices=[*every, []], help=f"some of {', '.join(every)}; default all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    what = arguments.what or every
    print(f"load average {os.getloadavg()[0]:.2f}, {arguments.threads} threads")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        files = {}
        for kind in ("F16", "Q4_K_M", "Q4_0"):
            files[kind] = work / f"demo-{kind}.gguf"
            source = files["F16"] if kind != "F16" else "demo"
            quantlab("quantize", source, "-m", "gguf", "--type", kind, "-o", files[kind], "--results", work / "runs")
        if "start" in what:
            bench_start_up(arguments.rounds)
        if "compare" in what:
            quantlab("bench", *files.values(), "-p", "32", "-n", "16", "-r", "5", "--results", work / "runs")
            bench_compare(work / "runs", arguments.rounds, work)
        if "convert" in what:
            from quantlab.core.progress import silent
            from quantlab.lab.demo import demo

            bench_conversion(demo(offline=True, progress=silent).path, arguments.rounds, work)
        if "quantize" in what:
            bench_quantization(files["F16"], arguments.threads, arguments.rounds, work)
        if "ppl" in what:
            bench_ppl(files["F16"], files["Q4_K_M"], arguments.threads, arguments.rounds)
        if "tpot" in what:
            for path in files.values():
                bench_tpot(path, arguments.threads, arguments.rounds)


if __name__ == "__main__":
    if shutil.which("sh") is None:
        sys.exit("the benchmarks need a POSIX shell")
    main()
