"""The finished layers of an interrupted torch quantization, in the folder NAME.partial beside the artifact NAME.

The parent owns the folder: it says there what the layers belong to, refuses what belongs to something else or is
damaged, and removes it when the artifact has its name. The engine's process fills it (quantize/engines/).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quantlab import __version__
from quantlab.core.errors import QuantlabError
from quantlab.core.files import PARTIAL_SUFFIX, os_error, sha256_file, sha256_text, write_text

# Of what is written here and by engines/gptqmodel_state.py.
_FORMAT = 1
_IDENTITY, _FINISHED, _LOCK = "identity.json", "finished.json", "lock"
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
    """What finished layers belong to. The number of threads is no part of it: any may continue."""

    model: str
    calibration: dict[str, Any]
    settings: dict[str, Any]
    engine: dict[str, str]
    quantlab: str = __version__
    format: int = _FORMAT


class Finished(msgspec.Struct, frozen=True):
    """How far the engine is: `layers` of `of` are finished and lie in `files`, by name with their sha256.

    `calibration` is the sha256 of the token ids, `log` what the engine said of each module, `seal` the sha256 of all
    this.
    """

    layers: int
    of: int
    files: dict[str, str]
    calibration: str
    log: list[dict[str, Any]]
    seal: str = ""


def place(out: Path) -> Path:
    """Where the state of the artifact `out` lies."""
    return out.with_name(out.name + PARTIAL_SUFFIX)


def check(out: Path, wanted: Identity) -> None:
    """Raise QuantlabError where a state lies beside `out` that is not of `wanted`, or is damaged."""
    folder = place(out)
    _refuse_foreign(folder)
    if (finished := read(folder)) is None:
        return
    found = _decoded(folder / _IDENTITY, Identity)
    names = [name for name in _WORDS if getattr(found, name) != getattr(wanted, name)]
    if names:
        other = " and ".join(dict.fromkeys(_WORDS[name] for name in names))
        settings = [name for name, value in wanted.settings.items() if found.settings.get(name) != value]
        raise stale(folder, other + (f" ({', '.join(settings)})" if settings else ""))
    for name, sha256 in finished.files.items():
        if not (folder / name).is_file() or sha256_file(folder / name) != sha256:
            raise damaged(folder, f"`{name}` is not what was written")


@contextlib.contextmanager
def kept(out: Path, wanted: Identity, *, replace: bool) -> Iterator[Path]:
    """The state folder for one quantization; on success it is removed, on failure kept if a layer is finished.

    The failure's hint, or the note of a Ctrl-C, then says where it lies and how it is continued. With `replace` what is
    there goes; else raises as `check` does. Raises QuantlabError too where another process has the folder.
    """
    folder = place(out)
    _refuse_foreign(folder)
    with _owned(folder, out):
        if not replace:
            check(out, wanted)
        if replace or read(folder) is None:
            try:
                empty(folder)
            except OSError as error:
                raise os_error(error, folder) from error
            write_text(folder / _IDENTITY, msgspec.json.format(msgspec.json.encode(wanted)).decode() + "\n")
        try:
            yield folder
        except BaseException as error:
            if not (folder / _FINISHED).is_file():
                _remove(folder)
            elif not isinstance(error, QuantlabError):
                error.add_note(_continued(folder, out, replace=replace))
            elif folder.name not in error.hint:
                error.hint += f"{'; ' if error.hint else ''}{_continued(folder, out, replace=replace)}"
            raise
        _remove(folder)


def _continued(folder: Path, out: Path, *, replace: bool) -> str:
    """How the finished layers in `folder` are continued, and how not; with `replace` the command had `--force`."""
    how = " without `--force`" if replace else ""
    when = f" once `{out}` is moved away" if replace and out.exists() else ""
    kept = f"the finished layers are kept in `{folder}`"
    return f"{kept}: the same command{how} continues there{when}, with `--force` it begins again"


def read(folder: Path) -> Finished | None:
    """What is finished; None where nothing is. Raises QuantlabError for what `write` did not write."""
    if not (folder / _FINISHED).is_file():
        return None
    finished: Finished = _decoded(folder / _FINISHED, Finished)
    if finished.seal != _seal(finished):
        raise damaged(folder, f"`{_FINISHED}` is not what was written")
    return finished


def write(folder: Path, finished: Finished) -> None:
    """Say what is finished, at once; the files that it names are there already."""
    sealed = msgspec.structs.replace(finished, seal=_seal(finished))
    write_text(folder / _FINISHED, msgspec.json.encode(sealed).decode())


def _seal(finished: Finished) -> str:
    return sha256_text(msgspec.json.encode(msgspec.structs.replace(finished, seal="")).decode())


def forget(folder: Path) -> None:
    """Drop what is finished: nothing is to be continued."""
    (folder / _FINISHED).unlink(missing_ok=True)


def stale(folder: Path, other: str) -> QuantlabError:
    """The error for a state that belongs to something else."""
    return QuantlabError(f"`{folder}` is of an interrupted quantization with {other}", _hint(folder))


def empty(folder: Path) -> None:
    """Drop all that is finished, and its files."""
    forget(folder)
    for path in folder.iterdir():
        if path.name not in (_LOCK, ENGINE_LOCK, _IDENTITY):
            path.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        # A kill at any moment leaves what the next run knows to be nothing.
        empty(folder)
        (folder / _IDENTITY).unlink(missing_ok=True)
        shutil.rmtree(folder)


def damaged(folder: Path, what: str) -> QuantlabError:
    """The error for a state that cannot be continued."""
    return QuantlabError(f"`{folder}`, the state of an interrupted quantization, is damaged: {what}", _hint(folder))


def _hint(folder: Path) -> str:
    return f"remove `{folder}`, or use `--force`: both begin again"


def _decoded(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise damaged(path.parent, f"`{path.name}`: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(path.parent, f"`{path.name}`: {error}") from error


def _refuse_foreign(folder: Path) -> None:
    """What has our name and holds none of our files is somebody else's, and is never emptied."""
    if not folder.is_dir() or (folder / _IDENTITY).is_file():
        return
    # A killed process may have come no further than the locks, or than half of that file.
    ours = (_LOCK, ENGINE_LOCK)
    if any(path.name not in ours and not path.name.startswith(f".{_IDENTITY}.") for path in folder.iterdir()):
        raise QuantlabError(
            f"`{folder}` is where the state of a quantization belongs, and is none",
            "move it, or choose another `--out`",
        )


@contextlib.contextmanager
def _owned(folder: Path, out: Path) -> Iterator[None]:
    """Hold the folder alone. The system frees a killed process's lock."""
    with contextlib.ExitStack() as files:
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = files.enter_context((folder / _LOCK).open("w"))
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
