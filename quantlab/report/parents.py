"""Which artifact each artifact is measured against: what it was made from, and no unrelated model.

A GGUF of F16, BF16 or F32 holds the weights of the folder that it was made from, and may stand for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quantlab.core.lineage import as_many_weights
from quantlab.core.result import ModelInfo
from quantlab.core.text import printable
from quantlab.report.artifacts import Artifact, against_of
from quantlab.report.conditions import runtime_name

_OTHERWISE = "measure the parent, or name a baseline: `quantlab compare --baseline LABEL`"


@dataclass(frozen=True)
class Baselines:
    """The baseline of each artifact by its label, its own where it has no other; `notes` on what is not plain.

    `unknown`: labels of quantized artifacts that stand in the place of a parent which is not here.
    """

    of: dict[str, Artifact]
    notes: list[str] = field(default_factory=list)
    unknown: frozenset[str] = frozenset()


def baselines(artifacts: Sequence[Artifact]) -> Baselines:
    """Each artifact's own recorded parent, else the one it was measured against, else one that it seems to come from.

    Of several forms of the parent the one that shares most measurements and runs alike.
    """
    notes: dict[str, None] = {}
    families: dict[str, list[Artifact]] = {}
    for artifact in artifacts:
        families.setdefault(_origin(artifact, artifacts, notes), []).append(artifact)
    of: dict[str, Artifact] = {}
    for family in families.values():
        of |= _of_family(family)
    groups = in_groups(artifacts, of)
    if len(artifacts) > 1:
        notes |= dict.fromkeys(_alone(groups))
    return Baselines(of, list(notes), frozenset(group[0].label for group in groups if not _is_root(group)))


def named(base: Artifact, artifacts: Sequence[Artifact]) -> Baselines:
    """One baseline for all, and a note on those that were made from another model."""
    origin = _origin(base, artifacts, {})
    others = [f"`{a.label}`" for a in artifacts if _origin(a, artifacts, {}) != origin]
    said = f"of another origin than `{base.label}`, as far as is known, and yet compared with it: {', '.join(others)}"
    return Baselines({a.label: base for a in artifacts}, [said] if others else [])


def _head(artifact: Artifact, of: dict[str, Artifact]) -> Artifact:
    seen: set[str] = set()
    # Records that name each other are no reason to go round for ever.
    while of[artifact.label] is not artifact and artifact.label not in seen:
        seen.add(artifact.label)
        artifact = of[artifact.label]
    return artifact


def in_groups(artifacts: Sequence[Artifact], of: dict[str, Artifact]) -> list[list[Artifact]]:
    """The artifacts that one leads, itself first, the largest group first."""
    groups: dict[str, list[Artifact]] = {}
    for artifact in sorted(artifacts, key=lambda artifact: of[artifact.label] is not artifact):
        groups.setdefault(_head(artifact, of).label, []).append(artifact)
    return sorted(groups.values(), key=len, reverse=True)


def _is_root(group: list[Artifact]) -> bool:
    """Whether what leads a group is what the others were made from, or may be: not merely the first of several."""
    head, *others = group
    return head.model.method == "none" or any(_is_parent(head, artifact) for artifact in others)


def _origin(artifact: Artifact, artifacts: Sequence[Artifact], notes: dict[str, None]) -> str:
    """What is common to all that comes from one model: the oldest ancestor that is known."""
    here, seen = artifact, {artifact.label}
    while (up := _parent(here, artifacts, notes)) is not None:
        parent = next((a for a in artifacts if a.sha256 == up), None)
        if parent is None or parent.label in seen:
            return up
        here = parent
        seen.add(here.label)
    return here.sha256 or here.label


def _parent(artifact: Artifact, artifacts: Sequence[Artifact], notes: dict[str, None]) -> str | None:
    """The hash of what it was made from; a name where an old Result has no hash."""
    model = artifact.model
    others = [a for a in artifacts if a.sha256 != artifact.sha256]
    if (recorded := _recorded(model, others)) is not None:
        return recorded
    for result in artifact.divergence.values():
        sha256 = against_of(result).sha256
        if sha256 and any(a.sha256 == sha256 and as_many_weights(a.model, model) for a in others):
            return sha256
    # Nothing tells where a downloaded file comes from.
    alike = {a.sha256: a for a in others if a.model.method == "none" and as_many_weights(a.model, model)}
    if model.method == "none" or len(alike) != 1:
        return None
    sha256, parent = alike.popitem()
    if sha256 is not None:
        notes[
            f"no record tells what `{artifact.label}` was made from; it is compared with `{parent.label}`, the only "
            "unquantized model here with as many weights"
        ] = None
    return sha256


def _recorded(model: ModelInfo, others: Iterable[Artifact]) -> str | None:
    if model.parent_sha256 or model.parent is None:
        return model.parent_sha256
    name = printable(model.parent)
    alike = (a.sha256 for a in others if name in a.labels or model.parent == a.model.source)
    return next((sha256 for sha256 in alike if sha256), f"name {name}")


def _of_family(family: list[Artifact]) -> dict[str, Artifact]:
    plain = [a for a in family if a.model.method == "none"]
    of, orphans = {}, []
    for artifact in family:
        if artifact.model.method != "none":
            known = [*plain, *(a for a in family if a.model.method != "none" and _is_parent(a, artifact))]
            orphans += [] if known else [artifact]
            of[artifact.label] = _closest(artifact, known) if known else orphans[0]
    heads = [a for a in plain if any(base is a for base in of.values())]
    heads = heads or [a for a in plain if any(_is_parent(a, b) for b in plain)] or plain[:1]
    for artifact in plain:
        of[artifact.label] = artifact if any(artifact is head for head in heads) else _closest(artifact, heads)
    return of


def _is_parent(parent: Artifact, artifact: Artifact) -> bool:
    return parent.sha256 is not None and parent.sha256 == artifact.model.parent_sha256 and parent is not artifact


def _closest(artifact: Artifact, candidates: list[Artifact]) -> Artifact:
    def nearness(other: Artifact) -> tuple[int, bool, bool]:
        shared = bool(artifact.bench.keys() & other.bench.keys()) + bool(artifact.ppl.keys() & other.ppl.keys())
        alike = [runtime_name(a.runtime) for a in (artifact, other) if a.runtime]
        return shared, len(alike) == 2 and alike[0] == alike[1], _is_parent(other, artifact)

    return max(candidates, key=nearness)


def _alone(groups: Iterable[list[Artifact]]) -> Iterable[str]:
    """What stands without its parent; the first of each group is what the others are compared with."""
    lonely = []
    for group in groups:
        model, names = group[0].model, ", ".join(f"`{a.label}`" for a in group)
        parent = f"`{printable(model.parent)}`" if model.parent else ""
        if len(group) == 1:
            why = f"made from {parent}, which has no Result here" if parent else "no record tells of its parent"
            lonely.append(names if model.method == "none" else f"{names} ({why})")
        elif not _is_root(group):
            why = f"their parent {parent} has no Result here" if parent else "no record tells of their parent"
            yield f"{names} are compared with the first of them, as {why}; {_OTHERWISE}"
    if lonely:
        yield f"compared with no other model: {', '.join(lonely)}; {_OTHERWISE}"
