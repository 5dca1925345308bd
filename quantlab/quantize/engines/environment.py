"""The interpreter of an engine: this one where its tested versions are installed, else an environment of its own.

Whether they are is read from the packages' metadata; no engine is imported here. An environment is built where it
stays, since its scripts hold its path, and gets its mark last: what a killed or failed build left has none, is never
used, and is cleared by the next one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from quantlab.core.errors import QuantlabError, UsageError, install_hint
from quantlab.core.files import cache_folder, locked, os_error, write_text
from quantlab.core.progress import Progress, silent
from quantlab.quantize.engines import Engine
from quantlab.runtime.process import Process
from quantlab.runtime.worker import Channel, run_in_child

# What quantlab's own modules import in an engine's process; the engines' requirements hold safetensors and tokenizers.
_OURS = ("msgspec", "numpy", "psutil")
_MARK = "quantlab-engine.json"
_CHECK = "quantlab.quantize.engines.environment:work"
# What pip says when it tries again to connect.
_BROKEN = "after connection broken by "


class State(msgspec.Struct, frozen=True):
    """Where an engine runs, or why it does not and what to do. `python` is None where it does not run."""

    where: Literal["here", "own environment", "missing", "broken"]
    python: str | None = None
    reason: str = ""
    hint: str = ""


def interpreter(engine: Engine) -> Path:
    """The Python that has the engine in its tested versions; raises QuantlabError where none has."""
    found = state(engine)
    if found.python is None:
        raise QuantlabError(f"the engine `{engine.name}` is {found.where}: {found.reason}", found.hint)
    return Path(found.python)


def state(engine: Engine) -> State:
    """Where an engine runs, from metadata alone."""
    here = _differs(engine, sys.path)
    if not here:
        return State("here", sys.executable)
    folder = _folder(engine)
    if not folder.exists():
        extra = "" if engine.alone else f"; or {install_hint('engines')}"
        return State("missing", None, f"in this environment {here}", f"`quantlab engines add {engine.name}`{extra}")
    if fault := _fault(engine, folder):
        return State("broken", None, f"in `{folder}` {fault}", f"`quantlab engines add {engine.name}` builds it again")
    return State("own environment", str(_python(folder)))


def add(engine: Engine, *, offline: bool = False, force: bool = False, progress: Progress = silent) -> Path:
    """Build the engine's own environment with pip, as the user configured it; its Python.

    None is built where this environment has the tested versions: it would not be used. One that is whole is kept,
    unless `force`, and then too where the new one fails; another one is cleared first. Raises QuantlabError where a
    package cannot be had or does not work.
    """
    if offline:
        raise UsageError(f"`engines add {engine.name}` downloads packages", "leave out `--offline`")
    if not _differs(engine, sys.path):
        return Path(sys.executable)
    folder = _folder(engine)
    before = folder.with_name(f"{folder.name}.before")
    with locked(folder.parent / f"{engine.name}.lock"):
        try:
            # Of a build that was killed.
            _give_back(folder, before)
            if not _fault(engine, folder):
                if not force:
                    return _python(folder)
                folder.rename(before)
            _clear(folder)
            _build(engine, folder, progress)
        except OSError as error:
            raise os_error(error, folder) from error
        finally:
            _give_back(folder, before)
    return _python(folder)


def _give_back(folder: Path, before: Path) -> None:
    """Leave a whole environment in `folder`, that from `before` if there is no new one, or nothing."""
    if not (folder / _MARK).exists():
        shutil.rmtree(folder, ignore_errors=True)
        if before.exists():
            before.rename(folder)
    _clear(before)


def _clear(folder: Path) -> None:
    # A mark that outlives its packages would call the rest of an environment whole.
    (folder / _MARK).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _folder(engine: Engine) -> Path:
    return cache_folder().absolute() / "engines" / engine.name


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _fault(engine: Engine, folder: Path) -> str:
    """Why the environment in `folder` is not to be used, or an empty text."""
    if not (folder / _MARK).is_file():
        return "it is half installed"
    # The link of an environment whose Python was removed leads nowhere.
    if not os.access(_python(folder), os.X_OK):
        return "its Python is gone"
    return _differs(engine, [str(path) for path in folder.glob("lib/python*/site-packages")])


def _differs(engine: Engine, path: Sequence[str]) -> str:
    """The pins that do not hold among the packages in `path`, in words; empty where all hold."""
    said = []
    for name, version in engine.pins.items():
        found = next(iter(importlib.metadata.distributions(name=name, path=list(path))), None)
        if found is None:
            said.append(f"{name} is not installed")
        # A build's local label (2.13.0+cpu) is not a part of the version that was tested.
        elif found.version.partition("+")[0] != version:
            said.append(f"{name} is {found.version}, tested is {version}")
    return ", ".join(said)


def _build(engine: Engine, folder: Path, progress: Progress) -> None:
    pip = [str(_python(folder)), "-I", "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    # How long each takes is known to nobody: pip tells no total.
    progress(f"creating the environment of {engine.name}", 0, 0)
    _run(engine, _venv_command(folder))
    progress(f"installing the environment of {engine.name}", 0, 0)
    _run(engine, [*pip, *engine.requirements, *_OURS])
    progress(f"checking the environment of {engine.name}", 0, 0)
    if differs := _differs(engine, [str(path) for path in folder.glob("lib/python*/site-packages")]):
        raise QuantlabError(f"pip did not install the tested versions of `{engine.name}`: {differs}", "file a bug")
    run_in_child(_CHECK, [engine.call, engine.package], python=_python(folder))
    write_text(folder / _MARK, msgspec.json.encode(engine.pins).decode())


def _venv_command(folder: Path) -> list[str]:
    return [sys.executable, "-I", "-m", "venv", str(folder)]


def _run(engine: Engine, command: list[str]) -> None:
    with tempfile.TemporaryFile() as log:
        with Process(command, stdout=log, stderr=log) as process:
            code = process.wait()
        log.seek(0)
        said = log.read().decode("utf-8", "replace").strip().splitlines()
    if not code:
        return
    what = f"`{engine.name}` cannot be installed"
    # pip itself ends with the words of an index that has no such package.
    if broken := [line.partition(_BROKEN)[2] for line in said if _BROKEN in line]:
        # Without the addresses of Python's objects.
        reason = re.sub(r"<[^>]*>: ", "", broken[-1])
        raise QuantlabError(
            f"{what}: the package index that pip uses does not answer: {reason}",
            "check the network, then run again",
        )
    errors = [line for line in said if line.startswith("ERROR")] or said or [f"it ended with code {code}"]
    hint = "check the package index that pip uses and the room on the disk, then run again"
    raise QuantlabError(f"{what}: {errors[-1]}", hint)


def work(modules: list[str], channel: Channel) -> None:
    """The child, in the new environment: whether our module and the engine's own package import there."""
    ours, package = modules
    # Ours first: it sets the variables that some engines read at import.
    importlib.import_module(ours.partition(":")[0])
    try:
        importlib.import_module(package)
    except Exception as error:
        raise QuantlabError(f"`{package}` does not load in its new environment: {error}", "file a bug") from error
