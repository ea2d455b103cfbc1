"""Prompts for vectors, and what becomes of the numbers."""

import math
from array import array

import pytest

from banyan.base.errors import RequestError
from banyan.requests.embeddings import prompts_of, shortened, sigmoid, softmax
from banyan.requests.sampling_params import Limits

LIMITS = Limits(context_length=64, vocab_size=99, max_sequences=8)


@pytest.mark.parametrize(
    ("value", "expected", "is_list"),
    [
        ("a", ["a"], False),
        (["a"], ["a"], True),
        ([1, 2], [[1, 2]], False),
        ([[1, 2], [3]], [[1, 2], [3]], True),
        (["a", [3]], ["a", [3]], True),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_a_list_of_either(value, expected, is_list):
    assert prompts_of(value, "input", LIMITS) == (expected, is_list)


def test_pairs_are_two_texts_where_they_are_welcome():
    assert prompts_of([["a", "b"], "c"], "text", LIMITS, with_pairs=True) == (
        [("a", "b"), "c"],
        True,
    )
    with pytest.raises(RequestError, match="input must be"):
        prompts_of([["a", "b"]], "input", LIMITS)


@pytest.mark.parametrize("value", [None, 3, "", [], [""], [None], [[]], [True], [["a", ""]], {}])
def test_anything_else_is_refused(value):
    with pytest.raises(RequestError, match="input"):
        prompts_of(value, "input", LIMITS, with_pairs=True)


def test_more_prompts_than_are_taken_are_refused_before_any_is_looked_at():
    with pytest.raises(RequestError, match="at most 8 prompts per request, got 9"):
        prompts_of([None] * 9, "input", LIMITS)


def test_a_shortened_vector_has_length_one():
    assert list(shortened(array("f", [3, 4, 12]), 2)) == pytest.approx([0.6, 0.8])
    assert list(shortened(array("f", [3, 4, 12]), None)) == [3, 4, 12]
    assert list(shortened(array("f", [0, 0, 1]), 2)) == [0, 0]


@pytest.mark.parametrize("dimensions", [0, -1, 4])
def test_more_dimensions_than_there_are_cannot_be_had(dimensions):
    with pytest.raises(RequestError, match=r"dimensions must be in \[1, 3\]"):
        shortened(array("f", [1, 2, 3]), dimensions)


def test_probabilities_bear_scores_of_any_size():
    assert softmax([1000.0, 1000.0, -1000.0]) == pytest.approx([0.5, 0.5, 0.0])
    assert sigmoid(0.0) == 0.5
    assert sigmoid(3.0) == pytest.approx(1 / (1 + math.exp(-3)))
    assert sigmoid(-40.0) == pytest.approx(math.exp(-40.0))
    assert sigmoid(-800.0) == 0.0 and sigmoid(800.0) == 1.0
