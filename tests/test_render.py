"""Every format of the comparison: golden files, and labels that try to break out of each format.

After a wanted change: QUANTLAB_UPDATE_GOLDEN=1 pytest tests/test_render.py, then read the difference.
"""

from __future__ import annotations

import csv
import html.parser
import io
import json
import os
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from quantlab.cli.tables import render_terminal
from quantlab.core.result import Notice
from quantlab.report.comparison import Comparison, compare
from quantlab.report.render import FORMATS
from quantlab.report.table import Entry, Head, Table, tabulate
from tests.comparison_cases import F16, Q4, bench, lab, ppl

GOLDEN = Path(__file__).parent / "golden"
UPDATE = "QUANTLAB_UPDATE_GOLDEN"
HOSTILE = [
    "<script>alert(1)</script>",
    "a|b\n| c | d |",
    "[click](javascript:alert(1)) ![x](http://tracker.invalid/x.png)",
    "`code` ``` **bold** _it_ ~~no~~ # head",
    "\x1b]0;title\x07\x1b[2J\x1b[31mred\x9b0m",
    "[bold red]markup[/] [link=http://x.invalid]y[/link]",
    "=HYPERLINK(\"http://x.invalid\")",
    "+1+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(A1:A9)",
    "  =1+1",
    "\u202egnirts\u2066",
    "\ud800 half a character",
    "'; DROP TABLE rows; --",
    "</td></table><img src=x onerror=alert(1)>",
    "$title ${rows} %s {0}",
    "x" * 300,
    "",
]  # fmt: skip


def terminal(comparison: Comparison, width: int = 120, *, colour: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colour, color_system="standard" if colour else None)
    render_terminal(tabulate(comparison), console)
    return out.getvalue()


def rendered(name: str) -> str:
    comparison = compare(lab())
    if name.endswith(".txt"):
        return terminal(comparison, int(name.removesuffix(".txt").rpartition("-")[2]))
    return FORMATS[name.partition(".")[2]](comparison)


@pytest.mark.parametrize(
    "name", ["table-200.txt", "table-120.txt", "table-80.txt", "table.md", "table.csv", "table.json", "table.html"]
)
def test_golden(name):
    text, file = rendered(name), GOLDEN / name
    if name.endswith(("csv", "json")):
        # The last digits are the mathematical library's.
        text = re.sub(r"\b\d+\.\d{9,}\b", lambda number: f"{float(number[0]):.9g}", text)
    if os.environ.get(UPDATE):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"set {UPDATE}=1 to accept this"


# Terminal


def test_the_terminal_table_fits_and_loses_nothing():
    comparison = compare(lab())
    entries = [e for row in tabulate(comparison).rows for e in row]
    for width in (40, 60, 80, 100, 140, 220):
        text = terminal(comparison, width)
        assert max(map(len, text.splitlines())) <= width
        lines = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
        words = {word for line in lines for word in line}
        assert all(e.text in words or str(e) in words for e in entries if e.text)
        assert all(e.change in words or str(e) in words for e in entries if e.change)


def test_a_wide_terminal_has_one_block_and_a_narrow_one_repeats_the_names():
    def heads(width: int) -> int:
        return sum(line.startswith("model ") for line in terminal(compare(lab()), width).splitlines())

    assert heads(300) == 1
    assert "(-61%)" in terminal(compare(lab()), 300)
    assert heads(60) > 2


def test_good_and_bad_changes_have_colours():
    text = terminal(compare(lab()), colour=True)
    assert "\x1b[32m-28%" in text
    assert "\x1b[31m+4.6%" in text


# Numbers for machines


def test_json_holds_raw_numbers_ratios_and_codes():
    document = json.loads(FORMATS["json"](compare(lab())))
    assert document["baseline"] == "f16"
    assert [row["label"] for row in document["rows"]] == ["f16", "Q8_0", "Q4_K_M"]
    q4 = document["rows"][2]
    assert (q4["prompt_tokens"], q4["new_tokens"], q4["batch"]) == (128, 64, 1)
    assert q4["sha256"] == "4" * 64
    tpot = q4["metrics"]["tpot"]
    assert tpot["verdict"] == "better"
    assert tpot["paired"] is True
    assert tpot["ratio"]["low"] < tpot["ratio"]["estimate"] < tpot["ratio"]["high"] < 1
    assert tpot["value"] * 1000 == pytest.approx(15.37, abs=0.005)
    assert tpot["text"].startswith("TPOT 1.38x faster, 95% CI ")
    assert q4["metrics"]["ppl"]["setting"] == {
        "protocol": "llama.cpp",
        "n_ctx": 512,
        "stride": 512,
        "windows": 8,
        "text": "173c87a5",
        "scored_tokens": 2040,
        "bos": "none: the model's tokenizer adds none",
        "text_hash": "173c87a53759e0201f33e0ccf978e510",
        "token_hash": "aaaa",
    }
    assert document["rows"][0]["metrics"]["tpot"]["verdict"] == "baseline"
    assert document["notes"][-1].startswith("Perplexity is not downstream quality")


def test_json_of_what_is_no_number_is_still_json():
    broken = msgspec.structs.replace(F16, bits_per_weight=float("nan"))
    document = json.loads(FORMATS["json"](compare([ppl("f16", broken, [3.0, 3.1])])), parse_constant=pytest.fail)
    assert document["rows"][0]["metrics"]["bits_per_weight"]["value"] is None


