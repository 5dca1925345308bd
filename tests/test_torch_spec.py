"""Options of quantize: each method's defaults, what it refuses, and the names of its variants."""

from __future__ import annotations

from typing import Any

import pytest

from quantlab.core.errors import UsageError
from quantlab.core.model import ModelFile
from quantlab.quantize.spec import METHODS, QuantizeSpec, check_spec, variant
from quantlab.quantize.torch_spec import calibrates, weights
from quantlab.quantize.torch_work import Weights

MODEL = ModelFile("/nowhere", "model", "org/model", "0" * 64)


def checked(method: str, **options: Any) -> QuantizeSpec:
    return check_spec(QuantizeSpec(MODEL, options.pop("out", ""), method, **options))


@pytest.mark.parametrize(
    ("method", "expected", "name", "looks_at_text"),
    [
        ("gptq", Weights(4, 128, True), "GPTQ-W4-g128", True),
        ("awq", Weights(4, 128, False), "AWQ-W4-g128", True),
        ("rtn", Weights(4, 128, True), "RTN-W4-g128", False),
        ("int8", Weights(8, -1, True), "INT8", True),
        ("fp8", None, "FP8-dynamic", False),
    ],
)
def test_defaults(method: str, expected: Weights | None, name: str, looks_at_text: bool) -> None:
    spec = checked(method)
    assert weights(spec) == expected
    assert variant(spec) == name
    assert calibrates(spec) is looks_at_text
    assert spec.engine
    # What was put in once stays: a stored spec is checked again.
    assert check_spec(spec) == spec


def test_every_method_has_a_name_and_gguf_keeps_its_type() -> None:
    assert {variant(checked(method)) for method in METHODS} == {
        "Q4_K_M", "GPTQ-W4-g128", "AWQ-W4-g128", "RTN-W4-g128", "INT8", "FP8-dynamic",
    }  # fmt: skip
    assert variant(checked("gguf", type="q8_0")) == "Q8_0"


@pytest.mark.parametrize(
    ("method", "options", "name"),
    [
        ("gptq", {"bits": 3, "group_size": 32, "sym": False, "desc_act": True}, "GPTQ-W3-g32-asym-desc_act"),
        ("gptq", {"group_size": -1}, "GPTQ-W4-channel"),
        ("awq", {"sym": True, "group_size": 64}, "AWQ-W4-g64-sym"),
        ("gptq", {"engine": "llmcompressor"}, "GPTQ-W4-g128-llmcompressor"),
        ("fp8", {"scheme": "static"}, "FP8-static"),
    ],
)
def test_what_is_no_default_is_in_the_name(method: str, options: dict[str, Any], name: str) -> None:
    assert variant(checked(method, **options)) == name


def test_static_fp8_looks_at_text() -> None:
    assert calibrates(checked("fp8", scheme="static", calib=["builtin_en"]))


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("awq", {"bits": 3}, "has no 3 bits"),
        ("gptq", {"bits": 5}, "2, 3, 4, 8"),
        ("gptq", {"bits": 0}, "has no 0 bits"),
        ("fp8", {"scheme": ""}, "dynamic"),
        ("gptq", {"group_size": 48}, "48"),
        ("gptq", {"group_size": 0}, "0"),
        ("awq", {"desc_act": True}, "desc-act"),
        ("awq", {"scheme": "dynamic"}, "scheme"),
        ("fp8", {"bits": 8}, "bits"),
        ("fp8", {"scheme": "dynamix"}, "dynamic"),
        ("fp8", {"calib": ["builtin_en"]}, "calib"),
        ("rtn", {"calib_samples": 4}, "calib-samples"),
        ("int8", {"group_size": 64}, "group-size"),
        ("int8", {"sym": False}, "sym"),
        ("gptq", {"imatrix": True}, "imatrix"),
        ("gptq", {"type": "Q4_K_M"}, "type"),
        ("gptq", {"engine": "autogptq"}, "engine"),
        ("fp8", {"engine": "gptqmodel"}, "does not do"),
        ("awq", {"engine": "autoawq", "sym": True}, "zero points"),
        ("awq", {"engine": "autoawq", "group_size": -1}, "groups"),
        ("gptq", {"engine": "optimum", "sym": False}, "gptq_v2"),
        ("gptq", {"engine": "llmcompressor", "desc_act": True}, "no `--desc-act`"),
        ("gptq", {"dtype": "float8"}, "dtype"),
        ("gptq", {"device": "tpu"}, "tpu"),
        ("gptq", {"out": "x.gguf"}, "folder"),
        ("gguf", {"bits": 4}, "bits"),
        ("gguf", {"group_size": 64}, "group-size"),
        ("gguf", {"engine": "gptqmodel"}, "engine"),
        ("gguf", {"dtype": "float16"}, "dtype"),
        ("gguf", {"out": "x"}, ".gguf"),
    ],
)
def test_what_a_method_does_not_have_is_refused(method: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked(method, **options)
    assert said in f"{caught.value} {caught.value.hint}"
