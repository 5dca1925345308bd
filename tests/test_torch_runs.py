"""`ppl` and `bench` of folders in torch, alone and beside llama.cpp, through the command line."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantlab.core.artifact import content_sha256
from quantlab.core.errors import QuantlabError
from quantlab.core.model import ModelFile
from quantlab.core.progress import silent
from quantlab.core.result import Result
from quantlab.evaluate.divergence import require_same_vocabulary
from quantlab.evaluate.perplexity import Measured, measure
from quantlab.evaluate.spec import PplSpec
from quantlab.lab.store import load_results
from quantlab.quantize.convert import convert
from quantlab.report.comparison import compare
from quantlab.report.table import tabulate
from quantlab.runtime.backend import Capacity
from quantlab.runtime.loading import opened
from tests.hf_folders import write_folder, write_safetensors

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

N_CTX, WINDOWS = 256, 4


@pytest.fixture(scope="module")
def files(stories: Path, wiki_test: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with stories260K in F32 GGUF, a copy of the folder with noise on its weights, and a text."""
    folder = tmp_path_factory.mktemp("files")
    convert(stories, folder / "stories.gguf", outtype="F32")
    write_noisy(stories, folder / "noisy")
    (folder / "text.txt").write_text(wiki_test.read_text("utf-8")[:9000], "utf-8")
    return folder


