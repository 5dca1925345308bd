"""The prefix-cache bench: theory by hand and by brute force, traces, why prompts missed, the command."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import gguf
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from quantlab.bench.prefix_cache import bench
from quantlab.bench.prefix_cache.measure import Bed
from quantlab.bench.prefix_cache.notices import of_row
from quantlab.bench.prefix_cache.rows import Row
from quantlab.bench.prefix_cache.scenarios import Stream, Texts, count, recorded, stream
from quantlab.bench.prefix_cache.serve import measure
from quantlab.bench.prefix_cache.spec import SCENARIOS, PrefixCacheSpec, parse_bytes
from quantlab.bench.prefix_cache.theory import budget_curve, hit_rate, reusable_tokens, saved_s
from quantlab.bench.prefix_cache.tiers import TierPoint, break_even, measure_tiers
from quantlab.bench.prefix_cache.why import common_prefix, misses
from quantlab.core.artifact import content_sha256
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.model import ModelFile
from quantlab.core.progress import silent
from quantlab.core.result import Measurement, ModelInfo, Notice, RuntimeInfo
from quantlab.lab.execute import Lab, fingerprint
from quantlab.lab.prefix_cache import prefix_cache_step
from quantlab.lab.recipe import read_recipe, run_recipe
from quantlab.lab.store import Store
from quantlab.report.curves import tabulate_curves
from quantlab.report.prefix_cache import _time
from quantlab.report.render import markdown
from quantlab.runtime.backend import Backend, Capacity
from quantlab.runtime.clock import VirtualClock, WallClock
from quantlab.runtime.simulated import SimulatedBackend
from quantlab.runtime.step_model import StepModel
from tests.tiny_gguf import write_gguf

MODEL = ModelFile(path="m.gguf", label="m", source="m", sha256="0")
NAMES = {"hit_rate", "ttft_cold", "ttft_warm", "kv_bytes_saved", "prefill_tokens_saved"}
VIRTUAL = {"simulate": True, "bandwidth": 1e9, "flops": 1e11}


def spec(**options: object) -> PrefixCacheSpec:
    return PrefixCacheSpec(MODEL, **options)  # type: ignore[arg-type]


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


# theory


def test_whole_blocks_of_earlier_prompts_and_answers_are_reusable() -> None:
    prompts = [
        tokens(1, 2, 3, 4, 5),
        tokens(1, 2, 3, 4, 6),
        tokens(1, 2, 3, 4),
        tokens(1, 2, 9),
        tokens(1, 2, 3, 4, 5, 8),
    ]
    left = [tokens(1, 2, 3, 4, 5, 8, 7), *prompts[1:]]
    # Of a prompt that is there to its end one token is computed; the answer of the first is found by the last.
    assert reusable_tokens(prompts, left, 2) == [0, 4, 3, 2, 5]
    assert hit_rate([0, 4, 3, 2, 5], prompts) == 14 / 23


words = st.lists(st.integers(0, 2), max_size=6)
streams = st.lists(st.tuples(words, st.integers(1, 3)), min_size=1, max_size=20).map(
    lambda found: [tokens(*(w * 4 + i for w in ws for i in range(4)), *([9] * n)) for ws, n in found]
)


@hypothesis.given(streams)
@hypothesis.settings(max_examples=100, derandomize=True)
def test_reusable_tokens_are_those_of_the_longest_common_prefix(prompts: list[np.ndarray]) -> None:
    for i, found in enumerate(reusable_tokens(prompts, prompts, 4)):
        longest = max((common_prefix(prompts[i].tolist(), p.tolist()) for p in prompts[:i]), default=0)
        assert found == min(longest // 4 * 4, len(prompts[i]) - 1)


@hypothesis.given(streams, st.integers(0, 3))
@hypothesis.settings(max_examples=100, derandomize=True)
def test_the_curve_rises_to_what_the_stream_allows(prompts: list[np.ndarray], prime: int) -> None:
    prime = min(prime, len(prompts) - 1)
    curve = budget_curve(prompts, prompts, 4, prime=prime)
    rates = [rate for _, rate in curve]
    assert rates == sorted(rates)
    assert rates[-1] == hit_rate(reusable_tokens(prompts, prompts, 4)[prime:], prompts[prime:])


def test_the_time_saved_is_that_of_the_tokens_found() -> None:
    assert saved_s([8, 0], [tokens(*range(10)), tokens(1)], [1.0, 0.5]) == [0.8, 0.0]


# traces


@pytest.fixture(scope="module")
def mooncake(shared: Path) -> Path:
    return shared / "data" / "traces" / "mooncake_conversation_trace.jsonl"


def test_the_hits_of_a_trace_are_its_reusable_ids(mooncake: Path) -> None:
    asked = spec(trace=str(mooncake), simulate=True, requests=2000)
    on = SimulatedBackend(Capacity(4200, 2100, 2048), StepModel(1e-3, 1e-5), VirtualClock())
    found = recorded(asked, on.describe().n_vocab, 4100)
    bed = Bed(on, on.clock, budget_tokens=8 * 10**6, block_tokens=16, new_tokens=2)
    served = bed.warm(found)
    seen: set[int] = set()
    reusable = asked_blocks = 0
    with mooncake.open() as lines:
        for line, one in zip(lines, served, strict=False):
            row = json.loads(line)
            # Whole blocks; what is scaled keeps their number but for rounding at the end.
            ids = row["hash_ids"][: round(row["input_length"] / 32) // 16]
            leading = next((i for i, name in enumerate(ids) if name not in seen), len(ids))
            assert one.cached_tokens in (16 * leading, round(row["input_length"] / 32) - 1)
            reusable, asked_blocks = reusable + leading, asked_blocks + len(ids)
            seen.update(ids)
    assert count(asked) == len(served) == 2000
    assert 0.28 < reusable / asked_blocks < 0.32
    assert sum(one.cached_tokens for one in served) == pytest.approx(16 * reusable, rel=1e-4)
    rates = [rate for _, rate in budget_curve(found.prompts, found.prompts, 16, prime=0)]
    assert rates == sorted(rates)
    assert rates[-1] == hit_rate([one.cached_tokens for one in served], found.prompts)
    assert rates[0] < rates[-2] <= rates[-1]


def test_a_trace_that_is_shortened_says_so(mooncake: Path) -> None:
    details = {"agreement": {"same_steps": 0.0}, "answers": 1, "same_answers": 1, "expected_hit_rate": 0.5}
    row = Row("scenario", {"hit_rate": Measurement("share", "higher", [0.5])}, {"scenario": "trace", **details})
    said = {notice.code: notice.message for notice in of_row(spec(trace=str(mooncake), requests=100), row)}
    assert "512 recorded tokens are one block of 16" in said["scaled-trace"]
    assert "32.0 times as short" in said["scaled-trace"]
    with mooncake.open() as lines:
        longer = sum(
            round(json.loads(line)["input_length"] / 32) > 2048 for line, _ in zip(lines, range(100), strict=False)
        )
    assert longer > 0
    assert said["cut-prompts"] == f"{longer} of 100 recorded prompts were cut to 2048 tokens"
    assert "cut-prompts" not in {n.code for n in of_row(spec(trace=str(mooncake), requests=100, simulate=True), row)}
    assert not list(of_row(spec(), row))


def test_what_is_said_of_the_machine_stays_with_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Target:
        runtime = RuntimeInfo("llamacpp", "1", "cpu", "F16", {}, 1)
        at = 0

        def rows(self) -> Iterator[Row]:
            for self.at in (1, 2, 3):
                yield Row("tiers", {}, {}, last=self.at == 3)

        def notices(self) -> list[Notice]:
            return [Notice("busy-machine", f"row {self.at}")]

    monkeypatch.setattr(bench, "opened_model", lambda *_: contextlib.nullcontext(Target()))
    monkeypatch.setattr(bench, "model_info", lambda _: ModelInfo("m", "gguf", "none", 1, 16.0, {}))
    outcomes = list(bench.run(spec()))
    assert [o.warnings[0].message for o in outcomes] == ["row 1", "row 2", "row 3"]
    assert [o.details["complete"] for o in outcomes] == [False, False, True]


def test_what_was_measured_is_there_before_the_next_row_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Target:
        runtime = RuntimeInfo("llamacpp", "1", "cpu", "F16", {}, 1)

        def rows(self) -> Iterator[Row]:
            yield Row("tiers", {}, {"scenario": "chat"})
            raise QuantlabError("the child died", "")

        def notices(self) -> list[Notice]:
            return []

    monkeypatch.setattr(bench, "opened_model", lambda *_: contextlib.nullcontext(Target()))
    monkeypatch.setattr(bench, "model_info", lambda _: ModelInfo("m", "gguf", "none", 1, 16.0, {}))
    found = []
    with pytest.raises(QuantlabError, match="died"):
        for outcome in bench.run(spec()):
            found.append(outcome)  # noqa: PERF402 - what came before the error counts
    assert [(o.details["scenario"], o.details["complete"]) for o in found] == [("chat", False)]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, ["scenario", "scenario", "tiers", "tiers"]),
        ({"tiers": False}, ["scenario", "scenario"]),
        # No length has a whole block.
        ({"block_tokens": 256}, ["scenario", "scenario"]),
    ],
)
def test_the_last_row_says_so(options: dict[str, object], parts: list[str]) -> None:
    asked = spec(scenario=["chat", "rag"], prefix_tokens=64, requests=2, repeats=1, warmup=0, **options)
    on = SimulatedBackend(Capacity(200, 12, 512), StepModel(1e-3, 1e-5), VirtualClock())
    rows = list(measure(asked, on, on.clock, silent))
    assert [row.part for row in rows] == parts
    assert [row.last for row in rows] == [*[False] * (len(rows) - 1), True]


def test_a_trace_without_ids_is_refused(shared: Path) -> None:
    azure = shared / "data" / "traces" / "AzureLLMInferenceTrace_conv.csv"
    with pytest.raises(UsageError, match="does not tell which requests share"):
        recorded(spec(trace=str(azure)), 512, 4000)


# scenarios


def texts() -> Texts:
    return Texts(lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.int32), 1, seed=0)


@pytest.mark.parametrize(
    ("name", "shared_tokens"),
    [("system-prompt", 129), ("few-shot", 129), ("rag", 33), ("timestamp-first", 30), ("timestamp-last", 158)],
)
def test_what_the_prompts_of_a_scenario_share(name: str, shared_tokens: int) -> None:
    asked = spec(prefix_tokens=128, suffix_tokens=20, requests=5)
    found = stream(asked, name, texts(), lambda prompt: [])
    assert (len(found.prompts), found.prime) == (6, 1)
    lists = [prompt.tolist() for prompt in found.prompts]
    assert len({tuple(prompt) for prompt in lists}) == 6
    assert min(common_prefix(lists[0], other) for other in lists[1:]) == pytest.approx(shared_tokens, abs=4)


def test_a_conversation_holds_its_own_answers() -> None:
    asked = spec(prefix_tokens=128, suffix_tokens=10, requests=6)
    found = stream(asked, "chat", texts(), lambda prompt: [7, 8, len(prompt) % 100])
    assert (len(found.prompts), found.prime) == (8, 2)
    first, _, second = found.prompts[:3]
    assert second[: len(first) + 3].tolist() == [*first.tolist(), 7, 8, len(first) % 100]
    assert len(second) == len(first) + 13


# why


def test_a_difference_is_named_with_what_it_costs() -> None:
    body = list(range(100, 180))
    first, stamped, longer = [1, 2, *body], [1, 3, *body], [1, 2, *body, 5, 6]
    (miss, harmless) = misses([first, stamped, longer], 16)
    assert (miss.request, miss.against, miss.at, miss.block, miss.lost) == (1, 0, 1, 0, 80)
    # What comes at the end costs nothing.
    assert (harmless.request, harmless.against, harmless.at, harmless.lost) == (2, 0, 82, 0)
    assert misses([first, [9] * 50], 16)[0].lost == 0


# measured


@pytest.fixture(scope="module")
def model(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    pytest.importorskip("llama_cpp")
    from quantlab.quantize.convert import convert
    from quantlab.runtime.llamacpp import LlamaCppBackend

    path = tmp_path_factory.mktemp("model") / "stories.gguf"
    convert(stories, path, outtype="F32")
    backend = LlamaCppBackend(path, Capacity(280, 12, 512, n_outputs=12), device="cpu", threads=1)
    yield backend
    backend.close()


@pytest.mark.parametrize(
    ("interval", "runtime", "says"),
    [
        ([0.02, 0.01, 0.03], "llama.cpp", "TTFT saved 20.0 ± 10.0 ms; its tokens"),
        ([0.02, -0.01, 0.05], "llama.cpp", "TTFT saved is not distinguishable from none: 20 ± 30 ms; its tokens"),
        ([0.02, None, None], "llama.cpp", "TTFT saved 20.0 ms, from too few repetitions to tell it from noise; its"),
        ([0.02, None, None], "simulated", "TTFT saved 20.0 ms; its tokens at the prefill rate would save 30.0 ms"),
    ],
)
def test_a_saving_is_told_as_far_as_it_is_known(interval: list[float | None], runtime: str, says: str) -> None:
    details = {"ttft_saved_interval_s": interval, "ttft_saved_predicted_s": 0.03}
    row = types.SimpleNamespace(details=details, runtime=types.SimpleNamespace(name=runtime))
    assert _time(row).startswith(says)  # type: ignore[arg-type]


def test_every_scenario_on_a_real_model(model: Backend) -> None:
    asked = spec(prefix_tokens=96, suffix_tokens=8, requests=3, repeats=1, warmup=0, new_tokens=4, block_tokens=8)
    rows = list(measure(asked, model, WallClock(), silent))
    assert [row.details.get("scenario") for row in rows[:6]] == list(SCENARIOS)
    kv_bytes = model.describe().kv_bytes_per_token
    for row in rows[:6]:
        d, m = row.details, row.measurements
        assert set(m) == NAMES
        assert d["same_answers"] == d["answers"] == 3
        assert d["agreement"]["same_steps"] == 0
        assert d["agreement"]["added_bytes"] == 4 * d["agreement"]["cached_tokens"]
        assert d["agreement"]["kv_bytes"] >= kv_bytes * d["agreement"]["cached_tokens"]
        assert m["hit_rate"].samples == [d["expected_hit_rate"]]
        assert m["prefill_tokens_saved"].samples == [sum(d["expected_cached_tokens"])]
        assert dict(d["budget_curve"])[max(size for size, _ in d["budget_curve"])] == d["expected_hit_rate"]
        assert m["kv_bytes_saved"].samples == [d["sharing"]["saved_tokens"] * kv_bytes]
    rates = {row.details["scenario"]: row.measurements["hit_rate"].samples[0] for row in rows[:6]}
    assert rates["timestamp-first"] < 0.2 < 0.8 < rates["timestamp-last"]
    told = {row.details["scenario"]: row.details["misses"] for row in rows[:6]}
    assert [name for name in SCENARIOS if told[name]] == ["rag", "timestamp-first"]
    assert told["timestamp-first"][0]["lost_share"] > 0.5
    assert told["timestamp-first"][0]["earlier"][0] in "0123456789"
    assert [row.part for row in rows[6:]] == ["tiers"] * len(rows[6:])
    assert rows[-1].details["break_even_tokens"].keys() == {"ram", "disk"}


def test_a_budget_bounds_what_is_found(model: Backend) -> None:
    budget = 5 * 8 * model.describe().kv_bytes_per_token
    asked = spec(scenario=["system-prompt"], prefix_tokens=96, suffix_tokens=8, requests=3, repeats=1, warmup=0,
                 new_tokens=4, block_tokens=8, budget_bytes=budget, tiers=False)  # fmt: skip
    (row,) = measure(asked, model, WallClock(), silent)
    assert row.details["cached_tokens"] == [40, 40, 40]
    with pytest.raises(UsageError, match="a budget of 10 bytes"):
        next(measure(spec(budget_bytes=10), model, WallClock(), silent))


def test_tiers_bring_back_the_same_kv(model: Backend) -> None:
    ids = model.encode("Once upon a time there was a dog. " * 20)[:130]
    points = measure_tiers(model, ids, block_tokens=16, repeats=2)
    assert [point.n_tokens for point in points] == [64, 128]
    assert all(point.bytes > point.n_tokens * model.describe().kv_bytes_per_token for point in points)
    assert all(len(point.ram_s) == len(point.disk_s) == len(point.recompute_s) == 2 for point in points)


def test_break_even_is_where_a_tier_wins_from() -> None:
    def point(n: int, compute: float, ram: float) -> TierPoint:
        return TierPoint(n, 0, [compute], [0.0], [ram], [9.0])

    points = [point(64, 2.0, 1.0), point(128, 1.0, 2.0), point(256, 4.0, 3.0), point(512, 8.0, 3.0)]
    assert break_even(points, "ram") == 256
    assert break_even(points, "disk") is None


# options


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MB", 64_000_000), ("1.5 GiB", 1610612736), ("1000", 1000), (7, 7), ("2k", 2000), ("3kB", 3000)],
)
def test_sizes_are_read_with_their_unit(text: str | int, size: int) -> None:
    assert parse_bytes(text, "--budget") == size


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"scenario": "chat,rags"}, "did you mean `rag`"),
        ({"scenario": "chat", "trace": "t"}, "give one of them"),
        ({"budget": "much"}, "no size"),
        ({"requests": 0}, "at least 1"),
        ({"prefix_tokens": 10}, "at least 64"),
        ({"bandwidth": 1e9}, "give all three"),
        ({"trace": "t", "prefix_tokens": 512}, "a trace has its own lengths"),
        ({"simulate": True, "tiers": True}, "not simulated"),
        ({**VIRTUAL, "repeats": 3}, "repeats itself"),
        ({**VIRTUAL, "threads": 3}, "no model is run"),
        ({**VIRTUAL, "device": "cpu"}, "no model is run"),
        ({"served_model": "x"}, "of an endpoint"),
        ({"scenarios": "chat"}, "unknown option `scenarios`"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        prefix_cache_step(MODEL, options)
    assert says in f"{raised.value.message} {raised.value.hint}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, kind=gguf.GGMLQuantizationType.F32)
    return ModelFile(str(path), "tiny", str(path), content_sha256(path))


def test_a_recipe_runs_it_once_and_shows_every_row(tiny: ModelFile, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        f"name: r\nmodels: [{tiny.path}]\nprefix_cache:\n  - {{scenario: [chat, rag], requests: 4, simulate: true,"
        " bandwidth: 1e9, flops: 1e11}\n"
    )
    lab, recipe = Lab(Store(tmp_path / "runs"), offline=True), read_recipe(tmp_path / "r.yaml")
    results = run_recipe(recipe, lab)
    assert [result.details["scenario"] for result in results] == ["chat", "rag"]
    assert [result.id for result in run_recipe(recipe, lab)] == [result.id for result in results]
    tables = tabulate_curves(results[::-1])
    assert len(tables[0].rows) == 2
    assert all(len(row) == len(table.heads) for table in tables for row in table.rows)
    assert all(markdown(table).startswith("| ") for table in tables)
    assert "because of token" in str(tables[0].verdicts)


def test_a_trace_that_changed_is_another_step(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("a")
    before = fingerprint(prefix_cache_step(MODEL, {"trace": str(path)}))
    path.write_text("b")
    assert fingerprint(prefix_cache_step(MODEL, {"trace": str(path)})) != before


def quantlab(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quantlab", "prefix-cache", *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"}
    )


@pytest.mark.parametrize(("experts", "said"), [(4, True), (0, False)])
def test_a_roofline_of_a_mixture_says_how_experts_are_chosen(tmp_path: Path, experts: int, said: bool) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, kind=gguf.GGMLQuantizationType.F32, experts=experts)
    model = ModelFile(str(path), "m", str(path), content_sha256(path))
    options = {"simulate": True, "bandwidth_bytes_per_s": 1e9, "flops_per_s": 1e11, "requests": 2}
    (row,) = bench.run(PrefixCacheSpec(model, scenario=["chat"], **options))  # type: ignore[arg-type]
    (notice,) = (notice for notice in row.warnings if notice.code == "simulated")
    assert "1e+09 bytes/s and 1e+11 FLOP/s" in notice.message
    assert ("choose experts uniformly" in notice.message) is said


def test_the_command_prints_tables_and_json(tiny: ModelFile, tmp_path: Path) -> None:
    options = ["--simulate", "--bandwidth", "1e9", "--flops", "1e11", "--requests", "4", "--prefix-tokens", "128"]
    done = quantlab(tiny.path, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for shown in (
        *SCENARIOS,
        "hit rate",
        "in theory",
        "TTFT warm",
        "KV saved by sharing",
        "budget, simulated",
        "roofline",
    ):
        assert shown in done.stdout
    done = quantlab(tiny.path, *options, "--scenario", "chat", "--json", "--no-save", cwd=tmp_path)
    result = json.loads(done.stdout)
    assert (result["kind"], result["details"]["scenario"]) == ("prefix-cache", "chat")
    assert set(result["measurements"]) == NAMES
    assert result["details"]["complete"]
    done = quantlab(tiny.path, "--scenario", "chats", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean `chat`" in done.stderr


def test_streams_that_cannot_be_served_are_errors(model: Backend) -> None:
    bed = Bed(model, WallClock(), budget_tokens=64, block_tokens=16, new_tokens=4)
    with pytest.raises(QuantlabError, match="the context holds 280"):
        bed.warm(Stream("s", [np.full(300, 5, np.int32)], 0))
