"""Joining Results into rows, choosing the baseline, comparing only what is alike, verdicts, limits and lessons."""

from __future__ import annotations

import math
import statistics as reference
import subprocess
import sys

import msgspec
import pytest

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.result import Notice, Result, TensorType
from quantlab.core.statistics import paired_ratio, unpaired_ratio
from quantlab.report.artifacts import join
from quantlab.report.comparison import Comparison, Row, compare
from quantlab.report.lessons import QUALITY_FOOTER, asked_type, lessons
from quantlab.report.limits import Limit, crossed, parse_limit
from quantlab.report.metrics import METRICS, sentence
from quantlab.report.table import tabulate
from quantlab.report.values import Value
from tests.comparison_cases import CELL, ENV, F16, Q4, Q8, RUNTIME, bench, lab, measured, ppl, result

REPLACE = msgspec.structs.replace
NLL = [3.0, 3.2, 3.4, 3.1]


def labels(comparison: Comparison) -> list[str]:
    return [row.artifact.label for row in comparison.rows]


def row(comparison: Comparison, label: str, cell: str | None = None) -> Row:
    return next(r for r in comparison.rows if r.artifact.label == label and cell in (None, str(r.cell)))


def value(comparison: Comparison, label: str, metric: str, cell: str | None = None) -> Value:
    found = [v for column, v in row(comparison, label, cell).values.items() if column.metric.name == metric]
    assert len(found) == 1
    return found[0]


def said(comparison: Comparison, label: str, metric: str) -> str:
    found = value(comparison, label, metric)
    return sentence(next(m for m in METRICS if m.name == metric), found.ratio, found.verdict)


def two(tpot_a, tpot_b, **given) -> Comparison:
    return compare([bench("f16", F16, tpot_a), bench("Q4", Q4, tpot_b, **given)])


# Joining


def test_one_row_joins_all_kinds():
    comparison = compare(lab())
    assert labels(comparison) == ["f16", "Q8_0", "Q4_K_M"]
    names = [column.metric.name for column in comparison.columns if column.metric.shown]
    assert names == [
        "size_bytes",
        "bits_per_weight",
        "peak_process_bytes",
        "ttft",
        "tpot",
        "output_throughput",
        "decode_throughput",
        "tpot_floor_share",
        "ppl",
        "kld_mean",
        "top1_agreement",
    ]
    q4 = row(comparison, "Q4_K_M")
    assert q4.cell == (128, 64, 1)
    assert len(q4.values) == len(names)


def test_numbers_come_from_their_result():
    results = lab()
    comparison = compare(results)
    tpot = results[4].measurements["tpot"].samples
    assert value(comparison, "Q4_K_M", "tpot").interval.estimate == pytest.approx(reference.geometric_mean(tpot))
    assert value(comparison, "Q4_K_M", "size_bytes").interval.estimate == Q4.size_bytes
    assert value(comparison, "Q4_K_M", "kld_mean").interval.estimate == 0.05703
    # The floor of 105 MB at 20 GB/s.
    share = Q4.size_bytes / 20e9 / reference.geometric_mean(tpot)
    assert value(comparison, "Q4_K_M", "tpot_floor_share").interval.estimate == pytest.approx(share)


def test_equal_content_under_two_labels_is_one_artifact():
    comparison = compare(
        [bench("f16", F16, [1, 2]), bench("mine", Q4, [1, 2]), ppl("mine (first 4 windows)", Q4, NLL, minute=5)]
    )
    assert labels(comparison) == ["f16", "mine"]
    assert value(comparison, "mine", "ppl").interval.estimate == pytest.approx(math.exp(3.175))


