"""Whether speeds of one cell were measured under like conditions: unlike runs are refused, unequal load is said.

Two runtimes differ by nature, in versions, threads and devices: their speeds are compared, and a note names both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from quantlab.core.errors import QuantlabError
from quantlab.core.result import Result, RuntimeInfo
from quantlab.core.text import printable
from quantlab.report.artifacts import Artifact, Cell

# A process more or less that wants to run on the machine while it is being measured.
_LOAD_DIFFERENCE = 1.0


def check_conditions(groups: Sequence[Sequence[Artifact]], *, allow_env_diff: bool) -> list[str]:
    """Notes on the conditions of all bench Results; `groups` are those whose speeds are compared with one another.

    QuantlabError where conditions differ within a group without `allow_env_diff`.
    """
    unlike, apart = _unlike_conditions(groups), _unlike_conditions([[a for group in groups for a in group]])
    if unlike and not allow_env_diff:
        shown = unlike[:3] + ([f"and {len(unlike) - 3} more"] if len(unlike) > 3 else [])
        raise QuantlabError(
            f"speeds measured under unlike conditions are not compared: {'. '.join(shown)}",
            "bench them together, name the Results to compare, or pass `--allow-env-diff`",
        )
    notes = [f"unlike conditions, allowed by `--allow-env-diff`: {difference}" for difference in unlike]
    if not unlike:
        notes += [f"unlike conditions of models that are not compared: {difference}" for difference in apart]
    artifacts = [artifact for group in groups for artifact in group]
    notes += [*_runtimes(artifacts), *_kernels(artifacts)]
    for runs in _cells(artifacts).values():
        loads = sorted((result.env.load_average, label) for label, result in runs)
        (low, calm), (high, busy) = loads[0], loads[-1]
        if high - low > _LOAD_DIFFERENCE:
            notes.append(f"the machine's load was {low:.1f} while `{calm}` and {high:.1f} while `{busy}` was measured")
    return notes


def _cells(artifacts: Iterable[Artifact]) -> dict[Cell, list[tuple[str, Result]]]:
    cells: dict[Cell, list[tuple[str, Result]]] = {}
    for artifact in artifacts:
        for cell, result in artifact.bench.items():
            cells.setdefault(cell, []).append((artifact.label, result))
    return cells


def _unlike_conditions(groups: Sequence[Sequence[Artifact]]) -> list[str]:
    found: dict[str, None] = {}
    for group in groups:
        for (label, reference), *others in _cells(group).values():
            for other, result in others:
                if differences := _differences(result, reference):
                    found[f"`{other}` and `{label}` differ in {'; '.join(differences)}"] = None
    return list(found)


def _runtimes(artifacts: list[Artifact]) -> list[str]:
    """What ran each artifact, where it was not the same for all: for speed, and for quality."""
    speed = {artifact.label: list(artifact.bench.values()) for artifact in artifacts}
    quality = {artifact.label: list(artifact.ppl.values()) for artifact in artifacts}
    return [*_unlike("speed", speed, device=True), *_unlike("quality", quality, device=False)]


def _kernels(artifacts: list[Artifact]) -> Iterator[str]:
    """Where the perplexity of an artifact was computed by other kernels than its speed: what that of users rounds."""
    ways: dict[tuple[str, str], list[str]] = {}
    for artifact in artifacts:
        exact, fast = (
            ", ".join(
                sorted({printable(k.rpartition(" ")[2]) for r in of.values() if r.runtime for k in r.runtime.kernels})
            )
            for of in (artifact.ppl, artifact.bench)
        )
        if exact and fast and exact != fast:
            ways.setdefault((exact, fast), []).append(f"`{artifact.label}`")
    for (exact, fast), labels in ways.items():
        yield (
            f"quality of {', '.join(labels)} was computed by {exact}, the speed is that of {fast}, which may round more"
        )


def _unlike(what: str, measured: dict[str, list[Result]], *, device: bool) -> list[str]:
    ways: dict[str, dict[str, None]] = {}
    for label, results in measured.items():
        for result in results:
            if result.runtime is not None:
                ways.setdefault(runtime_name(result.runtime, device=device), {})[f"`{label}`"] = None
    if len(ways) < 2:
        return []
    ran = "; ".join(f"{', '.join(labels)} in {way}" for way, labels in ways.items())
    return [f"{what} was measured in unlike runtimes, so that a difference is not of the weights alone: {ran}"]


def runtime_name(runtime: RuntimeInfo, *, device: bool = False) -> str:
    """What ran a model: `llama.cpp`, whose dtypes are the file's own, or `torch float16`."""
    name = "llama.cpp" if runtime.name == "llamacpp" else runtime.name
    dtype = f" {runtime.dtype}" if runtime.name == "torch" else ""
    return printable(f"{name}{dtype}{f' on {runtime.device}' if device else ''}")


def _differences(result: Result, reference: Result) -> list[str]:
    pairs = {name: (getattr(result.env, name), getattr(reference.env, name)) for name in ("cpu", "gpu", "driver", "os")}
    own, theirs = result.runtime, reference.runtime
    if own and theirs and own.name == theirs.name:
        pairs |= {name: (getattr(own, name), getattr(theirs, name)) for name in ("device", "threads")}
        pairs[f"{own.name} version"] = (own.version, theirs.version)
    return [printable(f"{name} (`{a}`, `{b}`)") for name, (a, b) in pairs.items() if a != b]
