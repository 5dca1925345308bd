"""Fixtures that say where the real data is, or why a test is skipped."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

# A loaded machine is no fault of the code.
hypothesis.settings.register_profile("quantlab", deadline=None)
hypothesis.settings.load_profile("quantlab")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real corpora and models that lies beside a developer's checkout."""
    folder = Path(os.environ.get("QUANTLAB_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"needs the real data of `{folder}`; set QUANTLAB_SHARED")
    return folder


@pytest.fixture(scope="session")
def stories(shared: Path) -> Path:
    """stories260K: a trained 260k-parameter llama, fp32, 1 MB."""
    return shared / "data" / "models" / "stories260K"


@pytest.fixture(scope="session")
def wiki_test(shared: Path) -> Path:
    """The canonical raw WikiText-2 test file."""
    return shared / "data" / "text" / "wiki.test.raw"
