"""`bench` on a tiny random model: who ran when, what was counted, what a failure leaves behind. No time is expected."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import gguf
import msgspec
import numpy as np
import psutil
import pytest

from quantlab.bench import cell, metrics, notices, residency, workloads
from quantlab.bench.cell import Job, Ready, work
from quantlab.bench.latency import Session, Subject, _warnings, run
from quantlab.bench.spec import BenchSpec
from quantlab.core import hardware
from quantlab.core.artifact import content_sha256, model_info
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.hf_config import kv_values_per_token
from quantlab.core.model import ModelFile
from quantlab.core.progress import silent
from quantlab.core.result import Measurement, ModelInfo, Notice, Outcome, RuntimeInfo, TensorType
from quantlab.runtime.backend import Capacity, Generation, Loaded, Memory, Request
from quantlab.runtime.llamacpp import LlamaCppBackend, opened
from quantlab.runtime.loading import opened as opened_any
from tests.hf_folders import change_config, write_folder
from tests.tiny_gguf import write_gguf

CONTRACT = {
    "ttft", "tpot", "itl", "e2el", "prefill_throughput", "output_throughput", "decode_throughput", "peak_device_bytes",
    "peak_reserved_bytes", "peak_process_bytes", "weight_bytes", "kv_bytes_per_token", "tpot_floor",
    "bandwidth_bytes_per_s",
}  # fmt: skip


def model(path: Path, label: str | None = None) -> ModelFile:
    return ModelFile(str(path), label or path.stem, str(path), content_sha256(path))


def spec(*models: ModelFile, **options: object) -> BenchSpec:
    sizes = {"prompt_tokens": [12], "new_tokens": 5, "repeats": 4, "threads": 1}
    return BenchSpec(list(models), **{**sizes, **options})  # type: ignore[arg-type]


def codes(outcome: Outcome) -> set[str]:
    return {notice.code for notice in outcome.warnings}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, kind=gguf.GGMLQuantizationType.F32)
    return model(path)


@pytest.fixture
def trio(tiny: ModelFile, tmp_path: Path) -> list[ModelFile]:
    """The model under two labels, and a quantized one."""
    write_gguf(tmp_path / "q8.gguf", kind=gguf.GGMLQuantizationType.Q8_0)
    return [tiny, model(Path(tiny.path), "again"), model(tmp_path / "q8.gguf")]


def oracle(file: ModelFile, cell: BenchSpec) -> list[list[list[int]]]:
    """Token ids of every measured repetition, by the backend alone."""
    with opened(Path(file.path), Capacity(64, 4, 64, 64, 4, shared=False), threads=1) as backend:
        found = []
        for prompts in workloads.prompts(backend, cell)[cell.warmup :]:
            backend.reset()
            requests = [Request(prompt, cell.new_tokens, cell.ignore_eos) for prompt in prompts]
            found.append([g.tokens for g in backend.generate(requests)])
        return found


def test_models_take_turns_and_begin_in_turn(trio: list[ModelFile]) -> None:
    outcomes = list(run(spec(*trio)))
    assert [outcome.label for outcome in outcomes] == ["tiny", "again", "q8"]
    assert [outcome.details["positions_in_rounds"] for outcome in outcomes] == [
        [0, 2, 1, 0],
        [1, 0, 2, 1],
        [2, 1, 0, 2],
    ]
    assert len({outcome.details["session"] for outcome in outcomes}) == 1
    assert all(outcome.details["interleaved"] for outcome in outcomes)
    assert not any("not-interleaved" in codes(outcome) for outcome in outcomes)
    first, again, q8 = outcomes
    assert first.details["prompt_sha256"] == again.details["prompt_sha256"] == q8.details["prompt_sha256"]
    assert first.details["generated_sha256"] == again.details["generated_sha256"] != q8.details["generated_sha256"]
    assert first.model.sha256 == again.model.sha256 != q8.model.sha256


def test_an_outcome_holds_every_sample_and_measurement(tiny: ModelFile) -> None:
    (outcome,) = run(spec(tiny, batch=[3]))
    found = outcome.measurements
    assert found.keys() == CONTRACT
    counts = {name: (len(m.samples), m.samples_per_repetition) for name, m in found.items()}
    assert counts["ttft"] == counts["tpot"] == counts["e2el"] == (12, 3)
    assert counts["itl"] == (4 * 3 * 4, 12)
    assert counts["output_throughput"] == counts["decode_throughput"] == counts["prefill_throughput"] == (4, 1)
    assert found["weight_bytes"].samples[0] <= outcome.model.size_bytes
    assert found["peak_device_bytes"].samples == [0.0]
    assert len(found["bandwidth_bytes_per_s"].samples) > 1
    details = outcome.details
    read = details["bytes_read_per_token"] + 3 * found["kv_bytes_per_token"].samples[0] * details["mean_depth_tokens"]
    assert found["tpot_floor"].samples == [pytest.approx(read / max(found["bandwidth_bytes_per_s"].samples))]
    assert (details["prompt_tokens"], details["new_tokens"], details["batch"]) == (12, 5, 3)
    assert (details["repetitions"], details["generated_tokens"]) == (4, [15] * 4)
    assert details["threads"] == 1
    assert len(details["load_average"]) == 2
    assert outcome.runtime is not None
    assert (outcome.runtime.name, outcome.runtime.device, outcome.runtime.threads) == ("llamacpp", "cpu", 1)
    assert msgspec.json.decode(msgspec.json.encode(outcome), type=Outcome) == outcome


def test_memory_is_the_models_and_not_the_harness(tiny: ModelFile) -> None:
    (outcome,) = run(spec(tiny, repeats=1))
    peak = outcome.measurements["peak_process_bytes"].samples[0]
    assert outcome.measurements["weight_bytes"].samples[0] <= peak
    # Python, numpy and llama.cpp are far larger than this model.
    assert peak < outcome.details["process_bytes_before_load"]


def test_warm_up_is_run_and_discarded(tiny: ModelFile) -> None:
    cell = spec(tiny, warmup=2, repeats=3, batch=[2])
    (outcome,) = run(cell)
    expected = oracle(tiny, cell)
    assert len(expected) == 3
    assert outcome.details["generated_sha256"] == [workloads.ids_sha256(tokens) for tokens in expected]
    assert outcome.details["warmup_discarded"] == 2
    with opened(Path(tiny.path), Capacity(8), threads=1) as backend:
        measured = [ids for of_batch in workloads.prompts(backend, cell)[2:] for ids in of_batch]
    assert outcome.details["prompt_sha256"] == workloads.ids_sha256(measured)
    assert len(outcome.measurements["e2el"].samples) == 3 * 2


class Script:
    """A channel whose parent asks for two repetitions and then ends."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self._orders = iter([0, 1, None])

    def send(self, kind: str, _: object) -> None:
        self.sent.append(kind)

    def receive(self) -> object:
        return next(self._orders)


