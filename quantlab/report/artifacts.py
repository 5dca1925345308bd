"""Which Results speak of the same artifact: one artifact joins its quantize, inspect, bench and ppl Results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from quantlab.core.errors import QuantlabError, UsageError, unknown_name
from quantlab.core.result import ModelInfo, Result, RuntimeInfo
from quantlab.core.text import printable

_MEASURING = ("bench", "ppl")
KINDS = ("quantize", "inspect", *_MEASURING)
_HASH_DIGITS = 8


class Cell(NamedTuple):
    """One point of a bench: tokens of a prompt, new tokens, sequences; None where the spec names none."""

    prompt_tokens: int | None
    new_tokens: int | None
    batch: int | None

    def __str__(self) -> str:
        prompt, new, batch = ("?" if n is None else n for n in self)
        return f"{prompt}+{new} x{batch}"


class Setting(NamedTuple):
    """What two perplexities must have in common; `text` is the first digits of its hash. None: not told."""

    protocol: int | str | None
    n_ctx: int | str | None
    stride: int | str | None
    windows: int | str | None
    text: int | str | None

    def __str__(self) -> str:
        protocol, n_ctx, stride, windows, text = ("?" if value is None else value for value in self)
        moved = f", stride {stride}" if stride not in ("?", n_ctx) else ""
        return f"{protocol}, n_ctx {n_ctx}{moved}, {windows} windows, text {text}"


class Against(NamedTuple):
    """The model that a divergence was measured against."""

    label: str
    sha256: str | None


@dataclass
class Artifact:
    """All that is known of one model content; of several Results of one kind and setting the newest.

    What torch computed in two dtypes is two artifacts. `divergence` holds the newest ppl Results that were measured
    against a parent. `runtime` is what measured it, its speed where that was measured; None where nothing was.
    """

    label: str
    sha256: str | None
    model: ModelInfo
    labels: set[str] = field(default_factory=set)
    bench: dict[Cell, Result] = field(default_factory=dict)
    ppl: dict[Setting, Result] = field(default_factory=dict)
    divergence: dict[Setting, Result] = field(default_factory=dict)
    quantize: Result | None = None
    runtime: RuntimeInfo | None = None


def join(results: Iterable[Result]) -> list[Artifact]:
    """The artifacts in the order of their first Result.

    The sha256 is the identity; a Result without one belongs to the artifact of its label where there is just one.
    Equal labels of different content are told apart by the first digits of the hash.
    """
    results = list(results)
    hashes: dict[str, set[str]] = {}
    for result in results:
        if result.model.sha256:
            hashes.setdefault(printable(result.label), set()).add(result.model.sha256)
    groups: dict[str, list[Result]] = {}
    for result in results:
        label = printable(result.label)
        known = hashes.get(label, set())
        sha256 = result.model.sha256 or (next(iter(known)) if len(known) == 1 else None)
        groups.setdefault(f"sha256 {sha256}" if sha256 else f"label {label}", []).append(result)
    artifacts = [artifact for group in groups.values() for artifact in _by_dtype(group)]
    _tell_apart(artifacts)
    return artifacts


def _by_dtype(group: list[Result]) -> list[Artifact]:
    """The artifacts of one content: in general one; one for each dtype where torch computed in several."""
    dtypes = dict.fromkeys(torch_dtype(result) for result in group if result.kind in _MEASURING)
    if len(dtypes) < 2:
        return [_artifact(group)]
    artifacts = []
    for dtype in dtypes:
        artifact = _artifact([r for r in group if r.kind not in _MEASURING or torch_dtype(r) == dtype])
        artifact.label += f" {dtype or 'without a dtype'}"
        artifacts.append(artifact)
    return artifacts


def torch_dtype(result: Result) -> str | None:
    """What torch computed in; None for another runtime, where the types of the weights are the content's own."""
    runtime = result.runtime
    return printable(runtime.dtype) if runtime is not None and runtime.name == "torch" else None


def _artifact(group: list[Result]) -> Artifact:
    # The label of a perplexity may carry its limits, so another kind's label names the row where there is one.
    ordered = sorted(group, key=started)
    naming = max(ordered, key=lambda result: (result.kind != "ppl", started(result)))
    artifact = Artifact(
        label=printable(naming.label),
        sha256=next((r.model.sha256 for r in ordered if r.model.sha256), None),
        model=ordered[-1].model,
        labels={printable(result.label) for result in ordered},
    )
    for result in ordered:
        if result.kind == "bench" or (result.kind == "ppl" and not artifact.bench):
            artifact.runtime = result.runtime
        if result.kind == "bench":
            artifact.bench[cell_of(result)] = result
        elif result.kind == "ppl":
            artifact.ppl[setting_of(result)] = result
            if "kld_mean" in result.measurements:
                artifact.divergence[setting_of(result)] = result
        elif result.kind == "quantize":
            artifact.quantize = result
    return artifact


def _tell_apart(artifacts: list[Artifact]) -> None:
    by_label: dict[str, list[Artifact]] = {}
    for artifact in artifacts:
        by_label.setdefault(artifact.label, []).append(artifact)
    for same in by_label.values():
        for artifact in same if len(same) > 1 else ():
            if artifact.sha256:
                artifact.label += f"@{artifact.sha256[:_HASH_DIGITS]}"


def labelled(artifacts: list[Artifact], label: str) -> Artifact:
    """The artifact that the user calls `label`; UsageError where there is none, or more than one."""
    label = printable(label)
    found = [a for a in artifacts if a.label == label] or [a for a in artifacts if label in a.labels]
    if not found:
        raise unknown_name("baseline", label, {a.label for a in artifacts})
    if len(found) > 1:
        names = ", ".join(f"`{artifact.label}`" for artifact in found)
        raise UsageError(f"the baseline `{label}` is the label of {len(found)} artifacts", f"say which: {names}")
    return found[0]


def cell_of(result: Result) -> Cell:
    """The cell of a bench Result, from its details, else its spec (where a sweep of one size is a list)."""
    known = {**result.spec, **result.details}
    values = [known.get(name) for name in Cell._fields]
    values = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in values]
    prompt_tokens, new_tokens, batch = (value if isinstance(value, int) else None for value in values)
    return Cell(prompt_tokens, new_tokens, batch)


def setting_of(result: Result) -> Setting:
    """The setting of a ppl Result, from its details, else its spec."""
    known = {**result.spec, **result.details}
    names = ("protocol", "n_ctx", "stride", "windows", "text_hash")
    values = (known.get(name) for name in names)
    protocol, n_ctx, stride, windows, text = (
        v if v is None or isinstance(v, int) else printable(str(v)) for v in values
    )
    return Setting(protocol, n_ctx, stride, windows, text[:_HASH_DIGITS] if isinstance(text, str) else text)


def against_of(result: Result) -> Against:
    """What a ppl Result was measured against."""
    told = result.details.get("against")
    told = told if isinstance(told, dict) else {}
    sha256 = told.get("sha256")
    return Against(printable(str(told.get("label", ""))), printable(sha256) if isinstance(sha256, str) else None)


def started(result: Result) -> datetime:
    """When a run began; a time without zone is read as UTC."""
    try:
        time = datetime.fromisoformat(result.started_at)
    except ValueError as error:
        message = f"the Result `{result.id}` began at `{result.started_at}`, which is no ISO 8601 time"
        raise QuantlabError(message, "remove it from the results") from error
    return time if time.tzinfo else time.replace(tzinfo=UTC)
