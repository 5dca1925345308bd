"""GGUF headers: what the gguf package writes is read; what is damaged or hostile is an error, never a crash."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from pathlib import Path

import gguf
import llama_cpp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantlab.core.errors import QuantlabError
from quantlab.core.gguf_file import TYPES, kv_bytes_per_token, read_header
from tests.tiny_gguf import HEAD_DIM, KV_HEADS, LAYERS, write_gguf, write_wide

QUICK = settings(deadline=2000, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "m.gguf"
    write_wide(path, hidden=32, ffn=32, layers=1)
    return path.read_bytes()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "x.gguf"


def test_a_header_is_what_the_gguf_package_reads(sound: bytes, target: Path) -> None:
    target.write_bytes(sound)
    header, reader = read_header(target), gguf.GGUFReader(target)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == expected
    assert [(t.name, t.shape, t.type, t.offset, t.size_bytes) for t in header.tensors] == [
        (t.name, tuple(t.shape.tolist()), t.tensor_type.name, t.data_offset, t.n_bytes) for t in reader.tensors
    ]
    assert header.size_bytes == len(sound)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(share: float, sound: bytes, target: Path) -> None:
    target.write_bytes(sound[: int(len(sound) * share)])
    with pytest.raises(QuantlabError) as caught:
        read_header(target)
    assert str(target) in caught.value.message and caught.value.hint


@QUICK
@given(data=st.binary(max_size=400))
def test_random_bytes_never_crash_the_reader(data: bytes, target: Path) -> None:
    for head in (b"", b"GGUF" + struct.pack("<I", 3)):
        target.write_bytes(head + data)
        with contextlib.suppress(QuantlabError):
            assert read_header(target).tensors == []


@QUICK
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 3000), st.sampled_from([b"\0", b"\xff", b"\x7f", b"\x80", b"\xff" * 8, b"\0" * 8])),
        min_size=1,
        max_size=4,
    )
)
def test_a_changed_file_is_read_or_refused(changes: list[tuple[int, bytes]], sound: bytes, target: Path) -> None:
    data = bytearray(sound)
    for at, new in changes:
        data[at : at + len(new)] = new
    target.write_bytes(data)
    try:
        header = read_header(target)
    except QuantlabError:
        return
    # What is accepted lies within the file.
    assert all(0 <= t.offset <= t.offset + t.size_bytes <= len(data) for t in header.tensors)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def file_of(n_tensors: int, entries: list[bytes], tail: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, len(entries)) + b"".join(entries) + tail + bytes(64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (file_of(2**60, []), "do not fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + bytes(64), "do not fit"),
        (b"GGUF" + struct.pack("<IQQ", 0x03000000, 0, 0) + bytes(64), "version"),
        (file_of(0, [string(b"a") + struct.pack("<IIQ", 9, 4, 2**20)]), "does not fit"),
        (file_of(0, [string(b"a") + struct.pack("<IIQ", 9, 8, 2**20)]), "does not fit"),
        (file_of(0, [string(b"a") + struct.pack("<IIQ", 9, 8, 2) + string(b"x") + b"\xff" * 8]), "array of strings"),
        (file_of(0, [string(b"a") + struct.pack("<IIQ", 9, 9, 1)]), "array of metadata type 9"),
        (file_of(0, [string(b"a") + struct.pack("<I", 77)]), "metadata type 77"),
        (file_of(0, [string(b"general.alignment") + struct.pack("<II", 4, 3)]), "alignment"),
        (file_of(1, [], string(b"t") + struct.pack("<I", 5)), "5 dimensions"),
        (file_of(1, [], string(b"t") + struct.pack("<IQIQ", 1, 4, 99, 0)), "unknown type 99"),
        (file_of(1, [], string(b"t\xff") + struct.pack("<IQIQ", 1, 4, 0, 0)), "the name 't"),
        (file_of(1, [], string(b"t\x1b[2J") + struct.pack("<IQIQ", 1, 4, 0, 0)), "the name 't"),
        (file_of(1, [], string(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0)), "shape"),
        (file_of(1, [], string(b"t") + struct.pack("<IQIQ", 1, 2**63, 0, 0)), "truncated"),
        (file_of(2, [], 2 * (string(b"t") + struct.pack("<IQIQ", 1, 4, 0, 0))), "same name"),
    ],
)
def test_each_lie_is_named(content: bytes, message: str, target: Path) -> None:
    target.write_bytes(content)
    with pytest.raises(QuantlabError, match=message):
        read_header(target)


def test_an_array_as_long_as_the_file_does_not_fill_the_memory(target: Path) -> None:
    target.write_bytes(file_of(0, [string(b"a") + struct.pack("<IIQ", 9, 0, 2**28)]))
    os.truncate(target, 2**29)
    with pytest.raises(QuantlabError, match="an array of 268435456 items"):
        read_header(target)


def test_kv_bytes_are_those_of_all_layers_in_f16(target: Path) -> None:
    write_gguf(target)
    assert kv_bytes_per_token(read_header(target)) == LAYERS * KV_HEADS * HEAD_DIM * 2 * 2


@pytest.mark.parametrize(
    "metadata",
    [{"llama.attention.head_count": 0}, {"llama.attention.head_count_kv": 2**31, "llama.block_count": "2" * 999}],
)
def test_metadata_that_is_no_transformer_is_named(metadata: dict[str, bool | int | str], target: Path) -> None:
    write_gguf(target, metadata=metadata)
    with pytest.raises(QuantlabError, match=r"metadata of `.*x\.gguf` is damaged"):
        kv_bytes_per_token(read_header(target))


def test_block_sizes_are_those_of_the_library() -> None:
    lib = llama_cpp.llama_cpp._lib
    lib.ggml_type_name.restype = ctypes.c_char_p
    lib.ggml_blck_size.restype = ctypes.c_int64
    lib.ggml_type_size.restype = ctypes.c_size_t
    for number in range(43):
        name = lib.ggml_type_name(number)
        if lib.ggml_type_size(number) == 0:
            assert number not in TYPES
            continue
        assert TYPES[number] == (name.decode().upper(), lib.ggml_blck_size(number), lib.ggml_type_size(number))
    for kind, (block, size_bytes) in gguf.GGML_QUANT_SIZES.items():
        # The package has 40 bytes for Q8_1: two float32 where ggml-common.h has two half floats.
        assert TYPES[int(kind)] == (kind.name, block, 36 if kind.name == "Q8_1" else size_bytes)
