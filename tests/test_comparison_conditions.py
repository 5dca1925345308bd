"""Under which conditions numbers stand side by side: machines, runtimes, dtypes, load, warnings."""

from __future__ import annotations

import msgspec
import pytest

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.result import Notice
from quantlab.report.comparison import compare
from quantlab.report.table import tabulate
from tests.comparison_cases import (
    ENV,
    F16,
    NLL,
    Q4,
    RUNTIME,
    bench,
    labels,
    measured,
    ppl,
    result,
    two,
    value,
)

REPLACE = msgspec.structs.replace


# Conditions


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("cpu", {"env": REPLACE(ENV, cpu="Other CPU")}),
        ("gpu", {"env": REPLACE(ENV, gpu="RTX 3060")}),
        ("driver", {"env": REPLACE(ENV, driver="550.1")}),
        ("os", {"env": REPLACE(ENV, os="Darwin")}),
        ("device", {"runtime": REPLACE(RUNTIME, device="cuda")}),
        ("threads", {"runtime": REPLACE(RUNTIME, threads=4)}),
        ("llamacpp version", {"runtime": REPLACE(RUNTIME, version="0.3.37")}),
    ],
)
def test_unlike_conditions_are_refused_by_name_or_noted(field, changed):
    results = [bench("f16", F16, [1.0, 1.1]), bench("Q4", Q4, [0.5, 0.6], **changed)]
    with pytest.raises(QuantlabError, match=rf"`Q4` and `f16` differ in {field} \(") as caught:
        compare(results)
    assert "--allow-env-diff" in caught.value.hint
    comparison = compare(results, allow_env_diff=True)
    assert value(comparison, "Q4", "tpot").ratio is not None
    assert any("allowed by `--allow-env-diff`" in note and field in note for note in comparison.notes)


def test_conditions_of_other_cells_do_not_matter():
    long = {"prompt_tokens": 512, "new_tokens": 64, "batch": 1}
    one = [bench("f16", F16, [1.0, 1.1]), bench("Q4", Q4, [0.5, 0.6])]
    four = REPLACE(RUNTIME, threads=4)
    other = [
        bench(r.label, r.model, [0.5, 0.6], spec=long, runtime=four, env=REPLACE(ENV, load_average=9)) for r in one
    ]
    comparison = compare([*one, *other])
    assert len(comparison.rows) == 4
    assert comparison.notes == []
    with pytest.raises(QuantlabError, match="`Q4` and `f16` differ in threads"):
        compare([*one, other[0], bench("Q4", Q4, [0.5, 0.6], spec=long)])


def test_runtimes_of_their_own_versions_are_alike():
    torch = REPLACE(RUNTIME, name="torch", version="2.13")
    assert compare([bench("f16", F16, [1.0]), bench("AWQ", Q4, [0.5], runtime=torch)])


TORCH = REPLACE(RUNTIME, name="torch", version="2.13", device="cuda", dtype="float16", threads=16)


def test_two_runtimes_are_compared_and_named():
    awq = bench("AWQ", REPLACE(Q4, method="awq"), [0.5, 0.55, 0.5], runtime=TORCH)
    results = [bench("f16", F16, [1.0, 1.1, 1.0]), awq]
    comparison = compare(results)
    assert value(comparison, "AWQ", "tpot").verdict == "better"
    assert comparison.notes == [
        "speed was measured in unlike runtimes, so that a difference is not of the weights alone: `f16` in llama.cpp "
        "on cpu; `AWQ` in torch float16 on cuda"
    ]
    table = tabulate(comparison)
    titles = [head.title for head in table.heads]
    assert titles[:3] == ["model", "method", "runtime"]
    assert [[str(entry) for entry in row[:3]] for row in table.rows] == [
        ["f16", "none", "llama.cpp"],
        ["AWQ", "awq", "torch float16"],
    ]
    assert table.keys == 1


def test_a_row_with_a_speed_names_what_its_speed_was_measured_in():
    on_cpu = REPLACE(TORCH, device="cpu")
    results = [
        bench("f16", F16, [1.0, 1.1]),
        bench("AWQ", Q4, [0.5, 0.55], runtime=TORCH),
        ppl("AWQ", Q4, NLL, runtime=on_cpu),
    ]
    for order in (results, [results[0], results[2], results[1]]):
        late = [REPLACE(r, started_at=f"2026-01-0{day}T00:00:00+00:00") for day, r in enumerate(order, 1)]
        comparison = compare(late)
        assert [row.artifact.runtime.device for row in comparison.rows] == ["cpu", "cuda"]
        assert "`AWQ` in torch float16 on cuda" in comparison.notes[0]


def test_quality_of_two_runtimes_is_named():
    results = [ppl("f16", F16, NLL), ppl("AWQ", Q4, NLL, runtime=TORCH)]
    assert any(
        note.startswith("quality was measured in unlike runtimes")
        and note.endswith("`f16` in llama.cpp; `AWQ` in torch float16")
        for note in compare(results).notes
    )
    elsewhere = [REPLACE(r, runtime=REPLACE(TORCH, device=d)) for r, d in zip(results, ("cpu", "cuda"), strict=True)]
    assert not any("unlike runtimes" in note for note in compare(elsewhere).notes)