def test_equal_labels_of_unlike_content_are_told_apart():
    other = REPLACE(Q4, sha256="ab" * 32)
    comparison = compare([bench("f16", F16, [1, 2]), bench("Q4", Q4, [1, 2]), bench("Q4", other, [1, 2])])
    assert labels(comparison) == ["f16", "Q4@44444444", "Q4@abababab"]
    assert compare(lab(), baseline="Q8_0").baseline == "Q8_0"
    with pytest.raises(UsageError, match="label of 2 artifacts") as caught:
        compare([bench("Q4", Q4, [1, 2]), bench("Q4", other, [1, 2])], baseline="Q4")
    assert "`Q4@44444444`" in caught.value.hint


def test_a_result_without_hash_joins_by_its_label():
    nameless = REPLACE(Q4, sha256=None)
    assert labels(compare([bench("Q4", Q4, [1, 2]), ppl("Q4", nameless, NLL)])) == ["Q4"]
    assert labels(compare([bench("Q4", nameless, [1, 2]), ppl("Q4", nameless, NLL)])) == ["Q4"]
    # Two artifacts carry the label: which of them it was is not known.
    other = REPLACE(Q4, sha256="ab" * 32)
    comparison = compare([bench("Q4", Q4, [1, 2]), bench("Q4", other, [1, 2]), ppl("Q4", nameless, NLL)])
    assert labels(comparison) == ["Q4@44444444", "Q4@abababab", "Q4"]


@pytest.mark.parametrize("turned", [False, True])
def test_the_newest_result_wins_in_any_order(turned):
    old = bench("f16", F16, [0.5, 0.5], started_at="2026-11-29T09:59:00Z")
    # An hour later in UTC though its clock shows less.
    new = bench("f16", F16, [0.25, 0.25], started_at="2026-11-29T09:00:00-02:00")
    comparison = compare([new, old] if turned else [old, new])
    assert value(comparison, "f16", "tpot").interval.estimate == 0.25


def test_a_time_without_zone_is_utc():
    old = bench("f16", F16, [0.5], started_at="2026-11-29T09:59:00")
    new = bench("f16", F16, [0.25], started_at="2026-11-29T11:00:00+01:00")
    assert value(compare([new, old]), "f16", "tpot").interval.estimate == 0.25


def test_a_result_without_time_is_refused():
    with pytest.raises(QuantlabError, match="`yesterday`, which is no ISO 8601 time"):
        compare([bench("f16", F16, [1.0], started_at="yesterday")])


def test_cells_are_rows_compared_with_the_same_cell():
    long = {"prompt_tokens": 512, "new_tokens": 64, "batch": 4}
    comparison = compare(
        [
            bench("f16", F16, [1.0, 1.0]),
            bench("f16", F16, [4.0, 4.0], spec=long),
            bench("Q4", Q4, [0.5, 0.5]),
            # A sweep's spec lists its sizes; the cell is in the details.
            bench("Q4", Q4, [1.0, 1.0], spec={"prompt_tokens": [128, 512]}, details={**long, "session": "s1"}),
            ppl("Q4", Q4, NLL),
        ]
    )
    assert [(r.artifact.label, str(r.cell)) for r in comparison.rows] == [
        ("f16", "128+64 x1"),
        ("Q4", "128+64 x1"),
        ("f16", "512+64 x4"),
        ("Q4", "512+64 x4"),
    ]
    assert value(comparison, "Q4", "tpot", "128+64 x1").ratio.estimate == pytest.approx(0.5)
    assert value(comparison, "Q4", "tpot", "512+64 x4").ratio.estimate == pytest.approx(0.25)
    table = tabulate(comparison)
    assert [head.title for head in table.heads][:2] == ["model", "tokens x batch"]
    # Size is said once, speed for each cell.
    assert [text.count("size") for _, text in table.verdicts] == [1, 0]
    assert [text.count("TPOT") for _, text in table.verdicts] == [1, 1]


def test_a_cell_that_the_baseline_lacks_is_shown_without_a_change():
    comparison = compare([bench("f16", F16, [1.0]), bench("Q4", Q4, [0.5], spec={**CELL, "batch": 2})])
    assert value(comparison, "Q4", "tpot").verdict == "not_compared"
    assert "speed of `Q4` at 128+64 x2 is not compared: `f16` has no bench of this cell" in comparison.notes


