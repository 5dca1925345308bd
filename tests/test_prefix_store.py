"""Blocks on disk: shared by processes, harmed, refused, left by killed writers; always a miss, never a wrong KV."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.engine.prefix_cache import PrefixCache
from quantlab.runtime.simulated import SimulatedBackend
from tests.full_disk import limited_files
from tests.prefix_cases import BLOB_BYTES, BLOCK, ROOT, backend, check, serve, store_of

PROMPT = list(range(1, 3 * BLOCK + 2))


def cache_on(
    on: SimulatedBackend, folder: Path, *, budget: int = 8, ram: int = 0, disk: int | None = None
) -> PrefixCache:
    return PrefixCache(
        on,
        budget_tokens=budget * BLOCK,
        block_tokens=BLOCK,
        ram_bytes=ram * BLOB_BYTES,
        store=store_of(on, folder, disk),
    )


def filled(folder: Path) -> None:
    on = backend(3)
    cache = cache_on(on, folder)
    serve(cache, on, PROMPT)
    cache.persist()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


def test_a_second_process_reuses_the_blocks_of_the_first(tmp_path: Path) -> None:
    child = (
        "import sys; from pathlib import Path; from tests.test_prefix_store import filled; filled(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", child, str(tmp_path)], check=True, cwd=ROOT)
    on = backend(3)
    cache = cache_on(on, tmp_path)
    assert serve(cache, on, PROMPT) == 3 * BLOCK
    counts = cache.counters()
    assert (counts["hit_disk_tokens"], counts["hit_device_tokens"], counts["store_read"]) == (3 * BLOCK, 0, 3)
    assert serve(cache, on, PROMPT) == 3 * BLOCK
    assert cache.counters()["hit_device_tokens"] == 3 * BLOCK
    check(cache, on)


def test_what_leaves_the_device_and_ram_comes_back_from_disk(tmp_path: Path) -> None:
    on = backend(3)
    cache = cache_on(on, tmp_path, budget=3, ram=2)
    serve(cache, on, PROMPT)
    for other in range(4):
        serve(cache, on, [100 + other] * (3 * BLOCK + 1))
        check(cache, on)
    assert not [block for block in cache._tree.device if block.prefix()[:4] == (1).to_bytes(4, "little")]
    assert serve(cache, on, PROMPT) == 3 * BLOCK
    assert cache.counters()["hit_disk_tokens"] == 3 * BLOCK
    # What came from RAM counts so; the last token of a block that is held to its end is computed.
    assert serve(cache, on, PROMPT[: 2 * BLOCK]) == 2 * BLOCK - 1


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda folder: store_of(backend(1, seed=1), folder), "another model or version"),
        (lambda folder: store_of(backend(1), folder, block_tokens=8), "another size"),
        (lambda folder: (folder / "store.json").write_text("{") and store_of(backend(1), folder), "damaged"),
        (lambda folder: (folder / "store.json").write_text(re.sub('"format":1', '"format":2', (folder / "store.json")
                         .read_text())) and store_of(backend(1), folder), "another model or version"),
    ],
    ids=["model", "block size", "damaged", "format"],
)  # fmt: skip
def test_a_store_of_something_else_is_refused(tmp_path: Path, other: Callable[[Path], object], says: str) -> None:
    filled(tmp_path)
    before = [file.read_bytes() for file in files(tmp_path)]
    with pytest.raises(QuantlabError, match=says):
        other(tmp_path)
    assert [file.read_bytes() for file in files(tmp_path)] == before


def test_sizes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for block_tokens, budget in ((0, None), (16, -1)):
        with pytest.raises(UsageError):
            store_of(backend(1), tmp_path, budget, block_tokens=block_tokens)
    with pytest.raises(UsageError, match="blocks of 4"):
        PrefixCache(backend(2), budget_tokens=64, block_tokens=8, store=store_of(backend(2), tmp_path))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:3] + bytes([data[3] ^ 1]) + data[4:],
        lambda data: data[:60] + bytes([data[60] ^ 1]) + data[61:],
        lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
    ],
    ids=["empty", "head", "cut", "longer", "magic", "tokens", "KV"],
)
def test_a_damaged_block_is_a_miss_and_a_warning(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    filled(tmp_path)
    on = backend(3)
    cache = cache_on(on, tmp_path)
    path = cache._residency.store._path(cache.prompt(PROMPT).key(1))
    path.write_bytes(spoil(path.read_bytes()))
    assert serve(cache, on, PROMPT) == BLOCK
    assert not path.exists()
    assert [notice.code for notice in cache.notices()] == ["damaged-block"]
    cache.persist()
    assert path.exists()


def test_a_block_under_the_name_of_another_is_a_miss(tmp_path: Path) -> None:
    filled(tmp_path)
    first, *others = files(tmp_path)
    for other in others:
        other.write_bytes(first.read_bytes())
    on = backend(3)
    cache = cache_on(on, tmp_path)
    assert serve(cache, on, PROMPT) <= BLOCK
    assert cache.counters()["store_collisions"] >= 1


def test_a_full_disk_is_a_warning(tmp_path: Path) -> None:
    on = backend(3)
    cache = cache_on(on, tmp_path)
    serve(cache, on, PROMPT)
    with limited_files(60):
        cache.persist()
    assert not files(tmp_path)
    assert not list(tmp_path.glob("*/.*.partial"))
    assert cache.counters()["store_failed"] == 3
    (notice,) = cache.notices()
    assert notice.code == "store-failed"
    assert serve(cache, on, PROMPT) == 3 * BLOCK
    cache.persist()
    assert len(files(tmp_path)) == 3


def test_the_oldest_blocks_make_room_and_the_budget_holds(tmp_path: Path) -> None:
    on = backend(3)
    size = BLOB_BYTES + 5 + 32 + 8 + 32 + 4 * BLOCK
    cache = cache_on(on, tmp_path, budget=1, disk=4 * size)
    for word in range(10):
        serve(cache, on, [word] * (BLOCK + 1))
        assert sum(file.stat().st_size for file in files(tmp_path)) <= 4 * size
    # The last word is on the device.
    on = backend(3)
    fresh = cache_on(on, tmp_path)
    held = [serve(fresh, on, [word] * (BLOCK + 1)) for word in range(9)]
    assert held == [0] * 6 + [BLOCK] * 3 or held == [0] * 5 + [BLOCK] * 4


WRITER = """
import sys
from pathlib import Path
import numpy as np
from tests.prefix_cases import BLOCK, backend, serve
from tests.test_prefix_store import cache_on
on = backend(3)
cache = cache_on(on, Path(sys.argv[1]), budget=2, disk=int(sys.argv[3]))
rng = np.random.default_rng(int(sys.argv[2]))
print("ready", flush=True)
n = 0
while n < int(sys.argv[4]):
    n += 1
    serve(cache, on, [int(rng.integers(0, 9))] * BLOCK + [int(rng.integers(0, 9))] * BLOCK + [1])
