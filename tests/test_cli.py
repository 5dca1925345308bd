"""The front door: what it imports, what it refuses, and with which exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.comparison_cases import F16, bench
from tests.hf_folders import write_folder
from tests.tiny_gguf import write_gguf

HEAVY = ("torch", "transformers", "numpy", "llama_cpp", "scipy", "gguf", "datasets", "huggingface_hub", "tokenizers")


def quantlab(
    *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None, stdout: Any = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "quantlab", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nsys.argv = ['quantlab', '--help']\nfrom quantlab.cli.app import main\n"
        "try:\n main()\nexcept SystemExit:\n pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.rstrip().endswith("[]")


def test_help_shows_what_stands_in_brackets() -> None:
    from quantlab.cli.app import app

    text = " ".join(CliRunner().invoke(app, ["quantize", "--help"]).output.split())
    for shown in ("org/name[@revision]", "NAME|PATH[:WEIGHT]", "[default: 4, of int8 8]", "[default: Q4_K_M]"):
        assert shown in text


@pytest.mark.parametrize("command", ["doctor", "quantize", "engines", "inspect", "bench", "ppl", "compare", "run"])
def test_every_command_has_help(command: str) -> None:
    from quantlab.cli.app import app

    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_version() -> None:
    from quantlab import __version__

    done = quantlab("--version")
    assert (done.returncode, done.stdout) == (0, f"quantlab {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message", "hint"),
    [
        (["ppl"], 2, "Missing argument", ""),
        (["ppl", "no/such/folder/here"], 1, "is no folder, .gguf file, Hub id", "check the path"),
        (["ppl", "missing.gguf"], 1, "does not exist", "check the path"),
        (["bench", "--frobnicate"], 2, "No such option", ""),
        (["frobnicate"], 2, "No such command", ""),
        (["compare", "no-such-folder"], 1, "does not exist", "first"),
        (["run", "no-such.yaml"], 1, "No such file", "check the path"),
    ],
)
def test_errors_are_named_with_their_exit_code(
    tmp_path: Path, arguments: list[str], code: int, message: str, hint: str
) -> None:
    done = quantlab(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert message in done.stderr
    assert hint in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    done = quantlab("ppl", "a\x1b[2Jb.gguf", cwd=tmp_path)
    assert done.returncode == 1
    assert "\x1b" not in done.stderr
    assert "does not exist" in done.stderr


def test_a_folder_without_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = quantlab("quantize", "empty", "--method", "gguf", cwd=tmp_path)
    assert done.returncode == 1
    assert "config.json" in done.stderr


def stored(folder: Path) -> str:
    """A store of one Result; its folder's name."""
    from quantlab.lab.store import Store

    Store(folder / "runs").save(bench("f16 ≈", F16, [1.0, 1.1]))
    return "runs"


def test_compare_overwrites_nothing_without_force(tmp_path: Path) -> None:
    runs, out = stored(tmp_path), tmp_path / "mine.json"
    out.write_text("precious")
    done = quantlab("compare", runs, "--json", "-o", "mine.json", cwd=tmp_path)
    assert done.returncode == 1
    assert "`mine.json` exists" in done.stderr
    assert out.read_text() == "precious"
    assert quantlab("compare", runs, "--json", "-o", "mine.json", "--force", cwd=tmp_path).returncode == 0
    assert json.loads(out.read_text())["baseline"] == "f16 ≈"


