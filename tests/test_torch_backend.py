"""The torch backend passes the contract on every family, and what is its own: exactness, loading, kernels, decoding."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hypothesis import strategies as st  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402

from quantlab.core.errors import QuantlabError  # noqa: E402
from quantlab.runtime.backend import Backend, Batch, Capacity, Request, generate_static, prefill_all  # noqa: E402
from quantlab.runtime.torch import decode  # noqa: E402
from quantlab.runtime.torch.backend import TorchBackend  # noqa: E402
from quantlab.runtime.torch.decode import StaticPass  # noqa: E402
from quantlab.runtime.torch.kv import Blocks  # noqa: E402
from tests import hf_folders  # noqa: E402
from tests.backend_contract import BackendContract, Open, batch, distance, feed  # noqa: E402

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3")
# Rotations that transformers chooses by the largest position of a step. A text of 64 tokens is past the first two.
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0 + i for i in range(8)]}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": (
        "llama",
        {"max_position_embeddings": 24, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    ),
    "longrope": ("phi3", {"original_max_position_embeddings": 24, "rope_scaling": _LONG}),
    "longrope, short": ("phi3", {"original_max_position_embeddings": 64, "rope_scaling": _LONG}),
}

KEY = "model.layers.1.self_attn.k_proj.weight"


def _opener(path: Path, device: str = "cpu") -> Iterator[Open]:
    backends: list[Backend] = []

    def open_backend(**capacity: int) -> Backend:
        backends.append(TorchBackend(path, Capacity(**capacity), device=device, dtype="float32", threads=1))
        return backends[-1]

    yield open_backend
    for backend in backends:
        backend.close()


@contextlib.contextmanager
def on_cpu(path: Path, *, dtype: str = "auto", **capacity: int) -> Iterator[TorchBackend]:
    backend = TorchBackend(path, Capacity(**({"n_ctx": 64} | capacity)), device="cpu", dtype=dtype, threads=1)
    try:
        yield backend
    finally:
        backend.close()


def write_folder(folder: Path, family: str, **changed: Any) -> dict[str, np.ndarray]:
    kind = "gemma3_text" if family == "gemma3" else family
    window = {"sliding_window": 8} if family == "mistral" else {}
    return hf_folders.write_folder(folder, family, model_type=kind, pad_token_id=0, **window, **changed)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random folder of each family; mistral and gemma3 look 8 tokens back."""
    root = tmp_path_factory.mktemp("folders")
    for family in FAMILIES:
        write_folder(root / family, family)
    for name, (family, changed) in ROPES.items():
        write_folder(root / name, family, **changed)
    return root


def other_key(weight: np.ndarray) -> np.ndarray:
    """The same first 512 bytes, other weights behind them."""
    return np.concatenate([weight[:2], -weight[2:]])


@pytest.fixture(scope="module")
def other_stories(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K with a part of one other tensor."""
    other = tmp_path_factory.mktemp("other")
    for file in stories.iterdir():
        shutil.copyfile(file, other / file.name)
    weights = load_file(other / "model.safetensors")
    weights[KEY] = other_key(weights[KEY])
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    return other


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random gemma3, and the same with a part of one other tensor."""
    root = tmp_path_factory.mktemp("gemma")
    text = {
        "tokenizer": hf_folders.byte_level_tokenizer(),
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|eos|>",
        },
    }
    weights = write_folder(root / "one", "gemma3", tie_word_embeddings=False, **text)
    weights[KEY] = other_key(weights[KEY])
    write_folder(root / "other", "gemma3", tie_word_embeddings=False, weights=weights, **text)
    return root / "one", root / "other"


class TestStories(BackendContract):
    """A trained model: SentencePiece, BOS, grouped heads."""

    @pytest.fixture
    def open_backend(self, stories: Path) -> Iterator[Open]:
        yield from _opener(stories)

    @pytest.fixture
    def open_other(self, other_stories: Path) -> Iterator[Open]:
        yield from _opener(other_stories)


