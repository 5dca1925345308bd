"""Recipes end to end on a tiny folder: the table at the end, what is skipped, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.lab.execute import Lab, fingerprint, make_spec
from quantlab.lab.recipe import read_recipe, run_recipe
from quantlab.lab.steps import artifact_file, bench_steps, ppl_step, quantize_step
from quantlab.lab.store import Store, encode, load_results, read_results
from quantlab.quantize.engines import ENGINES
from quantlab.quantize.spec import QuantizeSpec
from tests.comparison_cases import F16, bench
from tests.hf_folders import TRAINING_TEXT, change_config, write_folder

RECIPE = """
name: tiny
models: [{model}]
quantize:
  - {{method: gguf, type: F16, out: {folder}/tiny-F16.gguf}}
  - {{method: gguf, type: Q8_0, out: {folder}/tiny-Q8_0.gguf}}
bench:
  - {{prompt_tokens: [16], new_tokens: 8, repeats: 3}}
ppl:
  - {{data: {folder}/text.txt, protocol: llama.cpp, n_ctx: 32, limit: 4, against: F16}}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with a tiny model, a text and a recipe."""
    model = tmp_path / "model"
    write_folder(model, "llama")
    (tmp_path / "text.txt").write_text(TRAINING_TEXT * 8)
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(model=model, folder=tmp_path))
    return tmp_path


def run(tiny: Path) -> list[str]:
    """Run the recipe; the ids of the Results, in order."""
    lab = Lab(Store(tiny / "runs"), offline=True)
    return [result.id for result in run_recipe(read_recipe(tiny / "tiny.yaml"), lab)]


def test_a_recipe_gives_every_result_and_a_second_run_does_nothing(tiny: Path) -> None:
    first = run(tiny)
    results = Store(tiny / "runs").load()
    assert sorted(result.kind for result in results) == ["bench"] * 2 + ["ppl"] * 2 + ["quantize"] * 2
    ppl = {result.label: result.measurements for result in results if result.kind == "ppl"}
    assert "kld_mean" in ppl["tiny-Q8_0"]
    assert "kld_mean" not in ppl["tiny-F16"]
    before = sorted((tiny / "runs").iterdir())
    assert run(tiny) == first
    assert sorted((tiny / "runs").iterdir()) == before


def test_a_missing_result_is_measured_again_and_only_that(tiny: Path) -> None:
    first = run(tiny)
    lost = next(path for path in (tiny / "runs").glob("*-ppl-tiny-Q8_0-*"))
    lost.unlink()
    second = run(tiny)
    assert len(set(first) - set(second)) == 1
    assert len(second) == len(first)


def test_an_artifact_that_was_changed_is_not_taken_for_done(tiny: Path) -> None:
    run(tiny)
    with (tiny / "tiny-Q8_0.gguf").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(QuantlabError, match="exists"):
        run(tiny)


def test_a_killed_run_continues(tiny: Path) -> None:
    command = [sys.executable, "-m", "quantlab", "run", "tiny.yaml", "--offline"]
    killed = 0
    for delay_s in (0.9, 1.8, 2.7):
        process = subprocess.Popen(command, cwd=tiny, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        for path in tiny.glob("runs/*.json"):
            read_results(path)
    assert killed
    done = subprocess.run(command, cwd=tiny, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tiny-Q8_0" in done.stdout
    assert len(list(tiny.glob("runs/*-ppl-*"))) == 2
    assert not list(tiny.glob("**/*.partial"))
    table = json.loads((tiny / "runs" / "tables" / "tiny.json").read_text())
    assert [row["label"] for row in table["rows"]] == ["tiny-F16", "tiny-Q8_0"]
    assert (tiny / "runs" / "tables" / "tiny.md").read_text().startswith("| model")


def test_a_killed_perplexity_leaves_nothing(tiny: Path) -> None:
    command = [sys.executable, "-m", "quantlab", "quantize", "model", "-m", "gguf", "--type", "F16", "-o", "f16.gguf"]
    subprocess.run([*command, "--no-save"], cwd=tiny, check=True, capture_output=True)
    (tiny / "long.txt").write_text(TRAINING_TEXT * 2000)
    command = [sys.executable, "-m", "quantlab", "ppl", "f16.gguf", "--data", "long.txt", "--n-ctx", "64"]
    process = subprocess.Popen(command, cwd=tiny, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "perplexity" in line:
            break
    [child] = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    assert process.returncode == -signal.SIGKILL
    child.wait(timeout=30)
    assert not (tiny / "runs").exists()


def test_misspelled_options_stop_a_recipe_before_its_first_step(tiny: Path) -> None:
    recipe = (tiny / "tiny.yaml").read_text()
    (tiny / "tiny.yaml").write_text(recipe.replace("limit: 4", "limitt: 4"))
    with pytest.raises(UsageError, match="limitt") as caught:
        run(tiny)
    assert "limit" in caught.value.hint
    assert not (tiny / "tiny-F16.gguf").exists()


def test_against_that_is_nothing_is_named(tiny: Path) -> None:
    recipe = (tiny / "tiny.yaml").read_text()
    (tiny / "tiny.yaml").write_text(recipe.replace("against: F16", "against: F61"))
    with pytest.raises(UsageError, match=r"F61.*F16, Q8_0"):
        run(tiny)
    assert not (tiny / "tiny-F16.gguf").exists()
    # As `type`, in any case.
    (tiny / "tiny.yaml").write_text(recipe.replace("against: F16", "against: f16"))
    assert run(tiny)


def test_artifacts_of_one_type_are_all_measured(tiny: Path) -> None:
    (tiny / "tiny.yaml").write_text(
        f"name: twins\nmodels: [{tiny}/model]\n"
        f"quantize: [{{type: Q8_0, out: {tiny}/all.gguf}}, {{type: Q8_0, out: {tiny}/part.gguf, skip: [attn_q]}}]\n"
        f"ppl: [{{data: {tiny}/text.txt, n_ctx: 32, limit: 2, against: {tiny}/part.gguf}}]\n"
    )
    first = run(tiny)
    found = {result.label: result for result in Store(tiny / "runs").load() if result.kind == "ppl"}
    assert "kld_mean" in found["all"].measurements
    assert "kld_mean" not in found["part"].measurements
    assert run(tiny) == first
    recipe = (tiny / "tiny.yaml").read_text()
    (tiny / "tiny.yaml").write_text(recipe.replace(f"against: {tiny}/part.gguf", "against: Q8_0"))
    with pytest.raises(UsageError, match="names several artifacts"):
        run(tiny)


def test_two_artifacts_of_one_name_stop_a_recipe_before_its_first_step(tiny: Path) -> None:
    recipe = (tiny / "tiny.yaml").read_text()
    (tiny / "tiny.yaml").write_text(recipe.replace("tiny-Q8_0.gguf", "./tiny-F16.gguf"))
    with pytest.raises(UsageError, match="two steps of the recipe write"):
        run(tiny)
    assert not (tiny / "tiny-F16.gguf").exists()


def test_an_output_in_the_way_stops_a_recipe_before_its_first_step(tiny: Path) -> None:
    (tiny / "tiny-Q8_0.gguf").write_text("precious")
    with pytest.raises(QuantlabError, match=r"tiny-Q8_0.gguf` exists"):
        run(tiny)
    assert not (tiny / "tiny-F16.gguf").exists()
    assert (tiny / "tiny-Q8_0.gguf").read_text() == "precious"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("text.txt, protocol", "no-text.txt, protocol", "no-text.txt"),
        ("{method: gguf, type: Q8_0,", "{method: gguf, type: Q8_0, imatrix: true, calib: [/no/text.txt],", "no/text"),
        ("{method: gguf, type: Q8_0, out", "{method: gptq, group_size: 128, out", "128 does not divide"),
        ("repeats: 3", "repeats: 3, runtime: torch", "`runtime: torch` does not read"),
        ("protocol: llama.cpp", "protocol: llama.cpp, device: cuba", "unknown device `cuba`"),
    ],
    ids=["text", "calibration", "shape", "runtime", "device"],
)
def test_what_a_later_step_would_refuse_stops_a_recipe_before_its_first_step(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, said: str
) -> None:
    monkeypatch.setattr("quantlab.quantize.torch_method.interpreter", lambda engine: Path(sys.executable))
    monkeypatch.setattr("quantlab.lab.recipe.importlib.util.find_spec", lambda name: name)
    change_config(tiny / "model", model_type="llama")
    recipe = (tiny / "tiny.yaml").read_text().replace(old, new)
    assert new in recipe
    (tiny / "tiny.yaml").write_text(recipe.replace("Q8_0.gguf", "Q8_0") if "gptq" in new else recipe)
    with pytest.raises(QuantlabError, match=said):
        run(tiny)
    assert not (tiny / "tiny-F16.gguf").exists()


def test_a_missing_engine_stops_a_recipe_before_its_first_step(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(engine: object) -> Path:
        raise QuantlabError("the engine is missing")

    monkeypatch.setattr("quantlab.quantize.torch_method.interpreter", missing)
    monkeypatch.setattr("quantlab.lab.recipe.importlib.util.find_spec", lambda name: name)
    recipe = (tiny / "tiny.yaml").read_text()
    new = f"  - {{method: rtn, group_size: 32, out: {tiny}/rtn}}\nbench:"
    (tiny / "tiny.yaml").write_text(recipe.replace("bench:", new))
    with pytest.raises(QuantlabError, match="the engine is missing"):
        run(tiny)
    assert not (tiny / "tiny-F16.gguf").exists()


def test_an_artifact_written_twice_under_two_names_is_known_by_each(tiny: Path) -> None:
    lab = Lab(Store(tiny / "runs"), offline=True)
    model = lab.model(str(tiny / "model"))
    for name in ("one", "two"):
        step = quantize_step(model, {"type": "Q8_0", "out": str(tiny / f"{name}.gguf")})
        lab.execute(step)
    [found] = lab.finished(step, [artifact_file(step.spec)])
    assert found.label == "two"


def test_offline_reaches_every_step(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tiny / "tiny.yaml").write_text(RECIPE.format(model=tiny / "model", folder=tiny))
    run(tiny)
    offline = [result.spec["offline"] for result in Store(tiny / "runs").load() if result.kind != "bench"]
    assert offline == [True] * 4


def test_a_prompt_file_is_read_in_a_recipe_too(tiny: Path) -> None:
    (tiny / "prompt.txt").write_text("words of a prompt")
    model = Lab(None).model(str(tiny / "model"))
    [step] = bench_steps([model], {"prompt": f"@{tiny}/prompt.txt"})
    assert step.spec.prompt == "words of a prompt"


def test_results_of_one_step_have_its_start_and_keep_their_order(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTLAB_CACHE", str(tiny / "cache"))
    lab = Lab(Store(tiny / "runs"), offline=True)
    models = [lab.runnables([str(tiny / "model")], {})[0]]
    models += [msgspec.structs.replace(models[0], label=label) for label in ("b", "a", "c")]
    [step] = bench_steps(models, {"prompt_tokens": [16], "new_tokens": 4, "repeats": 2})
    results = lab.execute(step)
    assert [result.label for result in Store(tiny / "runs").load()] == [model.label for model in models]
    assert len({result.started_at for result in results}) == 1
    # No time of the session is left out of any of them.
    assert min(result.duration_s for result in results) > sum(results[0].measurements["e2el"].samples)


def test_speed_is_measured_again_on_another_system_and_quality_is_not(tiny: Path) -> None:
    run(tiny)
    store = Store(tiny / "runs")
    for path in (tiny / "runs").glob("*.json"):
        [result] = read_results(path)
        env = msgspec.structs.replace(result.env, os="another kernel")
        path.write_text(encode(msgspec.structs.replace(result, env=env)))
    before = store.load()
    run(tiny)
    again = [result.kind for result in store.load() if result not in before]
    assert again == ["bench", "bench"]


def test_a_long_label_in_any_script_can_be_stored(tiny: Path) -> None:
    result = bench("模型" * 60, F16, [1.0])
    path = Store(tiny / "runs").save(result)
    assert read_results(path) == [result]


def test_a_result_that_cannot_be_stored_is_kept_elsewhere(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that filled up while it was measured."""
    result = bench("x", F16, [1.0])
    (tiny / "spare").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tiny / "spare"))
    (tiny / "full").write_text("no folder")
    with pytest.raises(QuantlabError, match="full") as caught:
        Store(tiny / "full").save(result)
    (spare,) = (tiny / "spare").iterdir()
    assert f"is kept as `{spare}`: move it to `{tiny / 'full'}`" in caught.value.hint
    assert read_results(spare) == [result]


