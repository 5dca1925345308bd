"""The tokenizer of a converted folder: the same ids as its tokenizer.json, special tokens and templates kept."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from quantlab.core.errors import QuantlabError
from quantlab.core.gguf_file import read_header
from quantlab.quantize.convert import convert, pretokenizers
from quantlab.quantize.convert.sentencepiece_model import read_sentencepiece
from quantlab.quantize.convert.token_check import PROBE, check_tokens, telling_lines
from quantlab.quantize.llama_model import LlamaModel
from tests.hf_folders import (
    TRAINING_TEXT,
    byte_level_tokenizer,
    sentencepiece_protobuf,
    sentencepiece_tokenizer,
    sentencepiece_vocabulary,
    write_folder,
)

CONTROL, USER_DEFINED, UNUSED, BYTE, NORMAL = 3, 4, 5, 6, 1
WRITTEN_SPECIALS = "<s>the hills</s><unk> <|end|><|eos|> <tool>call</tool> [PAD3] <0x41>"
TEXTS = [PROBE, TRAINING_TEXT, WRITTEN_SPECIALS, "", "a", "\n\n \n"]


@pytest.fixture
def gpt2_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny byte-level tokenizer has GPT-2's pre-tokenizer; only its hash cannot be known."""

    def know(tokenizer: tokenizers.Tokenizer) -> str:
        ids = str(tokenizer.encode(pretokenizers.HASHED_TEXT).ids)
        return hashlib.sha256(ids.encode()).hexdigest()

    monkeypatch.setitem(pretokenizers._NAMES, know(byte_level_tokenizer()), "gpt-2")


def byte_level_folder(folder: Path, **given: Any) -> dict[str, Any]:
    """Write and convert a folder with a byte-level tokenizer; returns the metadata."""
    tokenizer = given.pop("tokenizer", None) or byte_level_tokenizer()
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", **given.pop("tokenizer_config", {})}
    write_folder(folder, given.pop("family", "qwen3"), tokenizer=tokenizer, tokenizer_config=named, **given)
    return converted(folder)


def converted(folder: Path) -> dict[str, Any]:
    convert(folder, folder / "out.gguf", outtype="F16")
    return read_header(folder / "out.gguf").metadata


def refusal(folder: Path) -> QuantlabError:
    with pytest.raises(QuantlabError) as caught:
        convert(folder, folder / "out.gguf", outtype="F16")
    return caught.value


