"""Traces and drawn arrivals: real files against independent counts, every kind of bad row, the law of the gaps."""

from __future__ import annotations

import csv
import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from quantlab.bench.arrivals import arrival_times
from quantlab.bench.traces import TraceRow, TraceShape, read_trace, summarize
from quantlab.core.errors import QuantlabError, UsageError

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
DAY = "2023-11-16 18:15:46"


@pytest.fixture(scope="session")
def azure(shared: Path) -> Path:
    return shared / "data" / "traces" / "AzureLLMInferenceTrace_conv.csv"


@pytest.fixture(scope="session")
def mooncake(shared: Path) -> Path:
    return shared / "data" / "traces" / "mooncake_conversation_trace.jsonl"


def _file(folder: Path, *lines: str, end: str = "\n") -> Path:
    path = folder / "trace"
    path.write_bytes(end.join(lines).encode())
    return path


def _row(timestamp: object = 0, prompt: object = 5, new: object = 2, **more: object) -> str:
    return json.dumps({"timestamp": timestamp, "input_length": prompt, "output_length": new, **more})


def test_azure_sums_are_those_of_a_csv_reader(azure: Path) -> None:
    with azure.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = list(read_trace(azure))
    assert [(r.prompt_tokens, r.new_tokens) for r in found] == [
        (int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in rows
    ]
    # From the file's first and last line by hand: 18:15:46.68059 to 19:14:08.402527.
    assert found[0].arrival_s == 0
    assert found[-1].arrival_s == pytest.approx(58 * 60 + 21.721937, abs=1e-9)
    # A digit of 100 ns is kept.
    assert found[1].arrival_s == pytest.approx(4.3145790, abs=1e-9)
    summary = summarize(found)
    assert summary.rows == len(rows) == 19366
    assert summary.prompt_tokens == sum(int(r["ContextTokens"]) for r in rows)
    assert summary.new_tokens == sum(int(r["GeneratedTokens"]) for r in rows)
    assert summary.rate_per_s == pytest.approx(19365 / 3501.721937)


def test_mooncake_rows_are_those_of_json(mooncake: Path) -> None:
    rows = [json.loads(line) for line in mooncake.read_text().splitlines()]
    found = list(read_trace(mooncake))
    assert len(found) == 12031
    assert found == [
        TraceRow(r["timestamp"] / 1000, r["input_length"], r["output_length"], tuple(r["hash_ids"])) for r in rows
    ]
    assert summarize(found).rate_per_s == pytest.approx(12030 / (3536.999 - 0))


def test_scales_and_caps(mooncake: Path) -> None:
    plain = list(read_trace(mooncake, TraceShape(limit=500)))
    fast = list(read_trace(mooncake, TraceShape(rate_scale=4, limit=500)))
    assert len(fast) == len(plain) == 500
    assert summarize(fast).rate_per_s == pytest.approx(4 * summarize(plain).rate_per_s)
    short = list(read_trace(mooncake, TraceShape(length_scale=0.1, max_prompt_tokens=300, max_new_tokens=7, limit=500)))
    for before, after in zip(plain, short, strict=True):
        assert after.prompt_tokens == min(300, max(1, round(before.prompt_tokens * 0.1)))
        assert after.new_tokens == min(7, max(1, round(before.new_tokens * 0.1)))
        # 300 tokens of blocks of 51.2: the sixth is begun.
        want = 6 if after.prompt_tokens == 300 else len(before.hash_ids)
        assert after.hash_ids == before.hash_ids[:want]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path, *(_row(i, 512 * 400, 1, hash_ids=list(range(i, i + 400))) for i in range(3000)))
    assert path.stat().st_size > 5_000_000
    tracemalloc.start()
    assert summarize(read_trace(path)).rows == 3000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000


