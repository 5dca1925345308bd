"""What says in the state folder of a torch quantization (torch_state.py) how far it is.

An engine that can continue says after each layer what is finished; the parent of any engine says that it is done.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from quantlab.core.errors import QuantlabError
from quantlab.core.files import flush_folder, sha256_file, sha256_text, write_text
from quantlab.quantize.torch_work import EngineDone

FINISHED, QUANTIZED = "finished.json", "quantized.json"
# In the folder WHOLE the engine's artifact and probe, and what the check writes.
WHOLE, ARTIFACT, _PROBE = "whole", "artifact", "probe.safetensors"


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


class Quantized(msgspec.Struct, frozen=True):
    """That an engine is done: what it said, the seconds of the command until then, and its `files` as in Finished."""

    done: EngineDone
    duration_s: float
    files: dict[str, str]
    seal: str = ""


_Marker = TypeVar("_Marker", Finished, Quantized)


def artifact(folder: Path) -> Path:
    """Where in the state an engine writes its artifact."""
    return folder / WHOLE / ARTIFACT


def probe(folder: Path) -> Path:
    """Where in the state an engine writes its probe; the check may make folders beside it."""
    return folder / WHOLE / _PROBE


def read(folder: Path) -> Finished | None:
    """What is finished; None where nothing is. Raises QuantlabError for what `write` did not write."""
    return _unsealed(folder / FINISHED, Finished)


def is_quantized(folder: Path) -> bool:
    """Whether an engine is done, and its artifact there: a run killed after it gave it its name has moved it."""
    return (folder / QUANTIZED).is_file() and artifact(folder).is_dir()


def read_quantized(folder: Path) -> Quantized | None:
    """What an engine that is done said; None where `is_quantized` is not. Raises as `read` does."""
    return _unsealed(folder / QUANTIZED, Quantized) if is_quantized(folder) else None


def write(folder: Path, finished: Finished) -> None:
    """Say what is finished, at once; the files that it names are there already."""
    write_text(folder / FINISHED, msgspec.json.encode(_sealed(finished)).decode())


def write_quantized(folder: Path, done: EngineDone, duration_s: float) -> Quantized:
    """Say that the engine is done; artifact and probe are there, and are flushed first."""
    flush_folder(folder / WHOLE)
    paths = sorted(path for path in (folder / WHOLE).rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): sha256_file(path) for path in paths}
    quantized = _sealed(Quantized(done, duration_s, files))
    write_text(folder / QUANTIZED, msgspec.json.encode(quantized).decode())
    return quantized


def _unsealed(path: Path, kind: type[_Marker]) -> _Marker | None:
    if not path.is_file():
        return None
    marker: _Marker = decoded(path, kind)
    if marker != _sealed(marker):
        raise damaged(path.parent, f"`{path.name}` is not what was written")
    return marker


def _sealed(marker: _Marker) -> _Marker:
    plain = msgspec.structs.replace(marker, seal="")
    return msgspec.structs.replace(plain, seal=sha256_text(msgspec.json.encode(plain).decode()))


def forget(folder: Path) -> None:
    """Drop what is finished: nothing is to be continued."""
    for name in (FINISHED, QUANTIZED):
        (folder / name).unlink(missing_ok=True)


def stale(folder: Path, other: str) -> QuantlabError:
    """The error for a state that belongs to something else."""
    return QuantlabError(f"`{folder}` is of an interrupted quantization with {other}", _hint(folder))


def damaged(folder: Path, what: str) -> QuantlabError:
    """The error for a state that cannot be continued."""
    return QuantlabError(f"`{folder}`, the state of an interrupted quantization, is damaged: {what}", _hint(folder))


def _hint(folder: Path) -> str:
    return f"remove `{folder}`, or use `--force`: both begin again"


def decoded(path: Path, kind: type[Any]) -> Any:
    """What a file of the state says. Raises QuantlabError where it says nothing."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise damaged(path.parent, f"`{path.name}`: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(path.parent, f"`{path.name}`: {error}") from error
