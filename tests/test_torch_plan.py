"""What is refused before a torch method runs, and whether the hints of a refusal work."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantlab.core import hardware
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.model import ModelFile
from quantlab.core.progress import silent
from quantlab.lab.source import check_folder
from quantlab.quantize import methods
from quantlab.quantize.convert import convert
from quantlab.quantize.engines.environment import State
from quantlab.quantize.spec import QuantizeSpec, check_spec
from quantlab.quantize.torch_plan import linears, plan
from quantlab.quantize.torch_prediction import stored_bytes
from quantlab.quantize.torch_source import TorchSource, prepare, read_folder, read_source, vocabulary
from tests.hf_folders import write_folder
from tests.tiny_gguf import model_file, write_wide


def spec_of(folder: Path, **options: Any) -> QuantizeSpec:
    return check_spec(QuantizeSpec(ModelFile(str(folder), folder.name, "m", "0" * 64), "out", **options))


def source_of(shapes: dict[str, tuple[int, int]]) -> TorchSource:
    """A source of one layer whose modules have these (in, out)."""
    named = {f"model.layers.0.{name}.weight": (out, into) for name, (into, out) in shapes.items()}
    rest = {"model.embed_tokens.weight": (100, 64), "lm_head.weight": (100, 64), "model.norm.weight": (64,)}
    return TorchSource(Path("model"), {"hidden_size": 64, "num_hidden_layers": 1}, named | rest, 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "model", "llama", model_type="llama")
    return tmp_path / "model"


def rewrite(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changed
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


# the source


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "BertForMaskedLM"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "encoder with a decoder"),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}, "images"),
        ({"architectures": ["Qwen2AudioForConditionalGeneration"], "audio_config": {}}, "sound"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, "8 experts"),
        ({"architectures": []}, "no causal language model"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "Conv1D"),
        ({"model_type": None}, "model_type"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq 4 bits"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_plain_causal_model_is_named(folder: Path, changed: dict[str, Any], said: str) -> None:
    rewrite(folder, **changed)
    with pytest.raises(QuantlabError) as caught:
        read_folder(folder)
    assert said in caught.value.message
    assert caught.value.hint


def test_matrices_that_are_no_plain_weights_are_named(folder: Path) -> None:
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] = np.zeros((64, 12), np.int32)
    # What is no matrix of weights may be an integer.
    tensors["model.rotary.positions"] = np.arange(4, dtype=np.int64)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(QuantlabError, match=r"1 matrices .*down_proj.weight` is I32"):
        read_folder(folder)


def test_a_model_that_brings_its_own_code_is_named(folder: Path) -> None:
    pytest.importorskip("transformers")
    auto_map = {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}
    rewrite(folder, auto_map=auto_map)
    assert read_folder(folder).params
    rewrite(folder, auto_map=auto_map, model_type="llama_of_ours")
    with pytest.raises(QuantlabError, match=r"llama_of_ours.* needs code that comes with it"):
        read_folder(folder)


def test_an_adapter_and_pickles_are_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(QuantlabError, match="adapter of `org/base`"):
        check_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(QuantlabError, match="pickles only"):
        check_folder(tmp_path)


def test_an_already_quantized_folder_is_refused_whatever_is_allowed(folder: Path) -> None:
    rewrite(folder, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(UsageError, match="awq 4 bits") as caught:
        read_source(spec_of(folder, method="rtn", allow_requantize=True))
    assert "original" in caught.value.hint
    rewrite(folder, quantization_config=None)
    with pytest.raises(UsageError, match="quantized GGUF"):
        read_source(spec_of(folder, method="rtn", allow_requantize=True))


@pytest.fixture
def ggufs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUANTLAB_CACHE", str(tmp_path / "cache"))
    write_wide(tmp_path / "F16.gguf")
    methods.run(QuantizeSpec(model_file(tmp_path / "F16.gguf"), str(tmp_path / "Q8_0.gguf"), type="Q8_0"), silent)
    return tmp_path


def test_a_gguf_becomes_a_folder_once(ggufs: Path) -> None:
    spec = check_spec(QuantizeSpec(model_file(ggufs / "F16.gguf"), "", "rtn"))
    source = read_source(spec)
    planned = plan(source, spec)
    # A dry run writes nothing.
    assert not source.folder.exists()
    assert source.notices == []
    assert len(vocabulary(source)) == source.shapes["model.embed_tokens.weight"][0]
    prepare(source, silent)
    restored = read_folder(source.folder)
    assert restored.shapes == source.shapes
    assert plan(restored, spec).quantized == planned.quantized
    before = (source.folder / "model.safetensors").stat().st_mtime_ns
    prepare(read_source(spec), silent)
    assert (source.folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_quantized_gguf_is_dequantized_where_it_is_allowed_and_told(ggufs: Path) -> None:
    spec = check_spec(QuantizeSpec(model_file(ggufs / "Q8_0.gguf"), "", "rtn"))
    with pytest.raises(UsageError, match="Q8_0"):
        read_source(spec)
    noted = msgspec.structs.replace(spec.model, note="a note of its own")
    source = read_source(msgspec.structs.replace(spec, allow_requantize=True, model=noted))
    # What the artifact's record keeps.
    assert source.note == "a note of its own; weights dequantized from Q8_0 (Q8_0.gguf)"
    assert "requantized" in [notice.code for notice in plan(source, spec).warnings]


def test_a_gguf_whose_tokenizer_cannot_be_restored_is_refused_at_once(stories: Path, tmp_path: Path) -> None:
    convert(stories, tmp_path / "stories.gguf", outtype="F16")
    with pytest.raises(QuantlabError, match="`llama` cannot be restored"):
        read_source(check_spec(QuantizeSpec(model_file(tmp_path / "stories.gguf"), "", "rtn")))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_found_before_the_run(folder: Path, kind: str, value: float) -> None:
    name, at = "model.layers.1.mlp.down_proj.weight", (3, 7)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors = {key: tensor.astype(np.float16 if kind == "F16" else np.float32) for key, tensor in tensors.items()}
    tensors["model.norm.weight"][:2] = [0.0, -np.finfo(tensors["model.norm.weight"].dtype).max]
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    if kind == "BF16":
        _as_bfloat16(folder / "model.safetensors", tensors)
    source = read_source(spec_of(folder, method="rtn"))
    assert source.params == sum(tensor.size for tensor in tensors.values())
    prepare(source, silent)
    tensors[name][at] = value
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    if kind == "BF16":
        _as_bfloat16(folder / "model.safetensors", tensors)
    with pytest.raises(QuantlabError, match=re.escape(f"`{name}`") + r".*\[3, 7\]"):
        prepare(source, silent)


def _as_bfloat16(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write float32 tensors by hand as bfloat16: their upper halves."""
    halves = {name: (tensor.view(np.uint32) >> 16).astype("<u2").tobytes() for name, tensor in tensors.items()}
    header, at = {}, 0
    for name, data in halves.items():
        header[name] = {"dtype": "BF16", "shape": tensors[name].shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(halves.values()))


