"""Rounding, damage and memory of the weights that are converted."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantlab.core.errors import QuantlabError
from quantlab.quantize.convert import convert, weights
from quantlab.quantize.convert.weights import TYPES, from_float32, is_finite, to_float32
from tests.hf_folders import (
    FFN,
    bfloat16_bits,
    change_config,
    narrow,
    random_weights,
    tensor_shapes,
    write_folder,
    write_safetensors,
)

BITS32 = st.integers(0, 2**32 - 1).filter(lambda bits: bits & 0x7F800000 != 0x7F800000)


def float32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


@given(st.lists(BITS32, min_size=1, max_size=20))
def test_bfloat16_is_the_nearest_with_ties_to_even(bits: list[int]) -> None:
    got = from_float32(np.array(bits, "<u4").view("<f4"), TYPES["BF16"])
    assert got.tolist() == [bfloat16_bits(float32(b)) for b in bits]


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F808000, 0x3F80),  # a tie above an even one
        (0x3F818000, 0x3F82),  # a tie above an odd one
        (0x3F808001, 0x3F81),
        (0x00008000, 0x0000),  # subnormal tie
        (0x80018000, 0x8002),
        (0x7F7F7FFF, 0x7F7F),  # the largest that stays finite
        (0x7F7F8000, 0x7F80),
        (0x7F7FFFFF, 0x7F80),
    ],
)
def test_bfloat16_at_its_edges(bits: int, expected: int) -> None:
    assert from_float32(np.array([bits], "<u4").view("<f4"), TYPES["BF16"])[0] == expected


@given(st.lists(st.floats(-65519, 65519, width=32), min_size=1, max_size=20))
def test_float16_is_what_struct_packs(values: list[float]) -> None:
    got = from_float32(np.array(values, np.float32), TYPES["F16"])
    assert got.tobytes() == b"".join(struct.pack("<e", value) for value in values)


@pytest.mark.parametrize("name", list(TYPES))
@given(bits=st.integers(0, 2**32 - 1))
def test_finite_is_what_math_says(name: str, bits: int) -> None:
    kind = TYPES[name]
    array = np.array([bits & (2 ** (8 * kind.bits.itemsize) - 1)], kind.bits)
    value = float32(int(array[0]) << 16 if name == "BF16" else int(array[0])) if name != "F16" else None
    value = struct.unpack("<e", array.tobytes())[0] if value is None else value
    assert is_finite(array, kind) == math.isfinite(value)
    assert is_finite(array, kind) is False or float(to_float32(array, kind)[0]) == value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "hf", "llama")
    return tmp_path / "hf"


def spoiled(folder: Path, value: float, source: str) -> None:
    """Put `value` last into one tensor."""
    values = random_weights("llama", json.loads((folder / "config.json").read_text()))
    bits = {name: (source, narrow(v, source)) for name, v in values.items()}
    wide = np.float32(value).view("u4")
    last = {"F32": wide, "BF16": wide >> 16, "F16": {math.inf: 0x7C00, -math.inf: 0xFC00}.get(value, 0x7E00)}
    bits["model.layers.2.self_attn.v_proj.weight"][1][-1, -1] = last[source]
    write_safetensors(folder / "model.safetensors", bits)


@pytest.mark.parametrize("outtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("source", ["F16", "BF16", "F32"])
@pytest.mark.parametrize(("value", "name"), [(math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "inf")])
def test_weights_that_are_not_finite_are_named(
    folder: Path, tmp_path: Path, source: str, outtype: str, value: float, name: str
) -> None:
    spoiled(folder, value, source)
    with pytest.raises(QuantlabError, match=rf"`model.layers.2.self_attn.v_proj.weight` holds {name}"):
        convert(folder, tmp_path / "out.gguf", outtype=outtype)


def test_what_float16_cannot_hold_is_named(folder: Path, tmp_path: Path) -> None:
    spoiled(folder, 70000.0, "F32")
    with pytest.raises(QuantlabError, match=r"v_proj.weight` holds 70000, too large for F16") as caught:
        convert(folder, tmp_path / "out.gguf", outtype="F16")
    assert "--outtype BF16" in caught.value.hint
    convert(folder, tmp_path / "out.gguf", outtype="BF16")
    spoiled(folder, 3.4e38, "F32")
    with pytest.raises(QuantlabError, match="too large for BF16") as caught:
        convert(folder, tmp_path / "out.gguf", outtype="BF16")
    assert "--outtype F32" in caught.value.hint


def test_the_last_value_that_rounds_down_to_float16_is_kept(folder: Path, tmp_path: Path) -> None:
    spoiled(folder, 65519.996, "F32")
    convert(folder, tmp_path / "out.gguf", outtype="F16")


def test_small_pieces_give_the_same_file(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(folder, tmp_path / "one.gguf", outtype="F16")
    monkeypatch.setattr(weights, "_CHUNK_WEIGHTS", 200)
    convert(folder, tmp_path / "two.gguf", outtype="F16")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


def test_weights_at_odd_places_are_read(folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "one.gguf", outtype="F16")
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    # The header may be padded with spaces to any length.
    path.write_bytes(struct.pack("<Q", size + 1) + data[8 : 8 + size] + b" " + data[8 + size :])
    convert(folder, tmp_path / "two.gguf", outtype="F16")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


def test_a_tensor_in_two_files_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "model-2.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(QuantlabError, match=r"holds the tensor `model\.embed_tokens\.weight` twice"):
        convert(folder, tmp_path / "out.gguf", outtype="F16")


MEASURED = """
import sys
from pathlib import Path
from quantlab.core.hardware import peak_process_bytes
from quantlab.quantize.convert import convert
convert(Path(sys.argv[1]), Path(sys.argv[2]), outtype="F16")
print(peak_process_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process's peak is not its own alone")
def test_memory_does_not_grow_with_the_weights(folder: Path, tmp_path: Path) -> None:
    """Nine matrices of 32 MB in bfloat16; what was read and written leaves the process at once."""

    def peak_bytes() -> int:
        command = [sys.executable, "-c", MEASURED, str(folder), str(tmp_path / "out.gguf")]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    small = peak_bytes()
    wide = 256 * 1024
    change_config(folder, intermediate_size=wide)
    c = json.loads((folder / "config.json").read_text())
    stored = {}
    for name, shape in tensor_shapes("llama", c).items():
        actual = tuple(wide if n == FFN else n for n in shape)
        stored[name] = ("BF16", np.full(actual, 0x3C00, "<u2"))
    write_safetensors(folder / "model.safetensors", stored)
    assert (folder / "model.safetensors").stat().st_size > 300e6
    assert peak_bytes() - small < 48e6
