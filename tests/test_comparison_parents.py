"""Each artifact beside its own parent: families, what was measured beside a child, references of KLD, notes folded."""

from __future__ import annotations

import math

import msgspec
import pytest

from quantlab.core.errors import QuantlabError
from quantlab.core.result import ModelInfo, Notice, Result, TensorType
from quantlab.core.statistics import mean_interval
from quantlab.report.comparison import Comparison, compare
from quantlab.report.limits import Limit, crossed
from quantlab.report.render import FORMATS
from quantlab.report.table import tabulate
from tests.comparison_cases import ENV, NLL, RUNTIME, bench, measured, ppl, result, value

REPLACE = msgspec.structs.replace
TORCH = REPLACE(RUNTIME, name="torch", version="2.13", dtype="float32")


def model(name: str, method: str = "gguf", *, of: str | None = None, weights: int = 1000) -> ModelInfo:
    """A model whose hash is its name; `of` is the name of its parent."""
    kind = "F16" if method == "none" else "Q4_0"
    return ModelInfo(
        name, "gguf", method, weights, 4.5, {kind: TensorType(1, weights)}, None, of, name, parent_sha256=of
    )


FOLDER = model("folder", "none")
F16, Q4, Q8 = model("F16", "none", of="folder"), model("Q4", of="folder"), model("Q8", of="folder")
QWEN, QWEN_Q4 = model("qwen-F16", "none", of="qwen", weights=5000), model("qwen-Q4", of="qwen", weights=5000)


def benched(*models: ModelInfo, **given: object) -> list[Result]:
    return [bench(m.source, m, [1.0, 1.1, 1.0], **given) for m in models]


def beside(child: ModelInfo, parent: ModelInfo, nll: list[float], parents: list[float], **given: object) -> Result:
    """A ppl Result as `ppl CHILD --against PARENT` leaves it."""
    details = {
        "against": {"label": parent.source, "sha256": parent.sha256},
        "against_ppl": math.exp(sum(parents) / len(parents)),
        "against_model": msgspec.to_builtins(parent),
        "against_runtime": msgspec.to_builtins(RUNTIME),
        "top1_agreement_stderr": 0.01,
    }
    made = ppl(child.source, child, nll, details=details, numbers={"kld_mean": 0.05}, **given)
    extra = {"against_nll": REPLACE(measured(nll=parents)["nll"], better="none")}
    return REPLACE(made, measurements=made.measurements | extra)


def bases(comparison: Comparison) -> dict[str, str]:
    return {row.artifact.label: row.base.label for row in comparison.rows}


# Families


def test_each_artifact_is_compared_with_its_own_parent_and_stands_in_its_group():
    comparison = compare(benched(QWEN_Q4, F16, Q4, QWEN, Q8))
    assert bases(comparison) == {"F16": "F16", "Q4": "F16", "Q8": "F16", "qwen-F16": "qwen-F16", "qwen-Q4": "qwen-F16"}
    assert list(bases(comparison)) == ["F16", "Q4", "Q8", "qwen-F16", "qwen-Q4"]
    assert value(comparison, "qwen-Q4", "size_bytes").verdict == "same"
    assert comparison.baseline == "F16"
    table = tabulate(comparison)
    assert [head.title for head in table.heads][:2] == ["model", "against"]
    assert [str(row[1]) for row in table.rows] == ["", "F16", "F16", "", "qwen-F16"]
    rows = msgspec.json.decode(FORMATS["json"](comparison))["rows"]
    assert [row["baseline"] for row in rows] == ["F16", "F16", "F16", "qwen-F16", "qwen-F16"]


def test_one_family_needs_no_column_of_parents():
    assert "against" not in {head.title for head in tabulate(compare(benched(F16, Q4))).heads}


def test_unrelated_models_have_no_changes_and_a_note_says_why():
    comparison = compare(benched(F16, QWEN_Q4))
    assert bases(comparison) == {"F16": "F16", "qwen-Q4": "qwen-Q4"}
    assert value(comparison, "qwen-Q4", "tpot").verdict == "baseline"
    assert comparison.notes == [
        "compared with no other model: `F16`, `qwen-Q4` (made from `qwen`, which has no Result here); measure the "
        "parent, or name a baseline: `quantlab compare --baseline LABEL`"
    ]
    assert "changes are against" not in tabulate(comparison).notes[0]
    assert compare(benched(F16)).notes == []


