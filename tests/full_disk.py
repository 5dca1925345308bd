"""A disk that is full, for tests: a file that may not grow fails as one on a full disk does."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def limited_files(size_bytes: int) -> Iterator[None]:
    """No file of this process and its children grows beyond `size_bytes`."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
