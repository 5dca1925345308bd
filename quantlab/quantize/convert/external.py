"""`--converter PATH`: hand the conversion to the user's own copy of llama.cpp's convert_hf_to_gguf.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from quantlab.core.errors import QuantlabError
from quantlab.core.gguf_file import read_header
from quantlab.core.progress import Progress, silent
from quantlab.quantize.convert import OutType

_LINES_SHOWN = 6


def convert_with(script: Path, folder: Path, out: Path, *, outtype: OutType, progress: Progress = silent) -> None:
    """Run `script` with this Python; it writes the GGUF at `out`. Its process ends with this call, whatever happens.

    Raises QuantlabError with the last lines it printed where it fails or leaves no sound GGUF.
    """
    if not script.is_file():
        raise QuantlabError(f"`{script}` does not exist", "give the path of llama.cpp's convert_hf_to_gguf.py")
    command = [sys.executable, str(script), str(folder), "--outfile", str(out), "--outtype", outtype.lower()]
    progress("converting", 0, 1)
    # subprocess.run kills the child where an exception, Ctrl-C too, comes between.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0 or not out.is_file():
        said = (done.stderr.decode("utf-8", "replace").strip() or "it said nothing").splitlines()[-_LINES_SHOWN:]
        raise QuantlabError(
            f"`{script.name}` ended with code {done.returncode}: {' | '.join(said)}",
            f"it runs with `{sys.executable}`: install what it needs there, or repair the model folder",
        )
    read_header(out)
    progress("converting", 1, 1)
