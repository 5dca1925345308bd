"""The importance matrix against sums computed by hand from the weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from quantlab.core.errors import QuantlabError
from quantlab.core.progress import silent
from quantlab.quantize import imatrix
from quantlab.quantize.imatrix import Entry, collect, write
from tests.full_disk import limited_files
from tests.tiny_gguf import F32, LAYERS, stored_metadata, write_wide

WINDOWS, LENGTH = 3, 32


@pytest.fixture(scope="module")
def windows() -> np.ndarray:
    return np.random.default_rng(3).integers(4, 200, (WINDOWS, LENGTH)).astype(np.int32)


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * weight


def test_sums_of_the_first_layer_are_those_of_its_normalized_embeddings(tmp_path: Path, windows: np.ndarray) -> None:
    weights = write_wide(tmp_path / "m.gguf", kind=F32)
    entries = collect(tmp_path / "m.gguf", windows, threads=1, progress=silent)
    embedded = weights["token_embd.weight"][windows.ravel()].astype(np.float64)
    expected = (rms_norm(embedded, weights["blk.0.attn_norm.weight"]) ** 2).sum(axis=0)
    for name in ("attn_q", "attn_k", "attn_v"):
        entry = entries[f"blk.0.{name}.weight"]
        assert entry.counts.tolist() == [WINDOWS * LENGTH]
        np.testing.assert_allclose(entry.sums[0], expected, rtol=1e-5)


def test_every_matrix_of_every_block_is_there_and_nothing_else(tmp_path: Path, windows: np.ndarray) -> None:
    # The last block's feed-forward is only computed where logits of every token are asked for.
    write_wide(tmp_path / "m.gguf", tied=False)
    entries = collect(tmp_path / "m.gguf", windows, threads=1, progress=silent)
    kinds = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    assert set(entries) == {f"blk.{i}.{kind}.weight" for i in range(LAYERS) for kind in kinds}
    assert all(entry.counts.tolist() == [WINDOWS * LENGTH] for entry in entries.values())
    assert entries["blk.0.ffn_down.weight"].sums.shape == (1, 512)


def test_experts_share_what_their_router_sees(tmp_path: Path, windows: np.ndarray) -> None:
    write_wide(tmp_path / "m.gguf", experts=4, kind=F32)
    entries = collect(tmp_path / "m.gguf", windows, threads=1, progress=silent)
    for i in range(LAYERS):
        router, gate = entries[f"blk.{i}.ffn_gate_inp.weight"], entries[f"blk.{i}.ffn_gate_exps.weight"]
        assert gate.sums.shape == (4, 256)
        # Two experts a token, and all of them get the router's own input.
        assert gate.counts.sum() == 2 * WINDOWS * LENGTH
        np.testing.assert_allclose(gate.sums.sum(axis=0), 2 * router.sums[0], rtol=1e-5)
        assert len(entries[f"blk.{i}.ffn_down_exps.weight"].counts) == 4


def test_windows_of_fewer_than_16_tokens_tell_nothing(tmp_path: Path) -> None:
    write_wide(tmp_path / "m.gguf")
    with pytest.raises(QuantlabError, match="no matrix product"):
        collect(tmp_path / "m.gguf", np.full((2, 15), 7, np.int32), threads=1, progress=silent)


def test_activations_that_are_not_finite_name_the_matrix(tmp_path: Path, windows: np.ndarray) -> None:
    hidden = 256
    write_wide(tmp_path / "m.gguf", kind=F32, replace={"blk.0.attn_norm.weight": np.full(hidden, 1e30, np.float32)})
    with pytest.raises(QuantlabError, match=r"blk\.0\.attn_(q|k|v)\.weight.*not finite"):
        collect(tmp_path / "m.gguf", windows, threads=1, progress=silent)


def test_the_file_has_the_form_that_llama_quantize_reads(tmp_path: Path, windows: np.ndarray) -> None:
    write_wide(tmp_path / "m.gguf", experts=4)
    entries = collect(tmp_path / "m.gguf", windows, threads=1, progress=silent)
    write(tmp_path / "i.gguf", entries, datasets=["a", "b"], windows=WINDOWS, n_ctx=LENGTH)
    metadata = {k: v for k, v in stored_metadata(tmp_path / "i.gguf").items() if not k.startswith("GGUF.")}
    assert metadata == {
        "general.type": "imatrix",
        "imatrix.datasets": ["a", "b"],
        "imatrix.chunk_count": WINDOWS,
        "imatrix.chunk_size": LENGTH,
    }
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "i.gguf").tensors}
    assert set(tensors) == {f"{name}.{kind}" for name in entries for kind in ("in_sum2", "counts")}
    # ggml's order: columns first, experts last.
    assert tensors["blk.0.ffn_down_exps.weight.in_sum2"].shape.tolist() == [512, 4]
    assert tensors["blk.0.ffn_down_exps.weight.counts"].shape.tolist() == [1, 4]
    assert tensors["blk.0.attn_q.weight.in_sum2"].shape.tolist() == [256]
    np.testing.assert_array_equal(tensors["blk.0.attn_q.weight.in_sum2"].data, entries["blk.0.attn_q.weight"].sums[0])


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    entries = {"blk.0.attn_q.weight": Entry(matrices=1, columns=100_000, counts=1)}
    with limited_files(10_000), pytest.raises(QuantlabError, match="could not be written"):
        write(tmp_path / "i.gguf", entries, datasets=["a"], windows=1, n_ctx=LENGTH)


def test_mean_is_one_where_an_expert_met_no_token() -> None:
    entry = Entry(matrices=2, columns=3, counts=2)
    entry.add(0, np.array([[1, 2, 3], [1, 0, 1]], np.float32))
    entry.counts[0] = 2
    assert entry.mean().tolist() == [1.0, 2.0, 5.0, 1.0, 1.0, 1.0]


def test_rows_are_added_one_after_another_in_float32() -> None:
    # What llama-imatrix does, and why values agree to the last bit: 2^24 + 1 - 1 steps are lost one by one.
    entry = Entry(matrices=1, columns=1, counts=1)
    entry.add(0, np.array([[4096.0], [1.0], [1.0]], np.float32))
    assert entry.sums[0, 0] == np.float32(2.0**24)


def test_a_strided_input_is_read_by_its_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imatrix, "_is_host", lambda _: True)
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor = imatrix._Tensor()
    tensor.ne[:] = (2, 3, 1, 1)
    tensor.nb[:] = (4, 16, 48, 48)
    tensor.data = values.ctypes.data
    np.testing.assert_array_equal(imatrix._array(tensor, np.float32)[0, 0], values[:, :2])