def test_the_user_may_name_one_baseline_for_unrelated_models():
    comparison = compare(benched(F16, Q4, QWEN, QWEN_Q4), baseline="Q4")
    assert set(bases(comparison).values()) == {"Q4"}
    assert value(comparison, "qwen-Q4", "size_bytes").ratio.estimate == 5
    assert comparison.notes == [
        "of another origin than `Q4`, as far as is known, and yet compared with it: `qwen-F16`, `qwen-Q4`"
    ]


def test_siblings_without_their_parent_are_compared_with_the_first():
    comparison = compare(benched(F16, QWEN_Q4, model("qwen-Q8", of="qwen", weights=5000)))
    assert bases(comparison)["qwen-Q8"] == "qwen-Q4"
    assert any(note.startswith("`qwen-Q4`, `qwen-Q8` are compared with the first of them") for note in comparison.notes)


def test_a_parent_that_is_quantized_itself_is_the_baseline_of_what_was_made_from_it():
    again = model("Q2", of="Q8")
    assert bases(compare(benched(again, F16, Q8))) == {"F16": "F16", "Q8": "F16", "Q2": "Q8"}
    comparison = compare(benched(again, Q8))
    assert bases(comparison) == {"Q8": "Q8", "Q2": "Q8"}
    assert comparison.notes == []
    assert crossed(comparison, [Limit("tpot", 5)]) == []


def test_of_several_forms_of_the_parent_the_one_that_ran_alike_is_taken():
    awq = model("AWQ", "awq", of="folder")
    comparison = compare([*benched(FOLDER, awq, runtime=TORCH), *benched(F16, Q4)], allow_env_diff=True)
    assert bases(comparison) == {"folder": "folder", "AWQ": "folder", "F16": "F16", "Q4": "F16"}
    # What was measured of only one form decides.
    comparison = compare([*benched(FOLDER, awq, runtime=TORCH), *benched(Q4), result("quantize", "F16", F16)])
    assert bases(comparison)["Q4"] == "folder"
    assert bases(comparison)["F16"] == "folder"


def test_records_in_a_circle_end():
    a, b = model("a", of="b"), model("b", of="a")
    assert {row.artifact.label for row in compare(benched(a, b)).rows} == {"a", "b"}


def test_a_file_without_a_record_is_compared_with_the_one_model_of_its_size_and_a_note_says_so():
    stray = model("download")
    comparison = compare(benched(F16, stray, QWEN))
    assert bases(comparison)["download"] == "F16"
    said = "no record tells what `download` was made from; it is compared with `F16`, the only unquantized model here"
    assert any(note.startswith(said) for note in comparison.notes)
    # Two of its size: nothing tells which.
    twin = model("twin", "none")
    comparison = compare(benched(F16, twin, stray))
    assert bases(comparison)["download"] == "download"
    assert any("`download` (no record tells of its parent)" in note for note in comparison.notes)
    # What the user measured it against tells.
    against = beside(stray, twin, NLL, NLL)
    assert bases(compare([*benched(F16, twin, stray), against]))["download"] == "twin"


def test_a_recorded_parent_is_believed_more_than_what_was_measured_against():
    comparison = compare([*benched(F16, Q4), beside(Q4, model("twin", "none"), NLL, NLL)])
    assert bases(comparison)["Q4"] == "F16"
    assert value(comparison, "Q4", "ppl").verdict == "not_compared"


def test_machines_of_unrelated_models_may_differ_and_a_note_says_so():
    elsewhere = benched(QWEN, QWEN_Q4, env=REPLACE(ENV, cpu="Other CPU"))
    comparison = compare([*benched(F16, Q4), *elsewhere])
    said = "unlike conditions of models that are not compared: `qwen-F16` and `F16` differ in cpu (`"
    assert any(note.startswith(said) for note in comparison.notes)
    with pytest.raises(QuantlabError, match="`Q8` and `F16` differ in cpu"):
        compare([*benched(F16, Q4), *benched(Q8, env=REPLACE(ENV, cpu="Other CPU"))])


# What was measured beside a child


def test_a_parent_measured_beside_its_child_has_a_row_and_the_change_is_paired():
    lower = [2.9, 3.15, 3.3, 3.05]
    comparison = compare([beside(Q4, F16, NLL, lower)])
    assert bases(comparison) == {"F16": "F16", "Q4": "F16"}
    assert value(comparison, "F16", "ppl").interval.estimate == pytest.approx(math.exp(sum(lower) / 4))
    found = value(comparison, "Q4", "ppl")
    expected = mean_interval([a - b for a, b in zip(NLL, lower, strict=True)])
    assert found.paired
    assert list(found.ratio) == pytest.approx([math.exp(x) for x in expected])
    assert found.verdict == "worse"
    assert crossed(comparison, [Limit("ppl", 5)]) == [
        f"`Q4`: ppl {100 * (found.ratio.estimate - 1):+.1f}% against `F16`, the limit is 5%"
    ]
    assert crossed(comparison, [Limit("ppl", 9)]) == []


