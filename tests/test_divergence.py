from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import rel_entr

from quantlab.core.errors import QuantlabError
from quantlab.evaluate.divergence import BLOCK_VALUES, Divergence, require_same_tokens, require_same_vocabulary
from tests.bigram import LETTERS, BigramBackend, log_softmax, random_table

NAMES = ("q4", "f16")


def oracle(parent: np.ndarray, model: np.ndarray) -> np.ndarray:
    """scipy's relative entropy of the two float64 distributions."""
    return rel_entr(np.exp(log_softmax(parent)), np.exp(log_softmax(model))).sum(axis=1)


@pytest.mark.parametrize("n_vocab", [2, 12, 1000, BLOCK_VALUES + 1])
def test_kld_is_the_relative_entropy(n_vocab):
    rng = np.random.default_rng(n_vocab)
    n = 5 if n_vocab > 1000 else 200
    parent = (rng.normal(size=(n, n_vocab)) * 4).astype(np.float32)
    model = parent + rng.normal(size=parent.shape).astype(np.float32) * 0.3
    kld, agree = Divergence(n_vocab)(parent, model)
    np.testing.assert_allclose(kld, oracle(parent, model), rtol=1e-9, atol=1e-14)
    tops = [[row.index(max(row)) for row in rows.tolist()] for rows in (parent, model)]
    assert agree.tolist() == [p == m for p, m in zip(*tops, strict=True)]


def test_small_divergences_are_exact():
    rng = np.random.default_rng(1)
    parent = (rng.normal(size=(20, 5000)) * 3).astype(np.float32)
    model = parent + rng.normal(size=parent.shape).astype(np.float32) * 1e-3
    expected = oracle(parent, model)
    assert expected.max() < 1e-5
    np.testing.assert_allclose(Divergence(5000)(parent, model)[0], expected, rtol=1e-6)


def test_two_tokens_by_hand():
    parent = np.log(np.array([[0.75, 0.25]], np.float32))
    model = np.log(np.array([[0.5, 0.5]], np.float32))
    kld, agree = Divergence(2)(parent, model)
    assert kld[0] == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-6)
    assert agree.tolist() == [True]


def test_it_is_the_parent_whose_probabilities_weigh():
    sharp, flat = np.array([[9.0, 0, 0]], np.float32), np.zeros((1, 3), np.float32)
    divergence = Divergence(3)
    assert divergence(sharp, flat)[0][0] == pytest.approx(oracle(sharp, flat)[0])
    assert divergence(flat, sharp)[0][0] == pytest.approx(oracle(flat, sharp)[0])
    assert divergence(sharp, flat)[0][0] < 1.1 < 4 < divergence(flat, sharp)[0][0]


def test_improbable_tokens_are_not_clipped():
    # llama-perplexity would lift the parent's logits to 16 nats below the top one.
    parent = np.array([[0.0, -40.0, -40.0]], np.float32)
    model = np.array([[0.0, -20.0, -20.0]], np.float32)
    assert Divergence(3)(parent, model)[0][0] == pytest.approx(oracle(parent, model)[0], rel=1e-6)


logits = hnp.arrays(np.float32, (3, 7), elements=st.floats(-80, 80, width=32))


@given(parent=logits, model=logits, shift=st.integers(-64, 64))
def test_kld_is_never_negative_and_knows_no_offset(parent, model, shift):
    divergence = Divergence(7)
    kld, _ = divergence(parent, model)
    assert (kld >= 0).all()
    np.testing.assert_allclose(kld, oracle(parent, model), rtol=1e-7, atol=1e-12)
    same, agree = divergence(parent, parent)
    assert same.tolist() == [0, 0, 0]
    assert agree.all()
    whole = np.rint(model)
    np.testing.assert_allclose(
        divergence(parent, whole + np.float32(shift))[0], divergence(parent, whole)[0], atol=1e-12
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_gives_a_divergence_that_is_not(bad):
    parent = np.zeros((3, 4), np.float32)
    model = parent.copy()
    model[1, 2] = bad
    assert np.isfinite(Divergence(4)(parent, model)[0]).tolist() == [True, False, True]
    assert np.isfinite(Divergence(4)(model, parent)[0]).tolist() == [True, False, True]


def test_vocabularies_of_two_sizes_are_refused_with_both():
    with pytest.raises(QuantlabError, match="`q4` has a vocabulary of 12 tokens, `f16` of 14") as caught:
        require_same_vocabulary(BigramBackend(random_table()), BigramBackend(random_table(n_vocab=14)), NAMES)
    assert "--against" in caught.value.hint


def test_the_first_token_that_differs_is_named(monkeypatch):
    ours, theirs = BigramBackend(random_table()), BigramBackend(random_table())
    require_same_vocabulary(ours, theirs, NAMES)
    monkeypatch.setattr(
        theirs, "piece_bytes", lambda t: LETTERS[t - 1].upper().encode() if 3 <= t <= 4 else ours.piece_bytes(t)
    )
    with pytest.raises(QuantlabError, match=r"token 3 is b'c' in `q4` and b'C' in `f16`"):
        require_same_vocabulary(ours, theirs, NAMES)


def test_control_tokens_are_compared_by_their_written_form(monkeypatch):
    ours, theirs = BigramBackend(random_table()), BigramBackend(random_table())
    monkeypatch.setattr(theirs, "decode", lambda tokens: "<bos>")
    with pytest.raises(QuantlabError, match=r"token 0 is b'<s>' in `q4` and b'<bos>' in `f16`"):
        require_same_vocabulary(ours, theirs, NAMES)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([1, 2, 3], [1, 9, 3], "token 1 of the text is 2 in `q4` and 9 in `f16`"),
        ([1, 2, 3], [0, 1, 2, 3], "token 0 of the text is 1 in `q4` and 0 in `f16`"),
        ([1, 2], [1, 2, 3], "token 2 of the text is missing in `q4` and 3 in `f16`"),
    ],
)
def test_texts_with_other_ids_are_refused(ours, theirs, said):
    with pytest.raises(QuantlabError, match=said):
        require_same_tokens(np.array(ours, np.int32), np.array(theirs, np.int32), NAMES)


def test_texts_with_the_same_ids_pass():
    require_same_tokens(np.array([1, 2], np.int32), np.array([1, 2], np.int32), NAMES)
