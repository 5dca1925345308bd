"""Files are written beside and renamed: a killed run leaves nothing that looks finished."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from quantlab.core.errors import QuantlabError

PARTIAL_SUFFIX = ".partial"
_OLD = "old"
_CHUNK = 1 << 22
_SHA256_DIGITS = 64
_WORTH_REMEMBERING_BYTES = 1 << 24
_SETTLED_S = 2.0
# The times of processes and of files come from two clocks, the first one counts whole seconds from the start.
_CLOCK_S = 5.0
_ANOTHER_PLACE = "use `--force` to replace it, or give another place (`--out`, or `out:` in a recipe)"


def check_output(path: Path, *, force: bool) -> None:
    """Refuse to overwrite, and refuse a folder that cannot be written, before any work is done."""
    if path.is_dir():
        raise QuantlabError(f"`{path}` is a folder", "give `--out` the name of a file")
    if path.exists() and not force:
        raise QuantlabError(f"`{path}` exists", _ANOTHER_PLACE)
    _check_place(path)


def check_output_folder(path: Path, marker: str, *, force: bool) -> None:
    """As `check_output` for a folder; `force` replaces one that holds the file `marker`, and no other."""
    # It is written beside and renamed.
    if path.name in ("", "..") or os.path.ismount(path):
        raise QuantlabError(f"`{path}` cannot be replaced as a whole", "give `--out` the name of a folder in it")
    if path.is_symlink() and not path.exists():
        raise QuantlabError(f"`{path}` is a link that leads nowhere", "remove it, or choose another place with `--out`")
    if path.exists():
        if not path.is_dir():
            raise QuantlabError(f"`{path}` is a file", "give `--out` the name of a folder")
        if not force:
            raise QuantlabError(f"`{path}` exists", _ANOTHER_PLACE)
        if not (path / marker).is_file() and any(path.iterdir()):
            raise QuantlabError(
                f"`{path}` is no artifact of quantlab (it holds no {marker}), and is not replaced",
                "choose another place with `--out`",
            )
    _check_place(path)


def _check_place(path: Path) -> None:
    parent = existing(path.parent)
    if not parent.is_dir():
        raise QuantlabError(f"`{parent}` is no folder", "choose another place with `--out`")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise QuantlabError(f"no write permission in `{parent}`", "choose another place with `--out`")


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists: nothing is made before there is something to keep."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def check_space(folder: Path, need_bytes: int) -> None:
    """Refuse work whose output cannot fit, with both numbers."""
    free = shutil.disk_usage(existing(folder)).free
    if need_bytes > free:
        raise QuantlabError(
            f"`{folder}` has {free / 1e9:.2f} GB free, the output needs about {need_bytes / 1e9:.2f} GB",
            "free some room, or choose another place with `--out`",
        )


def os_error(error: OSError, path: Path) -> QuantlabError:
    """An operating system error in words that help."""
    hints = {
        errno.ENOSPC: "the disk is full: free some room and run again",
        errno.EACCES: "no permission: choose another place",
        errno.EROFS: "the file system is read-only: choose another place",
        errno.ENOENT: "check the path",
    }
    hint = hints.get(error.errno or 0, "check the path and its permissions")
    return QuantlabError(f"`{path}`: {error.strerror or error}", hint)


@contextlib.contextmanager
def written(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success flush it and rename, on any failure remove it.

    The name is unique to this process, so that two runs never write the same temporary file. What need not outlive a
    power failure is not `durable`, and does not wait for the disk.
    """
    temporary = partial_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        yield temporary
        if durable:
            descriptor = os.open(temporary, os.O_RDWR)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        temporary.replace(path)
    except OSError as error:
        raise os_error(error, path) from error
    finally:
        # What went wrong before tells more.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def written_folder(path: Path, *, replace: bool = False, kept: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success flush its files and rename it, on any failure remove it.

    With `replace` a folder that is there gives way at the end; else QuantlabError is raised, at the start or at the
    end. It is raised too where another process is writing it. The caller's folder `kept`, on the same disk, is yielded
    in the place of a temporary one, and stays on failure.
    """
    temporary, old = kept or partial_of(path), partial_of(path, _OLD)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # This may bring back what was there.
        if _remove_stale(path):
            raise QuantlabError(
                f"another quantlab is writing `{path}`", "wait for it, or choose another place with `--out`"
            )
        if path.exists() and not replace:
            raise QuantlabError(f"`{path}` exists", "remove it, or choose another place")
        temporary.mkdir(exist_ok=kept is not None)
        yield temporary
        flush_folder(temporary)
        if replace and path.exists():
            path.rename(old)
        temporary.rename(path)
    except OSError as error:
        raise os_error(error, path) from error
    finally:
        # Whatever failed between the two renames: what was there comes back.
        if old.exists() and not path.exists():
            old.rename(path)
        for folder in (old,) if kept else (temporary, old):
            _remove(folder)


def flush_folder(folder: Path) -> None:
    """Flush all files of a folder that this process has made.

    Whoever may read what it writes may read them: safetensors makes its own for the owner alone.
    """
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(mode)
            with file.open("rb+") as opened:
                os.fsync(opened.fileno())


def partial_of(path: Path, mark: str = "") -> Path:
    """The name of a temporary of this process beside `path`; the next run that writes `path` removes a killed one's.

    The mark stands behind the process: no `mark` makes it the temporary of another name, as `x.old` beside `x`.
    """
    return path.with_name(f".{path.name}.{os.getpid()}{f'.{mark}' if mark else ''}{PARTIAL_SUFFIX}")


def _remove_stale(path: Path) -> bool:
    """Remove what killed runs left beside `path`; what belongs to a living process or to another name stays.

    Returns whether a living process is writing `path`.
    """
    of_path, busy = re.compile(rf"\.{re.escape(path.name)}\.(\d+)(?:\.([a-z]+))?{re.escape(PARTIAL_SUFFIX)}"), False
    for stale in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL_SUFFIX}"):
        found = of_path.fullmatch(stale.name)
        if found is None:
            continue
        if _writes(int(found[1]), stale):
            busy = True
        elif found[2] == _OLD and not path.exists():
            # Killed between the two renames of `written_folder`.
            stale.rename(path)
        else:
            _remove(stale)
    return busy


def _remove(path: Path) -> None:
    """Remove a temporary as far as that can be done; of a link that stood in the place of a folder the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _writes(pid: int, temporary: Path) -> bool:
    """Whether that process, another one than this, made it.

    One that began later has the number of one that is gone. In a container that is often our own.
    """
    import psutil

    if pid == os.getpid():
        return False
    try:
        return psutil.Process(pid).create_time() <= temporary.stat().st_mtime + _CLOCK_S
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False
    except psutil.AccessDenied:
        return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path` alone, waiting for the process that has it. The system frees a killed one's lock."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise os_error(error, path) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically, UTF-8."""
    with written(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256_file(path: Path) -> str:
    """The sha256 of a file's content, in hex."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_CHUNK):
                digest.update(block)
    except OSError as error:
        raise os_error(error, path) from error
    return digest.hexdigest()


def sha256_known(path: Path) -> str:
    """As `sha256_file`, remembered in the cache folder while the file's identity, size and times stay the same.

    A file that was changed within the last seconds is hashed each time: a second change may not move its times.
    """
    status = path.stat() if path.is_file() else None
    if status is None or status.st_size < _WORTH_REMEMBERING_BYTES or time.time() - status.st_ctime < _SETTLED_S:
        return sha256_file(path)
    identity = f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    note = cache_folder() / "sha256" / sha256_text(identity)
    with contextlib.suppress(OSError):
        if len(known := note.read_text(encoding="ascii")) == _SHA256_DIGITS:
            return known
    found = sha256_file(path)
    with contextlib.suppress(QuantlabError):
        write_text(note, found)
    return found


def sha256_text(text: str) -> str:
    """The sha256 of a text in UTF-8, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def cache_folder() -> Path:
    """Where downloads and derived models are kept: $QUANTLAB_CACHE, else the user's cache folder."""
    if named := os.environ.get("QUANTLAB_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantlab"


def user_path(text: str) -> Path:
    """The path that a user typed, `~` expanded; QuantlabError for what no file of ours can be called."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # It could not stand in a Result, which is UTF-8.
        raise QuantlabError(f"the name `{text}` is not UTF-8", "rename the file or folder") from error
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise QuantlabError(f"`{text}` names no user of this machine", "write `./~...` for such a file") from error
