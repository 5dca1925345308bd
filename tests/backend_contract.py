"""What every Backend must pass: subclass BackendContract and give it the two fixtures.

Results are compared as llama.cpp and GPUs allow: kernels for one token and for many round differently, so logits agree
within a small part of their spread; a control shows that another history differs by far more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quantlab.core.errors import QuantlabError
from quantlab.runtime.backend import Backend, Batch, Capacity, Logits, Request, Tokens

Open = Callable[..., Backend]

MULTILINGUAL = "Größe café naïve — 你好，世界! 123 ½ def f(x):\n\treturn x  # ok\n\n   مرحبا हिन्दी 🙂 don't"
CLOSE = 0.005
FAR = 0.3


def distance(a: Logits, b: Logits) -> float:
    """The largest difference of two arrays of logits, in standard deviations."""
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / b.std())


def batch(tokens: Sequence[int], positions: Sequence[int], seqs: Sequence[int], logits: Sequence[bool]) -> Batch:
    return Batch(
        np.array(tokens, np.int32), np.array(positions, np.int32), np.array(seqs, np.int32), np.array(logits, np.bool_)
    )


def feed(backend: Backend, seq: int, tokens: Tokens, start: int = 0) -> Logits:
    """Put tokens into a sequence in one step; returns the last token's logits."""
    return backend.forward(Batch.of(seq, tokens, start, logits="last")).copy()


