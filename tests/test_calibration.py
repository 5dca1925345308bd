"""Calibration windows: proportions, packing, seeds, templates, languages."""

from __future__ import annotations

from pathlib import Path

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
    load_parts,
    of_tokenizer,
)
from quantlab.quantize.chinese import language_notices, speaks_chinese
from quantlab.quantize.spec import QuantizeSpec
from quantlab.quantize.torch_work import Samples
from tests.hf_folders import TRAINING_TEXT, sentencepiece_tokenizer, write_folder

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


def render(template: str, conversations: int = 1) -> tuple[list[str], Calibration]:
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
    assert text == "<s>[user]question[assistant]a longer answer to it</s>"
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


LETTERS = "".join(chr(0x100 + i) for i in range(48))
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def masked(template: str, *conversations: list[dict[str, str]]) -> tuple[str, Calibration]:
    """A build in which a character is a token; returns the characters whose loss counts."""
    corpus = Corpus("chat", "0" * 64, False, [], list(conversations))
    calibration = build(
        [(corpus, 1.0)],
        lambda text, _: [ord(c) for c in text],
        samples=None,
        length=16,
        seed=0,
        bos=None,
        template=Template(template, "", ""),
        offsets=lambda text: [(i, i + 1) for i in range(len(text))],
    )
    chosen = zip(calibration.windows.ravel(), calibration.mask.ravel(), strict=True)
    return "".join(chr(token) for token, counts in chosen if counts), calibration


def test_only_what_the_assistant_says_counts_in_the_loss() -> None:
    turns = [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "question"},
        {"role": "assistant", "content": "ABCDEFG"}, {"role": "user", "content": "again"},
        {"role": "assistant", "content": "HIJKL" + "M" * 40},
    ]  # fmt: skip
    said, calibration = masked(CHATML, turns)
    # Windows come in a drawn order.
    assert set(said) <= set("ABCDEFGHIJKLM<end>")
    assert said.count("M") > 20
    assert 0 < calibration.record["loss_tokens"] == len(said) < calibration.windows.size
    assert calibration.mask.shape == calibration.windows.shape


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if loop.last %}{{ m.content }}{% else %}x{% endif %}{% endfor %}" + "y" * 16,
        "{% if messages|length < 2 %}{{ raise_exception('short') }}{% endif %}{{ messages[-1].content * 4 }}",
    ],
    ids=["rewrites earlier turns", "refuses a part"],
)
def test_where_turns_cannot_be_told_apart_all_counts(template: str) -> None:
    _, calibration = masked(template, TURNS)
    assert calibration.mask.all()
    assert "loss_tokens" not in calibration.record
    assert "calibration-mask" in {notice.code for notice in calibration.notices}


def test_answers_are_found_where_a_template_drops_something_of_earlier_turns() -> None:
    # As qwen3's: only the last answer has its thoughts.
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}(hm){% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}<end>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    turns = [*TURNS, {"role": "user", "content": "and now?"}, {"role": "assistant", "content": LETTERS}]
    said, calibration = masked(template, turns)
    assert set(said) <= set("a longer answer to it" + LETTERS)
    assert len(set(said) & set(LETTERS)) > 30
    assert "calibration-mask" not in {notice.code for notice in calibration.notices}


def test_windows_without_an_answer_are_left_out() -> None:
    user = "".join(chr(0x400 + i) for i in range(70))
    said, calibration = masked(CHATML, [{"role": "user", "content": user}, {"role": "assistant", "content": LETTERS}])
    assert calibration.mask.any(axis=1).all()
    assert len(set(said) & set(LETTERS)) > 30
    assert "calibration-left-out" in {notice.code for notice in calibration.notices}
    with pytest.raises(QuantlabError, match="anything new or an answer"):
        masked(CHATML, [{"role": "user", "content": user}, {"role": "assistant", "content": ""}])


def test_equal_windows_are_taken_once_also_of_two_texts() -> None:
    parts = [(text_of(0, 4 * LENGTH), 1.0), (text_of(2 * LENGTH, 8 * LENGTH), 1.0)]
    calibration = built(parts, samples=None)
    firsts = calibration.windows[:, 0].tolist()
    assert len(firsts) == len(set(firsts)) == 2 * 4
    [notice] = calibration.notices
    assert notice.code == "calibration-duplicates"
    assert "2 windows" in notice.message


@pytest.mark.parametrize("bos", [True, False])
def test_windows_in_the_ids_of_a_transformers_tokenizer(bos: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template, "model_max_length": 32}
    tokenizer = sentencepiece_tokenizer(bos=bos)
    write_folder(tmp_path / "m", "llama", model_type="llama", tokenizer=tokenizer, tokenizer_config=config)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    docs = Corpus("docs", "0" * 64, False, [TRAINING_TEXT + str(i) for i in range(9)])
    answer = "the wind turns the mill and the kettle sings " * 3
    chat = Corpus(
        "chat", "1" * 64, False, [], [[TURNS[0], {"role": "assistant", "content": f"{answer}{i}"}] for i in range(9)]
    )
    drawn = of_tokenizer(Samples([(docs, 1.0), (chat, 1.0)], 8, 32, 0), loaded)
    assert drawn.windows.shape == drawn.mask.shape == (8, 32)
    assert (drawn.windows[:, 0] == loaded.bos_token_id).all() or not bos
    assert loaded.model_max_length == 32
    plain = drawn.mask.all(axis=1)
    assert plain.sum() >= 4
    said = loaded.decode(drawn.windows[~plain][drawn.mask[~plain] > 0])
    assert "kettle" in said
    assert "question" not in said
    assert "question" in loaded.decode(drawn.windows[~plain].ravel())


def test_repeated_texts_are_taken_once_and_told() -> None:
    texts = ["one text of some length", "another text, longer", "one text of some length"]
    corpus = Corpus("docs", "0" * 64, False, texts)
    seen: list[str] = []

    def encode(text: str, _: bool) -> list[int]:
        seen.append(text)
        return list(range(64))

    calibration = build([(corpus, 1.0)], encode, samples=None, length=16, seed=0, bos=None, template=None)
    assert seen[0].count("one text") == 1
    assert [notice.code for notice in calibration.notices] == ["calibration-duplicates"]