assert not cache.notices(), cache.notices()
"""


def writer(folder: Path, seed: int, budget: int, n: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), str(seed), str(budget), str(n)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_two_writers_share_a_store_and_its_budget(tmp_path: Path) -> None:
    budget = 40 * 2 * BLOB_BYTES
    writers = [writer(tmp_path, seed, budget, 150) for seed in (1, 2, 3)]
    most = 0
    while any(process.poll() is None for process in writers):
        sizes = []
        for file in files(tmp_path):
            try:
                sizes.append(file.stat().st_size)
            except FileNotFoundError:
                continue
        most = max(most, sum(sizes))
        time.sleep(0.01)
    assert [process.wait() for process in writers] == [0, 0, 0]
    assert 0 < most <= budget


def test_a_killed_writer_leaves_a_store_that_works(tmp_path: Path) -> None:
    budget = 40 * 2 * BLOB_BYTES
    for seed in range(4):
        process = writer(tmp_path, seed, budget, 10**9)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.05 + 0.03 * seed)
        process.send_signal(signal.SIGKILL)
        process.wait()
        on = backend(3)
        cache = cache_on(on, tmp_path, disk=budget)
        for first in range(9):
            for second in range(9):
                serve(cache, on, [first] * BLOCK + [second] * BLOCK + [1])
        assert not cache.notices()
        cache.persist()
        check(cache, on)
        assert sum(file.stat().st_size for file in files(tmp_path)) <= budget


def test_what_a_killed_writer_left_is_removed_in_time(tmp_path: Path) -> None:
    filled(tmp_path)
    old, new = (files(tmp_path)[0].with_name(f".{name}.kv.1.partial") for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"x" * 50)
    os.utime(old, (0, 0))
    (tmp_path / "used_bytes").write_text("damaged")
    on = backend(3)
    cache = cache_on(on, tmp_path, disk=10**6)
    serve(cache, on, [7] * (BLOCK + 1))
    cache.persist()
    assert not old.exists()
    assert new.exists()
    total = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    assert int((tmp_path / "used_bytes").read_text()) == total


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(QuantlabError):
        store_of(backend(1), tmp_path / "file" / "store")
