"""Atomic writing: what a failure, a kill and a full disk leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quantlab.core import files
from quantlab.core.errors import QuantlabError
from quantlab.core.files import (
    cache_folder,
    check_output,
    check_output_folder,
    check_space,
    os_error,
    partial_of,
    sha256_file,
    user_path,
    write_text,
    written,
    written_folder,
)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "a.txt"
    with written(out) as temporary:
        temporary.write_text("half")
        assert not out.exists()
    assert out.read_text() == "half"
    assert names(tmp_path) == ["a.txt"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "a.txt"
    write_text(out, "old")
    with pytest.raises(ZeroDivisionError), written(out) as temporary:
        temporary.write_text("new")
        raise ZeroDivisionError
    assert out.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("name", ["a.txt", "a[1].txt"])
def test_kill_leaves_no_finished_file_and_the_next_run_cleans_up(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom quantlab.core.files import written\n"
        "with written(Path(sys.argv[1])) as t:\n t.write_text('half')\n os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert len(names(tmp_path)) == 1
    write_text(out, "whole")
    assert names(tmp_path) == [name]


def test_a_temporary_file_of_a_living_process_stays(tmp_path: Path) -> None:
    other = tmp_path / f".a.txt.{os.getppid()}.partial"
    other.write_text("in use")
    write_text(tmp_path / "a.txt", "mine")
    assert other.read_text() == "in use"


def test_a_folder_that_a_living_process_writes_is_refused(tmp_path: Path) -> None:
    other = tmp_path / f".a.{os.getppid()}.partial"
    other.mkdir()
    with pytest.raises(QuantlabError, match="another quantlab is writing"), written_folder(tmp_path / "a"):
        pass
    # The number of a process that is gone, given again: to a later process, or in a container to this one.
    os.utime(other, (1, 1))
    mine = tmp_path / f".a.{os.getpid()}.partial"
    mine.mkdir()
    (mine / "rest").touch()
    with written_folder(tmp_path / "a") as temporary:
        assert list(temporary.iterdir()) == []
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["", "..", "mount", "link"])
def test_a_folder_that_cannot_be_renamed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Before any work: at its end the artifact would be lost."""
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path.parent, tmp_path / "mount"):
        folder.mkdir(exist_ok=True)
        (folder / "mark").touch()
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "mount")
    said = "leads nowhere" if name == "link" else "cannot be replaced as a whole"
    with pytest.raises(QuantlabError, match=said):
        check_output_folder(Path(name), "mark", force=True)


def test_a_file_where_a_folder_belongs_is_not_said_to_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for force in (False, True):
        with pytest.raises(QuantlabError, match="is a file"):
            check_output_folder(tmp_path / "a", "mark", force=force)
        with pytest.raises(QuantlabError, match="is a folder"):
            check_output(tmp_path, force=force)


def killed(path: Path) -> Path:
    """A temporary of this process, under the name that one of a killed process would have."""
    pid = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    ).stdout
    return path.with_name(path.name.replace(f".{os.getpid()}.", f".{int(pid)}."))


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "a"
    killed(partial_of(out, "old")).mkdir()
    killed(partial_of(out)).mkdir()
    with pytest.raises(QuantlabError, match="exists"), written_folder(out):
        pass
    assert names(tmp_path) == ["a"]


def test_a_folder_of_the_caller_is_renamed_and_stays_where_that_fails(tmp_path: Path) -> None:
    made, out = tmp_path / "state", tmp_path / "a"
    made.mkdir()
    (made / "weights").touch()
    with pytest.raises(QuantlabError), written_folder(out, kept=made):
        # Another one's, meanwhile.
        (out / "other").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt), written_folder(out, replace=True, kept=made):
        raise KeyboardInterrupt
    assert (names(made), names(out)) == (["weights"], ["other"])
    with written_folder(out, replace=True, kept=made) as yielded:
        assert yielded == made
    assert (names(tmp_path), names(out)) == (["a"], ["weights"])


def test_a_link_in_the_place_of_a_folder_gives_way_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "old").touch()
    (tmp_path / "a").symlink_to("elsewhere")
    with written_folder(tmp_path / "a", replace=True) as temporary:
        (temporary / "new").touch()
    assert sorted(names(tmp_path)) == ["a", "elsewhere"]
    assert (names(tmp_path / "a"), names(tmp_path / "elsewhere")) == (["new"], ["old"])


