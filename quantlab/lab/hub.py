"""A model of the Hugging Face Hub -> a snapshot in the Hub's own cache, shared with every other tool.

Small files come through `snapshot_download`. Weights are fetched here, into the blob (named by its sha256) where the
Hub's cache keeps them: huggingface_hub 2 begins an interrupted file again from zero, and no version checks the hash.
Weights come last, so a snapshot that has them is complete. HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE hold.
Layout of the cache: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, errors, hf_hub_url, snapshot_download, utils

from quantlab.core.artifact import safetensors_files
from quantlab.core.errors import QuantlabError
from quantlab.core.files import cache_folder, check_space, locked, os_error, sha256_file
from quantlab.core.progress import Progress
from quantlab.lab.source import check_config, no_safetensors

_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
_INDEX = "model.safetensors.index.json"
_RETRIES = 5
_TIMEOUT_S = 30


def download(repo: str, revision: str | None, *, offline: bool, progress: Progress) -> tuple[Path, str]:
    """The folder and the commit of `repo` at `revision` (a branch, tag or commit; None: the default branch).

    What is cached is not fetched again; what was interrupted continues. Raises QuantlabError where the repository
    does not exist, is gated, holds no safetensors, cannot be reached, or a file does not have its hash.
    """
    utils.disable_progress_bars()
    utils.logging.set_verbosity_error()
    with _explained(repo, revision, offline=offline):
        progress(f"looking up {repo}", 0, 1)
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=_SMALL_FILES,
                ignore_patterns=["*/*"],
                local_files_only=offline,
            )
        )
        if not offline and not _has_weights(folder):
            _fetch_weights(repo, folder, progress)
        for path in folder.iterdir():
            if path.suffix != ".safetensors":
                _check_blob(path)
    return folder, folder.name


def _has_weights(folder: Path) -> bool:
    """A link to a blob appears only when the blob is whole."""
    try:
        return bool(safetensors_files(folder))
    except QuantlabError:
        return False


def _fetch_weights(repo: str, folder: Path, progress: Progress) -> None:
    """Fetch the weights of the snapshot `folder` and link them into it."""
    commit, blobs = folder.name, folder.parents[1] / "blobs"
    siblings = HfApi().model_info(repo, revision=commit, files_metadata=True).siblings
    files = {file.rfilename: file for file in siblings if "/" not in file.rfilename}
    names = _weight_names(repo, folder, list(files))
    check_config(folder)
    blobs.mkdir(parents=True, exist_ok=True)
    large = [files[name] for name in names if files[name].lfs is not None]
    total = sum(file.size for file in large)
    done = 0
    for file in large:

        def report(arrived: int, name: str = file.rfilename, before: int = done) -> None:
            progress(f"downloading {repo}/{name}", before + arrived, total)

        url = hf_hub_url(repo, file.rfilename, revision=commit)
        with locked(cache_folder() / "locks" / file.lfs.sha256):
            _Download(url, blobs / file.lfs.sha256, file.lfs.sha256, file.size, report).run()
        done += file.size
    snapshot_download(repo, revision=commit, allow_patterns=names)
    for file in (files[name] for name in names if files[name].lfs is None):
        _check_blob(folder / file.rfilename)


def _weight_names(repo: str, folder: Path, names: list[str]) -> list[str]:
    """The safetensors files that transformers would load; other copies of the weights are left out."""
    if (folder / _INDEX).is_file():
        try:
            wanted = sorted(set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise QuantlabError(f"`{_INDEX}` of `{repo}` is damaged: {error!r}", "choose another revision") from error
    elif "model.safetensors" in names:
        wanted = ["model.safetensors"]
    else:
        wanted = sorted(name for name in names if name.endswith(".safetensors"))
    if not wanted:
        raise no_safetensors(f"`{repo}`", names)
    if missing := [name for name in wanted if name not in names]:
        raise QuantlabError(f"`{repo}` lacks {', '.join(map(str, missing))}", "choose another revision")
    return wanted


@dataclass(frozen=True)
class _Download:
    """One large file: continued where an earlier run stopped, and known by its hash before it counts."""

    url: str
    blob: Path
    sha256: str
    size: int
    report: Callable[[int], None]

    def run(self) -> None:
        if self.blob.exists():
            return
        partial = self.blob.with_name(self.blob.name + ".quantlab.partial")
        session = utils.get_session()
        # httpx in huggingface_hub 1, httpx2 in 2.
        transport_error = sys.modules[type(session).__module__.partition(".")[0]].TransportError
        for attempt in range(_RETRIES + 1):
            try:
                self._continue(session, partial)
                break
            except transport_error:
                if attempt == _RETRIES:
                    raise
                time.sleep(1)
        if sha256_file(partial) != self.sha256:
            partial.unlink()
            raise QuantlabError(f"`{self.url}` arrived with another sha256 than the Hub names", "run again")
        partial.replace(self.blob)

    def _continue(self, session: Any, partial: Path) -> None:
        have = partial.stat().st_size if partial.exists() else 0
        if have >= self.size:
            return
        check_space(partial.parent, self.size - have)
        headers = {**utils.build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={have}-"}
        with session.stream("GET", self.url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S) as response:
            utils.hf_raise_for_status(response)
            # A server that does not know ranges sends the whole file.
            have = have if response.status_code == 206 else 0
            with partial.open("ab" if have else "wb") as out:
                for block in response.iter_bytes():
                    have += out.write(block)
                    self.report(have)


def _check_blob(path: Path) -> None:
    """Compare a cached file with its name in the cache: a sha256, or git's sha1 for a file outside of LFS."""
    blob = path.resolve()
    content = blob.read_bytes() if blob.is_file() else b""
    digests = {
        64: hashlib.sha256(content),
        40: hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False),
    }
    if len(blob.name) in digests and blob.parent.name == "blobs" and digests[len(blob.name)].hexdigest() != blob.name:
        blob.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise QuantlabError(f"`{path}` does not have the hash that the Hub names; it was removed", "run again")


