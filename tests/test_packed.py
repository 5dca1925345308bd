"""Quantized folders are counted in the weights that they stand for: by formats packed here, and by the real engines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantlab.core.artifact import model_info, stored_weights
from quantlab.core.model import ModelFile
from quantlab.core.packed import Stored, named_method, stored_tensors
from quantlab.core.progress import silent
from tests.hf_folders import change_config, write_folder, write_safetensors
from tests.quantized_tensors import LAYER, Tensors, awq, gptq, header, packed_ints


def entry_of(method: str, bits: int, group: int) -> dict[str, Any]:
    if method != "compressed-tensors":
        return {"quantization_config": {"quant_method": method, "bits": bits, "group_size": group}}
    weights = {"num_bits": bits, "group_size": group, "type": "int", "strategy": "group"}
    group_0 = {"weights": weights, "targets": ["Linear"]}
    return {"quantization_config": {"quant_method": method, "config_groups": {"group_0": group_0}}}


def size(tensors: Tensors) -> int:
    return sum(values.nbytes for _, values in tensors.values())


@given(
    rows=st.integers(1, 6).map(lambda n: 32 * n),
    columns=st.integers(1, 6).map(lambda n: 32 * n),
    bits=st.sampled_from([2, 3, 4, 8]),
    groups=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(["gptq", "awq"]),
    config_is_right=st.booleans(),
    with_index=st.booleans(),
)
def test_classic_codes_count_as_their_weights(
    rows: int, columns: int, bits: int, groups: int, layout: str, config_is_right: bool, with_index: bool
) -> None:
    tensors = (gptq if layout == "gptq" else awq)(rows, columns, bits, groups)
    # What the tensors tell does not depend on a config that lies.
    config = entry_of(layout, bits, columns // groups) if config_is_right else entry_of("gptq", 5, 7)
    if not with_index:
        # The order of columns is told by some writers only where it is another than that of the groups.
        tensors.pop(f"{LAYER}.g_idx", None)
    [found] = stored_tensors(config, header(tensors))
    assert (found.name, found.kind) == (f"{LAYER}.weight", f"{layout.upper()}-INT{bits}")
    assert (found.shape, found.params, found.groups) == ((rows, columns), rows * columns, groups)
    assert found.parts["codes"] == rows * columns * bits // 8
    assert found.parts["scales"] == 2 * groups * rows and found.parts["zero_points"] == groups * rows * bits // 8
    assert found.size_bytes == size(tensors)


@given(
    rows=st.integers(1, 70),
    columns=st.integers(32, 200),
    bits=st.sampled_from([2, 3, 4, 8]),
    groups=st.integers(1, 4),
    zeros=st.booleans(),
    told=st.sampled_from(["right", "wrong", "nothing"]),
)
def test_packed_codes_count_without_their_padding(
    rows: int, columns: int, bits: int, groups: int, zeros: bool, told: str
) -> None:
    tensors = packed_ints(rows, columns, bits, groups, zeros=zeros)
    config = {} if told == "nothing" else entry_of("compressed-tensors", bits if told == "right" else 7, 32)
    [found] = stored_tensors(config, header(tensors), {LAYER: (rows, columns)})
    assert (found.kind, found.shape, found.groups) == (f"INT{bits}", (rows, columns), groups)
    assert found.size_bytes == size(tensors)
    assert ("zero_points" in found.parts) == zeros


def test_shapes_that_cannot_be_are_not_believed() -> None:
    tensors = packed_ints(8, 64, 4, 2)
    for shape in ((8, 10**12), (8, -64), (8, 0), ()):
        [found] = stored_tensors(entry_of("compressed-tensors", 4, 32), header(tensors), {LAYER: shape})
        assert (found.kind, found.shape) == ("INT4", (8, 64))


@pytest.mark.parametrize(
    ("weight", "scale", "kind", "groups"),
    [
        (("I8", np.zeros((8, 64), "i1")), ("F16", np.ones((8, 1), "<f2")), "INT8", 1),
        (("F8_E4M3", np.zeros((8, 64), "u1")), ("F32", np.ones((8, 1), "<f4")), "FP8_E4M3", 1),
        (("F8_E4M3", np.zeros((8, 64), "u1")), ("F32", np.ones(1, "<f4")), "FP8_E4M3", None),
        (("F8_E5M2", np.zeros((8, 64), "u1")), ("F32", np.ones((1, 1), "<f4")), "FP8_E5M2", None),
    ],
)
def test_bytes_with_a_scale(
    weight: tuple[str, np.ndarray], scale: tuple[str, np.ndarray], kind: str, groups: int | None
) -> None:
    named = "weight_scale_inv" if scale[1].shape == (1, 1) else "weight_scale"
    static = {f"{LAYER}.input_scale": ("F32", np.ones(1, "<f4"))}
    tensors = {f"{LAYER}.weight": weight, f"{LAYER}.{named}": scale, **static}
    [found] = stored_tensors({}, header(tensors))
    assert (found.kind, found.shape, found.groups, found.size_bytes) == (kind, (8, 64), groups, size(tensors))


def test_plain_weights_beside_codes_are_tensors_of_their_own() -> None:
    plain: Tensors = {f"{LAYER}.weight": ("F16", np.zeros((64, 64), "<u2"))}
    found = stored_tensors({}, header(gptq(64, 64, 4, 2) | plain))
    assert {(t.kind, t.size_bytes) for t in found} == {("GPTQ-INT4", size(gptq(64, 64, 4, 2))), ("F16", 2 * 64 * 64)}


def test_four_bit_floats() -> None:
    for scale, kind in (("F8_E4M3", "NVFP4"), ("U8", "MXFP4")):
        tensors: Tensors = {
            f"{LAYER}.weight_packed": ("U8", np.zeros((8, 32), "u1")),
            f"{LAYER}.weight_scale": (scale, np.ones((8, 4), "u1")),
        }
        [found] = stored_tensors({}, header(tensors))
        assert (found.kind, found.params) == (kind, 8 * 64)


def test_what_is_no_known_layout_stays_as_it_is_stored() -> None:
    tensors: Tensors = {
        "a.qweight": ("I32", np.zeros((4, 8), "<i4")),
        "b.scales": ("F16", np.zeros((4, 8), "<f2")),
        "c.weight": ("I8", np.zeros((4, 8), "i1")),
        "d.weight": ("F16", np.zeros((4, 8), "<f2")),
        "d.bias": ("F32", np.zeros(4, "<f4")),
        "e": ("F32", np.zeros((), "<f4")),
    }
    found = stored_tensors({}, header(tensors))
    assert {(t.name, t.kind, t.params) for t in found} == {
        (name, kind, math.prod(values.shape)) for name, (kind, values) in tensors.items()
    }
    assert not any(t.quantized for t in found)


ROLES = ["qweight", "qzeros", "scales", "g_idx", "weight", "weight_packed", "weight_scale", "weight_shape",
         "weight_zero_point", "bias", "input_scale", "weight_g_idx"]  # fmt: skip
WIDTHS = {"I32": 4, "I64": 8, "F16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F32": 4, "I16": 2}


@st.composite
def hostile_headers(draw: st.DrawFn) -> dict[str, Any]:
    found, end = {}, 0
    for module in draw(st.lists(st.sampled_from(["a", "b.0", ""]), min_size=1, max_size=3, unique=True)):
        for leaf in draw(st.lists(st.sampled_from(ROLES), unique=True)):
            kind, shape = draw(st.sampled_from(list(WIDTHS))), draw(st.lists(st.integers(0, 9), max_size=3))
            n = math.prod(shape) * WIDTHS[kind]
            name = f"{module}.{leaf}" if module else leaf
            found[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + n]}
            end += n
    return found


JUNK: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
KEYS = ["quant_method", "bits", "w_bit", "group_size", "config_groups", "version", "sym", "dynamic", "ignore", "format"]


@settings(max_examples=300)
@given(found=hostile_headers(), entry=st.dictionaries(st.sampled_from(KEYS), JUNK), shape=st.lists(st.integers()))
def test_no_byte_is_lost_or_counted_twice(found: dict[str, Any], entry: dict[str, Any], shape: list[int]) -> None:
    stored = stored_tensors({"quantization_config": entry}, found, {"a": tuple(shape), "b.0": (4, 8)})
    assert sum(t.size_bytes for t in stored) == sum(t["data_offsets"][1] - t["data_offsets"][0] for t in found.values())
    assert all(t.params >= 0 for t in stored)
    assert named_method(entry) in ("awq", "gptq", "fp8", "int8", "rtn")


def info_of(folder: Path) -> Any:
    return model_info(ModelFile(str(folder), folder.name, folder.name, "0"))


def test_bits_per_weight_of_a_folder(tmp_path: Path) -> None:
    embedding: Tensors = {"model.embed_tokens.weight": ("F16", np.zeros((10, 64), "<u2"))}
    # 176 codes of 4 bits fill 172 weights' integers: the shape in the file tells.
    tensors = packed_ints(8, 172, 4, 1)
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", embedding | dict(list(tensors.items())[:1]))
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", dict(list(tensors.items())[1:]))
    (tmp_path / "config.json").write_text(json.dumps(entry_of("compressed-tensors", 4, 172)))
    info = info_of(tmp_path)
    assert {kind: (t.count, t.params) for kind, t in info.tensor_types.items()} == {
        "INT4": (1, 8 * 172), "F16": (1, 640),
    }  # fmt: skip
    assert info.bits_per_weight == 8 * (1280 + size(tensors)) / (640 + 8 * 172)
    assert info.method == "rtn"


def compressed(**group: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("entry", "method"),
    [
        (None, "none"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "fp8"}, "fp8"),
        (compressed(weights={"num_bits": 8, "type": "float"}), "fp8"),
        (compressed(weights={"num_bits": 8, "type": "int"}, input_activations={"num_bits": 8}), "int8"),
        (compressed(weights={"num_bits": 8, "type": "int", "actorder": "static"}, input_activations={}), "int8"),
        (compressed(weights={"num_bits": 4, "type": "int", "actorder": "static"}), "gptq"),
        (compressed(weights={"num_bits": 4, "type": "int"}, input_activations=None), "rtn"),
        ({"quant_method": "bitsandbytes"}, "rtn"),
    ],
)
def test_the_method_that_a_foreign_config_tells(entry: dict[str, Any] | None, method: str) -> None:
    assert named_method(entry) == method


ENGINES = [
    ("gptqmodel", "gptq", {"bits": 3, "group_size": 32, "sym": True}, "GPTQ-INT3"),
    ("gptqmodel", "awq", {"bits": 4, "group_size": 32, "sym": False}, "AWQ-INT4"),
    ("llmcompressor", "rtn", {"bits": 4, "group_size": 32, "sym": False}, "INT4"),
]


@pytest.mark.parametrize(("engine", "method", "weights", "kind"), ENGINES, ids=[f"{e}-{m}" for e, m, *_ in ENGINES])
def test_an_engine_s_artifact_has_the_weights_of_its_parent(
    engine: str, method: str, weights: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    pytest.importorskip(engine)
    from quantlab.core.corpus import Corpus
    from quantlab.quantize.torch_work import EngineDone, EngineJob, Samples, Weights
    from quantlab.runtime.worker import run_in_child

    parent, out = tmp_path / "parent", tmp_path / "out"
    write_folder(parent, "mistral", kind="F16")
    change_config(parent, model_type="mistral", num_hidden_layers=3)
    out.mkdir()
    text = "the river rises in the hills and the wind turns the mill. 12 345\n" * 200
    kept = "model.layers.1.mlp.down_proj"
    job = EngineJob(
        method=method, folder=str(parent), out=str(out), probe=str(tmp_path / "probe"), keep=[kept], device="cpu",
        dtype="float32", threads=1, seed=0, weights=Weights(**weights),
        calibration=Samples([(Corpus("mill", "0", False, [text]), 1.0)], 4, 64, 0) if "gptqmodel" in engine else None,
    )  # fmt: skip
    call = f"quantlab.quantize.engines.{engine}:work"
    done = msgspec.convert(run_in_child(call, msgspec.to_builtins(job), silent), EngineDone)
    stored, before = by_name(stored_weights(out)), by_name(stored_weights(parent))
    assert {name: t.shape for name, t in stored.items()} == {name: t.shape for name, t in before.items()}
    assert {t.module for t in stored.values() if t.kind == kind} == set(done.layers)
    assert stored[f"{kept}.weight"].kind == "F16" and not any(t.quantized for t in before.values())
    n = len(done.layers)
    info = info_of(out)
    assert info.method == method and info.tensor_types[kind].count == n
    assert info.tensor_types["F16"].count == len(before) - n
    assert sum(t.params for t in info.tensor_types.values()) == sum(t.params for t in before.values())


def by_name(stored: list[Stored]) -> dict[str, Stored]:
    return {tensor.name: tensor for tensor in stored}
