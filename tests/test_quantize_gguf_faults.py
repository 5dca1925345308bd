"""quantize --method gguf where something is wrong: weights, files, the disk, a run that is killed or interrupted."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest

from quantlab.core.errors import QuantlabError
from quantlab.core.gguf_file import read_header
from quantlab.core.progress import silent
from quantlab.quantize import gguf as gguf_method
from quantlab.quantize import methods
from quantlab.quantize.artifact_check import find_fault
from quantlab.quantize.spec import QuantizeSpec
from tests.full_disk import limited_files
from tests.test_quantize_gguf import narrow, run, wide
from tests.tiny_gguf import F16, F32, model_file, stored_tensors, write_gguf, write_wide

__all__ = ["narrow", "wide"]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named(kind: str, bad: float, tmp_path: Path) -> None:
    values = np.full((256, 256), 0.01, np.float32)
    values[3, 5] = bad
    write_wide(tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType[kind], replace={"blk.1.attn_q.weight": values})
    with pytest.raises(QuantlabError, match=r"`blk\.1\.attn_q\.weight` holds weights that are not finite"):
        run(tmp_path / "m.gguf", tmp_path / "out" / "o.gguf", type="Q8_0")
    assert list((tmp_path / "out").iterdir()) == []


def test_damaged_and_foreign_files_are_refused(wide: Path, tmp_path: Path) -> None:
    whole = wide.read_bytes()
    for name, content in {
        "cut": whole[: len(whole) // 2],
        "head": whole[:1000],
        "foreign": b"PK\x03\x04" + bytes(1000),
        "empty": b"",
    }.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(QuantlabError, match=name):
            run(path, tmp_path / "out.gguf")
    vocabulary = tmp_path / "unknown.gguf"
    writer = gguf.GGUFWriter(vocabulary, "no-such-architecture")
    writer.add_tensor("w.weight", np.zeros((256, 256), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(QuantlabError, match="unknown model architecture"):
        run(vocabulary, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_an_artifact_that_fails_its_check_is_kept_aside(tmp_path: Path) -> None:
    huge = np.full(256, 1e38, np.float32)
    write_wide(tmp_path / "m.gguf", kind=F32, replace={"output_norm.weight": huge})
    with pytest.raises(QuantlabError, match="logits are not finite") as caught:
        run(tmp_path / "m.gguf", tmp_path / "out" / "o.gguf", type="Q8_0")
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == ["o.gguf.rejected", "o.gguf.rejected.txt"]
    assert "not finite" in (tmp_path / "out" / "o.gguf.rejected.txt").read_text()
    assert "o.gguf.rejected" in caught.value.hint


def test_a_fault_is_told_where_the_disk_has_no_room_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise QuantlabError("no space", "")

    monkeypatch.setattr(gguf_method, "write_text", full)
    write_wide(tmp_path / "m.gguf", metadata={"llama.attention.head_count": 0})
    with pytest.raises(QuantlabError, match=r"does not load `o\.gguf`"):
        run(tmp_path / "m.gguf", tmp_path / "o.gguf", type="Q8_0")
    assert (tmp_path / "o.gguf.rejected").is_file()


def test_a_fault_names_the_artifact_and_not_its_passing_name(tmp_path: Path) -> None:
    write_wide(tmp_path / "m.gguf", metadata={"llama.attention.head_count": 0})
    with pytest.raises(QuantlabError, match=r"does not load `o\.gguf`"):
        run(tmp_path / "m.gguf", tmp_path / "o.gguf", type="Q8_0")
    assert ".partial" not in (tmp_path / "o.gguf.rejected.txt").read_text()


def test_an_assertion_of_the_library_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GGML_NO_BACKTRACE", raising=False)
    write_wide(tmp_path / "m.gguf", metadata={"llama.block_count": 100_000})
    with pytest.raises(QuantlabError, match="GGML_ASSERT"):
        run(tmp_path / "m.gguf", tmp_path / "o.gguf", type="Q8_0")


@pytest.mark.parametrize("key", ["tokenizer.chat_template", "tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token"])
def test_another_tokenizer_or_template_than_the_parents_is_a_fault(key: str, wide: Path, tmp_path: Path) -> None:
    values: dict[str, bool | str] = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.pre": "qwen2"}
    write_wide(tmp_path / "m.gguf", metadata={key: values.get(key, "{{ other }}")})
    own, parent = read_header(tmp_path / "m.gguf"), read_header(wide)
    assert find_fault(tmp_path / "m.gguf", own, own) is None
    assert find_fault(tmp_path / "m.gguf", own, parent) == f"its `{key}` is not its parent's"


def test_a_type_that_fits_no_matrix_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", hidden=48, ffn=80, kind=F16)
    spec = QuantizeSpec(model_file(tmp_path / "m.gguf"), str(tmp_path / "out" / "o.gguf"), threads=1, type="Q8_0")
    for do in (methods.run, methods.dry_run):
        with pytest.raises(QuantlabError, match="no matrix can be stored as Q8_0: 48 and 80 are not a multiple of 32"):
            do(spec, silent)
    with pytest.raises(QuantlabError, match="all are skipped"):
        run(tmp_path / "m.gguf", tmp_path / "out" / "o.gguf", type="Q4_0", skip=["."])
    assert list((tmp_path / "out").iterdir()) == []


def test_a_type_without_a_substitute_names_the_matrix(narrow: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantlabError, match=r"Q1_0 needs columns in multiples of 128: `\S+` has \d+"):
        run(narrow, tmp_path / "o.gguf", type="Q1_0")


def test_a_weight_too_large_names_its_tensor(tmp_path: Path) -> None:
    values = np.full((256, 256), 0.01, np.float32)
    values[3, 5] = 1e6
    write_wide(tmp_path / "m.gguf", kind=F32, replace={"blk.1.attn_q.weight": values})
    with pytest.raises(QuantlabError, match=r"`blk\.1\.attn_q\.weight` holds weights too large for F16"):
        run(tmp_path / "m.gguf", tmp_path / "o.gguf", type="F16")


def test_a_tensor_whose_name_has_a_space_is_planned(wide: Path, tmp_path: Path) -> None:
    content = wide.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1 ffn up.weight")
    (tmp_path / "m.gguf").write_bytes(content)
    spec = QuantizeSpec(model_file(tmp_path / "m.gguf"), "o.gguf", threads=1, type="Q8_0")
    assert methods.dry_run(spec, silent).tensor_types["Q8_0"].count == 15


def test_a_head_stored_twice_is_told(tmp_path: Path) -> None:
    weights = write_wide(tmp_path / "tied.gguf")
    write_wide(tmp_path / "m.gguf", tied=False, replace={"output.weight": weights["token_embd.weight"]})
    write_wide(tmp_path / "own.gguf", tied=False)
    outcome = run(tmp_path / "m.gguf", tmp_path / "o.gguf", type="Q8_0")
    assert "tied-head-duplicated" in [notice.code for notice in outcome.warnings]
    outcome = run(tmp_path / "own.gguf", tmp_path / "o2.gguf", type="Q8_0")
    assert "tied-head-duplicated" not in [notice.code for notice in outcome.warnings]


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    write_wide(tmp_path / "m.gguf", ffn=2048)
    with limited_files(1_000_000), pytest.raises(QuantlabError, match="could not write"):
        run(tmp_path / "m.gguf", tmp_path / "out" / "o.gguf", type="Q8_0")
    assert list((tmp_path / "out").iterdir()) == []


def test_too_little_room_is_told_before_any_work(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(QuantlabError, match="free"):
        methods.dry_run(QuantizeSpec(model_file(wide), str(tmp_path / "o.gguf"), threads=1), silent)
    monkeypatch.setattr("quantlab.quantize.gguf.run_in_child", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(QuantlabError, match="free"):
        run(wide, tmp_path / "o.gguf")


SCRIPT = """
import signal, sys
# A run in the background of a shell inherits an ignored SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from quantlab.core.gguf_file import read_header
from quantlab.core.model import ModelFile
from quantlab.core.progress import silent
from quantlab.quantize import gguf as gguf_method
from quantlab.quantize import methods
from quantlab.quantize.spec import QuantizeSpec
from tests.tiny_gguf import model_file
methods.run(QuantizeSpec(model_file(Path(sys.argv[1])), sys.argv[2], threads=1, type="Q4_K_M", force=True), silent)
"""


def test_a_killed_run_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    write_wide(tmp_path / "m.gguf", ffn=8192)
    out = tmp_path / "out" / "o.gguf"
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "m.gguf"), str(out)]
    root = Path(__file__).resolve().parents[1]
    start = time.monotonic()
    subprocess.run(command, check=True, cwd=root)
    whole_s = time.monotonic() - start
    finished = stored_tensors(out)
    draw = random.Random(5)
    for _ in range(6):
        for path in out.parent.iterdir():
            if not path.name.endswith(".partial"):
                path.unlink()
        process = subprocess.Popen(command, cwd=root)
        time.sleep(draw.uniform(0.2, 0.95) * whole_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        # Killed late, the run may have been done: then what is there is whole.
        if out.exists():
            assert stored_tensors(out) == finished
        assert {path.name for path in out.parent.iterdir() if not path.name.startswith(".")} <= {
            "o.gguf",
            "o.gguf.json",
        }
    # The child of a killed run ends by itself, and the next run removes what was left.
    time.sleep(1)
    subprocess.run(command, check=True, cwd=root)
    assert stored_tensors(out) == finished
    assert sorted(path.name for path in out.parent.iterdir()) == ["o.gguf", "o.gguf.json"]


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    write_wide(tmp_path / "m.gguf", ffn=8192)
    out = tmp_path / "out" / "o.gguf"
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "m.gguf"), str(out)]
    process = subprocess.Popen(command, cwd=Path(__file__).resolve().parents[1], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    # Stopped before it has become the program, a child would hold its parent in vfork.
    while _of_child(process.pid)[1:2] != ["-P"] and time.monotonic() < deadline:
        time.sleep(0.01)
    # Held in the middle, however fast the machine is.
    psutil.Process(process.pid).children()[0].suspend()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0 and b"KeyboardInterrupt" in said
    assert list(out.parent.iterdir()) == []


def _of_child(pid: int) -> list[str]:
    """The command line of the only child, empty where there is none."""
    children = psutil.Process(pid).children()
    return children[0].cmdline() if children else []
