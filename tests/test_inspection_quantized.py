"""inspect: quantized folders, told by their tensors and against their config.json and record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantlab.core.artifact import RECORD_NAME, Record, content_sha256
from quantlab.core.errors import QuantlabError
from tests.hf_folders import write_safetensors
from tests.quantized_tensors import Tensors, awq, gptq, packed_ints
from tests.test_inspection import codes, folder, inspect

PROJECTIONS = ("q_proj", "down_proj")
KEPT = "model.layers.1.q_proj"


def bytes_with_scale(rows: int, columns: int, kind: str, module: str) -> Tensors:
    return {
        f"{module}.weight": (kind, np.zeros((rows, columns), "u1")),
        f"{module}.weight_scale": ("F16", np.ones((rows, 1), "<f2")),
    }


def quantized_folder(path: Path, make: Any, entry: dict[str, Any] | None, kept: tuple[str, ...] = (KEPT,)) -> Path:
    """Two layers of two modules of 64 x 128 each, those of `kept` in plain weights."""
    folder(path, {"quantization_config": entry})
    tensors: Tensors = {"model.embed_tokens.weight": ("F16", np.zeros((10, 4), "<u2"))}
    for layer in range(2):
        tensors[f"model.layers.{layer}.norm.weight"] = ("F16", np.zeros(64, "<u2"))
        for name in (f"model.layers.{layer}.{part}" for part in PROJECTIONS):
            plain: Tensors = {f"{name}.weight": ("F16", np.zeros((64, 128), "<u2"))}
            tensors |= plain if name in kept else make(name)
    write_safetensors(path / "model.safetensors", tensors)
    return path


def compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": layout}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", KEPT],
    }


GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False, "checkpoint_format": "gptq",
    "dynamic": {r"-:^model\.layers\.1\.q_proj$": {}},
}  # fmt: skip
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": [KEPT],
}  # fmt: skip
INT4 = compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
                                     "symmetric": True})  # fmt: skip
FP8 = compressed(
    "float-quantized",
    {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
)
INT8 = compressed(
    "int-quantized",
    {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
)


def as_gptq(module: str) -> Tensors:
    return gptq(64, 128, 4, 2, module)


def as_rows(module: str) -> Tensors:
    return gptq(64, 128, 4, 1, module)


def as_awq(module: str) -> Tensors:
    return awq(64, 128, 4, 4, module)


def as_int4(module: str) -> Tensors:
    return packed_ints(64, 128, 4, 4, module, zeros=False)


def as_fp8(module: str) -> Tensors:
    return bytes_with_scale(64, 128, "F8_E4M3", module)


def as_int8(module: str) -> Tensors:
    return bytes_with_scale(64, 128, "I8", module)


@pytest.mark.parametrize(
    ("make", "entry", "scheme", "kernel", "method"),
    [
        (as_gptq, GPTQ, "W4A16 gptq, group 64, symmetric, desc_act no", "Marlin on CUDA", "gptq"),
        (as_gptq, GPTQ | {"sym": False, "desc_act": True}, "W4A16 gptq, group 64, asymmetric, desc_act yes",
         "torch or Triton", "gptq"),
        (as_rows, GPTQ | {"group_size": -1}, "W4A16 gptq, per channel, symmetric, desc_act no", "Marlin on CUDA",
         "gptq"),
        (as_awq, AWQ, "W4A16 awq, group 32, asymmetric", "Marlin on CUDA", "awq"),
        (as_int4, INT4, "W4A16 compressed-tensors, group 32, symmetric", "Marlin on CUDA", "rtn"),
        (as_fp8, FP8, "fp8 E4M3, per channel, dynamic per token", "8.9", "fp8"),
        (as_int8, INT8, "W8A8 int8, per channel, symmetric, dynamic per token", "INT8 on CUDA", "int8"),
    ],
)  # fmt: skip
def test_a_quantized_folder_is_told(
    make: Any, entry: dict[str, Any], scheme: str, kernel: str, method: str, tmp_path: Path
) -> None:
    path = quantized_folder(tmp_path / "m", make, entry)
    outcome = inspect(path)
    assert codes(outcome) == set()
    details = outcome.details
    assert details["scheme"] == scheme and outcome.model.method == method
    assert details["quantized_modules"] == 3
    assert details["not_quantized"] == ["model.embed_tokens", KEPT]
    [(kind, stored), *_] = outcome.model.tensor_types.items()
    assert (stored.count, stored.params) == (3, 3 * 64 * 128)
    assert kernel in details["kernels"][kind] and details["kernels"]["F16"] == "torch"
    assert sum(details["sizes"].values()) == outcome.model.size_bytes
    assert details["sizes"]["codes_bytes"] == 3 * 64 * 128 * (1 if "8" in kind else 0.5)
    assert msgspec.json.encode(outcome)


@pytest.mark.parametrize(
    ("make", "entry", "kept", "said"),
    [
        (as_gptq, None, (KEPT,), "3 modules hold codes, and config.json has no `quantization_config`"),
        (as_gptq, GPTQ | {"bits": 8}, (KEPT,), "says 8 bits, and 3 of 3 modules have 4 bits"),
        (as_gptq, GPTQ | {"group_size": 128}, (KEPT,), "says groups of 128, and 3 of 3 modules have groups of 64"),
        (as_gptq, GPTQ | {"group_size": -1}, (KEPT,), "says whole rows, and 3 of 3 modules have groups of 64"),
        (as_gptq, AWQ | {"group_size": 64}, (KEPT,), "names awq, and 3 of 3 modules are laid out as GPTQ-INT4"),
        (as_awq, INT4, (KEPT,), "names compressed-tensors, and 3 of 3 modules are laid out as AWQ-INT4"),
        (as_gptq, GPTQ, (), "1 modules hold codes that config.json excludes from quantization"),
        (as_gptq, GPTQ, (KEPT, "model.layers.0.down_proj"), "claims 1 modules as quantized that hold plain weights"),
        (as_awq, AWQ | {"modules_to_not_convert": None}, (KEPT,), f"hold plain weights (first `{KEPT}`)"),
        (as_int8, FP8, (KEPT,), "says floats, and 3 of 3 modules have INT8"),
        (
            lambda name: packed_ints(64, 128, 4, 4, name),
            INT4,
            (KEPT,),
            "says symmetric, and 3 of 3 modules have zero p",
        ),
    ],
)
def test_a_config_that_the_tensors_contradict(
    make: Any, entry: dict[str, Any] | None, kept: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    warnings = inspect(quantized_folder(tmp_path / "m", make, entry, kept)).warnings
    assert {notice.code for notice in warnings} == {"config-content"}
    assert any(said in notice.message for notice in warnings), warnings


def test_a_config_that_names_a_method_over_plain_weights(tmp_path: Path) -> None:
    outcome = inspect(folder(tmp_path / "m", {"quantization_config": GPTQ}))
    assert codes(outcome) == {"config-content"}
    assert outcome.details["scheme"] == "F16"


def test_codes_of_a_layout_that_is_not_known(tmp_path: Path) -> None:
    def as_bitsandbytes(module: str) -> Tensors:
        return {f"{module}.weight": ("U8", np.zeros((4096, 1), "u1")), f"{module}.weight.absmax": ("F32", np.ones(128))}

    def as_floats(module: str) -> Tensors:
        return {
            name: (kind, v.astype("<f4") if kind == "F32" else v) for name, (kind, v) in as_bitsandbytes(module).items()
        }

    outcome = inspect(quantized_folder(tmp_path / "m", as_floats, {"quant_method": "bitsandbytes"}))
    assert codes(outcome) == {"unknown-codes"}


def record(path: Path, **asked: Any) -> None:
    made = Record("0.1", "gptq", asked, "parent", "0", content_sha256(path), engine="gptqmodel 7",
                  got={"losses": {"a": 1.0}, "n": 3})  # fmt: skip
    (path / RECORD_NAME).write_text(json.dumps(msgspec.to_builtins(made)))


def test_asked_beside_got(tmp_path: Path) -> None:
    path = quantized_folder(tmp_path / "m", as_gptq, GPTQ)
    record(path, bits=4, group_size=64)
    outcome = inspect(path)
    assert codes(outcome) == set()
    assert outcome.details["record"]["asked"] == {"bits": 4, "group_size": 64}
    assert outcome.details["record"]["got"] == {"n": 3} and outcome.details["record"]["engine"] == "gptqmodel 7"
    record(path, bits=3, group_size=-1)
    found = [notice.message for notice in inspect(path).warnings if notice.code == "asked-got"]
    assert len(found) == 2
    assert "bits 3 was asked, and 3 of 3 modules have 4" in found[0] and "have 64" in found[1]


def test_names_that_control_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[31mred\u202e"
    entry = {"quant_method": evil, "bits": 4, "meta": {evil: [evil]}}
    path = quantized_folder(tmp_path / "m", lambda name: as_gptq(name + evil), entry, kept=())
    change = json.loads((path / "config.json").read_text()) | {"architectures": [evil], "bos_token_id": evil}
    (path / "config.json").write_text(json.dumps(change))
    outcome = inspect(path)
    shown = json.dumps([outcome.details, [n.message for n in outcome.warnings]], ensure_ascii=False)
    assert "red" in shown and "\u202e" not in shown and "\\u001b" not in shown


def test_a_config_without_a_bottom(tmp_path: Path) -> None:
    deep: Any = "bottom"
    for _ in range(150):
        deep = [deep]
    shown = json.dumps(inspect(quantized_folder(tmp_path / "m", as_gptq, GPTQ | {"meta": deep})).details)
    assert "(list)" in shown and "bottom" not in shown


JUNK: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entry=st.sampled_from([GPTQ, AWQ, INT4, FP8]),
    junk=st.dictionaries(
        st.sampled_from(
            ["quant_method", "bits", "group_size", "dynamic", "ignore", "config_groups", "format", "version",
             "modules_in_block_to_quantize", "modules_to_not_convert", "sym"]
        ),
        JUNK,
    ),
    inside=st.dictionaries(st.sampled_from(["weights", "input_activations", "targets"]), JUNK),
    weights=st.dictionaries(st.sampled_from(["num_bits", "strategy", "group_size", "block_structure"]), JUNK),
    around=st.dictionaries(st.sampled_from(["architectures", "model_type", "text_config", "bos_token_id"]), JUNK),
)  # fmt: skip
def test_a_hostile_config_is_shown_or_refused(
    entry: dict[str, Any], junk: dict[str, Any], inside: Any, weights: Any, around: Any, tmp_path: Path
) -> None:
    path = tmp_path / "m"
    if not path.exists():
        quantized_folder(path, as_gptq, GPTQ)
        (tmp_path / "sound").write_text((path / "config.json").read_text())
    entry = json.loads(json.dumps(entry))
    if "config_groups" in entry:
        entry["config_groups"]["group_0"]["weights"] |= weights
        entry["config_groups"]["group_0"] |= inside
    changed = json.loads((tmp_path / "sound").read_text()) | around | {"quantization_config": entry | junk}
    (path / "config.json").write_text(json.dumps(changed))
    try:
        outcome = inspect(path)
    except QuantlabError:
        return
    assert msgspec.json.encode(outcome)