def test_csv_numbers_are_those_of_json():
    comparison = compare(lab())
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](comparison))))
    document = json.loads(FORMATS["json"](comparison))
    assert [row["label"] for row in rows] == ["f16", "Q8_0", "Q4_K_M"]
    for row, expected in zip(rows, document["rows"], strict=True):
        for name, metric in expected["metrics"].items():
            assert float(row[name]) == metric["value"]
            ratio = metric["ratio"] or {}
            assert row[f"{name}_ratio"] == repr(ratio["estimate"]) if ratio else not row.get(f"{name}_ratio")
            assert row.get(f"{name}_ratio_low", "") == ("" if ratio.get("low") is None else repr(ratio["low"]))


def test_two_settings_are_two_columns_in_every_format():
    other = ppl("Q4", Q4, [3.0, 3.1], details={"protocol": "hf"})
    comparison = compare([ppl("f16", F16, [3.0, 3.1]), other])
    names = {"ppl (protocol llama.cpp)", "ppl (protocol hf)"}
    assert names <= set(csv.DictReader(io.StringIO(FORMATS["csv"](comparison))).fieldnames)
    assert names == {
        name for r in json.loads(FORMATS["json"](comparison))["rows"] for name in r["metrics"] if "ppl" in name
    }


# Hostile labels


def hostile(label: str) -> Comparison:
    """`label` everywhere where text comes from outside."""
    notice = Notice("code", label, label)
    types = {label: Q4.tensor_types["Q5_0"]}
    model = msgspec.structs.replace(Q4, method=label, note=label or "none", tensor_types=types)
    return compare(
        [
            bench("f16", F16, [1.0, 1.1]),
            bench(label, model, [1.5, 1.6], warnings=[notice], details={"session": label}),
            ppl("f16", F16, [3.0, 3.1]),
            ppl(label, model, [3.0, 3.1], details={"protocol": label, "text_hash": label, "data_label": label}),
            msgspec.structs.replace(bench("f16", F16, [1.0]), label=f"failed {label}", status="failed"),
        ]
    )


class Page(html.parser.HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.texts: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.texts.append(data)


def page(text: str) -> Page:
    read = Page()
    read.feed(text)
    read.close()
    return read


@pytest.mark.parametrize("label", HOSTILE)
def test_hostile_labels_stay_text_in_html(label):
    text = FORMATS["html"](hostile(label))
    read, plain = page(text), page(FORMATS["html"](hostile("plain")))
    assert set(read.tags) <= set(plain.tags)
    assert read.attributes == plain.attributes
    assert [read.tags.count(tag) for tag in ("tr", "th", "td", "li")] == [
        plain.tags.count(tag) for tag in ("tr", "th", "td", "li")
    ]
    assert "script" not in read.tags
    assert shown(label) in "".join(read.texts)


@pytest.mark.parametrize("label", HOSTILE)
def test_hostile_labels_stay_in_their_markdown_cell(label):
    text = FORMATS["md"](hostile(label))
    lines = text.splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert len(rows) == 4
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    # Outside of code spans nothing is left that Markdown or HTML would read.
    for line in lines[len(rows) :]:
        prose = re.sub(r"(?<![\\`])`[^`]+`(?!`)", "", line.removeprefix("- ")).replace("**", "")
        assert not re.search(r"(?<!\\)[`*\[\]<>|!~#]", prose), line
    for row in rows:
        assert not re.search(r"(?<!\\)[`*\[\]<>!~#]", row)


@pytest.mark.parametrize("label", HOSTILE)
def test_hostile_labels_are_no_formulas_in_csv(label):
    rows = list(csv.reader(io.StringIO(FORMATS["csv"](hostile(label)))))
    assert len({len(row) for row in rows}) == 1
    assert len(rows) == 3
    for cell in (cell for row in rows for cell in row):
        assert not cell.lstrip().startswith(("=", "+", "-", "@")) or re.fullmatch(r"[+-]?[\d.e+-]+", cell)
    assert rows[2][0] in (shown(label), f"'{shown(label)}")


@pytest.mark.parametrize("label", HOSTILE)
def test_hostile_labels_are_data_in_json(label):
    document = json.loads(FORMATS["json"](hostile(label)))
    assert [row["label"] for row in document["rows"]] == ["f16", shown(label)]


@pytest.mark.parametrize("label", HOSTILE)
@pytest.mark.parametrize("width", [40, 120, 300])
def test_hostile_labels_neither_drive_nor_break_the_terminal(label, width):
    text = terminal(hostile(label), width)
    assert all(line.isprintable() for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= width
    letters = re.sub(r"\s", "", shown(label))
    assert letters in re.sub(r"\s", "", text) or width < 300 or len(label) > 100


def shown(label: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in label)


def test_markup_is_not_obeyed_on_the_terminal():
    text = terminal(hostile("[bold red]markup[/]"), colour=True)
    assert "[bold red]markup[/]" in text
    # A link would be an operating system command (OSC 8).
    assert "\x1b]" not in terminal(hostile("[link=http://x.invalid]y[/link]"), colour=True)


def test_numbers_stay_numbers_in_csv():
    for label in ("-5", "+1.5e-3", "42"):
        assert list(csv.reader(io.StringIO(FORMATS["csv"](hostile(label)))))[2][0] == label


@given(st.text(max_size=40))
def test_any_label_renders_in_every_format(label):
    comparison = hostile(label)
    for render in FORMATS.values():
        assert render(comparison).encode()
    assert terminal(comparison, 60)


def test_a_table_of_others_renders_too():
    table = Table("plain", [Head("name", "left"), Head("bytes")], [[Entry("a"), Entry("1 MB")], [Entry("b"), Entry()]])
    out = io.StringIO()
    render_terminal(table, Console(file=out, width=40, color_system=None))
    assert [line.split() for line in out.getvalue().splitlines() if line.strip()][-2:] == [["a", "1", "MB"], ["b"]]