@pytest.mark.usefixtures("gpt2_known")
def test_byte_level_ids_are_those_of_the_folder(tmp_path: Path) -> None:
    found = byte_level_folder(tmp_path)
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert found["tokenizer.ggml.tokens"] == [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    assert [found["tokenizer.ggml.token_type"][i] for i in (0, 1, 2, 3, -1)] == [CONTROL] * 3 + [NORMAL, USER_DEFINED]
    assert found["tokenizer.ggml.bos_token_id"] == 1
    check = check_tokens(tmp_path, tmp_path / "out.gguf", TEXTS)
    assert check.n_ids > 1000
    assert (check.n_different, check.differences, check.bos, check.expected_bos) == (0, [], 0, 0)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("source", ["tokenizer.json", "both"])
def test_sentencepiece_ids_are_those_of_the_folder(tmp_path: Path, source: str, prefix: bool) -> None:
    write_folder(tmp_path, "llama", tokenizer=sentencepiece_tokenizer(prefix=prefix))
    if source == "both":
        (tmp_path / "tokenizer.model").write_bytes(sentencepiece_protobuf(prefix=prefix))
    found = converted(tmp_path)
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("llama", "default")
    assert found["tokenizer.ggml.tokens"] == sentencepiece_vocabulary()[0]
    assert found["tokenizer.ggml.token_type"][:5] == [CONTROL] * 3 + [BYTE] * 2
    assert found.get("tokenizer.ggml.add_space_prefix", True) is prefix
    check = check_tokens(tmp_path, tmp_path / "out.gguf", TEXTS)
    assert check.n_ids > 1000
    assert (check.n_different, check.differences, check.bos, check.expected_bos) == (0, [], 1, 1)


def test_a_folder_with_tokenizer_model_alone(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    with_json = converted(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_protobuf())
    alone = converted(tmp_path)
    assert alone["tokenizer.ggml.tokens"] == with_json["tokenizer.ggml.tokens"]
    assert alone["tokenizer.ggml.token_type"][:5] == [2, CONTROL, CONTROL, BYTE, BYTE]
    expected = sentencepiece_tokenizer().encode(PROBE).ids
    with LlamaModel(tmp_path / "out.gguf") as model:
        assert model.encode(PROBE, special=True, add_special=True) == expected
    check = check_tokens(tmp_path, tmp_path / "out.gguf", TEXTS)
    assert (check.n_ids, check.differences) == (0, [])


def test_the_tokenizer_of_stories(stories: Path, tmp_path: Path) -> None:
    convert(stories, tmp_path / "s.gguf", outtype="F32")
    check = check_tokens(stories, tmp_path / "s.gguf", [PROBE, "Once upon a time there was a cat."])
    assert (check.n_different, check.bos, check.expected_bos) == (0, 1, 1)


def test_wikitext_in_the_tokens_of_stories(stories: Path, wiki_test: Path, tmp_path: Path) -> None:
    convert(stories, tmp_path / "s.gguf", outtype="F32")
    check = check_tokens(stories, tmp_path / "s.gguf", [wiki_test.read_text(encoding="utf-8")[:200_000]])
    assert check.n_ids > 100_000
    assert check.n_different == 0


def test_an_unknown_pre_tokenizer_is_refused_with_its_hash(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama", tokenizer=byte_level_tokenizer())
    error = refusal(tmp_path)
    assert re.search("not known here \\(hash [0-9a-f]{64}\\)", error.message)
    assert "--converter" in error.hint


@pytest.mark.usefixtures("gpt2_known")
def test_every_known_pre_tokenizer_is_one_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path, "qwen3", tokenizer=byte_level_tokenizer())
    for name in sorted(set(pretokenizers._NAMES.values())):
        monkeypatch.setattr("quantlab.quantize.convert.vocabulary.pre_tokenizer", lambda _, name=name: name)
        assert converted(tmp_path)["tokenizer.ggml.pre"] == name
        with LlamaModel(tmp_path / "out.gguf") as model:
            assert model.encode("the hills")


@pytest.mark.usefixtures("gpt2_known")
def test_rows_without_a_token_are_padded(tmp_path: Path) -> None:
    n = byte_level_tokenizer().get_vocab_size()
    found = byte_level_folder(tmp_path, vocab_size=n + 5)
    assert found["tokenizer.ggml.tokens"][n:] == [f"[PAD{i}]" for i in range(n, n + 5)]
    assert found["tokenizer.ggml.token_type"][n:] == [UNUSED] * 5


def test_a_tokenizer_larger_than_the_embedding(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer()
    n = tokenizer.get_vocab_size()
    # An added token without a row is left out, as a pad token that no weight belongs to.
    tokenizer.add_special_tokens(["<pad>"])
    write_folder(tmp_path, "llama", tokenizer=tokenizer, vocab_size=n)
    assert len(converted(tmp_path)["tokenizer.ggml.tokens"]) == n
    write_folder(tmp_path, "llama", vocab_size=n - 2)
    assert f"ids up to {n - 1}, the embedding {n - 2} rows" in refusal(tmp_path).message


@pytest.mark.usefixtures("gpt2_known")
def test_added_tokens_keep_their_kind(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([tokenizers.AddedToken("<|looks_special|>"), tokenizers.AddedToken("two▁words")])
    tokenizer.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    n = tokenizer.get_vocab_size()
    found = byte_level_folder(tmp_path, tokenizer=tokenizer)
    assert found["tokenizer.ggml.tokens"][n - 3 :] == ["<|looks_special|>", "two words", "<think>"]
    assert found["tokenizer.ggml.token_type"][n - 3 :] == [CONTROL, USER_DEFINED, USER_DEFINED]


@pytest.mark.parametrize(
    ("family", "vocab_size", "expected"), [("llama", 49152, False), ("qwen3", 49152, None), ("llama", 49153, None)]
)
@pytest.mark.usefixtures("gpt2_known")
def test_vocabularies_of_49152_add_no_bos(tmp_path: Path, family: str, vocab_size: int, expected: bool | None) -> None:
    found = byte_level_folder(tmp_path, family=family, vocab_size=vocab_size)
    assert found.get("tokenizer.ggml.add_bos_token") is expected


def test_adding_bos_and_eos_is_kept(tmp_path: Path) -> None:
    named = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True}
    write_folder(tmp_path, "llama", tokenizer_config=named)
    found = converted(tmp_path)
    assert (found["tokenizer.ggml.add_bos_token"], found["tokenizer.ggml.add_eos_token"]) == (False, True)
    check = check_tokens(tmp_path, tmp_path / "out.gguf", ["the river rises in the hills"])
    # tokenizer.json itself puts BOS and no EOS, so the two part at both ends.
    assert (check.bos, check.expected_bos, check.n_different) == (0, 1, 2)
    assert [(d.mode, d.expected, d.got) for d in check.differences] == [
        ("special", ["<s>"], []),
        ("special", [], ["</s>"]),
    ]


@pytest.mark.parametrize("place", ["config", "named", "jinja", "jinja without config"])
def test_the_chat_template_is_kept(tmp_path: Path, place: str) -> None:
    template = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
    named: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    if place == "config":
        named["chat_template"] = template
    if place == "named":
        both = [{"name": "default", "template": template}, {"name": "tool_use", "template": "tools"}]
        named["chat_template"] = both
    write_folder(tmp_path, "llama", tokenizer_config=named)
    if place.startswith("jinja"):
        (tmp_path / "chat_template.jinja").write_text(template)
    if place == "jinja without config":
        (tmp_path / "tokenizer_config.json").unlink()
    found = converted(tmp_path)
    assert found["tokenizer.chat_template"] == template
    if place == "named":
        assert found["tokenizer.chat_template.tool_use"] == "tools"
    with LlamaModel(tmp_path / "out.gguf") as model:
        assert model.chat_template == template


def test_tables_that_make_llama_cpp_abort_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    twice = [*described["added_tokens"], {"id": 300, "content": "</s>", "special": True}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described | {"added_tokens": twice}))
    assert "tokens of the same text: `</s>`" in refusal(tmp_path).message
    vocab = {piece.replace("<0x7F>", "other"): i for piece, i in described["model"]["vocab"].items()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described | {"model": described["model"] | {"vocab": vocab}}))
    assert "256 byte tokens" in refusal(tmp_path).message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "Unigram", "vocab": []}}, "no counterpart of the model 'Unigram'"),
        ({"model": {"type": "BPE", "byte_fallback": True}}, "is damaged: KeyError('merges')"),
        ({"normalizer": [1]}, "is damaged"),
        ({"added_tokens": [{"id": "x"}]}, "is damaged"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_folder(tmp_path, "llama")
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(described | change))
    assert message in refusal(tmp_path).message


