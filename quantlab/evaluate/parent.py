"""What must be said of the model that another is measured against."""

from __future__ import annotations

from quantlab.core.lineage import as_many_weights, made_from, n_weights
from quantlab.core.result import ModelInfo, Notice, RuntimeInfo


def of_models(names: tuple[str, str], model: ModelInfo, parent: ModelInfo) -> list[Notice]:
    """A notice where the two are known not to be parent and child; `names` are their labels."""
    own, other = names
    if model.sha256 == parent.sha256:
        return []
    recorded = made_from(model, parent)
    if recorded is False:
        why = f"`{own}` was made from `{model.parent}` by its record, and `{other}` is not that model"
    elif recorded is None and not as_many_weights(model, parent):
        millions = [f"{n_weights(info) / 1e6:.3g}" for info in (model, parent)]
        why = f"`{own}` has {millions[0]} million weights, `{other}` {millions[1]}: it is not its parent"
    else:
        return []
    return [
        Notice(
            "not-the-parent",
            f"{why}; KLD and same top tell how the two models differ, not what quantization costs",
            "give `--against` the model that this one was made from",
        )
    ]


def of_runtimes(model: RuntimeInfo, parent: RuntimeInfo) -> list[Notice]:
    """A notice where two runtimes computed the two; torch reads no GGUF, llama.cpp no quantized folder."""
    if model.name == parent.name:
        return []
    of_gguf = parent.name == "llamacpp"
    return [
        Notice(
            "parent-runtime",
            f"the model ran in {model.name}, its parent in {parent.name}: their divergence holds what these differ by",
            f"give `--against` {'the folder that the GGUF was made from' if of_gguf else 'the plain folder or a GGUF'}",
        )
    ]
