from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.model import ModelFile
from quantlab.core.progress import silent
from quantlab.evaluate.divergence import BLOCK_VALUES
from quantlab.evaluate.likelihood import Against, TokenLoss, score
from quantlab.evaluate.perplexity import divergence_measurements, measure, run
from quantlab.evaluate.spec import PplSpec
from tests.bigram import LETTERS, BigramBackend, log_softmax, random_table
from tests.tiny_gguf import tokens, write_gguf

TEXT = "abcd efgh\nhead bad cafe fade\n" * 12
MODEL = ModelFile("tiny.gguf", "tiny", "tiny.gguf", "0" * 64)
PARENT = ModelFile("parent.gguf", "parent", "parent.gguf", "1" * 64)


def ids_of(text: str) -> list[int]:
    return [1 + LETTERS.index(letter) for letter in text]


def measured(table: np.ndarray, *, parent: np.ndarray | None = None, adds_bos: bool = False, **given):
    """`measure` of two bigram tables, and the backend of the first."""
    backend = BigramBackend(table, adds_bos=adds_bos)
    beside = None if parent is None else BigramBackend(parent, adds_bos=adds_bos)
    spec = PplSpec(model=MODEL, against=PARENT if beside else None, **given)
    return measure(spec, TEXT, backend, beside, silent), backend


def file(path: Path) -> ModelFile:
    return ModelFile(str(path), path.stem, str(path), hashlib.sha256(path.read_bytes()).hexdigest())


# --- the loss


@pytest.mark.parametrize("n_vocab", [1, 2, 700, BLOCK_VALUES + 3])
def test_the_loss_is_that_of_float64(n_vocab):
    rng = np.random.default_rng(n_vocab)
    n = 4 if n_vocab > 1000 else 300
    logits = (rng.normal(size=(n, n_vocab)) * 5).astype(np.float32)
    targets = rng.integers(0, n_vocab, n).astype(np.int32)
    before = logits.copy()
    loss = TokenLoss(n_vocab)(logits, targets)
    np.testing.assert_allclose(loss, -log_softmax(logits)[np.arange(n), targets], rtol=1e-6, atol=3e-7)
    np.testing.assert_array_equal(logits, before)


@given(logits=hnp.arrays(np.float32, (5, 9), elements=st.floats(-1e4, 1e4, width=32)))
def test_the_loss_stands_logits_of_any_size(logits):
    for target in range(9):
        loss = TokenLoss(9)(logits, np.full(5, target, np.int32))
        np.testing.assert_allclose(loss, -log_softmax(logits)[:, target], rtol=1e-6, atol=1e-6)


def test_the_loss_of_no_rows_is_empty():
    assert TokenLoss(5)(np.empty((0, 5), np.float32), np.empty(0, np.int32)).shape == (0,)


# --- the loop