@contextlib.contextmanager
def _explained(repo: str, revision: str | None, *, offline: bool) -> Iterator[None]:
    """Turn the errors of huggingface_hub, of the network and of the disk into ours."""
    try:
        yield
    except QuantlabError:
        raise
    except errors.GatedRepoError as error:
        raise QuantlabError(
            f"`{repo}` is gated", "accept its terms on its page, then `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise QuantlabError(f"`{repo}` has no revision `{revision}`", "check its branches, tags and commits") from error
    except errors.RepositoryNotFoundError as error:
        raise QuantlabError(
            f"the Hub has no model `{repo}`, and there is no such folder",
            "check the spelling; a private one needs `hf auth login` or HF_TOKEN",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        wanted = f"`{repo}@{revision}`" if revision else f"`{repo}`"
        if offline:
            raise QuantlabError(
                f"{wanted} is not in the cache, or not whole, and there is no such folder",
                "check the path, or run once without `--offline`",
            ) from error
        raise QuantlabError(
            f"{wanted} is not in the cache, the Hub cannot be reached, and there is no such folder",
            "check the path, the network, HF_ENDPOINT and HF_HUB_OFFLINE",
        ) from error
    except OSError as error:
        if error.errno is None:
            raise _interrupted(repo, error) from error
        raise os_error(error, Path(error.filename or constants.HF_HUB_CACHE)) from error
    except Exception as error:
        raise _interrupted(repo, error) from error


def _interrupted(repo: str, error: Exception) -> QuantlabError:
    said = (str(error).strip().splitlines() or [""])[0]
    return QuantlabError(
        f"`{repo}` could not be downloaded: {type(error).__name__}: {said}", "run again: what has arrived is kept"
    )
