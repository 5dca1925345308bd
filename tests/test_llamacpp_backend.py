"""The llama.cpp backend passes the contract, and what is its own: load errors, bytes read, GPU refusal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.quantize.convert import convert
from quantlab.runtime.backend import Backend, Capacity
from quantlab.runtime.llamacpp import LlamaCppBackend, opened
from tests.backend_contract import BackendContract, Open
from tests.hf_folders import write_folder
from tests.tiny_gguf import FFN, HEAD_DIM, HIDDEN, KV_HEADS, LAYERS, write_gguf


def _opener(path: Path) -> Iterator[Open]:
    backends: list[Backend] = []

    def open_backend(**capacity: int) -> Backend:
        backends.append(LlamaCppBackend(path, Capacity(**capacity), threads=1))
        return backends[-1]

    yield open_backend
    for backend in backends:
        backend.close()


KINDS = {
    "llama, tied, F32": {"arch": "llama", "kind": gguf.GGMLQuantizationType.F32},
    "qwen2, untied, Q4_1": {"arch": "qwen2", "kind": gguf.GGMLQuantizationType.Q4_1, "tied": False, "pre": "qwen2"},
    "llama, BOS, Q8_0": {
        "arch": "llama",
        "kind": gguf.GGMLQuantizationType.Q8_0,
        "metadata": {"tokenizer.ggml.add_bos_token": True},
    },
}


@pytest.fixture(scope="module", params=KINDS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny.gguf and, with the end of one other tensor, other.gguf."""
    folder = tmp_path_factory.mktemp("models")
    weights = write_gguf(folder / "tiny.gguf", **KINDS[request.param])
    key = weights["blk.1.attn_k.weight"]
    changed = {"blk.1.attn_k.weight": np.concatenate([key[:-1], -key[-1:]])}
    write_gguf(folder / "other.gguf", **KINDS[request.param], replace=weights | changed)
    return folder


class TestLlamaCpp(BackendContract):
    @pytest.fixture
    def open_backend(self, models: Path) -> Iterator[Open]:
        yield from _opener(models / "tiny.gguf")

    @pytest.fixture
    def open_other(self, models: Path) -> Iterator[Open]:
        yield from _opener(models / "other.gguf")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, kind=gguf.GGMLQuantizationType.F32)
    return path


def test_sizes_are_those_of_the_tensors(tmp_path: Path, tiny: Path) -> None:
    rows = KV_HEADS * HEAD_DIM
    block = 2 * HIDDEN + 2 * HIDDEN * HIDDEN + 2 * rows * HIDDEN + 3 * FFN * HIDDEN
    with opened(tiny, Capacity(n_ctx=8), threads=1) as backend:
        loaded = backend.describe()
        vocab = loaded.n_vocab
        weights = 4 * (LAYERS * block + HIDDEN + vocab * HIDDEN)
        # The tied embedding is the output matrix too: all of it is read.
        assert loaded.weight_bytes == loaded.bytes_read_per_token == weights
        assert loaded.kv_bytes_per_token == LAYERS * 2 * rows * 2
        assert loaded.runtime.dtype == "F32"
        assert loaded.runtime.threads == 1
    write_gguf(tmp_path / "untied.gguf", kind=gguf.GGMLQuantizationType.F32, tied=False)
    with opened(tmp_path / "untied.gguf", Capacity(n_ctx=8), threads=1) as backend:
        assert backend.describe().weight_bytes == weights + 4 * vocab * HIDDEN
        # Of a table that is only looked up, one row is.
        assert backend.describe().bytes_read_per_token == weights + 4 * HIDDEN


def test_layers_with_a_window_read_no_more_than_it(tmp_path: Path, tiny: Path) -> None:
    """Six of gemma3's seven layers look 8 tokens back."""
    write_folder(tmp_path / "gemma3", "gemma3")
    convert(tmp_path / "gemma3", tmp_path / "gemma3.gguf", outtype="F32")
    for shared in (True, False):
        with opened(tmp_path / "gemma3.gguf", Capacity(n_ctx=64, shared=shared), threads=1) as backend:
            loaded = backend.describe()
        assert loaded.kv_bytes_per_token == 7 * 2 * 32 * 2
        assert loaded.windowed_kv == ((8, 6 * 2 * 32 * 2),)
    with opened(tiny, Capacity(n_ctx=8), threads=1) as backend:
        assert backend.describe().windowed_kv == ()


def test_a_block_closes_its_backend(tiny: Path) -> None:
    with pytest.raises(ZeroDivisionError), opened(tiny, Capacity(n_ctx=8), threads=1) as backend:
        raise ZeroDivisionError
    with pytest.raises(QuantlabError, match="closed"):
        backend.length(0)


def test_files_that_llama_cpp_does_not_load_are_errors(tmp_path: Path, tiny: Path) -> None:
    whole = tiny.read_bytes()
    broken = {
        "half.gguf": whole[: len(whole) // 2],
        "text.gguf": b"no model" * 100,
        "empty.gguf": b"",
        "arch.gguf": whole.replace(b"llama", b"lxama"),
        "tensor.gguf": whole.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"),
    }
    for name, data in broken.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(QuantlabError, match=name):
            LlamaCppBackend(tmp_path / name, Capacity(n_ctx=8), threads=1)
    with pytest.raises(QuantlabError):
        LlamaCppBackend(tmp_path / "missing.gguf", Capacity(n_ctx=8), threads=1)
    with opened(tiny, Capacity(n_ctx=8), threads=1) as backend:
        assert len(backend.encode("still here"))


@pytest.mark.parametrize("threads", [-1, 0, 100_000])
def test_threads_that_end_the_process_are_refused(tiny: Path, threads: int) -> None:
    with pytest.raises(UsageError, match=f"{threads} threads"):
        LlamaCppBackend(tiny, Capacity(n_ctx=8), threads=threads)


def test_devices(tiny: Path) -> None:
    with pytest.raises(UsageError, match="tpu"):
        LlamaCppBackend(tiny, Capacity(n_ctx=8), device="tpu")
    with opened(tiny, Capacity(n_ctx=8), device="cpu", threads=1) as backend:
        assert backend.describe().runtime.device == "cpu"
        assert backend.memory().device_allocated == 0
