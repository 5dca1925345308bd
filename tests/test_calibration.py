"""Calibration windows: proportions, packing, seeds, templates, languages."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantlab.core.corpus import Corpus
from quantlab.core.errors import QuantlabError
from quantlab.core.model import ModelFile
from quantlab.quantize.calibration import (
    Calibration,
    Template,
    _counts,
    build,
    language_notices,
    load_parts,
    speaks_chinese,
)
from quantlab.quantize.spec import QuantizeSpec

LENGTH = 16
TURNS = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "a longer answer to it"}]


def text_of(first: int, n: int) -> Corpus:
    """A text whose tokens, one a word, count up from `first`."""
    text = " ".join(str(first + i) for i in range(n))
    return Corpus(f"from{first}", "0" * 64, False, [text])


def encode(text: str, special: bool) -> list[int]:
    return [int(word) for word in text.split()]


def built(parts: list[tuple[Corpus, float]], **options: object) -> Calibration:
    given = {"samples": None, "length": LENGTH, "seed": 0, "bos": None, "template": None, **options}
    return build(parts, encode, **given)  # type: ignore[arg-type]


def test_windows_are_runs_of_the_text_without_padding_or_repetition() -> None:
    windows = built([(text_of(1000, 10 * LENGTH + 5), 1.0)]).windows
    assert windows.dtype == np.int32 and windows.shape == (10, LENGTH)
    assert (np.diff(windows, axis=1) == 1).all()
    assert sorted(windows[:, 0].tolist()) == [1000 + LENGTH * i for i in range(10)]


def test_texts_are_mixed_by_weight() -> None:
    parts = [(text_of(0, 40 * LENGTH), 3.0), (text_of(100_000, 40 * LENGTH), 1.0)]
    calibration = built(parts, samples=20)
    first = (calibration.windows[:, 0] < 100_000).sum()
    assert (first, len(calibration.windows)) == (15, 20)
    assert [entry["samples"] for entry in calibration.record["sets"]] == [15, 5]
    assert calibration.notices == []


def test_a_short_text_bounds_the_mix_and_is_told() -> None:
    parts = [(text_of(0, 100 * LENGTH), 1.0), (text_of(100_000, 4 * LENGTH), 1.0)]
    calibration = built(parts, samples=50)
    assert [entry["samples"] for entry in calibration.record["sets"]] == [4, 4]
    assert [notice.code for notice in calibration.notices] == ["calibration-short"]
    assert "50 samples" in calibration.notices[0].message and "give 8" in calibration.notices[0].message
    assert built(parts).notices == []


def test_a_text_shorter_than_a_sample_is_refused_by_name() -> None:
    with pytest.raises(QuantlabError, match=r"`from7` gives 15 tokens, a sample needs 16"):
        built([(text_of(0, 500), 1.0), (text_of(7, LENGTH - 1), 1.0)])


def test_the_seed_draws_and_the_hash_tells() -> None:
    parts = [(text_of(0, 100 * LENGTH), 1.0)]
    a, b, c = (built(parts, samples=10, seed=seed) for seed in (1, 1, 2))
    assert (a.windows == b.windows).all() and a.record == b.record
    assert a.record["sha256"] != c.record["sha256"]
    assert sorted(a.windows[:, 0]) != sorted(c.windows[:, 0])


def test_bos_heads_every_window_where_the_model_wants_it() -> None:
    windows = built([(text_of(1000, 5 * LENGTH), 1.0)], bos=1).windows
    assert (windows[:, 0] == 1).all() and (windows[:, 1:] >= 1000).all()


def test_the_record_holds_no_text() -> None:
    record = built([(text_of(1000, 5 * LENGTH), 1.0)]).record
    assert (
        "1003"
        not in msgspec.json.encode(record | {"sha256": "", "sets": [{**record["sets"][0], "sha256": ""}]}).decode()
    )


@given(
    st.lists(st.tuples(st.floats(0.1, 100), st.integers(1, 500)), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(1, 1000)),
)
def test_counts_never_ask_for_more_than_there_is(parts: list[tuple[float, int]], samples: int | None) -> None:
    weights, available = [w for w, _ in parts], [n for _, n in parts]
    counts = _counts(weights, available, samples)
    assert all(1 <= count <= n for count, n in zip(counts, available, strict=True))
    assert sum(counts) <= max(samples or 128, len(parts))


def render(template: str, conversations: int = 3) -> tuple[list[str], Calibration]:
    seen: list[str] = []

    def spy(text: str, special: bool) -> list[int]:
        seen.append(text)
        assert special
        return list(range(64))

    corpus = Corpus("chat", "0" * 64, False, [], [TURNS] * conversations)
    calibration = build(
        [(corpus, 1.0)], spy, samples=None, length=LENGTH, seed=0, bos=None, template=Template(template, "<s>", "</s>")
    )
    return seen, calibration


def test_conversations_are_rendered_by_the_models_own_template() -> None:
    [text], calibration = render(
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ eos_token }}"
    )
    assert text == "<s>[user]question[assistant]a longer answer to it</s>" * 3
    assert calibration.notices == []


def test_a_template_that_outweighs_the_conversation_is_told() -> None:
    _, calibration = render(
        "{{ 'You are a helpful assistant. ' * 9 }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert [notice.code for notice in calibration.notices] == ["template-share"]


def test_conversations_that_a_template_refuses_are_counted() -> None:
    corpus = Corpus("chat", "0" * 64, False, [], [TURNS, [{"role": "system", "content": "x"}, *TURNS]])
    template = Template(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "",
        "",
    )
    calibration = build(
        [(corpus, 1.0)], lambda *_: list(range(64)), samples=None, length=LENGTH, seed=0, bos=None, template=template
    )
    [notice] = calibration.notices
    assert notice.code == "calibration-left-out"
    assert "1 of 2 conversations" in notice.message and "no system role" in notice.message


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('never') }}", "{% for %}", "{{ messages.__class__.__mro__[1].__subclasses__() }}"]
)
def test_broken_and_hostile_templates_are_errors(template: str) -> None:
    with pytest.raises(QuantlabError, match="chat template"):
        render(template)


def spec(**options: object) -> QuantizeSpec:
    return QuantizeSpec(ModelFile("m", "m", "m", "0" * 64), "o.gguf", imatrix=True, **options)  # type: ignore[arg-type]


def test_default_texts_follow_the_model() -> None:
    assert [corpus.name for corpus, _ in load_parts(spec(), chinese=False)] == [
        "builtin_en",
        "builtin_code",
        "builtin_chat",
    ]
    assert "builtin_zh" in [corpus.name for corpus, _ in load_parts(spec(), chinese=True)]
    assert [weight for _, weight in load_parts(spec(calib=["builtin_en:2", "builtin_zh"]), chinese=False)] == [2.0, 1.0]


def test_a_chinese_model_calibrated_without_chinese_is_told() -> None:
    english = load_parts(spec(calib=["builtin_en", "builtin_code"]), chinese=True)
    [notice] = language_notices("m", english, chinese=True)
    assert notice.code == "calibration-language" and "builtin_zh" in notice.hint
    mixed = load_parts(spec(calib=["builtin_en", "builtin_zh"]), chinese=True)
    assert language_notices("m", mixed, chinese=True) == []
    assert language_notices("m", english, chinese=False) == []


def test_chinese_is_seen_in_names_and_in_byte_level_vocabularies() -> None:
    latin = ["Ġthe", "ing", "é", "½"] * 100
    chinese = ["ä½łå¥½"] * 30  # 你好 as byte-level BPE writes it
    assert not speaks_chinese("SmolLM2-135M", latin)
    assert speaks_chinese("model", latin + chinese)
    assert speaks_chinese("model", ["▁the"] * 90 + ["中国"] * 10)
    assert speaks_chinese("Qwen2.5-0.5B", [])
    assert not speaks_chinese("model", [])
