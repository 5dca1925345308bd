"""Texts: cards, forms of WikiText, what is canonical, what must not calibrate, and life without a network."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantlab.core import corpus as module
from quantlab.core.corpus import Builtin, Hub, cards, data_folder, load_text, raw_of, rows_of
from quantlab.core.errors import QuantlabError, UsageError

WIKI = " \n = Some Heading = \n \n Text of an article with 3 @-@ 4 marks . \n \n"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data folder, no cache, no Hub: what the machine has must not matter."""
    monkeypatch.delenv("QUANTLAB_DATA", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("QUANTLAB_CACHE", str(tmp_path / "cache"))


class Source:
    """Stands for the Hub: counts how often it is asked."""

    def __init__(self, rows: list[Any], column: str = "text", *, error: Exception | None = None) -> None:
        self.rows, self.column, self.error, self.asked = rows, column, error, 0

    def load_dataset(self, *_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        return iter({self.column: row} for row in self.rows)

    def dataset_info(self, *_: Any, **__: Any) -> None:
        self.asked += 1
        if self.error:
            raise self.error


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    def place(source: Source) -> Source:
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=source.load_dataset))
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: source)
        return source

    return place


def test_every_card_is_sound_and_its_own_text_is_what_it_says() -> None:
    known = cards()
    assert {"wikitext2", "c4", "zh_wiki", "builtin_en", "builtin_zh", "builtin_code", "builtin_chat"} <= set(known)
    for card in known.values():
        assert card.licence and card.source and card.description
        if isinstance(card.loader, Builtin):
            content = (data_folder() / card.loader.file).read_bytes()
            assert (hashlib.sha256(content).hexdigest(), len(content)) == (card.loader.sha256, card.loader.bytes)
            assert len(content) >= 20_000
        else:
            assert isinstance(card.loader, Hub)
            assert card.loader.split_calibration or card.loader.split_evaluation


def test_builtin_texts_load_without_anything_else() -> None:
    english = load_text("builtin_en")
    assert english.canonical and english.documents == [english.raw]
    chat = load_text("builtin_chat")
    assert len(chat.conversations) > 20 and not chat.documents
    assert {m["role"] for c in chat.conversations for m in c} >= {"user", "assistant"}


@given(st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]))))
def test_rows_give_the_raw_file_again(lines: list[str]) -> None:
    # In WikiText a blank line holds one blank.
    raw = "".join(f"{line if line.strip() else ' '}\n" for line in lines)
    assert raw_of(rows_of(raw)) == raw


def test_rows_are_the_hub_form() -> None:
    assert rows_of(" \n = A = \n \n b \n") == ["", " = A = \n", "", " b \n"]
    assert rows_of("a\nb") == ["a\n", "b"]