def test_a_model_is_ready_when_it_is_warm(tiny: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Script()
    generate = LlamaCppBackend.generate
    prompts: list[bytes] = []

    def spy(backend: LlamaCppBackend, requests: list[Request]) -> list[Generation]:
        channel.sent.append("generate")
        prompts.append(requests[0].prompt.tobytes())
        return generate(backend, requests)

    monkeypatch.setattr(LlamaCppBackend, "generate", spy)
    work(msgspec.to_builtins(Job(spec(tiny, warmup=3, repeats=2), 0)), channel)  # type: ignore[arg-type]
    assert channel.sent == ["generate"] * 3 + ["ready"] + ["generate", "repeated"] * 2
    assert len(set(prompts)) == 5, "no repetition sees a prompt again"


class TwoWays:
    """A backend that decodes in two ways; its memory is the number of calls so far."""

    no_graph = "a kernel waits"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def reset(self) -> None:
        self.calls.append("reset")

    def generate(self, requests: list[Request]) -> list[Generation]:
        self.calls.append("generate")
        return [Generation(0.0, [1, 2], [1.0, 2.0]) for _ in requests]

    def generate_plain(self, requests: list[Request]) -> list[Generation]:
        self.calls.append("plain")
        return [Generation(0.0, [1, 2], [1.0, 4.0]) for _ in requests]

    def memory(self) -> Memory:
        return Memory(*[len(self.calls)] * 5)


def test_a_second_way_to_decode_runs_in_each_repetition_and_not_in_the_peak(tiny: ModelFile) -> None:
    backend = TwoWays()
    both = cell._Cell(backend, spec(tiny))  # type: ignore[arg-type]
    prompts = [np.array([1, 2], np.int32)] * 2
    repeated = [both.repeat(prompts) for _ in range(2)]
    assert backend.calls == ["reset", "generate", "reset", "plain"] * 2
    assert both.memory == Memory(2, 2, 2, 2, 2)
    assert [one.no_graph for one in repeated] == ["a kernel waits"] * 2
    plain = metrics.plain_measurements([one.plain for one in repeated])
    assert plain == {"tpot_generate": Measurement("s", "lower", [3.0] * 4, 2)}
    assert [g.times_s for g in repeated[0].generations] == [[1.0, 2.0]] * 2
    assert metrics.plain_measurements([]) == {}


def test_each_cell_is_a_session_of_its_own(tiny: ModelFile) -> None:
    outcomes = list(run(spec(tiny, prompt_tokens=[6, 12], batch=[1, 2], repeats=1)))
    cells = [(o.details["prompt_tokens"], o.details["batch"]) for o in outcomes]
    assert cells == [(6, 1), (6, 2), (12, 1), (12, 2)]
    assert len({o.details["session"] for o in outcomes}) == 4
    assert all("few-repeats" in codes(o) for o in outcomes)


def test_a_prompt_as_it_is(tiny: ModelFile) -> None:
    text = "The cat sat on the mat."
    (outcome,) = run(spec(tiny, prompt=text, prompt_tokens=None))
    with opened(Path(tiny.path), Capacity(8), threads=1) as backend:
        assert outcome.details["prompt_tokens"] == len(backend.encode(text))
    assert len(set(outcome.details["generated_sha256"])) == 1


@pytest.mark.parametrize("runtime", ["llamacpp", "torch"])
def test_the_length_of_a_prompt_needs_no_weights(
    tiny: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    path = Path(tiny.path)
    if runtime == "torch":
        pytest.importorskip("torch")
        path = tmp_path / "folder"
        write_folder(path, "llama", model_type="llama")
    asked = spec(model(path), prompt="The <s> cat.", prompt_tokens=None)
    with opened_any(path, Capacity(8), device="cpu", threads=1) as backend:
        expected = len(workloads.prompts(backend, asked)[0][0])
    kind = type(backend)
    monkeypatch.setattr(kind, "__init__", lambda *_, **__: pytest.fail("the model was opened"))
    if runtime == "torch":
        for file in path.glob("*.safetensors"):
            file.unlink()
    assert cell._prompt_length(asked, path) == expected


def test_answers_that_end_early_count_what_they_hold(tiny: ModelFile, tmp_path: Path) -> None:
    cell = spec(tiny, new_tokens=20, batch=[2], ignore_eos=False)
    free = [tokens for batch in oracle(tiny, msgspec.structs.replace(cell, ignore_eos=True)) for tokens in batch]
    # The token that most answers hold, but none begins with, becomes the end of an answer.
    holds = collections.Counter(t for tokens in free for t in set(tokens) - {tokens[0] for tokens in free})
    end = holds.most_common(1)[0][0]
    write_gguf(
        tmp_path / "ends.gguf", kind=gguf.GGMLQuantizationType.F32, metadata={"tokenizer.ggml.eot_token_id": end}
    )
    lengths = [tokens.index(end) + 1 if end in tokens else 20 for tokens in free]
    (outcome,) = run(msgspec.structs.replace(cell, models=[model(tmp_path / "ends.gguf")]))
    assert outcome.details["generated_tokens"] == [a + b for a, b in zip(lengths[::2], lengths[1::2], strict=True)]
    assert outcome.details["stopped_requests"] == sum(n < 20 for n in lengths) > 0
    assert "stopped-early" in codes(outcome)
    assert len(outcome.measurements["itl"].samples) == sum(lengths) - len(lengths)
    (ignoring,) = run(msgspec.structs.replace(cell, models=[model(tmp_path / "ends.gguf")], ignore_eos=True))
    assert ignoring.details["generated_tokens"] == [40] * 4
    assert "stopped-early" not in codes(ignoring)


def test_one_new_token_has_no_tpot(tiny: ModelFile) -> None:
    (outcome,) = run(spec(tiny, new_tokens=1, repeats=3))
    assert not {"tpot", "itl", "decode_throughput"} & outcome.measurements.keys()
    assert "no-tpot" in codes(outcome)
    assert len(outcome.measurements["ttft"].samples) == 3


def children() -> list[psutil.Process]:
    """The processes of cells, in the order in which they began."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.ZombieProcess):
            if "quantlab.bench.cell:work" in child.cmdline():
                found.append(child)
    return sorted(found, key=lambda child: child.create_time())


def test_a_killed_model_leaves_the_others_and_the_next_cell(trio: list[ModelFile]) -> None:
    killed: list[int] = []

    def kill_the_second(_: str, done: float, __: float) -> None:
        # Three are loaded, two have run their first repetition.
        if done == 5 and not killed:
            killed.append(children()[1].pid)
            os.kill(killed[0], signal.SIGKILL)

    outcomes = run(spec(*trio, batch=[1, 2]), kill_the_second)
    kept = list(itertools.islice(outcomes, 5))
    assert [(o.label, o.details["batch"]) for o in kept] == [
        ("tiny", 1), ("q8", 1), ("tiny", 2), ("again", 2), ("q8", 2),
    ]  # fmt: skip
    assert all(o.details["repetitions"] == 4 for o in kept)
    with pytest.raises(QuantlabError, match="SIGKILL"):
        next(outcomes)
    assert not children()


def test_interrupting_ends_the_children(trio: list[ModelFile]) -> None:
    def interrupt(_: str, done: float, __: float) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run(spec(*trio), interrupt))
    assert not children()


def test_a_model_that_does_not_load_leaves_the_others(tiny: ModelFile, tmp_path: Path) -> None:
    data = Path(tiny.path).read_bytes().replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight")
    (tmp_path / "bad.gguf").write_bytes(data)
    outcomes = run(spec(tiny, model(tmp_path / "bad.gguf"), repeats=2))
    assert next(outcomes).label == "tiny"
    with pytest.raises(QuantlabError, match="attn_q"):
        next(outcomes)


def test_unlike_failures_are_told_together_like_ones_once(tiny: ModelFile) -> None:
    cell = spec(tiny, prompt="much too short", prompt_tokens=[30, 40])
    with pytest.raises(QuantlabError, match=r"2 measurements failed.*30 tokens.*40 tokens"):
        list(run(cell))
    with pytest.raises(UsageError, match="30 tokens"):
        list(run(spec(tiny, tiny, prompt="much too short", prompt_tokens=[30])))


def test_models_that_do_not_fit_together_run_alone(trio: list[ModelFile], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1_000_000))
    outcomes = list(run(spec(*trio, repeats=2)))
    assert [o.label for o in outcomes] == ["tiny", "again", "q8"]
    assert [o.details["positions_in_rounds"] for o in outcomes] == [[0, 0]] * 3
    assert len({o.details["session"] for o in outcomes}) == 3
    for outcome in outcomes:
        assert not outcome.details["interleaved"]
        assert "not-interleaved" in codes(outcome)


def test_what_models_need_decides_whether_they_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "folder", "llama", kind="F16")
    files = [model(tmp_path / "folder")] * 2
    infos = [model_info(file) for file in files]
    width, n_kv = 4, kv_values_per_token(tmp_path / "folder")
    tokens = 2 * (12 + 5)

    def fits(free: float, **options: object) -> bool:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
        return residency.together(spec(*files, batch=[2], **options), infos) == [[0, 1]]

    monkeypatch.setattr(hardware, "nvidia_free_bytes", lambda: None)
    # On a CPU 16 bits become 32, of weights and of K and V; half of the memory is left alone.
    weights = 8 * infos[0].size_bytes / infos[0].bits_per_weight * width
    need = 2 * 2 * (weights + n_kv * width * tokens)
    assert fits(need + 1)
    assert not fits(need - 1)
    assert fits(0.51 * need, dtype="bfloat16")
    # On a GPU they stay as they are, and its own memory counts.
    monkeypatch.setattr(hardware, "nvidia_free_bytes", lambda: int(0.51 * need))
    assert fits(0)
    assert not fits(0, dtype="float32", device="cpu")
    # But for what transformers decompresses there too.
    change_config(tmp_path / "folder", quantization_config={"quant_method": "compressed-tensors"})
    infos = [msgspec.structs.replace(info, bits_per_weight=info.bits_per_weight / 4) for info in infos]
    assert not fits(0)
    change_config(tmp_path / "folder", quantization_config={"quant_method": "gptq"})
    assert fits(0)
    monkeypatch.setattr(hardware, "nvidia_free_bytes", lambda: 1000)
    assert not fits(1e12)
    assert fits(1e12, device="cpu")


def test_progress_ends_at_its_total(tiny: ModelFile) -> None:
    seen: list[tuple[str, float, float]] = []
    list(run(spec(tiny, repeats=3), lambda *step: seen.append(step)))
    assert [done for _, done, _ in seen] == [0, 1, 2, 3, 4]
    assert {total for *_, total in seen} == {4}


# What readers are told


def loaded(weight_bytes: int, device: str = "cpu") -> Loaded:
    runtime = RuntimeInfo("x", "1", device, "F16", {}, 1)
    return Loaded(runtime, Capacity(), 10, 10, weight_bytes, weight_bytes, 20, None, frozenset(), False, None)


def seconds(*samples: float) -> Measurement:
    return Measurement("s", "lower", list(samples))


def test_notices_of_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "last_level_cache_bytes", lambda: 1000)

    def told(tpot: Measurement, floor: Measurement | None, weights: int = 10_000) -> list[str]:
        found = {"tpot": tpot} | ({"tpot_floor": floor} if floor else {})
        return [n.code for n in notices.of_measurements(found, loaded(weights))]

    assert told(seconds(1.0, 1.01, 1.02), seconds(0.5)) == []
    assert told(seconds(1.0, 1.2, 1.4), seconds(0.5)) == ["large-spread"]
    assert told(seconds(1.0, 1.4), seconds(0.5)) == []
    assert told(seconds(1.0, 1.0, 1.0, 1.0, 9.0), seconds(0.5)) == []
    assert told(seconds(1.0, 1.0), seconds(1.1)) == ["fits-in-cache"]
    assert told(seconds(1.0, 1.0), seconds(0.5), weights=1000) == ["fits-in-cache"]
    assert told(seconds(1.0, 1.0), None) == ["no-floor"]
    # Requests of a batch differ; repetitions are what must agree.
    batch = Measurement("s", "lower", [1.0, 3.0, 1.0, 3.0, 1.0, 3.0], 2)
    assert told(batch, seconds(0.5)) == []
    assert list(notices.of_measurements({}, loaded(1))) == []


def test_notices_of_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(kind: str, device: str, capability: float | None, *, decompressed: int = 0) -> list[str]:
        monkeypatch.setattr(hardware, "nvidia_capability", lambda: capability)
        runtime = RuntimeInfo("torch", "2", device, "float32", {}, 1)
        found = dataclasses.replace(
            loaded(1), runtime=runtime, decompressed={kind: decompressed} if decompressed else {}
        )
        info = ModelInfo("m", "safetensors", "x", 1, 8.0, {kind: TensorType(3, 30), "F16": TensorType(1, 1)})
        notices_ = list(notices.of_loading(found, info))
        messages.extend(notice.message for notice in notices_)
        return [notice.code for notice in notices_]

    messages: list[str] = []
    assert told("I32", "cpu", None) == []
    assert told("I32", "cuda", 8.6, decompressed=210) == ["decompressed-at-load"]
    assert messages[-1].startswith(
        "210 layers are stored as packed integers and computed after decompression to float32"
    )
    assert told("F8_E4M3", "cpu", None, decompressed=3) == ["decompressed-at-load", "fp8-fallback"]
    assert messages[-1] == "`cpu` has no FP8 arithmetic: weights are decompressed to float32"
    assert told("F8_E4M3", "cuda", 8.6) == ["fp8-fallback"]
    assert messages[-1].startswith("compute capability 8.6 has no FP8 arithmetic")
    assert told("F8_E4M3", "cuda", 8.9) == []
    assert told("F8_E4M3", "cuda", 9.0) == []


def test_steps_without_a_graph_are_told(tiny: ModelFile) -> None:
    cell_ = spec(tiny)
    ready = Ready(loaded(10_000, "cuda"), 12, "", 0)
    info = ModelInfo("m", "safetensors", "x", 1, 8.0, {})

    def told(no_graph: str | None) -> list[Notice]:
        subject = Subject(0, None, ready, [[Generation(0, [1, 2], [1.0, 2.0])]], no_graph=no_graph)  # type: ignore[arg-type]
        return [n for n in _warnings(subject, Session(cell_, [0], silent), {}, info) if n.code == "no-cuda-graph"]

    assert told(None) == []
    (notice,) = told("a kernel waits")
    assert "(a kernel waits)" in notice.message


def test_a_slow_plain_loop_is_called_overhead() -> None:
    def told(plain: float) -> list[str]:
        found = {"tpot": seconds(0.01, 0.01), "tpot_generate": seconds(plain, plain), "tpot_floor": seconds(0.001)}
        return [n.message for n in notices.of_measurements(found, loaded(10**12)) if n.code == "launch-overhead"]

    assert told(0.009) == told(0.012) == []
    (message,) = told(0.02)
    assert message.startswith("plain `generate` takes 20.0 ms a token where the model itself takes 10.0 ms: 50% is")


def test_notices_of_settings_and_generations(monkeypatch: pytest.MonkeyPatch, tiny: ModelFile) -> None:
    monkeypatch.setattr(hardware, "usable_cores", lambda: 4)
    assert list(notices.of_settings(spec(tiny), 4)) == []
    assert [n.code for n in notices.of_settings(spec(tiny, repeats=2), 5)] == ["few-repeats", "threads-exceed-cores"]
    whole, short = Generation(0, [1] * 128, [1.0] * 128), Generation(0, [1] * 88, [1.0] * 88, "stop")
    assert list(notices.of_generations([[whole]], spec(tiny, new_tokens=128))) == []
    (notice,) = notices.of_generations([[whole], [short]], spec(tiny, new_tokens=128))
    assert notice.message.startswith("1 of 2 answers ended before 128 tokens (the shortest has 88)")


def test_sequences_beyond_the_training_are_told(tiny: ModelFile) -> None:
    trained = dataclasses.replace(loaded(1), n_ctx_train=64)
    # The last token is not fed.
    assert list(notices.of_lengths(trained, 60, 5)) == []
    (notice,) = notices.of_lengths(trained, 60, 6)
    assert notice.message.startswith("sequences of 65 tokens; the model was trained on 64")
    assert list(notices.of_lengths(dataclasses.replace(trained, n_ctx_train=0), 60, 6)) == []
    with opened(Path(tiny.path), Capacity(8), threads=1) as backend:
        n_ctx = backend.describe().n_ctx_train
    (outcome,) = run(spec(tiny, prompt_tokens=[n_ctx], new_tokens=2, repeats=1))
    assert "n-ctx-beyond-training" in codes(outcome)