def test_other_kinds_and_failures_are_left_out_with_a_note():
    failed = [
        result("bench", "IQ4", Q4, status="failed", minute=9),
        # Failed first, then succeeded: nothing is missing.
        result("bench", "f16", F16, status="failed"),
        result("eval", "f16", F16),
    ]
    comparison = compare([*failed, bench("f16", F16, [1.0], minute=1)])
    assert labels(comparison) == ["f16"]
    assert comparison.notes == ["failed and left out: bench of `IQ4`"]


@pytest.mark.parametrize("results", [[], [result("eval", "f16", F16)], [result("ppl", "f16", F16, status="failed")]])
def test_nothing_to_compare_is_an_error(results):
    with pytest.raises(QuantlabError, match="no finished Results to compare"):
        compare(results)


# The baseline


def test_the_unquantized_artifact_is_the_baseline_and_comes_first():
    assert labels(compare([bench("Q4", Q4, [1.0]), bench("f16", F16, [1.0])])) == ["f16", "Q4"]


def test_of_several_unquantized_the_named_parent_is_the_baseline():
    f32 = REPLACE(F16, sha256="32" * 32, source="f32.gguf")
    results = [bench("f32", f32, [1.0]), bench("f16", F16, [1.0]), bench("Q4", Q4, [1.0])]
    assert compare(results).baseline == "f16"
    assert compare(results[:2]).baseline == "f32"


def test_without_an_unquantized_artifact_the_first_is_the_baseline():
    assert compare([bench("Q8", Q8, [1.0]), bench("Q4", Q4, [1.0])]).baseline == "Q8"


def test_the_user_names_the_baseline_or_is_helped():
    comparison = compare(lab(), baseline="Q8_0")
    # The others keep the order of their first Result.
    assert labels(comparison) == ["Q8_0", "Q4_K_M", "f16"]
    assert value(comparison, "f16", "size_bytes").ratio.estimate == pytest.approx(F16.size_bytes / Q8.size_bytes)
    with pytest.raises(UsageError, match="unknown baseline `q4km`") as caught:
        compare(lab(), baseline="q4km")
    assert "did you mean `Q4_K_M`" in caught.value.hint


# Ratios and verdicts


def test_one_session_is_compared_in_pairs():
    a, b = [1.0, 2.0, 3.0], [0.8, 1.5, 2.5]
    found = value(two(a, b), "Q4", "tpot")
    assert found.paired
    assert found.ratio == paired_ratio(b, a)
    assert found.verdict == "better"


@pytest.mark.parametrize("details", [{"session": "s2"}, {}])
def test_other_sessions_are_compared_as_independent(details):
    a, b = [1.0, 2.0, 3.0], [0.8, 1.5, 2.5]
    comparison = two(a, b, details=details)
    found = value(comparison, "Q4", "tpot")
    assert not found.paired
    assert found.ratio == unpaired_ratio(b, a)
    assert found.verdict == "not_distinguishable"
    assert any(note.startswith("not interleaved with `f16`") and "`Q4`" in note for note in comparison.notes)


def test_unnamed_sessions_are_not_one():
    comparison = compare([bench(label, m, [1.0, 1.1], details={}) for label, m in (("f16", F16), ("Q4", Q4))])
    assert not value(comparison, "Q4", "tpot").paired


def test_unequal_repetitions_of_one_session_are_no_pairs():
    found = value(two([1.0, 1.1, 1.2], [0.5, 0.6]), "Q4", "tpot")
    assert not found.paired
    assert found.ratio == unpaired_ratio([0.5, 0.6], [1.0, 1.1, 1.2])


