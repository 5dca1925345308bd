"""Medusa heads and the EAGLE layer: hidden states, training, files, and that drafting with them loses nothing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from quantlab.core.artifact import content_sha256  # noqa: E402
from quantlab.core.corpus import load_text  # noqa: E402
from quantlab.core.errors import QuantlabError, UsageError  # noqa: E402
from quantlab.engine import Request, Sampling  # noqa: E402
from quantlab.engine.speculative import (  # noqa: E402
    AdaptiveLength,
    DraftLength,
    EagleProposer,
    FixedLength,
    MedusaProposer,
    NgramProposer,
    Proposer,
    RoundCosts,
    Speculated,
    SpeculativeDecoder,
)
from quantlab.runtime.backend import Capacity  # noqa: E402
from quantlab.runtime.torch import heads  # noqa: E402
from quantlab.runtime.torch.head_data import answered, beginnings  # noqa: E402
from quantlab.runtime.torch.head_training import Job, Trained, work  # noqa: E402
from quantlab.runtime.torch.heads_file import read_record  # noqa: E402
from quantlab.runtime.torch.hidden import HiddenBackend  # noqa: E402
from tests.backend_contract import batch  # noqa: E402

BATCH, NEW = 50, 10
CAPACITY = Capacity(n_ctx=96, n_seq=BATCH, n_batch=512, n_ubatch=64)


class Silent:
    def progress(self, stage: str, done: float, total: float) -> None: ...


def trained(stories: Path, folder: Path, method: str, **changed: object) -> tuple[Path, Trained]:
    out = folder / f"{method}.safetensors"
    job = Job(
        path=str(stories),
        target="stories",
        target_sha256=content_sha256(stories),
        method=method,
        out=str(out),
        text=load_text("builtin_en").raw,
        windows=256,
        length=64,
        heads=3,
        epochs=8,
        draft_vocab=512,
        seed=0,
        device="cpu",
        dtype="float32",
        threads=1,
    )
    return out, work(msgspec.to_builtins(msgspec.structs.replace(job, **changed)), Silent())


@pytest.fixture(scope="module")
def files(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Trained]]:
    folder = tmp_path_factory.mktemp("heads")
    return {method: trained(stories, folder, method) for method in ("medusa", "eagle")}


@pytest.fixture(scope="module")
def target(stories: Path) -> Iterator[HiddenBackend]:
    backend = HiddenBackend(stories, CAPACITY, device="cpu", dtype="float32", threads=1)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def prompts(target: HiddenBackend) -> list[np.ndarray]:
    ids = target.encode(load_text("builtin_eval", "evaluation").raw)
    starts = np.random.default_rng(0).integers(0, len(ids) - 40, 100)
    return [ids[start : start + 8 + i % 24] for i, start in enumerate(starts)]


def proposer(method: str, target: HiddenBackend, path: Path, sha256: str) -> Proposer:
    if method == "medusa":
        return MedusaProposer(target, heads.Medusa(target, path, sha256), name="m", n_vocab=512)
    return EagleProposer(target, heads.Eagle(target, path, sha256), name="e", n_vocab=512)


def run(
    target: HiddenBackend,
    prompts: list[np.ndarray],
    drafts: Proposer | None,
    length: DraftLength,
    temperature: float = 0.0,
) -> list[Speculated]:
    decoder = SpeculativeDecoder(target, drafts, length)
    done = []
    for at in range(0, len(prompts), BATCH):
        requests = [
            Request(at + i, prompt, NEW, sampling=Sampling(temperature=temperature))
            for i, prompt in enumerate(prompts[at : at + BATCH])
        ]
        done += decoder.generate(requests)
    return done


def acceptance(sequences: list[Speculated]) -> float:
    rounds = [round_ for sequence in sequences for round_ in sequence.rounds]
    return sum(r.accepted for r in rounds) / sum(r.tested for r in rounds)


def test_hidden_states_are_those_behind_the_logits_in_the_order_of_the_batch(target: HiddenBackend) -> None:
    target.reset()
    # Ragged and interleaved, and more than a micro batch.
    seqs = np.array([2, 0, 1] * 30 + [0] * 20)
    positions = [int((seqs[:i] == seq).sum()) for i, seq in enumerate(seqs)]
    tokens = np.random.default_rng(3).integers(3, 500, len(seqs))
    logits = target.forward(batch(tokens, positions, seqs, [True] * len(seqs))).copy()
    again = (target.hidden @ target.output_weight.T).numpy()
    assert np.abs(again - logits).max() < 1e-4
    assert np.abs(again[1:] - logits[:-1]).max() > 1
    target.reset()


def test_half_of_the_windows_are_greedy_answers_and_half_are_sampled(target: HiddenBackend) -> None:
    prompts = beginnings(target.encode(load_text("builtin_en").raw), 1, 8, 4, 0)
    found = answered(target, prompts, 24, 0, lambda _: None)
    assert found.tokens[:, :4].tolist() == prompts.tolist() and found.begun == 4
    chosen = (found.hidden @ target.output_weight.T).argmax(-1)[:, 3:-1] == found.tokens[:, 4:]
    assert chosen[:4].all() and not chosen[4:].all(dim=1).any()


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_heads_are_learnt_and_lose_nothing(
    method: str, files: dict[str, tuple[Path, Trained]], target: HiddenBackend, stories: Path, prompts: list[np.ndarray]
) -> None:
    path, told = files[method]
    assert told.loss[-1] < told.loss[0]
    drafts = proposer(method, target, path, content_sha256(stories))
    plain = [s.tokens for s in run(target, prompts, None, FixedLength(0))]
    found = run(target, prompts, drafts, FixedLength(3))
    assert [s.tokens for s in found] == plain
    costs = RoundCosts((0.0, 0.05, 0.1, 0.15), (1.0, 1.1, 1.2, 1.3))
    assert [s.tokens for s in run(target, prompts[:10], drafts, AdaptiveLength(3, costs))] == plain[:10]
    # Drafts that fall at once and drafts that stand are both there.
    assert {r.accepted for s in found for r in s.rounds} >= {0, 1}
    # On text that they were not trained on they are right more often than lookup.
    lookup = acceptance(run(target, prompts, NgramProposer(), FixedLength(3)))
    assert acceptance(found) > lookup > 0.1


def reordered(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each Medusa head where the one before it belongs."""
    return {re.sub(r"(?<=blocks\.)\d", lambda i: str((int(i[0]) + 1) % 3), name): t for name, t in tensors.items()}


