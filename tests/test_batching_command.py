"""`quantlab batching` through recipes, tables and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest

from quantlab.core.artifact import content_sha256
from quantlab.core.errors import UsageError
from quantlab.core.model import ModelFile
from quantlab.core.units import change
from quantlab.lab.execute import Lab, fingerprint
from quantlab.lab.recipe import read_recipe, run_recipe
from quantlab.lab.steps import batching_step
from quantlab.lab.store import Store
from quantlab.report.batching import tabulate_batching
from quantlab.report.batching_compare import tabulate_stored
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
        (["--policy", "admision"], 2, "did you mean `admission`"),
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
    # A simulation has no answers to compare.
    assert "same answers" not in [head.title for head in tables[0].heads]
    assert "32 prompt tokens and 32 new ones" in tables[0].notes[0]
    assert tabulate_batching([r for r in results if r.details["part"] == "capacity"])[0].rows


def test_a_prediction_beyond_the_interval_is_told_where_no_assumption_is_broken() -> None:
    from quantlab.report.batching import _theory

    told = {"mm1_holds": False, "mg1_holds": False, "mm1_broken": ["exponential service"], "mg1_broken": []}
    assert _theory(told) == (
        "M/G/1 beyond the interval without a broken assumption (by chance one in 20 is), M/M/1 beyond it. Broken: "
        "exponential service"
    )
    assert _theory({**told, "mg1_holds": True}).startswith("M/G/1 within the interval, M/M/1 beyond it. Broken: ")


# stored results


@pytest.fixture(scope="module")
def stored(tiny: ModelFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sessions of two models that were asked alike, and one of another spec."""
    folder = tmp_path_factory.mktemp("stored")
    larger = folder / "larger.gguf"
    write_gguf(larger, kind=gguf.GGMLQuantizationType.F32, layers=4)
    other = ModelFile(str(larger), "larger", str(larger), content_sha256(larger))
    options: dict[str, Any] = {"simulate": True, "bandwidth": 1e7, "flops": "3e7", "requests": 400, "batch": "1,2"}
    options |= {"parts": "batch,load,sla", "utilization": "0.5", "ttft_slo": "2s", "tpot_slo": "1s"}
    lab = Lab(Store(folder / "runs"))
    for model in (tiny, other):
        lab.execute(batching_step(model, options))
    lab.execute(batching_step(tiny, {**options, "seed": 1}))
    return folder / "runs"


def test_stored_sessions_are_shown_again_and_models_beside_one_another(stored: Path) -> None:
    results = Store(stored).load()
    tables = tabulate_stored(results[::-1])
    titles = [table.title.partition(":")[0] for table in tables]
    assert titles == ["tiny"] * 3 + ["larger"] * 3 + ["tiny"] * 3 + [
        "batch sizes of several models", "load of several models",
    ]  # fmt: skip
    batches, loads = tables[-2:]
    assert [(row[0].text, row[1].text) for row in batches.rows] == [
        ("tiny", "1"), ("tiny", "2"), ("larger", "1"), ("larger", "2"),
    ]  # fmt: skip
    # Without a spread the ratio is the roofline's own.
    first = {r.label: r for r in results if r.details["part"] == "batch" and r.details["batch"] == 1}
    ratio = first["larger"].measurements["tpot"].samples[0] / first["tiny"].measurements["tpot"].samples[0]
    assert batches.rows[2][2].change == change(ratio)
    assert "larger" in dict(batches.verdicts)
    assert loads.rows[1][1].change.startswith("-")
    assert "-" in loads.rows[0][3].text
    assert tabulate_stored(results, "larger")[-1].rows[0][0].text == "larger"
    with pytest.raises(UsageError, match="unknown baseline"):
        tabulate_stored(results, "none")


def test_of_one_step_the_newest_whole_session_is_shown(stored: Path, tiny: ModelFile) -> None:
    results = [r for r in Store(stored).load() if r.spec["seed"] == 1]
    later = [msgspec.structs.replace(r, started_at="2999", details={**r.details, "session": "s"}) for r in results]
    assert len(tabulate_stored(results + later)) == 3
    # A later one that was ended early does not take its place; alone it is shown.
    assert [r.details["complete"] for r in later].count(True) == 1
    cut = [r for r in later if not r.details["complete"]]
    shown = tabulate_stored(results + cut)
    assert shown == tabulate_stored(results)
    assert tabulate_stored(cut)


def test_compare_prints_stored_sessions(stored: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quantlab", "compare", str(stored)]
    wide = {**os.environ, "COLUMNS": "200"}

    def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False, env=wide
        )

    done = compare()
    assert (done.returncode, done.stderr) == (0, "")
    assert "batch sizes of several models" in done.stdout
    done = compare("-o", "out.md")
    assert (done.returncode, done.stdout) == (0, "")
    assert (tmp_path / "out.md").read_text().count("## ") == 11
    for wrong, says in (("--format=csv", "results are curves"), ("--fail-above=tpot=5", "results are curves")):
        done = compare(wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert says in done.stderr