def test_what_was_measured_beside_a_child_joins_the_parents_row():
    comparison = compare([*benched(F16, Q4), beside(Q4, F16, NLL, NLL)])
    assert len(comparison.rows) == 2
    assert value(comparison, "F16", "ppl").verdict == "baseline"
    # Its own run counts more.
    own = ppl("F16", F16, [x + 0.1 for x in NLL])
    comparison = compare([own, beside(Q4, F16, NLL, NLL, minute=9)])
    assert value(comparison, "F16", "ppl").interval.estimate == pytest.approx(math.exp(sum(NLL) / 4 + 0.1))


def test_another_form_of_the_parent_that_is_here_needs_no_further_row():
    results = [*benched(FOLDER, Q4), ppl("folder", FOLDER, NLL, runtime=RUNTIME), beside(Q4, F16, NLL, NLL)]
    assert bases(compare(results)) == {"folder": "folder", "Q4": "folder"}
    # One that was not measured so cannot stand for it.
    comparison = compare([result("quantize", "F16", F16), beside(Q4, FOLDER, NLL, [x - 0.1 for x in NLL])])
    assert bases(comparison)["Q4"] == "folder"
    assert value(comparison, "Q4", "ppl").ratio.estimate == pytest.approx(math.exp(0.1))


def test_an_old_result_without_the_parents_windows_is_read():
    old = beside(Q4, F16, NLL, NLL)
    del old.measurements["against_nll"], old.details["against_model"]
    assert bases(compare([old])) == {"Q4": "Q4"}


@pytest.mark.parametrize("wrong", [{"against_model": 3}, {"against_ppl": "x"}, {"against_runtime": {"name": 1}}])
def test_a_damaged_parent_in_a_result_is_named(wrong: dict[str, object]):
    made = beside(Q4, F16, NLL, NLL)
    with pytest.raises(QuantlabError, match="the Result `ppl-Q4-0` tells nothing sound of its parent"):
        compare([REPLACE(made, details=made.details | wrong)])


def test_a_limit_on_what_has_no_parent_here_is_no_pass():
    results = [ppl("F16", F16, NLL), ppl("Q4", Q4, NLL), ppl("qwen-Q4", QWEN_Q4, NLL)]
    with pytest.raises(QuantlabError, match="nothing here is the parent of `qwen-Q4`"):
        crossed(compare(results), [Limit("ppl", 5)])
    assert crossed(compare(results, baseline="F16"), [Limit("ppl", 5)]) == []
    # What has no such number is no reason.
    assert crossed(compare([*results[:2], *benched(QWEN_Q4)]), [Limit("ppl", 5)]) == []


# KLD


def test_the_reference_of_kld_is_named():
    notes = tabulate(compare([beside(Q4, F16, NLL, NLL)])).notes
    assert "KLD and same top are against `F16`" in notes
    two = tabulate(compare([beside(Q4, F16, NLL, NLL), beside(QWEN_Q4, QWEN, NLL, NLL)]))
    assert "KLD and same top of `Q4` are against `F16`" in two.notes
    assert "KLD and same top of `qwen-Q4` are against `qwen-F16`" in two.notes
    row = msgspec.json.decode(FORMATS["json"](compare([beside(Q4, F16, NLL, NLL)])))["rows"][1]
    assert row["metrics"]["kld_mean"]["against"] == {"label": "F16", "sha256": "F16"}
    assert "against" not in row["metrics"]["ppl"]


def test_a_later_run_without_a_parent_takes_no_kld_away():
    comparison = compare([beside(Q4, F16, NLL, NLL), ppl("Q4", Q4, NLL, minute=9)])
    assert value(comparison, "Q4", "kld_mean").interval.estimate == 0.05


# Notes