def test_requests_of_one_batch_are_no_repetitions():
    # Four samples in two repetitions: the interval stands on two.
    batches = REPLACE(measured(tpot=[1.0, 1.2, 1.1, 1.3])["tpot"], samples_per_repetition=2)
    comparison = compare([bench("f16", F16, [], measurements={"tpot": batches})])
    found = value(comparison, "f16", "tpot").interval
    assert found.estimate == pytest.approx(math.sqrt(1.1 * 1.2))
    half = 12.7062 * reference.stdev([math.log(1.1), math.log(1.2)]) / math.sqrt(2)
    assert math.log(found.high / found.estimate) == pytest.approx(half, rel=1e-4)


@pytest.mark.parametrize("details", [{"session": "s1"}, {"session": "s2"}])
def test_the_ratio_shown_is_that_of_the_values_shown(details):
    # One slow repetition: the arithmetic means would say the contrary of the pairs.
    comparison = two([0.14, 0.08, 0.09, 0.05], [0.25, 0.04, 0.04, 0.04], details=details)
    for metric in ("tpot", "decode_throughput"):
        own, base = value(comparison, "Q4", metric), value(comparison, "f16", metric)
        assert own.ratio.estimate == pytest.approx(own.interval.estimate / base.interval.estimate)
    tpot, rate = (value(comparison, "Q4", name).interval.estimate for name in ("tpot", "decode_throughput"))
    assert rate == pytest.approx(1 / tpot)


def test_verdicts_in_words():
    faster = two([1.0, 1.1, 0.9, 1.0], [0.74, 0.87, 0.69, 0.76])
    ratio = value(faster, "Q4", "tpot").ratio
    assert 1 / ratio.estimate == pytest.approx(1.31, abs=0.005)
    assert said(faster, "Q4", "tpot") == f"TPOT 1.31x faster, 95% CI {1 / ratio.high:.2f}-{1 / ratio.low:.2f}"
    slower = two([1.0, 1.1, 0.9, 1.0], [1.19, 1.32, 1.06, 1.2])
    assert said(slower, "Q4", "tpot").startswith("TPOT 1.19x slower, 95% CI 1.1")
    assert said(slower, "Q4", "output_throughput").startswith("output tok/s 1.19x lower, 95% CI 1.1")
    alike = two([1.0, 1.1, 0.9, 1.0], [1.1, 1.0, 1.0, 0.9])
    assert said(alike, "Q4", "tpot").startswith("TPOT not distinguishable, 95% CI 0.")
    assert said(two([1.0], [0.5]), "Q4", "tpot") == "TPOT 2.00x faster, no interval from one repetition"
    assert said(alike, "Q4", "size_bytes") == "size 2.57x smaller"
    assert said(
        compare([bench("a", Q4, [1.0]), bench("b", REPLACE(Q4, sha256="0" * 64), [1.0])]), "b", "size_bytes"
    ) == ("size the same")


def test_a_small_sure_difference_never_reads_as_none():
    comparison = two([1.0, 1.1, 0.9], [0.9971, 1.0969, 0.8972])
    assert value(comparison, "Q4", "tpot").verdict == "better"
    low, high = said(comparison, "Q4", "tpot").rpartition(" ")[2].split("-")
    assert float(low) > 1
    assert float(high) > 1


def test_what_is_better_depends_on_the_metric():
    comparison = two([1.0, 1.1, 0.9], [0.5, 0.55, 0.45])
    assert value(comparison, "Q4", "tpot").verdict == "better"
    assert value(comparison, "Q4", "output_throughput").ratio.estimate == pytest.approx(2)
    assert value(comparison, "Q4", "output_throughput").verdict == "better"
    assert value(comparison, "f16", "tpot").verdict == "baseline"


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 1e200])
def test_a_sample_that_is_no_measurement_is_not_compared(bad):
    comparison = two([1.0, 1.1], [0.5, 0.6], measurements=measured(tpot=[0.5, bad]))
    assert value(comparison, "Q4", "tpot").verdict == "not_compared"
    assert "TPOT of `Q4` is not compared: a sample of it or of `f16` is missing or not above 0" in comparison.notes
    assert tabulate(comparison).rows