def write_noisy(source: Path, target: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file

    target.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json":
            (target / path.name).write_bytes(path.read_bytes())
    rng = np.random.default_rng(0)
    weights = load_file(source / "model.safetensors")
    noisy = {name: w * (1 + 0.02 * rng.standard_normal(w.shape).astype(np.float32)) for name, w in weights.items()}
    write_safetensors(
        target / "model.safetensors", {name: ("F32", w.astype("<f4").view("<u4")) for name, w in noisy.items()}
    )


def file(path: Path) -> ModelFile:
    return ModelFile(str(path), path.stem, str(path), content_sha256(path))


def measured(model: Path, text: str, parent: Path | None = None, dtype: str = "auto") -> Measured:
    """`measure` in this process, on one thread."""
    against = file(parent) if parent else None
    spec = PplSpec(file(model), n_ctx=N_CTX, limit=WINDOWS, against=against, device="cpu", dtype=dtype)
    capacity = Capacity(n_ctx=N_CTX, n_batch=100, n_ubatch=64, n_outputs=100, shared=False)

    def kept(path: Path) -> Any:
        return opened(path, capacity, device="cpu", dtype=dtype if path.is_dir() else "auto", threads=1)

    with kept(model) as backend:
        if parent is None:
            return measure(spec, text, backend, None, silent)
        with kept(parent) as other:
            return measure(spec, text, backend, other, silent)


def quantlab(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quantlab", *arguments, "--threads", "1", "--device", "cpu", "--offline"],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "QUANTLAB_CACHE": str(cwd / "cache")},
    )


@pytest.fixture(scope="module")
def text(files: Path) -> str:
    raw = (files / "text.txt").read_text("utf-8")
    return "\n\n".join(line + "\n" if line.strip() else "" for line in raw.split("\n")[:-1])


def test_perplexity_is_that_of_transformers_and_of_llama_cpp(stories: Path, files: Path, text: str) -> None:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(stories)(text)["input_ids"]
    with torch.inference_mode():
        windows = [torch.tensor([ids[i * N_CTX : (i + 1) * N_CTX]]) for i in range(WINDOWS)]
        losses = [model(input_ids=window, labels=window).loss.item() for window in windows]
    ours = measured(stories, text, dtype="float32")
    assert ours.measurements["nll"].samples == pytest.approx(losses, rel=1e-5)
    assert ours.measurements["ppl"].samples == pytest.approx([math.exp(sum(losses) / WINDOWS)], rel=1e-5)
    assert (ours.runtime.name, ours.runtime.dtype) == ("torch", "float32")
    gguf = measured(files / "stories.gguf", text)
    assert gguf.details["token_hash"] == ours.details["token_hash"]
    assert ours.measurements["ppl"].samples == pytest.approx(gguf.measurements["ppl"].samples, rel=1e-4)
    assert ours.measurements["bits_per_byte"].samples == pytest.approx(
        gguf.measurements["bits_per_byte"].samples, rel=1e-4
    )


def test_a_parent_of_another_runtime_is_named(stories: Path, files: Path, text: str) -> None:
    beside_itself = measured(stories, text, parent=files / "stories.gguf")
    assert [notice.code for notice in beside_itself.warnings] == ["parent-runtime"]
    # llama.cpp keeps K and V in 16 bits.
    assert max(beside_itself.measurements["kld_mean"].samples) < 2e-5
    noisy = measured(files / "noisy", text, parent=stories)
    assert noisy.warnings == []
    assert min(noisy.measurements["kld_mean"].samples) > 1e-4
    as_gguf = measured(files / "noisy", text, parent=files / "stories.gguf")
    assert noisy.measurements["kld_mean"].samples == pytest.approx(as_gguf.measurements["kld_mean"].samples, rel=1e-2)


def test_a_padded_vocabulary_is_that_of_its_parent(tmp_path: Path) -> None:
    write_folder(tmp_path / "padded", "llama", model_type="llama", vocab_size=400)
    write_folder(tmp_path / "more", "llama", model_type="llama", vocab_size=416)
    convert(tmp_path / "padded", tmp_path / "padded.gguf", outtype="F32")
    capacity, names = Capacity(n_ctx=8, n_batch=8), ("model", "parent")
    with (
        opened(tmp_path / "padded", capacity, device="cpu", threads=1) as model,
        opened(tmp_path / "padded.gguf", capacity, device="cpu", threads=1) as in_llamacpp,
        opened(tmp_path / "more", capacity, device="cpu", threads=1) as more,
    ):
        assert model.piece_bytes(399) == b""
        require_same_vocabulary(model, model, names)
        require_same_vocabulary(model, in_llamacpp, names)
        with pytest.raises(QuantlabError, match=r"`model` has a vocabulary of 400 tokens, `parent` of 416"):
            require_same_vocabulary(model, more, names)


def test_ppl_of_a_folder_through_the_command_line(stories: Path, files: Path, text: str) -> None:
    done = quantlab(
        "ppl", "noisy", "--runtime", "torch", "--dtype", "float32", "--against", str(stories), "--data", "text.txt",
        "--n-ctx", str(N_CTX), "--limit", str(WINDOWS), "--json", cwd=files,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = load_results(list((files / "runs").glob("*-ppl-noisy-*")))
    assert json.loads(done.stdout)["id"] == result.id
    here = measured(files / "noisy", text, parent=stories)
    for name in ("ppl", "kld_mean", "top1_agreement"):
        assert result.measurements[name].samples == pytest.approx(here.measurements[name].samples, rel=1e-4)
    assert result.details["token_hash"] == here.details["token_hash"]
    assert result.spec["dtype"] == "float32"
    assert "runtime" not in result.spec
    assert result.runtime is not None
    assert (result.runtime.name, result.runtime.device, result.runtime.threads) == ("torch", "cpu", 1)
    assert result.model.format == "safetensors"


@pytest.fixture(scope="module")
def benched(files: Path) -> list[Result]:
    """A folder in torch and a GGUF file in llama.cpp, measured in turns."""
    done = quantlab(
        "bench", "noisy", "stories.gguf", "--dtype", "float32", "-p", "16", "-n", "6", "-r", "3", "-b", "2",
        "--results", "bench-runs", cwd=files,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "torch float32" in done.stdout
    return load_results([files / "bench-runs"])


def test_bench_of_two_runtimes_through_the_command_line(benched: list[Result]) -> None:
    ran = {result.label: result for result in benched}
    torch_run, gguf_run = ran["noisy"], ran["stories"]
    assert torch_run.runtime is not None
    assert gguf_run.runtime is not None
    assert (torch_run.runtime.name, gguf_run.runtime.name) == ("torch", "llamacpp")
    assert torch_run.measurements.keys() - gguf_run.measurements.keys() == {"tpot_generate"}
    assert gguf_run.measurements.keys() <= torch_run.measurements.keys()
    assert torch_run.details["session"] == gguf_run.details["session"]
    assert torch_run.details["prompt_sha256"] == gguf_run.details["prompt_sha256"]
    plain = torch_run.measurements["tpot_generate"]
    assert (len(plain.samples), plain.samples_per_repetition) == (3 * 2, 2)
    assert min(plain.samples) > 0
    # Its 260,000 weights in float32; torch and transformers themselves take hundreds of megabytes.
    sizes = {name: torch_run.measurements[name].samples[0] for name in ("weight_bytes", "kv_bytes_per_token")}
    assert sizes == {"weight_bytes": pytest.approx(1.04e6, rel=0.01), "kv_bytes_per_token": 2 * 5 * 4 * 8 * 4}
    assert 0 <= torch_run.measurements["peak_process_bytes"].samples[0] < 100e6
    assert torch_run.measurements["peak_device_bytes"].samples == [0]
    assert torch_run.measurements["peak_reserved_bytes"].samples == [0]


def test_the_table_tells_runtimes_apart(benched: list[Result]) -> None:
    table = tabulate(compare(benched))
    heads = [head.title for head in table.heads]
    column = [str(row[heads.index("runtime")]) for row in table.rows]
    assert column == ["torch float32", "llama.cpp"]
    assert "TPOT generate" in heads
    assert any("unlike runtimes" in note and "`stories` in llama.cpp on cpu" in note for note in table.notes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bench_on_a_device_measures_its_memory_and_bandwidth(stories: Path, files: Path) -> None:
    """Without `--runtime`: a folder runs in torch where CUDA is."""
    command = ["bench", str(stories), "-p", "16", "-n", "8", "-r", "3", "--results", "cuda-runs", "--offline"]
    subprocess.run([sys.executable, "-m", "quantlab", *command], check=True, cwd=files)
    (result,) = load_results([files / "cuda-runs"])
    assert result.runtime is not None
    assert (result.runtime.name, result.runtime.device) == ("torch", "cuda")
    found = {name: m.samples for name, m in result.measurements.items()}
    assert found["weight_bytes"][0] <= found["peak_device_bytes"][0] <= found["peak_reserved_bytes"][0]
    assert found["tpot_floor"][0] > 0
    assert max(found["bandwidth_bytes_per_s"]) > 50e9
    assert min(found["tpot_generate"]) > 0
    assert "peak device memory" in [head.title for head in tabulate(compare([result])).heads]