@pytest.mark.parametrize("other", ["a.old", "a.b"])
def test_what_belongs_to_another_name_is_neither_removed_nor_taken(tmp_path: Path, other: str) -> None:
    left = [killed(partial_of(tmp_path / other)), killed(partial_of(tmp_path / other, "old"))]
    for folder in left:
        folder.mkdir()
    with written_folder(tmp_path / "a") as temporary:
        (temporary / "new").touch()
    assert sorted(names(tmp_path)) == sorted(["a", *(folder.name for folder in left)])
    assert names(tmp_path / "a") == ["new"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_files_of_a_folder_are_for_whoever_may_read_ours(tmp_path: Path, umask: int, mode: int) -> None:
    (tmp_path / "other").touch(0o600)
    before = os.umask(umask)
    try:
        with written_folder(tmp_path / "a") as temporary:
            (temporary / "below").mkdir()
            for name in ("weights", "below/more"):
                (temporary / name).touch(0o600)
            (temporary / "link").symlink_to(tmp_path / "other")
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("a/weights", "a/below/more", "other")]
    assert modes == [mode, mode, 0o600]


def test_a_full_disk_is_an_error_with_a_hint_and_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import resource, signal, sys\nfrom pathlib import Path\nfrom quantlab.core.files import write_text\n"
        "from quantlab.core.errors import QuantlabError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "try:\n write_text(Path(sys.argv[1]), 'x' * 1000)\nexcept QuantlabError as e:\n print(e.message)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.txt")], capture_output=True, text=True, check=True
    )
    assert "a.txt" in out.stdout
    assert names(tmp_path) == []


def test_output_is_checked_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    with pytest.raises(QuantlabError, match="exists") as caught:
        check_output(tmp_path / "there", force=False)
    assert "--force" in caught.value.hint
    check_output(tmp_path / "there", force=True)
    with pytest.raises(QuantlabError, match="is a folder"):
        check_output(tmp_path, force=True)
    check_output(tmp_path / "new" / "deep", force=False)
    assert not (tmp_path / "new").exists()
    with pytest.raises(QuantlabError, match="is no folder"):
        check_output(tmp_path / "there" / "deep", force=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(QuantlabError, match="permission"):
        check_output(tmp_path / "a", force=False)


def test_too_little_space_is_named_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(QuantlabError, match=r"GB free.*needs about 1000000000\.00 GB"):
        check_space(tmp_path, 10**18)
    check_space(tmp_path, 1)


def test_an_empty_cache_variable_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("QUANTLAB_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == tmp_path / ".cache" / "quantlab"


def test_names_that_no_result_could_hold_are_refused() -> None:
    with pytest.raises(QuantlabError, match="not UTF-8"):
        user_path("bad\udcff.gguf")
    with pytest.raises(QuantlabError, match="names no user"):
        user_path("~no-such-user-here/x.gguf")


def test_every_error_of_the_system_has_a_hint(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory") as caught:
        tmp_path.read_text()
    assert os_error(caught.value, tmp_path).hint


def test_sha256_of_a_known_text(tmp_path: Path) -> None:
    write_text(tmp_path / "abc", "abc")
    assert sha256_file(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with pytest.raises(QuantlabError, match="missing"):
        sha256_file(tmp_path / "missing")


def test_a_remembered_hash_is_forgotten_when_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_SETTLED_S", 0.05)
    monkeypatch.setattr(files, "_WORTH_REMEMBERING_BYTES", 1)
    path = tmp_path / "weights"
    path.write_bytes(b"abc")
    time.sleep(0.1)
    first = files.sha256_known(path)
    assert first == sha256_file(path)
    with monkeypatch.context() as patch:
        patch.setattr(files, "sha256_file", lambda _: pytest.fail("hashed again"))
        assert files.sha256_known(path) == first
    times = path.stat()
    path.write_bytes(b"abd")
    # The time of the content can be set back; that of the change cannot.
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    time.sleep(0.1)
    assert files.sha256_known(path) == sha256_file(path) != first