def test_the_legend_speaks_of_shown_columns_only():
    # llama.cpp on a CPU reports no device memory.
    numbers = measured(tpot=[1.0, 1.1], peak_device_bytes=0.0)
    comparison = compare([bench(name, m, [], measurements=numbers) for name, m in (("f16", F16), ("Q4", Q4))])
    assert value(comparison, "Q4", "peak_device_bytes").verdict == "not_compared"
    assert not any("not compared" in note for note in tabulate(comparison).notes)


def test_an_endpoint_without_size_has_none():
    endpoint = REPLACE(Q4, format="endpoint", size_bytes=0, bits_per_weight=0.0, tensor_types={})
    comparison = compare([bench("f16", F16, [1.0]), bench("server", endpoint, [1.0])])
    assert "size_bytes" not in {column.metric.name for column in row(comparison, "server").values}
    comparison = compare([bench("f16", F16, [1.0]), bench("server", endpoint, [1.0])], baseline="server")
    assert value(comparison, "f16", "size_bytes").verdict == "not_compared"


# Perplexity


def test_perplexity_is_compared_window_by_window():
    shifted = [x + d for x, d in zip(NLL, [0.01, 0.02, 0.03, 0.02], strict=True)]
    comparison = compare([ppl("f16", F16, NLL), ppl("Q4", Q4, shifted)])
    found = value(comparison, "Q4", "ppl")
    half = 3.18245 * reference.stdev([0.01, 0.02, 0.03, 0.02]) / 2
    assert found.paired
    assert found.ratio == pytest.approx((math.exp(0.02), math.exp(0.02 - half), math.exp(0.02 + half)), rel=1e-6)
    assert said(comparison, "Q4", "ppl") == "PPL 2.0% higher, 95% CI +0.70% to +3.4%"


def test_perplexity_has_the_interval_of_its_windows():
    found = value(compare([ppl("f16", F16, NLL)]), "f16", "ppl").interval
    half = 3.18245 * reference.stdev(NLL) / 2
    assert found == pytest.approx((math.exp(3.175), math.exp(3.175 - half), math.exp(3.175 + half)), rel=1e-6)


def test_windows_of_unlike_length_give_the_width_only():
    uneven = REPLACE(ppl("f16", F16, NLL), measurements=measured(ppl=30.0, nll=NLL))
    found = value(compare([uneven]), "f16", "ppl").interval
    half = 3.18245 * reference.stdev(NLL) / 2
    assert found == pytest.approx((30, 30 * math.exp(-half), 30 * math.exp(half)), rel=1e-6)


@pytest.mark.parametrize(
    "other",
    [{"protocol": "hf"}, {"n_ctx": 256}, {"stride": 256}, {"windows": 3}, {"text_hash": "ffffffffffff"}],
)
def test_other_protocols_sizes_and_texts_are_never_compared(other):
    comparison = compare([ppl("f16", F16, NLL), ppl("Q4", Q4, NLL, details=other)])
    found = value(comparison, "Q4", "ppl")
    assert (found.verdict, found.ratio) == ("not_compared", None)
    assert found.interval.estimate == pytest.approx(math.exp(3.175))
    assert any(n.startswith("PPL of `Q4` is not compared: `f16` has none of this protocol") for n in comparison.notes)
    entries = [str(entry) for entry in tabulate(comparison).rows[1]]
    assert any(entry.endswith("(-)") for entry in entries)
    titles = [head.title for head in tabulate(comparison).heads if head.title.startswith("PPL")]
    assert len(titles) == 2
    assert f"PPL ({'text' if 'text_hash' in other else next(iter(other))} " in titles[1]


