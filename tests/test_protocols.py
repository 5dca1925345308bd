from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantlab.core.corpus import Corpus, load_text
from quantlab.core.errors import QuantlabError, UsageError
from quantlab.core.model import ModelFile
from quantlab.evaluate.protocols import Protocol
from quantlab.evaluate.spec import PplSpec
from tests.bigram import LETTERS, BigramBackend, random_table

MODEL = ModelFile("tiny.gguf", "tiny", "tiny.gguf", "0" * 64)
NAMES = ("hf", "llama.cpp", "stride", "seed")


def protocol(name, **given) -> Protocol:
    return Protocol.of(PplSpec(model=MODEL, protocol=name, **given))


def corpus(raw: str) -> Corpus:
    return Corpus("a text", "0" * 64, False, documents=[raw])


def scored(p: Protocol, ids, bos=None) -> list[list[int]]:
    """The scored tokens of each window."""
    return p.windows(np.asarray(ids, np.int32), bos)[:, p.first_scored :].tolist()


def test_sizes_when_none_are_given():
    sizes = {name: (p.n_ctx, p.stride) for name in NAMES for p in [protocol(name)]}
    assert sizes == {"hf": (2048, 2048), "llama.cpp": (512, 512), "stride": (2048, 1024), "seed": (2048, 2048)}


def test_hf_scores_all_but_the_first_token_of_each_window():
    p = protocol("hf", n_ctx=4)
    assert p.windows(np.arange(10, dtype=np.int32), None).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert scored(p, range(10)) == [[1, 2, 3], [5, 6, 7]]


def test_llama_cpp_scores_what_the_second_half_predicts():
    # llama-perplexity takes the predictions of positions n_ctx/2 .. n_ctx-2, so the tokens one later.
    assert scored(protocol("llama.cpp", n_ctx=8), range(20)) == [[5, 6, 7], [13, 14, 15]]
    assert scored(protocol("llama.cpp", n_ctx=7), range(14)) == [[4, 5, 6], [11, 12, 13]]
    p = protocol("llama.cpp")
    assert p.n_ctx - p.first_scored == 255


def test_llama_cpp_puts_bos_on_each_window():
    ids = np.arange(8, dtype=np.int32)
    p = protocol("llama.cpp", n_ctx=4)
    assert p.windows(ids, 99).tolist() == [[99, 1, 2, 3], [99, 5, 6, 7]]
    assert p.windows(ids, None).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ids.tolist() == list(range(8)), "the ids of the text itself stay as they are"


@pytest.mark.parametrize("name", ["hf", "stride", "seed"])
def test_other_protocols_leave_bos_to_the_tokenizer(name):
    windows = protocol(name, n_ctx=4).windows(np.arange(8, dtype=np.int32), 99)
    assert 99 not in windows


def test_stride_scores_the_last_tokens_of_overlapping_windows():
    p = protocol("stride", n_ctx=8, stride=3)
    windows = p.windows(np.arange(16, dtype=np.int32), None)
    assert windows[:, 0].tolist() == [0, 3, 6]
    assert scored(p, range(16)) == [[5, 6, 7], [8, 9, 10], [11, 12, 13]]


@given(n_ctx=st.integers(3, 20), data=st.data(), n=st.integers(20, 90))
def test_stride_scores_no_token_twice_and_leaves_no_gap(n_ctx, data, n):
    stride = data.draw(st.integers(1, n_ctx - 1))
    tokens = [t for window in scored(protocol("stride", n_ctx=n_ctx, stride=stride), range(n)) for t in window]
    assert tokens == list(range(n_ctx - stride, n_ctx - stride + len(tokens)))
    assert 0 <= n - 1 - tokens[-1] < stride


def test_a_stride_of_a_whole_window_is_hf():
    assert scored(protocol("stride", n_ctx=5, stride=5), range(17)) == scored(protocol("hf", n_ctx=5), range(17))


def test_seed_is_one_window_of_what_there_is():
    p = protocol("seed", n_ctx=6)
    assert scored(p, range(20)) == [[1, 2, 3, 4, 5]]
    assert scored(p, range(4)) == [[1, 2, 3]]


def test_text_forms():
    raw = " \n = Title = \n \n First line . \n Second . \n"
    assert protocol("llama.cpp").text(corpus(raw)) == raw[:-1]
    assert protocol("llama.cpp").text(corpus(raw + "\n")) == raw, "one line break is dropped, no more"
    joined = "\n\n".join(["", " = Title = \n", "", " First line . \n", " Second . \n"])
    assert protocol("hf").text(corpus(raw)) == joined
    assert protocol("stride").text(corpus(raw)) == joined
    assert protocol("seed").text(corpus("é" * 9000)) == "é" * 8000


