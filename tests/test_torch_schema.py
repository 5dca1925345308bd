"""What config.json and the headers of an artifact show: wrong shapes and names, leaks, and what vLLM makes of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quantlab.quantize import torch_schema, torch_vllm
from tests import hf_folders, torch_artifacts
from tests.test_torch_check import drop, edit, quantization, rewrite
from tests.torch_artifacts import write_artifact


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schema") / "llama"
    hf_folders.write_folder(folder, "llama", model_type="llama")
    return folder


FORMS = {
    "gptq": {"form": "gptq"},
    "awq": {"form": "awq", "sym": False},
    "compressed": {"form": "compressed", "sym": False},
    "int8": {"form": "int8", "group": -1, "bits": 8},
}
Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("form", FORMS)
def test_headers_alone_accept_a_good_artifact(form: str, plain: Path, tmp_path: Path) -> None:
    write_artifact(tmp_path / "a", plain, **FORMS[form])
    assert torch_schema.find_fault(tmp_path / "a", plain, None) is None


@pytest.mark.parametrize(
    ("form", "leaf", "change", "said"),
    [
        ("gptq", "scales", lambda t: t[:1], "shape [1, 64], and its config.json means [2, 64]"),
        ("gptq", "qweight", lambda t: np.ascontiguousarray(t.T), "means [8, 64]"),
        ("gptq", "g_idx", lambda t: t.astype(np.int64), "stored as I64"),
        ("gptq", "scales", lambda t: t.astype(np.float32), "stored as F32"),
        ("awq", "qzeros", lambda t: t[:1], "means [2, 8]"),
        ("awq", "qweight", lambda t: np.ascontiguousarray(t.T), "means [64, 8]"),
        ("compressed", "weight_packed", lambda t: t[:, :4], "means [64, 8]"),
        ("compressed", "weight_shape", lambda t: t.astype(np.int32), "stored as I32"),
        ("compressed", "weight_zero_point", lambda t: None, "lacks `weight_zero_point`"),
        ("int8", "weight", lambda t: t.astype(np.int32), "stored as I32"),
        ("int8", "weight_scale", lambda t: t[:, 0], "means [64, 1]"),
    ],
)
def test_headers_show_what_config_does_not_mean(
    form: str, leaf: str, change: Callable[[np.ndarray], Any], said: str, plain: Path, tmp_path: Path
) -> None:
    write_artifact(tmp_path / "a", plain, **FORMS[form])
    rewrite(tmp_path / "a", lambda n, t: change(t) if n == f"{Q}.{leaf}" else t)
    assert said in str(torch_schema.find_fault(tmp_path / "a", plain, None))


def test_headers_show_a_wrong_group_and_a_foreign_tensor(plain: Path, tmp_path: Path) -> None:
    write_artifact(tmp_path / "a", plain, "gptq")
    quantization(lambda q: q.update(group_size=64))(tmp_path / "a")
    assert "its config.json means [1, 64]" in str(torch_schema.find_fault(tmp_path / "a", plain, None))
    path = tmp_path / "a" / "model.safetensors"
    save_file(load_file(path) | {"model.layers.9.mlp.up_proj.weight": np.zeros((2, 2), np.float16)}, path)
    assert "its parent does not have" in str(torch_schema.find_fault(tmp_path / "a", plain, None))


def test_a_path_that_the_parent_had_is_no_leak(plain: Path, tmp_path: Path) -> None:
    write_artifact(tmp_path / "a", plain, "gptq")
    parent = tmp_path / "parent"
    shutil.copytree(plain, parent)
    for folder in (parent, tmp_path / "a"):
        edit(folder / "config.json", lambda c: c.update(_name_or_path="/upstream/models/tiny"))
    (tmp_path / "a" / "README.md").write_text("see https://example.org/a/b and quantlab/quantize/x.py or a / b\n")
    assert torch_schema.find_fault(tmp_path / "a", parent, None) is None
    (tmp_path / "a" / "README.md").write_text("calibrated on /home/someone/notes.txt\n")
    assert "/home/someone/notes.txt" in str(torch_schema.find_fault(tmp_path / "a", parent, None))
    (tmp_path / "a" / "README.md").write_text("calibrated on C:\\Users\\someone\\notes.txt\n")
    assert "README.md" in str(torch_schema.find_fault(tmp_path / "a", parent, None))


def test_a_text_that_the_parent_had_is_no_leak(plain: Path, tmp_path: Path) -> None:
    write_artifact(tmp_path / "a", plain, "gptq")
    parent = tmp_path / "parent"
    shutil.copytree(plain, parent)
    for folder in (parent, tmp_path / "a"):
        edit(folder / "config.json", lambda c: c.update(note="of the upstream model " * 60))
    assert torch_schema.find_fault(tmp_path / "a", parent, None) is None
    edit(tmp_path / "a" / "config.json", lambda c: c.update(dataset="what was calibrated on " * 60))
    assert "more than 1000 characters" in str(torch_schema.find_fault(tmp_path / "a", parent, None))


def test_a_second_copy_of_a_head_may_go_unless_config_says_that_it_is_another(plain: Path, tmp_path: Path) -> None:
    """What the class of a model ties by default, its config.json need not tell."""
    parent = tmp_path / "parent"
    shutil.copytree(plain, parent)
    write_artifact(tmp_path / "a", parent, "gptq")
    drop("lm_head.weight")(tmp_path / "a")
    for says, fault in ((None, None), (False, "it lost `lm_head.weight`")):
        for folder in (parent, tmp_path / "a"):
            edit(folder / "config.json", lambda c, says=says: c.update(tie_word_embeddings=says))
        path = parent / "model.safetensors"
        tensors = load_file(path)
        save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, path, {"format": "pt"})
        assert torch_schema.find_fault(tmp_path / "a", parent, None) == fault


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"form": "gptq"}, ""),
        ({"form": "gptq", "sym": False}, "4 bits, asymmetric"),
        ({"form": "gptq", "bits": 2}, "2 bits, symmetric"),
        ({"form": "gptq", "bits": 8}, ""),
        ({"form": "gptq", "group": 16}, "not of 16"),
        ({"form": "gptq", "group": -1}, "do not take whole rows"),
        ({"form": "gptq", "keep": r"layers\.1\.self_attn\.q_proj"}, "only some of them are quantized"),
        ({"form": "gptq", "keep": r"\.mlp\.down_proj"}, ""),
        ({"form": "awq", "sym": False}, ""),
        ({"form": "awq", "sym": False, "keep": r"layers\.2\.mlp\.up_proj"}, "only some of them are quantized"),
        ({"form": "compressed"}, ""),
        ({"form": "compressed", "sym": False}, "do not take zero points"),
        ({"form": "compressed", "bits": 2}, "not of 2"),
        ({"form": "compressed", "bits": 8, "sym": False}, "8 bits with zero points"),
        ({"form": "int8", "group": -1, "bits": 8}, "no scheme for int-quantized"),
    ],
)
def test_vllms_refusals_are_named(options: dict[str, Any], said: str, plain: Path, tmp_path: Path) -> None:
    write_artifact(tmp_path / "a", plain, **options)
    notices = torch_vllm.notices(torch_schema.stored(tmp_path / "a", plain))
    # What it does load it computes slowly: no module of this model fills a tile.
    assert {notice.code for notice in notices} == {"vllm-refuses" if said else "marlin-tiles"}
    assert said in " / ".join(notice.message for notice in notices)


def test_vllm_and_transformers_that_read_a_config_differently_are_named(plain: Path, tmp_path: Path) -> None:
    write_artifact(tmp_path / "a", plain, "gptq", keep=r"\.mlp\.down_proj")
    # Without it vLLM sees the names alone; without the names transformers sees nothing.
    quantization(lambda q: q.update(dynamic={rf"-:.*{name}": {} for name in ("down_proj", "o_proj")}))(tmp_path / "a")
    found = torch_schema.stored(tmp_path / "a", plain)
    assert "otherwise than transformers" in torch_vllm.notices(found)[0].message


def test_vllms_kernel_sees_q_k_and_v_as_one_module() -> None:
    rows = {f"model.layers.0.self_attn.{x}_proj": n for x, n in (("q", 128), ("k", 32), ("v", 32), ("o", 128))}
    config = torch_artifacts.quantization_config("compressed", 4, 128, False, [])
    tensors = {f"{name}.weight_scale": ("F16", (n, 1)) for name, n in rows.items()}

    def stored() -> torch_schema.Stored:
        return torch_schema.Stored(config, tensors, {}, {name: (n, 128) for name, n in rows.items()}, list(rows))

    assert torch_vllm.notices(stored()) == []
    rows["model.layers.0.self_attn.v_proj"] = 16
    assert "(176 x 128)" in torch_vllm.notices(stored())[0].message