@pytest.mark.parametrize("tokens", [("aaaa", "bbbb"), ("aaaa", None), (None, None)])
def test_other_or_unknown_token_ids_are_never_compared(tokens):
    ours, theirs = ({"token_hash": tokens_hash} for tokens_hash in tokens)
    comparison = compare([ppl("f16", F16, NLL, details=ours), ppl("Q4", Q4, NLL, details=theirs)])
    assert value(comparison, "Q4", "ppl").verdict == "not_compared"
    assert any("its token ids are not known to be those of `f16`" in note for note in comparison.notes)
    assert [head.title for head in tabulate(comparison).heads].count("PPL") == 1


def test_perplexity_without_windows_has_no_interval():
    bare = measured(ppl=22.0)
    comparison = compare([ppl("f16", F16, NLL), REPLACE(ppl("Q4", Q4, NLL), measurements=bare)])
    found = value(comparison, "Q4", "ppl")
    assert found.verdict == "no_interval"
    assert found.ratio.estimate == pytest.approx(22 / math.exp(3.175))


def test_a_broken_models_perplexity_is_shown_and_breaks_nothing():
    wild = REPLACE(ppl("Q4", Q4, NLL), measurements=measured(ppl=1e90, nll=[3.0, 700.0, 10.0, 9.0]))
    comparison = compare([ppl("f16", F16, NLL), wild])
    assert value(comparison, "Q4", "ppl").interval.high == math.inf
    assert "1.000e+90" in str(tabulate(comparison).rows[1][3])


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
    results = [bench("f16", F16, [1.0, 1.1]), bench("AWQ", REPLACE(Q4, method="awq"), [0.5, 0.55], runtime=TORCH)]
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
    said = "quality of `AWQ` was computed by Linear, its speed is that of Linear, Marlin, which may round more"
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


# Limits


@pytest.mark.parametrize(
    ("text", "limit"),
    [("tpot=5", Limit("tpot", 5)), (" ppl = 0.5% ", Limit("ppl", 0.5)), ("size_bytes=0", Limit("size_bytes", 0))],
)
def test_limits_are_read(text, limit):
    assert parse_limit(text) == limit


@pytest.mark.parametrize("text", ["tpot", "tpot=", "tpot=fast", "tpot=-5", "tpot=nan", "tpot=inf", "tpot=5=6"])
def test_bad_limits_are_wrong_use(text):
    with pytest.raises(UsageError, match="sets no limit"):
        parse_limit(text)


def test_an_unknown_metric_is_wrong_use_with_help():
    with pytest.raises(UsageError, match="unknown metric `tpto`") as caught:
        parse_limit("tpto=5")
    assert "did you mean `tpot`" in caught.value.hint
    with pytest.raises(UsageError, match="`kld_mean` is a share or a difference already"):
        parse_limit("kld_mean=5")


@pytest.mark.parametrize(
    ("metric", "percent", "worse"),
    [
        ("tpot", 19.9, True),
        ("tpot", 20, False),
        ("output_throughput", 16.6, True),
        ("output_throughput", 16.7, False),
        ("size_bytes", 0, False),
    ],
)
def test_limits_follow_the_direction_of_the_metric(metric, percent, worse):
    comparison = two([1.0, 1.0], [1.2, 1.2])
    sentences = crossed(comparison, [Limit(metric, percent)])
    assert bool(sentences) == worse
    if worse:
        assert sentences[0].startswith(f"`Q4`: {metric} ")
        assert sentences[0].endswith(f"against `f16`, the limit is {percent:g}%")


@pytest.mark.parametrize("percent", range(1, 60))
def test_a_limit_that_is_just_reached_is_kept(percent):
    worse = 1 + percent / 100
    assert crossed(two([1.0, 1.0], [worse, worse]), [Limit("tpot", percent)]) == []


def test_every_limit_and_row_is_checked():
    comparison = compare(lab())
    sentences = crossed(comparison, [parse_limit("ppl=1"), parse_limit("tpot=5")])
    assert sentences == ["`Q4_K_M`: ppl +4.6% against `f16`, the limit is 1%"]
    assert crossed(comparison, []) == []