def test_quality_by_other_kernels_than_speed_is_named():
    exact, fast = (REPLACE(TORCH, kernels={f"mlp {kind}": 9, "lm_head Linear": 1}) for kind in ("Linear", "Marlin"))
    results = [bench("AWQ", Q4, [0.5, 0.55], runtime=fast), ppl("AWQ", Q4, NLL, runtime=exact)]
    said = "quality of `AWQ` was computed by Linear, the speed is that of Linear, Marlin, which may round more"
    assert said in compare(results).notes
    assert said not in compare([results[0], ppl("AWQ", Q4, NLL, runtime=fast)]).notes


def test_one_runtime_has_no_column_and_packages_do_not_matter():
    without, beside = REPLACE(ENV, packages={"numpy": "2"}), REPLACE(ENV, packages={"numpy": "2", "torch": "2.13"})
    comparison = compare([bench("f16", F16, [1.0], env=without), bench("Q4", Q4, [1.0], env=beside)])
    assert comparison.notes == []
    assert not {"method", "runtime"} & {head.title for head in tabulate(comparison).heads}
    alike = compare([bench(name, m, [1.0], runtime=TORCH) for name, m in (("f16", F16), ("Q4", Q4))])
    assert "runtime" not in {head.title for head in tabulate(alike).heads}
    assert "computed by torch float16 on cuda" in tabulate(alike).notes


def test_two_dtypes_of_one_content_are_two_rows():
    wide = REPLACE(TORCH, dtype="float32")
    awq = REPLACE(Q4, method="awq")
    results = [
        result("quantize", "AWQ", awq),
        bench("f16", F16, [1.0, 1.1], runtime=TORCH),
        bench("AWQ", awq, [0.5, 0.6], runtime=TORCH),
        bench("AWQ", awq, [0.9, 1.0], runtime=wide),
        ppl("AWQ", awq, NLL, runtime=wide),
    ]
    comparison = compare(results)
    assert labels(comparison) == ["f16", "AWQ float16", "AWQ float32"]
    assert (
        value(comparison, "AWQ float16", "tpot").ratio.estimate
        < value(comparison, "AWQ float32", "tpot").ratio.estimate
    )
    assert all(r.artifact.quantize is results[0] for r in comparison.rows[1:])
    with pytest.raises(UsageError, match="label of 2 artifacts"):
        compare(results, baseline="AWQ")
    assert compare(results, baseline="AWQ float32").baseline == "AWQ float32"


def test_device_memory_has_a_column_where_a_device_was_used():
    def titles(*numbers: float) -> list[str]:
        found = [
            bench(name, m, [], measurements=measured(tpot=[1.0, 1.1], peak_device_bytes=n))
            for (name, m), n in zip((("f16", F16), ("Q4", Q4)), numbers, strict=True)
        ]
        return [head.title for head in tabulate(compare(found)).heads]

    assert "peak device memory" in titles(2e9, 1e9)
    assert "peak device memory" not in titles(0, 0)


def test_quality_does_not_depend_on_the_machine():
    results = [ppl("f16", F16, NLL), ppl("Q4", Q4, NLL, env=REPLACE(ENV, cpu="Other CPU"))]
    assert value(compare(results), "Q4", "ppl").ratio.estimate == pytest.approx(1)


def test_unequal_load_is_noted():
    busy = REPLACE(ENV, load_average=3.4)
    comparison = two([1.0, 1.1], [0.5, 0.6], env=busy)
    assert "the machine's load was 0.4 while `f16` and 3.4 while `Q4` was measured" in comparison.notes
    assert not any("load" in note for note in two([1.0, 1.1], [0.5, 0.6]).notes)


def test_warnings_of_measurements_are_carried_once():
    notice = Notice("early-stop", "generation stopped early", "")
    comparison = compare([bench("f16", F16, [1.0], warnings=[notice]), bench("Q4", Q4, [1.0], warnings=[notice])])
    assert comparison.notes == ["warned while measuring `f16`, `Q4`: generation stopped early"]


def test_the_history_of_weights_is_told_once():
    note = "weights dequantized from Q4_1"
    results = [bench(name, REPLACE(m, note=note), [1.0]) for name, m in (("f16", F16), ("Q4", Q4))]
    assert compare(results).notes == [f"`f16`, `Q4`: {note}"]


def test_a_stride_of_its_own_is_named():
    legends = [
        tabulate(compare([ppl("f16", F16, NLL, details={"protocol": "stride", "stride": stride})])).notes[1]
        for stride in (256, 512)
    ]
    assert legends == [
        "quality: stride, n_ctx 512, stride 256, 4 windows, text 173c87a5",
        "quality: stride, n_ctx 512, 4 windows, text 173c87a5",
    ]