def test_what_editors_do_to_a_file_is_no_fault(tmp_path: Path) -> None:
    path = _file(tmp_path, "\ufeff" + HEAD, f"{DAY}.5,374,44", "", f'"{DAY}.75Z", 396 ,109', "  ", end="\r\n")
    assert list(read_trace(path)) == [TraceRow(0, 374, 44), TraceRow(0.25, 396, 109)]
    swapped = _file(tmp_path, "id,GeneratedTokens,ContextTokens,TIMESTAMP", f"a,1,2,{DAY}", f"b,3,4,{DAY}.0000001")
    assert list(read_trace(swapped)) == [TraceRow(0, 2, 1), TraceRow(1e-7, 4, 3)]
    zones = _file(tmp_path, HEAD, f"{DAY}+00:00,1,1", "2023-11-16T20:15:47.5+02:00,1,1")
    assert [r.arrival_s for r in read_trace(zones)] == [0, 1.5]
    assert list(read_trace(_file(tmp_path, _row(70), _row(70.5)))) == [TraceRow(0, 5, 2), TraceRow(0.0005, 5, 2)]


BAD_CSV = {
    "a time that is none": ("soon,1,1", "TIMESTAMP `soon`"),
    "a day that is none": ("2023-02-30 00:00:00,1,1", "day is out of range"),
    "a missing column": (f"{DAY},1", "2 columns, the header has 3"),
    "a column too many": (f"{DAY},1,1,1", "4 columns"),
    "no number": (f"{DAY},many,1", "ContextTokens `many`"),
    "NaN": (f"{DAY},1,NaN", "GeneratedTokens `NaN`"),
    "a fraction": (f"{DAY},1.5,1", "ContextTokens `1.5`"),
    "an empty cell": (f"{DAY},,1", "ContextTokens ``"),
    "a zero prompt": (f"{DAY},0,1", "a prompt of 0 tokens"),
    "a negative output": (f"{DAY},1,-3", "an output of -3 tokens"),
    "overflow": (f"{DAY},99999999999999999999,1", "beyond any model"),
    "many digits": (f"{DAY},{'9' * 5000},1", "no whole number"),
    "other digits": (f"{DAY},٣,1", "no whole number"),
    "unordered": ("2023-11-16 18:15:45.5,1,1", "0.5 s earlier than line 2"),
}
BAD_JSON = {
    "no JSON": ("{timestamp: 1}", "malformed"),
    "cut": (_row()[:-5], "truncated"),
    "a list": ("[1, 5, 2]", "Expected `object`"),
    "NaN": (_row(math.nan), "malformed"),
    "infinity": (_row().replace("0", "1e999", 1), "out of range"),
    "a missing key": ('{"timestamp": 1, "input_length": 5}', "output_length"),
    "text for a number": (_row(1, "5"), "Expected `int`"),
    "true for a number": (_row(1, True), "Expected `int`"),
    "null": (_row(None), "Expected `float`"),
    "a fraction": (_row(1, 5.5), "Expected `int`"),
    "a zero output": (_row(1, 5, 0), "an output of 0 tokens"),
    "a negative prompt": (_row(1, -5), "a prompt of -5 tokens"),
    "overflow": (_row(1, 10**12), "beyond any model"),
    "a time beyond all": (_row(1e300), "beyond any recording"),
    "hash ids of another length": (_row(1, 513, 2, hash_ids=[1]), "1 hash_ids for 513 tokens"),
    "hash ids that are none": (_row(1, 5, 2, hash_ids=["a"]), "Expected `int`"),
    "a negative time": (_row(-1), "negative"),
    "unordered": (_row(0.5), "0.0005 s earlier than line 2"),
}


@pytest.mark.parametrize("name", BAD_CSV)
def test_bad_csv_rows_are_named_by_line(tmp_path: Path, name: str) -> None:
    row, reason = BAD_CSV[name]
    path = _file(tmp_path, HEAD, f"{DAY},1,1", row, f"{DAY},1,1")
    with pytest.raises(QuantlabError, match="line 3 ") as caught:
        list(read_trace(path))
    assert reason in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", BAD_JSON)
