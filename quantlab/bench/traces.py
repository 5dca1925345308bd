"""Recorded traffic: when requests came, how long they were, and which prefixes they shared.

Two formats, told apart by their content:

- Azure LLM inference (github.com/Azure/AzurePublicDataset): CSV with TIMESTAMP, ContextTokens, GeneratedTokens
- Mooncake (github.com/kvcache-ai/Mooncake): JSON lines with timestamp in ms, input_length, output_length and
  hash_ids, one for each 512 prompt tokens; equal ids are equal prefixes

A file is read row by row: the memory needed does not grow with it. A row that cannot be true ends the reading with its
line. The texts are not in the traces.
"""

from __future__ import annotations

import csv
import datetime
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.files import os_error

MOONCAKE_BLOCK_TOKENS = 512
_MOST_TOKENS = 2**31 - 1
_LATEST_MS = 1e15
_LINE_BYTES = 1 << 24
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_NS = 10**9


class TraceRow(msgspec.Struct, frozen=True):
    """One request: seconds after the first row's arrival, its lengths, and ids of its prompt's blocks."""

    arrival_s: float
    prompt_tokens: int
    new_tokens: int
    hash_ids: tuple[int, ...] | None = None


class TraceShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is made of a trace. `rate_scale` 2 sends it twice as fast; `length_scale` multiplies both lengths.

    Scaled lengths are rounded, at least 1, and then cut to `max_prompt_tokens` and `max_new_tokens`; the ids of blocks
    that a cut leaves out go too. A scaled block stands for 512 * length_scale tokens. `limit` takes the first rows.
    """

    rate_scale: float = 1.0
    length_scale: float = 1.0
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    limit: int | None = None

    def check(self) -> None:
        """Raise UsageError for a scale or limit that leaves nothing."""
        for name in ("rate_scale", "length_scale"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"`{name}` {value}", "give a number above zero")
        for name in ("max_prompt_tokens", "max_new_tokens", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"`{name}` {value}", "give a whole number above zero")


class TraceSummary(msgspec.Struct, frozen=True):
    """Sums of a trace; `rate_per_s` is the gaps over the duration, None where all rows arrive at one time."""

    rows: int
    prompt_tokens: int
    new_tokens: int
    duration_s: float
    rate_per_s: float | None


class _Row(msgspec.Struct):
    """A row as it is recorded, with a time that only differences are taken of."""

    time_ns: int
    prompt_tokens: int
    new_tokens: int
    hash_ids: tuple[int, ...] | None = None


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None


_MOONCAKE = msgspec.json.Decoder(_Mooncake)
Parse = Callable[[bytes], _Row]


def read_trace(path: Path, shape: TraceShape | None = None) -> Iterator[TraceRow]:
    """The rows of a trace in its order, which is that of arrival; raises QuantlabError that names the bad line."""
    shape = shape or TraceShape()
    shape.check()
    try:
        with path.open("rb") as file:
            yield from itertools.islice(_shaped(_recorded(path, file), shape), shape.limit)
    except OSError as error:
        raise os_error(error, path) from error


def summarize(rows: Iterable[TraceRow]) -> TraceSummary:
    """Sums over rows of `read_trace`."""
    count = prompt_tokens = new_tokens = 0
    first = last = 0.0
    for row in rows:
        last = row.arrival_s
        first = last if count == 0 else first
        count += 1
        prompt_tokens += row.prompt_tokens
        new_tokens += row.new_tokens
    duration = last - first
    return TraceSummary(count, prompt_tokens, new_tokens, duration, (count - 1) / duration if duration > 0 else None)


def _shaped(rows: Iterator[_Row], shape: TraceShape) -> Iterator[TraceRow]:
    first_ns: int | None = None
    for row in rows:
        first_ns = row.time_ns if first_ns is None else first_ns
        arrival = (row.time_ns - first_ns) / _NS / shape.rate_scale
        if math.isinf(arrival):
            raise UsageError(
                f"a `rate_scale` of {shape.rate_scale} puts an arrival beyond all time", "give a larger one"
            )
        prompt = _length(row.prompt_tokens, shape.length_scale, shape.max_prompt_tokens)
        yield TraceRow(
            arrival,
            prompt,
            _length(row.new_tokens, shape.length_scale, shape.max_new_tokens),
            _blocks(row.hash_ids, prompt, shape),
        )


def _length(tokens: int, scale: float, most: int | None) -> int:
    scaled = max(1.0, tokens * scale)
    if most is not None:
        scaled = min(scaled, most)
    if scaled > _MOST_TOKENS:
        raise UsageError(f"a `length_scale` of {scale} makes {scaled:g} tokens of {tokens}", "give a smaller one")
    return round(scaled)


def _blocks(hash_ids: tuple[int, ...] | None, prompt_tokens: int, shape: TraceShape) -> tuple[int, ...] | None:
    if hash_ids is None or prompt_tokens != shape.max_prompt_tokens:
        return hash_ids
    return hash_ids[: math.ceil(prompt_tokens / (MOONCAKE_BLOCK_TOKENS * shape.length_scale))]


def _recorded(path: Path, file: BinaryIO) -> Iterator[_Row]:
    """The rows in order; every error of a row gets its line here."""
    lines = _lines(path, file)
    head = next(lines, None)
    if head is None:
        raise QuantlabError(f"the trace `{path}` is empty", "check the file")
    parse, rows = _format(path, head[1]), itertools.chain([head], lines)
    if parse is not _mooncake:
        next(rows)
    last: tuple[int, int] | None = None
    for number, line in rows:
        try:
            row = parse(line)
            _check(row)
        except (ValueError, csv.Error, msgspec.DecodeError) as error:
            raise QuantlabError(f"line {number} of `{path}`: {error}", "correct or remove the row") from error
        if last is not None and row.time_ns < last[1]:
            raise QuantlabError(
                f"line {number} of `{path}` is {(last[1] - row.time_ns) / _NS:g} s earlier than line {last[0]}",
                "sort the rows by their time stamp",
            )
        last = number, row.time_ns
        yield row
    if last is None:
        raise QuantlabError(f"the trace `{path}` has a header and no rows", "check the file")


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that hold something, with their numbers; a byte order mark is dropped."""
    for number in itertools.count(1):
        line = file.readline(_LINE_BYTES)
        if len(line) == _LINE_BYTES:
            raise QuantlabError(f"line {number} of `{path}` is longer than {_LINE_BYTES} bytes", "check the file")
        if not line:
            return
        text = line.removeprefix(b"\xef\xbb\xbf").strip()
        if text:
            yield number, text


