"""quantize --method gguf: stored bytes, records, warnings, refusals, and what a killed or failed run leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import msgspec
import numpy as np
import pytest

from quantlab.core.artifact import read_record
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.gguf_file import TYPES as STORED_TYPES
from quantlab.core.gguf_file import read_header
from quantlab.core.model import ModelFile
from quantlab.core.progress import silent
from quantlab.core.result import Outcome
from quantlab.quantize import inspection, methods
from quantlab.quantize.convert import convert
from quantlab.quantize.gguf_facts import nominal_bits
from quantlab.quantize.gguf_work import Job
from quantlab.quantize.inspection import label_type
from quantlab.quantize.llama_quantize import quantize
from quantlab.quantize.spec import (
    NEED_IMATRIX,
    TYPES,
    WIDE_TYPES,
    InspectSpec,
    QuantizeSpec,
    check_spec,
    split_weight,
)
from tests.hf_folders import write_folder
from tests.tiny_gguf import LAYERS, model_file, stored_metadata, stored_tensors, write_wide

MATRICES = [f"blk.{i}.{kind}.weight" for i in range(LAYERS) for kind in ("attn_q", "ffn_down")]


def run(model: Path, out: Path, **options: Any) -> Outcome:
    return methods.run(QuantizeSpec(model_file(model), str(out), threads=1, **options), silent)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Columns of 256 and 512: every type fits."""
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    write_wide(path)
    return path


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Columns of 64 and 96: no block of 256 fits."""
    path = tmp_path_factory.mktemp("narrow") / "narrow.gguf"
    write_wide(path, hidden=64, ffn=96)
    return path


def test_file_types_are_those_of_the_library() -> None:
    found = {
        name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_"): number
        for name, number in vars(llama_cpp).items()
        if name.startswith("LLAMA_FTYPE_")
    }
    # GUESSED is no type, and llama_model_quantize has no quantizer for NVFP4.
    del found["GUESSED"], found["NVFP4"]
    assert found == TYPES


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, for the types that take seconds for 100,000 weights."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    write_wide(path, ffn=256, layers=1)
    return path


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_that_is_offered_is_written(kind: str, small: Path, tmp_path: Path) -> None:
    matrices = [name for name in stored_tensors(small) if name.startswith("blk.") and "norm" not in name]
    importance = {name: np.ones(256, np.float32) for name in matrices} if kind in NEED_IMATRIX else {}
    rest = [] if kind in WIDE_TYPES else ["attn_", "ffn_[gd]"]
    job = Job(str(tmp_path / "o.gguf"), kind, skip=rest, metadata={"quantlab.type": kind})
    quantize(small, job, importance, threads=2, progress=silent)
    # The gguf package does not know Q2_0.
    header = read_header(tmp_path / "o.gguf")
    assert header.metadata["general.file_type"] == TYPES[kind]
    assert header.metadata["quantlab.type"] == kind
    [stored] = [tensor.type for tensor in header.tensors if tensor.name == "blk.0.ffn_up.weight"]
    # Only experts become MXFP4.
    assert stored == ("Q8_0" if kind == "MXFP4_MOE" else label_type(kind))


@pytest.mark.parametrize("kind", sorted(NEED_IMATRIX))
def test_the_library_itself_refuses_these_types_without_importance(kind: str, small: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantlabError, match=r"imatrix|importance"):
        quantize(small, Job(str(tmp_path / "o.gguf"), kind), {}, threads=1, progress=silent)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_stored_bytes_are_those_of_the_python_reference(kind: str, tmp_path: Path) -> None:
    weights = write_wide(tmp_path / "m.gguf")
    run(tmp_path / "m.gguf", tmp_path / "o.gguf", type=kind)
    stored = stored_tensors(tmp_path / "o.gguf")
    for name in MATRICES:
        expected = gguf.quants.quantize(weights[name], gguf.GGMLQuantizationType[kind])
        if stored[name][0] == kind:  # the library keeps some matrices in more bits
            assert stored[name][1] == expected.tobytes(), name
    assert sum(stored[name][0] == kind for name in MATRICES) >= 2


def test_importance_reaches_the_quantizer(wide: Path, tmp_path: Path) -> None:
    plain = Job(str(tmp_path / "plain.gguf"), "Q4_0")
    weighed = Job(str(tmp_path / "weighed.gguf"), "Q4_0")
    importance = {"blk.1.attn_q.weight": np.linspace(1, 100, 256, dtype=np.float32)}
    quantize(wide, plain, {}, threads=1, progress=silent)
    quantize(wide, weighed, importance, threads=1, progress=silent)
    a, b = stored_tensors(tmp_path / "plain.gguf"), stored_tensors(tmp_path / "weighed.gguf")
    assert {name for name in a if a[name] != b[name]} >= {"blk.1.attn_q.weight"}
    assert a["blk.1.attn_k.weight"] == b["blk.1.attn_k.weight"]


def test_the_outcome_says_what_is_stored(wide: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    out = tmp_path / "wide-Q4_K_M.gguf"
    spec = QuantizeSpec(model_file(wide), str(out), threads=1, type="q4_k_m")
    outcome = methods.run(spec, lambda stage, done, total: seen.append(stage))
    stored = stored_tensors(out)
    counts = {kind: sum(1 for k, _ in stored.values() if k == kind) for kind, _ in stored.values()}
    assert outcome.details["got"] == counts
    assert {kind: entry.count for kind, entry in outcome.model.tensor_types.items()} == counts
    assert outcome.label == "wide-Q4_K_M"
    assert outcome.model.method == "gguf"
    assert outcome.model.size_bytes == out.stat().st_size
    names = {"duration", "peak_process_bytes", "peak_device_bytes", "size_bytes", "bits_per_weight"}
    assert set(outcome.measurements) == names
    # The child alone holds Python, numpy and llama.cpp.
    assert 20e6 < outcome.measurements["peak_process_bytes"].samples[0] < 1e9
    assert {"quantize", "check"} <= set(seen)
    assert [notice.code for notice in outcome.warnings] == ["small-model"]


def test_the_record_names_content_and_no_place(wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    text = tmp_path / "secret.txt"
    text.write_text("A line of calibration text that nobody should find again. " * 200)
    outcome = run(
        wide, out, imatrix=True, calib=[str(text)], calib_samples=2, calib_length=64, skip=["attn_q"], type="Q8_0"
    )
    record = read_record(out)
    assert record is not None
    assert record.sha256 == outcome.model.sha256 == model_file(out).sha256
    assert record.parent_sha256 == model_file(wide).sha256
    assert record.calibration is not None and record.calibration["samples"] == 2
    metadata = stored_metadata(out)
    assert metadata["quantlab.type"] == "Q8_0"
    assert metadata["quantlab.parent"] == "wide"
    assert metadata["quantlab.parent_sha256"] == record.parent_sha256
    assert metadata["quantlab.calibration_sha256"] == record.calibration["sha256"]
    assert metadata["quantize.imatrix.file"] == "o.imatrix.gguf"
    assert metadata["quantize.imatrix.chunks_count"] == 2
    assert (tmp_path / "o.imatrix.gguf").is_file()
    for file in (out, tmp_path / "o.gguf.json", tmp_path / "o.imatrix.gguf"):
        content = file.read_bytes()
        assert str(tmp_path).encode() not in content and str(wide.parent).encode() not in content
        assert b"nobody should find" not in content


def test_the_computed_importance_is_what_the_quantizer_uses(wide: Path, tmp_path: Path) -> None:
    run(wide, tmp_path / "o.gguf", imatrix=True, type="Q4_K_M", calib_samples=3, calib_length=64)
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "o.imatrix.gguf").tensors}
    importance = {
        name.removesuffix(".in_sum2"): (data / tensors[name.replace("in_sum2", "counts")]).astype(np.float32)
        for name, data in tensors.items()
        if name.endswith(".in_sum2")
    }
    quantize(wide, Job(str(tmp_path / "again.gguf"), "Q4_K_M"), importance, threads=1, progress=silent)
    assert stored_tensors(tmp_path / "again.gguf") == stored_tensors(tmp_path / "o.gguf")


def test_a_label_that_does_not_fit_is_told(narrow: Path, tmp_path: Path) -> None:
    outcome = run(narrow, tmp_path / "o.gguf", type="Q4_K_M")
    n = outcome.model.tensor_types["Q5_0"].count
    total = sum(entry.count for entry in outcome.model.tensor_types.values())
    [notice] = [notice for notice in outcome.warnings if notice.code == "label-content"]
    expected = f"Q4_K_M: {n} of {total} tensors stored as Q5_0, because 64 and 96 are not a multiple of 256: "
    assert notice.message.startswith(expected)
    got, nominal = notice.message.removeprefix(expected).split(" bits per weight, not ")
    assert float(got) == pytest.approx(outcome.model.bits_per_weight, abs=0.005)
    # Q4_K takes 4.5 bits, Q6_K 6.5625; the vectors are few.
    assert 4.5 < float(nominal) < 6.6 < outcome.model.bits_per_weight + 0.9
    assert outcome.details["fallbacks"][0]["wanted"] == "Q4_K"
    assert f"{nominal} is what the types that Q4_K_M stands for would take" in notice.hint


@pytest.mark.parametrize(
    "kind", ["Q4_K_M", "Q2_K", "Q3_K_S", "Q5_K_M", "Q6_K", "Q4_0", "IQ4_XS", "IQ3_XS", "IQ2_M", "IQ1_S"]
)
@pytest.mark.parametrize("tied", [True, False])
def test_nominal_bits_are_those_of_a_model_that_fits(kind: str, tied: bool, tmp_path: Path) -> None:
    told = {}
    for name, sizes in {"fits": {}, "narrow": {"hidden": 64, "ffn": 96}}.items():
        write_wide(tmp_path / f"{name}.gguf", tied=tied, **sizes)
        job = Job(str(tmp_path / "o.gguf"), kind, dry_run=True)
        told[name] = quantize(tmp_path / f"{name}.gguf", job, {}, threads=1, progress=silent)
    tensors = [
        msgspec.structs.replace(tensor, type=told["narrow"].types[tensor.name])
        for tensor in read_header(tmp_path / "narrow.gguf").tensors
    ]
    sizes = {name: 8 * size_bytes / block for name, block, size_bytes in STORED_TYPES.values()}
    expected = sum(sizes[told["fits"].types[tensor.name]] * tensor.params for tensor in tensors)
    expected /= sum(tensor.params for tensor in tensors)
    assert told["narrow"].fallbacks and not told["fits"].fallbacks
    assert nominal_bits(kind, tensors, told["narrow"].fallbacks) == pytest.approx(expected)


def test_skipped_matrices_stay_in_16_bits(wide: Path, tmp_path: Path) -> None:
    run(wide, tmp_path / "o.gguf", type="Q4_0", skip=[r"attn_[qk]\.", "token_embd"])
    stored, before = stored_tensors(tmp_path / "o.gguf"), stored_tensors(wide)
    kept = {name for name, (kind, _) in stored.items() if kind == "F16"}
    assert kept == {"token_embd.weight", *(f"blk.{i}.attn_{x}.weight" for i in range(LAYERS) for x in "qk")}
    assert all(stored[name] == before[name] for name in kept)


def test_a_quantized_input_is_refused_by_its_types_unless_allowed(wide: Path, tmp_path: Path) -> None:
    run(wide, tmp_path / "q8.gguf", type="Q8_0")
    with pytest.raises(UsageError, match=r"quantized already \(Q8_0\)") as caught:
        run(tmp_path / "q8.gguf", tmp_path / "o.gguf", type="Q4_0")
    assert "--allow-requantize" in caught.value.hint
    assert not (tmp_path / "o.gguf").exists()
    outcome = run(tmp_path / "q8.gguf", tmp_path / "o.gguf", type="Q4_0", allow_requantize=True)
    assert "requantized" in [notice.code for notice in outcome.warnings]


def test_what_was_true_of_the_input_is_not_said_of_the_output(wide: Path, tmp_path: Path) -> None:
    parent = msgspec.structs.replace(model_file(wide), revision="abc", note="dequantized from Q4_1")
    weighed = {"imatrix": True, "calib_samples": 2, "calib_length": 64}
    methods.run(QuantizeSpec(parent, str(tmp_path / "q8.gguf"), threads=1, type="Q8_0", **weighed), silent)
    assert stored_metadata(tmp_path / "q8.gguf")["quantlab.parent_revision"] == "abc"
    run(tmp_path / "q8.gguf", tmp_path / "o.gguf", type="Q4_0", allow_requantize=True)
    metadata = stored_metadata(tmp_path / "o.gguf")
    assert metadata["quantlab.parent"] == "q8"
    assert metadata["quantlab.parent_revision"] == metadata["quantlab.calibration_sha256"] == ""
    assert metadata["quantize.imatrix.entries_count"] == 0
    # What happened to the weights stays true.
    assert metadata["quantlab.note"] == "dequantized from Q4_1"
    found = inspection.run(InspectSpec(model_file(tmp_path / "o.gguf")), silent).details
    assert not found["importance_matrix"]
    assert "quantlab.calibration_sha256" not in found["record"]


def test_the_input_is_never_the_output(tmp_path: Path) -> None:
    write_wide(tmp_path / "m.gguf")
    before = model_file(tmp_path / "m.gguf")
    with pytest.raises(UsageError, match="is the input itself"):
        run(tmp_path / "m.gguf", tmp_path / "sub" / ".." / "m.gguf", force=True)
    assert model_file(tmp_path / "m.gguf") == before
    for i in (1, 2):
        (tmp_path / f"m-0000{i}-of-00002.gguf").write_bytes((tmp_path / "m.gguf").read_bytes())
    with pytest.raises(UsageError, match="is the input itself"):
        run(tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf", force=True)


def test_a_name_of_one_file_of_several_is_refused(wide: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one file of several"):
        run(wide, tmp_path / "o-00001-of-00002.gguf")
    assert list(tmp_path.iterdir()) == []


def test_samples_longer_than_the_context_are_refused(wide: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantlabError, match="longer than the model's context of 256"):
        run(wide, tmp_path / "o.gguf", imatrix=True, calib_length=512)
    assert list(tmp_path.iterdir()) == []


def test_output_is_kept_unless_forced(wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.gguf"
    out.write_bytes(b"precious")
    with pytest.raises(QuantlabError, match="exists") as caught:
        run(wide, out)
    assert "--force" in caught.value.hint and not isinstance(caught.value, UsageError)
    assert out.read_bytes() == b"precious"
    run(wide, out, force=True)
    assert "token_embd.weight" in stored_tensors(out)


def test_a_file_in_the_place_of_the_record_is_kept_unless_forced(wide: Path, tmp_path: Path) -> None:
    out, beside = tmp_path / "o.gguf", tmp_path / "o.gguf.json"
    beside.write_text('{"mine": 1}')
    with pytest.raises(QuantlabError, match=r"o\.gguf\.json"):
        run(wide, out)
    assert beside.read_text() == '{"mine": 1}'
    run(wide, out, force=True)
    # The record of an artifact that was removed is none of the user's.
    out.unlink()
    run(wide, out, type="Q8_0")
    assert read_record(out).asked["type"] == "Q8_0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "Q4_K_N"}, "unknown type `Q4_K_N`"),
        ({"type": "IQ2_XS"}, "needs an importance matrix"),
        ({"type": "IQ3_XXS"}, "needs an importance matrix"),
        ({"method": "awq"}, "`awq` writes a folder"),
        ({"method": "guff"}, "unknown method `guff`"),
        ({"type": "F16", "imatrix": True}, "does nothing for `F16`"),
        ({"type": "F16", "skip": ["q"]}, "does nothing for `F16`"),
        ({"calib": ["builtin_en"]}, "without `--imatrix`"),
        ({"calib_length": 256}, "without `--imatrix`"),
        ({"imatrix": True, "calib": ["builtin_en:0"]}, "no weight above 0"),
        ({"imatrix": True, "calib": ["builtin_eval"]}, "evaluation text"),
        ({"imatrix": True, "calib": ["builtin_english"]}, "unknown calibration text"),
        ({"imatrix": True, "calib_length": 8}, "calibration samples"),
        ({"skip": ["no_such_matrix"]}, "matches no matrix"),
        ({"skip": ["("]}, "no regular expression"),
        ({"skip": ["attn_norm"]}, "matches no matrix"),
        ({"outtype": "BF16"}, "are for a folder"),
        ({"outtype": "F64"}, "unknown outtype"),
        ({"threads": 0}, "--threads 0"),
        ({"allow_requantize": True, "converter": "x.py"}, "are for a folder"),
    ],
)
def test_wrong_use_is_refused_before_any_work(
    options: dict[str, Any], message: str, wide: Path, tmp_path: Path
) -> None:
    spec = QuantizeSpec(model_file(wide), str(tmp_path / "o.gguf"), **options)
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        methods.run(spec, silent)
    assert list(tmp_path.iterdir()) == []


def test_unknown_types_and_aliases() -> None:
    model = ModelFile("m.gguf", "m", "m.gguf", "0" * 64)
    assert check_spec(QuantizeSpec(model, "", type="q5_k")).type == "Q5_K_M"
    with pytest.raises(UsageError) as caught:
        check_spec(QuantizeSpec(model, "", type="q4km"))
    assert "`Q4_K_M`" in caught.value.hint
    with pytest.raises(UsageError, match=r"does not end in \.gguf"):
        check_spec(QuantizeSpec(model, "model"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("c4", ("c4", 1.0)), ("c4:2.5", ("c4", 2.5)), ("/a:b/c.txt", ("/a:b/c.txt", 1.0)), ("/a.txt:3", ("/a.txt", 3.0))],
)
def test_weights_of_texts(text: str, expected: tuple[str, float]) -> None:
    assert split_weight(text) == expected


def test_a_dry_run_predicts_what_the_run_writes(wide: Path, narrow: Path, tmp_path: Path) -> None:
    for number, (model, kind) in enumerate([(wide, "Q4_K_M"), (narrow, "Q6_K"), (wide, "F32")]):
        out = tmp_path / f"{number}" / "o.gguf"
        spec = QuantizeSpec(model_file(model), str(out), threads=1, type=kind)
        predicted = methods.dry_run(spec, silent)
        assert not out.parent.exists()
        outcome = methods.run(spec, silent)
        # The head of the file is padded to 32 bytes.
        assert abs(predicted.size_bytes - out.stat().st_size) <= 32
        assert predicted.disk_bytes == predicted.size_bytes
        assert predicted.bits_per_weight == outcome.model.bits_per_weight
        assert predicted.tensor_types == outcome.model.tensor_types
        assert predicted.peak_process_bytes == pytest.approx(
            outcome.measurements["peak_process_bytes"].samples[0], rel=0.5
        )
        told = [notice for notice in outcome.warnings if notice.code == "label-content"]
        assert predicted.warnings == told


def test_a_dry_run_of_a_type_that_needs_importance(wide: Path, tmp_path: Path) -> None:
    spec = QuantizeSpec(model_file(wide), str(tmp_path / "o.gguf"), type="IQ2_XS", imatrix=True)
    predicted = methods.dry_run(spec, silent)
    assert predicted.tensor_types["IQ2_XS"].count > 0
    assert predicted.quantize_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_converted_once_and_used_again(stories: Path, tmp_path: Path) -> None:
    base = tmp_path / "stories260K-F16.gguf"
    first = run(stories, base, type="F16")
    assert first.details["base"] == "converted"
    assert first.model.method == "none"
    assert first.details["tokenizer"]["n_different"] == 0
    again = run(stories, tmp_path / "stories260K-Q8_0.gguf", type="Q8_0")
    assert again.details["base"] == "reused"
    assert "convert" not in again.details["stages_s"]
    # A base that is not what its record says is not trusted.
    data = bytearray(base.read_bytes())
    data[-100] ^= 1
    base.write_bytes(data)
    third = run(stories, tmp_path / "third.gguf", type="Q8_0")
    assert third.details["base"] == "converted"
    assert stored_tensors(tmp_path / "third.gguf") == stored_tensors(tmp_path / "stories260K-Q8_0.gguf")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert not [name for name in names if name.startswith(".")]


def test_a_kept_conversion_needs_no_room(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(stories, tmp_path / "stories260K-F16.gguf", type="F16")
    spec = QuantizeSpec(model_file(stories), str(tmp_path / "o.gguf"), threads=1, type="Q8_0")
    predicted = methods.dry_run(spec, silent)
    assert predicted.disk_bytes == predicted.size_bytes
    room = shutil._ntuple_diskusage(predicted.disk_bytes, 0, predicted.disk_bytes)
    monkeypatch.setattr("quantlab.core.files.shutil.disk_usage", lambda _: room)
    methods.dry_run(spec, silent)
    assert methods.run(spec, silent).details["base"] == "reused"
    (tmp_path / "stories260K-F16.gguf").unlink()
    for do in (methods.run, methods.dry_run):
        with pytest.raises(QuantlabError, match="GB free, the output needs about"):
            do(msgspec.structs.replace(spec, force=True), silent)


def test_a_base_of_another_version_is_not_used_again(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(stories, tmp_path / "stories260K-F16.gguf", type="F16")
    monkeypatch.setattr("quantlab.quantize.gguf.__version__", "0.0.0")
    assert run(stories, tmp_path / "o.gguf", type="Q8_0").details["base"] == "converted"


def test_a_conversion_is_named_by_its_label_and_tells_what_was_compared(stories: Path, tmp_path: Path) -> None:
    model = msgspec.structs.replace(model_file(stories), label="Stories")
    outcome = methods.run(QuantizeSpec(model, str(tmp_path / "o.gguf"), type="F16"), silent)
    assert stored_metadata(tmp_path / "o.gguf")["general.name"] == "Stories"
    probe, text = outcome.details["tokenizer"]["texts"]
    assert probe == "probe" and "every line with a new character" in text


def test_another_tokenizer_than_the_folders_is_refused(tmp_path: Path) -> None:
    """What a converter of the user wrote is held against the folder."""
    write_folder(tmp_path / "hf", "llama")
    convert(tmp_path / "hf", tmp_path / "made.gguf", outtype="F16")
    described = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    described["model"]["merges"] = []
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(described))
    script = tmp_path / "convert.py"
    script.write_text(f"import shutil, sys; shutil.copy({str(tmp_path / 'made.gguf')!r}, sys.argv[3])")
    out = tmp_path / "out" / "o.gguf"
    for kind in ("F16", "Q8_0"):
        with pytest.raises(QuantlabError, match="tokens differ from the folder's tokenizer at"):
            run(tmp_path / "hf", out, type=kind, converter=str(script))
        assert list(out.parent.iterdir()) == []


def test_the_types_of_a_folder_are_predicted_without_converting_it(stories: Path, tmp_path: Path) -> None:
    spec = QuantizeSpec(model_file(stories), str(tmp_path / "o.gguf"), threads=1, type="Q4_K_M")
    predicted = methods.dry_run(spec, silent)
    assert list(tmp_path.iterdir()) == []
    outcome = methods.run(spec, silent)
    assert predicted.tensor_types == outcome.model.tensor_types
    assert predicted.size_bytes == pytest.approx((tmp_path / "o.gguf").stat().st_size, rel=0.001)
    # The folder is converted to a GGUF of 16 bits first.
    assert predicted.disk_bytes - predicted.size_bytes == pytest.approx(2 * 260_000, rel=0.05)


def test_a_folder_without_its_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    spec = QuantizeSpec(ModelFile(str(folder), "model", "model", "0" * 64), str(tmp_path / "o.gguf"))
    with pytest.raises(QuantlabError, match=r"no config\.json"):
        methods.run(spec, silent)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(QuantlabError, match="safetensors"):
        methods.run(spec, silent)
