"""Folders and records that are damaged or hostile: an error that names the file, never a crash."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from quantlab.core.artifact import gguf_shards, read_json, read_record, safetensors_files, safetensors_header
from quantlab.core.errors import QuantlabError

DEEP = "[" * 200_000


def safetensors(header: bytes, data: bytes = bytes(256)) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def header_of(**entry: object) -> bytes:
    return json.dumps({"t": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256], **entry}}).encode()


def test_a_sound_header(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors(header_of()))
    assert safetensors_header(path)["t"]["shape"] == [64]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234",
        safetensors(DEEP.encode()),
        safetensors(b"[]"),
        safetensors(b"\xff" * 9),
        struct.pack("<Q", 2**63) + header_of(),
        safetensors(header_of(shape=[64.0])),
        safetensors(header_of(shape=[True, 64])),
        safetensors(header_of(shape=[-64])),
        safetensors(header_of(shape="64")),
        safetensors(header_of(data_offsets=[0.0, 256.0])),
        safetensors(header_of(data_offsets=[256, 0])),
        safetensors(header_of(data_offsets=[-256, 0])),
        safetensors(header_of(data_offsets=[0, 256, 1])),
        safetensors(header_of(data_offsets=[4, 260])),
        safetensors(header_of(data_offsets=[4, 260]), bytes(260)),
        safetensors(header_of(), bytes(257)),
        safetensors(
            json.dumps({n: {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]} for n in "ab"}).encode(), bytes(9)
        ),
        safetensors(header_of(dtype="F31")),
        safetensors(header_of(dtype=["F32"])),
    ],
)
def test_damaged_safetensors_are_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(QuantlabError, match=r"m\.safetensors") as caught:
        safetensors_header(path)
    assert caught.value.hint


def test_a_damaged_length_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 40))
        file.truncate(1 << 41)
    with pytest.raises(QuantlabError, match="too long"):
        safetensors_header(path)


@pytest.mark.parametrize("content", [DEEP, "[]", "{", '{"weight_map": [1]}', '{"weight_map": {"a": "../x"}}', "{}"])
def test_a_damaged_index_is_refused_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(QuantlabError, match=r"index\.json"):
        safetensors_files(tmp_path)


@pytest.mark.parametrize("content", [DEEP, "[]", "{", "\xff"])
def test_damaged_json_is_refused_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content, "latin-1")
    with pytest.raises(QuantlabError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text('{"mine": 1}'),
        lambda path: path.write_text(DEEP),
        lambda path: path.write_bytes(b"\xff\xfe"),
    ],
)
def test_a_foreign_file_in_the_place_of_a_record_is_named(spoil: Callable[[Path], int], tmp_path: Path) -> None:
    spoil(tmp_path / "m.gguf.json")
    with pytest.raises(QuantlabError, match=r"m\.gguf\.json.*belongs and is none") as caught:
        read_record(tmp_path / "m.gguf")
    assert "move it" in caught.value.hint


@pytest.mark.parametrize("name", ["m-00001-of-99999.gguf", "m-00001-of-00000.gguf", "m-00003-of-00002.gguf"])
def test_a_part_of_a_split_model_without_the_others_is_named(name: str, tmp_path: Path) -> None:
    for part in (name, "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        (tmp_path / part).write_text("")
    with pytest.raises(QuantlabError, match=name) as caught:
        gguf_shards(tmp_path / name)
    assert len(caught.value.message) < 1000
