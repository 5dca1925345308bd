"""The check after the save: good artifacts pass, planted garbage of every kind is rejected with its reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quantlab.core import hardware
from quantlab.quantize.torch_work import Checked, CheckJob, Weights
from quantlab.runtime.worker import Channel, run_in_child
from tests import hf_folders
from tests.torch_artifacts import AWQ_ORDER, codes, dequantized, pack, write_artifact

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gptqmodel", reason="transformers needs gptqmodel to load gptq and awq")
pytest.importorskip("compressed_tensors")

ROOT = Path(__file__).resolve().parents[1]
# stories260K's 172 columns hold no group of 32, and its 172 rows no whole int32.
NO_MLP = r"\.mlp\."
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
# name -> (parent, options of write_artifact)
GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "stories-gptq": ("stories", {"form": "gptq", "keep": NO_MLP}),
    "stories-gptq-asym": ("stories", {"form": "gptq", "sym": False, "keep": NO_MLP}),
    "stories-awq": ("stories", {"form": "awq", "sym": False, "keep": NO_MLP}),
    "stories-compressed": ("stories", {"form": "compressed", "sym": False, "keep": "down_proj"}),
    "llama-gptq": ("llama", {"form": "gptq", "group": 32}),
    "qwen2-gptq": ("qwen2", {"form": "gptq", "group": -1, "bits": 8}),
    "qwen3-awq": ("qwen3", {"form": "awq", "sym": False}),
    "gemma3-compressed": ("gemma3", {"form": "compressed"}),
    "mistral-compressed": ("mistral", {"form": "compressed", "group": -1, "bits": 8}),
    "stories-int8": ("stories", {"form": "int8", "group": -1, "bits": 8}),
}
_METHODS = {"compressed": "rtn"}


def rewrite(artifact: Path, change: Callable[[str, np.ndarray], np.ndarray | None]) -> None:
    """Change tensors; None drops one."""
    path = artifact / "model.safetensors"
    changed = {name: change(name, tensor) for name, tensor in load_file(path).items()}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, path, {"format": "pt"})


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def zeros_off_by_one(artifact: Path) -> None:
    """Version 2's zero points under version 1's name; compressed-tensors' and awq's one too high."""
    one = np.int32(0x11111111)
    rewrite(artifact, lambda n, t: t + one if n.endswith(("qzeros", "weight_zero_point")) else t)


def scales_shuffled(artifact: Path) -> None:
    draw = np.random.default_rng(0)
    leaves = ("scales", "weight_scale")
    rewrite(artifact, lambda n, t: draw.permutation(t.ravel()).reshape(t.shape) if n.endswith(leaves) else t)


def scales_of_one_layer_shuffled(artifact: Path) -> None:
    def change(name: str, tensor: np.ndarray) -> np.ndarray:
        if "layers.1.self_attn.o_proj" in name and name.endswith(("scales", "weight_scale")):
            return np.random.default_rng(0).permutation(tensor.ravel()).reshape(tensor.shape)
        return tensor

    rewrite(artifact, change)


def nibbles_swapped(artifact: Path) -> None:
    """Each int32 packed from its other end."""

    def change(name: str, tensor: np.ndarray) -> np.ndarray:
        if not name.endswith(("qweight", "weight_packed")):
            return tensor
        nibbles = np.stack([tensor.view(np.uint32) >> np.uint32(4 * i) & 15 for i in range(7, -1, -1)])
        return np.sum(nibbles << (4 * np.arange(8, dtype=np.uint32))[:, None, None], 0, dtype=np.uint32).view(np.int32)

    rewrite(artifact, change)


def scale_not_a_number(artifact: Path) -> None:
    def change(name: str, tensor: np.ndarray) -> np.ndarray:
        if "layers.1.self_attn.v_proj" in name and name.endswith(("scales", "weight_scale")):
            tensor = tensor.copy()
            tensor.flat[0] = np.nan
        return tensor

    rewrite(artifact, change)


def columns_in_awq_order(artifact: Path) -> None:
    """gptq codes in the order of awq."""

    def change(name: str, tensor: np.ndarray) -> np.ndarray:
        if not name.endswith("qweight"):
            return tensor
        nibbles = np.concatenate([tensor.view(np.uint32) >> np.uint32(4 * i) & 15 for i in range(8)])
        rows = nibbles.reshape(8, *tensor.shape).swapaxes(0, 1).reshape(-1, tensor.shape[1])
        return pack(rows, 4, 0, AWQ_ORDER)

    rewrite(artifact, change)


def columns_out_of_order(artifact: Path) -> None:
    """What only a loader that reads `g_idx` without `desc_act` computes."""
    rewrite(artifact, lambda n, t: np.roll(t, 32) if n.endswith("k_proj.g_idx") else t)


def head_duplicated(artifact: Path) -> None:
    path = artifact / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, path, {"format": "pt"})


def rewriting(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    return lambda artifact: rewrite(artifact, lambda n, t: change(t).astype(t.dtype) if n == name else t)


def last_row_not_a_number(embedding: np.ndarray) -> np.ndarray:
    return np.concatenate([embedding[:-1], np.full_like(embedding[-1:], np.nan)])


def drop(name: str) -> Callable[[Path], None]:
    return lambda artifact: rewrite(artifact, lambda n, t: None if n == name else t)


def quantization(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda artifact: edit(artifact / "config.json", lambda c: change(c["quantization_config"]))


def other_vocabulary(artifact: Path) -> None:
    hf_folders.byte_level_tokenizer(320).save(str(artifact / "tokenizer.json"))


def template_moved(artifact: Path) -> None:
    edit(artifact / "tokenizer_config.json", lambda c: c.pop("chat_template"))
    (artifact / "chat_template.jinja").write_text(TEMPLATE)


OTHER = "does not compute what the engine computed"


def in_config(key: str, value: Any) -> Callable[[Path], None]:
    return quantization(lambda q: q.update({key: value}))


def without(file: str, key: str) -> Callable[[Path], None]:
    return lambda artifact: edit(artifact / file, lambda c: c.pop(key))


def within(file: str, key: str, value: Any) -> Callable[[Path], None]:
    return lambda artifact: edit(artifact / file, lambda c: c.update({key: value}))


# name -> (good artifact, what is planted, a part of the fault)
GARBAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    **{f"scale-{x}": (x, scales_of_one_layer_shuffled, OTHER) for x in GOOD if "int8" not in x and "qwen2" not in x},
    **{f"scales-{x}": (x, scales_shuffled, OTHER) for x in ("stories-gptq", "stories-awq", "gemma3-compressed")},
    **{f"order-{x}": (x, nibbles_swapped, OTHER) for x in ("stories-gptq", "qwen3-awq", "gemma3-compressed")},
    **{
        f"zeros-{x}": (x, zeros_off_by_one, OTHER)
        for x in ("stories-gptq", "stories-gptq-asym", "stories-awq", "stories-compressed", "llama-gptq")
    },
    "awq-order": ("llama-gptq", columns_in_awq_order, OTHER),
    "nan-scale": ("stories-gptq", scale_not_a_number, "is not finite"),
    "nan-scale-compressed": ("gemma3-compressed", scale_not_a_number, "is not finite"),
    "format-v2": ("stories-gptq", in_config("checkpoint_format", "gptq_v2"), "checkpoint_format"),
    "group-size": ("stories-gptq", in_config("group_size", 64), "group 64"),
    "bits": ("stories-awq", in_config("bits", 8), "8 bits"),
    "desc-act": ("stories-gptq", in_config("desc_act", True), "symmetric, desc_act, and 4 bits, group 32, symmetric"),
    "columns": ("llama-gptq", columns_out_of_order, "`model.layers.0.self_attn.k_proj` are not in order"),
    "not-symmetric": ("stories-gptq", in_config("sym", False), "with zero points"),
    "group-size-compressed": (
        "stories-compressed",
        quantization(lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=64)),
        "group 64",
    ),
    "no-config": ("stories-gptq", without("config.json", "quantization_config"), "no `quantization_config`"),
    "key-lost": ("stories-gptq", quantization(lambda q: q.pop("desc_act")), "lacks desc_act"),
    "ignored": (
        "gemma3-compressed",
        quantization(lambda q: q["ignore"].append("model.layers.0.self_attn.q_proj")),
        "excludes from quantization",
    ),
    "ignored-awq": ("qwen3-awq", in_config("modules_to_not_convert", ["self_attn.q_proj"]), "excludes from"),
    "claimed": ("stories-compressed", in_config("ignore", ["lm_head"]), "claims"),
    "claimed-head": ("gemma3-compressed", in_config("ignore", []), "claims the head"),
    "claimed-gptq": ("stories-gptq", quantization(lambda q: q.pop("modules_in_block_to_quantize")), "claims"),
    "head-duplicated": ("stories-gptq", head_duplicated, "tied head a second time"),
    "head-lost": ("llama-gptq", drop("lm_head.weight"), "lost `lm_head.weight`"),
    "embedding-lost": ("stories-awq", drop("model.embed_tokens.weight"), "lost `model.embed_tokens.weight`"),
    "bias-lost": ("llama-gptq", drop("model.layers.0.self_attn.q_proj.bias"), "lost"),
    "zeros-lost": ("stories-awq", drop("model.layers.0.self_attn.q_proj.qzeros"), "lacks `qzeros`"),
    "vocabulary": ("stories-gptq", other_vocabulary, "another vocabulary"),
    "nan-row": ("stories-awq", rewriting("model.embed_tokens.weight", last_row_not_a_number), "is not finite"),
    "norm": ("stories-gptq", rewriting("model.norm.weight", lambda t: t * 1.01), "not that of its parent"),
    "layer-norm": (
        "stories-gptq",
        rewriting("model.layers.1.input_layernorm.weight", lambda t: t * 1.01),
        "not that of",
    ),
    "config-tied": ("llama-gptq", within("config.json", "tie_word_embeddings", True), "has `tie_word_embeddings` True"),
    "config-context": (
        "stories-awq",
        within("config.json", "max_position_embeddings", 64),
        "`max_position_embeddings` 64",
    ),
    "config-class": ("stories-int8", within("config.json", "architectures", ["Foo"]), "has `architectures` ['Foo']"),
    "config-code": ("stories-gptq", within("config.json", "auto_map", {"AutoModel": "evil.Model"}), "has `auto_map`"),
    "code": ("stories-gptq", lambda a: (a / "modeling_x.py").write_text("1"), "program code, `modeling_x.py`"),
    "rule": ("stories-gptq", in_config("dynamic", {".*down_proj": {"bits": 8}}), "a rule of its own"),
    "packing": ("stories-awq", in_config("pack_dtype", "int16"), "`pack_dtype` is 'int16'"),
    "kv-codes": ("stories-compressed", in_config("kv_cache_scheme", {"num_bits": 8}), "KV cache"),
    "tokenizer-cut": ("stories-gptq", lambda a: (a / "tokenizer.json").write_text("{"), "tokenizer does not load"),
    "max-length": (
        "stories-gptq",
        within("tokenizer_config.json", "model_max_length", 64),
        "`model_max_length` of its tokenizer is 64",
    ),
    "padding": ("stories-gptq", within("tokenizer_config.json", "padding_side", "left"), "`padding_side`"),
    "decoder": ("stories-gptq", within("tokenizer.json", "decoder", None), "writes the ids"),
    "bos-lost": ("stories-gptq", within("tokenizer.json", "post_processor", None), "other ids"),
    "template-lost": ("qwen2-gptq", without("tokenizer_config.json", "chat_template"), "lost"),
    "template-changed": ("qwen2-gptq", within("tokenizer_config.json", "chat_template", "{{ 1 }}"), "not its parent's"),
    "template-moved": ("qwen2-gptq", template_moved, "servers read"),
    "generation": ("qwen2-gptq", within("generation_config.json", "temperature", 1.0), "temperature"),
    "generation-lost": ("qwen2-gptq", lambda artifact: (artifact / "generation_config.json").unlink(), "is lost"),
    "path": ("stories-gptq", in_config("tokenizer", "/home/someone/model"), "/home/someone/model"),
    "calibration-text": ("stories-gptq", in_config("dataset", ["the river"]), "calibration text"),
    "recipe-path": (
        "stories-compressed",
        lambda artifact: (artifact / "recipe.yaml").write_text("dataset: /data/wiki.txt\n"),
        "recipe.yaml",
    ),
}


def write_parents(folder: Path, stories: Path) -> dict[str, Path]:
    found = {name: folder / name for name in ("llama", "mistral", "qwen2", "qwen3", "gemma3")}
    for name, path in found.items():
        hf_folders.write_folder(path, name, model_type={"gemma3": "gemma3_text"}.get(name, name))
    edit(found["qwen2"] / "tokenizer_config.json", lambda c: c.update(chat_template=TEMPLATE))
    (found["qwen2"] / "generation_config.json").write_text('{"temperature": 0.7, "transformers_version": "4.0"}')
    return found | {"stories": stories}


def write_damaged(folder: Path, stories: Path) -> None:
    """Weights as an engine leaves them that has lost its way: sound codes of another model."""
    shutil.copytree(stories, folder)
    for file in folder.iterdir():
        file.chmod(0o644)

    def change(name: str, tensor: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(tensor[::-1]) if name.endswith("o_proj.weight") else tensor

    rewrite(folder, change)


def held_beside_the_parent(check: Callable[[], object]) -> int:
    """In a child: how many Linear modules are still in memory when the check turns from the artifact to the parent."""
    import gc

    import torch

    from quantlab.quantize.torch_check import _Comparison

    def held() -> int:
        return sum(isinstance(each, torch.nn.Linear) for each in gc.get_objects())

    measure, found = _Comparison._measure, []
    gc.collect()
    before = held()

    def count_and_measure(self: Any, *args: Any) -> None:
        found.append(held() - before)
        measure(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Comparison, "_measure", count_and_measure)
        check()
    return found[0]


def check_all(spec: dict[str, Any], channel: Channel) -> dict[str, Checked]:
    """In a child: write all good artifacts, plant the garbage in copies of them, check all."""
    import torch
    import transformers

    from quantlab.quantize.torch_check import work
    from quantlab.quantize.torch_model import load_model, probe_ids, write_probe
    from quantlab.runtime.torch.vocabulary import load_tokenizer

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    folder, results = Path(spec["folder"]), {}
    parents = write_parents(folder, Path(spec["stories"]))

    def write(artifact: Path, probe: Path, parent: Path, options: dict[str, Any], dtype: Any = torch.float32) -> None:
        memory = write_artifact(artifact, parent, **options)
        model = load_model(parent, dtype=dtype, device="cpu")
        model.load_state_dict({n: torch.from_numpy(t) for n, t in memory.items()}, strict=False)
        write_probe(probe, model, probe_ids(load_tokenizer(parent)))

    def check(artifact: Path, base: str) -> Checked:
        parent, options = GOOD[base]
        method = _METHODS.get(options["form"], options["form"])
        asked = Weights(options.get("bits", 4), options.get("group", 32), options.get("sym", True))
        probe = artifact.with_name(f"{base}.probe")
        job = CheckJob(method, str(parents[parent]), str(artifact), str(probe), spec["device"], 1, asked)
        return work(msgspec.to_builtins(job), channel)

    for name, (parent, options) in GOOD.items():
        write(folder / f"{name}.good", folder / f"{name}.probe", parents[parent], options)
        results[name] = check(folder / f"{name}.good", name)
    # A count travels as one.
    held = held_beside_the_parent(lambda: check(folder / "stories-compressed.good", "stories-compressed"))
    results["held"] = Checked(peak_process_bytes=held)
    for name, (base, plant, _) in GARBAGE.items() if spec["device"] == "cpu" else ():
        artifact = folder / name
        shutil.copytree(folder / f"{base}.good", artifact)
        plant(artifact)
        results[name] = check(artifact, base)
    (folder / "narrow").mkdir()
    narrow = folder / "narrow" / "llama-gptq"
    write(narrow, folder / "narrow" / "llama-gptq.probe", parents["llama"], GOOD["llama-gptq"][1], torch.bfloat16)
    results["narrow"] = check(narrow, "llama-gptq")
    (folder / "lost").mkdir()
    write_damaged(folder / "lost" / "parent", parents["stories"])
    for base in ("stories-gptq", "stories-int8"):
        place = folder / "lost"
        write(place / base, place / f"{base}.probe", place / "parent", GOOD[base][1])
        results[f"lost-{base}"] = check(place / base, base)
    return results


def run_check_all(folder: Path, stories: Path, device: str) -> dict[str, Checked]:
    with pytest.MonkeyPatch.context() as patch:
        # The working directory is not searched by children; these tests are.
        patch.setenv("PYTHONPATH", str(ROOT))
        spec = {"folder": str(folder), "stories": str(stories), "device": device}
        return msgspec.convert(run_in_child("tests.test_torch_check:check_all", spec), dict[str, Checked])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, stories: Path) -> dict[str, Checked]:
    return run_check_all(tmp_path_factory.mktemp("check"), stories, "cpu")


@pytest.mark.parametrize("name", GOOD)
def test_a_good_artifact_passes(name: str, results: dict[str, Checked]) -> None:
    checked = results[name]
    assert checked.fault is None
    assert checked.kld_engine < 1e-4
    assert checked.kld_parent < 0.25
    if name == "stories-int8":
        assert checked.kld_rounding is None
        return
    # The artifacts are plain rounding themselves, so that both must agree but for the rounding to 16 bits.
    assert checked.kld_rounding == pytest.approx(checked.kld_parent, rel=0.02, abs=1e-5)
    assert len(checked.kld_parent_blocks) == len(checked.kld_rounding_blocks) == 16
    assert np.mean(checked.kld_parent_blocks) == pytest.approx(checked.kld_parent, rel=1e-6)


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_rejected(name: str, results: dict[str, Checked]) -> None:
    fault = results[name].fault
    assert fault is not None
    assert GARBAGE[name][2] in fault


@pytest.mark.gpu
@pytest.mark.skipif(hardware.nvidia()[0] is None, reason="no CUDA device was found")
def test_on_a_gpu_good_artifacts_pass_and_ruined_ones_do_not(tmp_path: Path, stories: Path) -> None:
    results = run_check_all(tmp_path, stories, "auto")
    assert {name: results[name].fault for name in GOOD} == dict.fromkeys(GOOD)
    assert "far worse than plain rounding" in str(results["lost-stories-gptq"].fault)
    assert results["stories-gptq"].peak_device_bytes > 0


def test_an_artifact_that_the_engine_itself_ruined_is_rejected(results: dict[str, Checked]) -> None:
    assert results["lost-stories-gptq"].kld_engine < 1e-4
    assert "far worse than plain rounding" in str(results["lost-stories-gptq"].fault)
    assert "far from its parent" in str(results["lost-stories-int8"].fault)


def test_an_engine_that_computed_in_bfloat16_is_not_held_to_float32(results: dict[str, Checked]) -> None:
    assert results["narrow"].fault is None
    assert results["narrow"].kld_engine > 10 * results["llama-gptq"].kld_engine


def test_calibrated_codes_that_are_plain_rounding_get_a_warning(results: dict[str, Checked]) -> None:
    for name in GOOD:
        said = [notice.code for notice in results[name].notices]
        assert ("not-better-than-rounding" in said) == ("gptq" in name or "awq" in name)


def test_the_artifact_is_gone_from_memory_when_its_parent_is_loaded(results: dict[str, Checked]) -> None:
    assert results["held"].peak_process_bytes == 0


def test_the_verdict_on_calibration_is_paired() -> None:
    pytest.importorskip("torch")
    from quantlab.quantize.torch_check import _verdict

    # Blocks differ far more among themselves than the two artifacts do in each.
    rounding = [0.05 * (1 + i % 8) for i in range(32)]

    def verdict(own: list[float]) -> str:
        checked = Checked(kld_parent=np.mean(own), kld_rounding=np.mean(rounding))
        checked.kld_parent_blocks, checked.kld_rounding_blocks = own, rounding
        return "".join(notice.message for notice in _verdict(checked))

    assert verdict([0.9 * x for x in rounding]) == ""
    assert "not distinguishable from plain" in verdict([0.999 * x for x in rounding])
    assert "not distinguishable from plain" in verdict([x * (1.2 if i % 2 else 0.78) for i, x in enumerate(rounding)])
    assert "worse than plain" in verdict([1.1 * x for x in rounding])


def test_rounding_in_torch_is_rounding_in_numpy() -> None:
    torch = pytest.importorskip("torch")
    from quantlab.quantize.rounding import rounded

    weight = np.random.default_rng(0).standard_normal((24, 96)).astype(np.float32)
    weight[3, :32] = 0
    for weights in (Weights(4, 32, True), Weights(4, 32, False), Weights(8, -1, True), Weights(2, 96, False)):
        with np.errstate(divide="ignore", invalid="ignore"):
            expected = dequantized(*codes(weight, weights.bits, weights.group_size, weights.sym))
        found = rounded(torch.from_numpy(weight), weights, torch.float16).numpy()
        assert np.isfinite(found).all()
        live = np.isfinite(expected)
        np.testing.assert_allclose(found[live], expected[live], atol=1e-6)
        assert (found[3, :32] == 0).all() or weights.group_size != 32
