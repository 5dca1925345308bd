"""What a reader must know before believing a speculative bench."""

from __future__ import annotations

from collections.abc import Iterator

from quantlab.bench.notices import FEW_REPEATS
from quantlab.bench.speculative.cell import ADAPTIVE, Ready
from quantlab.bench.speculative.points import Group
from quantlab.bench.speculative.session import Divergence
from quantlab.bench.speculative.spec import SpeculativeSpec
from quantlab.core import units
from quantlab.core.result import Notice

# Logits this near, in standard deviations, are told apart by the order of a sum. llama.cpp's kernels for four rows and
# more move those of Q4_K by 0.3, which is measured beside every parting.
_ROUNDING = 0.05


def of_loading(spec: SpeculativeSpec, ready: Ready) -> Iterator[Notice]:
    """A draft that cannot pay, and prompts that were left out."""
    target, drafter = ready.target, ready.drafter
    if drafter is not None and drafter.bytes_read_per_token > target.bytes_read_per_token:
        yield Notice(
            "draft-larger",
            f"the draft reads {units.size(drafter.bytes_read_per_token)} a token, the target "
            f"{units.size(target.bytes_read_per_token)}: it is the slower one",
            "swap them, or give a smaller draft",
        )
    if ready.most_draft is not None and ready.most_draft < max(spec.k):
        yield Notice(
            "short-heads",
            f"the heads draft {ready.most_draft} tokens at most: a larger K is as good as {ready.most_draft}",
            "train more `--heads`, or lower `-k`",
        )
    if ready.too_long:
        yield Notice(
            "prompts-left-out",
            f"{ready.too_long} prompts are longer than the context leaves room for, and were left out",
            "raise `--n-ctx`",
        )
    if drafter is not None and drafter.n_ctx_train and drafter.n_ctx_train < min(spec.n_ctx, target.n_ctx_train):
        yield Notice(
            "draft-context",
            f"the draft's context ends at {drafter.n_ctx_train} tokens: beyond it nothing is drafted",
            "give a draft with the context of the target",
        )
    if target.runtime.device == "cuda" and target.runtime.name == "torch":
        yield Notice(
            "no-cuda-graph",
            "steps are launched kernel by kernel, plain ones too: `quantlab bench` decodes faster with a CUDA graph",
            "compare the speed-up with that of a server that captures graphs",
        )


def of_groups(groups: list[Group]) -> Iterator[Notice]:
    """Too few groups to tell a gain from chance."""
    if len(groups) < FEW_REPEATS:
        yield Notice(
            "few-prompts",
            f"too few groups of prompts ({len(groups)}) to tell a speed-up from chance",
            "give more `--prompts-per-category`, or a smaller `--batch`",
        )


def of_divergence(found: Divergence | None, k: int) -> Iterator[Notice]:
    """Answers with drafts of `k` that are not those of plain decoding."""
    if found is None:
        return
    drafts = "drafts of a length that adapts" if k == ADAPTIVE else f"{k} draft tokens"
    changed = (
        f"{found.natural:.1%} of the plain answers change when every step has the shape of a verify, and "
        f"{found.same_shape:.1%} of the answers with {drafts} are those"
    )
    # Both tokens' logits move.
    if found.widest_gap < max(_ROUNDING, 2 * found.moved) or found.same_shape == 1:
        yield Notice(
            "not-bit-stable",
            f"kernels for one token and for several round differently: {changed}; where answers part, the two tokens "
            f"are at most {found.widest_gap:.2g} standard deviations apart (the shape of the steps moves a logit there "
            f"by up to {found.moved:.2g})",
            "nothing is lost: both answers are the model's",
        )
    else:
        yield Notice(
            "output-differs",
            f"answers differ from plain decoding where the two tokens are up to {found.widest_gap:.2g} standard "
            f"deviations apart, and the shape of the steps moves a logit there by {found.moved:.2g} at most: more than "
            f"rounding explains ({changed})",
            "file a bug with this Result",
        )
