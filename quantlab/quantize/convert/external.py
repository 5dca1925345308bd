"""`--converter PATH`: hand the conversion to the user's own copy of llama.cpp's convert_hf_to_gguf.py."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from quantlab.core.errors import QuantlabError
from quantlab.core.gguf_file import read_header
from quantlab.core.progress import Progress, silent
from quantlab.quantize.spec import OutType
from quantlab.runtime.process import Process

_LINES_SHOWN = 6


def convert_with(script: Path, folder: Path, out: Path, *, outtype: OutType, progress: Progress = silent) -> None:
    """Run `script` with this Python; it writes the GGUF at `out`. Its processes end with this call, whatever happens.

    Raises QuantlabError with the last lines it printed where it fails or leaves no sound GGUF.
    """
    if not script.is_file():
        raise QuantlabError(f"`{script}` does not exist", "give the path of llama.cpp's convert_hf_to_gguf.py")
    arguments = [str(script), str(folder), "--outfile", str(out), "--outtype", outtype.lower()]
    progress("converting", 0, 1)
    with tempfile.TemporaryFile() as log:
        with Process([sys.executable, *arguments], stdout=log, stderr=log) as process:
            code = process.wait()
        log.seek(0)
        said = log.read().decode("utf-8", "replace").strip().splitlines()[-_LINES_SHOWN:]
    if code != 0 or not out.is_file():
        raise QuantlabError(
            f"`{script.name}` ended with code {code}: {' | '.join(said) or 'it said nothing'}",
            f"it runs with `{sys.executable}`: install what it needs there, or repair the model folder",
        )
    read_header(out)
    progress("converting", 1, 1)
