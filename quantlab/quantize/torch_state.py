"""What an interrupted torch quantization had done, in the folder NAME.partial beside the artifact NAME.

These are the layers that an engine had finished, where it can continue from them, and from any engine the whole model
that it had quantized, of which the check and the name were missing. The parent owns the folder: it says there what
this belongs to, refuses what belongs to something else or is damaged, and removes the folder when the artifact has
its name. The engine's process fills it (quantize/engines/).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from quantlab import __version__
from quantlab.core.errors import QuantlabError
from quantlab.core.files import PARTIAL_SUFFIX, os_error, sha256_file, write_text
from quantlab.quantize.torch_markers import (
    ARTIFACT,
    FINISHED,
    QUANTIZED,
    WHOLE,
    artifact,
    damaged,
    decoded,
    forget,
    is_quantized,
    read,
    read_quantized,
    stale,
)

# Of what is written here, by torch_markers.py and by engines/gptqmodel_state.py.
_FORMAT = 2
_IDENTITY, _LOCK = "identity.json", "lock"
ENGINE_LOCK = "engine.lock"
_WORDS = {
    "model": "another model",
    "calibration": "other calibration",
    "settings": "other settings",
    "engine": "other versions of the engine",
    "quantlab": "another version of quantlab",
    "format": "another version of quantlab",
}


class Identity(msgspec.Struct, frozen=True):
    """What a state belongs to. The number of threads is no part of it: any may continue."""

    model: str
    calibration: dict[str, Any]
    settings: dict[str, Any]
    engine: dict[str, str]
    quantlab: str = __version__
    format: int = _FORMAT


def place(out: Path) -> Path:
    """Where the state of the artifact `out` lies."""
    return out.with_name(out.name + PARTIAL_SUFFIX)


def held_bytes(out: Path) -> int:
    """The disk that the state of `out` takes now."""
    found = 0
    for path in place(out).rglob("*"):
        # Another process may have it: that is told later.
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size if path.is_file() else 0
    return found


def check(out: Path, wanted: Identity) -> None:
    """Raise QuantlabError where a state lies beside `out` that is not of `wanted`, or is damaged."""
    folder = place(out)
    _refuse_foreign(folder)
    if not (markers := [marker for marker in (read(folder), read_quantized(folder)) if marker is not None]):
        return
    found = decoded(folder / _IDENTITY, Identity)
    names = [name for name in _WORDS if getattr(found, name) != getattr(wanted, name)]
    if names:
        other = " and ".join(dict.fromkeys(_WORDS[name] for name in names))
        settings = [name for name, value in wanted.settings.items() if found.settings.get(name) != value]
        raise stale(folder, other + (f" ({', '.join(settings)})" if settings else ""))
    for marker in markers:
        for name, sha256 in marker.files.items():
            if not (folder / name).is_file() or sha256_file(folder / name) != sha256:
                raise damaged(folder, f"`{name}` is not what was written")


@contextlib.contextmanager
def kept(out: Path, wanted: Identity, *, replace: bool) -> Iterator[Path]:
    """The state folder for one quantization; on success it is removed, on failure kept if there is something to keep.

    The failure's hint, or the note of a Ctrl-C, then says where it lies and how it is continued. With `replace` what is
    there goes; else raises as `check` does. Raises QuantlabError too where another process has the folder, and for an
    error of the system within, whose note nobody would read.
    """
    folder = place(out)
    _refuse_foreign(folder)
    with _owned(folder, out):
        if not replace:
            check(out, wanted)
        try:
            if replace or not _worth_keeping(folder):
                empty(folder)
                write_text(folder / _IDENTITY, msgspec.json.format(msgspec.json.encode(wanted)).decode() + "\n")
            _clear_for_engine_or_check(folder)
        except OSError as error:
            raise os_error(error, folder) from error
        try:
            yield folder
        except BaseException as error:
            if not _worth_keeping(folder):
                _remove(folder)
                raise
            _remove_scratch(folder)
            told = error
            # The command line takes a pipe that nobody reads for no error.
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                told = os_error(error, Path(error.filename or folder))
            _tell(told, folder, _continued(folder, out, replace=replace))
            if told is error:
                raise
            raise told from error
        _remove(folder)


def _tell(error: BaseException, folder: Path, how: str) -> None:
    if not isinstance(error, QuantlabError):
        error.add_note(how)
    elif folder.name not in error.hint:
        error.hint += f"{'; ' if error.hint else ''}{how}"


def _worth_keeping(folder: Path) -> bool:
    return (folder / FINISHED).is_file() or is_quantized(folder)


def _continued(folder: Path, out: Path, *, replace: bool) -> str:
    """How what is in `folder` is continued, and how not; with `replace` the command had `--force`."""
    how = " without `--force`" if replace else ""
    when = f" once `{out}` is moved away" if replace and out.exists() else ""
    kept, continues = f"the finished layers are kept in `{folder}`", "continues there"
    if is_quantized(folder):
        kept, continues = f"the quantized model is kept in `{folder}`, not yet checked", "only checks it"
    return f"{kept}: the same command{how} {continues}{when}, with `--force` it begins again"


def empty(folder: Path) -> None:
    """Drop all that is finished, and the files of layers; an engine may be about to write the whole."""
    forget(folder)
    for path in folder.iterdir():
        if path.name not in (_LOCK, ENGINE_LOCK, _IDENTITY, WHOLE):
            path.unlink(missing_ok=True)


def _clear_for_engine_or_check(folder: Path) -> None:
    if is_quantized(folder):
        _remove_scratch(folder)
        return
    (folder / QUANTIZED).unlink(missing_ok=True)
    if (folder / WHOLE).is_dir():
        shutil.rmtree(folder / WHOLE)
    artifact(folder).mkdir(parents=True)


def _remove_scratch(folder: Path) -> None:
    """Remove what a killed check left beside artifact and probe: gigabytes of logits."""
    for path in (folder / WHOLE).glob("*/"):
        if path.name != ARTIFACT:
            shutil.rmtree(path, ignore_errors=True)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        # A kill at any moment leaves what the next run knows to be nothing.
        empty(folder)
        shutil.rmtree(folder / WHOLE, ignore_errors=True)
        (folder / _IDENTITY).unlink(missing_ok=True)
        shutil.rmtree(folder)


def _refuse_foreign(folder: Path) -> None:
    """What has our name and holds none of our files is somebody else's, and is never emptied."""
    if not folder.is_dir() or (folder / _IDENTITY).is_file():
        return
    # A killed process may have come no further than the locks, or than half of that file.
    ours, names = (_LOCK, ENGINE_LOCK), list[str]()
    # The run that has it may be removing it.
    with contextlib.suppress(FileNotFoundError):
        names = [path.name for path in folder.iterdir()]
    if any(name not in ours and not name.startswith(f".{_IDENTITY}.") for name in names):
        raise QuantlabError(
            f"`{folder}` is where the state of a quantization belongs, and is none",
            "move it, or choose another `--out`",
        )


def _opened(lock: Path) -> IO[str] | None:
    """The lock file; None where the run that had the folder has removed it since it was found."""
    try:
        return lock.open("w")
    except FileNotFoundError:
        # A link that leads nowhere does not go away.
        if lock.is_symlink():
            raise
        return None


@contextlib.contextmanager
def _owned(folder: Path, out: Path) -> Iterator[None]:
    """Hold the folder alone. The system frees a killed process's lock."""
    with contextlib.ExitStack() as files:
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if (lock := _opened(folder / _LOCK)) is None:
                    continue
                files.enter_context(lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise QuantlabError(
                    f"another quantlab is writing `{out}`", "wait for it, or choose another place with `--out`"
                ) from error
            except OSError as error:
                raise os_error(error, folder) from error
            # Whoever had it before may have removed the folder since it was opened.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fileno()), (folder / _LOCK).stat()):
                    break
        yield
