"""The front door: what it imports, what it refuses, and with which exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

HEAVY = ("torch", "transformers", "numpy", "llama_cpp", "scipy", "gguf", "datasets", "huggingface_hub", "tokenizers")


def quantlab(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "quantlab", *arguments], capture_output=True, text=True, check=False, cwd=cwd
    )


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nsys.argv = ['quantlab', '--help']\nfrom quantlab.cli.app import main\n"
        "try:\n main()\nexcept SystemExit:\n pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.rstrip().endswith("[]")


@pytest.mark.parametrize("command", ["doctor", "quantize", "inspect", "bench", "ppl", "compare", "run"])
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