def test_text_forms_of_wikitext(wiki_test: Path):
    text = load_text(str(wiki_test), "evaluation")
    assert text.canonical
    assert len(protocol("hf").text(text)) == 1_294_336
    assert protocol("seed").text(text) == protocol("hf").text(text)[:8000]
    assert len(protocol("llama.cpp").text(text).encode()) == 1_290_590 - 1


def test_control_tokens_in_a_text_are_read_as_hf_tokenizers_do():
    backend = BigramBackend(random_table(), adds_bos=True)
    assert protocol("hf").encode(backend, "a<s>b")[0].tolist() == [0, 1, 0, 2]
    with pytest.raises(ValueError, match="substring not found"):
        protocol("llama.cpp").encode(backend, "a<s>b")  # this tokenizer has no letter `<`
    assert protocol("llama.cpp").encode(backend, "ab")[0].tolist() == [0, 1, 2]


@given(
    lines=st.lists(st.text(LETTERS[:-2] + " ", max_size=60), min_size=1, max_size=80),
    limit=st.integers(1, 6),
    name=st.sampled_from(["hf", "llama.cpp", "stride"]),
)
def test_a_limit_changes_no_token(lines, limit, name):
    backend, text = BigramBackend(random_table()), "\n".join(lines)
    everything, whole = protocol(name, n_ctx=16).encode(backend, text)
    assert whole
    p = protocol(name, n_ctx=16, limit=limit)
    ids, whole = p.encode(backend, text)
    assert ids.tolist() == everything[: len(ids)].tolist()
    assert whole == (len(ids) == len(everything))
    if not whole:
        assert len(p.windows(ids, None)) == limit


def test_a_limit_spares_the_rest_of_the_text():
    backend = BigramBackend(random_table())
    protocol("hf", n_ctx=16, limit=1).encode(backend, "abcd efgh\n" * 1000)
    assert sum(map(len, backend.encoded)) < 1000


@pytest.mark.parametrize("name", ["hf", "llama.cpp"])
def test_a_limit_changes_no_token_of_a_real_tokenizer(name, stories: Path, wiki_test: Path, tmp_path: Path):
    from quantlab.quantize.convert import convert
    from quantlab.runtime.backend import Capacity
    from quantlab.runtime.llamacpp import opened

    convert(stories, tmp_path / "stories.gguf", outtype="F32")
    text = protocol(name).text(load_text(str(wiki_test), "evaluation"))[:200_000]
    with opened(tmp_path / "stories.gguf", Capacity(n_ctx=32, n_batch=32), device="cpu", threads=1) as backend:
        everything, _ = protocol(name).encode(backend, text)
        for limit in (1, 2, 3, 7, 12, 20):
            ids, whole = protocol(name, limit=limit, n_ctx=301).encode(backend, text)
            assert not whole
            assert len(ids) == limit * 301
            np.testing.assert_array_equal(ids, everything[: len(ids)])


@pytest.mark.parametrize("name", ["hf", "llama.cpp", "stride"])
def test_too_short_a_text_says_how_many_tokens_it_has(name):
    with pytest.raises(QuantlabError, match=r"the text has 7 tokens, one window .* has 9") as caught:
        protocol(name, n_ctx=9).windows(np.arange(7, dtype=np.int32), None)
    assert "--n-ctx 7" in caught.value.hint
    assert not isinstance(caught.value, UsageError)


def test_a_text_of_one_token_has_nothing_to_score():
    for name in NAMES:
        with pytest.raises(QuantlabError, match="the text has 1 tokens"):
            protocol(name).windows(np.zeros(1, np.int32), None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"protocol": "hf", "n_ctx": 2}, "window of 2 tokens"),
        ({"protocol": "llama.cpp", "n_ctx": 0}, "window of 0 tokens"),
        ({"protocol": "hf", "limit": 0}, "limit of 0 windows"),
        ({"protocol": "hf", "stride": 512}, "protocol `hf` has no stride"),
        ({"protocol": "stride", "stride": 0}, "stride of 0 tokens"),
        ({"protocol": "stride", "n_ctx": 64, "stride": 65}, "stride of 65 tokens; windows have 64"),
    ],
)
def test_sizes_that_cannot_be_are_wrong_use(given, message):
    with pytest.raises(UsageError, match=message) as caught:
        Protocol.of(PplSpec(model=MODEL, **given))
    assert caught.value.hint


def test_every_protocol_says_where_bos_stands():
    rules = {name: protocol(name).bos_rule(1) for name in NAMES}
    assert rules["llama.cpp"] == "replaces the first token of each window"
    assert rules["hf"] == rules["seed"] == rules["stride"] == "added by the tokenizer, once, before the text"
    assert all(protocol(name).bos_rule(None).startswith("none") for name in NAMES)
