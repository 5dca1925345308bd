"""Limits that the user sets on a comparison, and what its numbers teach."""

from __future__ import annotations

import math
import subprocess
import sys

import msgspec
import pytest

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.result import Result, TensorType
from quantlab.report.artifacts import join
from quantlab.report.comparison import compare
from quantlab.report.lessons import QUALITY_FOOTER, asked_type, lessons
from quantlab.report.limits import Limit, crossed, parse_limit
from tests.comparison_cases import (
    F16,
    NLL,
    Q4,
    Q8,
    bench,
    lab,
    measured,
    ppl,
    two,
)

REPLACE = msgspec.structs.replace


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
