"""`quantlab batching` through recipes, tables and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from quantlab.core.artifact import content_sha256
from quantlab.core.errors import UsageError
from quantlab.core.model import ModelFile
from quantlab.lab.execute import Lab, fingerprint
from quantlab.lab.recipe import read_recipe, run_recipe
from quantlab.lab.steps import batching_step
from quantlab.lab.store import Store
from quantlab.report.batching import tabulate_batching
from quantlab.report.render import markdown
from tests.tiny_gguf import write_gguf

NAMES = {"ttft", "tpot", "queue_delay", "predicted_queue_delay", "utilization", "goodput", "rejected", "preempted"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, kind=gguf.GGMLQuantizationType.F32)
    return ModelFile(str(path), "tiny", str(path), content_sha256(path))


def test_a_recipe_runs_it_once_and_resumes(tiny: ModelFile, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        f"name: r\nmodels: [{tiny.path}]\nbatching:\n  - {{parts: [load], utilization: [0.5], requests: 60,"
        " ttft_slo: 400ms, simulate: true, bandwidth: 1e7, flops: 3e7}\n"
    )
    lab = Lab(Store(tmp_path / "runs"), offline=True)
    recipe = read_recipe(tmp_path / "r.yaml")
    first = [result.id for result in run_recipe(recipe, lab)]
    assert len(first) == 2
    assert [result.id for result in run_recipe(recipe, lab)] == first
    # A session that did not come to its end is none.
    last = next(path for path in (tmp_path / "runs").glob("*.json") if '"complete": true' in path.read_text())
    last.unlink()
    assert not set(first) & {result.id for result in run_recipe(recipe, lab)}


def test_a_misspelled_option_of_a_recipe_stops_it_before_the_first_step(tiny: ModelFile, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"name: r\nmodels: [{tiny.path}]\nbatching:\n  - {{polici: fcfs}}\n")
    with pytest.raises(UsageError, match="unknown option `polici`"):
        run_recipe(read_recipe(tmp_path / "r.yaml"), Lab(Store(tmp_path / "runs")))


def test_a_trace_that_changed_is_another_step(tiny: ModelFile, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a")
    before = fingerprint(batching_step(tiny, {"trace": str(path)}))
    path.write_text("b")
    assert fingerprint(batching_step(tiny, {"trace": str(path)})) != before
    assert fingerprint(batching_step(tiny, {"rate": "1,2"})) == fingerprint(batching_step(tiny, {"rate": [1.0, 2.0]}))


def quantlab(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quantlab", "batching", *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"}
    )


def test_the_command_prints_tables_and_json(tiny: ModelFile, tmp_path: Path) -> None:
    options = ["--simulate", "--bandwidth", "1e7", "--flops", "3e7", "--requests", "100", "-p", "8", "-n", "4"]
    done = quantlab(tiny.path, *options, "-b", "1,2", "--ttft-slo", "400ms", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for shown in (
        "batch size, simulated",
        "knee",
        "M/G/1",
        "queue delay",
        "meets the limits",
        "guarded",
        "its bound",
        "roofline",
    ):
        assert shown in done.stdout
    done = quantlab(tiny.path, *options, "--parts", "load", "--json", "--no-save", cwd=tmp_path)
    results = json.loads(done.stdout)
    assert [(r["kind"], r["details"]["part"]) for r in results] == [("batching", "capacity")] + [
        ("batching", "load")
    ] * 4
    assert set(results[1]["measurements"]) >= NAMES


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--rate", "0"], 2, "no number above zero"),
        (["--rate", "fast"], 2, "no number above zero"),
        (["--ttft-slo", "0"], 2, "above zero"),
        (["--ttft-slo", "500"], 2, "seconds or milliseconds"),
        (["--policy", "prio"], 2, "did you mean `priority`"),
        (["--trace", "none.csv"], 1, "No such file"),
        (["--model", "x"], 2, "of an endpoint"),
    ],
)
def test_wrong_use_is_named(tiny: ModelFile, tmp_path: Path, arguments: list[str], code: int, says: str) -> None:
    done = quantlab(tiny.path, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_tables_tell_every_row_and_render_as_markdown(tiny: ModelFile, tmp_path: Path) -> None:
    virtual = {"simulate": True, "bandwidth": 1e7, "flops": "3e7"}
    step = batching_step(tiny, {"requests": 60, "utilization": "0.5,0.9", "batch": "1,2", **virtual})
    results = Lab(Store(tmp_path / "runs")).execute(step)
    tables = tabulate_batching(results[::-1])
    assert [len(table.rows) for table in tables][:2] == [2, 2]
    assert [row[0].text for row in tables[-1].rows] == ["fcfs", "priority", "preemption", "guarded"]
    assert all(len(row) == len(table.heads) for table in tables for row in table.rows)
    assert all(markdown(table).startswith("| ") for table in tables)
    assert tabulate_batching([r for r in results if r.details["part"] == "capacity"])[0].rows