def crossed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An EAGLE layer that takes embeddings for hidden states."""
    return {**tensors, "join.weight": tensors["join.weight"].roll(64, dims=1)}


@pytest.mark.parametrize(("method", "fault"), [("medusa", reordered), ("eagle", crossed)])
def test_what_is_accepted_is_what_the_heads_learnt(
    method: str,
    fault: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    files: dict[str, tuple[Path, Trained]],
    target: HiddenBackend,
    stories: Path,
    prompts: list[np.ndarray],
    tmp_path: Path,
) -> None:
    """A file that is sound but wrong drafts far worse, and still loses nothing."""
    path, sha256, broken = files[method][0], content_sha256(stories), tmp_path / "broken.safetensors"
    record = {"quantlab": msgspec.json.encode(read_record(path)).decode()}
    save_file(fault(load_file(path)), broken, metadata=record)
    good, bad = (
        run(target, prompts, proposer(method, target, file, sha256), FixedLength(3)) for file in (path, broken)
    )
    assert [s.tokens for s in bad] == [s.tokens for s in good]
    assert acceptance(bad) < acceptance(good) / 2


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_sampling_with_heads_is_repeatable_and_accepts_some(
    method: str, files: dict[str, tuple[Path, Trained]], target: HiddenBackend, stories: Path, prompts: list[np.ndarray]
) -> None:
    drafts = proposer(method, target, files[method][0], content_sha256(stories))
    once, again = (run(target, prompts[:10], drafts, FixedLength(2), 0.8) for _ in range(2))
    assert [s.tokens for s in once] == [s.tokens for s in again]
    assert acceptance(once) > 0


def test_an_eagle_layer_reads_piece_by_piece_what_it_reads_at_once() -> None:
    torch.manual_seed(0)
    layer = heads.EagleLayer(48).eval()
    hidden, embedded = torch.randn(1, 9, 48), torch.randn(1, 9, 48)
    with torch.no_grad():
        whole, _ = layer(hidden, embedded)
        parts, past = [], None
        for at, end in ((0, 3), (3, 4), (4, 9)):
            made, past = layer(hidden[:, at:end], embedded[:, at:end], past)
            parts.append(made)
    assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-5)
    assert not torch.allclose(whole[:, 1:], whole[:, :-1], atol=1e-2)


# Files that are wrong


def test_heads_of_another_model_are_refused(
    files: dict[str, tuple[Path, Trained]], target: HiddenBackend, stories: Path, tmp_path: Path
) -> None:
    path, sha256 = files["medusa"][0], content_sha256(stories)
    with pytest.raises(QuantlabError, match="is for medusa, not eagle") as caught:
        heads.Eagle(target, path, sha256)
    assert "medusa:PATH" in caught.value.hint
    with pytest.raises(QuantlabError, match="of another model: trained for `stories`"):
        heads.Medusa(target, path, "0" * 64)
    record = msgspec.structs.replace(read_record(path), hidden_size=128)
    heads.save(tmp_path / "wide.safetensors", heads.MedusaHeads(128, 3), record, torch.arange(9))
    with pytest.raises(QuantlabError, match="hidden size 128 and 512 tokens, the target has 64 and 512"):
        heads.Medusa(target, tmp_path / "wide.safetensors", sha256)


def test_files_that_are_no_heads_or_damaged_are_refused(
    files: dict[str, tuple[Path, Trained]], target: HiddenBackend, stories: Path, tmp_path: Path
) -> None:
    sha256, path = content_sha256(stories), files["medusa"][0]
    with pytest.raises(QuantlabError, match="holds no heads of quantlab"):
        read_record(stories / "model.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors here")
    with pytest.raises(QuantlabError, match="holds no heads of quantlab"):
        read_record(tmp_path / "text.safetensors")
    cut = tmp_path / "cut.safetensors"
    shutil.copy(path, cut)
    with cut.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(QuantlabError, match="holds no heads of quantlab"):
        heads.Medusa(target, cut, sha256)
    tensors = load_file(path)
    record = {"quantlab": msgspec.json.encode(read_record(path)).decode()}
    save_file({name: t for name, t in tensors.items() if name != "blocks.0.0.weight"}, cut, metadata=record)
    with pytest.raises(QuantlabError, match="damaged"):
        heads.Medusa(target, cut, sha256)
    save_file({**tensors, "draft_ids": torch.tensor([1, 512], dtype=torch.int32)}, cut, metadata=record)
    with pytest.raises(QuantlabError, match="beyond the target's"):
        heads.Medusa(target, cut, sha256)
    save_file({**tensors, "blocks.0.2.bias": torch.full((64,), torch.nan)}, cut, metadata=record)
    drafts = proposer("medusa", target, cut, sha256)
    with pytest.raises(QuantlabError, match="not finite"):
        run(target, [np.array([1, 5, 9], np.int32)], drafts, FixedLength(2))


def test_windows_that_do_not_fit_are_refused(stories: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the context of `stories` holds 512"):
        trained(stories, tmp_path, "medusa", length=600)
    with pytest.raises(UsageError, match="too few for 256 windows"):
        trained(stories, tmp_path, "medusa", text="Once upon a time")