@pytest.mark.parametrize("n_batch", [1, 3, 4, 16, 64])
@pytest.mark.parametrize("first_scored", [1, 5, 9, 15])
def test_every_batch_size_scores_the_same_tokens(n_batch, first_scored):
    table = random_table()
    windows = np.random.default_rng(3).integers(0, 12, (4, 16)).astype(np.int32)
    backend = BigramBackend(table, n_batch=n_batch)
    scores = score(windows, first_scored, backend, None, silent)
    expected = [[-log_softmax(table)[w[i - 1], w[i]] for i in range(first_scored, 16)] for w in windows.tolist()]
    np.testing.assert_allclose(scores.loss, expected, rtol=1e-5, atol=1e-6)
    rows = [int(step.logits.sum()) for step in backend.steps]
    assert sum(rows) == 4 * (16 - first_scored), "no logits are computed that nobody reads"
    assert max(rows) <= n_batch
    assert len(backend.steps) == 4 * -(-16 // n_batch)


def test_progress_counts_windows():
    seen = []
    windows = np.ones((3, 8), np.int32)
    score(windows, 1, BigramBackend(random_table()), None, lambda *report: seen.append(report))
    assert seen == [("perplexity", n, 3) for n in (0, 1, 2, 3)]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_named_by_window_and_position(bad):
    table = random_table()
    table[7, 2] = bad
    windows = np.ones((3, 8), np.int32)
    windows[1, 5] = 7
    with pytest.raises(QuantlabError, match="the model's logits are not finite at position 5 of window 2"):
        score(windows, 4, BigramBackend(table), None, silent)
    with pytest.raises(QuantlabError, match="the parent's logits are not finite at position 5 of window 2"):
        score(windows, 4, BigramBackend(random_table()), BigramBackend(table), silent)
    windows[1, 5], windows[1, 3] = 1, 7
    score(windows, 5, BigramBackend(table), None, silent)  # what is not scored is not looked at


# --- what is measured


def test_perplexity_of_a_bigram_model_by_hand():
    table = random_table()
    done, _ = measured(table, protocol="hf", n_ctx=10)
    log_p, ids = log_softmax(table), ids_of(TEXT)
    windows = [ids[i : i + 10] for i in range(0, len(ids) - 9, 10)]
    losses = [[-log_p[a, b] for a, b in itertools.pairwise(w)] for w in windows]
    flat = [x for w in losses for x in w]
    mean = sum(flat) / len(flat)
    got = {name: m.samples for name, m in done.measurements.items()}
    assert got["ppl"] == pytest.approx([math.exp(mean)], rel=1e-6)
    assert got["nll"] == pytest.approx([sum(w) / 9 for w in losses], rel=1e-5)
    # Every scored token is a letter of one byte here.
    assert got["bits_per_byte"] == pytest.approx([mean / math.log(2)], rel=1e-6)
    # llama-perplexity: sqrt((E[x^2] - E[x]^2) / (n - 1)), times the perplexity.
    variance = sum(x * x for x in flat) / len(flat) - mean**2
    assert got["ppl_stderr"] == pytest.approx([math.exp(mean) * math.sqrt(variance / (len(flat) - 1))], rel=1e-4)
    assert done.details["windows"] == done.details["windows_available"] == len(windows)
    assert done.details["scored_tokens"] == len(flat)
    everything = np.array(windows, "<i4").tobytes()
    assert done.details["token_hash"] == hashlib.sha256(everything).hexdigest()


def test_bos_of_the_llama_cpp_protocol_is_fed_and_hashed():
    done, backend = measured(random_table(), protocol="llama.cpp", n_ctx=8, limit=2, adds_bos=True)
    fed = np.concatenate([step.tokens for step in backend.steps]).reshape(2, 8)
    ids = [0, *ids_of(TEXT)]
    assert fed.tolist() == [[0, *ids[1:8]], [0, *ids[9:16]]]
    assert done.details["token_hash"] == hashlib.sha256(fed.astype("<i4").tobytes()).hexdigest()
    assert done.details["bos"] == "replaces the first token of each window"
    assert done.details["scored_tokens"] == 2 * 3
    plain, backend = measured(random_table(), protocol="llama.cpp", n_ctx=8, limit=1)
    assert np.concatenate([step.tokens for step in backend.steps]).tolist() == ids[1:9]
    assert plain.details["bos"].startswith("none")


def test_windows_longer_than_the_training_are_told():
    done, _ = measured(random_table(), protocol="hf", n_ctx=33)
    assert [(w.code, "33" in w.message and "32" in w.message, "--n-ctx 32" in w.hint) for w in done.warnings] == [
        ("n-ctx-beyond-training", True, True)
    ]
    assert measured(random_table(), protocol="hf", n_ctx=32)[0].warnings == []
    # A text that is shorter than the protocol's window.
    backend = BigramBackend(random_table(), n_ctx=400)
    (notice,) = measure(PplSpec(model=MODEL, protocol="seed"), TEXT, backend, None, silent).warnings
    assert notice.message.startswith(f"windows of {len(TEXT)} tokens")
    # A model that does not tell what it was trained on.
    backend = BigramBackend(random_table())
    unknown = dataclasses.replace(backend.describe(), n_ctx_train=0)
    backend.describe = lambda: unknown  # type: ignore[method-assign]
    assert measure(PplSpec(model=MODEL, protocol="hf", n_ctx=33), TEXT, backend, None, silent).warnings == []


def test_against_the_parent():
    parent = random_table(1)
    model = parent + random_table(2, scale=0.4)
    done, backend = measured(model, parent=parent, protocol="hf", n_ctx=10)
    fed = np.concatenate([step.tokens for step in backend.steps]).reshape(-1, 10)[:, :-1]
    p, q = log_softmax(parent.astype(np.float32))[fed], log_softmax(model.astype(np.float32))[fed]
    kld = (np.exp(p) * (p - q)).sum(axis=2)
    agree = p.argmax(axis=2) == q.argmax(axis=2)
    got = {name: m.samples for name, m in done.measurements.items()}
    assert got["kld_mean"] == pytest.approx(kld.mean(axis=1).tolist(), rel=1e-9)
    assert got["top1_agreement"] == pytest.approx(agree.mean(axis=1).tolist())
    assert 0.2 < agree.mean() < 1
    share, n = agree.mean(), agree.size
    assert done.details["top1_agreement_stderr"] == pytest.approx(math.sqrt(share * (1 - share) / (n - 1)))
    alone, _ = measured(parent, protocol="hf", n_ctx=10)
    assert done.details["against_ppl"] == pytest.approx(alone.measurements["ppl"].samples[0])
    assert done.details["against"] == {"label": "parent", "sha256": PARENT.sha256}
    # Window by window what a run of the parent alone finds.
    assert got["against_nll"] == pytest.approx(alone.measurements["nll"].samples)
    assert done.details["against_runtime"]["name"] == "bigram"


def test_the_tail_of_the_divergence():
    kld = np.random.default_rng(0).permutation(np.arange(402.0)).reshape(2, 201)
    found = divergence_measurements(Against(kld, kld, kld > 100))
    assert {name: m.samples for name, m in found.items() if name.startswith("kld")} == {
        "kld_mean": kld.mean(axis=1).tolist(),
        "kld_median": [200.5],
        "kld_p99": [pytest.approx(401 * 0.99)],
        "kld_max": [401],
    }


def test_against_another_vocabulary_nothing_is_computed():
    backend, other = BigramBackend(random_table()), BigramBackend(random_table(n_vocab=13))
    with pytest.raises(QuantlabError, match="vocabulary of 12 tokens, `parent` of 13"):
        measure(PplSpec(model=MODEL, against=PARENT), TEXT, backend, other, silent)
    assert not backend.steps
    assert not other.steps


def test_a_loss_beyond_float64_is_an_error():
    table = np.zeros((12, 12))
    table[:, 0] = 5000.0
    with pytest.raises(QuantlabError, match="the mean loss of 5000 nats per token"):
        measured(table, protocol="hf", n_ctx=10)


# --- a real file, in a child process


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_text("".join(f"The {i}th line in the text, it's of 12 words; 你好.\n" for i in range(60)), "utf-8")
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, kind=gguf.GGMLQuantizationType.F32, metadata={"tokenizer.ggml.add_bos_token": True})
    return path


