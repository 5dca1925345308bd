"""Lossless on llama.cpp and torch: 100 prompts of stories260K, greedy tokens as without speculation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quantlab.core.corpus import load_text
from quantlab.engine import Request, Sampling
from quantlab.engine.speculative import (
    AdaptiveLength,
    DraftModel,
    FixedLength,
    NgramProposer,
    Proposer,
    RoundCosts,
    SpeculativeDecoder,
    shared_vocabulary,
)
from quantlab.runtime.backend import Backend, Capacity

GREEDY = Sampling()
N_PROMPTS, NEW, BATCH, N_CTX = 100, 12, 10, 64
CAPACITY = Capacity(n_ctx=N_CTX, n_seq=BATCH, n_batch=512)


def _llamacpp(stories: Path, folder: Path) -> Callable[[str], Backend]:
    pytest.importorskip("llama_cpp")
    from quantlab.quantize.convert import convert
    from quantlab.quantize.gguf_work import Job
    from quantlab.quantize.llama_quantize import quantize
    from quantlab.runtime.llamacpp import LlamaCppBackend

    convert(stories, folder / "f32.gguf", outtype="F32")
    job = Job(str(folder / "q4.gguf"), "Q4_0", [], "F16", False, {})
    quantize(folder / "f32.gguf", job, {}, threads=1, progress=lambda *_: None)
    return lambda which: LlamaCppBackend(folder / f"{which}.gguf", CAPACITY, device="cpu", threads=1)


def _torch(stories: Path, folder: Path) -> Callable[[str], Backend]:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from quantlab.runtime.torch.backend import TorchBackend

    # The copy in fewer bits is one in another type here.
    types = {"f32": "float32", "q4": "bfloat16"}
    return lambda which: TorchBackend(stories, CAPACITY, device="cpu", dtype=types[which], threads=1)


@pytest.fixture(scope="module", params=["llamacpp", "torch"])
def open_model(request: pytest.FixtureRequest, stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    return {"llamacpp": _llamacpp, "torch": _torch}[request.param](stories, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def target(open_model: Callable[[str], Backend]) -> Backend:
    return open_model("f32")


@pytest.fixture(scope="module")
def prompts(target: Backend) -> list[np.ndarray]:
    ids = target.encode(load_text("builtin_en").raw)
    rng = np.random.default_rng(0)
    starts = rng.integers(0, len(ids) - 40, N_PROMPTS)
    return [ids[start : start + 8 + i % 24] for i, start in enumerate(starts)]


@pytest.fixture(scope="module")
def plain(target: Backend, prompts: list[np.ndarray]) -> list[list[int]]:
    answers = run(target, None, FixedLength(0), prompts)
    assert len({tuple(answer) for answer in answers}) > 90
    return answers


def run(
    target: Backend,
    proposer: Proposer | None,
    length: object,
    prompts: list[np.ndarray],
    sampling: Sampling = GREEDY,
) -> list[list[int]]:
    decoder = SpeculativeDecoder(target, proposer, length)
    answers = []
    for at in range(0, len(prompts), BATCH):
        requests = [
            Request(at + i, prompt, NEW, sampling=sampling) for i, prompt in enumerate(prompts[at : at + BATCH])
        ]
        answers += [sequence.tokens for sequence in decoder.generate(requests)]
        assert [target.length(slot) for slot in range(BATCH)] == [0] * BATCH
    return answers


def test_greedy_output_is_the_targets_for_every_proposer(
    open_model: Callable[[str], Backend], target: Backend, prompts: list[np.ndarray], plain: list[list[int]]
) -> None:
    small = open_model("q4")
    n_vocab = target.describe().n_vocab
    draft = DraftModel(small, name="q4", n_shared=shared_vocabulary(target, small), n_vocab=n_vocab)
    costs = RoundCosts(tuple(0.2 * k for k in range(7)), tuple(1 + 0.2 * k for k in range(7)))
    for proposer, length in (
        (NgramProposer(), FixedLength(4)),
        (draft, FixedLength(1)),
        (draft, FixedLength(5)),
        (draft, AdaptiveLength(6, costs)),
        (NgramProposer(), AdaptiveLength(6, costs)),
    ):
        assert run(target, proposer, length, prompts) == plain, (proposer.name, length)
    small.close()


def test_sampling_is_repeatable_and_another_seed_another_answer(
    open_model: Callable[[str], Backend], target: Backend, prompts: list[np.ndarray]
) -> None:
    small = open_model("q4")
    draft = DraftModel(small, name="q4", n_shared=512, n_vocab=512)
    answers = [
        run(target, draft, FixedLength(3), prompts[:20], Sampling(temperature=0.8, seed=seed)) for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1] != answers[2]
    small.close()
