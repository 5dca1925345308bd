"""`quantlab speculative` through the lab, recipes, tables and the command line, on stories260K in llama.cpp."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp")

from quantlab.bench.speculative.spec import DraftSource
from quantlab.core.artifact import content_sha256
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.model import ModelFile
from quantlab.core.result import Result
from quantlab.lab.execute import Lab, fingerprint
from quantlab.lab.recipe import read_recipe, run_recipe
from quantlab.lab.speculative import found, parse_draft, speculative_step
from quantlab.lab.store import Store
from quantlab.report.curves import tabulate_stored_curves
from quantlab.report.render import markdown
from quantlab.report.speculative import tabulate_speculative
from tests.tiny_gguf import write_gguf

# The contract's names.
NAMES = {
    "acceptance_rate", "acceptance_rate_per_position", "mean_tokens_per_verify", "predicted_speedup", "speedup",
    "draft_cost_ratio", "output_identity",
}  # fmt: skip
FEW = {"k": "1,3", "new_tokens": 16, "prompts_per_category": 1, "n_ctx": 512, "threads": 1}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _in_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTLAB_CACHE", str(cache))


@pytest.fixture(scope="module")
def target(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from quantlab.quantize.convert import convert

    path = tmp_path_factory.mktemp("target") / "stories.gguf"
    convert(stories, path, outtype="F32")
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("other") / "other.gguf"
    write_gguf(path)
    return path


def measured(target: Path, lab: Lab, **options: Any) -> list[Result]:
    options = FEW | options
    return lab.execute(speculative_step(*found(lab, str(target), options), options))


def test_every_row_has_the_contracts_numbers_and_the_answer_a_reason(target: Path, tmp_path: Path) -> None:
    lab = Lab(Store(tmp_path / "runs"), offline=True)
    results = measured(target, lab, draft=["self:Q4_0", "ngram"], batch="1,2")
    rows = [r for r in results if r.details["part"] == "k"]
    assert [(r.details["draft"], r.details["batch"], r.details["k"]) for r in rows] == [
        (draft, batch, k) for draft in ("self:Q4_0", "ngram") for batch in (1, 2) for k in (1, 3, None)
    ]
    for row in rows:
        assert row.kind == "speculative"
        # The adaptive length may find that nothing is worth a try.
        silent = {"predicted_speedup", "acceptance_rate", "acceptance_rate_per_position"}
        assert set(row.measurements) >= NAMES - (silent if row.details["drafted"] == 0 else set())
        assert set(row.measurements["output_identity"].samples) == {1.0}
        assert set(row.details["categories"]) == {"code", "chat", "maths", "summarization", "retrieval"}
        assert row.details["divergence"] is None
        assert "draft-larger" not in {w.code for w in row.warnings}
    copy = [r for r in rows if r.details["draft"] == "self:Q4_0" and r.details["k"] == 3]
    for row in copy:
        # Its own copy in 4 bits says mostly the same.
        assert row.details["accepted"] / row.details["tested"] > 0.6
        per_position = row.measurements["acceptance_rate_per_position"].samples
        assert len(per_position) == 3
        tokens = row.measurements["mean_tokens_per_verify"].samples
        assert row.details["expected_tokens_per_verify"] == pytest.approx(sum(tokens) / len(tokens), rel=0.25)
        loaded = row.details
        assert 0.1 < loaded["draft_bytes"] / loaded["target_weight_bytes"] < 2
    assert all(r.details["draft_bytes"] == 0 for r in rows if r.details["draft"] == "ngram")
    # One model of this size is no slower than another: a copy cannot pay, and the reason is told.
    answers = [r for r in results if r.details["part"] == "answer"]
    assert [a.details["draft"] for a in answers] == ["self:Q4_0", "ngram"]
    assert [a.details["complete"] for a in answers] == [False, True]
    for batch in answers[0].details["batches"]:
        assert batch["pays"] is not True
        assert batch["reason"]["dimension"] in ("draft cost", "acceptance", "batch", "K", "overhead")
    tables = tabulate_speculative(results[::-1])
    assert [len(table.rows) for table in tables] == [12, 20]
    assert all(len(row) == len(table.heads) for table in tables for row in table.rows)
    assert any("self:Q4_0, batch 1" in name for name, _ in tables[0].verdicts)
    assert "| self:Q4_0 | 1 | 3 |" in markdown(tables[0])
    # What is stored shows the same, the newest session alone.
    again = measured(target, lab, draft="ngram", k="1", adaptive=False)
    shown = tabulate_stored_curves([*results, *again])
    assert [len(table.rows) for table in shown] == [12, 20, 1, 5]


def test_sampling_has_no_identity_and_repeats_itself(target: Path, tmp_path: Path) -> None:
    lab = Lab(None, offline=True)
    options = {"k": "2", "temperature": 0.9, "adaptive": False, "categories": "chat,code"}
    first, again = (measured(target, lab, draft="self:Q4_0", **options) for _ in range(2))
    assert "output_identity" not in first[0].measurements
    for name in ("accepted", "tested", "new_tokens"):
        assert first[0].details[name] == again[0].details[name] > 0


def test_a_recipe_runs_it_once_and_a_prompt_file_that_changed_is_another_step(target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"category": "coding", "turns": ["Once upon a time"]}\n')
    (tmp_path / "r.yaml").write_text(
        f"name: r\nmodels: [{target}]\nspeculative:\n  - {{draft: ngram, k: 2, new_tokens: 8, adaptive: false,"
        f" prompts: {prompts}, n_ctx: 256, threads: 1}}\n"
    )
    lab, recipe = Lab(Store(tmp_path / "runs"), offline=True), read_recipe(tmp_path / "r.yaml")
    first = [result.id for result in run_recipe(recipe, lab)]
    assert len(first) == 2
    assert [result.id for result in run_recipe(recipe, lab)] == first
    model = ModelFile(str(target), "m", "m", content_sha256(target))
    step = speculative_step(model, [DraftSource("ngram", "ngram")], {"prompts": str(prompts)})
    before = fingerprint(step)
    prompts.write_text('{"category": "coding", "turns": ["Once upon"]}\n')
    assert fingerprint(step) != before


def test_a_wrong_option_of_a_recipe_stops_it_before_the_first_step(target: Path, tmp_path: Path) -> None:
    for entry, says in (("{drafts: ngram}", "unknown option `drafts`"), ("{draft: 'self:Q9'}", "unknown type `Q9`")):
        (tmp_path / "r.yaml").write_text(f"name: r\nmodels: [{target}]\nspeculative:\n  - {entry}\n")
        with pytest.raises(UsageError, match=says):
            run_recipe(read_recipe(tmp_path / "r.yaml"), Lab(Store(tmp_path / "runs")))


# What drafts


def test_drafts_are_read_as_they_are_written() -> None:
    assert parse_draft("ngram") == ("ngram", "", "ngram", False)
    assert parse_draft("self:q4_k_m") == ("draft", "Q4_K_M", "self:q4_k_m", True)
    assert parse_draft("medusa:a:b.st") == ("medusa", "a:b.st", "medusa:a:b.st", False)
    assert parse_draft("org/name@main") == ("draft", "org/name@main", "org/name@main", False)
    for text, says in (("eagle:", "names no file"), (" ", "is empty"), ("self:", "unknown type")):
        with pytest.raises(UsageError, match=says):
            parse_draft(text)


def test_vocabularies_that_differ_are_refused_with_the_first_difference(target: Path, other: Path) -> None:
    with pytest.raises(QuantlabError, match="the vocabularies differ: token 0 is '<unk>' in the target") as caught:
        measured(target, Lab(None, offline=True), draft=str(other))
    assert "ngram" in caught.value.hint


def test_a_draft_larger_than_the_target_is_warned_of(target: Path) -> None:
    lab = Lab(None, offline=True)
    small = found(lab, str(target), {"draft": "self:Q4_0"})[1][0].model
    assert small is not None
    results = measured(Path(small.path), lab, draft=str(target), k="1", adaptive=False, categories="chat")
    assert "draft-larger" in {w.code for w in results[0].warnings}


def test_drafts_of_one_name_are_told_apart_as_they_were_written(target: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(target, tmp_path / name / "small.gguf")
    texts = [str(tmp_path / name / "small.gguf") for name in ("a", "b")]
    lab = Lab(None, offline=True)
    assert [draft.label for draft in found(lab, str(target), {"draft": texts})[1]] == texts
    assert [draft.label for draft in found(lab, str(target), {"draft": texts[:1]})[1]] == ["small"]
    with pytest.raises(UsageError, match="given twice"):
        measured(target, lab, draft=texts[:1] * 2)


def test_a_k_beyond_the_context_and_heads_for_llamacpp_are_refused(target: Path) -> None:
    lab = Lab(None, offline=True)
    with pytest.raises(UsageError, match="holds 512"):
        measured(target, lab, draft="ngram", new_tokens=600, n_ctx=2048)
    with pytest.raises(UsageError, match="GGUF file, and torch reads none"):
        measured(target, lab, draft="medusa:none.safetensors")
    with pytest.raises(UsageError, match=r"llama\.cpp gives none"):
        measured(target, lab, draft="eagle:none.safetensors", runtime="llamacpp")
    with pytest.raises(UsageError, match="a server drafts by itself"):
        found_for_server = found(lab, "http://127.0.0.1:9/v1", {"draft": "ngram"})
        speculative_step(*found_for_server, {})


# The command


def quantlab(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quantlab", "speculative", *arguments]
    environment = {**os.environ, "COLUMNS": "220"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=environment)


def test_the_command_prints_tables_and_json(target: Path, tmp_path: Path) -> None:
    options = ["--draft", "ngram", "-k", "2", "-n", "12", "--prompts-per-category", "1", "-c", "512", "-t", "1"]
    done = quantlab(*options, str(target), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for shown in ("speculative decoding, llamacpp", "adaptive", "ngram, batch 1", "by category", "retrieval"):
        assert shown in done.stdout
    done = quantlab(str(target), *options, "--json", "--no-save", "--no-adaptive", cwd=tmp_path)
    assert [(r["kind"], r["details"]["part"]) for r in json.loads(done.stdout)] == [
        ("speculative", "k"), ("speculative", "answer")
    ]  # fmt: skip


# What is refused, by exit code and message; M is the GGUF file, S the folder.
REFUSED: list[tuple[str, int, str]] = [
    ("M", 2, "nothing drafts"),
    ("M --draft ngram -k x", 2, "`x` is no size"),
    ("M --draft ngram -k 0", 2, "`0` is no size"),
    ("M --draft ngram --prompts none.jsonl", 1, "No such file"),
    ("M --draft none.gguf", 1, "does not exist"),
    ("M --draft ngram --model x", 2, "of an endpoint"),
    ("M --draft ngram --temperature -1", 2, "`--temperature` -1"),
    ("M --draft ngram -k 2 -n 3", 2, "raise `--new-tokens` to 4"),
    ("S --draft medusa:none.safetensors", 1, "`none.safetensors` is no file"),
    ("S --draft medusa:S/model.safetensors", 1, "holds no heads of quantlab"),
    ("train M", 2, "GGUF file, and torch reads none"),
    ("train S -m medusas", 2, "did you mean `medusa`"),
    ("train S -o heads.bin", 2, "does not end in .safetensors"),
    ("train S --heads 0", 2, "`--heads` 0"),
]
# All in one process: most of a command's time is its start.
DRIVER = """
import contextlib, io, json, sys
from quantlab.cli.app import main
done = []
for arguments in json.load(sys.stdin):
    sys.argv, out, err, code = ["quantlab", "speculative", *arguments], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    done.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(done))
"""


@pytest.fixture(scope="module")
def refusals(target: Path, stories: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    places = {"M": str(target), "S": str(stories), "medusa:S/model.safetensors": f"medusa:{stories}/model.safetensors"}
    calls = [[places.get(word, word) for word in words.split()] for words, _, _ in REFUSED]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(calls),
        cwd=tmp_path_factory.mktemp("refused"),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "QUANTLAB_CACHE": str(cache)},
    )
    return dict(zip((words for words, _, _ in REFUSED), json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("words", "code", "says"), REFUSED)
def test_wrong_use_is_named(refusals: dict[str, Any], words: str, code: int, says: str) -> None:
    exit_code, shown, said = refusals[words]
    assert (exit_code, shown) == (code, "")
    assert says in said
    assert "Traceback" not in said