def test_a_model_without_opinion_has_a_perplexity_of_its_vocabulary(text_file: Path, tmp_path: Path):
    n_vocab = len(tokens(padding=2))
    path = tmp_path / "uniform.gguf"
    zeros = {"output.weight": np.zeros((n_vocab, 64), np.float32)}
    write_gguf(path, tied=False, kind=gguf.GGMLQuantizationType.F32, replace=zeros)
    for protocol in ("hf", "llama.cpp", "stride"):
        spec = PplSpec(
            model=file(path), data=str(text_file), protocol=protocol, n_ctx=64, limit=3, device="cpu", threads=1
        )
        outcome = run(spec)
        assert outcome.measurements["ppl"].samples == pytest.approx([n_vocab], rel=1e-6)
        assert outcome.measurements["nll"].samples == pytest.approx([math.log(n_vocab)] * 3, rel=1e-7)
        assert outcome.measurements["ppl_stderr"].samples == pytest.approx([0], abs=1e-4)


@pytest.mark.parametrize("protocol", ["hf", "llama.cpp", "stride", "seed"])
def test_a_run_agrees_with_all_logits_at_once(protocol, tiny: Path, text_file: Path):
    from quantlab.runtime.backend import Batch, Capacity
    from quantlab.runtime.llamacpp import opened

    spec = PplSpec(
        model=file(tiny), data=str(text_file), protocol=protocol, n_ctx=600, limit=2, device="cpu", threads=1
    )
    outcome = run(spec)
    raw = text_file.read_text("utf-8")
    text = raw[:-1] if protocol == "llama.cpp" else "\n\n".join(line + "\n" for line in raw.split("\n")[:-1])
    with opened(tiny, Capacity(n_ctx=600, n_batch=600, n_ubatch=600), device="cpu", threads=1) as backend:
        ids = backend.encode(text, special=protocol != "llama.cpp", bos=True)
        bos = int(ids[0])
        assert backend.decode([bos]) == "<|im_start|>"
        # Index of the first scored token, and the step from window to window.
        first, step, n = {"hf": (1, 600, 2), "llama.cpp": (301, 600, 2), "stride": (300, 300, 2), "seed": (1, 600, 1)}[
            protocol
        ]
        losses, fed = [], b""
        for i in range(n):
            window = ids[i * step : i * step + 600].copy()
            window[0] = bos if protocol == "llama.cpp" else window[0]
            backend.release(0)
            log_p = log_softmax(backend.forward(Batch.of(0, window, 0, logits="all")))
            losses.append([-log_p[j - 1, window[j]] for j in range(first, 600)])
            fed += window.astype("<i4").tobytes()
        n_bytes = sum(
            len(backend.piece_bytes(int(t))) for i in range(n) for t in ids[i * step + first : i * step + 600]
        )
    assert outcome.measurements["nll"].samples == pytest.approx(np.mean(losses, axis=1).tolist(), rel=1e-5)
    assert outcome.measurements["ppl"].samples == pytest.approx([math.exp(np.mean(losses))], rel=1e-5)
    assert outcome.measurements["bits_per_byte"].samples == pytest.approx(
        [np.sum(losses) / math.log(2) / n_bytes], rel=1e-5
    )
    assert outcome.details["token_hash"] == hashlib.sha256(fed).hexdigest()
    assert outcome.details["scored_tokens"] == n * (600 - first)
    assert (outcome.label, outcome.runtime.name) == ("tiny", "llamacpp")


