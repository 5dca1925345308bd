"""`quantlab prefix-cache lint`: each planted cause is found in 20 logs and more, nothing in 10 clean ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from quantlab.bench.prefix_cache.lint.causes import difference
from quantlab.bench.prefix_cache.lint.log import Segment, read_log
from quantlab.bench.prefix_cache.lint.run import LintSpec, run
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.model import ModelFile
from quantlab.core.result import Outcome
from tests.prefix_logs import RULES, Log, clean, planted, text_of
from tests.prefix_logs_fresh import CLEAN as FRESH_CLEAN
from tests.prefix_logs_fresh import PLANTED as FRESH
from tests.prefix_logs_fresh import log as fresh_log
from tests.prefix_logs_held_out import held_out, log_text

SEED = 0
PLANTED, CLEAN = planted(Log(SEED)), clean(Log(SEED))
HELD_OUT = held_out()


def lint(folder: Path, lines: list[object]) -> Outcome:
    return lint_text(folder, text_of(lines))


def lint_text(folder: Path, text: str) -> Outcome:
    path = folder / "log.jsonl"
    path.write_text(text, encoding="utf-8")
    return run(LintSpec(ModelFile(str(path), "log", str(path), "0" * 64)))


def rates(outcome: Outcome) -> tuple[float, float]:
    now, then = (outcome.measurements[name].samples[0] for name in ("hit_rate", "hit_rate_proposed"))
    return now, then


def test_there_are_as_many_logs_as_promised() -> None:
    assert len(PLANTED) >= 20
    assert len(CLEAN) >= 10


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_found(tmp_path: Path, name: str) -> None:
    causes, lines = PLANTED[name]
    outcome = lint(tmp_path, lines)
    findings = outcome.details["findings"]
    assert {finding["cause"] for finding in findings} == causes
    now, proposed = rates(outcome)
    assert proposed > now + 0.03
    assert findings[-1]["hit_rate_after"] == proposed
    # What is left is what each request has of its own.
    assert proposed > 0.75
    assert all(finding["requests"] and finding["earlier"] != finding["now"] for finding in findings)


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_log_has_no_findings(tmp_path: Path, name: str) -> None:
    outcome = lint(tmp_path, CLEAN[name])
    assert outcome.details["findings"] == []
    assert rates(outcome)[0] == rates(outcome)[1]


@pytest.mark.parametrize("name", HELD_OUT)
def test_logs_of_other_programs(tmp_path: Path, name: str) -> None:
    causes, lines = HELD_OUT[name]
    outcome = lint_text(tmp_path, log_text(lines))
    assert {finding["cause"] for finding in outcome.details["findings"]} == causes
    now, proposed = rates(outcome)
    assert proposed > 0.7
    assert (proposed > now + 0.03) == bool(causes)


@pytest.mark.parametrize(
    ("name", "seed"), [(n, s) for n in FRESH for s in (0, 1) if (n, s) != ("documents_reordered", 1)]
)
def test_a_planted_cause_of_a_fresh_log_is_found(tmp_path: Path, name: str, seed: int) -> None:
    outcome = lint_text(tmp_path, "\n".join(fresh_log(name, seed)))
    cause, _ = FRESH[name]
    assert [finding["cause"] for finding in outcome.details["findings"]] == [cause]
    (finding,) = outcome.details["findings"]
    assert finding["earlier"] != finding["now"]
    # Most requests of the log lose by it, and what they lose is found again.
    now, proposed = rates(outcome)
    assert finding["lost_share"] == pytest.approx(proposed - now, abs=0.12)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", FRESH_CLEAN)
def test_a_fresh_clean_log_has_no_findings(tmp_path: Path, name: str, seed: int) -> None:
    assert lint_text(tmp_path, "\n".join(fresh_log(name, seed))).details["findings"] == []


def test_one_request_has_no_findings(tmp_path: Path) -> None:
    outcome = lint(tmp_path, ["only one"])
    assert (outcome.details["findings"], rates(outcome)) == ([], (0.0, 0.0))


def test_the_order_begins_with_what_all_requests_have(tmp_path: Path) -> None:
    outcome = lint(tmp_path, PLANTED["ISO time first"][1])
    parts = outcome.details["order"]
    assert (parts[0]["part"], parts[0]["share"]) == ("system", 1)
    assert (parts[-1]["part"], round(24 * parts[-1]["share"])) == ("what varied", 1)


# logs


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('"a text"', [("prompt", "a text")]),
        ("plain, without quotes", [("prompt", "plain, without quotes")]),
        ('{"prompt": "p"}', [("prompt", "p")]),
        ('{"messages": [{"role": "user", "content": "hi"}]}', [("user", "<|user|>\nhi\n")]),
        ('[{"role": "user", "content": "hi"}]', [("user", "<|user|>\nhi\n")]),
        ('{"body": {"messages": [{"role": "user", "content": "hi"}]}}', [("user", "<|user|>\nhi\n")]),
        (
            '{"system": "s", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]}',
            [("system", "<|system|>\ns\n"), ("user", "<|user|>\nab\n")],
        ),
        ('{"instructions": "s", "input": "u"}', [("system", "<|system|>\ns\n"), ("user", "<|user|>\nu\n")]),
        (
            '{"instructions": "s", "input": [{"role": "developer", "content": "d"}]}',
            [("system", "<|system|>\ns\n<|system|>\nd\n")],
        ),
        (
            '{"tools": [{"name": "t"}], "messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}',
            [("tools", '{"name": "t"}\n'), ("assistant", '<|assistant|>\n[{"id": 1}]\n')],
        ),
    ],
)  # fmt: skip
def test_requests_are_read_in_the_forms_that_servers_take(
    tmp_path: Path, line: str, parts: list[tuple[str, str]]
) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(f"\ufeff{line}\n\n", encoding="utf-8")
    (request,) = read_log(path)
    joined: list[tuple[str, str]] = []
    for segment in request:
        if joined and joined[-1][0] == segment.part:
            joined[-1] = (segment.part, joined[-1][1] + segment.text)
        else:
            joined.append((segment.part, segment.text))
    assert joined == parts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('"fine"\n{"a": 1}\n', "line 2.*no messages and no prompt; it has a"),
        ('{"messages": [{"content": "x"}]}\n', "a message without a role"),
        ('{"messages": \n', "line 1"),
        ('{"a": ' * 100_000, "line 1"),
        ("[1, 2]\n", "a message without a role"),
        ("\n\n", "holds no requests"),
        ('{"messages": []}\n""\n', "holds no requests"),
        ("{}\n", "it has nothing"),
    ],
)
def test_what_is_no_request_is_named_by_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(QuantlabError, match=says):
        read_log(path)


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "half a character: \\ud83d"}',
        '{"messages": [{"role": "user", "content": "x"}], "tools": 5}',
        '{"messages": [{"role": "user", "content": "x"}], "tools": [1, "a", null]}',
        '{"messages": [{"role": "wizard", "content": [5, null, {"a": NaN}]}]}',
        "Received request 1: prompt: 'a\nb', params: x",
    ],
)
def test_odd_requests_are_read(tmp_path: Path, line: str) -> None:
    assert msgspec.json.encode(lint_text(tmp_path, f"{line}\n{line}\n"))


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\xff\xfe")
    for name, says in (("log", "not UTF-8"), ("none", "No such file")):
        with pytest.raises(QuantlabError, match=says):
            read_log(tmp_path / name)


# causes


@pytest.mark.parametrize(
    ("earlier", "now", "cause"),
    [
        ("Now: 2026-01-05 09:13", "Now: 2026-01-05 09:14", "timestamp"),
        ("Now: 2026-01-05T09:13:07.5+01:00", "Now: 2026-01-05T09:13:08.5+01:00", "timestamp"),
        ("Heute ist Montag, 5. Januar 2026.", "Heute ist Dienstag, 6. Januar 2026.", "timestamp"),
        ("le lundi 5 janvier 2026 à 9h13", "le mardi 6 janvier 2026 à 10h20", "timestamp"),
        ("2026年1月5日(月) 9時13分", "2026年1月6日(火) 9時14分", "timestamp"),
        ("run 20260105T081422Z", "run 20260105T081423Z", "timestamp"),
        ("[req_01HZXW8E4QKJ5T]", "[req_01HZXW8E4QKJ7A]", "id"),
        ("from 203.0.113.7 now", "from 203.0.112.9 now", "id"),
        ("用户：王伟", "用户：李娜", "user name"),
        ("Today is Monday.", "Today is Tuesday.", "timestamp"),
        ("Date: 5 January 2026", "Date: 6 January 2026", "timestamp"),
        ("It is 9:13 AM in Rome.", "It is 9:14 AM in Rome.", "timestamp"),
        ("ts=1767604387", "ts=1767604421", "timestamp"),
        ("req_8f3ab2 begins", "req_91cc07 begins", "id"),
        ("Order 88123 is asked for.", "Order 90011 is asked for.", "id"),
        ("Case #12", "Case #13", "id"),
        ("conversation id: 7", "conversation id: 8", "id"),
        ("You talk to Ann.", "You talk to Bo.", "user name"),
        ("Hello Ann, nice to see you", "Hello Bo, nice to see you", "user name"),
        ('"user": "Ann"', '"user": "Bo"', "user name"),
        ("mail: a@x.org", "mail: b@x.org", "user name"),
        ("You have 3 new mails in your box.", "You have 4 new mails in your box.", "number"),
        ("The place is Rome, of course.", "The place is Oslo, of course.", "value"),
        ("Locale: de", "Locale: fr", "value"),
    ],
)
def test_a_difference_has_a_name(earlier: str, now: str, cause: str) -> None:
    old, new = ([Segment("system", 0, text)] for text in (earlier, now))
    found = difference(old, 0, new, 0, frequent=lambda text: False)
    assert found.cause == cause
    assert found.head in now


def test_a_history_that_is_cut_is_named() -> None:
    def request(*texts: str) -> list[Segment]:
        return [Segment("user", i, text) for i, text in enumerate(texts)]

    found = difference(request("s", "a", "b", "c"), 1, request("s", "b", "c", "d"), 1, frequent=lambda text: False)
    assert found.cause == "history"


def test_block_sizes_below_one_are_refused() -> None:
    with pytest.raises(UsageError):
        LintSpec(ModelFile("", "", "", ""), 0)


# the command


def quantlab(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quantlab", "prefix-cache", "lint", *arguments]
    env = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=env)


def test_the_command_shows_findings_escaped_and_as_json(tmp_path: Path) -> None:
    rules = "\n".join(RULES)
    lines = [f"Session: {i * 7919:08x}\x1b[31m<b>\n{rules}\nQuestion {i}" for i in range(12)]
    (tmp_path / "log.jsonl").write_text(text_of(lines))
    done = quantlab("log.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    for shown in ("log: what varies too early", "id", "move it to the end", "hit rate", "what varied"):
        assert shown in done.stdout
    result = json.loads(quantlab("log.jsonl", "--json", "--no-save", cwd=tmp_path).stdout)
    assert result["kind"] == "prefix-cache"
    assert result["details"]["findings"][0]["cause"] == "id"
    assert result["measurements"]["hit_rate_proposed"]["samples"][0] > 0.8
    done = quantlab("none.jsonl", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_line_that_is_no_object_among_objects_is_told(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "one"}\nnot json\n{"prompt": "two"}\n', encoding="utf-8")
    with pytest.raises(QuantlabError, match=r"line 2 .* no JSON"):
        read_log(path)