def test_a_byte_level_tokenizer_that_does_not_load(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama", tokenizer=byte_level_tokenizer())
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["model"]["merges"] = [["no", "such"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    assert "tokenizer.json` is damaged" in refusal(tmp_path).message
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert "is no JSON object" in refusal(tmp_path).message


def test_reading_tokenizer_model(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    pieces, n_fixed = sentencepiece_vocabulary()
    path.write_bytes(sentencepiece_protobuf(prefix=False))
    model = read_sentencepiece(path)
    assert (model.pieces, model.adds_space_prefix) == (pieces, False)
    assert model.scores[n_fixed : n_fixed + 2] == [0.0, -1.0]
    path.write_bytes(sentencepiece_protobuf(kind=1))
    with pytest.raises(QuantlabError, match="another kind than BPE"):
        read_sentencepiece(path)
    whole = sentencepiece_protobuf()
    for damaged in (whole[:-20], b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"IQ== 0\nIg== 1\n", b"\x08"):
        path.write_bytes(damaged)
        with pytest.raises(QuantlabError, match="SentencePiece model"):
            read_sentencepiece(path)


@pytest.mark.usefixtures("gpt2_known")
def test_differences_are_found_where_they_are(tmp_path: Path) -> None:
    byte_level_folder(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    split = next(merge for merge in described["model"]["merges"] if "".join(merge) == "Ġhills")
    described["model"]["merges"].remove(split)
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    check = check_tokens(tmp_path, tmp_path / "out.gguf", ["the hills and the river and the hills"])
    assert check.n_different == 8  # two ids, twice in each mode
    first, second = check.differences[:2]
    assert (first.mode, first.text, first.expected, first.got) == ("plain", 0, split, ["Ġhills"])
    assert "hills" in first.around
    assert second.position > first.position


def test_ids_that_never_agree_again_all_count(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    converted(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    pieces = [piece for piece in described["model"]["vocab"] if not piece.startswith("<")]
    ids = [described["model"]["vocab"][piece] for piece in pieces]
    described["model"]["vocab"].update(zip(pieces, [*ids[1:], ids[0]], strict=True))
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    check = check_tokens(tmp_path, tmp_path / "out.gguf", [TRAINING_TEXT])
    assert check.n_different > 0.9 * check.n_ids
    assert all(len(difference.expected) < 10 and len(difference.around) < 200 for difference in check.differences)


@given(st.lists(st.text(max_size=9), max_size=20))
def test_telling_lines_hold_every_character(lines: list[str]) -> None:
    text = "\n".join(lines)
    told = telling_lines(text)
    assert set(told) == set(text)
    # Each of them had to be taken.
    seen: set[str] = set()
    for line in told.splitlines(keepends=True):
        assert set(line) - seen
        seen |= set(line)


def test_telling_lines_of_wikitext(wiki_test: Path) -> None:
    text = wiki_test.read_text(encoding="utf-8")
    told = telling_lines(text)
    # HF tokenizers and llama.cpp are known to part over it.
    assert "½" in told and "½" not in text[: len(told)]
    assert len(told) < 0.06 * len(text)


def test_the_probe_is_of_many_scripts() -> None:
    scripts = (
        "Größe",
        "Холодный",
        "φεγγάρι",
        "שלום",
        "صباح",
        "नदी",
        "แมว",
        "今天",
        "雨",
        "하늘",
        "😀",
        "e\u0301",
        "\u200b",
    )
    assert all(script in PROBE for script in scripts)
    assert "\t" in PROBE and "\n\n\n" in PROBE and "½" in PROBE


@pytest.mark.parametrize(("scheme", "adds"), [("always", True), ("first", True), ("never", False)])
def test_the_space_before_a_text_as_metaspace_says_it(tmp_path: Path, scheme: str, adds: bool) -> None:
    tokenizer = sentencepiece_tokenizer()
    tokenizer.normalizer = tokenizers.normalizers.Sequence([])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    write_folder(tmp_path, "llama", tokenizer=tokenizer)
    assert converted(tmp_path).get("tokenizer.ggml.add_space_prefix", True) is adds
    assert check_tokens(tmp_path, tmp_path / "out.gguf", ["the hills", "a  b"]).n_different == 0
    named = {"bos_token": "<s>", "eos_token": "</s>", "add_prefix_space": not adds}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert converted(tmp_path)["tokenizer.ggml.add_space_prefix"] is not adds


def test_added_tokens_of_older_versions_of_transformers(tmp_path: Path) -> None:
    n = sentencepiece_tokenizer().get_vocab_size()
    added = {str(n + 1): {"content": "<tool>", "special": False}, str(n + 2): {"content": "<end>", "special": True}}
    write_folder(tmp_path, "phi3", vocab_size=n + 4, tokenizer_config={"added_tokens_decoder": added})
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_protobuf())
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<old>": n, "<too far>": n + 10}))
    found = converted(tmp_path)
    assert found["tokenizer.ggml.tokens"][n:] == ["<old>", "<tool>", "<end>", f"[PAD{n + 3}]"]
    assert found["tokenizer.ggml.token_type"][n:] == [USER_DEFINED, USER_DEFINED, CONTROL, UNUSED]
