"""Joining Results into rows, choosing the baseline, comparing only what is alike, verdicts."""

from __future__ import annotations

import math
import statistics as reference

import msgspec
import pytest

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.statistics import paired_ratio, unpaired_ratio
from quantlab.report.comparison import compare
from quantlab.report.table import tabulate
from tests.comparison_cases import (
    CELL,
    F16,
    NLL,
    Q4,
    Q8,
    bench,
    lab,
    labels,
    measured,
    ppl,
    result,
    row,
    said,
    two,
    value,
)

REPLACE = msgspec.structs.replace


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
    # Six samples in three repetitions: the interval stands on three.
    batches = REPLACE(measured(tpot=[1.0, 1.2, 1.1, 1.3, 1.4, 1.2])["tpot"], samples_per_repetition=2)
    comparison = compare([bench("f16", F16, [], measurements={"tpot": batches})])
    found = value(comparison, "f16", "tpot").interval
    assert found.estimate == pytest.approx((1.1 * 1.2 * 1.3) ** (1 / 3))
    half = 4.30265 * reference.stdev([math.log(x) for x in (1.1, 1.2, 1.3)]) / math.sqrt(3)
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
    # Two pairs have an interval of 12.7 standard errors on either side.
    for few in (two([1.0], [0.5]), two([1.0, 2.0], [0.5, 1.0])):
        assert said(few, "Q4", "tpot") == "TPOT 2.00x faster, no interval from so few repetitions"
        assert str(tabulate(few).rows[1][5]).endswith(" ms (? -50%)")
        assert value(few, "Q4", "tpot").interval[1:] == (None, None)
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
