"""Prompts: exact lengths, BOS once, each request's own slice of real text, the same for every model of a vocabulary."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantlab.bench import workloads
from quantlab.bench.spec import BenchSpec, parse_sizes, prompt_text
from quantlab.core.corpus import load_text
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.model import ModelFile
from quantlab.runtime.backend import Capacity
from quantlab.runtime.llamacpp import LlamaCppBackend, opened
from tests.tiny_gguf import write_gguf

MODEL = ModelFile("x.gguf", "x", "x", "0")
TEXT = np.arange(100, 1100, dtype=np.int32)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> LlamaCppBackend:
    path = tmp_path_factory.mktemp("model") / "bos.gguf"
    write_gguf(path, metadata={"tokenizer.ggml.add_bos_token": True})
    with opened(path, Capacity(n_ctx=8), threads=1) as backend:
        yield backend


@given(st.integers(2, 1000), st.integers(1, 30), st.sampled_from([None, 7]), st.integers(0, 2**32))
def test_slices_are_pieces_of_the_text_of_exactly_that_length(
    length: int, count: int, bos: int | None, seed: int
) -> None:
    found = workloads.slices(TEXT, bos, length, count, seed)
    assert len(found) == count
    for ids in found:
        assert len(ids) == length
        assert ids.dtype == np.int32
        body = ids if bos is None else ids[1:]
        assert bos is None or ids[0] == bos
        assert (np.diff(body) == 1).all()
        assert bos not in body
    places = len(TEXT) - length + 1 + (bos is not None)
    assert len({ids[-1] for ids in found}) == min(count, places)
    again = workloads.slices(TEXT.copy(), bos, length, count, seed)
    assert all((a == b).all() for a, b in zip(found, again, strict=True))


def test_another_seed_draws_other_slices() -> None:
    a, b = (workloads.slices(TEXT, None, 50, 5, seed) for seed in (0, 1))
    assert any((x != y).any() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("bos", "length"), [(None, 1001), (7, 1002), (7, 1)])
def test_a_length_that_the_text_cannot_give_is_refused(bos: int | None, length: int) -> None:
    with pytest.raises(UsageError, match=f"{length} tokens") as caught:
        workloads.slices(TEXT, bos, length, 1, 0)
    assert caught.value.hint
    assert len(workloads.slices(TEXT, None, 1000, 3, 0)) == 3


def test_a_prompt_as_it_is_has_bos_once() -> None:
    assert workloads.slices(TEXT[:3], 7, None, 2, 0)[1].tolist() == [7, 100, 101, 102]
    assert workloads.slices(np.array([7, 100], np.int32), 7, None, 1, 0)[0].tolist() == [7, 100]
    assert workloads.slices(TEXT[:3], None, None, 1, 0)[0].tolist() == [100, 101, 102]


def test_prompts_of_a_cell_are_real_text(backend: LlamaCppBackend) -> None:
    spec = BenchSpec([MODEL], prompt_tokens=[64], batch=[3], repeats=2, warmup=1)
    cell = workloads.prompts(backend, spec)
    assert [len(of_batch) for of_batch in cell] == [3, 3, 3]
    flat = [ids for of_batch in cell for ids in of_batch]
    text = "\n\n".join(load_text(name).raw for name in workloads.BUILTIN)
    for ids in flat:
        assert len(ids) == 64
        assert ids[0] == backend.describe().bos
        # A slice may begin and end inside a character.
        inner = b"".join(backend.piece_bytes(int(i)) for i in ids[1:]).decode("utf-8", "ignore")
        assert len(inner) > 20
        assert inner in text
    assert len({ids.tobytes() for ids in flat}) == 9


def test_prompts_do_not_depend_on_weights(backend: LlamaCppBackend, tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "q8.gguf", kind=gguf.GGMLQuantizationType.Q8_0, metadata={"tokenizer.ggml.add_bos_token": True}
    )
    spec = BenchSpec([MODEL], prompt_tokens=[32], batch=[2])
    with opened(tmp_path / "q8.gguf", Capacity(n_ctx=8), threads=1) as other:
        a, b = workloads.prompts(backend, spec), workloads.prompts(other, spec)
    assert workloads.ids_sha256([i for x in a for i in x]) == workloads.ids_sha256([i for x in b for i in x])


def test_the_prompt_of_the_user(backend: LlamaCppBackend) -> None:
    whole = workloads.prompts(backend, BenchSpec([MODEL], prompt="A cat, a hat. <|im_end|>", repeats=2, warmup=0))
    assert backend.decode(whole[0][0][1:]) == "A cat, a hat. <|im_end|>"
    assert whole[0][0][-1] == 2, "a control token that is written out counts as one"
    assert (whole[0][0] == whole[1][0]).all()
    sliced = workloads.prompts(backend, BenchSpec([MODEL], prompt="one two three four", prompt_tokens=[5], repeats=4))
    assert {len(ids) for of_batch in sliced for ids in of_batch} == {5}
    assert len({ids.tobytes() for of_batch in sliced for ids in of_batch}) == 5
    with pytest.raises(UsageError, match="512 tokens"):
        workloads.prompts(backend, BenchSpec([MODEL], prompt="too short", prompt_tokens=[512]))


def test_ids_hash_tells_lists_apart() -> None:
    hashes = {workloads.ids_sha256(ids) for ids in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[1, 2, 4]], [])}
    assert len(hashes) == 5
    assert workloads.ids_sha256([[1, 2]]) == workloads.ids_sha256([np.array([1, 2], np.int32)])


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=6))
def test_sizes_of_a_comma_list(sizes: list[int]) -> None:
    assert parse_sizes(" , ".join(map(str, sizes)), "--batch") == list(dict.fromkeys(sizes))


@pytest.mark.parametrize("text", ["", "128,", "0", "-1", "1.5", "128;256", "many", "²", "1,,2"])
def test_wrong_sizes_name_the_option(text: str) -> None:
    with pytest.raises(UsageError, match="--batch") as caught:
        parse_sizes(text, "--batch")
    assert "--batch 128,512" in caught.value.hint


def test_prompt_text(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("Größe\n", encoding="utf-8")
    assert prompt_text("plain @ text") == "plain @ text"
    assert prompt_text(f"@{tmp_path / 'p.txt'}") == "Größe\n"
    with pytest.raises(QuantlabError, match="missing"):
        prompt_text(f"@{tmp_path / 'missing.txt'}")
    (tmp_path / "latin.txt").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(QuantlabError, match="UTF-8"):
        prompt_text(f"@{tmp_path / 'latin.txt'}")


@pytest.mark.parametrize(
    "wrong",
    [
        {"models": []},
        {"prompt_tokens": []},
        {"prompt_tokens": [128, 0]},
        {"batch": []},
        {"batch": [-1]},
        {"new_tokens": 0},
        {"repeats": 0},
        {"warmup": -1},
        {"seed": -1},
        {"threads": 0},
        {"prompt": " \n"},
    ],
    ids=str,
)
def test_impossible_specs_are_wrong_use(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        BenchSpec(**{"models": [MODEL], **wrong})  # type: ignore[arg-type]


def test_cells() -> None:
    def sizes(**options: object) -> list[tuple[list[int] | None, list[int]]]:
        return [(c.prompt_tokens, c.batch) for c in BenchSpec([MODEL], **options).cells()]  # type: ignore[arg-type]

    assert sizes(prompt_tokens=[128, 512], batch=[1, 4]) == [
        ([128], [1]), ([128], [4]), ([512], [1]), ([512], [4]),
    ]  # fmt: skip
    assert sizes() == [([512], [1])]
    assert sizes(prompt="text", batch=[2]) == [(None, [2])]
    assert sizes(prompt="text", prompt_tokens=[3]) == [([3], [1])]
    only = BenchSpec([MODEL], prompt_tokens=[3])
    assert list(only.cells()) == [only]