def test_wikitext_is_canonical_by_its_hash_alone(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shared / "data" / "text"
    monkeypatch.setenv("QUANTLAB_DATA", str(folder))
    test = load_text("wikitext2", "evaluation")
    assert test.canonical and test.name == "wikitext2" and len(test.raw) == 1_288_556
    assert test.sha256 == "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"
    # The count that the published protocol works with.
    assert len("\n\n".join(test.rows)) == 1_294_336
    assert raw_of(test.rows) == test.raw
    by_path = load_text(str(folder / "wiki.test.raw"), "evaluation")
    assert (by_path.name, by_path.canonical) == ("wikitext2", True)
    assert len(load_text("wikitext2").raw) == 1_144_748


def test_the_test_file_does_not_calibrate(shared: Path, tmp_path: Path) -> None:
    copy = tmp_path / "my_corpus.txt"
    shutil.copy(shared / "data" / "text" / "wiki.test.raw", copy)
    with pytest.raises(UsageError, match="evaluation text"):
        load_text(str(copy))
    with pytest.raises(UsageError, match="evaluation text"):
        load_text("builtin_eval")


def test_evaluating_on_a_calibration_text_is_told(tmp_path: Path) -> None:
    assert [note.code for note in load_text("builtin_en", "evaluation").notes] == ["calibration-text"]
    copy = tmp_path / "mine.txt"
    shutil.copy(data_folder() / "builtin_en.txt", copy)
    assert [note.code for note in load_text(str(copy), "evaluation").notes] == ["calibration-text"]
    assert load_text(str(copy)).notes == []


@pytest.mark.parametrize(
    ("name", "text", "marked"),
    [
        ("wiki.test.raw", "Nothing of the kind.\n", True),
        ("wikitext-2-raw-v1-test.txt", "Nothing.\n", True),
        ("data.txt", WIKI * 3, True),
        ("wikipedia_article.txt", "Plain text.\n", False),
        ("notes.txt", "Plain text, 3 - 4 lines.\n", False),
    ],
)
def test_a_stand_in_for_wikitext_is_used_and_named_so(name: str, text: str, marked: bool, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    corpus = load_text(str(path), "evaluation")
    assert corpus.raw == text and not corpus.canonical
    assert corpus.name == (f"{name} (not canonical)" if marked else name)
    assert [note.code for note in corpus.notes] == (["not-canonical"] if marked else [])


def test_a_stand_in_in_the_data_folder_is_used_and_named_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wiki.test.raw").write_text(WIKI)
    monkeypatch.setenv("QUANTLAB_DATA", str(tmp_path))
    corpus = load_text("wikitext2", "evaluation", offline=True)
    assert corpus.name == "wikitext2 (not canonical)" and not corpus.canonical
    assert corpus.raw == WIKI
    assert [note.code for note in corpus.notes] == ["not-canonical"]


@pytest.mark.parametrize("spoil", ["part", "mixed", "spaced", "chat"])
def test_a_calibration_file_with_evaluation_text_in_it_is_refused(tmp_path: Path, spoil: str) -> None:
    """Cut out of it, mixed into other text, with other white space, as the answers of a chat."""
    evaluation, other = (load_text(name, "evaluation").raw for name in ("builtin_eval", "builtin_en"))
    part = evaluation[500 : len(evaluation) // 2]
    texts = {"part": part, "mixed": other + part, "spaced": part.replace(" ", "  ")}
    path = tmp_path / ("mine.jsonl" if spoil == "chat" else "mine.txt")
    chat = {"messages": [{"role": "user", "content": "go on"}, {"role": "assistant", "content": part}]}
    path.write_text(json.dumps(chat) if spoil == "chat" else texts[spoil], encoding="utf-8")
    with pytest.raises(UsageError, match=r"% of `mine.* is the evaluation text `builtin_eval`"):
        load_text(str(path))
    path.write_text(json.dumps({"text": other}) if spoil == "chat" else other, encoding="utf-8")
    assert load_text(str(path)).raw


def test_wikitexts_test_part_is_found_within_a_file_and_its_valid_part_is_none(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTLAB_DATA", str(shared / "data" / "text"))
    test, valid = ((shared / "data" / "text" / f"wiki.{part}.raw").read_text() for part in ("test", "valid"))
    path = tmp_path / "mine.txt"
    path.write_text(valid[:200_000] + test[50_000:80_000])
    with pytest.raises(UsageError, match=r"1[0-9]% of `mine.txt` is the evaluation text `wikitext2`"):
        load_text(str(path))
    path.write_text(valid[:-10])
    assert load_text(str(path)).raw


def test_the_evaluation_text_under_the_name_of_calibration_text_is_refused(
    wiki_test: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wiki.valid.raw").write_bytes(wiki_test.read_bytes())
    monkeypatch.setenv("QUANTLAB_DATA", str(tmp_path))
    with pytest.raises(UsageError, match="evaluation text"):
        load_text("wikitext2", "calibration", offline=True)


def test_without_network_evaluation_falls_back_and_calibration_fails(hub: Any) -> None:
    source = hub(Source([], error=ConnectionError("Name or service not known")))
    corpus = load_text("wikitext2", "evaluation")
    assert corpus.name == "builtin_eval" and [note.code for note in corpus.notes] == ["builtin-text"]
    assert "Name or service not known" in corpus.notes[0].message
    with pytest.raises(QuantlabError, match="cannot be read from the Hub") as caught:
        load_text("wikitext2")
    assert "QUANTLAB_DATA" in caught.value.hint
    assert source.asked == 2


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_offline_never_asks_the_hub(how: str, hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hub(Source(rows_of(WIKI)))
    if how == "environment":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(QuantlabError, match="the network is not to be used"):
        load_text("c4", offline=how == "argument")
    assert load_text("wikitext2", "evaluation", offline=how == "argument").name == "builtin_eval"
    assert source.asked == 0


def test_what_the_hub_gave_is_kept_for_offline_use(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    canonical = hashlib.sha256(WIKI.encode()).hexdigest()
    card = cards()["wikitext2"]
    assert isinstance(card.loader, Hub)
    loader = Hub(
        **{**{f: getattr(card.loader, f) for f in card.loader.__struct_fields__}, "local_evaluation_sha256": canonical}
    )
    changed = {
        **cards(),
        "wikitext2": type(card)(**{**{f: getattr(card, f) for f in card.__struct_fields__}, "loader": loader}),
    }
    monkeypatch.setattr(module, "cards", lambda: changed)
    source = hub(Source(rows_of(WIKI)))
    first = load_text("wikitext2", "evaluation")
    assert first.raw == WIKI and first.canonical and first.name == "wikitext2"
    assert load_text("wikitext2", "evaluation", offline=True) == first
    assert source.asked == 1


def test_conversations_of_the_hub(hub: Any) -> None:
    talk = [{"role": "user", "content": "Hi\u2028there"}, {"role": "assistant", "content": "Hello"}]
    hub(Source([talk, talk], column="messages"))
    corpus = load_text("ultrachat")
    assert corpus.conversations == [talk, talk]
    # No card states the hash of what the Hub gives.
    assert not corpus.canonical


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(QuantlabError) as caught:
        load_text("c4")
    assert "quantlab[data]" in caught.value.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no text"),
        ('{"text": " "}\n', "holds no text"),
        ('{"text": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n', "mixes"),
        ('{"text": "a"}\nnot json\n', "line 2"),
        ('{"title": "a"}\n', "line 1"),
        ('{"messages": [{"role": "user"}]}\n', "line 1"),
        ("[1]\n", "line 1"),
        ('{"text": 3}\n', "line 1"),
    ],
)
def test_a_broken_jsonl_file_names_its_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(QuantlabError, match=message):
        load_text(str(path))


def test_documents_of_a_jsonl_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    # A line separator inside a document is no end of the line.
    documents = ["one\u2028two", "three"]
    path.write_text("".join(json.dumps({"text": d}, ensure_ascii=False) + "\n" for d in documents))
    corpus = load_text(str(path))
    assert corpus.documents == documents and corpus.raw == "one\u2028two\n\nthree"


def test_a_lone_surrogate_does_not_spoil_a_text(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n')
    assert load_text(str(path)).raw == "a?b"


def test_wrong_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown evaluation text") as caught:
        load_text("wikitext", "evaluation")
    assert "`wikitext2`" in caught.value.hint
    with pytest.raises(QuantlabError, match="does not exist"):
        load_text(str(tmp_path / "missing.txt"))
    with pytest.raises(QuantlabError, match="is not a text file"):
        load_text(str(tmp_path))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(QuantlabError, match="not UTF-8"):
        load_text(str(tmp_path / "latin.txt"))
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(QuantlabError, match="holds no text"):
        load_text(str(tmp_path / "empty.txt"))