class TestGemma3(BackendContract):
    """Windows of 8 tokens in six layers of seven, a byte-level tokenizer, a head of its own."""

    @pytest.fixture
    def open_backend(self, gemma: tuple[Path, Path]) -> Iterator[Open]:
        yield from _opener(gemma[0])

    @pytest.fixture
    def open_other(self, gemma: tuple[Path, Path]) -> Iterator[Open]:
        yield from _opener(gemma[1])


# exactness


@pytest.mark.parametrize("family", [*FAMILIES, *ROPES])
def test_every_family_computes_what_transformers_does(folders: Path, family: str) -> None:
    """Two sequences, longer than any window, fed ragged, interleaved and in pieces; against plain forward passes.

    These are over the whole context, so that the rotations are those that it is opened for.
    """
    texts = {0: np.arange(10, 70), 2: np.arange(80, 120)}
    with on_cpu(folders / family, n_ctx=64, n_seq=3, n_batch=64, n_ubatch=7) as backend:
        rows: dict[int, list[np.ndarray]] = {0: [], 2: []}
        for ends in ({0: (0, 13), 2: (0, 3)}, {0: (13, 14), 2: (3, 4)}, {2: (4, 40), 0: (14, 20)}, {0: (20, 60)}):
            owner = np.concatenate([np.full(b - a, seq) for seq, (a, b) in ends.items()])
            at = np.concatenate([np.arange(a, b) for a, b in ends.values()])
            order = np.argsort(at, kind="stable")
            owner, at = owner[order], at[order]
            ids = np.array([texts[seq][i] for seq, i in zip(owner, at, strict=True)])
            logits = backend.forward(batch(ids, at, owner, np.ones(len(ids))))
            for seq in ends:
                rows[seq].append(logits[owner == seq])
        assert [backend.length(seq) for seq in (0, 1, 2)] == [60, 0, 40]
    model = transformers.AutoModelForCausalLM.from_pretrained(folders / family, attn_implementation="eager")
    for seq, ids in texts.items():
        with torch.inference_mode():
            filled = np.pad(ids, (0, 64 - len(ids)), constant_values=5)
            expected = model(torch.from_numpy(filled)[None]).logits[0, : len(ids)].numpy()
        assert distance(np.concatenate(rows[seq]), expected) < 1e-4


def test_rotations_by_a_rule_of_the_models_own_are_refused_where_they_could_change(tmp_path: Path) -> None:
    """phimoe scales them by the largest position."""
    config = transformers.PhimoeConfig(
        vocab_size=373, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2, max_position_embeddings=128,
        rope_parameters=_LONG | {
            "rope_theta": 1e4, "short_mscale": 1.0, "long_mscale": 1.5, "original_max_position_embeddings": 24,
        },
    )  # fmt: skip
    write_folder(tmp_path / "m", "llama")
    transformers.PhimoeForCausalLM(config).save_pretrained(tmp_path / "m")
    with on_cpu(tmp_path / "m", n_ctx=24) as backend:
        assert backend.describe().runtime.kernels["mlp PhimoeExperts"] == 1
    with pytest.raises(QuantlabError, match="PhimoeRotaryEmbedding` rotates by the longest"):
        TorchBackend(tmp_path / "m", Capacity(n_ctx=25), device="cpu", threads=1)


def test_keys_of_another_rotation_are_refused(folders: Path) -> None:
    tokens = np.arange(10, 20, dtype=np.int32)
    with on_cpu(folders / "longrope", n_ctx=24) as short, on_cpu(folders / "longrope", n_ctx=25) as long:
        feed(short, 0, tokens)
        with pytest.raises(QuantlabError, match="another model"):
            long.restore(0, short.save(0))