def test_a_terminal_that_lacks_a_sign_gets_an_escape(tmp_path: Path) -> None:
    done = quantlab("compare", stored(tmp_path), cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "f16 \\u2248" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_behind_stdout_is_an_error(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = quantlab("compare", stored(tmp_path), cwd=tmp_path, stdout=full)
    assert done.returncode == 1
    assert done.stderr.startswith("error: `output`: No space left on device\nhint: the disk is full")
    assert "Traceback" not in done.stderr


def test_quantize_prints_where_the_artifact_is(tmp_path: Path) -> None:
    write_folder(tmp_path / "tiny", "llama")
    done = quantlab("quantize", "tiny", "-m", "gguf", "--type", "Q8_0", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.endswith("written to artifacts/tiny-Q8_0.gguf\n")
    assert "tiny-Q8_0: quantize" in done.stderr
    done = quantlab("quantize", "tiny", "-m", "gguf", "--type", "Q4_0", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["spec"]["out"] == "artifacts/tiny-Q4_0.gguf"


def test_ctrl_c_says_what_is_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quantlab", "ppl", "tiny.gguf", "--data", "long.txt", "--n-ctx", "16"]
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "long.txt").write_text("some words of a long text\n" * 20_000)
    # A shell without a terminal starts its jobs deaf to Ctrl-C, and children inherit that.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, handler)
    assert process.stderr is not None
    for line in process.stderr:
        if "perplexity" in line:
            break
    process.send_signal(signal.SIGINT)
    assert "interrupted; finished results are kept in runs" in process.stderr.read()
    assert process.wait() == 130


def test_a_store_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "file").write_text("")
    done = quantlab("bench", "tiny.gguf", "-p", "8", "-n", "4", "--results", "file/runs", cwd=tmp_path)
    assert done.returncode == 1
    assert "`file` is no folder that you may write to\nhint: choose another with `--results`" in done.stderr
    assert "bench 8+4" not in done.stderr


@pytest.mark.skipif(sys.platform == "darwin", reason="file names are UTF-8 there")
def test_names_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    for arguments in (["inspect", "bad\udcff.gguf"], ["quantize", "tiny.gguf", "-m", "gguf", "-o", "bad\udcff.gguf"]):
        done = quantlab(*arguments, cwd=tmp_path)
        assert done.returncode in (1, 2)
        assert "bad\\udcff.gguf` is not UTF-8" in done.stderr


def test_recipe_errors_name_the_place(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: r\nmodels: demo\n")
    done = quantlab("run", "r.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "models" in done.stderr
    recipe.write_text("name: r\nmodels: [demo]\nquantise: []\n")
    done = quantlab("run", "r.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "quantise" in done.stderr
    for name in ("../../elsewhere", "/tmp/elsewhere", "''"):
        recipe.write_text(f"name: {name}\nmodels: [demo]\nbench: [{{}}]\n")
        done = quantlab("run", "r.yaml", cwd=tmp_path)
        assert done.returncode == 2
        assert "is no file name" in done.stderr


def test_what_ppl_measured_against_a_parent_is_compared_and_limited(tmp_path: Path) -> None:
    """The README's sequence: the parent has no run of its own, and yet the change of perplexity is known."""
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "text.txt").write_text("the cat sat on a mat in the sun. " * 60, "utf-8")
    made = quantlab(
        "quantize", "tiny.gguf", "-m", "gguf", "--type", "Q4_0", "-o", "q4.gguf", "--requantize", cwd=tmp_path
    )
    assert made.returncode == 0, made.stderr
    measure = ("ppl", "q4.gguf", "--against", "tiny.gguf", "--data", "text.txt", "-c", "32", "--limit", "4")
    done = quantlab(*measure, "--device", "cpu", "-t", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    checked = quantlab("compare", "--json", "--fail-above", "ppl=1000", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    parent, child = json.loads(checked.stdout)["rows"]
    assert (parent["label"], child["label"], child["baseline"]) == ("tiny", "q4", "tiny")
    own, theirs = child["metrics"]["ppl"], parent["metrics"]["ppl"]
    assert own["paired"] and own["ratio"]["low"] < own["ratio"]["estimate"] < own["ratio"]["high"]
    assert own["ratio"]["estimate"] == pytest.approx(own["value"] / theirs["value"])
    assert child["metrics"]["kld_mean"]["against"]["label"] == "tiny"
    # Among several models the parent is not measured against itself.
    both = quantlab(*measure, "tiny.gguf", "--device", "cpu", "-t", "1", "--json", cwd=tmp_path)
    assert ["kld_mean" in result["measurements"] for result in json.loads(both.stdout)] == [True, False]


def test_curves_of_another_version_withhold_no_table(tmp_path: Path) -> None:
    from quantlab.lab.store import encode
    from tests.comparison_cases import result

    (tmp_path / "runs").mkdir()
    stored = [bench("f16", F16, [1.0, 1.0, 1.0]), result("batching", "f16", F16, details={"row": 0})]
    (tmp_path / "runs" / "all.json").write_text(encode(stored), "utf-8")
    done = quantlab("compare", "--format", "csv", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].startswith("f16,")
    assert "error: stored Results of batching cannot be shown" in done.stderr
    (tmp_path / "runs" / "all.json").write_text(encode(stored[1:]), "utf-8")
    alone = quantlab("compare", cwd=tmp_path)
    assert (alone.returncode, "cannot be shown" in alone.stderr) == (1, True)