@pytest.mark.parametrize(
    "results",
    [
        [bench("f16", F16, [1.0]), bench("Q4", Q4, [1.0])],
        [ppl("f16", F16, NLL)],
        [ppl("f16", F16, NLL), ppl("Q4", Q4, NLL, details={"protocol": "hf"})],
        # One row that could be compared does not excuse another that could not.
        [ppl("f16", F16, NLL), ppl("Q8", Q8, NLL), ppl("Q4", Q4, NLL, details={"protocol": "hf"})],
        [ppl("f16", F16, NLL), REPLACE(ppl("Q4", Q4, NLL), measurements=measured(ppl=math.nan, nll=[math.nan] * 4))],
    ],
)
def test_a_limit_that_cannot_be_checked_is_no_pass(results):
    with pytest.raises(QuantlabError, match="the limit on `ppl` cannot be checked") as caught:
        crossed(compare(results), [Limit("ppl", 5)])
    assert caught.value.exit_code == 1


# Lessons


def test_smaller_but_slower_is_said_with_the_floor():
    found = lessons(two([1.0, 1.1, 0.9], [1.19, 1.31, 1.07]))
    assert len(found) == 1
    assert found[0].startswith("`Q4` is 61% smaller than `f16` and 19% slower a token: reading weights")
    assert lessons(two([1.0, 1.1, 0.9], [0.9, 1.0, 0.8])) == []
    # Slower, but not surely so.
    assert lessons(two([1.0, 1.1, 0.9], [1.0, 1.3, 0.85])) == []


def test_label_and_content_are_held_side_by_side():
    comparison = compare(lab())
    sentence = (
        "`Q4_K_M`: 22% of the weights are stored as the Q4_K that was asked for, 67% as Q5_0: 6.27 bits per weight"
    )
    assert f"{sentence} in all" in lessons(comparison)
    assert not any(sentence.startswith("`Q8_0`: ") for sentence in lessons(comparison))
    # Without the quantize Result the label speaks.
    named = lessons(compare([bench("f16", F16, [1.0]), bench("smollm2.Q4_K_M", Q4, [1.0])]))
    assert named[0].startswith("`smollm2.Q4_K_M`: 22%")
    assert not lessons(compare([bench("f16", F16, [1.0]), bench("mine", Q4, [1.0])]))


@pytest.mark.parametrize(
    ("label", "kind"),
    [("demo-from-Q4_1-F16", None), ("demo-from-Q4_1-Q4_K_M", "Q4_K"), ("x-Q5_0", "Q5_0"), ("x-IQ4_XS", None)],
)
def test_the_type_that_a_label_asks_for_is_its_last(label: str, kind: str | None):
    artifact = join([bench(label, Q4, [1.0])])[0]
    assert asked_type(artifact) == kind


@pytest.mark.parametrize("label", ["demo-from-Q4_1", "demo-from-Q4_1-AWQ-W4-g64"])
def test_a_folder_asks_for_no_gguf_type(label: str):
    folder = REPLACE(Q4, format="safetensors", tensor_types={"AWQ-INT4": TensorType(1, 9), "F16": TensorType(1, 1)})
    assert lessons(compare([bench("f16", F16, [1.0]), bench(label, folder, [1.0])])) == []


def test_indistinct_perplexity_is_said():
    found = lessons(compare(lab()))
    assert any(s.startswith("the perplexity of `Q8_0` cannot be told from that of `f16`") for s in found)
    assert found[-1] == QUALITY_FOOTER
    assert QUALITY_FOOTER not in lessons(two([1.0], [1.0]))


def test_compare_imports_nothing_heavy():
    program = (
        "import sys, quantlab.report.comparison, quantlab.report.render, quantlab.report.limits;"
        "print([m for m in ('numpy', 'scipy', 'torch', 'rich', 'llama_cpp', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_cases_are_what_a_store_holds():
    stored = msgspec.json.encode(lab())
    assert msgspec.json.decode(stored, type=list[Result]) == lab()