# the plan


def sizes_in(hint: str) -> list[int]:
    found = re.search(r"--group-size (-?\d+)`(?: \(or ([-\d, ]+)\))?", hint)
    return [int(size) for size in re.findall(r"-?\d+", f"{found[1]} {found[2]}")] if found else []


def test_all_layers_that_do_not_fit_are_named_at_once_and_the_hints_work(folder: Path) -> None:
    source = read_folder(folder)
    with pytest.raises(UsageError) as caught:
        plan(source, spec_of(folder, method="gptq"))
    message = caught.value.message
    assert "`group_size` 128 does not divide `in_features` 64 of 18 Linear layers" in message
    assert "96 of 3 Linear layers" in message
    assert sizes_in(caught.value.hint) == [32, -1]
    assert plan(source, spec_of(folder, method="gptq", group_size=32)).keep == []


@given(
    st.dictionaries(
        st.sampled_from(["self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]),
        st.tuples(st.sampled_from([32, 64, 96, 128, 172, 576, 1536]), st.sampled_from([4, 32, 64, 172, 192, 576])),
        min_size=1,
    ),
    st.sampled_from(["gptq", "awq", "rtn", "fp8"]),
    st.sampled_from([32, 64, 128, -1]),
    st.sampled_from([None, 2, 3, 8]),
)
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=60, deadline=None)
def test_every_hint_of_a_refusal_passes_the_plan(
    shapes: dict[str, tuple[int, int]], method: str, group_size: int, bits: int | None
) -> None:
    source = source_of(shapes)
    options: dict[str, Any] = {"scheme": "block"} if method == "fp8" else {"group_size": group_size}
    options |= {"bits": bits} if method == "gptq" else {}
    try:
        plan(source, spec_of(Path("m"), method=method, **options))
    except UsageError as error:
        for size in sizes_in(error.hint):
            plan(source, spec_of(Path("m"), method=method, **{**options, "group_size": size}))
        if schemes := re.findall(r"--scheme (\w+)", error.hint):
            plan(source, spec_of(Path("m"), method=method, scheme=schemes[0]))
        if skips := re.findall(r"`(--skip .*)`", error.hint):
            patterns = [word for word in shlex.split(skips[0]) if word != "--skip"]
            planned = plan(source, spec_of(Path("m"), method=method, skip=patterns, **options))
            assert planned.keep
            assert planned.quantized
            # vLLM computes q, k and v as one.
            assert not {"fused-split"} & {notice.code for notice in planned.prediction.warnings}
    else:
        into = [size for size, _ in shapes.values()]
        assert group_size == -1 or method == "fp8" or all(size % group_size == 0 for size in into)


@pytest.mark.parametrize(
    ("shape", "options", "said"),
    [
        ((172, 64), {"method": "gptq", "group_size": -1}, "packing of gptq 8 does not divide `in_features` 172"),
        ((64, 36), {"method": "gptq", "group_size": 64}, "packing of gptq 8 does not divide `out_features` 36"),
        ((64, 48), {"method": "gptq", "group_size": 64, "bits": 3}, "packing of gptq 32 does not divide"),
        ((64, 36), {"method": "awq", "group_size": 64}, "packing of awq 8 does not divide `out_features` 36"),
        ((96, 64), {"method": "rtn", "group_size": 64}, "`group_size` 64 does not divide `in_features` 96"),
        ((256, 192), {"method": "fp8", "scheme": "block"}, "block 128 does not divide `out_features` 192"),
        ((172, 36), {"method": "rtn", "group_size": -1}, None),
        ((172, 36), {"method": "gptq", "engine": "llmcompressor", "group_size": -1}, None),
        ((172, 64), {"method": "awq", "group_size": -1}, None),
        ((172, 36), {"method": "int8"}, None),
        ((172, 36), {"method": "fp8"}, None),
    ],
)
def test_what_a_format_packs(shape: tuple[int, int], options: dict[str, Any], said: str | None) -> None:
    source = source_of({"mlp.up_proj": shape, "mlp.down_proj": (128, 128)})
    if said is None:
        assert len(plan(source, spec_of(Path("m"), **options)).quantized) == 2
        return
    with pytest.raises(UsageError) as caught:
        plan(source, spec_of(Path("m"), **options))
    assert said in caught.value.message
    assert r"--skip '\.up_proj$'" in caught.value.hint


def test_skip_patterns(folder: Path) -> None:
    source = read_folder(folder)
    planned = plan(source, spec_of(folder, method="rtn", group_size=32, skip=["down_proj", r"layers\.1\."]))
    assert len(planned.keep) == 7 + 2
    assert {linear.module for linear in planned.quantized}.isdisjoint(planned.keep)
    with pytest.raises(UsageError, match="matches no matrix") as caught:
        plan(source, spec_of(folder, method="rtn", group_size=32, skip=["w2"]))
    assert "model.layers.*.mlp.down_proj" in caught.value.hint
    with pytest.raises(UsageError, match="nothing is left"):
        plan(source, spec_of(folder, method="rtn", group_size=32, skip=["."]))


def test_embedding_and_head_are_no_linears_of_layers(folder: Path) -> None:
    names = [linear.module for linear in linears(read_folder(folder))]
    assert len(names) == 3 * 7
    assert all(name.startswith("model.layers.") for name in names)


def test_what_does_not_fit_in_memory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        available = 10**6

    monkeypatch.setattr("quantlab.quantize.torch_plan.psutil.virtual_memory", Small)
    for method, samples in (("gptq", True), ("rtn", False)):
        with pytest.raises(QuantlabError, match="GB of memory") as caught:
            plan(read_folder(folder), spec_of(folder, method=method, group_size=32, device="cpu"))
        # Plain rounding has no such option.
        assert ("--calib-samples" in caught.value.hint) is samples


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "int8", "rtn"])
def test_what_does_not_fit_on_the_disk_is_refused_by_a_dry_run_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    options: dict[str, Any] = {"group_size": 32} if method in ("gptq", "awq", "rtn") else {}
    options |= {"calib": ["builtin_en"], "calib_samples": 8} if method in ("gptq", "awq", "int8") else {}
    model = ModelFile(str(folder), "model", "m", "0" * 64)
    spec = QuantizeSpec(model, str(tmp_path / "a"), method, device="cpu", **options)
    need = methods.dry_run(spec, silent)
    # Float32 logits of the check: twice 1024 tokens, and 128 of the engine's model.
    logits = (2 * 1024 + 128) * 4 * read_folder(folder).config["vocab_size"]
    # gptqmodel keeps its layers, and hidden states before and after one.
    layers = 2 * 8 * 512 * 64 * 4 if method in ("gptq", "awq") else 0
    more = need.disk_bytes - need.size_bytes - logits - layers
    assert 0 <= more < need.size_bytes
    assert bool(more) == bool(layers)

    def free(room: int) -> None:
        monkeypatch.setattr("quantlab.core.files.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(room, 0, room))

    free(need.disk_bytes)
    methods.dry_run(spec, silent)
    free(need.disk_bytes - 1)
    with pytest.raises(QuantlabError, match="GB free, the output needs about"):
        methods.dry_run(spec, silent)
    # What an interrupted run left there is used again.
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial" / "layer-0").write_text("!")
    methods.dry_run(spec, silent)


def test_an_output_and_a_restored_gguf_on_one_disk_are_added(
    ggufs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = check_spec(QuantizeSpec(model_file(ggufs / "F16.gguf"), str(tmp_path / "a"), "rtn", device="cpu"))
    source = read_source(spec)
    need = plan(source, spec).prediction.disk_bytes
    both = need + source.stored_bytes
    room = [both]
    monkeypatch.setattr("quantlab.core.files.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(both, 0, room[0]))
    plan(source, spec)
    room[0] -= 1
    with pytest.raises(QuantlabError, match="GB free, the output needs about"):
        plan(source, spec)
    # On two disks each has its own room.
    disks = itertools.count()
    monkeypatch.setattr(
        "quantlab.quantize.torch_plan.existing",
        lambda _: SimpleNamespace(stat=lambda: SimpleNamespace(st_dev=next(disks))),
    )
    plan(source, spec)


def test_what_does_not_fit_on_the_device_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantlab.core.hardware.cuda_device", lambda: True)
    monkeypatch.setattr("quantlab.core.hardware.torch_cuda", lambda: "13.0")
    monkeypatch.setattr("quantlab.core.hardware.nvidia_free_bytes", lambda: 100_000)
    for engine in ("gptqmodel", "llmcompressor"):
        with pytest.raises(QuantlabError, match="GB of device memory"):
            plan(read_folder(folder), spec_of(folder, method="gptq", group_size=32, engine=engine))
    monkeypatch.setattr("quantlab.core.hardware.nvidia_free_bytes", lambda: 10**9)
    planned = plan(read_folder(folder), spec_of(folder, method="gptq", group_size=32))
    assert (planned.device, planned.dtype) == ("cuda", "float16")
    assert 0 < planned.prediction.peak_device_bytes < 10**9
    # The speed of a product on the CPU says nothing of it.
    assert planned.prediction.quantize_s is None


def test_a_driver_that_does_not_tell_its_memory_refuses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantlab.core.hardware.cuda_device", lambda: True)
    monkeypatch.setattr("quantlab.core.hardware.torch_cuda", lambda: "13.0")
    monkeypatch.setattr("quantlab.core.hardware._output", lambda *command: "[N/A]\n")
    assert plan(read_folder(folder), spec_of(folder, method="rtn", group_size=32)).device == "cuda"


@pytest.mark.parametrize(("visible", "asked"), [(None, "0"), ("2,0", "2"), ("GPU-7f", "GPU-7f")])
def test_the_memory_asked_for_is_that_of_the_device_that_torch_takes(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, asked: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(hardware, "_output", lambda *command: "90000\n" if f"--id={asked}" in command else "1\n2\n")
    assert hardware.nvidia_free_bytes() == 90000 * 2**20


def test_optimum_keeps_the_same_modules_in_all_layers(folder: Path) -> None:
    options: dict[str, Any] = {"method": "gptq", "group_size": 32, "engine": "optimum"}
    plan(read_folder(folder), spec_of(folder, skip=["k_proj"], **options))
    with pytest.raises(UsageError, match="same modules in all layers"):
        plan(read_folder(folder), spec_of(folder, skip=[r"layers\.0\..*k_proj"], **options))


@pytest.mark.parametrize("value", [float("inf"), 0, -1, 2.5, "many", True])
@pytest.mark.parametrize("name", ["vocab_size", "max_position_embeddings"])
def test_a_size_in_config_that_is_none_is_refused(folder: Path, name: str, value: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(QuantlabError, match=f"`{name}` is .*, no size"):
        read_folder(folder)


def test_static_fp8_needs_what_gptq_needs(folder: Path) -> None:
    source = read_folder(folder)
    static, dynamic = (plan(source, spec_of(folder, method="fp8", scheme=s)).prediction for s in ("static", "dynamic"))
    # Hidden states of 128 samples before and after a layer, and two Hessians of 6 modules of 64 columns and one of 96.
    more = 2 * 128 * 512 * 64 * 4 + 2 * 4 * (6 * 64**2 + 96**2)
    # Less a little: dynamic scales take more room, or need most memory for the check.
    assert more > static.peak_process_bytes - dynamic.peak_process_bytes > 0.9 * more
    assert static.quantize_s > 3 * (6 * 64 + 96) * 1e-4 > dynamic.quantize_s


def test_a_torch_without_cuda_takes_the_cpu_beside_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantlab.core.hardware.cuda_device", lambda: True)
    monkeypatch.setattr("quantlab.core.hardware.torch_cuda", lambda: None)
    monkeypatch.setattr("quantlab.core.hardware.nvidia_free_bytes", lambda: 10**9)
    states = {"here": "cpu", "own environment": "cuda"}
    for where, device in states.items():
        monkeypatch.setattr("quantlab.quantize.torch_plan.state", lambda engine, where=where: State(where))
        assert plan(read_folder(folder), spec_of(folder, method="rtn", group_size=32)).device == device
    monkeypatch.setattr("quantlab.quantize.torch_plan.state", lambda engine: State("here"))
    with pytest.raises(QuantlabError, match="built without CUDA"):
        plan(read_folder(folder), spec_of(folder, method="rtn", group_size=32, device="cuda"))


def test_what_vllm_would_refuse_is_told(folder: Path) -> None:
    def codes(**options: Any) -> list[str]:
        return [notice.code for notice in plan(source, spec_of(folder, group_size=32, **options)).prediction.warnings]

    source = read_folder(folder)
    assert codes(method="rtn") == ["marlin-tiles"]
    assert codes(method="rtn", skip=[r"layers\.0\..*k_proj"]) == ["fused-split", "marlin-tiles"]
    assert codes(method="rtn", skip=["[qkv]_proj"]) == ["marlin-tiles"]
    assert codes(method="gptq") == ["calibration-length", "marlin-tiles"]
    assert codes(method="gptq", calib_length=256) == ["marlin-tiles"]
    source = source_of({"mlp.up_proj": (128, 64)})
    assert codes(method="rtn") == []


def test_prediction(folder: Path) -> None:
    """Of 3 layers with q, k, v, o of 64 x 64 or 64 x 32 and three of 64 x 96; memory grows with samples."""
    source = read_folder(folder)
    found = plan(source, spec_of(folder, method="rtn", group_size=32)).prediction
    weights = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    [(kind, quantized), (plain, rest)] = found.tensor_types.items()
    assert (kind, quantized.count, quantized.params) == ("INT4", 21, weights)
    assert (plain, rest.params) == ("F16", source.params - weights)
    # The header of the file is in the size, and no weight.
    header = 115 * (len(source.shapes) + 2.5 * 21)
    assert found.bits_per_weight == pytest.approx(8 * (found.size_bytes - header) / source.params, rel=1e-4)
    seconds = {"rtn": found.quantize_s}
    # Hidden states before and after a layer; awq also holds what goes into 6 modules of 64 columns and one of 96.
    for method, columns in (("gptq", 2 * 64), ("awq", 2 * 64 + 3 * (6 * 64 + 96))):
        few, many = (
            plan(source, spec_of(folder, method=method, group_size=32, calib_samples=n)).prediction for n in (8, 16)
        )
        assert many.peak_process_bytes - few.peak_process_bytes == 8 * 512 * columns * 4
        seconds[method] = few.quantize_s
    # The columns alone: 6 modules of 64 and one of 96, three times.
    assert seconds["gptq"] > 3 * (6 * 64 + 96) * 1e-4 > 100 * seconds["rtn"] > 0
    assert seconds["awq"] > seconds["rtn"]


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"method": "fp8"}, 8 + 16 / 64),
        ({"method": "int8"}, 8 + 16 / 64),
        ({"method": "rtn", "group_size": 32}, 4 + 16 / 32 + 8 * 16 / (64 * 32)),
        ({"method": "awq", "group_size": 32}, 4 + 20 / 32),
        ({"method": "gptq", "group_size": -1, "bits": 3}, 3 + 19 / 64 + 32 / 32),
    ],
    ids=["fp8", "int8", "rtn", "awq", "gptq"],
)
def test_bytes_of_a_module(options: dict[str, Any], bits: float) -> None:
    source = source_of({"mlp.up_proj": (64, 32)})
    [linear] = linears(source)
    assert stored_bytes(linear, spec_of(Path("m"), **options)) == pytest.approx(bits * 64 * 32 / 8, abs=1)