def test_notices_that_differ_only_in_label_or_numbers_are_one_note():
    def said(name: str, percent: int) -> list[Notice]:
        return [
            Notice("large-spread", f"TPOT varies by {percent}% between repetitions (bound 5%)", "end other work"),
            Notice("calibration-text", f"`{name}` was calibrated on `mine`: it looks better there", "use another"),
        ]

    results = [bench(m.source, m, [1.0] * 3, warnings=said(m.source, 10 + i)) for i, m in enumerate((F16, Q4, Q8))]
    assert compare(results).notes == [
        "warned while measuring `F16`, `Q4`, `Q8`: TPOT varies by 10 to 12% between repetitions (bound 5%): end other "
        "work",
        "warned while measuring `F16`, `Q4`, `Q8`: each was calibrated on `mine`: it looks better there: use another",
    ]
    assert compare(results[:1]).notes[1] == (
        "warned while measuring `F16`: `F16` was calibrated on `mine`: it looks better there: use another"
    )


def test_a_warning_of_every_row_names_none():
    notice = Notice("few-repeats", "too few", "")
    models = [F16, *(model(f"m{i}", of="folder") for i in range(3))]
    comparison = compare([bench(m.source, m, [1.0] * 3, warnings=[notice]) for m in models])
    assert comparison.notes == ["warned while measuring all: too few"]
    comparison = compare([bench(m.source, m, [1.0] * 3, warnings=[notice] * (m is not F16)) for m in models])
    assert comparison.notes == ["warned while measuring `m0`, `m1`, `m2`: too few"]


def test_a_content_that_several_labels_hide_is_told_once():
    kinds = {"Q5_0": TensorType(1, 700), "Q4_K": TensorType(1, 300)}
    two = [REPLACE(model(name, of="folder"), tensor_types=kinds) for name in ("a-Q4_K_M", "b-Q4_K_M")]
    said = [note for note in tabulate(compare(benched(F16, *two))).notes if "that was asked for" in note]
    assert len(said) == 1
    assert said[0].startswith("`a-Q4_K_M`, `b-Q4_K_M`: 30% of the weights are stored as the Q4_K that was asked for")


def test_a_change_that_may_be_chance_is_marked():
    table = tabulate(compare([bench(m.source, m, tpot) for m, tpot in ((F16, [1.0, 2.0]), (Q4, [0.5, 0.4]))]))
    of = {head.title: str(entry) for head, entry in zip(table.heads, table.rows[1], strict=True)}
    assert of["TPOT"] == "447 ms (? -68%)"
    # Bytes do not vary by chance.
    assert of["peak memory"].endswith("(0%)")
    assert "? has too few repetitions or windows to be told from chance" in table.notes[0]
    legend = tabulate(compare(benched(F16, Q4))).notes[0]
    assert "? has" not in legend


def test_a_reason_against_comparing_is_given_once():
    cell = {"prompt_tokens": 512, "new_tokens": 64, "batch": 1}
    comparison = compare([*benched(F16), *benched(Q4, Q8, spec=cell)])
    assert comparison.notes[0] == (
        "speed of `Q4` at 512+64 x1, `Q8` at 512+64 x1 is not compared: `F16` has no bench of this cell"
    )
    assert len(comparison.notes) == 1
    also = compare([*benched(F16), *benched(Q4, spec=cell), ppl("Q4", Q4, NLL)])
    assert also.notes[1].startswith("PPL of `Q4` is not compared")


def test_a_lopsided_interval_is_shown_by_its_ends():
    results = [bench("F16", F16, [1.0, 2.0, 4.0])]
    table = tabulate(compare(results))
    entry = next(e for e, head in zip(table.rows[0], table.heads, strict=True) if head.title == "TPOT")
    low, high = (2000 * math.exp(side * 4.302653 * math.log(2) / math.sqrt(3)) for side in (-1, 1))
    assert str(entry) == f"2000 ms [{low:.0f} ms, {high:.0f} ms]"
    assert "[ ] is the 95% interval where it is lopsided" in table.notes[0]


def test_an_interval_of_noise_is_not_shown_by_its_ends():
    comparison = compare([bench("F16", F16, [1.0, 1.1, 1.0]), bench("Q4", Q4, [1.0, 90.0, 8000.0])])
    table = tabulate(comparison)
    of = {head.title: str(entry) for head, entry in zip(table.heads, table.rows[1], strict=True)}
    assert of["TPOT"] == f"{1000 * 720000 ** (1 / 3):.0f} ms [?] (≈ +{100 * (720000 / 1.1) ** (1 / 3) - 100:.0f}%)"
    assert "[?] is one wider than a hundredfold" in table.notes[0]
    assert "TPOT not distinguishable, 95% CI wider than 100x" in table.verdicts[0][1]
    # Machines get the numbers.
    low = msgspec.json.decode(FORMATS["json"](comparison))["rows"][1]["metrics"]["tpot"]["low"]
    assert 0 < low < 0.1