def test_perplexity_is_that_of_transformers_own_loss(stories: Path, wiki_test: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(stories)
    with on_cpu(stories, n_ctx=512, n_batch=200) as backend:
        ids = backend.encode(wiki_test.read_text(encoding="utf-8")[:4000], bos=True)[:512]
        parts = [
            backend.forward(Batch.of(0, ids[at : at + 200], at, logits="all")).astype(np.float64)
            for at in range(0, 512, 200)
        ]
    logits = np.concatenate(parts)[:-1]
    loss = np.log(np.exp(logits).sum(1)) - logits[np.arange(511), ids[1:]]
    inputs = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.inference_mode():
        expected = float(model(inputs, labels=inputs).loss)
    assert float(np.exp(loss.mean())) == pytest.approx(np.exp(expected), rel=1e-5)


# what is held


def test_sizes_are_those_of_the_tensors(folders: Path, stories: Path) -> None:
    untied = hf_folders.tensor_shapes("mistral", hf_folders.config("mistral", 373))
    with on_cpu(folders / "mistral") as backend:
        loaded = backend.describe()
    rows, hidden = untied["model.embed_tokens.weight"]
    assert rows == loaded.n_vocab
    total = 4 * sum(int(np.prod(shape)) for shape in untied.values())
    assert loaded.weight_bytes == total
    # Of a table that is only looked up, one row is read.
    assert loaded.bytes_read_per_token == total - 4 * (rows - 1) * hidden
    assert loaded.kv_bytes_per_token == 3 * 2 * 2 * 32 * 4
    # Every layer looks 8 tokens back; of gemma3 six in seven do.
    assert loaded.windowed_kv == ((8, loaded.kv_bytes_per_token),)
    assert loaded.kv_bytes_read(100) == loaded.kv_bytes_read(8) == 8 * loaded.kv_bytes_per_token
    with on_cpu(folders / "gemma3") as backend:
        gemma = backend.describe()
    assert gemma.kv_bytes_per_token == 7 * 2 * 32 * 4
    assert gemma.kv_bytes_read(100) == (6 * 8 + 100) * 2 * 32 * 4
    with on_cpu(stories, dtype="bfloat16") as backend:
        loaded = backend.describe()
    with safe_open(stories / "model.safetensors", "np") as file:
        params = sum(int(np.prod(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118
    # Tied: the embedding is the head, all of it is read.
    assert loaded.weight_bytes == loaded.bytes_read_per_token == 2 * params
    assert (loaded.runtime.dtype, loaded.kv_bytes_per_token) == ("bfloat16", 5 * 2 * 4 * 8 * 2)
    assert loaded.runtime.kernels == {"attention Linear": 20, "mlp Linear": 15, "lm_head Linear": 1}


def test_experts_count_among_the_kernels(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=373, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    write_folder(tmp_path / "m", "llama")
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "m")
    with on_cpu(tmp_path / "m") as backend:
        kernels = backend.describe().runtime.kernels
    assert kernels == {
        "attention Linear": 8, "mlp MixtralTopKRouter": 2, "mlp MixtralExperts": 2, "lm_head Linear": 1,
    }  # fmt: skip


def test_sharing_moves_no_bytes_until_one_writes(stories: Path) -> None:
    with on_cpu(stories, n_ctx=64, n_seq=2, n_batch=64) as backend:
        tokens = np.arange(10, 50, dtype=np.int32)
        backend.forward(Batch.of(0, tokens, 0, logits="none"))
        before = [tensor.clone() for tensor in backend._storage.keys]
        backend.share(0, 1, 40)
        assert backend._blocks.tables[1] == backend._blocks.tables[0]
        assert all(torch.equal(a, b) for a, b in zip(before, backend._storage.keys, strict=True))
        backend.forward(Batch.of(1, tokens[:1], 40, logits="none"))
        # The third block, half full, is copied; the two full ones stay shared.
        shared = [a == b for a, b in zip(backend._blocks.tables[0], backend._blocks.tables[1], strict=True)]
        assert shared == [True, True, False]


@hypothesis.given(st.data())
def test_blocks_are_counted_right(data: st.DataObject) -> None:
    """Any order of appending, sharing and cutting: no block is lost, given twice, or written while shared."""
    blocks = Blocks(3, 50)
    held: list[list[int]] = [[], [], []]
    memory: dict[int, int] = {}
    for step in range(data.draw(st.integers(1, 25))):
        seq = data.draw(st.integers(0, 2))
        action = data.draw(st.sampled_from(["append", "share", "cut"]))
        if action == "append":
            start = len(held[seq])
            end = data.draw(st.integers(start, 50))
            for source, target in blocks.extend(seq, start, end):
                for i in range(16):
                    memory[target * 16 + i] = memory.get(source * 16 + i, -1)
            held[seq] += [step * 1000 + i for i in range(start, end)]
            memory |= dict(zip(blocks.slots(seq, start, end), held[seq][start:], strict=True))
        elif action == "share":
            dst = data.draw(st.integers(0, 2))
            if dst != seq and not held[dst]:
                n = data.draw(st.integers(0, len(held[seq])))
                blocks.share(seq, dst, n)
                held[dst] = held[seq][:n]
        else:
            n = data.draw(st.integers(0, len(held[seq])))
            blocks.truncate(seq, n)
            held[seq] = held[seq][:n]
        for s, tokens in enumerate(held):
            assert [memory[place] for place in blocks.slots(s, 0, len(tokens))] == tokens
    used = {block for table in blocks.tables for block in table}
    assert len(used) + len(blocks._free) == 3 * blocks.per_seq


# generate


def test_both_ways_of_generating_agree(stories: Path) -> None:
    with on_cpu(stories, n_ctx=128, n_seq=2, n_batch=128) as backend:
        prompts = [backend.encode("Once upon a time there was a", bos=True), backend.encode("The dog", bos=True)]
        requests = [Request(prompts[0], 20), Request(prompts[1], 9)]
        static = backend.generate(requests)
        assert [backend.length(seq) for seq in (0, 1)] == [len(prompts[0]) + 19, len(prompts[1]) + 8]
        backend.reset()
        plain = backend.generate_plain(requests)
        assert [g.tokens for g in plain] == [g.tokens for g in static]
        assert [len(g.times_s) for g in plain] == [20, 9]
        assert all(g.start_s < g.times_s[0] and (np.diff(g.times_s) > 0).all() for g in plain)
        assert backend.length(0) == 0
        # The model attends by its own blocks again.
        assert backend.generate(requests)[0].tokens == static[0].tokens


@pytest.mark.parametrize("family", ["stories", "gemma3"])
def test_the_pass_that_a_graph_captures(stories: Path, folders: Path, family: str) -> None:
    """On any device: its tensors of fixed shape give the tokens that steps of growing shape give."""
    with on_cpu(stories if family == "stories" else folders / family, n_seq=3, n_batch=64) as backend:
        requests = [Request(np.arange(10, 30, dtype=np.int32), 20), Request(np.arange(40, 47, dtype=np.int32), 9)]
        expected = [g.tokens for g in backend.generate(requests)]
        backend.reset()
        first = prefill_all(backend, [request.prompt for request in requests])
        for seq in (0, 1):
            backend._blocks.extend(seq, 0, 48)
        step = StaticPass(backend._model.network, backend._storage, backend._blocks.per_seq, (2, 48))
        step.begin(first, [20, 7], [39, 15])
        got = [[token] for token in first]
        for _ in range(19):
            step.run()
            for tokens, token in zip(got, step.tokens.tolist(), strict=True):
                tokens.append(token)
        assert [got[0], got[1][:9]] == expected


def test_a_failed_capture_is_told_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(*arguments: object) -> None:
        tried.append(arguments[-1])
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(decode, "_Captured", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    on_cuda = SimpleNamespace(keys=[SimpleNamespace(device=torch.device("cuda"))])
    blocks = Blocks(2, 64)
    decoder = decode.StaticDecoder(None, on_cuda, blocks)
    request = Request(np.arange(10, dtype=np.int32), 20)
    for requests in ([request], [request], [request, request]):
        assert not decoder.ready(requests)
        assert decoder.no_graph == "operation not permitted when stream is capturing"
        assert blocks.tables == [[], []]
    assert tried == [(1, 32), (2, 32)]
    monkeypatch.setattr(decode, "_Captured", lambda *arguments: SimpleNamespace(size=arguments[-1]))
    assert decoder.ready([replace(request, max_new_tokens=30)])
    assert decoder.no_graph is None


def test_plain_generate_stops_where_told(stories: Path) -> None:
    with on_cpu(stories, n_ctx=128) as backend:
        prompt = backend.encode("Once upon a time", bos=True)
        free = backend.generate_plain([Request(prompt, 12)])[0]
        backend._loaded = replace(backend.describe(), eos=frozenset({free.tokens[4]}))
        stop = backend.generate_plain([Request(prompt, 12, ignore_eos=False)])[0]
        first = free.tokens.index(free.tokens[4])
        assert (stop.tokens, stop.finish_reason) == (free.tokens[: first + 1], "stop")
        assert backend.generate_plain([Request(prompt, 12)])[0].tokens == free.tokens


@pytest.mark.parametrize("error", [AttributeError, IndexError, KeyError, RuntimeError])
def test_whatever_a_models_code_raises_is_an_error(stories: Path, error: type[Exception]) -> None:
    tokens = np.arange(10, 20, dtype=np.int32)
    with on_cpu(stories) as backend:
        before = feed(backend, 0, tokens)

        def fail(*_: object, **__: object) -> None:
            raise error("a bug")

        with pytest.MonkeyPatch.context() as patch, pytest.raises(QuantlabError, match=r"fails a step of 10 .*a bug"):
            patch.setattr(backend._model.network, "forward", fail)
            feed(backend, 0, tokens, 10)
        backend.release(0)
        assert distance(feed(backend, 0, tokens), before) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda(stories: Path) -> None:
    """Found without a flag; the graph gives the tokens of single steps; peaks are those of the run."""
    prompts = [np.arange(10, 30, dtype=np.int32), np.arange(40, 47, dtype=np.int32)]
    requests = [Request(prompts[0], 20), Request(prompts[1], 9)]
    backend = TorchBackend(stories, Capacity(n_ctx=128, n_seq=2, n_batch=128), dtype="float32")
    try:
        assert backend.describe().runtime.device == "cuda"
        by_graph = backend.generate(requests)
        assert backend.counters()["graph_steps"] == 19
        assert [backend.length(seq) for seq in (0, 1)] == [39, 15]
        follow = feed(backend, 0, np.array(by_graph[0].tokens[-1:], np.int32), 39)
        backend.reset()
        assert [g.tokens for g in generate_static(backend, requests)] == [g.tokens for g in by_graph]
        assert distance(feed(backend, 0, np.array(by_graph[0].tokens[-1:], np.int32), 39), follow) < 1e-3
        backend.reset()
        assert [g.tokens for g in backend.generate_plain(requests)] == [g.tokens for g in by_graph]
        memory = backend.memory()
        assert 0 < memory.device_allocated <= memory.device_peak
    finally:
        backend.close()


if torch.cuda.is_available():  # test_cuda says that there is none, once.

    @pytest.mark.gpu
    class TestStoriesOnCuda(TestStories):
        """The contract on a GPU."""

        @pytest.fixture
        def open_backend(self, stories: Path) -> Iterator[Open]:
            yield from _opener(stories, "cuda")

        @pytest.fixture
        def open_other(self, other_stories: Path) -> Iterator[Open]:
            yield from _opener(other_stories, "cuda")
