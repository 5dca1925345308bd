"""What drafts, opened beside its target; and what a backend must be opened for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from quantlab.bench.speculative.spec import DraftSource, SpeculativeSpec
from quantlab.core.gguf_file import read_header
from quantlab.engine.speculative import (
    DraftModel,
    EagleProposer,
    MedusaProposer,
    NgramProposer,
    Proposer,
    shared_vocabulary,
)
from quantlab.runtime.backend import Backend, Capacity, Loaded

# As `bench` has it: prompts are computed in steps of this size.
N_BATCH, N_UBATCH = 2048, 512


def capacity(spec: SpeculativeSpec, path: Path) -> Capacity:
    """What the spec needs of a model. A sliding window must keep what a rollback goes back to."""
    rows = max(spec.batch) * (1 + max(spec.k))
    return Capacity(
        n_ctx=spec.n_ctx,
        n_seq=max(spec.batch),
        n_batch=max(N_BATCH, rows),
        n_ubatch=N_UBATCH,
        n_outputs=rows,
        shared=not path.is_dir() and _slides(path),
    )


def _slides(path: Path) -> bool:
    """Whether layers of a GGUF look only so far back."""
    return any(key.endswith(".attention.sliding_window") for key in read_header(path).metadata)


class Drafter(NamedTuple):
    """What drafts, what it loaded where that is a model, the bytes that it adds, and the most tokens that it drafts."""

    proposer: Proposer
    loaded: Loaded | None = None
    size_bytes: int = 0
    most: int | None = None


@contextlib.contextmanager
def opened_drafter(spec: SpeculativeSpec, source: DraftSource, target: Backend) -> Iterator[Drafter]:
    """What drafts for an open target."""
    if source.kind == "ngram":
        yield Drafter(NgramProposer(most=spec.prompt_lookup_max, least=spec.prompt_lookup_min))
    elif source.kind == "draft":
        with _opened_model(spec, source, target) as drafter:
            yield drafter
    else:
        yield _opened_heads(spec, source, target)


@contextlib.contextmanager
def _opened_model(spec: SpeculativeSpec, source: DraftSource, target: Backend) -> Iterator[Drafter]:
    from quantlab.runtime.loading import opened

    assert source.model is not None
    path = Path(source.model.path)
    dtype = spec.dtype if path.is_dir() else "auto"
    with opened(path, capacity(spec, path), device=spec.device, dtype=dtype, threads=spec.threads) as small:
        loaded, n_vocab = small.describe(), target.describe().n_vocab
        shared = shared_vocabulary(target, small)
        n_ctx = min(spec.n_ctx, loaded.n_ctx_train or spec.n_ctx)
        size = loaded.weight_bytes + max(spec.batch) * spec.n_ctx * loaded.kv_bytes_per_token
        yield Drafter(DraftModel(small, name=source.label, n_shared=shared, n_vocab=n_vocab, n_ctx=n_ctx), loaded, size)


def _opened_heads(spec: SpeculativeSpec, source: DraftSource, target: Any) -> Drafter:
    """Heads on the hidden states of `target`, a runtime.torch.hidden.HiddenBackend."""
    from quantlab.runtime.torch.heads import Eagle, Medusa

    assert source.model is not None
    path, sha256, n_vocab = Path(source.model.path), spec.model.sha256, target.describe().n_vocab
    if source.kind == "medusa":
        heads = Medusa(target, path, sha256)
        proposer = MedusaProposer(target, heads, name=source.label, n_vocab=n_vocab)
        return Drafter(proposer, size_bytes=heads.size_bytes, most=heads.most)
    layer = Eagle(target, path, sha256)
    size = layer.size_bytes + max(spec.batch) * spec.n_ctx * layer.kv_bytes_per_token
    return Drafter(EagleProposer(target, layer, name=source.label, n_vocab=n_vocab), size_bytes=size)