def test_a_run_records_what_was_measured(tiny: Path, text_file: Path):
    reports = []
    spec = PplSpec(model=file(tiny), data=str(text_file), protocol="llama.cpp", n_ctx=128, device="cpu", threads=1)
    outcome = run(spec, lambda *report: reports.append(report))
    details = outcome.details
    n = details["windows"]
    assert details["windows_available"] == n > 3
    assert (details["data"], details["data_label"], details["canonical"]) == ("lines.txt", "lines.txt", False)
    text = text_file.read_text("utf-8")
    assert details["text_hash"] == hashlib.sha256(text[:-1].encode()).hexdigest()
    assert details["data_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert (details["protocol"], details["n_ctx"], details["stride"]) == ("llama.cpp", 128, 128)
    assert details["bos"] == "replaces the first token of each window"
    assert reports[-1] == ("perplexity", n, n)
    assert outcome.model.sha256 == spec.model.sha256
    assert details["peak_process_bytes"] > 10_000_000
    limited = run(PplSpec(model=spec.model, data=spec.data, n_ctx=128, limit=2, device="cpu", threads=1))
    assert limited.details["data_label"] == "lines.txt (first 2 windows)"
    assert limited.details["windows_available"] is None
    limited = run(
        PplSpec(model=spec.model, data=spec.data, n_ctx=128, limit=n - 1, device="cpu", threads=1, protocol="llama.cpp")
    )
    assert limited.details["data_label"] == f"lines.txt (first {n - 1} of {n} windows)"
    assert limited.measurements["nll"].samples == pytest.approx(outcome.measurements["nll"].samples[:-1])


def test_a_model_against_itself_does_not_diverge(tiny: Path, text_file: Path):
    spec = PplSpec(
        model=file(tiny), against=file(tiny), data=str(text_file), n_ctx=128, limit=2, device="cpu", threads=1
    )
    found = run(spec).measurements
    assert found["kld_mean"].samples == [0, 0]
    assert found["kld_max"].samples == [0]
    assert found["top1_agreement"].samples == [1, 1]


def test_against_a_quantized_copy(text_file: Path, tmp_path: Path):
    """Model and parent are not swapped, and every part of a window meets the same part of the other's."""
    from quantlab.runtime.backend import Batch, Capacity
    from quantlab.runtime.llamacpp import opened

    files = {kind: tmp_path / f"{kind}.gguf" for kind in ("F32", "Q4_1")}
    rows = []
    for kind, path in files.items():
        write_gguf(path, kind=gguf.GGMLQuantizationType[kind])
        with opened(path, Capacity(n_ctx=600, n_batch=600, n_ubatch=600), device="cpu", threads=1) as backend:
            ids = backend.encode("\n\n".join(line + "\n" for line in text_file.read_text("utf-8").split("\n")[:-1]))[
                :600
            ]
            rows.append(log_softmax(backend.forward(Batch.of(0, ids, 0, logits="all")))[:-1])
    p, q = rows
    kld = (np.exp(p) * (p - q)).sum(axis=1)
    assert kld.mean() > 1e-4
    spec = PplSpec(
        model=file(files["Q4_1"]),
        against=file(files["F32"]),
        data=str(text_file),
        n_ctx=600,
        limit=1,
        device="cpu",
        threads=1,
    )
    outcome = run(spec)
    assert outcome.measurements["kld_mean"].samples == pytest.approx([kld.mean()], rel=1e-3)
    assert outcome.measurements["top1_agreement"].samples == pytest.approx(
        [(p.argmax(1) == q.argmax(1)).mean()], abs=0.004
    )
    assert [notice.code for notice in outcome.warnings] == ["n-ctx-beyond-training"]
    assert outcome.details["against_model"]["sha256"] == spec.against.sha256
    assert outcome.details["against_ppl"] == pytest.approx(math.exp(-p[np.arange(599), ids[1:]].mean()), rel=1e-4)


def test_weights_that_are_not_numbers_are_found(text_file: Path, tmp_path: Path):
    path = tmp_path / "nan.gguf"
    write_gguf(
        path, kind=gguf.GGMLQuantizationType.F32, replace={"output_norm.weight": np.full(64, np.nan, np.float32)}
    )
    with pytest.raises(QuantlabError, match="the model's logits are not finite at position 0 of window 1") as caught:
        run(PplSpec(model=file(path), data=str(text_file), n_ctx=64, device="cpu", threads=1))
    assert caught.value.hint


def test_a_text_shorter_than_a_window(tiny: Path, tmp_path: Path):
    path = tmp_path / "short.txt"
    path.write_text("in the", "utf-8")
    with pytest.raises(QuantlabError, match=r"the text has \d tokens, one window of protocol `hf` has 2048"):
        run(PplSpec(model=file(tiny), data=str(path), device="cpu", threads=1))


def test_wrong_use_is_found_before_anything_is_opened():
    with pytest.raises(UsageError, match="no stride"):
        run(PplSpec(model=ModelFile("/nowhere.gguf", "m", "m", "0"), stride=5))


def test_perplexity_of_a_trained_model(stories: Path, wiki_test: Path, tmp_path: Path):
    """What llama-perplexity (llama.cpp 0c1e570) prints for stories260K in F32, 40 windows: 130.0721 +/- 5.01212."""
    from quantlab.quantize.convert import convert

    path = tmp_path / "stories.gguf"
    convert(stories, path, outtype="F32")
    spec = PplSpec(model=file(path), data=str(wiki_test), protocol="llama.cpp", limit=40, device="cpu")
    outcome = run(spec)
    assert outcome.measurements["ppl"].samples == pytest.approx([130.0721], abs=0.01)
    assert outcome.measurements["ppl_stderr"].samples == pytest.approx([5.01212], abs=0.001)
    assert outcome.details["data_label"] == "wikitext2 (first 40 windows)"
    assert outcome.details["canonical"]