def _format(path: Path, head: bytes) -> Parse:
    if head.startswith(b"{"):
        return _mooncake
    columns = [name.strip() for name in head.decode("utf-8", "replace").split(",")]
    if set(_AZURE_COLUMNS) <= set(columns):
        places = [columns.index(name) for name in _AZURE_COLUMNS]
        return lambda line: _azure(line, len(columns), places)
    raise QuantlabError(
        f"`{path}` is no trace in a known format: it begins with `{head[:60].decode('utf-8', 'replace')}`",
        f"known: CSV with the header {','.join(_AZURE_COLUMNS)} (Azure), and JSON lines with timestamp, input_length, "
        "output_length (Mooncake)",
    )


def _azure(line: bytes, width: int, places: list[int]) -> _Row:
    cells = next(csv.reader([line.decode()]))
    if len(cells) != width:
        raise ValueError(f"{len(cells)} columns, the header has {width}")
    time, prompt, new = (cells[place].strip() for place in places)
    return _Row(_azure_ns(time), _whole("ContextTokens", prompt), _whole("GeneratedTokens", new))


def _azure_ns(text: str) -> int:
    """Nanoseconds of a time stamp: its 7 digits are more than datetime keeps. Without a zone it is UTC."""
    match = _AZURE_TIME.fullmatch(text)
    if not match:
        raise ValueError(f"TIMESTAMP `{text[:40]}` is not of the form 2023-11-16 18:15:46.6805900")
    day, time, fraction, zone = match.groups()
    moment = datetime.datetime.fromisoformat(f"{day}T{time}{zone or '+00:00'}")
    return int(moment.timestamp()) * _NS + int((fraction or "0").ljust(9, "0"))


def _whole(name: str, text: str) -> int:
    if not re.fullmatch(r"[+-]?\d{1,20}", text, re.ASCII):
        raise ValueError(f"{name} `{text[:40]}` is no whole number")
    return int(text)


def _mooncake(line: bytes) -> _Row:
    row = _MOONCAKE.decode(line)
    if row.timestamp < 0:
        raise ValueError(f"the timestamp {row.timestamp:g} is negative")
    if row.timestamp > _LATEST_MS:
        raise ValueError(f"the timestamp {row.timestamp:g} ms is beyond any recording")
    if row.hash_ids is not None and len(row.hash_ids) != -(-row.input_length // MOONCAKE_BLOCK_TOKENS):
        raise ValueError(
            f"{len(row.hash_ids)} hash_ids for {row.input_length} tokens, one is for {MOONCAKE_BLOCK_TOKENS} tokens"
        )
    hash_ids = None if row.hash_ids is None else tuple(row.hash_ids)
    return _Row(round(row.timestamp * 1e6), row.input_length, row.output_length, hash_ids)


def _check(row: _Row) -> None:
    for name, tokens in (("a prompt", row.prompt_tokens), ("an output", row.new_tokens)):
        if tokens < 1:
            raise ValueError(f"{name} of {tokens} tokens")
        if tokens > _MOST_TOKENS:
            raise ValueError(f"{name} of {tokens} tokens is beyond any model")