def test_the_fingerprint_is_of_content_not_of_place(tiny: Path) -> None:
    model = Lab(None).model(str(tiny / "model"))
    moved = tiny / "elsewhere" / "model"
    moved.parent.mkdir()
    (tiny / "model").rename(moved)
    again = Lab(None).model(str(moved))
    assert fingerprint(ppl_step(model, {})) == fingerprint(ppl_step(again, {}))
    assert fingerprint(ppl_step(model, {})) != fingerprint(ppl_step(model, {"limit": 3}))
    assert fingerprint(quantize_step(model, {})) == fingerprint(quantize_step(model, {"out": "x.gguf", "force": True}))
    with (moved / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    changed = Lab(None).model(str(moved))
    assert fingerprint(ppl_step(model, {})) != fingerprint(ppl_step(changed, {}))


def test_a_tokenizer_that_changed_changes_the_model(tiny: Path) -> None:
    before = Lab(None).model(str(tiny / "model")).sha256
    settings = tiny / "model" / "tokenizer_config.json"
    content = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps({**content, "add_bos_token": not content.get("add_bos_token", False)}))
    assert Lab(None).model(str(tiny / "model")).sha256 != before


def test_a_converter_that_changed_changes_the_fingerprint(tiny: Path) -> None:
    model = Lab(None).model(str(tiny / "model"))
    step = quantize_step(model, {"converter": str(tiny / "convert.py")})
    (tiny / "convert.py").write_text("one")
    one = fingerprint(step)
    (tiny / "convert.py").write_text("other")
    assert fingerprint(step) != one