class BackendContract:
    """The tests. `open_backend(**capacity)` opens the model, `open_other(**capacity)` one with other weights."""

    @pytest.fixture
    def open_backend(self) -> Open:
        raise NotImplementedError

    @pytest.fixture
    def open_other(self) -> Open:
        raise NotImplementedError

    @pytest.fixture
    def backend(self, open_backend: Open) -> Backend:
        return open_backend(n_ctx=64, n_seq=3, n_batch=48)

    @pytest.fixture
    def tokens(self, backend: Backend) -> Tokens:
        n_vocab = backend.describe().n_vocab
        return np.random.default_rng(1).integers(4, n_vocab - 4, 24, dtype=np.int32)

    # forward

    def test_one_go_equals_token_by_token(self, backend: Backend, tokens: Tokens) -> None:
        whole = backend.forward(Batch.of(0, tokens, 0, logits="all")).copy()
        assert whole.shape == (len(tokens), backend.describe().n_vocab)
        assert whole.dtype == np.float32
        assert np.isfinite(whole).all()
        single = [feed(backend, 1, tokens[i : i + 1], i) for i in range(len(tokens))]
        assert distance(np.concatenate(single), whole) < CLOSE
        assert distance(whole[1:], whole[:-1]) > FAR

    @pytest.mark.parametrize("sharing", [True, False])
    def test_sequences_of_one_step_do_not_see_each_other(
        self, open_backend: Open, tokens: Tokens, sharing: bool
    ) -> None:
        backend = open_backend(n_ctx=64, n_seq=3, n_batch=48, shared=sharing)
        parts = [tokens[:7], tokens[7:18], tokens[18:20]]
        alone = []
        for part in parts:
            alone.append(feed(backend, 0, part))
            backend.release(0)
        owners = np.repeat([2, 0, 1], [len(part) for part in parts])
        positions = np.concatenate([np.arange(len(part)) for part in parts])
        last = np.append(np.diff(owners) != 0, True)
        # Sequences interleaved token by token, each in its own order.
        order = np.argsort(positions, kind="stable")
        together = backend.forward(batch(np.concatenate(parts)[order], positions[order], owners[order], last[order]))
        expected = {2: alone[0], 0: alone[1], 1: alone[2]}
        rows = [int(seq) for seq, is_last in zip(owners[order], last[order], strict=True) if is_last]
        assert sorted(rows) == [0, 1, 2]
        for row, seq in enumerate(rows):
            assert distance(together[row : row + 1], expected[seq]) < CLOSE
        assert [backend.length(seq) for seq in (0, 1, 2)] == [11, 2, 7]

    def test_rows_of_logits_are_those_asked_for_in_order(self, backend: Backend, tokens: Tokens) -> None:
        whole = backend.forward(Batch.of(0, tokens, 0, logits="all")).copy()
        wanted = np.zeros(len(tokens), np.bool_)
        wanted[[2, 3, 11, 20]] = True
        rows = backend.forward(replace(Batch.of(1, tokens, 0, logits="none"), logits=wanted))
        assert rows.shape == (4, backend.describe().n_vocab)
        assert distance(rows, whole[wanted]) < CLOSE

    def test_a_step_without_logits_returns_no_row(self, backend: Backend, tokens: Tokens) -> None:
        assert backend.forward(Batch.of(0, tokens, 0, logits="none")).shape == (0, backend.describe().n_vocab)
        assert backend.length(0) == len(tokens)

    def test_a_step_larger_than_its_micro_batch(self, open_backend: Open, backend: Backend, tokens: Tokens) -> None:
        small = open_backend(n_ctx=64, n_seq=3, n_batch=48, n_ubatch=5)
        rows = small.forward(Batch.of(0, tokens, 0, logits="all")).copy()
        assert distance(rows, backend.forward(Batch.of(0, tokens, 0, logits="all"))) < CLOSE

    # share, truncate, release

    def test_a_shared_beginning_equals_recomputing_it(self, backend: Backend, tokens: Tokens) -> None:
        expected = feed(backend, 0, tokens)
        backend.share(0, 1, 10)
        assert backend.length(1) == 10
        assert distance(feed(backend, 1, tokens[10:], 10), expected) < CLOSE

    def test_writing_after_a_shared_beginning_leaves_its_source_alone(self, backend: Backend, tokens: Tokens) -> None:
        expected = feed(backend, 2, tokens)
        backend.release(2)
        feed(backend, 0, tokens[:20])
        backend.share(0, 1, 10)
        backend.share(0, 2, 20)
        feed(backend, 1, tokens[::-1][:14], 10)
        backend.truncate(2, 4)
        feed(backend, 2, tokens[::-1][:6], 4)
        assert distance(feed(backend, 0, tokens[20:], 20), expected) < CLOSE

    def test_a_source_may_go_and_leave_what_it_shared(self, backend: Backend, tokens: Tokens) -> None:
        expected = feed(backend, 0, tokens)
        backend.share(0, 1, 10)
        backend.release(0)
        feed(backend, 0, tokens[::-1])
        assert distance(feed(backend, 1, tokens[10:], 10), expected) < CLOSE

    def test_sharing_nothing_and_everything(self, backend: Backend, tokens: Tokens) -> None:
        feed(backend, 0, tokens)
        backend.share(0, 1, 0)
        backend.share(0, 2, len(tokens))
        assert [backend.length(seq) for seq in (0, 1, 2)] == [len(tokens), 0, len(tokens)]
        more = tokens[:1]
        assert distance(feed(backend, 2, more, len(tokens)), feed(backend, 0, more, len(tokens))) < CLOSE

    @pytest.mark.parametrize("held", [1, 10, 16, 20])
    def test_what_was_computed_twice_is_shared(self, backend: Backend, tokens: Tokens, held: int) -> None:
        expected = feed(backend, 0, tokens)
        backend.release(0)
        feed(backend, 0, tokens[:20])
        feed(backend, 1, tokens[:held])
        backend.share(0, 1, 20)
        assert backend.length(1) == 20
        # Now it needs what it had computed no more.
        feed(backend, 2, tokens[::-1])
        assert distance(feed(backend, 1, tokens[20:], 20), expected) < CLOSE
        assert distance(feed(backend, 0, tokens[20:], 20), expected) < CLOSE

    @pytest.mark.parametrize("keep", [0, 1, 9, 24])
    def test_truncate_and_continue(self, backend: Backend, tokens: Tokens, keep: int) -> None:
        feed(backend, 0, tokens)
        backend.truncate(0, keep)
        assert backend.length(0) == keep
        other = np.concatenate([tokens[:keep], tokens[::-1][:5]])
        assert distance(feed(backend, 0, other[keep:], keep), feed(backend, 1, other)) < CLOSE

    def test_a_released_sequence_begins_anew(self, backend: Backend, tokens: Tokens) -> None:
        expected = feed(backend, 0, tokens)
        feed(backend, 1, tokens[:3])
        backend.release(0)
        assert [backend.length(0), backend.length(1)] == [0, 3]
        assert distance(feed(backend, 0, tokens), expected) < CLOSE

    def test_every_sequence_holds_the_whole_context(self, open_backend: Open) -> None:
        backend = open_backend(n_ctx=200, n_seq=3, n_batch=200)
        full = np.arange(10, 210, dtype=np.int32)
        rows = [feed(backend, seq, full) for seq in (0, 1, 2)]
        assert distance(rows[2], rows[0]) < CLOSE

    # save, restore

    def test_a_saved_sequence_continues_elsewhere(self, open_backend: Open, backend: Backend, tokens: Tokens) -> None:
        feed(backend, 0, tokens[:20])
        blob = backend.save(0)
        expected = feed(backend, 0, tokens[20:], 20)
        backend.restore(2, blob)
        assert backend.length(2) == 20
        assert distance(feed(backend, 2, tokens[20:], 20), expected) < CLOSE
        another = open_backend(n_ctx=32, n_seq=2)
        another.restore(1, blob)
        assert distance(feed(another, 1, tokens[20:], 20), expected) < CLOSE

    @pytest.mark.parametrize("cuts", [[0, 16, 20], [0, 1, 2, 20], [0, 7, 20]], ids=str)
    def test_parts_are_saved_and_restored_one_by_one(self, backend: Backend, tokens: Tokens, cuts: list[int]) -> None:
        feed(backend, 0, tokens[:20])
        parts = [backend.save(0, start, end) for start, end in itertools.pairwise(cuts)]
        expected = feed(backend, 0, tokens[20:], 20)
        # The first part is shared instead: what follows must not change its source.
        backend.share(0, 1, cuts[1])
        for part in parts[1:]:
            backend.restore(1, part)
        assert backend.length(1) == 20
        assert distance(feed(backend, 1, tokens[20:], 20), expected) < CLOSE
        for part in parts:
            backend.restore(2, part)
        assert distance(feed(backend, 2, tokens[20:], 20), expected) < CLOSE
        backend.truncate(0, 20)
        assert distance(feed(backend, 0, tokens[20:], 20), expected) < CLOSE

    @pytest.mark.parametrize(("start", "end"), [(0, 0), (5, 5), (6, 5), (-1, 5), (5, 21), (20, 21)])
    def test_parts_that_a_sequence_does_not_have(self, backend: Backend, tokens: Tokens, start: int, end: int) -> None:
        feed(backend, 0, tokens[:20])
        with pytest.raises(QuantlabError, match="holds 20"):
            backend.save(0, start, end)
        self.still_works(backend, tokens)

    def test_a_part_restored_elsewhere_than_it_was_is_refused(self, backend: Backend, tokens: Tokens) -> None:
        feed(backend, 0, tokens[:20])
        part = backend.save(0, 8, 16)
        for held in (0, 7, 9):
            if held:
                backend.share(0, 1, held)
            with pytest.raises(QuantlabError, match=f"holds {held} tokens, the saved ones begin at 8"):
                backend.restore(1, part)
            assert backend.length(1) == held
            backend.release(1)
        self.still_works(backend, tokens)

    def test_sharing_takes_no_more_kv(self, backend: Backend, tokens: Tokens) -> None:
        assert backend.kv_bytes() == 0
        feed(backend, 0, tokens[:16])
        whole = backend.kv_bytes()
        assert whole >= 16 * backend.describe().kv_bytes_per_token
        backend.share(0, 1, 16)
        # Who holds a token may be noted, in 4 bytes.
        assert whole <= backend.kv_bytes() <= whole + 16 * 4
        feed(backend, 1, tokens[16:17], 16)
        assert whole < backend.kv_bytes() < 2 * whole + 16 * backend.describe().kv_bytes_per_token
        backend.release(0)
        backend.release(1)
        assert backend.kv_bytes() <= 0.1 * whole

    def test_identity_tells_models_apart(self, open_backend: Open, backend: Backend, open_other: Open) -> None:
        assert len(backend.identity()) == 32
        assert open_backend(n_ctx=32, n_seq=2).identity() == backend.identity() != open_other(n_ctx=64).identity()

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda blob: b"",
            lambda blob: b"not a sequence at all" * 10,
            lambda blob: blob[:-1],
            lambda blob: blob[: len(blob) // 2],
            lambda blob: blob + b"\0",
            lambda blob: bytes([blob[0] ^ 1]) + blob[1:],
            lambda blob: blob[:40] + bytes([blob[40] ^ 1]) + blob[41:],
            lambda blob: blob[:-200] + bytes([blob[-200] ^ 1]) + blob[-199:],
        ],
        ids=["empty", "foreign", "cut", "half", "longer", "first byte", "byte 40", "byte -200"],
    )
    def test_a_damaged_save_is_refused(self, backend: Backend, tokens: Tokens, spoil: Callable[[bytes], bytes]) -> None:
        feed(backend, 0, tokens[:20])
        blob = backend.save(0)
        with pytest.raises(QuantlabError):
            backend.restore(1, spoil(blob))
        assert backend.length(1) == 0
        self.still_works(backend, tokens)
        backend.restore(1, blob)
        assert backend.length(1) == 20

    def test_a_save_of_other_weights_is_refused(self, backend: Backend, open_other: Open, tokens: Tokens) -> None:
        other = open_other(n_ctx=64, n_seq=3)
        feed(other, 0, tokens[:20])
        with pytest.raises(QuantlabError, match="another model"):
            backend.restore(1, other.save(0))
        feed(backend, 0, tokens[:20])
        self.still_works(backend, tokens)

    def test_a_save_longer_than_the_context_is_refused(
        self, backend: Backend, open_backend: Open, tokens: Tokens
    ) -> None:
        feed(backend, 0, tokens)
        small = open_backend(n_ctx=len(tokens) - 1, n_seq=1)
        with pytest.raises(QuantlabError, match="does not fit"):
            small.restore(0, backend.save(0))
        assert small.length(0) == 0

    # misuse

    def still_works(self, backend: Backend, tokens: Tokens) -> None:
        """Sequence 0 holds tokens[:20]: it goes on as if nothing had happened."""
        assert backend.length(0) == 20
        got = feed(backend, 0, tokens[20:], 20)
        backend.release(2)
        assert distance(got, feed(backend, 2, tokens)) < CLOSE
        backend.release(2)
        backend.truncate(0, 20)

    @pytest.mark.parametrize(
        "wrong",
        [
            batch([5], [19], [0], [True]),
            batch([5], [21], [0], [True]),
            batch([5], [-1], [0], [True]),
            batch([5, 6], [20, 20], [0, 0], [True, True]),
            batch([5, 6], [21, 20], [0, 0], [True, True]),
            batch([5], [1], [1], [True]),
            batch([5], [0], [3], [True]),
            batch([5], [0], [-1], [True]),
            batch([5], [0], [2**31 - 1], [True]),
            batch([2**31 - 1], [20], [0], [True]),
            batch([-1], [20], [0], [True]),
            batch([5, -7], [20, 21], [0, 0], [True, True]),
            batch([], [], [], []),
            batch([5, 6], [20], [0], [True]),
            batch([5], [20, 21], [0], [True]),
            batch([5], [20], [0, 0], [True]),
            batch([5], [20], [0], [True, False]),
            batch([5] * 45, range(20, 65), [0] * 45, [False] * 45),
            batch([5] * 49, range(49), [1] * 49, [False] * 49),
            batch([5, 5], [20, 1], [0, 1], [True, True]),
        ],
        ids=[
            "position behind", "position ahead", "position negative", "position twice", "positions reversed",
            "empty sequence at 1", "sequence 3", "sequence -1", "sequence huge", "token huge", "token negative",
            "second token negative", "empty", "one position", "two positions", "two sequences", "two logits",
            "beyond n_ctx", "beyond n_batch", "one sequence right, one wrong",
        ],
    )  # fmt: skip
    def test_a_wrong_step_is_refused_and_changes_nothing(self, backend: Backend, tokens: Tokens, wrong: Batch) -> None:
        feed(backend, 0, tokens[:20])
        before = backend.counters()
        with pytest.raises(QuantlabError):
            backend.forward(wrong)
        assert backend.counters() == before
        assert [backend.length(seq) for seq in (0, 1, 2)] == [20, 0, 0]
        self.still_works(backend, tokens)

    def test_more_logits_than_it_was_opened_for_are_refused(self, open_backend: Open, tokens: Tokens) -> None:
        backend = open_backend(n_ctx=64, n_seq=3, n_batch=48, n_outputs=3)
        feed(backend, 0, tokens[:20])
        with pytest.raises(QuantlabError, match="logits"):
            backend.forward(Batch.of(0, tokens[20:24], 20, logits="all"))
        self.still_works(backend, tokens)

    @pytest.mark.parametrize("n", [-1, 21])
    def test_lengths_that_a_sequence_does_not_have(self, backend: Backend, tokens: Tokens, n: int) -> None:
        feed(backend, 0, tokens[:20])
        for wrong in (lambda: backend.truncate(0, n), lambda: backend.share(0, 1, n)):
            with pytest.raises(QuantlabError):
                wrong()
        assert backend.length(1) == 0
        self.still_works(backend, tokens)

    @pytest.mark.parametrize("seq", [-1, 3, 2**40])
    def test_sequences_that_do_not_exist(self, backend: Backend, tokens: Tokens, seq: int) -> None:
        feed(backend, 0, tokens[:20])
        blob = backend.save(0)
        calls: list[Callable[[], Any]] = [
            lambda: backend.length(seq),
            lambda: backend.truncate(seq, 0),
            lambda: backend.release(seq),
            lambda: backend.share(0, seq, 1),
            lambda: backend.share(seq, 1, 1),
            lambda: backend.save(seq),
            lambda: backend.restore(seq, blob),
        ]
        for call in calls:
            with pytest.raises(QuantlabError):
                call()
        self.still_works(backend, tokens)

    def test_a_sequence_in_use_takes_no_other(self, backend: Backend, tokens: Tokens) -> None:
        feed(backend, 0, tokens[:20])
        feed(backend, 1, tokens[:2])
        blob = backend.save(1)
        for wrong in (lambda: backend.share(1, 0, 2), lambda: backend.share(0, 0, 2), lambda: backend.restore(0, blob)):
            with pytest.raises(QuantlabError, match="holds"):
                wrong()
        self.still_works(backend, tokens)

    def test_an_empty_sequence_is_not_saved(self, backend: Backend) -> None:
        with pytest.raises(QuantlabError, match="empty"):
            backend.save(0)

    def test_sharing_is_refused_where_it_was_not_opened_for(self, open_backend: Open, tokens: Tokens) -> None:
        backend = open_backend(n_ctx=64, n_seq=3, n_batch=48, shared=False)
        feed(backend, 0, tokens[:20])
        with pytest.raises(QuantlabError, match="sharing"):
            backend.share(0, 1, 10)
        self.still_works(backend, tokens)

    @pytest.mark.parametrize(
        "capacity",
        [
            {"n_ctx": 0},
            {"n_seq": 0},
            {"n_batch": 0},
            {"n_ubatch": 0},
            {"n_ctx": -5},
            {"n_outputs": -1},
            {"n_seq": 100_000},
            {"n_ctx": 2**32 + 64},
        ],
        ids=str,
    )
    def test_impossible_capacities_are_refused(self, open_backend: Open, capacity: dict[str, int]) -> None:
        with pytest.raises(QuantlabError):
            open_backend(**capacity)

    @pytest.mark.parametrize(
        "capacity",
        [
            {"n_ctx": 30, "n_batch": 4096},
            {"n_ctx": 30, "n_batch": 1},
            {"n_ctx": 30, "n_batch": 7, "n_ubatch": 3},
            {"n_ctx": 30, "n_batch": 3, "n_ubatch": 512},
            {"n_ctx": 30, "n_seq": 5, "n_outputs": 1},
            {"n_ctx": 30, "n_seq": 5, "n_batch": 2},
            {"n_ctx": 30, "n_seq": 5, "n_batch": 2, "shared": False},
            {"n_ctx": 257, "n_seq": 3, "shared": False},
        ],
        ids=str,
    )
    def test_unusual_capacities_work(
        self, open_backend: Open, backend: Backend, tokens: Tokens, capacity: dict[str, int]
    ) -> None:
        odd = open_backend(**capacity)
        assert odd.describe().capacity == Capacity(**capacity)
        size = odd.describe().capacity.n_batch
        for at in range(0, len(tokens), size):
            row = feed(odd, 0, tokens[at : at + size], at)
        assert distance(row, feed(backend, 0, tokens)) < CLOSE

    # generate

    def test_generate_is_greedy_and_stamped(self, open_backend: Open, backend: Backend, tokens: Tokens) -> None:
        (generation,) = backend.generate([Request(tokens, 8)])
        row, expected = feed(backend, 1, tokens), []
        for i in range(8):
            # A tie within the tolerance may go either way; follow what was generated.
            assert row[0].max() - row[0, generation.tokens[i]] < CLOSE * row.std()
            expected.append(generation.tokens[i])
            row = feed(backend, 1, np.array(expected[-1:], np.int32), len(tokens) + i)
        assert generation.finish_reason == "length"
        assert len(generation.tokens) == len(generation.times_s) == 8
        assert generation.start_s < generation.times_s[0]
        assert all(np.diff(generation.times_s) > 0)
        # The last token is handed out, not fed back.
        assert backend.length(0) == len(tokens) + 7

    @pytest.mark.parametrize("n_batch", [48, 5, 3])
    def test_a_static_batch_hands_out_its_first_tokens_together(
        self, open_backend: Open, tokens: Tokens, n_batch: int
    ) -> None:
        backend = open_backend(n_ctx=64, n_seq=3, n_batch=n_batch, n_outputs=3, shared=False)
        requests = [Request(tokens[:9], 6), Request(tokens[9:14], 3), Request(tokens[14:15], 1)]
        generations = backend.generate(requests)
        assert [len(g.tokens) for g in generations] == [6, 3, 1]
        assert len({g.start_s for g in generations}) == len({g.times_s[0] for g in generations}) == 1
        assert generations[0].times_s[:3] == generations[1].times_s
        for request, generation in zip(requests, generations, strict=True):
            backend.reset()
            row = feed_in_steps(backend, request.prompt, n_batch)
            assert row[0].max() - row[0, generation.tokens[0]] < CLOSE * row.std()

    @pytest.mark.parametrize(
        "requests",
        [
            lambda t: [],
            lambda t: [Request(t[:1], 1)] * 4,
            lambda t: [Request(t[:0], 1)],
            lambda t: [Request(t[:1], 0)],
            lambda t: [Request(t, 41)],
            lambda t: [Request(t[:1], 1), Request(t, 1000)],
            lambda t: [Request(np.array([-3], np.int32), 1)],
        ],
        ids=["none", "too many", "no prompt", "no token", "beyond n_ctx", "one of two beyond", "wrong token"],
    )
    def test_wrong_requests_are_refused(self, backend: Backend, tokens: Tokens, requests: Any) -> None:
        with pytest.raises(QuantlabError):
            backend.generate(requests(tokens))
        assert backend.length(0) == 0
        feed(backend, 0, tokens[:20])
        self.still_works(backend, tokens)

    def test_generate_wants_empty_sequences(self, backend: Backend, tokens: Tokens) -> None:
        feed(backend, 0, tokens[:20])
        with pytest.raises(QuantlabError, match="holds"):
            backend.generate([Request(tokens, 2)])
        self.still_works(backend, tokens)

    # text

    def test_text_survives_its_token_ids(self, backend: Backend) -> None:
        ids = backend.encode(MULTILINGUAL)
        assert ids.dtype == np.int32
        assert backend.decode(ids) == MULTILINGUAL
        # A tokenizer of SentencePiece may begin a text with a space of its own.
        pieces = b"".join(backend.piece_bytes(int(i)) for i in ids)
        assert pieces.removeprefix(b" ") == MULTILINGUAL.encode()
        assert len(backend.encode("")) == 0
        assert backend.decode([]) == ""

    def test_bos_is_added_when_asked_and_wanted(self, backend: Backend) -> None:
        loaded = backend.describe()
        plain, with_bos = backend.encode("abc").tolist(), backend.encode("abc", bos=True).tolist()
        assert with_bos == ([loaded.bos, *plain] if loaded.adds_bos else plain)

    def test_control_tokens_are_parsed_only_when_asked(self, backend: Backend) -> None:
        eos = min(backend.describe().eos)
        name = backend.decode([eos])
        assert backend.encode(f"a{name}b", special=True).tolist().count(eos) == 1
        written = backend.encode(f"a{name}b")
        assert eos not in written
        assert backend.decode(written) == f"a{name}b"
        assert backend.piece_bytes(eos) == b""

    @pytest.mark.parametrize("token", [-1, 2**31 - 1])
    def test_token_ids_outside_the_vocabulary(self, backend: Backend, token: int) -> None:
        for wrong in (lambda: backend.decode([5, token]), lambda: backend.piece_bytes(token)):
            with pytest.raises(QuantlabError, match="vocabulary"):
                wrong()

    # state

    def test_describe_is_consistent(self, backend: Backend) -> None:
        loaded = backend.describe()
        assert loaded.n_vocab == feed(backend, 0, np.array([5], np.int32)).shape[1]
        assert 0 < loaded.bytes_read_per_token <= loaded.weight_bytes
        assert loaded.kv_bytes_per_token > 0
        assert loaded.eos
        assert all(0 <= token < loaded.n_vocab for token in loaded.eos)
        assert sum(loaded.runtime.kernels.values()) > 0
        memory = backend.memory()
        assert 0 < memory.process <= memory.process_peak
        assert 0 <= memory.device_allocated <= memory.device_reserved_peak
        assert memory.device_allocated <= memory.device_peak

    def test_counters_count_and_reset_forgets(self, backend: Backend, tokens: Tokens) -> None:
        zero = backend.counters()
        assert set(zero.values()) == {0}
        expected = feed(backend, 0, tokens)
        feed(backend, 1, tokens[:2])
        backend.forward(Batch.of(1, tokens[2:5], 2, logits="all"))
        counted = backend.counters()
        assert (counted["steps"], counted["tokens"], counted["logits"]) == (3, len(tokens) + 5, 5)
        backend.reset()
        assert backend.counters() == zero
        assert [backend.length(seq) for seq in (0, 1, 2)] == [0, 0, 0]
        assert distance(feed(backend, 0, tokens), expected) < CLOSE

    def test_a_closed_backend_refuses_everything(self, backend: Backend, tokens: Tokens) -> None:
        feed(backend, 0, tokens)
        blob = backend.save(0)
        backend.close()
        backend.close()
        calls: list[Callable[[], Any]] = [
            lambda: backend.forward(Batch.of(1, tokens, 0, logits="last")),
            lambda: backend.encode("a"),
            lambda: backend.decode([5]),
            lambda: backend.piece_bytes(5),
            lambda: backend.length(0),
            lambda: backend.share(0, 1, 1),
            lambda: backend.truncate(0, 1),
            lambda: backend.release(0),
            lambda: backend.save(0),
            lambda: backend.restore(1, blob),
            lambda: backend.generate([Request(tokens, 2)]),
            backend.reset,
        ]
        for call in calls:
            with pytest.raises(QuantlabError, match="closed"):
                call()


def feed_in_steps(backend: Backend, tokens: Tokens, n: int) -> Logits:
    """Put tokens into sequence 0, `n` at a time; returns the last token's logits."""
    for at in range(0, len(tokens), n):
        row = feed(backend, 0, tokens[at : at + n], at)
    return row
