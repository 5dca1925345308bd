"""Where a model comes from: what a GGUF file says of itself, and what is said where `--against` is no parent."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantlab.core.artifact import Record, model_info, write_record
from quantlab.core.lineage import as_many_weights, made_from
from quantlab.core.model import ModelFile
from quantlab.core.result import ModelInfo, TensorType
from quantlab.evaluate.parent import of_models
from tests.tiny_gguf import write_gguf


def info(sha256: str, method: str = "gguf", *, of: str | None = None, weights: int = 1_000_000) -> ModelInfo:
    types = {"X": TensorType(1, weights)}
    return ModelInfo(sha256, "gguf", method, 1, 4.0, types, parent=of, sha256=sha256, parent_sha256=of)


def test_a_gguf_file_without_its_record_still_names_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "copy.gguf"
    write_gguf(path, metadata={"quantlab.parent": "demo", "quantlab.parent_sha256": "ab", "quantlab.note": "old"})
    found = model_info(ModelFile(str(path), "copy", "copy.gguf", "cd"))
    assert (found.parent, found.parent_sha256, found.note) == ("demo", "ab", "old")
    # The record counts more.
    write_record(path, Record("0", "gguf", {}, parent="other", parent_sha256="ef", sha256="cd"))
    found = model_info(ModelFile(str(path), "copy", "copy.gguf", "cd"))
    assert (found.parent, found.parent_sha256, found.note) == ("other", "ef", None)
    # What is no text tells nothing.
    write_gguf(tmp_path / "hostile.gguf", metadata={"quantlab.parent_sha256": 7})
    assert model_info(ModelFile(str(tmp_path / "hostile.gguf"), "h", "h", "1")).parent_sha256 is None


def test_the_parent_in_16_bits_stands_for_the_parent() -> None:
    child = info("q4", of="folder")
    assert made_from(child, info("folder", "none")) is True
    assert made_from(child, info("f16", "none", of="folder")) is True
    assert made_from(child, info("q8", of="folder")) is False
    assert made_from(child, info("other", "none")) is False
    assert made_from(info("download"), info("other", "none")) is None


def test_sizes_of_one_model_may_differ_by_a_little() -> None:
    assert as_many_weights(info("a", weights=1_000_000), info("b", weights=1_000_064))
    assert not as_many_weights(info("a", weights=1_000_000), info("b", weights=1_100_000))


@pytest.mark.parametrize(
    ("child", "parent", "told"),
    [
        (info("q4", of="folder"), info("f16", "none", of="folder"), None),
        (info("q4", of="folder"), info("q4", of="folder"), None),
        (info("q4", of="folder"), info("twin", "none"), "was made from `folder` by its record, and `P` is not that"),
        (info("download"), info("twin", "none"), None),
        (info("download"), info("big", "none", weights=7_000_000), "has 1 million weights, `P` 7: it is not"),
    ],
)
def test_a_model_that_is_not_the_parent_is_named(child: ModelInfo, parent: ModelInfo, told: str | None) -> None:
    notices = of_models(("C", "P"), child, parent)
    assert [notice.code for notice in notices] == (["not-the-parent"] if told else [])
    if told:
        assert notices[0].message.startswith(f"`C` {told}")
        assert "not what quantization costs" in notices[0].message