def test_other_versions_of_an_engine_change_the_fingerprint(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run in an environment of its own, which `env` of the Result does not show."""
    model = Lab(None).model(str(tiny / "model"))
    awq = quantize_step(model, {"method": "awq", "engine": "autoawq", "group_size": 32})
    gguf = quantize_step(model, {})
    before = fingerprint(awq), fingerprint(gguf)
    newer = msgspec.structs.replace(ENGINES["autoawq"], pins={**ENGINES["autoawq"].pins, "torch": "2.6.1"})
    monkeypatch.setitem(ENGINES, "autoawq", newer)
    assert fingerprint(awq) != before[0]
    assert fingerprint(gguf) == before[1]


def test_progress_names_a_folder_with_dots_whole(tiny: Path) -> None:
    said = []
    lab = Lab(None, progress=lambda stage, done, total: said.append(stage))
    step = quantize_step(lab.model(str(tiny / "model")), {"method": "rtn", "out": "Qwen2.5-0.5B-RTN"})
    lab._progress_of(step)("layer", 0, 1)
    assert said == ["Qwen2.5-0.5B-RTN: layer"]


def test_a_text_that_changed_changes_the_fingerprint(tiny: Path) -> None:
    model = Lab(None).model(str(tiny / "model"))
    one, other = tiny / "one.txt", tiny / "other.txt"
    one.write_text("first text\n")
    other.write_text("second text\n")
    (tiny / "copy.txt").write_text("first text\n")
    ppl = [fingerprint(ppl_step(model, {"data": str(path)})) for path in (one, tiny / "copy.txt", other)]
    assert ppl[0] == ppl[1] != ppl[2]
    calib = [
        fingerprint(quantize_step(model, {"imatrix": True, "calib": [f"{path}:2"]}))
        for path in (one, tiny / "copy.txt", other)
    ]
    assert calib[0] == calib[1] != calib[2]


def test_a_bench_of_several_cells_is_several_steps(tiny: Path) -> None:
    model = Lab(None).model(str(tiny / "model"))
    steps = list(bench_steps([model], {"prompt_tokens": [8, 16], "batch": [1, 2]}))
    assert len({fingerprint(step) for step in steps}) == 4


def test_options_are_checked_by_name_and_type(tiny: Path) -> None:
    model = Lab(None).model(str(tiny / "model"))
    with pytest.raises(UsageError, match="imatrx") as caught:
        make_spec(QuantizeSpec, {"model": model, "out": "", "imatrx": True})
    assert "imatrix" in caught.value.hint
    with pytest.raises(UsageError, match="Expected `int`"):
        make_spec(QuantizeSpec, {"model": model, "out": "", "seed": "zero"})


def test_results_come_back_as_they_were_stored(tiny: Path) -> None:
    run(tiny)
    store = Store(tiny / "runs")
    results = store.load()
    (tiny / "list.json").write_text(encode(results))
    assert load_results([tiny / "list.json"]) == results
    for result in results:
        assert json.loads(encode(result))["schema"] == 1
    with pytest.raises(QuantlabError, match="is no Result"):
        (tiny / "bad.json").write_text("{}")
        load_results([tiny / "bad.json"])
    with pytest.raises(QuantlabError, match="schema 2"):
        (tiny / "new.json").write_text(encode(results[0]).replace('"schema": 1', '"schema": 2'))
        load_results([tiny / "new.json"])


def test_a_damaged_conversion_in_the_cache_is_made_again(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTLAB_CACHE", str(tiny / "cache"))
    first = Lab(None).runnables([str(tiny / "model")], {})[0]
    made = Path(first.path).stat().st_mtime_ns
    assert Lab(None).runnables([str(tiny / "model")], {})[0] == first
    assert Path(first.path).stat().st_mtime_ns == made
    with Path(first.path).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert Lab(None).runnables([str(tiny / "model")], {})[0] == first
    Path(f"{first.path}.json").write_text("{}")
    assert Lab(None).runnables([str(tiny / "model")], {})[0] == first


def test_two_runs_convert_a_folder_once(tiny: Path) -> None:
    command = [sys.executable, "-m", "quantlab", "ppl", "model", "--data", "text.txt", "--n-ctx", "32", "--no-save"]
    env = {**os.environ, "QUANTLAB_CACHE": str(tiny / "cache")}
    runs = [subprocess.Popen(command, cwd=tiny, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[1] for process in runs]
    assert [process.returncode for process in runs] == [0, 0]
    assert sum("converting" in text for text in said) == 1
