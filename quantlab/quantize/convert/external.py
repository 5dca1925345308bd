"""`--converter PATH`: hand the conversion to the user's own copy of llama.cpp's convert_hf_to_gguf.py."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from quantlab.core.errors import QuantlabError
from quantlab.core.gguf_file import read_header
from quantlab.core.progress import Progress, silent
from quantlab.quantize.spec import OutType

_LINES_SHOWN = 6
# The script ends as soon as its stdin does: with this process, even where that is killed.
_RUN = """\
import os, runpy, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
del sys.argv[0]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def convert_with(script: Path, folder: Path, out: Path, *, outtype: OutType, progress: Progress = silent) -> None:
    """Run `script` with this Python; it writes the GGUF at `out`. Its process ends with this call, whatever happens.

    Raises QuantlabError with the last lines it printed where it fails or leaves no sound GGUF.
    """
    if not script.is_file():
        raise QuantlabError(f"`{script}` does not exist", "give the path of llama.cpp's convert_hf_to_gguf.py")
    arguments = [str(script), str(folder), "--outfile", str(out), "--outtype", outtype.lower()]
    progress("converting", 0, 1)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN, *arguments], stdin=subprocess.PIPE, stdout=log, stderr=log
        )
        try:
            code = process.wait()
        finally:
            process.kill()
            process.communicate()
        log.seek(0)
        said = log.read().decode("utf-8", "replace").strip().splitlines()[-_LINES_SHOWN:]
    if code != 0 or not out.is_file():
        raise QuantlabError(
            f"`{script.name}` ended with code {code}: {' | '.join(said) or 'it said nothing'}",
            f"it runs with `{sys.executable}`: install what it needs there, or repair the model folder",
        )
    read_header(out)
    progress("converting", 1, 1)
