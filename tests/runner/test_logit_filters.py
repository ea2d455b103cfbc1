"""Filters of logits against their definitions, written out token by token."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from banyan.runner.logit_filters import filter_logits, is_typical, repetitions
from banyan.runner.sampler import LogitContext

LOGITS = torch.tensor([2.0, 1.5, 0.0, -1.0, -4.0, 1.9])


def filtered(
    logits: torch.Tensor = LOGITS,
    tokens: list[int] | None = None,
    temperature: float = 1.0,
    **params: object,
) -> torch.Tensor:
    said = np.array(tokens or [0], np.int32)
    context = LogitContext(said, 1, {"xtc_threshold": 0.1, **params}, 7, temperature)
    return filter_logits(logits.clone(), context)


def kept(logits: torch.Tensor) -> list[int]:
    return torch.nonzero(torch.isfinite(logits)).flatten().tolist()


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=24)


@given(TOKENS, st.sets(st.integers(0, 3), max_size=2))
def test_repetitions_are_those_that_a_slow_search_finds(
    said: list[int], breakers: set[int]
) -> None:
    found: dict[int, int] = {}
    for place in range(len(said) - 1):
        length = 0
        while length <= place and said[place - length] == said[-1 - length]:
            if said[-1 - length] in breakers:
                break
            length += 1
        if said[place] == said[-1]:
            found[place] = length
    followers, lengths = repetitions(np.array(said, np.int32), breakers)
    assert followers.tolist() == [said[place + 1] for place in found]
    assert lengths.tolist() == list(found.values())


def test_a_token_that_continues_a_repetition_loses_its_power() -> None:
    said = [1, 2, 3, 4, 1, 2, 3]
    result = filtered(tokens=said, dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=2)
    assert (LOGITS - result).tolist() == [0, 0, 0, 0, 0.5 * 2.0 ** (3 - 2), 0]
    assert torch.equal(filtered(tokens=said, dry_multiplier=0.5, dry_allowed_length=4), LOGITS)
    assert torch.equal(filtered(tokens=said, dry_multiplier=0.5, dry_breakers=[3]), LOGITS)
    assert torch.equal(filtered(tokens=said, dry_multiplier=0.5, dry_penalty_last_n=3), LOGITS)


def test_a_text_of_one_token_for_ever_costs_a_bounded_search_and_a_finite_penalty() -> None:
    result = filtered(tokens=[2] * 50_000, dry_multiplier=1e6, dry_base=1e6)
    assert LOGITS[2] - result[2] == 1e4


def test_sigma_keeps_logits_near_the_largest() -> None:
    deviation = float(np.std(LOGITS.numpy()))
    for n in (0.1, 0.5, 1.0, 3.0):
        wanted = [i for i, x in enumerate(LOGITS.tolist()) if x >= 2.0 - n * deviation]
        assert kept(filtered(top_n_sigma=n)) == wanted


@given(st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=12), st.floats(0.05, 0.99))
def test_typical_tokens_are_the_nearest_to_the_entropy(logits: list[float], share: float) -> None:
    p = torch.softmax(torch.tensor(logits, dtype=torch.float64), 0).tolist()
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    keep = is_typical(torch.tensor(logits, dtype=torch.float32), share).tolist()
    distance = [abs(-math.log(x) - entropy) if x > 0 else math.inf for x in p]
    inside = [d for d, k in zip(distance, keep, strict=True) if k]
    outside = [d for d, k in zip(distance, keep, strict=True) if not k]
    assert not outside or max(inside) <= min(outside) + 1e-9
    assert sum(x for x, k in zip(p, keep, strict=True) if k) >= share - 1e-9


def test_xtc_removes_the_top_choices_but_the_last_as_often_as_asked() -> None:
    assert kept(filtered(xtc_probability=1.0)) == [1, 2, 3, 4]  # 0, 1 and 5 are above 0.1
    assert torch.equal(filtered(xtc_probability=1.0, xtc_threshold=0.5), LOGITS)
    often = [len(kept(filtered(tokens=[0] * n, xtc_probability=0.25))) < 6 for n in range(1, 801)]
    assert 150 < sum(often) < 250
    again = [len(kept(filtered(tokens=[0] * n, xtc_probability=0.25))) < 6 for n in range(1, 801)]
    assert often == again


def test_the_temperature_follows_the_entropy() -> None:
    even, certain = torch.zeros(8), torch.tensor([30.0] + [0.0] * 7)
    flat = filtered(torch.tensor([0.0, 1e-4] * 4), dynatemp_range=0.5)
    assert flat.max() == pytest.approx(1e-4 / 1.5, rel=1e-3)
    assert torch.equal(filtered(even, dynatemp_range=0.5), even)
    assert filtered(certain, dynatemp_range=0.5)[0] == pytest.approx(60.0, rel=1e-3)
    assert filtered(certain, dynatemp_range=1.0)[0] == pytest.approx(30e3, rel=1e-3)
    assert torch.equal(filtered(certain, temperature=0.0, dynatemp_range=0.5), certain)


@given(st.floats(0.0, 1e6), st.floats(1e-6, 1e6), st.floats(0.0, 1e6))
def test_no_temperature_changes_which_token_is_the_likeliest(
    temperature: float, reach: float, exponent: float
) -> None:
    numbers = {"dynatemp_range": reach, "dynatemp_exponent": exponent}
    result = filtered(temperature=temperature, **numbers)
    assert not result.isnan().any() and result[0] == result.max()