def test_bad_json_rows_are_named_by_line(tmp_path: Path, name: str) -> None:
    row, reason = BAD_JSON[name]
    path = _file(tmp_path, "", _row(1), row)
    rows = read_trace(path)
    assert next(rows) == TraceRow(0, 5, 2)
    with pytest.raises(QuantlabError, match="line 3 ") as caught:
        next(rows)
    assert reason in caught.value.message
    # What is not asked for is not judged.
    assert len(list(read_trace(path, TraceShape(limit=1)))) == 1


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for head in (HEAD.encode(), _row().encode()):
        path.write_bytes(head + b"\n\xff\xfe,1,1\n")
        with pytest.raises(QuantlabError, match="line 2 "):
            list(read_trace(path))


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    for lines, reason in (
        ([], "is empty"),
        (["", " "], "is empty"),
        ([HEAD], "header and no rows"),
        (["time,prompt,output", "1,2,3"], "no trace in a known format"),
        (["[1, 2]"], "no trace in a known format"),
    ):
        with pytest.raises(QuantlabError, match=reason):
            list(read_trace(_file(tmp_path, *lines)))
    with pytest.raises(QuantlabError, match="No such file"):
        list(read_trace(tmp_path / "absent"))
    with pytest.raises(QuantlabError, match="directory"):
        list(read_trace(tmp_path))
    (tmp_path / "endless").write_bytes(b"{" + b" " * (1 << 24))
    with pytest.raises(QuantlabError, match="longer than"):
        list(read_trace(tmp_path / "endless"))


@pytest.mark.parametrize(
    "shape",
    [
        {"rate_scale": 0.0},
        {"rate_scale": -1.0},
        {"rate_scale": math.nan},
        {"length_scale": 0.0},
        {"length_scale": math.inf},
        {"limit": 0},
        {"max_prompt_tokens": 0},
        {"max_new_tokens": -1},
        {"rate_scale": 1e-308},
        {"length_scale": 1e10},
    ],
)
def test_shapes_that_leave_nothing(tmp_path: Path, shape: dict[str, float]) -> None:
    path = _file(tmp_path, _row(0), _row(1e14))
    with pytest.raises(UsageError):
        list(read_trace(path, TraceShape(**shape)))


def test_rows_at_one_time_have_no_rate(tmp_path: Path) -> None:
    assert summarize(read_trace(_file(tmp_path, _row(3), _row(3)))).rate_per_s is None


def test_poisson_gaps_are_exponential() -> None:
    times = arrival_times(5.0, 20_000, seed=1)
    gaps = np.diff(times, prepend=0.0)
    assert scipy.stats.kstest(gaps, "expon", args=(0, 1 / 5)).pvalue > 0.05
    assert 20_000 / times[-1] == pytest.approx(5, rel=0.02)
    # The test can tell: the same gaps a tenth longer fail it.
    assert scipy.stats.kstest(gaps * 1.1, "expon", args=(0, 1 / 5)).pvalue < 1e-6
    # Counts in a window of a Poisson process vary as much as their mean.
    counts = np.bincount((times / 2).astype(int))
    assert counts.var() / counts.mean() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_gamma_gaps_have_the_variation_of_their_burstiness(burstiness: float) -> None:
    gaps = np.diff(arrival_times(5.0, 50_000, burstiness=burstiness, seed=2), prepend=0.0)
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.03)
    assert scipy.stats.kstest(gaps, "gamma", args=(burstiness, 0, 1 / (5 * burstiness))).pvalue > 0.05


def test_constant_and_batch_arrivals() -> None:
    assert arrival_times(4.0, 3, burstiness=math.inf, seed=0).tolist() == [0.25, 0.5, 0.75]
    assert arrival_times(math.inf, 3, seed=0).tolist() == [0, 0, 0]


def test_arrivals_follow_their_seed() -> None:
    one = arrival_times(2.0, 100, seed=7)
    assert np.array_equal(one, arrival_times(2.0, 100, seed=7))
    assert not np.array_equal(one, arrival_times(2.0, 100, seed=8))
    # Another rate is the same process on another clock.
    assert np.allclose(one / 2, arrival_times(4.0, 100, seed=7))
    assert (np.diff(one) > 0).all()


@pytest.mark.parametrize(
    "bad", [{"rate_per_s": 0.0}, {"rate_per_s": -1.0}, {"rate_per_s": math.nan}, {"count": 0}, {"burstiness": 0.0}]
)
def test_arrivals_that_cannot_be(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        arrival_times(**{"rate_per_s": 1.0, "count": 5, "seed": 0, **bad})


def test_a_rate_that_never_ends() -> None:
    with pytest.raises(UsageError, match="for ever"):
        arrival_times(1e-320, 5, seed=0)
